"""The `Tokenizer` that the rest of xtok sees, and the `Backend` protocol behind it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from xtok.canonical import find_roles
from xtok.errors import TokenizerError
from xtok.tokens import (
    MAX_WIDTH,
    Entry,
    TokenType,
    Vocabulary,
    decode_vocabulary,
)


class Backend(Protocol):
    """What one tokenizer library can do; everything that is not exact is caught by `Tokenizer`."""

    name: str

    def entries(self) -> Iterable[Entry]:
        """Return every id of the tokenizer once, in any order."""

    def declared_roles(self) -> Mapping[str, Iterable[int]]:
        """Return roles (names of `canonical.ROLES`) that the tokenizer's own files declare."""

    def model_vocab_size(self) -> int | None:
        """Return the width of the model's logits by its config, or None where there is none."""

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode in the library's own batch call: no special tokens, no dummy prefix."""

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """Apply the model's own merges to any bytes, or return None where it cannot."""


class Tokenizer:
    """A loaded tokenizer: its vocabulary as exact bytes, and the exact spelling of any bytes.

    Attributes:
        vocabulary: the token table and where it comes from.
        report: what became of the ids on the way to the table.
        location: the local folder or file (a `Path`) or the repo (a `str`) that it was loaded from.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        model_id: str,
        location: str | Path | None = None,
        revision: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.location = location
        entries = list(backend.entries())
        largest = max((entry.id for entry in entries), default=-1)
        width, source = _width(backend, model_id, vocab_size, largest)
        table, self.report = decode_vocabulary(entries, width=width)
        table = replace(table, roles=find_roles(table, backend.declared_roles()))
        self._backend = backend
        self._bytes_of = dict(
            zip(table.text_ids.tolist(), filter(None, table.tokens()), strict=True)
        )
        self._byte_ids = {self._bytes_of[int(i)]: int(i) for i in table.ids_of_type(TokenType.BYTE)}
        self._ids = table.canonical_ids()
        self._ids_by_length = sorted({len(token) for token in self._ids}, reverse=True)
        preferred = self._emitted_duplicates()
        if preferred:
            table = replace(table, preferred_ids=preferred)
            self._ids = table.canonical_ids()
        self.vocabulary = Vocabulary(
            model_id=model_id,
            revision=revision,
            backend=backend.name,
            vocab_size=width,
            width_source=source,
            tokenizer_vocab_size=largest + 1,
            table=table,
        )

    def segment(self, data: bytes) -> list[int]:
        """Return the ids that the tokenizer gives for these bytes in the middle of a text.

        The tokens' bytes concatenate to exactly `data`. Valid UTF-8 goes through the library's own
        encoder; what that does not give back exactly, and partial UTF-8, through the model's own
        merges on bytes, then the byte tokens, then greedy longest match.

        Raises:
            TokenizerError: if the vocabulary cannot spell these bytes at all.
        """
        [ids] = self.segment_batch([data])
        if ids is None:
            raise TokenizerError(
                f"{self.vocabulary.model_id} cannot spell the bytes {data[:40]!r}",
                hint="use a tokenizer with byte tokens or a byte-level vocabulary",
            )
        return ids

    def segment_batch(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Segment many byte strings at once; None where the vocabulary cannot spell one."""
        result: list[list[int] | None] = [None] * len(pieces)
        texts: list[str] = []
        rows: list[int] = []
        for row, piece in enumerate(pieces):
            try:
                texts.append(piece.decode())
            except UnicodeDecodeError:
                continue
            rows.append(row)
        for row, ids in zip(rows, self._backend.encode_texts(texts), strict=True):
            if self._spells(ids, pieces[row]):
                result[row] = ids
        return [
            self._segment_bytes(piece) if ids is None else ids
            for ids, piece in zip(result, pieces, strict=True)
        ]

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        """Tell whether all ids are text and their bytes concatenate to `data`."""
        try:
            return b"".join([self._bytes_of[i] for i in ids]) == data
        except KeyError:
            return False

    def _segment_bytes(self, data: bytes) -> list[int] | None:
        ways = (self._backend.encode_bytes, self._with_byte_tokens, self._longest_match)
        for way in ways:
            ids = way(data)
            if ids is not None and self._spells(ids, data):
                return ids
        return None

    def _with_byte_tokens(self, data: bytes) -> list[int] | None:
        """Encode the runs of valid UTF-8 as text, and spell the bytes between as BYTE tokens."""
        runs = _INVALID.split(data.decode("utf-8", "surrogateescape"))
        ids: list[int] = []
        for text, invalid in zip(runs[::2], [*runs[1::2], ""], strict=True):
            if text:
                ids += self._backend.encode_texts([text])[0]
            for byte in invalid.encode("utf-8", "surrogateescape"):
                if bytes([byte]) not in self._byte_ids:
                    return None
                ids.append(self._byte_ids[bytes([byte])])
        return ids

    def _longest_match(self, data: bytes) -> list[int] | None:
        """Take the longest token at each place; linear for the few token lengths that occur."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            for length in self._ids_by_length:
                token_id = self._ids.get(data[start : start + length])
                if token_id is not None:
                    ids.append(token_id)
                    start += len(self._bytes_of[token_id])
                    break
            else:
                return None
        return ids

    def _emitted_duplicates(self) -> tuple[int, ...]:
        """Return the ids emitted for bytes of several ids, where `canonical_ids` has another."""
        if len(self._bytes_of) == len(self._ids):
            return ()
        count = Counter(self._bytes_of.values())
        shared = [token for token, n in count.items() if n > 1]
        found = self.segment_batch(shared)
        emitted = {t: ids[0] for t, ids in zip(shared, found, strict=True) if ids and len(ids) == 1}
        return tuple(sorted(i for token, i in emitted.items() if self._ids[token] != i))


_INVALID = re.compile("([\udc80-\udcff]+)")


def _width(
    backend: Backend, model_id: str, vocab_size: int | None, largest: int
) -> tuple[int, str]:
    """Return the model's width and its source: an option, else the config, else the tokenizer."""
    width, source = vocab_size, "option"
    says = "as given"
    if width is None:
        width, source = backend.model_vocab_size(), "config"
        says = "from its config"
    if width is None:
        width, source = largest + 1, "tokenizer"
    if width <= largest:
        raise TokenizerError(
            f"the vocabulary size {width} of {model_id} ({says}) does not hold its "
            f"largest token id {largest}",
            hint=f"give the width of the model's logits, at least {largest + 1}, with "
            "--student-vocab-size or --teacher-vocab-size",
        )
    if not 0 < width <= MAX_WIDTH:
        raise TokenizerError(
            f"the vocabulary size {width} of {model_id} ({says}) is not in 1..{MAX_WIDTH}",
            hint="give the width of the model's logits with --student-vocab-size or "
            "--teacher-vocab-size",
        )
    return width, source
