"""Decoding beside transformers' `generate`, in one run: `python -m paged bench peer`.

One request, then eight at once, with the shapes of the default model and random weights, in float32
on a CPU or in bfloat16 on a GPU. The two engines take turns, so that what else the machine does
falls on both; what counts is the ratio of the two times, not the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from paged.bench.common import check_output, machine
from paged.bench.workload import random_model, with_other_first_tokens
from paged.checks import whole_number
from paged.device import use_device
from paged.llm import LLM
from paged.models.loader.configs import from_huggingface
from paged.sampling import SamplingParams

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
    "max_position_embeddings": 8192
}


def main(argv: list[str] | None = None) -> int:
    """Measure in turns, print the ratios, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench peer", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto",
                        help="cpu, cuda, cuda:1 and so on, or auto (%(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    for name in ("prompt", "tokens", "rounds"):
        whole_number(f"--{name}", getattr(args, name), least=1)
    check_output(args.output)
    device = use_device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    from transformers import LlamaConfig, LlamaForCausalLM

    loaded = random_model(from_huggingface(SMOLLM2), device, dtype)
    loaded.decoder.pack()
    llm = LLM(loaded, max_model_len=args.prompt + args.tokens)
    config = LlamaConfig(**SMOLLM2, eos_token_id=None, bos_token_id=None)
    theirs: Any = LlamaForCausalLM(config)
    theirs.to(device, dtype).eval()
    prompts = [[(31 * i + j) % 10_000 for j in range(args.prompt)] for i in range(8)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.tokens)

    def ours(num_requests: int, round: int) -> None:
        llm.generate(with_other_first_tokens(prompts[:num_requests], 100 * round), params,
                     use_tqdm=False)

    def generate(num_requests: int, round: int) -> None:
        ids = torch.tensor(prompts[:num_requests], device=device)
        theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens,
                        min_new_tokens=args.tokens, do_sample=False, use_cache=True)

    jobs = {
        "paged, 1 request": (ours, 1), "transformers, 1 request": (generate, 1),
        "paged, 8 requests": (ours, 8)
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for round in tqdm(range(args.rounds + 1), desc="Rounds", dynamic_ncols=True):
        for name, (run, num_requests) in jobs.items():
            start = time.perf_counter()
            run(num_requests, round)
            if round:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    one, peer, eight = (statistics.median(samples) for samples in seconds.values())
    print(f"one request: {peer / one:.2f} times the speed of transformers' generate\n"
          f"eight at once: {8 * one / eight:.2f} times the tokens a second of one")
    if args.output:
        record = machine("python -m paged bench peer") | {
            "model": "SmolLM2-135M shapes, random weights", "dtype": str(dtype)[6:],
            "seconds": seconds, "threads": torch.get_num_threads(), "prompt_tokens": args.prompt,
            "generated_tokens": args.tokens
        }
        args.output.write_text(json.dumps(record), encoding="utf-8")
    return 0
