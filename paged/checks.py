"""Arguments as they should be, or one sentence that names the value and says what would do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Class = TypeVar("Class", bound=type)


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


def refuses(what: str, names: str) -> Callable[[Class], Class]:
    """A class decorator: these arguments, which other engines have, are left out on purpose.

    Whoever gives one gets a ValueError that says so; any other unknown argument is a TypeError.
    """
    left_out = set(names.split())

    def decorate(cls: Class) -> Class:
        init = cls.__init__  # type: ignore[misc]

        @wraps(init)
        def checked(self, *args, **kwargs):
            for name in kwargs:
                if name in left_out:
                    raise ValueError(f"{name} is left out of this engine on purpose, so {what} "
                                     f"does not take it: leave it away")
            init(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate
