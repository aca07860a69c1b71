"""The shape of a model from the metadata of a GGUF file.

llama.cpp writes and reads such files, and is the judge of what a key means and of what a missing
one stands for (`llama-model.cpp`, `gguf-py/gguf/constants.py`). A key of the architecture that is
not known here might change the computation, and is refused.
"""

from __future__ import annotations

import math
from typing import Any

from paged.checks import whole_number
from paged.models.config import ARCHITECTURES, ModelConfig, positive_number
from paged.models.loader.configs import SUPPORTED
from paged.models.loader.rope import covered_positions, read_scaling

NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length",
          "attention.head_count", "attention.layer_norm_rms_epsilon")
READ = (*NEEDED, "vocab_size", "attention.head_count_kv", "attention.key_length",
        "attention.value_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
        "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow")
HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")  # notes on how the file was made
# What asks for nothing: the key is as good as absent where it has this value.
NEUTRAL = {
    "attention.causal": True, "use_parallel_residual": False, "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
    "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0, "expert_count": 0,
    "expert_used_count": 0, "expert_shared_count": 0, "leading_dense_block_count": 0,
    "nextn_predict_layers": 0, "pooling_type": 0, "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.alpha": 0.0
}
SCALINGS = {"none": "default", "linear": "linear", "yarn": "yarn"}


def from_gguf(fields: dict[str, Any], tensor_names: set[str]) -> ModelConfig:
    """Read the metadata of a GGUF file. Raises ValueError on anything unsupported."""
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES or architecture == "mistral":  # Mistral's are llama files
        raise ValueError(f"The GGUF architecture {architecture!r} is not supported; {SUPPORTED}.")
    kind = fields.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"The GGUF file holds a part of another kind ({kind!r}) and no model: "
                         "name the file of the model itself.")
    own = {
        key.removeprefix(architecture + "."): value
        for key, value in fields.items() if key.startswith(architecture + ".")
    }
    missing = [name for name in NEEDED if name not in own]
    if missing:
        raise ValueError(f"The GGUF file does not give {', '.join(missing)}: it is incomplete.")
    heads = whole_number("The model's num_heads", own["attention.head_count"], least=1)
    hidden = whole_number("The model's hidden_size", own["embedding_length"], least=1)
    positions = whole_number("The model's max_position_embeddings", own["context_length"], least=1)
    head_dim = own.get("attention.key_length", hidden // heads)
    _refuse_unknown(own, architecture, positions)
    for name in ("rope.dimension_count", "attention.value_length"):
        if own.get(name, head_dim) != head_dim:
            raise ValueError(f"The GGUF file sets {name} to {own[name]!r} and a head has "
                             f"{head_dim} numbers: only heads of one size, turned whole, are "
                             "supported.")
    biased = {
        name: f"blk.0.{name}.bias" in tensor_names
        for name in ("attn_q", "attn_output", "ffn_down")
    }
    if architecture == "qwen2" and not biased["attn_q"]:
        raise ValueError("This qwen2 GGUF file has no bias on Q, K and V, unlike every Qwen2 "
                         "model: it is incomplete.")
    theta, scaling = read_scaling(_rope(own), own.get("rope.freq_base", 10_000.0), positions,
                                  head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=own.get("vocab_size", _length(fields.get("tokenizer.ggml.tokens"))),
        hidden_size=hidden,
        intermediate_size=own["feed_forward_length"],
        num_layers=own["block_count"],
        num_heads=heads,
        num_kv_heads=own.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias=biased["attn_q"],
        qk_norm=architecture == "qwen3",
        max_position_embeddings=covered_positions(scaling, positions),
        output_bias=biased["attn_output"],
        mlp_bias=biased["ffn_down"],
    )


def _refuse_unknown(own: dict[str, Any], architecture: str, positions: int) -> None:
    window = own.get("attention.sliding_window", 0)
    if window and whole_number("The GGUF file's sliding window", window) < positions:
        raise ValueError(
            f"The GGUF file sets {architecture}.attention.sliding_window to {window}; every layer "
            f"here attends to the whole context of {positions} tokens, so use a model without it.")
    for name, value in own.items():
        known = name in READ or name in HARMLESS or name == "attention.sliding_window"
        if not known and not (name in NEUTRAL and value == NEUTRAL[name]):
            raise ValueError(
                f"The GGUF file sets {architecture}.{name} to {str(value)[:40]}, which is not "
                "supported: it may change what the model computes.")


def _rope(own: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters in the words of a config.json. A factor without a type is linear, and a
    factor of 0 or none is 1, as in llama.cpp."""
    written = own.get("rope.scaling.type", "linear")
    kind = SCALINGS.get(written) if isinstance(written, str) else None
    if kind is None:
        raise ValueError(f"The rope type {written!r} is not supported in GGUF files; use one with "
                         f"{', '.join(SCALINGS)}.")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 0.0)) or 1.0
    positive_number("The GGUF file's rope.scaling.factor", factor)
    sharpening = 1.0
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        sharpening *= positive_number(f"The GGUF file's {name}", own.get(name, 1.0))
    if kind != "yarn":
        if sharpening != 1:
            raise ValueError(f"The GGUF file sets rope.scaling.attn_factor to {sharpening} for the "
                             f"rope type {written!r}: it is supported for 'yarn' only.")
        return {"rope_type": "default"} if factor == 1 else {"rope_type": kind, "factor": factor}
    # llama.cpp multiplies this factor onto the one that YaRN proposes.
    return {
        "rope_type": kind, "factor": factor, "attention_factor": sharpening *
        (1 + 0.1 * math.log(max(factor, 1))),
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
        "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": own.get("rope.scaling.yarn_beta_slow")
    }


def _length(tokens: Any) -> int:
    return len(tokens) if isinstance(tokens, list) else 0
