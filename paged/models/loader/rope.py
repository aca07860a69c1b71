"""The rotary parameters of a checkpoint, checked and complete, for `paged.models.rotary`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paged.checks import whole_number
from paged.models.config import positive_number

TYPES = {  # the numbers that each needs beside the base, and those that it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "mscale",
                           "mscale_all_dim")),
    "longrope": ((), ("factor", "attention_factor")),
}
ABSENT_AT_0 = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # as transformers has it
MOST_POSITIONS = 2**31
WITH_ORIGINAL = ("llama3", "yarn", "longrope")  # of a length that they were trained for
DIVISORS = ("short_factor", "long_factor")  # longrope's, one number a pair
# Keys that may stand beside the numbers of another type, where transformers passes over them too;
# `finetuned` says how the weights came to be.
KNOWN = {
    "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings", "truncate",
    "finetuned", *DIVISORS, *(name for names in TYPES.values() for part in names for name in part)
}


def read_scaling(rope: dict[str, Any], theta: Any, max_positions: int,
                 head_dim: int) -> tuple[float, dict[str, Any] | None]:
    """The base, and the scaling with every number that its type uses (None for plain rotation).

    rope: what the checkpoint says, without the base. max_positions: the positions that it says it
    has. Raises ValueError for a type, a key or a value that is not supported.
    """
    positive_number("The model's rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type"))
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"The rope type {kind!r} is not supported; use a checkpoint with one of "
                         f"{', '.join(TYPES)}.")
    unknown = sorted(set(rope) - KNOWN)
    if unknown:
        raise ValueError(
            f"The rotary parameters set {', '.join(unknown)}, of which nothing is known here: use "
            "a checkpoint without.")
    partial = rope.get("partial_rotary_factor")
    if partial is not None and partial != 1:
        raise ValueError(
            f"Rotary embedding on a part of each head (partial_rotary_factor {partial}) is not "
            "supported.")
    if kind == "default":
        return theta, None
    needed, optional = TYPES[kind]
    needed += DIVISORS if kind == "longrope" else ()
    missing = [name for name in needed if rope.get(name) is None]
    if missing:
        raise ValueError(
            f"The rope type {kind!r} needs {', '.join(missing)}, which the config lacks.")
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in (*needed, *optional):
        absent = rope.get(name) is None or name in ABSENT_AT_0 and rope[name] == 0
        if name not in DIVISORS and not absent:
            scaling[name] = positive_number(f"The {name} of the rope type {kind!r}", rope[name])
    if kind in WITH_ORIGINAL or kind == "dynamic":
        original = rope.get("original_max_position_embeddings") if kind != "dynamic" else None
        scaling["original_max_position_embeddings"] = whole_number(
            f"The original_max_position_embeddings of the rope type {kind!r}",
            max_positions if original is None else original, least=2)
    _check(kind, scaling, rope, theta, max_positions, head_dim)
    return theta, scaling


def _check(kind: str, scaling: dict[str, Any], rope: dict[str, Any], theta: float,
           max_positions: int, head_dim: int) -> None:
    """What only one type has."""
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(
            f"The rope type 'llama3' has low_freq_factor {scaling['low_freq_factor']} and "
            f"high_freq_factor {scaling['high_freq_factor']}: the first must be the smaller one.")
    if kind == "yarn":
        truncate = rope.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ValueError(f"The truncate of the rope type 'yarn' is {truncate!r}: it must be "
                             "true or false.")
        scaling["truncate"] = truncate
        if theta <= 1:
            raise ValueError(f"The rope type 'yarn' needs a rope_theta above 1; it is {theta}.")
    if kind == "dynamic" and head_dim == 2:
        raise ValueError("The rope type 'dynamic' needs a head_dim above 2.")
    if kind == "longrope":
        for name in DIVISORS:
            numbers = rope[name]
            if not isinstance(numbers, Iterable) or len(list(numbers)) != head_dim // 2:
                raise ValueError(f"The {name} of the rope type 'longrope' must be a list of "
                                 f"{head_dim // 2} numbers, one a pair of a head.")
            scaling[name] = [
                positive_number(f"A number in {name} of the rope type 'longrope'", number)
                for number in numbers
            ]
        scaling.setdefault("factor", max_positions / scaling["original_max_position_embeddings"])


def covered_positions(scaling: dict[str, Any] | None, max_positions: int) -> int:
    """Positions that a model runs for: factor × original for the types that stretch evenly, and
    what the checkpoint says for the others.

    A checkpoint with dynamic scaling gives the original length; `longest_positions` says how far it
    may be stretched.
    """
    if scaling is None or scaling["rope_type"] not in ("linear", "yarn"):
        return max_positions
    original = scaling.get("original_max_position_embeddings", max_positions)
    covered = scaling["factor"] * original
    if covered > MOST_POSITIONS:
        raise ValueError(f"A factor of {scaling['factor']} on {original} positions makes more than "
                         f"{MOST_POSITIONS}: the config is damaged.")
    return max(max_positions, int(covered))


def longest_positions(scaling: dict[str, Any] | None, max_positions: int) -> int:
    """Positions that a model runs for at most, where the engine says how many it wants."""
    if scaling is not None and scaling["rope_type"] == "dynamic":
        return max(max_positions, int(scaling["factor"] * max_positions))
    return max_positions
