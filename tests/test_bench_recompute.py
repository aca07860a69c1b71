"""Decoding with and without a cache: the same tokens, and as much work as chapter one says.

Protects the two loops that the chapter shows, times and compares, and the record that it plots.
"""

import pytest
import torch

from paged.bench.recompute import (
    ContiguousCache,
    causal_attention,
    decode_with_cache,
    decode_without_cache,
    step_seconds,
)
from paged.lab.notebook import record
from paged.memory import projections_with_cache, projections_without_cache
from paged.models.config import ModelConfig
from paged.models.decoder import random_decoder

CONFIG = ModelConfig("qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
                     num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True)


def tokens_through(decoder, steps):
    """The tokens that a loop produces, and how many the decoder saw for them."""
    seen = []
    hook = decoder.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    tokens = torch.cat(list(steps)).tolist()
    hook.remove()
    return tokens, sum(seen)


@pytest.mark.parametrize("context, steps", [(1, 1), (1, 6), (13, 9)])
def test_both_loops_give_the_same_tokens_for_the_counted_work(context, steps):
    decoder = random_decoder(CONFIG, seed=3)
    prompt = torch.randint(61, (context,), generator=torch.Generator().manual_seed(0))
    again, seen_again = tokens_through(decoder, decode_without_cache(decoder, prompt, steps))
    kept, seen_kept = tokens_through(decoder, decode_with_cache(decoder, prompt, steps))
    assert again == kept and len(kept) == steps
    assert 3 * seen_again == projections_without_cache(context, steps)
    # The prefill yields the first token: one step fewer than the published count, which ends a
    # token later.
    assert 3 * seen_kept == projections_with_cache(context, steps - 1)


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 1, 3, 1], [1, 8]])
def test_cached_chunks_equal_one_pass(chunks):
    """Whatever the cut, each query sees the tokens before it and no later one."""
    decoder = random_decoder(CONFIG, seed=3)
    token_ids = torch.arange(9)
    want = decoder(token_ids, torch.arange(9), lambda layer, q, k, v: causal_attention(q, k, v))
    cache, got = ContiguousCache(CONFIG, 9), []
    for chunk in token_ids.split(chunks):
        positions = torch.arange(cache.seq_len, cache.seq_len + len(chunk))
        got.append(decoder(chunk, positions, cache.attend))
    torch.testing.assert_close(torch.cat(got), want, atol=1e-5, rtol=0)


def test_every_step_is_timed():
    assert len(step_seconds(iter([torch.tensor([1])] * 3))) == 3


def test_the_record_holds_what_the_chapter_plots():
    gpu = record("recompute_h200")
    for loop in ("without", "with"):
        assert len(gpu["cold_s"][loop]) == len(gpu["warm_s"][loop]) == len(gpu["contexts"])
        assert len(gpu["curve"]["step_s"][loop]) == len(gpu["curve"]["contexts"])
    assert {"command", "date", "device", "driver", "dtype", "torch"} <= set(gpu)
