"""The shape of a model from the config.json of a Hugging Face directory.

Whatever a checkpoint asks for and the decoder lacks is refused here, by name. An option that is
read past in silence gives fluent, wrong text. What a config leaves out has the value that
transformers gives it.
"""

from __future__ import annotations

from typing import Any

from paged.checks import whole_number
from paged.models.config import ARCHITECTURES, ModelConfig
from paged.models.loader.rope import covered_positions, read_scaling

SUPPORTED = "the decoder runs dense Llama, Qwen2, Qwen2.5, Qwen3 and Mistral checkpoints"
DEFAULTS = {  # what transformers takes for a number that a config leaves out
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {
        "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096,
        "max_window_layers": 28
    },
    "qwen3": {
        "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096,
        "max_window_layers": 28, "head_dim": 128
    },
    "mistral": {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096
    },
}


def from_huggingface(config: dict[str, Any]) -> ModelConfig:
    """Read a config.json, as written by transformers 4 or 5. Raises ValueError on anything
    unsupported."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(f"The architecture {model_type!r} is not supported; {SUPPORTED}.")
    _refuse_other_contents(config, model_type)
    config = DEFAULTS[model_type] | config
    mlp_bias = boolean(config, "mlp_bias")
    if mlp_bias and model_type != "llama":
        raise ValueError(f"The config sets mlp_bias to True: {model_type} has no bias in its MLP.")
    # Qwen2 always has a bias on Q, K and V and Mistral never; neither has a switch for it.
    bias = model_type in ("llama", "qwen3") and boolean(config, "attention_bias")
    layers = whole_number("The model's num_layers", config["num_hidden_layers"], least=1)
    heads = whole_number("The model's num_heads", config["num_attention_heads"], least=1)
    hidden = whole_number("The model's hidden_size", config["hidden_size"], least=1)
    head_dim, kv_heads = config.get("head_dim"), config.get("num_key_value_heads")
    head_dim = whole_number("The model's head_dim",
                            hidden // heads if head_dim is None else head_dim, least=1)
    original = whole_number("The model's max_position_embeddings",
                            config["max_position_embeddings"], least=1)
    theta, scaling = read_scaling(*_rope(config), original, head_dim)
    positions = covered_positions(scaling, original)
    _refuse_sliding_window(config, model_type, layers, positions)
    return ModelConfig(
        architecture=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=boolean(config, "tie_word_embeddings"),
        attention_bias=bias or model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        max_position_embeddings=positions,
        output_bias=bias,
        mlp_bias=mlp_bias,
    )


def _refuse_other_contents(config: dict[str, Any], model_type: str) -> None:
    """Refuse what is incomplete, does not generate text, or computes something else."""
    written = config.get("architectures") or [ARCHITECTURES[model_type]]
    written = written[0] if isinstance(written, list) else written
    if written != ARCHITECTURES[model_type]:
        raise ValueError(f"The checkpoint holds a {written}, which does not generate text; "
                         f"use one that holds a {ARCHITECTURES[model_type]}.")
    missing = [
        name for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads") if name not in config
    ]
    if missing:
        raise ValueError(
            f"The model's config does not give {', '.join(missing)}: it is incomplete.")
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"The config sets quantization_config to {config['quantization_config']!r}: quantized "
            "weights are not read; use the unquantized checkpoint.")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise ValueError(f"The config sets hidden_act to {config['hidden_act']!r}: the MLP is "
                         "SwiGLU, whose activation is 'silu'.")


def boolean(config: dict[str, Any], name: str) -> bool:
    """A switch of a config, off where it is left out. Raises ValueError for what is no boolean: the
    string "false" would count as true."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"The config sets {name} to {value!r}: it must be true or false.")
    return bool(value)


def _refuse_sliding_window(config: dict[str, Any], model_type: str, layers: int,
                           positions: int) -> None:
    """Refuse a sliding window that some layer uses and that is shorter than the context.

    Qwen2 and Qwen3 configs name a window even where no layer uses it, and say from which layer on
    it is used; in Mistral's, a number is a window of every layer; Llama has none.
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and set(map(str, kinds))
                                  <= {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"The config sets layer_types to {kinds!r}; every layer here attends to the whole "
            "context, so use a checkpoint with full_attention only.")
    if model_type == "mistral":
        in_use = window is not None
    elif kinds is not None:
        in_use = "sliding_attention" in kinds
    else:
        in_use = (model_type != "llama"
                  and boolean(config, "use_sliding_window") and window is not None and whole_number(
                      "The config's max_window_layers", config["max_window_layers"]) < layers)
    if not in_use or (window is not None
                      and whole_number("The config's sliding_window", window) >= positions):
        return
    raise ValueError(
        f"The config uses sliding_attention (window {window}); every layer here attends to the "
        f"whole context of {positions} tokens, so use a checkpoint without it.")


def _rope(config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Rotary parameters and base: transformers 5 writes both into rope_parameters, transformers 4
    beside each other."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(
            f"The config sets rope_parameters to {new!r} and rope_scaling to {old!r}: keep the one "
            "that is meant, with rope_theta in it.")
    rope = new or old
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"The rotary parameters {rope!r} are not supported: one set for all layers is.")
    rope = dict(rope)
    for name in ("original_max_position_embeddings", "partial_rotary_factor"):
        if config.get(name) is not None and (name not in rope or name.startswith("original")):
            rope[name] = config[name]
    theta = rope.pop("rope_theta", None)
    theta = config.get("rope_theta") if theta is None else theta
    return rope, 10_000.0 if theta is None else theta
