"""The same prompts through any installed engine: `python -m paged bench engines --engine vllm`.

One engine a call, since each takes the card for itself; each writes a record with raw samples,
versions, flags and card. Weights are random on the shapes of a published model, so that nothing is
downloaded; --model takes a checkpoint instead. Every run has other first tokens, so that none finds
its prompts in a prefix cache, and the first run warms up.

Workloads:

    W1          256 prompts of 100 to 1,024 random tokens, 100 to 1,024 output tokens each
    W3          32 prompts of 16,000 tokens, 256 output tokens each
    W4          1,000 prompts of 2,000 common and 50 to 150 own tokens, 128 output tokens each
    W5          1,024 requests and seats, 100 to 300 tokens in and out
    W6t f p     the first 128 requests of W1: temperature alone, with top-p 0.95 and top-k 50, with
                top-p 0.95
    n8x512      8 prompts of 16 tokens at once, 512 output tokens each
    h8x200x64   8 prompts of 200 tokens at once, 64 output tokens each
    W1p ...     any of them with a p behind it that is not W6: the prompts alone, one token each
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from paged.bench.common import QWEN3_0_6B, VOCABULARY, check_output, machine
from paged.bench.products import SHAPES
from paged.bench.workload import random_model, with_other_first_tokens, workload
from paged.checks import whole_number
from paged.device import use_device
from paged.llm import LLM
from paged.models.config import ModelConfig
from paged.sampling import SamplingParams

NUM_LAYERS = {
    "Qwen3-0.6B": 28, "Qwen3-1.7B": 28, "Qwen3-4B": 36, "Qwen3-8B": 36, "Qwen3-32B": 64,
    "Llama-3.2-1B": 16, "Llama-3.2-3B": 28, "Llama-3.1-8B": 32
}
TIED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Llama-3.2-1B", "Llama-3.2-3B")


class Work(NamedTuple):
    """Prompts, and what each asks for: max_tokens, and the filters that all share."""

    prompts: list[list[int]]
    max_tokens: list[int]
    filters: dict[str, Any] = {}


def work(name: str) -> Work:
    """The workload of that name; ValueError, with what there is, for another."""
    if alone := re.fullmatch(r"(W[1345]|[nh].*)p", name):
        base = work(alone[1])
        return Work(base.prompts, [1] * len(base.prompts))
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randint(0, VOCABULARY) for _ in range(count)]

    if name == "W1" or name in ("W6t", "W6f", "W6p"):
        prompts, params = workload()
        most = 256 if name == "W1" else 128
        filters = {"W6f": {"top_p": 0.95, "top_k": 50}, "W6p": {"top_p": 0.95}}.get(name, {})
        return Work(prompts[:most], [p.max_tokens for p in params[:most]], filters)
    if name == "W3":
        return Work([tokens(16_000) for _ in range(32)], [256] * 32)
    if name == "W4":
        common = tokens(2000)
        return Work([common + tokens(rng.randint(50, 150)) for _ in range(1000)], [128] * 1000)
    if name == "W5":
        prompts = [tokens(rng.randint(100, 300)) for _ in range(1024)]
        return Work(prompts, [rng.randint(100, 300) for _ in prompts])
    if sizes := re.fullmatch(r"n(\d+)x(\d+)|h(\d+)x(\d+)x(\d+)", name):
        n, m, *longer = (int(size) if size else 0 for size in sizes.groups())
        n, length, m = longer if longer[0] else (n, 16, m)
        if min(n, length, m) > 0:
            return Work([tokens(length) for _ in range(n)], [m] * n)
    raise ValueError(f"there is no workload {name!r}: choose W1, W3, W4, W5, W6t, W6f, W6p, n8x512 "
                     "or h8x200x64 with any numbers, or one of them with a p behind it")


def shape(name: str, num_layers: int | None = None) -> ModelConfig:
    """A published model's shapes, as many layers as it has or as are asked for."""
    hidden, inner, heads, kv_heads, head_dim, qk_norm = SHAPES[name]
    return replace(QWEN3_0_6B, architecture="qwen3" if qk_norm else "llama", hidden_size=hidden,
                   intermediate_size=inner, num_layers=num_layers or NUM_LAYERS[name],
                   num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, qk_norm=qk_norm,
                   vocab_size=151_936 if qk_norm else 128_256, tie_word_embeddings=name in TIED)


def huggingface(config: ModelConfig, dtype: torch.dtype) -> dict:
    """config.json of these shapes, for the engines that read one."""
    family = {"qwen3": "Qwen3", "llama": "Llama"}[config.architecture]
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": config.architecture,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "hidden_act": "silu", "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings, "attention_bias": False,
        "torch_dtype": str(dtype)[6:], "bos_token_id": 0, "eos_token_id": 1
    }


class Setting(NamedTuple):
    """What every engine is given."""

    config: ModelConfig
    model: str | None  # a checkpoint, or None for random weights
    folder: str  # that checkpoint, or a folder with a config.json alone
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


Generate = Callable[[Work], int]  # runs it, and says how many tokens came
Opened = tuple[Generate, dict]  # and the flags that were set


def _sizes(setting: Setting) -> dict:
    return {
        "max_model_len": setting.max_model_len, "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.max_num_batched_tokens
    }


def _paged(setting: Setting) -> Opened:
    model = setting.model or random_model(setting.config, setting.device, setting.dtype)
    sizes = _sizes(setting)
    llm = LLM(model, device=setting.device, use_tqdm=False, **sizes)

    def generate(work: Work) -> int:
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, **work.filters)
            for n in work.max_tokens
        ]
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, sizes


def _vllm(setting: Setting) -> Opened:
    vllm = importlib.import_module("vllm")

    flags = _sizes(setting) | {"dtype": str(setting.dtype)[6:], "skip_tokenizer_init": True}
    if setting.model is None:
        flags["load_format"] = "dummy"
    llm = vllm.LLM(setting.folder, **flags)

    def generate(work: Work) -> int:
        params = [
            vllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False,
                                **work.filters) for n in work.max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in work.prompts], params,
                               use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, flags


def _sglang(setting: Setting) -> Opened:
    sglang = importlib.import_module("sglang")

    flags = {
        "dtype": str(setting.dtype)[6:], "skip_tokenizer_init": True,
        "context_length": setting.max_model_len, "max_running_requests": setting.max_num_seqs,
        "chunked_prefill_size": setting.max_num_batched_tokens
    }
    if setting.model is None:
        flags["load_format"] = "dummy"
    engine = sglang.Engine(model_path=setting.folder, **flags)

    def generate(work: Work) -> int:
        params = [{"temperature": 0.6, "ignore_eos": True, "max_new_tokens": n} | work.filters
                  for n in work.max_tokens]
        outputs = engine.generate(input_ids=work.prompts, sampling_params=params)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    return generate, flags


def _nano_vllm(setting: Setting) -> Opened:
    nanovllm = importlib.import_module("nanovllm")

    if setting.model is None:
        raise ValueError("nano-vllm reads its weights from a checkpoint: name one with --model")
    flags = _sizes(setting)
    llm = nanovllm.LLM(setting.folder, **flags)

    def generate(work: Work) -> int:
        if work.filters:
            raise ValueError("nano-vllm has no top-p and no top-k")
        params = [
            nanovllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n)
            for n in work.max_tokens
        ]
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        return sum(len(output["token_ids"]) for output in outputs)

    return generate, flags


def _transformers(setting: Setting) -> Opened:
    import transformers

    if setting.model is None:
        config = transformers.AutoConfig.from_pretrained(setting.folder)
        config.eos_token_id = None
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(setting.folder,
                                                                  dtype=setting.dtype)
    model.to(setting.device).eval()
    flags = {"together": "prompts of one length, answers cut to each request's"}

    def generate(work: Work) -> int:
        alike: dict[tuple[int, int], list[list[int]]] = {}
        for prompt, n in zip(work.prompts, work.max_tokens):
            alike.setdefault((len(prompt), n), []).append(prompt)
        for (_, n), prompts in alike.items():
            ids = torch.tensor(prompts, device=setting.device)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n,
                           min_new_tokens=n, do_sample=True, temperature=0.6, pad_token_id=0,
                           **{"top_k": 0, **work.filters})
        return sum(work.max_tokens)

    return generate, flags


ENGINES: dict[str, tuple[str, Callable[[Setting], Opened]]] = {
    "paged": ("paged", _paged), "vllm": ("vllm", _vllm), "sglang": ("sglang", _sglang),
    "nano-vllm": ("nano-vllm", _nano_vllm), "transformers": ("transformers", _transformers)
}


def measure(generate: Generate, asked: Work, runs: int) -> dict:
    """Seconds and output tokens a second of each run after a warm-up."""
    seconds, rates = [], []
    for run in range(runs + 1):
        fresh = asked._replace(prompts=with_other_first_tokens(asked.prompts, 97 * run))
        start = time.perf_counter()
        count = generate(fresh)
        seconds.append(time.perf_counter() - start)
        if count != sum(asked.max_tokens):
            raise RuntimeError(f"{count} tokens came where {sum(asked.max_tokens)} were asked for: "
                               "the engine ended some answers early")
        rates.append(count / seconds[-1])
    return {
        "tokens_per_s": rates[1:], "seconds": seconds[1:], "warm_s": seconds[0], "input": sum(
            map(len, asked.prompts)), "output": sum(asked.max_tokens)
    }


def main(argv: list[str] | None = None) -> int:
    """Measure one engine, print a line a workload, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench engines", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="paged",
                        help="which; it must be installed (%(default)s)")
    parser.add_argument("--workloads", nargs="+", default=["n1x512", "n8x512", "n32x512", "W1"],
                        metavar="NAME", help="see above (%(default)s)")
    parser.add_argument("--shapes", choices=SHAPES, default="Qwen3-0.6B",
                        help="of which model (%(default)s)")
    parser.add_argument("--layers", type=int, help="fewer layers than it has")
    parser.add_argument("--model", help="a checkpoint's directory, instead of random weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (%(default)s)")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a step (%(default)s)")
    parser.add_argument("--seats", type=int, default=256,
                        help="requests at once; W5 wants 1024 (%(default)s)")
    parser.add_argument("--runs", type=int, default=2, help="timed runs (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    for name in ("budget", "seats", "runs"):
        whole_number(f"--{name}", getattr(args, name), least=1)
    if args.layers is not None:
        whole_number("--layers", args.layers, least=1)
    check_output(args.output)
    works = {name: work(name) for name in args.workloads}
    package, opened = ENGINES[args.engine]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{args.engine} is not installed: pip install {package}") from None
    device = use_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record = machine("python -m paged bench engines --engine " + args.engine) | {
        "engine": args.engine, "version": version, "dtype": str(dtype)[6:], "runs": {},
        "model": args.model or f"{args.shapes} shapes, random weights"
    }
    longest = max(len(p) + n for w in works.values() for p, n in zip(w.prompts, w.max_tokens))
    config = shape(args.shapes, args.layers)
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(huggingface(config, dtype))
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        setting = Setting(config, args.model, args.model or folder, device, dtype, longest,
                          args.seats, args.budget)
        start = time.perf_counter()
        generate, record["flags"] = opened(setting)
        record["start_up_s"] = time.perf_counter() - start
        for name, asked in tqdm(works.items(), desc=args.engine, dynamic_ncols=True):
            record["runs"][name] = measure(generate, asked, args.runs)
            rate = statistics.median(record["runs"][name]["tokens_per_s"])
            tqdm.write(f"{name:<12}{rate:,.0f} tokens/s")
            if args.output:  # after each part, so that nothing measured is lost
                args.output.write_text(json.dumps(record), encoding="utf-8")
    return 0
