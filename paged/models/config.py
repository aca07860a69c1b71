"""The shape of a model, read from a Hugging Face config or from the header of a GGUF file.

Whatever a checkpoint asks for and the decoder lacks is refused here, by name. An option that is
read past in silence gives fluent, wrong text.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from paged.checks import whole_number

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"
}
ROPE_TYPES = {  # what each needs beside the base
    "default": (), "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
}
_GGUF_NAMES = {  # what a config.json calls the numbers in a GGUF file
    "vocab_size": "vocab_size", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base", "max_position_embeddings": "context_length"
}
_SUPPORTED = "the decoder runs dense Llama, Qwen2, Qwen2.5 and Qwen3 checkpoints"


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know to allocate its weights and run."""

    architecture: str  # "llama", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # heads whose K and V are cached
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str,
                       Any] | None = None  # {"rope_type": "linear" or "llama3", ...}; None: plain
    tie_word_embeddings: bool = False  # the output layer reuses the embedding table
    attention_bias: bool = False  # Q, K and V carry a bias (Qwen2)
    qk_norm: bool = False  # RMSNorm on each query and key head (Qwen3)
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_position_embeddings"):
            whole_number(f"The model's {name}", getattr(self, name), least=1)
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not float(value) > 0:
                raise ValueError(f"The model's {name} is {value!r}; it must be a number above 0.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads "
                "evenly: num_heads must be a multiple of num_kv_heads.")
        if self.head_dim % 2:
            raise ValueError(
                f"Rotary embedding turns pairs of numbers; head_dim is {self.head_dim}, "
                "and must be even.")


def from_huggingface(config: dict[str, Any]) -> ModelConfig:
    """Read a config.json, as written by transformers 4 or 5. Raises ValueError on anything
    unsupported."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(f"The architecture {model_type!r} is not supported; {_SUPPORTED}.")
    written = (config.get("architectures") or [ARCHITECTURES[model_type]])[0]
    if written != ARCHITECTURES[model_type]:
        raise ValueError(f"The checkpoint holds a {written}, which does not generate text; "
                         f"use one that holds a {ARCHITECTURES[model_type]}.")
    _refuse(config, "quantization_config", None,
            "quantized weights are not read; use the unquantized checkpoint")
    _refuse(config, "hidden_act", "silu", "the MLP is SwiGLU, whose activation is 'silu'")
    _refuse(config, "mlp_bias", False, "the MLP has no bias here")
    if model_type != "qwen2":  # Qwen2 always has a Q, K, V bias and no such switch
        _refuse(config, "attention_bias", False,
                f"{model_type} is supported without attention biases")
    _need(config, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                   "num_attention_heads"))
    _refuse_sliding_window(config)
    theta, scaling = _rope(config)
    heads = config["num_attention_heads"]
    return ModelConfig(
        architecture=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        attention_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        max_position_embeddings=config.get("max_position_embeddings", 2048),
    )


def from_gguf(fields: dict[str, Any], tensor_names: set[str]) -> ModelConfig:
    """Read the metadata of a GGUF file. Raises ValueError on anything unsupported."""
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"The GGUF architecture {architecture!r} is not supported; {_SUPPORTED}.")
    own = {key.removeprefix(architecture + "."): value for key, value in fields.items()}
    _need(own, ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"))
    _refuse(own, "expert_count", 0, "mixture-of-experts models are not supported")
    has_bias = "blk.0.attn_q.bias" in tensor_names
    if has_bias != (architecture == "qwen2"):
        raise ValueError(
            f"This {architecture} GGUF file has {'a' if has_bias else 'no'} bias on Q, K and V, "
            f"unlike the {ARCHITECTURES[architecture]} that is supported.")
    numbers = {ours: own[theirs] for ours, theirs in _GGUF_NAMES.items() if theirs in own}
    config = from_huggingface({
        "vocab_size": len(fields.get("tokenizer.ggml.tokens",
                                     ())), **numbers, "model_type": architecture,
        "tie_word_embeddings": "output.weight" not in tensor_names, "rope_scaling": {
            "rope_type": own.get("rope.scaling.type", "none").replace("none", "default"),
            "factor": own.get("rope.scaling.factor", 1.0)
        }
    })
    rotated = own.get("rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise ValueError(
            f"Rotary embedding on {rotated} of {config.head_dim} numbers a head is not supported.")
    return config


def _refuse(config: dict[str, Any], name: str, expected: Any, because: str) -> None:
    value = config.get(name, expected)
    if value is not None and value != expected:
        raise ValueError(f"The config sets {name} to {value!r}: {because}.")


def _need(config: dict[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in config]
    if missing:
        raise ValueError(
            f"The model's config does not give {', '.join(missing)}: it is incomplete.")


def _refuse_sliding_window(config: dict[str, Any]) -> None:
    """Qwen2 and Qwen3 configs name a window size even where no layer uses it; refuse one that is in
    use."""
    layers = config.get("layer_types") or []
    others = sorted({kind for kind in layers if kind != "full_attention"})
    first = config.get("max_window_layers", 0)  # layers below it attend to everything
    if not layers and config.get("use_sliding_window") and first < config["num_hidden_layers"]:
        others = ["sliding_attention"]
    if others:
        raise ValueError(
            f"The config uses {' and '.join(others)} (window {config.get('sliding_window')}); "
            "every layer here attends to the whole context, so use a checkpoint without it.")


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling: transformers 5 writes both into rope_parameters, transformers 4 beside each
    other."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(
            f"The config sets rope_parameters to {new!r} and rope_scaling to {old!r}: keep the one "
            "that is meant, with rope_theta in it.")
    rope = new or old
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"The rotary parameters {rope!r} are not supported: one set for all layers is.")
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ValueError(f"The rope type {kind!r} is not supported; use a checkpoint with one of "
                         f"{', '.join(ROPE_TYPES)}.")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(
            f"Rotary embedding on a part of each head (partial_rotary_factor {partial}) is not "
            "supported.")
    missing = [name for name in ROPE_TYPES[kind] if name not in rope]
    if missing:
        raise ValueError(
            f"The rope type {kind!r} needs {', '.join(missing)}, which the config lacks.")
    scaling = {"rope_type": kind, **{name: rope[name] for name in ROPE_TYPES[kind]}}
    return theta, None if kind == "default" else scaling
