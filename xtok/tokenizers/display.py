"""Format tokens and other text in a short form that is safe to print.

`unescape` reverses `escape`. `printable` is for text that is not a token.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

_NOISE = 1e-9
"""Maximum rounding error of a share that is a sum of floating-point numbers."""

SHOWN = 80
"""Maximum number of characters to print. Some vocabularies have tokens of a megabyte."""

_SHORT_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_BYTES_OF_ESCAPES = {b"\\": b"\\", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_ESCAPED = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([\\nrt]))")


def escape(data: bytes) -> str:
    r"""Convert bytes to printable text, which `unescape` converts back.

    Control characters, direction marks and invalid UTF-8 are escaped, so that a vocabulary cannot
    write control sequences to the terminal.

    >>> escape(b" the\n\x1b[31m\xe4\xb8")
    ' the\\n\\x1b[31m\\xe4\\xb8'
    """
    text = data.decode("utf-8", "surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(map(_escape, text))


def _escape(char: str) -> str:
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def text_bytes(text: str) -> bytes:
    r"""Encode a text as UTF-8. Surrogates from `surrogateescape` become the original bytes.

    The surrogates from `surrogateescape` are `\udc80` to `\udcff`. Other unpaired surrogates become
    U+FFFD.
    """
    kept = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)
    return kept.encode("utf-8", "surrogateescape")


def unescape(text: str) -> bytes:
    r"""Convert escaped text back to bytes. A backslash without an escape sequence is literal.

    >>> unescape(r"\xe4\xb8\n")
    b'\xe4\xb8\n'
    """
    return _ESCAPED.sub(_unescape, text_bytes(text))


def _unescape(match: re.Match[bytes]) -> bytes:
    return bytes.fromhex(match[1].decode()) if match[1] else _BYTES_OF_ESCAPES[match[2]]


def shorten(text: str) -> str:
    """Shorten a long escaped token, and append its length.

    >>> shorten("a" * 1000)[-20:]
    'aaaa… (1,000 in all)'
    """
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} in all)"


def quoted(token: str | None, token_id: int | None = None) -> str:
    """Return a shortened token in quotes, or its id if the token is None."""
    return f"#{token_id}" if token is None else f"'{shorten(token)}'"


def printable(text: str) -> str:
    """Escape a text, unless all its characters are printable."""
    return text if text.isprintable() else escape(text.encode("utf-8", "backslashreplace"))


def listed(items: Iterable[object], most: int = 3) -> str:
    """Join the first items of a list for a sentence.

    >>> listed("abc"), listed("abcd")
    ('a, b, c', 'a, b, c, …')
    """
    texts = [str(item) for item in islice(items, most + 1)]
    return ", ".join([*texts[:most], "…"] if len(texts) > most else texts)


def percent(share: float, digits: int = 1) -> str:
    """Format a share in percent. Only exact values result in 0 % or 100 %.

    >>> percent(0.25), percent(0.9999), percent(0.0001), percent(1)
    ('25.0%', '>99.9%', '<0.1%', '100.0%')
    """
    rounded, least = round(share, digits + 2) + 0.0, 10.0 ** -(digits + 2)
    if not rounded and share > _NOISE:
        return f"<{least:.{digits}%}"
    if rounded == 1 and share < 1 - _NOISE:
        return f">{1 - least:.{digits}%}"
    return f"{rounded:.{digits}%}"


def plural(count: int, noun: str) -> str:
    """Return a number with a noun, such as `2 maps`.

    >>> plural(1, "document"), plural(1200, "document")
    ('1 document', '1,200 documents')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_NOT_ASCII = re.compile(r"[^\n -~]+")


def safe_json(text: str) -> str:
    r"""Escape unprintable characters in JSON, such as direction marks, as \uXXXX."""
    return _NOT_ASCII.sub(
        lambda m: "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in m[0]), text
    )


def to_json(result: object) -> str:
    """Convert a result to JSON. Dataclasses become objects, unprintable characters are escaped."""
    return safe_json(json.dumps(result, ensure_ascii=False, indent=2, default=asdict))


def visible(token: str) -> str:
    """Make spaces in an escaped token visible, and put `◌` before a combining character."""
    from rich.cells import cell_len  # takes 9 ms

    first = token[:1]
    joins = first and (unicodedata.category(first)[0] == "M" or not cell_len(first))
    return ("◌" if joins else "") + token.replace(" ", "␣")


def format_weight(value: float, digits: int = 4) -> str:
    """Format a weight. A small positive weight is never printed as 0."""
    least = 10.0**-digits
    return f"{value:.{digits}f}" if value >= least / 2 else f"<{least:.{digits}f}" if value else "0"
