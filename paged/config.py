"""The sizes of an engine, and whether a request can ever be served within them."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass

from paged.checks import whole_number
from paged.sampling import BeamSearchParams, SamplingParams
from paged.slots import blocks_needed

MAX_TOKEN_ID = 2**63 - 1  # the prefix cache hashes them as 64-bit integers


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of an engine.

    Args:
        num_blocks, block_size: the pool, and the tokens a block.
        max_num_seqs: requests that hold blocks at once.
        max_num_batched_tokens: tokens computed in one step.
        max_model_len: tokens of a request, prompt and output together.
        enable_prefix_caching: share full blocks between requests with a common prefix.
        prefix_cache: how they are found: "hash" by chained block hashes, "radix" in a tree of token
            runs.
        preemption: "recompute" drops the blocks of a preempted request, "swap" moves them to host
            memory.
        num_host_blocks: blocks of host memory for "swap"; None takes as many as num_blocks.
        seed: for requests that bring no seed of their own.

    Raises ValueError for a size below 1 and for an unknown policy.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    enable_prefix_caching: bool = True
    prefix_cache: str = "hash"
    preemption: str = "recompute"
    num_host_blocks: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
                     "max_model_len", "num_host_blocks"):
            value = getattr(self, name)
            if value is not None or name != "num_host_blocks":
                object.__setattr__(self, name, whole_number(name, value, least=1))
        object.__setattr__(self, "seed", whole_number("seed", self.seed))
        if self.enable_prefix_caching not in (True, False):
            raise ValueError(
                f"enable_prefix_caching is {self.enable_prefix_caching!r}: it must be True or "
                f"False")
        for name, choices in (("prefix_cache", ("hash", "radix")), ("preemption", ("recompute",
                                                                                   "swap"))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: choose {' or '.join(choices)}")


@dataclass(frozen=True)
class Speedups:
    """What makes the GPU engine fast, each to be switched off on its own.

    Attributes:
        graphs: replay CUDA graphs, for every step of up to 16,384 tokens; of fused operations only.
        fused: fused operations instead of plain ones. None: on a GPU; True elsewhere runs them in
            Triton's interpreter.
        narrow_products: of the fused ones, for steps of few tokens, those whose products carry all
            that lies between them.
        run_ahead: launch a step before the tokens of the one before are read. None: on a GPU.
        persistent: all layers of a decode step of up to 32 requests in one kernel rather than five
            a layer. Off: no card has been seen to gain by it yet.
    """

    graphs: bool = True
    fused: bool | None = None
    narrow_products: bool = True
    run_ahead: bool | None = None
    persistent: bool = False


def checked_prompt(prompt_token_ids: Sequence[int], params: SamplingParams, config: EngineConfig,
                   vocab_size: int | None = None) -> list[int]:
    """The prompt as a list; ValueError, with the numbers and the way out, if it can never be
    served."""
    if isinstance(prompt_token_ids, str):
        raise ValueError(f"the engine takes token ids, not the text {prompt_token_ids[:20]!r}: "
                         f"use LLM.generate")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is {params!r}: it must be a SamplingParams")
    try:
        if isinstance(prompt_token_ids, (bytes, dict, Set)):  # integers in no order, or no ids
            raise TypeError
        prompt = list(map(operator.index, prompt_token_ids))[-(params.truncate_prompt_tokens or 0):]
    except TypeError:
        raise ValueError(
            f"the prompt is {prompt_token_ids!r}: it must be a list of token ids") from None
    if not prompt:
        raise ValueError("the prompt is empty: it needs at least one token")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0:
        raise ValueError(f"token id {lowest} is negative: token ids count from 0")
    if highest > MAX_TOKEN_ID:
        raise ValueError(f"token id {highest} is too large: token ids go up to {MAX_TOKEN_ID}")
    if vocab_size is not None and highest >= vocab_size:
        raise ValueError(f"token id {highest} is outside the vocabulary of {vocab_size} tokens")
    cached = len(prompt) + params.max_tokens - 1  # the last sampled token is never cached
    lengths = f"prompt of {len(prompt)} tokens and max_tokens={params.max_tokens}"
    needed, seats, way_out = blocks_needed(cached, config.block_size), params.n, "n"
    if isinstance(params, BeamSearchParams):  # beams wait for each other: all must fit at once
        seats, way_out = params.beam_width, "beam_width"
        needed *= seats
        lengths += f" in {seats} beams"
    if cached > config.max_model_len:
        limits = "max_model_len" if needed <= config.num_blocks else "max_model_len and num_blocks"
        raise ValueError(
            f"{lengths} need {cached} positions, max_model_len is {config.max_model_len}: "
            f"shorten the prompt, lower max_tokens or raise {limits}")
    if needed > config.num_blocks:
        raise ValueError(
            f"{lengths} need {needed} blocks of {config.block_size}, the pool has "
            f"{config.num_blocks}: raise num_blocks, shorten the prompt or lower max_tokens")
    if seats > config.max_num_seqs:
        raise ValueError(
            f"{way_out}={seats} needs as many seats, max_num_seqs is {config.max_num_seqs}: "
            f"raise it or lower {way_out}")
    return prompt
