"""One decoder for Llama, Qwen2, Qwen2.5 and Qwen3, for inference only: its weights, and its layer.

It turns the embeddings of tokens into hidden states. The tokens of all requests of a step lie one
after another, with no batch dimension and no padding. A layer is written once, in `Decoder.run`,
over five operations. PlainOperations are the specification; `fused.py` has faster ones, and another
kind of attention or MLP, or a product cut over several GPUs, would be another operation, not
another decoder.

    qkv       norm ► product ► Q, K and V ► norm of each head (Qwen3) ► rotary embedding
    attend    K and V into the cache, attention over it
    output    product ► + residual
    gate_up   norm ► product ► silu(gate) × up
    down      product ► + residual

Which tokens may see which others is attention's business. Nothing here knows of blocks or slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged.models.config import ModelConfig
from paged.models.rotary import rotary_frequencies
from paged.parallel.shard import Part

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) -> out, shaped like q


class Linear(nn.Module):
    """x @ weight.T + bias, weight [outputs, inputs]."""

    weight: nn.Parameter  # until it is packed
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, bias: bool, device, dtype) -> None:
        super().__init__()
        self.weight = _weight(outputs, inputs, device=device, dtype=dtype)
        self.bias = _weight(outputs, device=device, dtype=dtype) if bias else None
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """Reorder the weight into oneDNN's own layout, which the row-major one is given up for.

        With one token or a few, a float32 product on the CPU costs what reading the weight costs,
        and reading it in the order in which the kernel consumes it is two to three times faster.
        """
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and _has_onednn(
        ):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
            self.register_parameter("weight", None)

    def unpack(self) -> None:
        """Back to the row-major weight, which the fused kernels read."""
        if self.packed is not None:
            self.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
            self.packed = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class Layer(nn.Module):
    """One transformer block. Q, K and V come out of one product, gate and up out of another."""

    def __init__(self, config: ModelConfig, index: int, device, dtype) -> None:
        super().__init__()
        c, at = config, {"device": device, "dtype": dtype}
        self.index, self.config = index, config
        # Heads that rotary embedding turns: Q and K, not V
        self.turned = c.num_heads + c.num_kv_heads
        self.attention_norm = _weight(c.hidden_size, **at)
        self.qkv = Linear(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim,
                          c.attention_bias, **at)
        self.q_norm = _weight(c.head_dim, **at) if c.qk_norm else None
        self.k_norm = _weight(c.head_dim, **at) if c.qk_norm else None
        self.out = Linear(c.num_heads * c.head_dim, c.hidden_size, c.output_bias, **at)
        self.mlp_norm = _weight(c.hidden_size, **at)
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias, **at)
        self.down = Linear(c.intermediate_size, c.hidden_size, c.mlp_bias, **at)


class PlainOperations:
    """Each a few lines of PyTorch.

    Args:
        config: of the model.
        cos, sin: [tokens, 1, head_dim], as `Decoder.rotation` gives them.
        attend: (layer index, q, k, v) -> out, see `Decoder.forward`.
    """

    def __init__(self, config: ModelConfig, cos: Tensor, sin: Tensor, attend: Attend):
        self.config, self.cos, self.sin, self.attention = config, cos, sin, attend

    def qkv(self, layer, x):
        c = self.config
        turned = c.num_heads + c.num_kv_heads  # rotary embedding turns Q and K, not V
        qkv = layer.qkv(rms_norm(x, layer.attention_norm, c.rms_norm_eps))
        qk, v = qkv.view(-1, turned + c.num_kv_heads, c.head_dim).split((turned, c.num_kv_heads), 1)
        if c.qk_norm:
            q = rms_norm(qk[:, :c.num_heads], layer.q_norm, c.rms_norm_eps)
            k = rms_norm(qk[:, c.num_heads:], layer.k_norm, c.rms_norm_eps)
            qk = torch.cat((q, k), dim=1)
        q, k = rotate(qk, self.cos, self.sin).split((c.num_heads, c.num_kv_heads), 1)
        return q, k, v

    def attend(self, layer, qkv):
        return self.attention(layer.index, *qkv)

    def output(self, layer, mixed, x):
        return x + layer.out(mixed.flatten(1))

    def gate_up(self, layer, x):
        hidden = layer.gate_up(rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps))
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up

    def down(self, layer, hidden, x):
        return x + layer.down(hidden)


class SummedOperations(PlainOperations):
    """Those of a rank that holds a part of the model: its output and down are summands.

    sum: adds a tensor up over the ranks, in place (`parallel.sums`).
    """

    def __init__(self, *args, sum: Callable[[Tensor], Tensor]):
        super().__init__(*args)
        self.sum = sum

    def output(self, layer, mixed, x):
        return x + self.sum(layer.out(mixed.flatten(1)))

    def down(self, layer, hidden, x):
        return x + self.sum(layer.down(hidden))


class Decoder(nn.Module):
    """The whole model, or the part of it that a rank holds. Weights are allocated here and filled
    by the loader or by random_decoder.

    config: the shape of what is held, `part.config` for a part.
    """

    layers: Sequence[Layer]
    frequencies: Tensor

    def __init__(self, config: ModelConfig, device="cpu", dtype=torch.float32,
                 part: Part | None = None) -> None:
        super().__init__()
        self.config, self.part = config, part
        self.embedding = _weight(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        layers = nn.ModuleList(Layer(config, i, device, dtype) for i in range(config.num_layers))
        self.layers = cast("Sequence[Layer]", layers)
        self.norm = _weight(config.hidden_size, device=device, dtype=dtype)
        tied = config.tie_word_embeddings
        self.head = Linear(config.hidden_size, config.vocab_size, False, "meta" if tied else device,
                           dtype)
        if tied:
            self.head.weight = self.embedding
        frequencies, self.rotary_factor = rotary_frequencies(config)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def run(self, x, operations):
        """The layers, from the embeddings x [N, hidden] to the residual stream before the final
        norm, through the operations of one step; what passes between two of them is their own."""
        ops = operations
        for layer in self.layers:
            x = ops.output(layer, ops.attend(layer, ops.qkv(layer, x)), x)
            x = ops.down(layer, ops.gate_up(layer, x), x)
        return x

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, hidden] of input_ids [N] standing at positions [N], the plain way.

        attend(layer, q, k, v) gets q [N, num_heads, head_dim] and k, v [N, num_kv_heads, head_dim],
        q and k turned by their positions, and returns the attention output in the shape of q.
        """
        x = F.embedding(input_ids, self.embedding)
        x = self.run(x, PlainOperations(self.config, *self.rotation(positions), attend))
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, float32 [N, vocab], for hidden [N, hidden]."""
        return self.head(hidden).float()

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, head_dim] for `rotate`, in float32, times the scaling's factor; the
        first half of sin is negated for it."""
        angles = positions.float()[:, None] * self.frequencies
        cos, sin = angles.cos() * self.rotary_factor, angles.sin() * self.rotary_factor
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def pack(self) -> Decoder:
        """Reorder all weights for fast products on the CPU, once they are loaded. Elsewhere,
        nothing."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        return self

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of a Hugging Face checkpoint goes: its name, and a view of a weight
        here.

        Fused weights are stacks of rows, so copying into a view is all that loading has to do.
        """
        c, d = self.config, self.config.head_dim
        places: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm
        }
        if not c.tie_word_embeddings:
            places["lm_head.weight"] = self.head.weight
        for i, layer in enumerate(self.layers):
            rows = [c.num_heads * d, c.num_kv_heads * d, c.num_kv_heads * d]
            at = f"model.layers.{i}."
            places[at + "input_layernorm.weight"] = layer.attention_norm
            for name, weight in zip("qkv", layer.qkv.weight.split(rows), strict=True):
                places[at + f"self_attn.{name}_proj.weight"] = weight
            if layer.qkv.bias is not None:
                for name, bias in zip("qkv", layer.qkv.bias.split(rows), strict=True):
                    places[at + f"self_attn.{name}_proj.bias"] = bias
            if layer.q_norm is not None and layer.k_norm is not None:
                places[at + "self_attn.q_norm.weight"] = layer.q_norm
                places[at + "self_attn.k_norm.weight"] = layer.k_norm
            places[at + "self_attn.o_proj.weight"] = layer.out.weight
            if layer.out.bias is not None:
                places[at + "self_attn.o_proj.bias"] = layer.out.bias
            places[at + "post_attention_layernorm.weight"] = layer.mlp_norm
            gate, up = layer.gate_up.weight.chunk(2)
            places[at + "mlp.gate_proj.weight"], places[at + "mlp.up_proj.weight"] = gate, up
            places[at + "mlp.down_proj.weight"] = layer.down.weight
            if layer.gate_up.bias is not None and layer.down.bias is not None:
                gate, up = layer.gate_up.bias.chunk(2)
                places[at + "mlp.gate_proj.bias"], places[at + "mlp.up_proj.bias"] = gate, up
                places[at + "mlp.down_proj.bias"] = layer.down.bias
        return places


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale x to a root mean square of 1 over its last dimension (computed in float32), then by
    weight.

    Zhang and Sennrich 2019. Returns a new tensor: the residual stream x is still needed.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, head_dim] (Su et al. 2021), the pair of i being
    i + head_dim / 2.

        (a, b) -> (a cos - b sin, b cos + a sin)

    Rolling by half a head brings each number's partner to it.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def random_decoder(config: ModelConfig, seed: int = 0, device="cpu", dtype=torch.float32,
                   part: Part | None = None) -> Decoder:
    """A decoder with random weights, the same ones for a seed on every device, and in every part of
    it. For tests and measurements."""
    whole = Decoder(config, "meta", dtype).checkpoint_tensors()
    decoder = Decoder(config if part is None else part.config, device, dtype, part)
    generator = torch.Generator().manual_seed(seed)
    for name, place in decoder.checkpoint_tensors().items():
        values = torch.randn(whole[name].shape, generator=generator)
        values = (1 + 0.1 * values if name.endswith("norm.weight") else values
                  / math.sqrt(values.shape[-1]))
        put(place, values if part is None else values[part.cut(name)])
    return decoder.pack()


def put(place: Tensor, values: Tensor) -> None:
    """Copy a checkpoint's tensor, or what a part has of it, to its place; missing rows are
    zeros."""
    place[:len(values)].copy_(values)
    place[len(values):].zero_()


def _weight(*shape: int, device, dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
