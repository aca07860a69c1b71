"""The decoder through fused kernels: the same weights, the same result, a third of the launches.

The plain decoder (`decoder.py`) is the specification; tests hold this one to it. A layer of it, and the same for a
single token, where reading the weights is all that costs and norms and residuals ride along:

    QKV product                            matvec (norm inside)
    rotate_and_store                       rotate_and_store
    attention                              attention
    output product                         matvec (residual inside)
    add_rms_norm                           -
    gate and up product                    matvec (norm and SiLU inside)
    silu_mul                               -
    down product                           matvec (residual inside)
    add_rms_norm                           -
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from paged.fused import add_rms_norm, matvec, rotate_and_store, rotation_table, silu_mul
from paged.kv_cache import PagedKVCache
from paged.models.decoder import Decoder

Attend = Callable[[int, torch.Tensor], torch.Tensor]        # (layer, q) -> out; K and V are in the cache already


class FusedDecoder:
    """Runs a Decoder's weights over a paged cache.

    Args:
        decoder: the model; its weights are used in place.
        kv: the cache that K and V are written to.
        max_positions: positions that the rotary table covers.
        use_matvec: take a single token through `matvec` rather than through a matrix product.
    """

    def __init__(self, decoder: Decoder, kv: PagedKVCache, max_positions: int, use_matvec: bool = True):
        self.decoder, self.kv, self.config = decoder, kv, decoder.config
        self.rotation = rotation_table(decoder.frequencies, max_positions)
        self.use_matvec = use_matvec and not self.config.attention_bias
        device = kv.data.device
        self.early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
                 attend: Attend) -> torch.Tensor:
        """The residual stream after the last layer, before the final norm: [tokens, hidden].

        input_ids, positions, slots: [tokens], position and slot −1 for padding.
        """
        x = F.embedding(input_ids, self.decoder.embedding)
        if self.use_matvec and len(input_ids) == 1:
            return self._one_token(x, positions, slots, attend)
        eps, layers = self.config.rms_norm_eps, self.decoder.layers
        delta = None
        for layer in layers:
            normed = add_rms_norm(delta, x, layer.attention_norm, eps)
            q = self._rotate_and_store(layer, layer.qkv(normed), positions, slots)
            mixed = attend(layer.index, q)
            normed = add_rms_norm(layer.out(mixed.flatten(1)), x, layer.mlp_norm, eps)
            delta = layer.down(silu_mul(layer.gate_up(normed)))
        return x + delta

    def _one_token(self, x, positions, slots, attend) -> torch.Tensor:
        eps, early = self.config.rms_norm_eps, self.early
        for layer in self.decoder.layers:
            qkv = matvec(x, layer.qkv.weight, norm=layer.attention_norm, eps=eps, early=early)
            mixed = attend(layer.index, self._rotate_and_store(layer, qkv, positions, slots))
            x = matvec(mixed.flatten(1), layer.out.weight, residual=x, early=early)
            hidden = matvec(x, layer.gate_up.weight, norm=layer.mlp_norm, eps=eps, silu=True, early=early)
            x = matvec(hidden, layer.down.weight, residual=x, early=early)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocab] of the residual stream [rows, hidden], in the dtype of the weights."""
        weight, eps = self.decoder.head.weight, self.config.rms_norm_eps
        if self.use_matvec and len(x) == 1:
            return matvec(x, weight, norm=self.decoder.norm, eps=eps, early=self.early)
        return F.linear(add_rms_norm(None, x, self.decoder.norm, eps), weight)

    def _rotate_and_store(self, layer, qkv, positions, slots) -> torch.Tensor:
        return rotate_and_store(qkv, positions, slots, self.rotation, layer.q_norm, layer.k_norm,
                                self.config.rms_norm_eps, self.kv.k[layer.index], self.kv.v[layer.index],
                                self.config.num_heads)
