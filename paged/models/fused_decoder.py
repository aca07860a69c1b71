"""The decoder through fused kernels: the same weights, the same result, a third of the launches.

The plain decoder (`decoder.py`) is the specification; tests hold this one to it. A layer of it, and the same
for few tokens, where all that lies between the products rides along with them (`products.py`):

    QKV product (library)                  qkv_product
    rotate_and_store                       -
    attention                              attention
    output product (library)               product, with residual and half a norm
    add_rms_norm                           -
    gate and up product (library)          product, with the other half and SiLU
    silu_mul                               -
    down product (library)                 product, with residual and half a norm
    add_rms_norm                           -
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from paged.fused import add_rms_norm, rotate_and_store, rotation_table, silu_mul
from paged.kv_cache import PagedKVCache
from paged.models.decoder import Decoder
from paged.products import product, qkv_product

Attend = Callable[[int, torch.Tensor], torch.Tensor]        # (layer, q) -> out; K and V are in the cache already

NARROW = 128
"""Tokens up to which our products are faster than the library's and what lies between, measured on an H200."""


class FusedDecoder:
    """Runs a Decoder's weights over a paged cache.

    Args:
        decoder: the model; its weights are used in place.
        kv: the cache that K and V are written to.
        max_positions: positions that the rotary table covers.
        narrow: up to so many tokens go through `products.py` rather than through the library's products.
    """

    def __init__(self, decoder: Decoder, kv: PagedKVCache, max_positions: int, narrow: int = NARROW):
        self.decoder, self.kv, self.config = decoder, kv, decoder.config
        self.rotation = rotation_table(decoder.frequencies, max_positions)
        self.narrow = 0 if self.config.attention_bias else narrow

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                 attend: Attend) -> torch.Tensor:
        """The residual stream after the last layer, before the final norm: [tokens, hidden].

        input_ids, positions, slots: [tokens], position and slot −1 for padding.
        """
        x = F.embedding(input_ids, self.decoder.embedding)
        if len(input_ids) <= self.narrow:
            return self._few_tokens(x, positions, slots, attend)
        eps, layers = self.config.rms_norm_eps, self.decoder.layers
        delta = None
        for layer in layers:
            normed = add_rms_norm(delta, x, layer.attention_norm, eps)
            q = self._rotate_and_store(layer, layer.qkv(normed), positions, slots)
            mixed = attend(layer.index, q)
            normed = add_rms_norm(layer.out(mixed.flatten(1)), x, layer.mlp_norm, eps)
            delta = layer.down(silu_mul(layer.gate_up(normed)))
        return x + delta

    def _few_tokens(self, x, positions, slots, attend) -> torch.Tensor:
        eps, layers = self.config.rms_norm_eps, self.decoder.layers
        normed, squares = add_rms_norm(None, x, layers[0].attention_norm, eps), None
        for layer in layers:
            q = qkv_product(normed, layer.qkv.weight, eps, squares, positions, slots, self.rotation, layer.q_norm,
                            layer.k_norm, self.kv.k[layer.index], self.kv.v[layer.index], self.config.num_heads)
            mixed = attend(layer.index, q).flatten(1)
            x, normed, squares = product(mixed, layer.out.weight, eps, residual=x, norm=layer.mlp_norm)
            hidden = product(normed, layer.gate_up.weight, eps, squares, silu=True)
            following = self.decoder.norm if layer is layers[-1] else layers[layer.index + 1].attention_norm
            x, normed, squares = product(hidden, layer.down.weight, eps, residual=x, norm=following)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocab] of the residual stream [rows, hidden], in the dtype of the weights."""
        weight, eps = self.decoder.head.weight, self.config.rms_norm_eps
        return F.linear(add_rms_norm(None, x, self.decoder.norm, eps), weight)

    def _rotate_and_store(self, layer, qkv, positions, slots) -> torch.Tensor:
        return rotate_and_store(qkv, positions, slots, self.rotation, layer.q_norm, layer.k_norm,
                                self.config.rms_norm_eps, self.kv.k[layer.index], self.kv.v[layer.index],
                                self.config.num_heads)
