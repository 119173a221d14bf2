"""Keys of objects in JSON, each of which may stand once."""

from __future__ import annotations

from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; of a key that occurs twice, Python would keep the last.

    >>> import json
    >>> json.loads('{"5": 1, "5": 2}', object_pairs_hook=unique_keys)
    Traceback (most recent call last):
    ValueError: the key '5' occurs twice in one object
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return value
