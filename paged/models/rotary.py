"""How fast each pair of a head's numbers turns with the position, and what long contexts change.

Rotary embedding (Su et al. 2021) turns pair i by position × frequency i. A model trained on short
contexts is stretched to long ones by slowing its pairs, some or all, and this is where the ways of
doing so live. What they compute is what transformers computes (`modeling_rope_utils`).

    linear    every pair slower by a factor (Chen et al. 2023)
    llama3    long waves slower, short ones as they were, a blend between (Llama 3.1)
    yarn      the same with another blend, and longer queries and keys (Peng et al. 2023)
    dynamic   a larger base, the longer the text (NTK-aware scaling)
    longrope  a divisor for each pair: one list up to the original length, another beyond (Ding et
              al. 2024)

K lies in the cache already turned. With dynamic and longrope, the frequencies depend on how long
the text is, and a text that grows past the original length would find its first keys turned at
other frequencies than its last query. So one length has to be chosen for all requests. It is the
longest that the engine runs, `max_position_embeddings` of the config that is given here: up to the
original length nothing is scaled, beyond it all requests are, the short ones too. vLLM fixes
longrope in the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paged.models.config import ModelConfig

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types whose frequencies are fixed for the longest request."""


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians a position, float32 [head_dim / 2], and the factor on cosines and sines.

    Of the types in LENGTH_DEPENDENT, those for requests of up to config.max_position_embeddings
    tokens.
    """
    scaling = config.rope_scaling or {"rope_type": "default"}
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    kind = scaling["rope_type"]
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(plain, scaling, config)
    if kind == "dynamic":
        return 1.0 / _dynamic_base(scaling, config)**exponents, 1.0
    if kind == "longrope":
        return _longrope(plain, scaling, config)
    return plain, 1.0


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Waves short against the original context stay, long ones are slowed, and between the two
    bounds (in turns over the original context) the two are blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling["factor"]


def _yarn(plain: Tensor, scaling: dict[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    """As llama3, but that the blend runs evenly over the pairs between the two that make
    `beta_fast` and `beta_slow` turns; attention is sharpened by longer queries and keys."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:  # the one that makes so many turns over the original context
        waves = math.log(original / (turns * 2 * math.pi))
        return config.head_dim * waves / (2 * math.log(config.rope_theta))

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    if first == last:
        last += 0.001
    slow = ((torch.arange(len(plain), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / factor * slow + plain * (1 - slow), _yarn_sharpening(scaling)


def _yarn_sharpening(scaling: dict[str, Any]) -> float:
    """The factor on cosines and sines: written in the config, or 0.1 ln(factor) + 1."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def grown(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(max(scaling["factor"], 1))

    one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(one) / grown(all_dims) if one and all_dims else grown(1)


def _dynamic_base(scaling: dict[str, Any], config: ModelConfig) -> float:
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    length = max(config.max_position_embeddings, original)
    stretch = factor * length / original - (factor - 1)
    return config.rope_theta * stretch**(config.head_dim / (config.head_dim - 2))


def _longrope(plain: Tensor, scaling: dict[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    beyond = config.max_position_embeddings > original
    divisors = torch.tensor(scaling["long_factor" if beyond else "short_factor"],
                            dtype=torch.float32)
    sharpening = scaling.get("attention_factor")
    if sharpening is None:
        sharpening = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    return plain / divisors, float(sharpening)
