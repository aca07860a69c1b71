"""The decoder through fused kernels: the same weights, the same result, a third of the launches.

The plain decoder (`decoder.py`) is the specification; tests hold this one to it. A layer of it, and the same
for a few tokens, where reading the weights is all that costs and norms and residuals ride along:

    QKV product                            narrow product (norm inside)
    rotate_and_store                       rotate_and_store
    attention                              attention
    output product                         narrow product (residual inside)
    add_rms_norm                           -
    gate and up product                    narrow product (norm and SiLU inside)
    silu_mul                               -
    down product                           narrow product (residual inside)
    add_rms_norm                           -
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from paged.fused import add_rms_norm, narrow_product, rotate_and_store, rotation_table, silu_mul
from paged.kv_cache import PagedKVCache
from paged.models.decoder import Decoder

Attend = Callable[[int, torch.Tensor], torch.Tensor]        # (layer, q) -> out; K and V are in the cache already


NARROW = 2
"""Tokens up to which `narrow_product` is faster than the library's products, measured on an H200."""


class FusedDecoder:
    """Runs a Decoder's weights over a paged cache.

    Args:
        decoder: the model; its weights are used in place.
        kv: the cache that K and V are written to.
        max_positions: positions that the rotary table covers.
        narrow: up to so many tokens go through `narrow_product` rather than through the library's products.
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
        eps = self.config.rms_norm_eps
        for layer in self.decoder.layers:
            qkv = narrow_product(x, layer.qkv.weight, norm=layer.attention_norm, eps=eps)
            mixed = attend(layer.index, self._rotate_and_store(layer, qkv, positions, slots))
            x = narrow_product(mixed.flatten(1), layer.out.weight, residual=x)
            hidden = narrow_product(x, layer.gate_up.weight, norm=layer.mlp_norm, eps=eps, silu=True)
            x = narrow_product(hidden, layer.down.weight, residual=x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocab] of the residual stream [rows, hidden], in the dtype of the weights."""
        weight, eps = self.decoder.head.weight, self.config.rms_norm_eps
        if len(x) <= min(self.narrow, 1):
            return narrow_product(x, weight, norm=self.decoder.norm, eps=eps)
        return F.linear(add_rms_norm(None, x, self.decoder.norm, eps), weight)

    def _rotate_and_store(self, layer, qkv, positions, slots) -> torch.Tensor:
        return rotate_and_store(qkv, positions, slots, self.rotation, layer.q_norm, layer.k_norm,
                                self.config.rms_norm_eps, self.kv.k[layer.index], self.kv.v[layer.index],
                                self.config.num_heads)
