"""All layers of a decode step in one kernel, held to the plain operations.

Protects the kernel's phases: same residual stream, same K and V in the same slots, whatever the
number of programs, and padding that touches nothing. Without a GPU each phase is a launch of its
own, so that the waiting between them is held on a card only.
"""

import random

import pytest
import torch
import torch.nn.functional as F

from paged import paged_attention
from paged.fp8 import FP8
from paged.kernels.elementwise import rotation_table
from paged.kv_cache import take
from paged.models.decoder import random_decoder
from paged.models.fused import absorb_norms
from paged.models.persistent import Layers, best_split
from paged.seats import Prepared
from tests.caches import nan_cache, one_step_apart
from tests.small_models import TINY_MODELS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def decode_steps(config, lengths, cache, seed):
    """A decoder, and twice the same cache and step: contexts of these lengths in blocks all over
    the cache, everything else in it NaN."""
    shuffle, block_size = random.Random(seed), 4
    blocks = shuffle.sample(range(40), 40)
    tables = [[blocks.pop() for _ in range(-(-length // block_size))] for length in lengths]
    caches = [
        nan_cache(config.num_layers, 40, block_size, config.num_kv_heads, config.head_dim, cache,
                  DEVICE) for _ in range(2)
    ]
    for table, length in zip(tables, lengths):
        slots = [table[i // block_size] * block_size + i % block_size for i in range(length - 1)]
        for layer in range(config.num_layers):
            k, v = torch.randn(2, len(slots), config.num_kv_heads, config.head_dim, device=DEVICE)
            for kv in caches:
                kv.write(layer, slots, k, v)
    last = [
        table[-1] * block_size + (length - 1) % block_size
        for table, length in zip(tables, lengths)
    ]
    return random_decoder(config, seed=seed, device=DEVICE), caches, tables, last


@pytest.mark.parametrize("name, lengths, programs, cache", [("llama", [1], 4, torch.float32),
                                                            ("qwen2", [70, 1, 9], 3, torch.float32),
                                                            ("qwen3", [5] * 17, 5, torch.float32),
                                                            ("qwen3", [33, 6], 12, FP8)])
def test_layers_equal_the_plain_operations(name, lengths, programs, cache):
    config = TINY_MODELS[name]
    decoder, caches, tables, slots = decode_steps(config, lengths, cache, seed=len(lengths))
    rows, scale = len(lengths), config.head_dim**-0.5
    positions = torch.tensor([length - 1 for length in lengths], device=DEVICE)
    ids = torch.randint(config.vocab_size, (rows,), device=DEVICE)

    def attend(layer, q, k, v):
        caches[0].write(layer, slots, k, v)
        return paged_attention(q, caches[0], layer, tables, lengths, range(rows + 1), scale)

    want = decoder.logits(decoder(ids, positions, attend))
    absorb_norms(decoder)
    x = F.embedding(F.pad(ids, (0, 1)), decoder.embedding)  # one row of padding behind the real

    def padded(values, value, dtype=torch.int32):
        return F.pad(torch.as_tensor(values, dtype=dtype, device=DEVICE), (0, 1), value=value)

    wide = torch.zeros(rows + 1, 40, dtype=torch.int32)
    for row, table in enumerate(tables):
        wide[row, :len(table)] = torch.tensor(table)
    step = Prepared(x,
                    x.square().sum(1, keepdim=True), padded(positions, -1),
                    padded(slots, -1, torch.int64), wide.to(DEVICE))
    rotation = rotation_table(decoder.frequencies, 128) * decoder.rotary_factor
    layers = Layers(decoder, caches[1], rotation, programs)
    x = layers.run(step, padded(lengths, 0), padded(range(rows + 1), rows), scale)
    logits = decoder.logits(F.rms_norm(x[:rows], x.shape[1:], decoder.norm, config.rms_norm_eps))
    rows = [
        torch.stack([take(part, torch.arange(40, device=DEVICE)) for part in (*kv.k, *kv.v)])
        for kv in caches
    ]
    if cache == FP8:  # a number that is rounded the other way moves what follows
        torch.testing.assert_close(logits, want, atol=0.05, rtol=0.05)
        one_step_apart(rows[1], rows[0])
    else:
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_a_split_fills_the_programs():
    assert best_split(132, 1024, 132, 128) == 1  # one round as it is
    assert best_split(32, 1024, 132, 128) == 4
    assert best_split(48, 1024, 132, 128) == 8  # 384 parts: three rounds of an eighth each
    assert best_split(16, 256, 132, 128) == 2  # a part is at least as wide as a load
    assert best_split(5, 64, 132, 128) == 1
