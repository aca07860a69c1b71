"""Protects the decoder: its logits and greedy tokens are those of transformers, for each
architecture and each rotary scaling, and running it changes nothing it was given."""

from dataclasses import replace

import pytest
import torch

from paged.models.decoder import Decoder, random_decoder, rms_norm, rotate
from paged.models.rotary import rotary_frequencies
from tests.small_models import (
    TINY_LLAMA,
    TINY_MODELS,
    TINY_QWEN3,
    huggingface_model,
    logits_of,
    plain_attention,
)

PROMPT = [3, 17, 92, 5, 41, 88, 120, 7, 7, 150, 2]
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64
    },
}


def twin(config):
    """A transformers model and a decoder with its weights."""
    theirs = huggingface_model(config)
    ours = Decoder(config)
    state = theirs.state_dict()
    for name, place in ours.checkpoint_tensors().items():
        place.copy_(state[name])
    return theirs, ours


@torch.no_grad()
def their_logits(model, token_ids):
    return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_those_of_transformers(name, packed):
    theirs, ours = twin(TINY_MODELS[name])
    if packed:
        ours.pack()
    torch.testing.assert_close(logits_of(ours, PROMPT), their_logits(theirs, PROMPT), atol=1e-4,
                               rtol=0)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_tokens_are_those_of_transformers(name):
    theirs, ours = twin(TINY_MODELS[name])
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False,
                               pad_token_id=0)
    token_ids = list(PROMPT)
    for _ in range(20):
        token_ids.append(logits_of(ours, token_ids)[-1].argmax().item())
    assert token_ids == expected[0].tolist()
    assert len(set(token_ids[len(PROMPT):])) > 2  # a loop on one token would prove little


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_scaling_is_that_of_transformers(kind):
    config = replace(TINY_LLAMA, rope_scaling=SCALINGS[kind])
    theirs, ours = twin(config)
    long = (PROMPT * 20)[:200]
    torch.testing.assert_close(logits_of(ours, long), their_logits(theirs, long), atol=1e-4, rtol=0)
    unscaled = Decoder(TINY_LLAMA)
    assert not torch.equal(ours.frequencies, unscaled.frequencies)


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones():
    config = replace(TINY_LLAMA, head_dim=64, rope_scaling=SCALINGS["llama3"])
    ratio = rotary_frequencies(replace(config,
                                       rope_scaling=None))[0] / rotary_frequencies(config)[0]
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8)
    assert torch.all(ratio.diff() >= -1e-6)
    assert any(1.01 < value < 7.99 for value in ratio.tolist())


def test_tokens_of_several_requests_lie_side_by_side():
    """Positions, not rows, say where a token stands; attend says what it sees."""
    decoder = random_decoder(TINY_QWEN3, seed=1)
    first, second = PROMPT[:6], PROMPT[4:]
    cut = len(first)

    def attend(layer, q, k, v):
        return torch.cat([
            plain_attention(layer, q[:cut], k[:cut], v[:cut]),
            plain_attention(layer, q[cut:], k[cut:], v[cut:])
        ])

    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])
    together = decoder.logits(decoder(torch.tensor(first + second), positions, attend))
    torch.testing.assert_close(together,
                               torch.cat([logits_of(decoder, first),
                                          logits_of(decoder, second)]), atol=1e-5, rtol=0)


def test_attend_gets_heads_and_the_order_of_layers():
    decoder, seen = random_decoder(TINY_LLAMA), []

    def attend(layer, q, k, v):
        seen.append((layer, q.shape, k.shape, v.shape))
        return torch.zeros_like(q)

    hidden = decoder(torch.tensor([1, 2, 3, 4, 5]), torch.arange(5), attend)
    assert seen == [(layer, (5, 6, 12), (5, 2, 12), (5, 2, 12)) for layer in range(3)]
    assert hidden.shape == (5, 72) and decoder.logits(hidden).shape == (5, 211)


def test_no_tokens_at_all():
    decoder = random_decoder(TINY_LLAMA)
    none = torch.empty(0, dtype=torch.long)
    hidden = decoder(none, none, lambda layer, q, k, v: q)
    assert decoder.logits(hidden).shape == (0, TINY_LLAMA.vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_leave_their_input_alone(dtype):
    x = torch.randn(5, 4, 12).to(dtype)
    before = x.clone()
    cos, sin = Decoder(TINY_LLAMA).rotation(torch.arange(5))
    assert rms_norm(x, torch.ones(12, dtype=dtype), 1e-6).dtype == dtype
    assert rotate(x, cos, sin).dtype == dtype
    assert torch.equal(x, before)


def test_norm_is_computed_in_float32():
    x, weight = torch.full((1, 512), 300.0, dtype=torch.float16), torch.ones(
        512, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6),
                               weight[None])  # 300 squared overflows float16


def test_packing_changes_no_result():
    plain = Decoder(TINY_QWEN3)
    packed = random_decoder(TINY_QWEN3, seed=5)
    generator = torch.Generator().manual_seed(5)
    for name, place in plain.checkpoint_tensors().items():
        values = torch.randn(place.shape, generator=generator)
        place.copy_(1 + 0.1 * values if name.endswith("norm.weight") else values
                    * place.shape[-1]**-0.5)
    torch.testing.assert_close(logits_of(packed, PROMPT), logits_of(plain, PROMPT), atol=1e-4,
                               rtol=0)


def test_random_weights_follow_the_seed():
    one, same, other = (random_decoder(TINY_LLAMA, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(logits_of(one, PROMPT), logits_of(same, PROMPT))
    assert not torch.equal(logits_of(one, PROMPT), logits_of(other, PROMPT))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_bfloat16_stays_near_float32(name):
    theirs, ours = twin(TINY_MODELS[name])
    half = Decoder(TINY_MODELS[name], dtype=torch.bfloat16)
    state = theirs.state_dict()
    for tensor, place in half.checkpoint_tensors().items():
        place.copy_(state[tensor])
    expected = logits_of(ours, PROMPT)
    error = (logits_of(half, PROMPT) - expected).abs().max() / expected.abs().max()
    assert logits_of(half, PROMPT).dtype == torch.float32 and error < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_gpu_gives_what_the_cpu_gives(name):
    cpu, gpu = (random_decoder(TINY_MODELS[name], seed=2, device=device)
                for device in ("cpu", "cuda"))
    ids, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    with torch.no_grad():
        found = gpu.logits(gpu(ids.cuda(), positions.cuda(), plain_attention)).cpu()
    torch.testing.assert_close(found, cpu.logits(cpu(ids, positions, plain_attention)), atol=1e-4,
                               rtol=0)
