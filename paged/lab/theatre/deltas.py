"""What changed between two states made of dicts, lists and plain values, as small JSON.

    [value]                 the whole is replaced by value
    {"key": change}         an edit of a dict's value or of a list's item; 0 removes a dict's key
    {"+": [items]}          beside edits of a list: it grew by these
    {"@": [i, n, items]}    in a list, n items from index i on are replaced by these

The player in the page applies the same rules (`apply` in theatre.js).
"""

from __future__ import annotations


def delta(old, new):
    """The change that leads from old to new, or None if they are equal."""
    if old == new and type(old) is type(new):
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        changes = {key: 0 for key in old if key not in new}
        for key, value in new.items():
            change = delta(old[key], value) if key in old else [value]
            if change is not None:
                changes[key] = change
        return changes
    if isinstance(old, list) and isinstance(new, list) and len(old) <= len(new):
        changes = {}
        for index, (before, after) in enumerate(zip(old, new)):
            change = None if before is after else delta(before, after)
            if change is not None:
                changes[str(index)] = change
        if 2 * len(changes) <= len(old):
            if len(new) > len(old):
                changes["+"] = new[len(old):]
            return changes
    if isinstance(old, list) and isinstance(new, list):
        start = _common(old, new)
        rest = _common(old[start:][::-1], new[start:][::-1])
        items = new[start:len(new) - rest]
        if 2 * len(items) < len(new):
            return {"@": [start, len(old) - start - rest, items]}
    return [new]


def _common(a: list, b: list) -> int:
    """How many items the two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def apply(old, change):
    """The state that the change leads to; nothing is modified, and what is unchanged is shared."""
    if change is None:
        return old
    if isinstance(change, list):
        return change[0]
    if isinstance(old, list):
        new = list(old)
        for key, item in change.items():
            if key == "+":
                new += item
            elif key == "@":
                new[item[0]:item[0] + item[1]] = item[2]
            else:
                new[int(key)] = apply(old[int(key)], item)
        return new
    new = dict(old)
    for key, value in change.items():
        if value == 0:
            del new[key]
        else:
            new[key] = apply(old.get(key), value)
    return new
