"""The operations of a layer in fused kernels: the same weights, the same result, fewer launches.

First the weight of every RMSNorm that stands before a product goes into the product's matrix, once
and for all; of the norm, one factor a token is left:

    norm(x) @ W.T = (x × weight × scale) @ W.T = (x @ (weight × W).T) × scale

Then there are two sets. The library's products take any number of tokens, and small kernels do what
lies between them; for few tokens all of that rides along with products of our own:

                LibraryProducts                          OurProducts
    qkv         product, then rotate_and_store           qkv_product
    attend      attention                                attention
    output      product, onto x                          product, with the residual
    gate_up     product, then silu_mul with the scale    product, with SiLU and the scale
    down        product, onto x                          product, with the residual

K and V are in the cache when qkv returns. Tests hold both sets to `decoder.PlainOperations`. A rank
that holds a part of the model has SummedProducts, the library's with a sum over ranks behind two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paged.device import Card, device_properties
from paged.kernels.elementwise import rotate_and_store, rotation_table, silu_mul
from paged.kernels.products import product, qkv_product
from paged.kv_cache import PagedKVCache
from paged.models.config import ModelConfig
from paged.models.decoder import Decoder, Linear, rms_norm
from paged.parallel.sums import Sums
from paged.seats import Prepared

Attend = Callable[[int, Tensor], Tensor]  # (layer, q) -> out; K and V are in the cache already

NARROW = 128
"""The most tokens that go through our products, for any model."""


def most_tokens(config: ModelConfig, dtype: torch.dtype, card: Card) -> int:
    """Tokens up to which our products beat the library's with the kernels between them.

    Ours win by what they save between the products, and lose, the more tokens there are, by reading
    less cleverly. Small layers leave much to save: those that the L2 cache holds whole, up to 128
    tokens; those up to nearly twice its size, up to 32. Measured on an H200 (`bench products`).
    """
    if config.output_bias or config.mlp_bias:  # not in our products
        return 0
    heads = config.num_heads + config.num_kv_heads  # those of K and V are as many as two of Q and O
    weights = config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size)
    share = weights * dtype.itemsize / card.l2_cache
    return NARROW if share < 1 else 32 if share < 1.8 else 0


class FusedModel:
    """What both sets need of a model.

    Args:
        decoder: the model; its weights are used in place, and the norms' weights go into the
            matrices behind them. Weights must not be loaded into it again.
        kv: the cache that K and V are written to.
        max_positions: positions that the rotary table covers.
        narrow: up to so many tokens go through our products rather than the library's; None asks
            `most_tokens`.
        sums: those of a rank that holds a part of the model. Between its products and the residual
            stands a sum, which ours could not carry along: all go through the library.
    """

    def __init__(self, decoder: Decoder, kv: PagedKVCache, max_positions: int,
                 narrow: int | None = None, sums: Sums | None = None):
        self.decoder, self.kv, self.config, self.sums = decoder, kv, decoder.config, sums
        dtype = decoder.embedding.dtype
        self.narrow = (most_tokens(decoder.config, dtype, device_properties(kv.data.device))
                       if narrow is None else narrow)
        self.rotation = rotation_table(decoder.frequencies, max_positions) * decoder.rotary_factor
        absorb_norms(decoder)
        # float16 ends at 65,504, which a product of numbers not yet scaled may pass, and a bias is
        # added behind the scale: there the norm stays in front.
        self.scale_late = (decoder.embedding.dtype != torch.float16 and not decoder.config.mlp_bias)

    def operations(self, step: Prepared, attend: Attend):
        """The operations for the tokens of one step."""
        products = (SummedProducts if self.sums is not None else
                    OurProducts if len(step.x) <= self.narrow else LibraryProducts)
        return products(self, step, attend)

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Scores [rows, vocab] of the residual stream [rows, hidden], in the dtype of the
        weights."""
        normed = rms_norm(x, self.decoder.norm, self.config.rms_norm_eps)
        return torch.mm(normed, self.decoder.head.weight.t(), out=out)


class _Fused:

    def __init__(self, model: FusedModel, step: Prepared, attend: Attend):
        self.model, self.step, self.attention = model, step, attend
        self.eps = model.config.rms_norm_eps

    def attend(self, layer, q):
        return self.attention(layer.index, q).flatten(1)

    def heads(self, layer) -> tuple:
        """What Q, K and V go through on their way to attention and cache."""
        model, step = self.model, self.step
        return (layer.qkv.bias, step.positions, step.slots, model.rotation, layer.q_norm,
                layer.k_norm, self.eps, model.kv.k[layer.index], model.kv.v[layer.index],
                model.config.num_heads)


class LibraryProducts(_Fused):
    """The library's products, and kernels between them. Writes to x."""

    def _normed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the product takes, and what its result is still to be scaled by the norm of."""
        if self.model.scale_late:
            return x, x
        return F.rms_norm(x, x.shape[-1:], None, self.eps), None

    def qkv(self, layer, x):
        normed, scaled_by = self._normed(x)
        qkv = F.linear(normed, layer.qkv.weight)
        return rotate_and_store(qkv, scaled_by, *self.heads(layer))

    def output(self, layer, mixed, x):
        return self._added(x, mixed, layer.out)

    def gate_up(self, layer, x):
        normed, scaled_by = self._normed(x)
        gate_up = F.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
        return silu_mul(gate_up, scaled_by, self.eps)

    def down(self, layer, hidden, x):
        return self._added(x, hidden, layer.down)

    def _added(self, x: Tensor, hidden: Tensor, linear: Linear) -> Tensor:
        x.addmm_(hidden, linear.weight.t())
        return x if linear.bias is None else x.add_(linear.bias)


class SummedProducts(LibraryProducts):
    """The library's, where a rank's product is a summand: to that of rank 0 residual and bias are
    added, to the others nothing, and the sum is the new x of all."""

    def _added(self, x, hidden, linear):
        sums = self.model.sums
        summand = sums.place(x)
        if sums.part.rank:
            torch.mm(hidden, linear.weight.t(), out=summand)
        else:
            torch.addmm(x, hidden, linear.weight.t(), out=summand)
            if linear.bias is not None:
                summand.add_(linear.bias)
        return sums.total(summand, x)


class OurProducts(_Fused):
    """Products of few tokens that carry what lies between them; beside x they keep the sums of its
    squares, [tokens, parts]."""

    def __init__(self, model: FusedModel, step: Prepared, attend: Attend):
        super().__init__(model, step, attend)
        self.squares = step.squares

    def qkv(self, layer, x):
        return qkv_product(x, self.squares, layer.qkv.weight, *self.heads(layer))

    def output(self, layer, mixed, x):
        x, self.squares = product(mixed, layer.out.weight, residual=x)
        return x

    def gate_up(self, layer, x):
        return product(x, layer.gate_up.weight, self.eps, self.squares, silu=True)

    def down(self, layer, hidden, x):
        x, self.squares = product(hidden, layer.down.weight, residual=x)
        return x


@torch.no_grad()
def absorb_norms(decoder: Decoder) -> None:
    """Multiply the norms' weights into the matrices behind them; but for rounding, the decoder
    computes the same.

    The final norm stays: the matrix behind it may be the embedding too. Doing it twice changes
    nothing.
    """
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.unpack()
    for layer in decoder.layers:
        for norm, matrix in ((layer.attention_norm, layer.qkv.weight), (layer.mlp_norm,
                                                                        layer.gate_up.weight)):
            matrix.mul_(norm)
            norm.fill_(1)
