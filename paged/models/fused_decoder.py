"""The decoder through fused kernels: the same weights, the same result, a third of the launches.

The plain decoder (`decoder.py`) is the specification; tests hold this one to it. First the weight
of every RMSNorm that stands before a product goes into the product's matrix, once and for all; of
the norm, one factor a token is left:

    norm(x) @ W.T = (x × weight × scale) @ W.T = (x @ (weight × W).T) × scale

A layer then, and the same for few tokens, where all that lies between the products rides along
(`products.py`):

    QKV product (library)                        qkv_product
    rotate_and_store, with the scale             -
    attention                                    attention
    output product (library), onto x             product, with the residual
    gate and up product (library)                product, with SiLU and the scale
    silu_mul, with the scale                     -
    down product (library), onto x               product, with the residual
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from paged.kernels.fused import rotate_and_store, rotation_table, silu_mul
from paged.kernels.products import product, qkv_product
from paged.kv_cache import PagedKVCache
from paged.models.decoder import Decoder, rms_norm

Attend = Callable[[int, torch.Tensor],
                  torch.Tensor]  # (layer, q) -> out; K and V are in the cache already

NARROW = 128
"""Tokens up to which our products beat the library's with the kernels between them, measured on an
H200."""


class FusedDecoder:
    """Runs a Decoder's weights over a paged cache.

    Args:
        decoder: the model; its weights are used in place, and the norms' weights go into the
            matrices behind them. Weights must not be loaded into it again.
        kv: the cache that K and V are written to.
        max_positions: positions that the rotary table covers.
        narrow: up to so many tokens go through `products.py` rather than through the library's
            products.
    """

    def __init__(self, decoder: Decoder, kv: PagedKVCache, max_positions: int,
                 narrow: int = NARROW):
        self.decoder, self.kv, self.config, self.narrow = decoder, kv, decoder.config, narrow
        self.rotation = rotation_table(decoder.frequencies, max_positions)
        absorb_norms(decoder)
        # float16 ends at 65,504, which a product of numbers not yet scaled may pass: there the norm
        # stays in front.
        self.scale_late = decoder.embedding.dtype != torch.float16

    def __call__(self, x: torch.Tensor, squares: torch.Tensor, positions: torch.Tensor,
                 slots: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The residual stream after the last layer, before the final norm: [tokens, hidden].

        x, squares: embeddings of the tokens and the sums of their squares, as `fused.prepare`
            returns them; x is
        written to. positions, slots: [tokens], −1 for padding.
        """
        if len(x) <= self.narrow:
            return self._few_tokens(x, squares, positions, slots, attend)
        eps = self.config.rms_norm_eps
        for layer in self.decoder.layers:
            normed, scaled_by = self._normed(x)
            q = rotate_and_store(F.linear(normed, layer.qkv.weight), scaled_by, layer.qkv.bias,
                                 positions, slots, *self._heads(layer))
            x.addmm_(attend(layer.index, q).flatten(1), layer.out.weight.t())
            normed, scaled_by = self._normed(x)
            hidden = silu_mul(F.linear(normed, layer.gate_up.weight), scaled_by, eps)
            x.addmm_(hidden, layer.down.weight.t())
        return x

    def _few_tokens(self, x, squares, positions, slots, attend) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        for layer in self.decoder.layers:
            q = qkv_product(x, squares, layer.qkv.weight, layer.qkv.bias, positions, slots,
                            *self._heads(layer))
            x, squares = product(attend(layer.index, q).flatten(1), layer.out.weight, residual=x)
            hidden = product(x, layer.gate_up.weight, eps, squares, silu=True)
            x, squares = product(hidden, layer.down.weight, residual=x)
        return x

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores [rows, vocab] of the residual stream [rows, hidden], in the dtype of the
        weights."""
        normed = rms_norm(x, self.decoder.norm, self.config.rms_norm_eps)
        return torch.mm(normed, self.decoder.head.weight.t(), out=out)

    def _normed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the next product takes, and what its result is still to be scaled by the norm of."""
        return (x, x) if self.scale_late else (F.rms_norm(x, x.shape[-1:], None,
                                                          self.config.rms_norm_eps), None)

    def _heads(self, layer) -> tuple:
        """What Q, K and V go through on their way to attention and cache."""
        return (self.rotation, layer.q_norm, layer.k_norm, self.config.rms_norm_eps,
                self.kv.k[layer.index], self.kv.v[layer.index], self.config.num_heads)


@torch.no_grad()
def absorb_norms(decoder: Decoder) -> None:
    """Multiply the norms' weights into the matrices behind them; but for rounding, the decoder
    computes the same.

    The final norm stays: the matrix behind it may be the embedding too. Doing it twice changes
        nothing.
    """
    for layer in decoder.layers:
        for norm, matrix in ((layer.attention_norm, layer.qkv.weight), (layer.mlp_norm,
                                                                        layer.gate_up.weight)):
            matrix.mul_(norm)
            norm.fill_(1)
