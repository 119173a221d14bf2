"""Parse JSON that xtok did not write."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from xtok.errors import XtokError


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Parse JSON, but reject documents that `json.loads` would silently change.

    If `allow_nan` is set, NaN and Infinity are accepted, because `json.dumps` writes these values.
    Bytes must be UTF-8.

    Raises:
        ValueError: if the text is not JSON, is nested too deeply, or repeats a key in an object.

    >>> parse_json('{"5": 1, "5": 2}')
    Traceback (most recent call last):
    ValueError: the key '5' occurs twice in one object
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    constant = None if allow_nan else _reject_constant
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=constant)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def parse_json_field(text: str, field: str, hint: str) -> Any:
    """Parse a string field that contains JSON. Errors name the field and contain `hint`."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise XtokError(f"{field}: {json_problem(error)}", hint=hint) from error


def json_problem(error: ValueError) -> str:
    """Return a short reason for an error of `parse_json`."""
    if not isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    if error.msg == "Extra data":
        return "contains more than one JSON value"
    return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")
