"""Arguments as they should be, or one sentence that names the value and says what would do."""

from __future__ import annotations

import operator


def whole_number(name: str, value, least: int | None = None) -> int:
    """The value as an int, NumPy's integers included; ValueError for anything else, and below
    `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or least is not None and number < least:
        raise ValueError(f"{name} is {value!r}: it must be an integer"
                         + ("" if least is None else f" of at least {least}"))
    return number
