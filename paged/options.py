"""The options that commands share: a model, the sizes of its engine, and how to sample."""

from __future__ import annotations

import argparse
import sys
from typing import Any

NAMES = ("device", "dtype", "block_size", "num_blocks", "gpu_memory_utilization", "max_model_len",
         "max_num_seqs", "max_num_batched_tokens", "attention_backend", "enforce_eager",
         "preemption", "kv_cache_dtype", "tensor_parallel_size", "revision", "tokenizer")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of LLM, as options."""
    parser.add_argument(
        "--model", default="default",
        help="Hugging Face directory, Hub id, .gguf file, or 'default' (%(default)s)")
    parser.add_argument("--revision", metavar="NAME",
                        help="of a model on the Hub: a branch, a tag or a commit (the newest)")
    parser.add_argument("--tokenizer", metavar="MODEL",
                        help="another than the model's: a directory or Hub id that has one")
    parser.add_argument("--device", default="auto",
                        help="cpu, cuda, cuda:1 and so on, or auto (%(default)s)")
    parser.add_argument("--dtype", default="auto",
                        help="float32, bfloat16, float16 or auto (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (%(default)s)")
    parser.add_argument("--num-blocks", type=int,
                        help="blocks in the pool (as many as the memory allows)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
                        help="share of the card's memory that may be in use (%(default)s)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS",
        help="tokens of a request, prompt and output (what the model was trained for)")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="REQUESTS",
                        help="requests that run at once (%(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS",
                        help="tokens of one step (8192 on a GPU, 2048 on a CPU)")
    parser.add_argument("--attention-backend", default="auto", metavar="NAME",
                        help="auto, triton, flash, torch or reference (%(default)s)")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--preemption", choices=("recompute", "swap"), default="recompute",
                        help="what happens to a request that must give way (%(default)s)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE",
        help="of K and V in the cache: float32, bfloat16, float16, fp8 (half the bytes, scales "
        "included), or auto, the model's (%(default)s)")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="RANKS",
        help="GPUs that share the model, each with a part of its weights and of the "
        "cache; on a CPU, processes (%(default)s)")
    parser.add_argument("--quiet", action="store_true",
                        help="no progress bars, and no times of start-up")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of SamplingParams, as options."""
    parser.add_argument("--max-tokens", type=int, default=256,
                        help="tokens generated at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="likeliest tokens kept; 0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="probability kept (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What LLM is called with, beside the model."""
    return {name: getattr(args, name) for name in NAMES} | {"use_tqdm": not args.quiet}


def load(args: argparse.Namespace, trace=None):
    """The LLM that the options describe."""
    from paged.llm import LLM
    from paged.trace import NO_TRACE
    llm = LLM(args.model, **llm_arguments(args), trace=trace or NO_TRACE)
    if not args.quiet:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in llm.start_up.items())
        print(f"ready after {sum(llm.start_up.values()):.1f} s: {phases}", file=sys.stderr)
    return llm
