"""Protects every form that the configs of Llama, Qwen2, Qwen3 and Mistral allow: rotary scalings
inside and past the original length, biases, heads of their own size. Logits are those of
transformers, out of a directory that transformers saved."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged.models.config import ModelConfig
from paged.models.loader import load
from paged.models.loader.configs import from_huggingface
from paged.models.rotary import rotary_frequencies
from tests.small_models import TINY_LLAMA, logits_of

ORIGINAL = 64
SHORT, LONG = 40, 150  # tokens, inside and past the original length
SHAPE = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None,
    "bos_token_id": None, "max_position_embeddings": ORIGINAL
}
DIVISORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.2, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 9.0, 12.0]
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL
    },
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, other betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, its factor given": {**YARN, "attention_factor": 1.3},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, mscale alone": {**YARN, "mscale": 0.7},
    "yarn, zeros": {**YARN, "mscale": 0.7, "mscale_all_dim": 0, "beta_fast": 0},
    "yarn, betas that meet": {**YARN, "beta_fast": 32.0, "beta_slow": 10.5},
    "yarn, no original": {"rope_type": "yarn", "factor": 4.0},
}
KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}


def saved(directory, kind="llama", scaling=None, **more):
    """A model of transformers with random weights, biases too, in a directory."""
    import transformers

    more = {"sliding_window": None} | more if kind == "mistral" else more
    config = getattr(transformers, f"{KINDS[kind]}Config")(**SHAPE | more, rope_parameters=dict(
        scaling or {"rope_type": "default"}, rope_theta=10_000.0))
    model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * values if name.endswith("norm.weight") else 0.15 * values)
    model.save_pretrained(directory)
    return model


def check(loaded, model, length):
    tokens = [(7 * i * i + 3 * i) % 101 for i in range(length)]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(loaded.decoder, tokens), expected, atol=1e-4, rtol=0)
    assert loaded.config.max_position_embeddings >= length


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scalings_that_do_not_depend_on_the_length(tmp_path, scaling):
    positions = 256 if scaling in ("default", "llama3") else ORIGINAL
    model = saved(tmp_path, scaling=SCALINGS[scaling], max_position_embeddings=positions)
    loaded = load(tmp_path)
    assert loaded.config.max_position_embeddings == 256
    check(loaded, model, SHORT)
    check(loaded, model, LONG)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaling", ["yarn", "linear"])
def test_every_architecture_scales(tmp_path, kind, scaling):
    model = saved(tmp_path, kind, SCALINGS[scaling])
    check(load(tmp_path), model, LONG)


def test_dynamic_scaling_is_fixed_for_the_longest_request(tmp_path):
    """Plain up to the original length, and then that of a text of just this length."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = saved(tmp_path, scaling=scaling)
    loaded = load(tmp_path)
    assert loaded.config.max_position_embeddings == ORIGINAL
    check(loaded, model, SHORT)
    check(load(tmp_path, max_model_len=SHORT), model, SHORT)
    loaded = load(tmp_path, max_model_len=LONG)
    assert loaded.config.max_position_embeddings == LONG
    check(loaded, model, LONG)
    assert load(tmp_path, max_model_len=10_000).config.max_position_embeddings == 4 * ORIGINAL


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"attention_factor": 1.2}, {"factor": 1.0}],
                         ids=str)
def test_longrope_is_fixed_for_the_longest_request(tmp_path, more):
    scaling = {
        "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **DIVISORS, **more
    }
    model = saved(tmp_path, scaling=scaling, max_position_embeddings=256)
    loaded = load(tmp_path)
    assert loaded.config.max_position_embeddings == 256
    check(loaded, model, LONG)
    check(load(tmp_path, max_model_len=LONG), model, LONG)
    for length in (SHORT, ORIGINAL):
        loaded = load(tmp_path, max_model_len=ORIGINAL)
        assert loaded.config.max_position_embeddings == ORIGINAL
        check(loaded, model, length)


def test_other_scalings_leave_the_length_alone(tmp_path):
    saved(tmp_path, scaling=YARN)
    assert load(tmp_path, max_model_len=20).config.max_position_embeddings == 256


@pytest.mark.parametrize("max_model_len", [0, -1, 2.5, "20"])
def test_lengths_that_cannot_be(tmp_path, max_model_len):
    saved(tmp_path, scaling={"rope_type": "dynamic", "factor": 4.0})
    with pytest.raises(ValueError, match="max_model_len is"):
        load(tmp_path, max_model_len=max_model_len)


@pytest.mark.parametrize("kind, more", [
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 8}),
    ("llama", {"head_dim": None, "num_key_value_heads": None}),
    ("qwen2", {"head_dim": 20}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("mistral", {"head_dim": 20, "sliding_window": 4096}),
], ids=str)
def test_every_form_of_a_layer(tmp_path, kind, more):
    model = saved(tmp_path, kind, **more)
    loaded = load(tmp_path)
    check(loaded, model, SHORT)
    assert loaded.num_weights == len(list(model.parameters()))
    assert loaded.config.attention_bias == any(
        "q_proj.bias" in name for name, _ in model.named_parameters())


def test_a_missing_bias(tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="lacks 6 of 27 tensors .*gate_proj.bias"):
        load(tmp_path)


NUMBERS = st.floats(1.0, 64.0)


@given(kind=st.sampled_from(["linear", "dynamic", "yarn", "longrope", "llama3"]), factor=NUMBERS,
       original=st.sampled_from([16, 64, 4096, 8192]), head_dim=st.sampled_from([4, 16, 64, 128]),
       theta=st.sampled_from([1e4, 5e5, 1e6]), stretch=st.integers(
           1, 16), sharp=st.none() | st.floats(0.5, 2.0), betas=st.tuples(
               st.none() | NUMBERS,
               st.none() | NUMBERS), truncate=st.booleans())
def test_frequencies_are_those_of_transformers(kind, factor, original, head_dim, theta, stretch,
                                               sharp, betas, truncate):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    positions = original if kind == "dynamic" else original * stretch
    if kind in ("yarn", "longrope"):
        rope |= {"original_max_position_embeddings": original}
        rope |= {} if sharp is None else {"attention_factor": sharp}
    if kind == "yarn":
        fast, slow = betas
        rope |= {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
        if fast is not None and slow is not None and fast <= slow:
            return
    if kind == "longrope":
        rope |= {name: [1.0 + i for i in range(head_dim // 2)] for name in DIVISORS}
    if kind == "llama3":
        rope |= {
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original
        }
    shape = SHAPE | {
        "hidden_size": 4 * head_dim, "head_dim": head_dim, "max_position_embeddings": positions
    }
    theirs = LlamaConfig(**shape, rope_parameters=dict(rope))
    ours = from_huggingface({**shape, "model_type": "llama", "rope_parameters": rope})
    longest = original * stretch
    ours = replace(ours, max_position_embeddings=longest)
    frequencies, sharpening = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=longest)
    found, found_sharpening = rotary_frequencies(ours)
    torch.testing.assert_close(found, frequencies, rtol=1e-5, atol=0)
    assert found_sharpening == pytest.approx(sharpening)


def test_plain_rotation_is_the_default():
    frequencies, factor = rotary_frequencies(TINY_LLAMA)
    assert factor == 1 and frequencies[0] == 1
    assert frequencies.tolist() == pytest.approx([10_000**(-i / 6) for i in range(6)])


def test_a_config_made_by_hand_needs_only_what_its_type_uses():
    config = ModelConfig(
        "llama", 10, 8, 8, 1, 1, 1, 8,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16})
    assert rotary_frequencies(config)[1] == pytest.approx(1.0693, abs=1e-4)
