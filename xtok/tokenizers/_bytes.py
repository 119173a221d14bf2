"""Two tokenizers that need no files: `bytes`, with an id per byte, and `null`, without text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import Backend, Roles
from xtok.tokenizers.table import MAX_WIDTH, TokenEntry, TokenType, byte_offsets


class BytesBackend(Backend):
    """The tokenizer `bytes`. The id of a byte is the value of the byte."""

    name = "bytes"

    def __init__(self, argument: str) -> None:
        if argument:
            raise TokenizerError(
                f"bytes:{argument} is not a tokenizer, expected 'bytes'",
                hint="remove the suffix; for more than 256 ids, add {option}",
                parameter="vocab_size",
            )

    def entries(self) -> Iterable[TokenEntry]:
        return [TokenEntry(i, TokenType.NORMAL, bytes([i])) for i in range(256)]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_bytes(self, data: bytes) -> list[int] | None:
        return list(data)


class NullBackend(Backend):
    """The tokenizer `null` or `null:SIZE`, for tests of training code. Its ids have no text.

    A text must be a list of ids, such as "5 17 3". Encoding parses these ids. The largest id is the
    eos token.
    """

    name, recognizes_names = "null", True

    def __init__(self, argument: str) -> None:
        self._size = _number(argument or "131072")
        if not 0 < self._size <= MAX_WIDTH:
            raise TokenizerError(
                f"null:{argument} is not a tokenizer, expected a number from 1 to {MAX_WIDTH}",
                hint="write the number of ids, for example null:32000; the default is null:131072",
            )

    def entries(self) -> Iterable[TokenEntry]:
        return [TokenEntry(i, TokenType.CONTROL, str(i).encode()) for i in range(self._size)]

    def declared_roles(self) -> Roles:
        return {"eos": {self._size - 1: "null"}}

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [[] for _ in texts]

    def encode_starts(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [list(map(_number, text.split())) for text in texts]
        for text, ids in zip(texts, rows, strict=True):
            if not all(0 <= i < self._size for i in ids):
                raise TokenizerError(
                    f"'null' cannot encode {text[:40]!r}, expected ids below {self._size}",
                    hint="pass a text that consists of ids, such as '5 17 3'",
                )
        return rows

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        byte_of = byte_offsets(text).tolist()
        return [(byte_of[m.start()], byte_of[m.end()]) for m in re.finditer("[0-9]+", text)]


def _number(word: str) -> int:
    """Parse a number of at most nine digits. Returns −1 for any other word."""
    return int(word) if re.fullmatch("[0-9]{1,9}", word) else -1
