"""What a decode step costs with and without a KV cache.

    python -m paged.bench.recompute [--output FILE]

Both loops run the package's decoder at the shapes of Qwen3-0.6B, on one request, and produce the
same tokens. They differ in nothing but which tokens go through the decoder, and in where its
attention finds K and V.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paged.bench.common import QWEN3_0_6B, machine
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder, random_decoder


def qwen3_shapes(num_layers: int) -> ModelConfig:
    """Qwen3-0.6B with fewer layers, and a small vocabulary: the head is not what is measured."""
    return replace(QWEN3_0_6B, num_layers=num_layers, vocab_size=1024)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Contiguous SDPA; q [n, num_heads, head_dim] are the last n of the tokens of k and v."""
    mask = None
    if 1 < len(q) < len(k):
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                         is_causal=q.shape[2] == k.shape[2], enable_gqa=True)
    return out[0].transpose(0, 1)


class ContiguousCache:
    """K and V of one request, for every layer in one reserved stretch of max_len tokens."""

    def __init__(self, config: ModelConfig, max_len: int, device="cpu", dtype=torch.float32):
        shape = (config.num_layers, max_len, config.num_kv_heads, config.head_dim)
        self.k, self.v = (torch.empty(shape, device=device, dtype=dtype) for _ in "kv")
        self.seq_len = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep K and V of the new tokens, then attend over all tokens so far."""
        start, end = self.seq_len, self.seq_len + len(k)
        self.k[layer, start:end], self.v[layer, start:end] = k, v
        if layer == len(self.k) - 1:
            self.seq_len = end
        return causal_attention(q, self.k[layer, :end], self.v[layer, :end])


def decode_without_cache(decoder: Decoder, prompt: Tensor, steps: int) -> Iterator[Tensor]:
    """The greedy token of each step; every step puts the whole sequence through the decoder."""
    token_ids = prompt
    for _ in range(steps):
        positions = torch.arange(len(token_ids), device=prompt.device)
        hidden = decoder(token_ids, positions, lambda layer, q, k, v: causal_attention(q, k, v))
        token = decoder.logits(hidden[-1:]).argmax(-1)
        token_ids = torch.cat((token_ids, token))
        yield token


def decode_with_cache(decoder: Decoder, prompt: Tensor, steps: int) -> Iterator[Tensor]:
    """The same tokens; after the prefill, every step puts one token through the decoder."""
    dtype = decoder.embedding.dtype
    cache = ContiguousCache(decoder.config, len(prompt) + steps, prompt.device, dtype)
    new = prompt
    for _ in range(steps):
        positions = torch.arange(cache.seq_len, cache.seq_len + len(new), device=prompt.device)
        hidden = decoder(new, positions, cache.attend)
        new = decoder.logits(hidden[-1:]).argmax(-1)
        yield new


def step_seconds(steps: Iterator[Tensor]) -> list[float]:
    """Seconds of each step, the GPU's work included."""
    seconds, start = [], time.perf_counter()
    for token in steps:
        token.item()  # waits for the device
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    return seconds


def measure() -> dict:
    """On a GPU in bf16: 20 steps in a fresh process, then warm; and one step over the context's
    length."""
    # cuDNN's attention prepares a plan for every new length, tens of milliseconds each: use another
    # kernel.
    torch.backends.cuda.enable_cudnn_sdp(False)
    loops = {"without": decode_without_cache, "with": decode_with_cache}
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}

    def run(decoder, loop, context, steps):
        prompt = torch.arange(context, device=place["device"]) % decoder.config.vocab_size
        return step_seconds(loops[loop](decoder, prompt,
                                        steps + 1))[1:]  # the first step is the prefill

    contexts = [50, 200, 500]
    decoder = random_decoder(qwen3_shapes(1), **place)
    cold = {loop: [sum(run(decoder, loop, n, 20)) for n in contexts] for loop in loops}
    warm = {
        loop: [[sum(run(decoder, loop, n, 20)) for _ in range(20)] for n in contexts]
        for loop in loops
    }

    lengths = [2**i for i in range(6, 16)]
    decoder = random_decoder(qwen3_shapes(28), **place)
    for _ in range(2):  # the first round warms up
        curve = {loop: [run(decoder, loop, n, 9) for n in lengths] for loop in loops}
    return {
        "contexts": contexts, "steps": 20, "cold_s": cold, "warm_s": warm,
        "curve": {"num_layers": 28, "contexts": lengths, "step_s": curve}
    }


def main() -> None:
    """Measure, and print or write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="JSON file to write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU and there is none here; the chapter itself times the CPU")
    record = machine("python -m paged.bench.recompute") | {
        "dtype": "bfloat16", "model": "Qwen3-0.6B shapes, random weights, vocabulary 1,024",
        **measure()
    }
    # A line for each entry: a change of the record stays readable in a diff.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    text = "{\n" + ",\n".join(lines) + "\n}"
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
