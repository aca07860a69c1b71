"""The products of a layer, ours against the library's, for models of many sizes and steps of many.

Everything of a layer but attention runs in a CUDA graph, over a few layers of random weights: QKV
with rotary embedding and the write to the cache, the output product, gate and up, down. Beside the
times stands the bound, reading the weights once, and how far the two results lie apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from tqdm import tqdm

from paged.bench.common import QWEN3_0_6B, check_output, machine
from paged.kv_cache import PagedKVCache
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder
from paged.models.fused import FusedModel
from paged.seats import Prepared

# hidden, inner, heads, KV heads, head_dim, norm of each head
SHAPES = {
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, True), "Qwen3-1.7B": (2048, 6144, 16, 8, 128, True),
    "Qwen3-4B": (2560, 9728, 32, 8, 128, True), "Qwen3-8B": (4096, 12288, 32, 8, 128, True),
    "Qwen3-32B": (5120, 25600, 64, 8, 128, True), "Llama-3.2-1B": (2048, 8192, 32, 8, 64, False),
    "Llama-3.2-3B": (3072, 8192, 24, 8, 128, False),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, False)
}
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


def decoder_of(name: str, num_layers: int, device: str) -> Decoder:
    """A few layers of this shape, with random weights and a small vocabulary."""
    hidden, inner, heads, kv_heads, head_dim, qk_norm = SHAPES[name]
    config = ModelConfig("qwen3", vocab_size=64, hidden_size=hidden, intermediate_size=inner,
                         num_layers=num_layers, num_heads=heads, num_kv_heads=kv_heads,
                         head_dim=head_dim, qk_norm=qk_norm, rope_theta=QWEN3_0_6B.rope_theta,
                         tie_word_embeddings=True)
    decoder = Decoder(config, device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for weight in decoder.parameters():
        weight.normal_(std=0.02, generator=generator)
    return decoder


@torch.inference_mode()
def samples(model: FusedModel, num_tokens: int, narrow: int,
            repetitions: int) -> tuple[list[float], torch.Tensor]:
    """Microseconds a layer of each repetition, and the residual stream that comes out."""
    model.narrow, config = narrow, model.config
    device = model.decoder.embedding.device
    generator = torch.Generator(device).manual_seed(1)
    start = torch.randn(num_tokens, config.hidden_size, device=device, dtype=torch.bfloat16,
                        generator=generator)
    place = torch.arange(num_tokens, device=device)
    squares = start.float().square().sum(1, keepdim=True)
    tables = torch.empty(0, 0, dtype=torch.int32, device=device)  # attention passes q on here

    def run() -> torch.Tensor:
        step = Prepared(start.clone(), squares, place.int(), place, tables)
        return model.decoder.run(step.x, model.operations(step, lambda layer, q: q))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    times = []
    for _ in range(repetitions + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / config.num_layers)
    return [round(time, 2) for time in times[3:]], out.float()


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write the record where --output says."""
    parser = argparse.ArgumentParser(prog="python -m paged bench products", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES),
                        help="shapes to measure (all)")
    parser.add_argument("--repetitions", type=int, default=20, help="of each time (%(default)s)")
    parser.add_argument("--output", type=Path, help="write the record, with raw samples, here")
    args = parser.parse_args(argv)
    check_output(args.output)
    if not torch.cuda.is_available():
        raise ValueError("bench products compares kernels of a GPU, and PyTorch sees none here")
    record = machine("python -m paged bench products") | {"unit": "us a layer", "rows": []}
    print(f"{'model':<14}{'tokens':>7}{'ours':>9}{'library':>9}{'of it':>7}{'apart':>9}")
    for name in tqdm(args.models, desc="Measuring", dynamic_ncols=True):
        decoder = decoder_of(name, 8, "cuda")
        kv = PagedKVCache(8, 32, 16, decoder.config.num_kv_heads, decoder.config.head_dim,
                          torch.bfloat16, "cuda")
        model = FusedModel(decoder, kv, 512)
        bytes_read = sum(w.nbytes for layer in decoder.layers for w in layer.parameters()) / 8
        for num_tokens in TOKENS:
            ours, mine = samples(model, num_tokens, num_tokens, args.repetitions)
            library, theirs = samples(model, num_tokens, 0, args.repetitions)
            apart = ((mine - theirs).norm() / theirs.norm()).item()
            record["rows"].append({
                "model": name, "tokens": num_tokens, "weight_bytes": bytes_read, "ours": ours,
                "library": library, "apart": apart
            })
            times = statistics.median(ours), statistics.median(library)
            tqdm.write(f"{name:<14}{num_tokens:>7}{times[0]:>9.1f}{times[1]:>9.1f}"
                       f"{times[0] / times[1]:>7.2f}{apart:>9.1e}")
        del decoder, model, kv
        torch.cuda.empty_cache()
    if args.output:
        args.output.write_text(json.dumps(record), encoding="utf-8")
    return 0
