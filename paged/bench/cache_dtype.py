"""What a smaller cache costs in answers: `python -m paged bench cache_dtype`.

A model reads a text, once for every way to keep K and V. In a pass, what a layer would read from
its cache takes the place of its K and V, so every pass is the model over such a cache. Measured are
the error of the rows and of attention by layer, the model's loss and its likeliest tokens, and the
tokens that the engine itself generates. No GPU and no clock: figures of a CPU stand for any card,
but for rounding.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import paged.models.decoder as decoders
from paged.bench.common import check_output, machine
from paged.bench.recompute import causal_attention
from paged.checks import whole_number
from paged.fp8 import FP8, LARGEST, TINY
from paged.kv_cache import CacheSpec
from paged.llm import LLM
from paged.models.loader import Loaded, load
from paged.sampling import SamplingParams

AXES = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,), "token": (1, 2), "row": (2,)}
"""Dimensions of [tokens, num_kv_heads, head_dim] that share a scale; a row is a token's head. The
first three must know all tokens before the first is written."""
GROUP = 16
"""Channels of a group: a row has several, each with a scale."""
PASSES = ("float32", "bfloat16", "fp8 tensor", "fp8 row", "int8 tensor", "int8 row", "int4 row",
          "int4 group")
STRETCHED = ("fp8 tensor", "fp8 row", "fp8 group", "fp8 channel", "int8 row", "int8 channel")
QUESTIONS = ("What is the capital of France?", "Explain why the sky is blue.",
             "Write a short poem about the sea.", "How does a bicycle stay upright?",
             "Give me a recipe for pancakes.", "What did Isaac Newton discover?",
             "Tell me a story about a lighthouse keeper.", "List three uses of copper.")


def rounded(x: Tensor, kind: str, largest: Tensor) -> Tensor:
    """x as that kind keeps it, with scales that put `largest` at the end of its range."""
    if kind == "fp8":
        scale = (largest / LARGEST).clamp(min=TINY)
        return (x / scale).clamp(-LARGEST, LARGEST).to(FP8).float() * scale
    levels = {"int8": 127, "int4": 7}[kind]
    scale = (largest / levels).clamp(min=TINY)
    return (x / scale).round().clamp(-levels, levels) * scale


def kept(name: str, x: Tensor) -> Tensor:
    """What a cache called "float32", "bfloat16" or "kind axis" gives back of rows [tokens,
    num_kv_heads, head_dim] of one layer."""
    kind, _, axis = name.partition(" ")
    if not axis:
        return x.to(getattr(torch, kind)).float()
    if axis == "group":
        groups = x.unflatten(-1, (-1, math.gcd(GROUP, x.shape[-1])))
        return rounded(groups, kind, groups.abs().amax(-1, keepdim=True)).flatten(-2)
    return rounded(x, kind, x.abs().amax(AXES[axis], keepdim=True))


def bits(name: str, head_dim: int) -> float:
    """Bits a number takes, with its share of scales of 32 bits; those of a whole text count as
    nothing."""
    kind, _, axis = name.partition(" ")
    if not axis:
        return 8 * getattr(torch, kind).itemsize
    scales = {"row": 1, "group": head_dim // math.gcd(GROUP, head_dim)}.get(axis, 0)
    return {"fp8": 8, "int8": 8, "int4": 4}[kind] + 32 * scales / head_dim


@torch.inference_mode()
def read(loaded: Loaded, ids: list[int], name: str) -> tuple[list[float], list[int]]:
    """A pass over a text with that cache: the loss of each token but the first, in nats, and the
    token that the model thought likeliest in its place."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, kept(name, k), kept(name, v))

    tokens = torch.tensor(ids)
    hidden = loaded.decoder(tokens, torch.arange(len(ids)), attend)
    losses, best = [], []
    for rows, targets in zip(hidden[:-1].split(256), tokens[1:].split(256)):
        logits = loaded.decoder.logits(rows)
        losses += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
        best += logits.argmax(-1).tolist()
    return [round(loss, 4) for loss in losses], best


@torch.inference_mode()
def rows_of_a_text(loaded: Loaded, ids: list[int]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Q, K, V of every layer, and K before its rotary embedding; each [tokens, heads, head_dim]."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    before: list[Tensor] = []
    rotate = decoders.rotate

    def noting(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        before.append(x[:, loaded.config.num_heads:].clone())
        return rotate(x, cos, sin)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v, before[-1]))
        return causal_attention(q, k, v)

    decoders.rotate = noting
    try:
        loaded.decoder(torch.tensor(ids), torch.arange(len(ids)), attend)
    finally:
        decoders.rotate = rotate
    return seen


def error(got: Tensor, want: Tensor) -> float:
    """Relative error of the whole, by norm."""
    return round(((got - want).norm() / want.norm()).item(), 7)


def errors_by_layer(seen: list, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """{cache: {"k", "v", "attention": an error a layer}}, each layer given what it is given in
    float32."""
    result: dict = {name: {"k": [], "v": [], "attention": []} for name in names}
    for q, k, v, _ in tqdm(seen, desc="Layers", leave=False):
        want = causal_attention(q, k, v)
        for name, of in result.items():
            small_k, small_v = kept(name, k), kept(name, v)
            of["k"].append(error(small_k, k))
            of["v"].append(error(small_v, v))
            of["attention"].append(error(causal_attention(q, small_k, small_v), want))
    return result


def spread(x: Tensor) -> dict[str, float]:
    """How far the largest channel, token and head of [tokens, heads, head_dim] stand out: the
    largest of each over the median of them."""
    size = x.abs()
    parts = {
        "channel": size.amax(0).flatten(), "token": size.amax((1, 2)), "head": size.amax((0, 2))
    }
    return {name: (part.max() / part.median()).item() for name, part in parts.items()}


def first_rows(seen: tuple) -> dict[str, list[list[float]]]:
    """K before and after its rotary embedding, and V: the first 96 tokens of the first head."""
    _, k, v, before = seen
    return {
        name: [[round(x, 2) for x in row] for row in rows[:96, 0].tolist()]
        for name, rows in (("k_before_rotary", before), ("k", k), ("v", v))
    }


def stretched(seen: tuple, name: str, exponents: list[int]) -> list[float]:
    """Error of a layer's attention when one channel of K is 2^exponent times as large, and that of
    Q as much smaller: in real numbers the scores stay what they were."""
    q, k, v, _ = seen
    want, found = causal_attention(q, k, v), []
    for exponent in exponents:
        by = torch.ones(k.shape[-1])
        by[k.abs().amax((0, 1)).argmax()] = 2.0**exponent
        found.append(error(causal_attention(q / by, kept(name, k * by), v), want))
    return found


def generated(loaded: Loaded, kv_cache_dtype: str, max_tokens: int) -> list[list[int]]:
    """Greedy answers of the engine, over the cache of that name."""
    with LLM(loaded, kv_cache_dtype=kv_cache_dtype, max_model_len=256, use_tqdm=False) as llm:
        prompts: list = [[{"role": "user", "content": question}] for question in QUESTIONS]
        if llm.tokenizer is None:
            prompts = [[7, 5, 3 + n] for n in range(len(QUESTIONS))]
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]


def measure(loaded: Loaded, ids: list[int], window: int, windows: int, long: int, max_tokens: int,
            note: Callable[[str, object], None]) -> None:
    """Everything, each part handed to `note` as it is done."""
    head_dim = loaded.config.head_dim
    names = [f"{kind} {axis}" for kind in ("fp8", "int8", "int4") for axis in (*AXES, "group")]
    note("bits", {name: bits(name, head_dim) for name in (*PASSES, *names)})
    seen = rows_of_a_text(loaded, ids[:window // 2])
    note("spread", [{"k_before_rotary": spread(before), "k": spread(k), "v": spread(v)}
                    for _, k, v, before in seen])
    shown = len(seen) // 3
    note("shown", {"layer": shown, "head": 0} | first_rows(seen[shown]))
    note("errors", errors_by_layer(seen, ["bfloat16", *names]))
    exponents = list(range(0, 21, 2))
    moved = {name: stretched(seen[shown], name, exponents) for name in STRETCHED}
    note("stretched", {"exponents": exponents} | moved)
    del seen
    parts = [ids[first:first + window] for first in range(0, window * windows, window)]
    passes: dict = {}
    for name in tqdm(PASSES, desc="Passes", leave=False):
        read_parts = [read(loaded, part, name) for part in parts]
        passes[name] = {
            "loss": [loss for loss, _ in read_parts], "best": [best for _, best in read_parts]
        }
    note("passes", passes)
    if long:
        note(
            "long", {
                name: dict(zip(("loss", "best"), read(loaded, ids[:long], name)))
                for name in ("float32", "fp8 row")
            })
    note("generated", {dtype: generated(loaded, dtype, max_tokens) for dtype in ("auto", "fp8")})


def perplexity(losses: list[list[float]]) -> float:
    """exp of the mean loss of all tokens."""
    flat = [loss for part in losses for loss in part]
    return math.exp(sum(flat) / len(flat))


def summary(record: dict) -> str:
    """The record as a few lines."""
    plain = record["passes"]["float32"]
    lines = [f"{'cache':<14}{'bits':>6}{'perplexity':>12}{'same likeliest token':>22}"]
    for name, found in record["passes"].items():
        pairs = [(a, b) for mine, theirs in zip(found["best"], plain["best"])
                 for a, b in zip(mine, theirs)]
        same = sum(a == b for a, b in pairs) / len(pairs)
        lines.append(f"{name:<14}{record['bits'][name]:>6.1f}{perplexity(found['loss']):>12.3f}"
                     f"{same:>21.1%}")
    return "\n".join(lines)


def default_text() -> Path:
    """News from Nowhere, chapters 1 to 3: in a checkout, or the copy in the package."""
    package = Path(__file__).resolve().parents[1]
    folders = package.parent / "book" / "data", package / "data"
    return next(
        path for path in (folder / "news_from_nowhere.txt" for folder in folders) if path.exists())


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench cache_dtype", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default",
                        help="Hugging Face directory, Hub id, .gguf file, or 'default'")
    parser.add_argument("--text", type=Path,
                        help="a text file (three chapters of News from Nowhere)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a pass (%(default)s)")
    parser.add_argument("--windows", type=int, default=2, help="passes a cache (%(default)s)")
    parser.add_argument("--long", type=int, default=4096,
                        help="tokens of one long pass; 0 leaves it out (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64,
                        help="of each generated answer (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="also write the record, as JSON")
    args = parser.parse_args(argv)
    for name in ("window", "windows", "max_tokens"):
        whole_number("--" + name.replace("_", "-"), getattr(args, name), least=2)
    check_output(args.output)
    text = (args.text or default_text()).read_text(encoding="utf-8")
    loaded = load(args.model, torch.device("cpu"), "float32")
    if loaded.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, so it cannot read a text")
    ids = loaded.tokenizer.encode(text)
    wanted = max(args.window * args.windows, args.long)
    if len(ids) < wanted:
        raise ValueError(f"the text has {len(ids)} tokens and the passes read {wanted}: lower "
                         f"--windows, --window or --long")
    record = machine("python -m paged bench cache_dtype") | {
        "model": args.model,
        "text": "News from Nowhere, chapters 1 to 3" if args.text is None else args.text.name,
        "window": args.window, "windows": args.windows, "long": args.long, "block_bytes": {
            str(dtype)[6:]: CacheSpec(loaded.config.num_layers, 16, loaded.config.num_kv_heads,
                                      loaded.config.head_dim, dtype).block_bytes
            for dtype in (torch.float32, torch.bfloat16, FP8)
        }
    }

    def note(name: str, value: object) -> None:
        record[name] = value
        tqdm.write(f"{name} done")
        if args.output:  # after each part, so that nothing measured is lost
            args.output.write_text(json.dumps(record) + "\n", encoding="utf-8")

    measure(loaded, ids, args.window, args.windows, args.long, args.max_tokens, note)
    print(summary(record))
    return 0
