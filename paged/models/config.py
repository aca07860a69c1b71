"""The shape of a model: what the decoder has to know to allocate its weights and to run.

Where the numbers come from is the loader's affair (`loader/configs.py`, `loader/gguf_config.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from paged.checks import whole_number

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM"
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know to allocate its weights and run.

    Raises ValueError for a number that no model can have.
    """

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # heads whose K and V are cached
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None  # {"rope_type": ..., ...}; None: plain
    tie_word_embeddings: bool = False  # the output layer reuses the embedding table
    attention_bias: bool = False  # Q, K and V carry a bias (Qwen2)
    qk_norm: bool = False  # RMSNorm on each query and key head (Qwen3)
    max_position_embeddings: int = 2048  # positions it runs for; `rotary.py` may depend on them
    output_bias: bool = False  # so does the attention's output product
    mlp_bias: bool = False  # so do gate, up and down

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_position_embeddings"):
            whole_number(f"The model's {name}", getattr(self, name), least=1)
        for name in ("rms_norm_eps", "rope_theta"):
            positive_number(f"The model's {name}", getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads "
                "evenly: num_heads must be a multiple of num_kv_heads.")
        if self.head_dim % 2:
            raise ValueError(
                f"Rotary embedding turns pairs of numbers; head_dim is {self.head_dim}, "
                "and must be even.")


def positive_number(name: str, value: Any) -> float:
    """The value, if it is a finite number above 0; ValueError otherwise."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}: it must be a finite number above 0")
    return value
