"""A vocabulary as exact bytes: token types, the token table, and decoding."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import TokenForm
from xtok.errors import TokenizerError
from xtok.vocab.display import escape, quoted, shortened

MAX_WIDTH = 2**24
"""The widest vocabulary accepted: 64 times the largest in use; ids stay int32."""


class TokenType(IntEnum):
    """What a token id is, with the names and numbers of SentencePiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Entry(NamedTuple):
    """One id of a tokenizer.

    `content` is the token's bytes, or the name of a CONTROL or UNKNOWN token. `display` is the
    vocabulary's display string, if it differs from the content.
    """

    id: int
    type: TokenType
    content: bytes
    display: bytes = b""


@dataclass(frozen=True)
class Entries:
    """Entries as columns of one length, without an object per token.

    `displays` makes the column of display strings, empty if there are none; it is seldom needed.
    """

    ids: Sequence[int]
    types: Sequence[int]
    contents: Sequence[bytes]
    displays: Callable[[], Sequence[bytes]] = tuple

    def __iter__(self) -> Iterator[Entry]:
        displays = self.displays() or repeat(b"", len(self.ids))
        columns = zip(self.ids, self.types, self.contents, displays, strict=True)
        for token_id, kind, content, display in columns:
            yield Entry(token_id, TokenType(kind), content, display)

    @staticmethod
    def of(entries: Iterable[Entry]) -> Entries:
        """Return any entries as columns."""
        if isinstance(entries, Entries):
            return entries
        rows = list(entries)
        if not rows:
            return Entries((), (), ())
        ids, types, contents, displays = zip(*rows, strict=True)
        return Entries(ids, types, contents, lambda: displays)

    def without(self, ids: Collection[int]) -> Entries:
        """Return the entries without some ids."""
        return Entries.of(entry for entry in self if entry.id not in ids)


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The exact bytes of every token id of a vocabulary of width V.

    Attributes:
        data: uint8 `[total]`, the tokens' bytes, one after another.
        offsets: int64 `[V + 1]`; token i is `data[offsets[i]:offsets[i + 1]]`.
        types: uint8 `[V]`, a `TokenType` each. CONTROL, UNKNOWN and UNUSED ids have no bytes.
        control_names: id to name, for CONTROL and UNKNOWN ids.
        roles: role to ids in rising order; an id may have several roles.
        preferred_ids: ids that the tokenizer emits for bytes that another id has too, where
            `canonical_ids` would choose another by type and number.
    """

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    types: NDArray[np.uint8]
    control_names: Mapping[int, str] = field(default_factory=dict)
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    preferred_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.types)

    def __repr__(self) -> str:
        return f"TokenTable({len(self)} ids, {len(self.data)} bytes)"

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of one id (0 ≤ id < V), empty for an id without bytes."""
        if not 0 <= token_id < len(self):
            raise IndexError(f"token id {token_id} is not in 0..{len(self) - 1}")
        return self.data[self.offsets[token_id] : self.offsets[token_id + 1]].tobytes()

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes per token, int64 `[V]`; 0 for an id without bytes."""
        return np.diff(self.offsets)

    @property
    def text_ids(self) -> NDArray[np.int64]:
        """The ids that stand for bytes, int64, in rising order."""
        return np.flatnonzero(self.lengths)

    def ids_of_type(self, *types: TokenType) -> NDArray[np.int64]:
        """Return the ids of the given types, int64, in rising order."""
        return np.flatnonzero(np.isin(self.types, [int(t) for t in types]))

    def tokens(self) -> list[bytes]:
        """Return the bytes of all V ids; a cached list, not to be changed."""
        return self._tokens

    @functools.cached_property
    def _tokens(self) -> list[bytes]:
        data, bounds = self.data.tobytes(), self.offsets.tolist()
        return [data[a:b] for a, b in pairwise(bounds)]

    def entries(self) -> Iterator[Entry]:
        """Return entries that `decode_vocabulary` makes this table of, without UNUSED ids."""
        for i, (kind, token) in enumerate(zip(self.types.tolist(), self.tokens(), strict=True)):
            if kind != TokenType.UNUSED:
                name = self.control_names.get(i)
                yield Entry(i, TokenType(kind), token if name is None else name.encode())

    def like(self, table: TokenTable) -> TokenTable:
        """Return this table with the roles and preferred ids of another, UNUSED ids aside."""
        used = self.types != TokenType.UNUSED
        roles = {role: tuple(i for i in ids if used[i]) for role, ids in table.roles.items()}
        return self.with_roles(
            {role: ids for role, ids in roles.items() if ids},
            tuple(i for i in table.preferred_ids if used[i]),
        )

    def canonical_ids(self) -> dict[bytes, int]:
        """Return one id for each byte string of the vocabulary; a cached dict, not to be changed.

        Of several ids with the same bytes: the one that the tokenizer itself emits, then any other
        type before BYTE, then the lowest id.
        """
        return self._canonical_ids

    @functools.cached_property
    def _canonical_ids(self) -> dict[bytes, int]:
        ids, tokens = self.text_ids, self._tokens
        id_of = dict(zip(filter(None, tokens), ids.tolist(), strict=True))
        if len(id_of) < len(ids):
            preferred = np.isin(ids, self.preferred_ids)
            last_wins = np.lexsort((-ids, self.types[ids] != TokenType.BYTE, preferred))
            id_of = {tokens[i]: i for i in ids[last_wins].tolist()}
        return id_of

    def with_roles(
        self, roles: Mapping[str, tuple[int, ...]], preferred_ids: tuple[int, ...] = ()
    ) -> TokenTable:
        """Return the same tokens with other roles and preferred ids."""
        other = replace(self, roles=roles, preferred_ids=preferred_ids)
        vars(other)["_tokens"] = self._tokens  # no second copy of 150,000 byte strings
        return other

    def name(self, token_id: int) -> str:
        """Return an id as people read it: escaped bytes, a control name, or its type."""
        if token := self[token_id]:
            return escape(token)
        name = self.control_names.get(token_id)
        if name is not None:
            return escape(name.encode())
        return f"({TokenType(int(self.types[token_id])).name.lower()})"

    def shown(self, token_id: int) -> str:
        """Return an id's name, shortened for reports and messages."""
        return shortened(self.name(token_id))

    def sha256(self) -> str:
        """Return a digest of the vocabulary, independent of its width and of its reader.

        It covers the types (uint8), the offsets (little-endian int64), the bytes and the control
        names (JSON with sorted ids), up to the last id that is not UNUSED.
        """
        used = np.flatnonzero(self.types != TokenType.UNUSED)
        end = int(used[-1]) + 1 if len(used) else 0
        digest = hashlib.sha256(self.types[:end].tobytes())
        digest.update(self.offsets[: end + 1].astype("<i8").tobytes())
        digest.update(self.data.tobytes())
        names = [[i, self.control_names[i]] for i in sorted(self.control_names)]
        digest.update(json.dumps(names).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """One side of a map: a token table, and which model it is of.

    Attributes:
        model_id: repo id as given, or the last component of a folder or file.
        revision: branch, tag or commit as given.
        backend: the reader of the tokenizer: `hf`, `sentencepiece`, `tiktoken`, `tekken` …
        vocab_size: the width of the model's logits, V.
        width_source: where the width comes from: `option`, `config`, `tokenizer`, `map`, or `ids`
            for a lower bound: the largest id of a map without a width, plus 1.
        tokenizer_vocab_size: the tokenizer's largest id + 1.
        table: None for a map from elsewhere that carries no tokens.
    """

    model_id: str
    revision: str | None
    backend: str | None
    vocab_size: int
    width_source: str
    tokenizer_vocab_size: int | None
    table: TokenTable | None

    @property
    def width_is_known(self) -> bool:
        """Whether `vocab_size` is the width, and not a lower bound."""
        return self.width_source != "ids"

    @property
    def width(self) -> str:
        """The width as people read it: `32,768`, or `at least 32,000`."""
        return f"{'' if self.width_is_known else 'at least '}{self.vocab_size:,}"


@dataclass(frozen=True)
class DecodeReport:
    """What a vocabulary's ids became in a `TokenTable`.

    Attributes:
        num_text: ids that have bytes.
        num_control: CONTROL and UNKNOWN ids.
        num_unused: ids of the width that the tokenizer does not have.
        undecodable: text ids that decode to nothing.
    """

    num_text: int
    num_control: int
    num_unused: int
    undecodable: tuple[int, ...]


def decode_vocabulary(
    entries: Iterable[Entry],
    *,
    width: int,
    form: TokenForm = "bytes",
    ignore: Collection[int] = (),
) -> tuple[TokenTable, DecodeReport]:
    """Make a table of `width` ids; those that the tokenizer lacks are UNUSED.

    Args:
        entries: every id once, in any order.
        width: V.
        form: what represents a token: its `bytes`; `text`, the bytes decoded as UTF-8 with U+FFFD
            for what is not; `raw`, the display string.
        ignore: ids to treat as UNUSED.

    Raises:
        TokenizerError: if an id is outside the width, or occurs twice.
    """
    columns = Entries.of(entries)
    if ignore:
        columns = columns.without(ignore)
    ids = np.array(columns.ids, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= width or np.bincount(ids).max() > 1):
        raise _misplaced(columns, width)
    types = np.full(width, TokenType.UNUSED, np.uint8)
    types[ids] = np.array(columns.types, np.uint8)
    contents: list[bytes] = [b""] * width
    for token_id, content in zip(columns.ids, columns.contents, strict=True):
        contents[token_id] = content
    named = np.isin(types, [TokenType.CONTROL, TokenType.UNKNOWN])
    names: dict[int, str] = {}
    for token_id in np.flatnonzero(named).tolist():
        names[token_id] = contents[token_id].decode("utf-8", "backslashreplace")
        contents[token_id] = b""
    for token_id in ids[types[ids] == TokenType.UNUSED].tolist():
        contents[token_id] = b""
    text = ~named & (types != TokenType.UNUSED)
    lengths = np.fromiter(map(len, contents), np.int64, width)
    undecodable = np.flatnonzero(text & (lengths == 0))
    if form != "bytes":
        for token_id, content in zip(columns.ids, _in_form(columns, form), strict=True):
            if text[token_id]:
                contents[token_id] = content
        lengths = np.fromiter(map(len, contents), np.int64, width)
    offsets = np.zeros(width + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    table = TokenTable(np.frombuffer(b"".join(contents), np.uint8), offsets, types, names)
    vars(table)["_tokens"] = contents
    report = DecodeReport(
        num_text=len(table.text_ids),
        num_control=len(names),
        num_unused=int(np.count_nonzero(types == TokenType.UNUSED)),
        undecodable=tuple(undecodable.tolist()),
    )
    return table, report


def _in_form(columns: Entries, form: TokenForm) -> list[bytes]:
    """Return the tokens in a form; see `decode_vocabulary`."""
    if form == "text":
        return [content.decode("utf-8", "replace").encode() for content in columns.contents]
    pairs = zip(columns.displays() or columns.contents, columns.contents, strict=True)
    return [display or content for display, content in pairs]


def _misplaced(entries: Iterable[Entry], width: int) -> TokenizerError:
    """Return the error of the first entry, by id, that is out of range or a duplicate."""
    seen: set[int] = set()
    for token_id, _, content, _ in sorted(entries):
        token = quoted(escape(content))
        if not 0 <= token_id < width:
            return TokenizerError(
                f"token id {token_id} ({token}) is outside the vocabulary size {width}",
                hint=f"give a vocabulary size of at least {token_id + 1}",
            )
        if token_id in seen:
            break
        seen.add(token_id)
    return TokenizerError(
        f"token id {token_id} stands twice in the vocabulary (again as {token})",
        hint="the tokenizer's files are damaged: fetch them again",
    )


def match_bytes(student: TokenTable, teacher: TokenTable) -> dict[int, int]:
    """Return, for each student id whose bytes a teacher token has, that teacher id."""
    id_of = teacher.canonical_ids().get
    teacher_ids = np.fromiter(map(id_of, student.tokens(), repeat(-1)), np.int64, len(student))
    rows = np.flatnonzero(teacher_ids >= 0)
    return dict(zip(rows.tolist(), teacher_ids[rows].tolist(), strict=True))
