"""Tokens made safe to print."""

from __future__ import annotations

import os
import re

# How tokens are shown. `escape` is whole and can be undone, for JSON and --token; `quoted` is for
# tables and lines, `TokenTable.shown` for messages, both cut; `printable` is for any other text.

_SHORT_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(data: bytes) -> str:
    r"""Return bytes as text that is safe to print, and that `unescape` turns back.

    What is not printable (control characters, direction marks, bytes that are not UTF-8) is
    escaped, so that a vocabulary cannot write to the terminal.

    >>> escape(b" the\n\x1b[31m\xe4\xb8")
    ' the\\n\\x1b[31m\\xe4\\xb8'
    """

    def shown(char: str) -> str:
        if char in _SHORT_ESCAPES:
            return _SHORT_ESCAPES[char]
        if char.isprintable():
            return char
        return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))

    text = data.decode("utf-8", "surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(map(shown, text))


SHOWN = 80
"""Characters of a token that are shown; vocabularies have tokens of a megabyte."""


def shortened(text: str) -> str:
    """Return an escaped token's beginning, and how long it is, if it is too long to be shown.

    >>> shortened("a" * 1000)[-20:]
    'aaa… (1,000 in all)'
    """
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} in all)"


def quoted(token: str | None, token_id: int) -> str:
    """Return an escaped token in quotes, so that its spaces are seen; without tokens, its id."""
    return f"#{token_id}" if token is None else f"'{shortened(token)}'"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> plural(1, "document"), plural(1200, "document")
    ('1 document', '1,200 documents')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _shown(data: bytes) -> str:
    return shortened(escape(data))


def printable(text: str) -> str:
    """Return any text safe to print: as it is, or else as `escape` shows it."""
    return text if text.isprintable() else escape(text.encode("utf-8", "backslashreplace"))


_ESCAPED = re.compile(r"\\(?:(x)([0-9a-fA-F]{2})|([\\nrt]))")


def unescape(text: str) -> bytes:
    r"""Return the bytes that `escape` shows as `text`; a lone backslash stands for itself.

    >>> unescape(r"\xe4\xb8\n")
    b'\xe4\xb8\n'
    """

    def byte(match: re.Match[str]) -> str:
        if match[1]:
            return bytes([int(match[2], 16)]).decode("latin-1")
        return {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}[match[3]]

    pieces: list[bytes] = []
    end = 0
    for match in _ESCAPED.finditer(text):
        pieces += [os.fsencode(text[end : match.start()]), byte(match).encode("latin-1")]
        end = match.end()
    return b"".join([*pieces, os.fsencode(text[end:])])
