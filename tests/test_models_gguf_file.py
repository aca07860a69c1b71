"""Protects the reading of GGUF files: names, permuted Q and K, quantized tensors, and the tokenizer
and end of sequence in the metadata. The files are written by the gguf package from models of
transformers."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from paged.models.loader import load
from paged.models.loader.gguf_file import GGUFFile
from paged.models.rotary import rotary_frequencies
from tests.small_models import TINY_LLAMA, TINY_MODELS, huggingface_model, logits_of

PROMPT = [3, 17, 92, 5, 41, 88]
NAMES = {  # written out again, so that a slip in the reader's table shows
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down"
}


def gguf_name(name):
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def interleave(weight, heads):
    """What a converter does to Q and K of a Llama: row i of both halves of a head, side by side."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(path, config, quantization=None, fields=(), leave_out=(), extra=None, scores=None):
    """Write a GGUF file of a random model, and return the model, with the values that the file can
    hold."""
    model = huggingface_model(config)
    llama = config.architecture in ("llama", "mistral")  # one architecture in such files
    writer = gguf.GGUFWriter(path, "llama" if llama else config.architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if scores is None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
    tokens = ["<|end|>", "<|turn|>", "Hi", *map(chr, range(33, 127))]
    tokens += [f"t{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["H i"])
    writer.add_eos_token_id(0)
    for key, value in fields:
        writer.add_key_value(key, *value)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values, kind = weight.numpy(), None
            if quantization is not None and values.ndim == 2 and values.shape[1] % 32 == 0:
                data = gguf.quants.quantize(values, quantization)
                weight.copy_(torch.tensor(gguf.quants.dequantize(data, quantization)))
                values, kind = weight.numpy(), quantization
            if llama and ("q_proj" in name or "k_proj" in name):
                values = interleave(values,
                                    config.num_heads if "q_proj" in name else config.num_kv_heads)
            if name in leave_out:
                continue
            if kind is not None:
                values = gguf.quants.quantize(values, kind)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@torch.no_grad()
def check_same(model, loaded, prompt=PROMPT):
    expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_of(loaded.decoder, prompt), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_file_computes_what_its_model_computes(name, tmp_path):
    model = write(tmp_path / "model.gguf", TINY_MODELS[name])
    loaded = load(tmp_path / "model.gguf")
    assert vars(loaded.config) == pytest.approx(vars(
        TINY_MODELS[name]))  # the file keeps float32 numbers
    assert loaded.eos_token_ids == {0} and loaded.num_weights == len(list(model.parameters()))
    check_same(model, loaded)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_quantized_tensors(kind, tmp_path):
    config = replace(TINY_LLAMA, hidden_size=96, intermediate_size=64, head_dim=16)
    model = write(tmp_path / "model.gguf", config, quantization=gguf.GGMLQuantizationType[kind])
    check_same(model, load(tmp_path / "model.gguf"))


def test_llama3_frequencies_come_as_a_tensor(tmp_path):
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64
    }
    config = replace(TINY_LLAMA, rope_scaling=scaling)
    divisors = rotary_frequencies(TINY_LLAMA)[0] / rotary_frequencies(config)[0]
    model = write(tmp_path / "model.gguf", config, extra={"rope_freqs.weight": divisors.numpy()})
    check_same(model, load(tmp_path / "model.gguf"))


STRING, FLOAT, INT = (gguf.GGUFValueType[kind] for kind in ("STRING", "FLOAT32", "UINT32"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling, written", [
    ({"rope_type": "linear", "factor": 4.0}, {"scaling.factor": (4.0, FLOAT)}),
    ({"rope_type": "linear", "factor": 4.0}, {"scale_linear": (4.0, FLOAT)}),
    ({"rope_type": "linear", "factor": 4.0
      }, {"scaling.type": ("linear", STRING), "scaling.factor": (4.0, FLOAT)}),
    (None, {"scaling.type": ("none", STRING), "scaling.factor": (4.0, FLOAT)}),
    (YARN, {
        "scaling.type": ("yarn", STRING), "scaling.factor": (4.0, FLOAT),
        "scaling.original_context_length": (64, INT)
    }),
    ({**YARN, "beta_fast": 8.0, "attention_factor": 1.5 * (1 + 0.1 * np.log(4))}, {
        "scaling.type": ("yarn", STRING), "scaling.factor": (4.0, FLOAT),
        "scaling.original_context_length": (64, INT), "scaling.yarn_beta_fast": (8.0, FLOAT),
        "scaling.attn_factor": (1.5, FLOAT)
    }),
], ids=str)
def test_rotary_scaling(scaling, written, tmp_path):
    config = replace(TINY_LLAMA, rope_scaling=scaling)
    model = write(tmp_path / "model.gguf", config,
                  fields=[(f"llama.rope.{key}", value) for key, value in written.items()])
    check_same(model, load(tmp_path / "model.gguf"), PROMPT * 20)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_biases_and_mistral(name, tmp_path):
    biased = name != "mistral"
    config = replace(TINY_MODELS["qwen3" if name == "qwen3" else "llama"], architecture=name,
                     attention_bias=biased, output_bias=biased, mlp_bias=name == "llama")
    model = write(tmp_path / "model.gguf", config)
    loaded = load(tmp_path / "model.gguf")
    assert loaded.config.output_bias == biased and loaded.config.mlp_bias == (name == "llama")
    check_same(model, loaded)


def test_an_unknown_key_of_the_architecture(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA, fields=[("llama.attention.scale", (0.1, FLOAT))])
    assert "llama.attention.scale to 0.1" in refused(tmp_path / "model.gguf")


@pytest.mark.parametrize("divisors", [np.ones(1), np.ones(5), np.zeros(6), -np.ones(6)], ids=str)
def test_divisors_that_cannot_be(divisors, tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA,
          extra={"rope_freqs.weight": divisors.astype(np.float32)})
    assert "must be 6 numbers above 0" in refused(tmp_path / "model.gguf")


def test_what_the_author_samples_with(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA, fields=[("general.sampling.temp", (0.5, FLOAT)),
                                                       ("general.sampling.top_k", (20, INT))])
    assert load(tmp_path / "model.gguf").generation_defaults == {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize("name", ["odd", "blk.attn_q.weight", "blk.x.attn_q.weight", "a.b.c.d.e"])
def test_tensors_of_other_names(name, tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA, extra={name: np.zeros(6, np.float32)})
    assert f"1 tensors too many for a llama model ({name})" in refused(tmp_path / "model.gguf")


def test_a_sentencepiece_tokenizer(tmp_path):
    scores = [-float(i) for i in range(TINY_LLAMA.vocab_size)]
    model = write(
        tmp_path / "model.gguf", TINY_LLAMA, scores=scores,
        fields=[("tokenizer.ggml.bos_token_id", (1, INT)),
                ("tokenizer.ggml.add_space_prefix", (False, gguf.GGUFValueType.BOOL))])
    loaded = load(tmp_path / "model.gguf")
    assert loaded.tokenizer.encode("Hi!Hi") == [1, 2, 3, 2]
    assert loaded.tokenizer.decode([1, 2, 3, 2]) == "Hi!Hi" and loaded.eos_token_ids == {0}
    check_same(model, loaded)


def test_an_upper_case_ending(tmp_path):
    model = write(tmp_path / "MODEL.GGUF", TINY_LLAMA)
    check_same(model, load(tmp_path / "MODEL.GGUF"))


def test_every_end_of_sequence_id(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA,
          fields=[("tokenizer.ggml.eot_token_id", (1, gguf.GGUFValueType.UINT32))])
    assert load(tmp_path / "model.gguf").eos_token_ids == {0, 1}


def test_the_tokenizer_of_a_file(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA)
    tokenizer = load(tmp_path / "model.gguf").tokenizer
    assert tokenizer.decode(tokenizer.encode("Hi<|turn|>12")) == "Hi12"


def refused(path):
    with pytest.raises(ValueError) as caught:
        load(path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def test_a_missing_tensor(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA, leave_out=["model.layers.2.mlp.up_proj.weight"])
    assert "lacks 1 of 30 tensors (model.layers.2.mlp.up_proj.weight)" in refused(
        tmp_path / "model.gguf")


def test_an_extra_tensor(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA,
          extra={"blk.0.attn_sinks.weight": np.zeros(6, np.float32)})
    assert "attn_sinks" in refused(tmp_path / "model.gguf")


def test_a_part_of_a_split_file(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA,
          fields=[("split.count", (3, gguf.GGUFValueType.UINT16))])
    assert "one of 3 parts" in refused(tmp_path / "model.gguf")
    write(tmp_path / "whole.gguf", TINY_LLAMA,
          fields=[("split.count", (1, gguf.GGUFValueType.UINT16))])
    assert "token_embd.weight" in GGUFFile(tmp_path / "whole.gguf").names


@pytest.mark.parametrize("size", [0, 3, 40, 3000, 60_000])
def test_a_file_cut_short(size, tmp_path):
    path = tmp_path / "model.gguf"
    write(path, TINY_LLAMA)
    path.write_bytes(path.read_bytes()[:size])
    assert "not a whole GGUF file" in refused(path)


def test_names_are_known_before_a_tensor_is_read(tmp_path):
    write(tmp_path / "model.gguf", TINY_LLAMA)
    assert "blk.0.attn_q.weight" in GGUFFile(tmp_path / "model.gguf").names
