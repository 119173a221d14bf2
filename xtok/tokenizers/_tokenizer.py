"""The `Tokenizer` that the rest of xtok sees, and the `Backend` protocol behind it."""

from __future__ import annotations

import functools
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xtok.config import TokenForm
from xtok.errors import TokenizerError
from xtok.tokenizers._panics import no_panic
from xtok.vocab.roles import find_roles
from xtok.vocab.table import (
    MAX_WIDTH,
    Entries,
    Entry,
    TokenTable,
    TokenType,
    Vocabulary,
    decode_vocabulary,
)


@dataclass(frozen=True, kw_only=True)
class TextChange:
    """What a tokenizer changes about a text before it becomes tokens.

    Attributes:
        normalizer: the component of the tokenizer that does it.
        changes: what it changes, in words.
    """

    normalizer: str
    changes: str


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

    def encode_prompt(self, text: str) -> list[int] | None:
        """Encode a whole text with control tokens recognised; None where the library cannot."""

    def chat_templates(self) -> Mapping[str, str]:
        """Return the Jinja chat templates by name; `default` is the usual one."""

    def text_changes(self) -> Sequence[TextChange]:
        """Return what keeps a text from being the concatenation of its tokens' bytes."""


@runtime_checkable
class ArrayBackend(Protocol):
    """A backend that can also give arrays, which are faster than lists of Python's integers."""

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return what `encode_texts` does, as arrays."""


class Encoding(NamedTuple):
    """A text as ids, and where in it each one stands.

    `ids` is int32 `[T]`; token i is bytes `bounds[i]` to `bounds[i + 1]` of the text in UTF-8,
    int64 `[T + 1]`. A token has none where its library put a space before the text.
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]


class Tokenizer:
    """A loaded tokenizer: its vocabulary as exact bytes, and the exact spelling of any bytes.

    Attributes:
        vocabulary: the token table and where it comes from.
        report: what became of the ids on the way to the table.
        location: the local folder or file (a `Path`) or the repo (a `str`) that it was loaded from.
        notes: what its user should be told about how it was loaded.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        model_id: str,
        location: str | Path | None = None,
        revision: str | None = None,
        vocab_size: int | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.location = location
        self.notes = tuple(notes)
        self._name = model_id
        entries = Entries.of(backend.entries())
        largest = max(entries.ids, default=-1)
        width, source = _width(backend, model_id, vocab_size, largest, len(entries.ids))
        table, self.report = decode_vocabulary(entries, width=width)
        self._backend = backend
        self._table = table = table.with_roles(find_roles(table, backend.declared_roles()))
        self._byte_ids = {table[i]: i for i in table.ids_of_type(TokenType.BYTE).tolist()}
        self._control_names = {i: name.encode() for i, name in table.control_names.items() if name}
        preferred = self._emitted_duplicates()
        if preferred:
            self._table = table = table.with_roles(table.roles, preferred)
        self.vocabulary = Vocabulary(
            model_id=model_id,
            revision=revision,
            backend=backend.name,
            vocab_size=width,
            width_source=source,
            tokenizer_vocab_size=largest + 1,
            table=table,
        )

    @property
    def table(self) -> TokenTable:
        """The token table, which a loaded tokenizer always has."""
        if self.vocabulary.table is None:
            raise ValueError("a loaded tokenizer has a table")
        return self.vocabulary.table

    def table_as(self, form: TokenForm, *, ignore: Collection[int] = ()) -> TokenTable:
        """Return the table in a form of `decode_vocabulary`, with some ids taken for UNUSED."""
        if form == "bytes" and not ignore:
            return self.table
        table, _ = decode_vocabulary(
            self._backend.entries(), width=len(self.table), form=form, ignore=frozenset(ignore)
        )
        return table.like(self.table)

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
        encoded = self.library_ids(texts)
        exact = self._which_spell(encoded, [pieces[row] for row in rows])
        for row, ids, is_exact in zip(rows, encoded, exact, strict=True):
            if is_exact:
                result[row] = ids
        rest = [row for row, ids in enumerate(result) if ids is None]
        for way in (self._by_merges, self._with_byte_tokens, self._longest_matches):
            for row, found in zip(rest, way([pieces[row] for row in rest]), strict=True):
                if found is not None and self._spells(found, pieces[row]):
                    result[row] = found
            rest = [row for row in rest if result[row] is None]
        return result

    def encode(self, text: str) -> Encoding:
        """Encode a rendered prompt: control tokens by their names, the rest byte for byte.

        The ids are those of the library's own encoder. Where that changes the text (a normalizer),
        or knows no control tokens, the stretches between control tokens are segmented instead.

        Raises:
            TokenizerError: if the vocabulary cannot spell the text.
        """
        data = text.encode()
        with no_panic(self._name):
            ids = self._backend.encode_prompt(text)
        bounds = None if ids is None else self._bounds(ids, data)
        if ids is None or bounds is None:
            ids = self._encode_parts(text)
            bounds = self._bounds(ids, data)
        if bounds is None:
            raise ValueError("the parts of a text do not spell it")
        return Encoding(np.array(ids, np.int32), np.array(bounds, np.int64))

    def library_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what the library's own encoder gives in the middle of a text, exact or not."""
        with no_panic(self._name):
            return self._backend.encode_texts(texts)

    def library_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return what `library_ids` does, as int32 arrays; for a tiktoken file it is faster."""
        if isinstance(self._backend, ArrayBackend):
            return self._backend.encode_arrays(texts)
        ids = self.library_ids(texts)
        return [np.asarray(array("i", row), np.int32) for row in ids]  # faster than from a list

    def special_token_names(self) -> dict[str, str]:
        """Return `bos_token` and the like, as chat templates know them, to the token's name."""
        return dict(self._special_token_names)

    def chat_templates(self) -> Mapping[str, str]:
        """Return the Jinja chat templates that the tokenizer brings, by name."""
        return self._chat_templates

    # Read once: a backend may read files, and ask the hub for those that are not there.

    @functools.cached_property
    def _special_token_names(self) -> dict[str, str]:
        names = {}
        for role, ids in self._backend.declared_roles().items():
            for i in list(ids)[:1]:
                name = self._control_names.get(i) or self._bytes_of(i)
                names[f"{role}_token"] = name.decode("utf-8", "replace")
        return names

    @functools.cached_property
    def _chat_templates(self) -> Mapping[str, str]:
        return self._backend.chat_templates()

    @property
    def text_changes(self) -> Sequence[TextChange]:
        """What keeps a text from being the concatenation of its tokens' bytes; mostly nothing."""
        return self._backend.text_changes()

    @functools.cached_property
    def _control_ids(self) -> dict[str, int]:
        ids = self.table.ids_of_type(TokenType.CONTROL).tolist()
        return {name: i for i in reversed(ids) if (name := self.table.control_names[i])}

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        names = sorted(map(re.escape, self._control_ids), key=len, reverse=True)
        return re.compile(f"({'|'.join(names)})") if names else None

    def _encode_parts(self, text: str) -> list[int]:
        """Segment what is between the control tokens of a text."""
        if self._control_pattern is None:
            return self.segment(text.encode())
        parts = self._control_pattern.split(text)
        spelled = self.segment_batch([part.encode() for part in parts[::2]])
        ids: list[int] = []
        for part, found, name in zip(parts[::2], spelled, [*parts[1::2], ""], strict=True):
            ids += self.segment(part.encode()) if found is None else found
            if name:
                ids.append(self._control_ids[name])
        return ids

    def _bounds(self, ids: Sequence[int], data: bytes) -> list[int] | None:
        """Return where each token begins, and the end; None if the ids do not spell the bytes.

        A library may put a space before a stretch of text, and may have a control token take the
        whitespace beside it; nothing else may differ.
        """
        bounds = [0]
        after_control = True
        for token_id in ids:
            name = self._control_names.get(token_id)
            token = self._bytes_of(token_id) if name is None else name
            if not token:
                return None
            place = bounds[-1]
            if not data.startswith(token, place):
                stripped = _skip_whitespace(data, place)
                if (name or after_control) and data.startswith(token, stripped):
                    place = stripped
                    if after_control and len(bounds) > 1:  # the token before has taken it
                        bounds[-1] = place
                elif after_control and token[:1] == b" " and data.startswith(token[1:], place):
                    place -= 1
                else:
                    return None
            bounds.append(place + len(token))
            after_control = name is not None
        if after_control and len(bounds) > 1:
            bounds[-1] = _skip_whitespace(data, bounds[-1])
        return bounds if bounds[-1] == len(data) else None

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of an id, none for one that has none or that is not there."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        """Tell whether all ids are text and their bytes concatenate to `data`."""
        tokens = [self._bytes_of(i) for i in ids]
        return all(tokens) and b"".join(tokens) == data

    def _which_spell(self, encoded: Sequence[Sequence[int]], pieces: Sequence[bytes]) -> list[bool]:
        """Tell for many byte strings at once whether the ids of each spell it, as `_spells` does.

        One comparison of all bytes: a tenth of the time of one string after another.
        """
        table, num = self._table, len(pieces)
        counts = np.fromiter(map(len, encoded), np.int64, num)
        ids = np.fromiter(chain.from_iterable(encoded), np.int64, int(counts.sum()))
        owner = np.repeat(np.arange(num), counts)
        lengths = np.zeros(len(ids), np.int64)
        known = (ids >= 0) & (ids < len(table))
        lengths[known] = table.lengths[ids[known]]
        sizes = np.fromiter(map(len, pieces), np.int64, num)
        exact = np.bincount(owner, lengths, num) == sizes
        exact[owner[lengths == 0]] = False
        of_exact = exact[owner]
        ids, lengths = ids[of_exact], lengths[of_exact]
        before = np.cumsum(lengths) - lengths
        places = np.repeat(table.offsets[ids] - before, lengths) + np.arange(int(lengths.sum()))
        given = b"".join(piece for piece, is_exact in zip(pieces, exact, strict=True) if is_exact)
        differ = table.data[places] != np.frombuffer(given, np.uint8)
        exact[np.repeat(np.flatnonzero(exact), sizes[exact])[differ]] = False
        found: list[bool] = exact.tolist()
        return found

    def _by_merges(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Encode bytes by the model's own merges, where it has any on bytes."""
        with no_panic(self._name):
            return [self._backend.encode_bytes(piece) for piece in pieces]

    def _with_byte_tokens(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Encode the runs of valid UTF-8 as text, and spell the bytes between as BYTE tokens."""
        runs = [_INVALID.split(piece.decode("utf-8", "surrogateescape")) for piece in pieces]
        texts = sorted({text for parts in runs for text in parts[::2] if text})
        ids_of = dict(zip(texts, self.library_ids(texts), strict=True)) if texts else {}
        return [self._spelled(parts, ids_of) for parts in runs]

    def _spelled(self, runs: Sequence[str], ids_of: Mapping[str, list[int]]) -> list[int] | None:
        """Join the ids of text and, at odd places, of other bytes; None without byte tokens."""
        ids: list[int] = []
        for place, run in enumerate(runs):
            if place % 2 == 0:
                ids += ids_of.get(run, ())
                continue
            for byte in run.encode("utf-8", "surrogateescape"):
                if bytes([byte]) not in self._byte_ids:
                    return None
                ids.append(self._byte_ids[bytes([byte])])
        return ids

    @functools.cached_property
    def _token_lengths(self) -> list[int]:
        lengths: list[int] = np.unique(self._table.lengths[self._table.text_ids]).tolist()
        return lengths[::-1]

    def _longest_matches(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Take the longest token at each place; linear for the few token lengths that occur."""
        return [self._longest_match(piece) for piece in pieces]

    def _longest_match(self, data: bytes) -> list[int] | None:
        known = self._table.canonical_ids()
        ids: list[int] = []
        start = 0
        while start < len(data):
            for length in self._token_lengths:
                token_id = known.get(data[start : start + length])
                if token_id is not None:
                    ids.append(token_id)
                    start += len(self._table[token_id])
                    break
            else:
                return None
        return ids

    def _emitted_duplicates(self) -> tuple[int, ...]:
        """Return the ids emitted for bytes of several ids, where `canonical_ids` has another."""
        known, tokens = self._table.canonical_ids(), self._table.tokens()
        if self.report.num_text == len(known):
            return ()
        count = Counter(filter(None, tokens))
        shared = [token for token, n in count.items() if n > 1]
        found = self.segment_batch(shared)
        emitted = {t: ids[0] for t, ids in zip(shared, found, strict=True) if ids and len(ids) == 1}
        return tuple(sorted(i for token, i in emitted.items() if known[token] != i))


_INVALID = re.compile("([\udc80-\udcff]+)")
_WHITESPACE = re.compile(rb"\s*")


def _skip_whitespace(data: bytes, place: int) -> int:
    found = _WHITESPACE.match(data, place)
    return place if found is None else found.end()


# Widths up to here are cheap, however few the tokens; the widest of models in use is 262,208.
_MANY_IDS = 1 << 20


def _width(
    backend: Backend, model_id: str, vocab_size: int | None, largest: int, num_tokens: int
) -> tuple[int, str]:
    """Return the model's width and its source: an option, else the config, else the tokenizer."""
    width, source = vocab_size, "option"
    says = "as given"
    if width is None:
        width, source = backend.model_vocab_size(), "config"
        says = "from its config"
    if width is None:
        width, source = largest + 1, "tokenizer"
        says = "its largest token id + 1"
    if width <= largest:
        raise TokenizerError(
            f"the vocabulary size {width} of {model_id} ({says}) does not hold its "
            f"largest token id {largest}",
            hint=f"give the width of the model's logits, at least {largest + 1}, with {{option}}",
            parameter="vocab_size",
        )
    if source != "option" and width > max(_MANY_IDS, 4 * num_tokens):
        raise TokenizerError(
            f"{model_id} has {num_tokens} tokens, and a vocabulary size of {width} ({says})",
            hint="its files may be damaged; if the model is as wide as that, give {option}",
            parameter="vocab_size",
        )
    if not 0 < width <= MAX_WIDTH:
        raise TokenizerError(
            f"the vocabulary size {width} of {model_id} ({says}) is not in 1..{MAX_WIDTH}",
            hint="give the width of the model's logits with {option}",
            parameter="vocab_size",
        )
    return width, source
