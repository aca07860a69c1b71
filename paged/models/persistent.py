"""All layers of a decode step of few requests as one kernel: which models it serves, how its work
is cut, and the launch of `kernels/persistent.py`."""

from __future__ import annotations

from functools import partial

import torch
import triton

from paged.device import device_properties
from paged.kernels.common import counters, raw
from paged.kernels.persistent import OUTPUTS, PHASES, WEIGHTS, layers_kernel
from paged.kv_cache import PagedKVCache
from paged.models.decoder import Decoder
from paged.seats import Prepared

MOST_TOKENS = 32
"""Requests of a step up to which one tile of tokens holds them all."""
WARPS = 8  # of a program


def best_split(tiles: int, width: int, programs: int, columns: int) -> int:
    """The split of 1, 2, 4, 8 with the shortest time: rounds of items, each a part of the width,
    and a little for every round and every part to be added up."""
    choices = [split for split in (1, 2, 4, 8) if split == 1 or width // split >= columns]
    return min(choices, key=lambda n: triton.cdiv(tiles * n, programs) / n * 1.05 + 0.01 * n)


def why_not(decoder: Decoder, attention: str, fused: bool) -> str | None:
    """None when one kernel can serve this model, else what speaks against it."""
    config = decoder.config
    if decoder.part is not None:
        return "a rank that holds a part of a model waits for the others between its products"
    if config.output_bias or config.mlp_bias:
        return "this model has biases behind attention or in the MLP, which its products do not add"
    if not fused or attention != "triton":
        return (f"it is made of the fused operations and the triton backend's attention; fused is "
                f"{fused} and the backend {attention!r}")
    if device_properties(decoder.embedding.device).capability < 8:
        return "what is on its way to a program takes more registers than a card before Ampere has"
    return None


class Layers:
    """The layers of a model for one kernel a step.

    Args:
        decoder: the model; the norms' weights are in its matrices, see `models.fused`.
        kv: the cache that K and V are written to and read from.
        rotation: [positions, head_dim], float32, of `elementwise.rotation_table`.
        programs: how many stay; None: one a multiprocessor.
    """

    def __init__(self, decoder: Decoder, kv: PagedKVCache, rotation: torch.Tensor,
                 programs: int | None = None):
        self.decoder, self.kv, self.rotation = decoder, kv, rotation
        layers = decoder.layers
        self.card = device_properties(kv.data.device)
        self.programs = self.card.processors if programs is None else programs
        self.together = kv.data.is_cuda
        self.base = base = layers[0].qkv.weight
        rows = []
        for layer in layers:
            weights = (layer.qkv.weight, layer.out.weight, layer.gate_up.weight, layer.down.weight,
                       layer.qkv.bias, layer.q_norm, layer.k_norm)
            rows.append([
                0 if weight is None else (weight.data_ptr() - base.data_ptr()) // 16
                for weight in weights
            ])
        self.places = torch.tensor(rows, dtype=torch.int64, device=kv.data.device)

    def takes(self, step: Prepared) -> bool:
        """Whether the kernel serves this decode step: its tokens are one tile."""
        return len(step.x) <= MOST_TOKENS

    def run(self, step: Prepared, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
            scale: float) -> torch.Tensor:
        """The residual stream behind the last layer, [requests, hidden], of a step with one token a
        request, at most MOST_TOKENS; written over step.x. The requests' K and V are in the cache.

        seq_lens, query_start_loc: as `attention.paged_attention` has them, on the device.
        """
        x, c, num_tokens = step.x, self.decoder.config, len(step.x)
        (k, gap), (v, _) = raw(self.kv.k[0]), raw(self.kv.v[0])
        tokens = 16 if num_tokens <= 16 else MOST_TOKENS
        half = max(16, triton.next_power_of_2(c.head_dim // 2))
        mixed, group = c.num_heads * c.head_dim, c.num_heads // c.num_kv_heads
        x_tiles, inner_tiles = (triton.cdiv(n, OUTPUTS)
                                for n in (c.hidden_size, c.intermediate_size))
        columns = 256 // x.element_size()
        # Of each product: tiles, rows of the weight a tile, width.
        products = [(c.num_heads + 2 * c.num_kv_heads, 2 * half, c.hidden_size),
                    (x_tiles, OUTPUTS, mixed), (inner_tiles, 2 * OUTPUTS, c.hidden_size),
                    (x_tiles, OUTPUTS, c.intermediate_size)]
        cut = [best_split(tiles, width, self.programs, columns) for tiles, _, width in products]
        # What parts of tiles leave, and what cut contexts leave.
        parts = [tiles * split * rows * tokens for (tiles, rows, _), split in zip(products, cut)]
        parts.append(2 * self.programs * group * (c.head_dim + 1))
        heads, padded_dim = triton.next_power_of_2(group), max(16,
                                                               triton.next_power_of_2(c.head_dim))
        one_stage = (2 * max(half, OUTPUTS) + tokens) * columns * x.element_size()
        stages = max(1, min(5, (self.card.shared_memory - 16 * 1024) // one_stage))
        new, counts = partial(torch.empty, device=x.device), counters(x.device)
        tensors = (x, step.squares, new(num_tokens, x_tiles, dtype=torch.float32),
                   new(num_tokens, mixed, dtype=x.dtype), new(num_tokens, mixed, dtype=x.dtype),
                   new(num_tokens, c.intermediate_size,
                       dtype=x.dtype), self.base, self.places, k, v, step.positions, step.slots,
                   self.rotation, step.tables, seq_lens, query_start_loc,
                   new(max(parts), dtype=torch.float32), counts, counts[-1:]
                   )  # the first count parts, the last the programs
        strides = step.tables.stride(0), self.kv.data.stride(1), *k.stride()[:2]
        constants = {
            "NUM_HEADS": c.num_heads, "NUM_KV_HEADS": c.num_kv_heads, "HEAD_DIM": c.head_dim,
            "HALF": half, "HIDDEN": c.hidden_size, "INNER": c.intermediate_size,
            "BLOCK_SIZE": self.kv.block_size, "NORM": c.qk_norm, "BIAS": c.attention_bias,
            "GAP": gap, "CONVERTS": self.card.converts_fp8, "TOKENS": tokens, "COLUMNS": columns,
            "QKV_SPLIT": cut[0], "OUT_SPLIT": cut[1], "GATE_UP_SPLIT": cut[2], "DOWN_SPLIT": cut[3],
            "TILE": 64, "HEADS": heads, "PADDED_GROUP": max(
                16, heads), "PADDED_DIM": padded_dim, "PADDED_REQUESTS": 64, "PIECES": max(
                    1, min(16, 4096 * WARPS // (heads * padded_dim))),
            "PARTS": triton.next_power_of_2(x_tiles), "PHASES": PHASES, "WEIGHTS": WEIGHTS,
            "OUTPUTS": OUTPUTS, "TOGETHER": self.together, "num_warps": WARPS, "num_stages": stages
        }
        phases = PHASES * len(self.decoder.layers)
        each = phases if self.together else 1  # phases a launch
        if self.together:
            constants["launch_cooperative_grid"] = True
        for phase in range(0, phases, each):
            layers_kernel[(self.programs,)](*tensors, c.rms_norm_eps, scale, num_tokens, phase,
                                            phase + each, *strides, **constants)
        return x
