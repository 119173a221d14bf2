"""A vocabulary as exact bytes: token types, the token table, and decoding."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise, repeat, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.config import TokenForm
from xtok.errors import TokenizerError, XtokError
from xtok.tokenizers.display import escape, printable, quoted, shorten, text_bytes, unescape

MAX_NAME = 1 << 10
"""Bytes of the longest name of a special token; those in use stay below 100."""


class TokenType(IntEnum):
    """What a token id is, with the names and numbers of SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenEntry(NamedTuple):
    """One id of a tokenizer.

    `content` is the token's bytes, or the name of a CONTROL or UNKNOWN token. `display` is the
    vocabulary's display string, if it differs from the content.
    """

    id: int
    type: TokenType
    content: bytes
    display: bytes = b""


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The exact bytes of every token id of a vocabulary of width V."""

    data: NDArray[np.uint8]  # [total], the tokens' bytes, one after another
    offsets: NDArray[np.int64]  # [V + 1]; token i is data[offsets[i]:offsets[i + 1]]
    types: NDArray[np.uint8]  # [V]; CONTROL, UNKNOWN and UNUSED ids have no bytes
    control_names: Mapping[int, str] = field(default_factory=dict)  # of CONTROL and UNKNOWN ids
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the declared id first
    # Ids that the tokenizer emits for bytes that another id has too, where `canonical_ids` would
    # choose another by type and number.
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
    def has_upper_case(self) -> bool:
        """Whether tokens have letters from A to Z: 1 % of them, as names like [MASK] have them."""
        is_upper = (self.data >= ord("A")) & (self.data <= ord("Z"))
        owners = np.repeat(np.arange(len(self)), self.lengths)
        return len(np.unique(owners[is_upper])) > len(self.text_ids) / 100

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

    def entries(self) -> Iterator[TokenEntry]:
        """Return entries that `decode_vocabulary` makes this table of, without UNUSED ids."""
        for i, (kind, token) in enumerate(zip(self.types.tolist(), self.tokens(), strict=True)):
            if kind != TokenType.UNUSED:
                name = self.control_names.get(i)
                yield TokenEntry(i, TokenType(kind), token if name is None else name.encode())

    def like(self, table: TokenTable) -> TokenTable:
        """Return this table with the roles and preferred ids of another, UNUSED ids aside."""
        used = self.types != TokenType.UNUSED
        roles = {role: tuple(i for i in ids if used[i]) for role, ids in table.roles.items()}
        return replace(
            self,
            roles={role: ids for role, ids in roles.items() if ids},
            preferred_ids=tuple(i for i in table.preferred_ids if used[i]),
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

    def ids_of(self, token: str | bytes) -> list[int]:
        r"""Return the ids of a token in ascending order; several ids may have the same bytes.

        Args:
            token: its text, as it is or as reports show it (`\xe4` for a byte), or the name of a
                control token; or its exact bytes.

        >>> table = xtok.load_tokenizer("bytes").table
        >>> table.ids_of("a"), table.ids_of(r"\xe4"), table.ids_of(b"\xe4"), table.ids_of("the")
        ([97], [228], [228], [])
        """
        spellings = {token} if isinstance(token, bytes) else {text_bytes(token), unescape(token)}
        tokens = self.tokens()
        ids = [i for i in self.text_ids.tolist() if tokens[i] in spellings]
        return ids + [i for i, name in self.control_names.items() if name == token]

    @functools.cached_property
    def roles_by_id(self) -> dict[int, tuple[str, ...]]:
        """The roles of each id that has any."""
        roles: dict[int, tuple[str, ...]] = {}
        for role, ids in self.roles.items():
            for i in ids:
                roles[i] = (*roles.get(i, ()), role)
        return roles

    def around(
        self, ids: Sequence[int], *, bos: bool = True, eos: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return the bos and eos to put around a text's ids: none where it has its own already."""
        begins, ends = (self.roles.get(role, ()) for role in ("bos", "eos"))
        return (
            [*begins[:1]] if bos and not {*ids[:1]} & {*begins} else [],
            [*ends[:1]] if eos and not {*ids[-1:]} & {*ends} else [],
        )

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
        return shorten(self.name(token_id))

    def quoted(self, token_id: int) -> str:
        """Return an id's name as `display.quoted` shows it; `(none)` beyond the table."""
        return quoted(self.name(token_id)) if token_id < len(self) else "(none)"

    def at_width(self, width: int) -> TokenTable:
        """Return the table with another number of UNUSED ids behind its largest token's."""
        more, end = width - len(self), min(width, len(self))
        types = np.pad(self.types[:end], (0, max(0, more)), constant_values=TokenType.UNUSED)
        offsets = np.pad(self.offsets[: end + 1], (0, max(0, more)), mode="edge")
        return replace(self, types=types, offsets=offsets)

    def sha256(self) -> str:
        """Return a digest of the vocabulary, independent of its width and of its reader.

        It covers the types (uint8), the offsets (little-endian int64), the bytes and the control
        names (JSON with sorted ids), up to the last id that is not UNUSED.
        """
        return self._sha256

    @functools.cached_property
    def _sha256(self) -> str:
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
    """One side of a map: a token table, and which model it is of."""

    model_id: str  # repo id as given, or the last component of a folder or file
    revision: str | None  # the repo's commit, if known; else what was given
    backend: str | None  # the reader of the tokenizer: hf, sentencepiece, tiktoken, tekken …
    vocab_size: int  # V, the width of the model's logits
    # option, config, model type, tokenizer, map; or ids: the largest of a map without one
    width_source: str
    tokenizer_vocab_size: int | None  # the tokenizer's largest id within V + 1
    table: TokenTable | None  # None for a map from elsewhere that carries no tokens
    # `Tokenizer.definition_sha256` of what a map was made of; None where it is not known.
    definition_sha256: str | None = None

    @property
    def is_lower_bound(self) -> bool:
        """Whether it is of a file by another program, which may have fewer rows than V."""
        return self.table is None and self.width_source in ("ids", "map")

    def ids_of(self, token: str | bytes | int) -> list[int]:
        r"""Return the ids of a token; several ids may have the same bytes.

        Args:
            token: its text, as it is or as reports show it (`\xe4` for a byte), or the name of a
                control token; its exact bytes; or an id, which is returned alone.

        Raises:
            XtokError: if there is no such token or id, or the tokens are not known.
        """
        if not isinstance(token, str | bytes):
            token = operator.index(token)
            if not 0 <= token < self.vocab_size:
                raise XtokError(
                    f"{self.model_id} has no id {token}: its ids are 0 to {self.vocab_size - 1}",
                    hint="give another id, or the token itself",
                )
            return [token]
        if self.table is None:
            raise XtokError(
                f"the map contains no tokens of {self.model_id}: xtok did not write it",
                hint="give the token's id instead",
            )
        ids = self.table.ids_of(token)
        if not ids:
            shown = printable(token) if isinstance(token, str) else escape(token)
            number = token if isinstance(token, str) and token.isdecimal() else ""
            raise XtokError(
                f"{self.model_id} has no token '{shown}'",
                hint="a space is part of a token, as in ' the'; bytes are written like '\\xe4'"
                + f"; the token of id {number} is --id {number}, in Python a number" * bool(number),
            )
        return ids


def decode_vocabulary(
    entries: Iterable[TokenEntry],
    *,
    width: int,
    form: TokenForm = "bytes",
    ignore: Collection[int] = (),
) -> tuple[TokenTable, tuple[int, ...]]:
    """Make a table of `width` ids, and name the text ids that decode to nothing.

    Ids that the tokenizer lacks are UNUSED.

    Args:
        entries: every id once, in any order.
        width: V.
        form: what represents a token: its `bytes`; `text`, the bytes decoded as UTF-8 with U+FFFD
            for what is not; `raw`, the display string.
        ignore: ids to treat as UNUSED.

    Raises:
        TokenizerError: if an id is outside the width or occurs twice, or a special token has a
            invalid name.
    """
    decoded = Decoded(entries, form=form, ignore=ignore)
    return decoded.table(width), decoded.undecodable


class Decoded:
    """What a tokenizer's entries hold, before the width of the table is known.

    Entries are not kept: 100,000 of them keep Python's garbage collector busy for a tenth of a
    second. The arguments are those of `decode_vocabulary`.

    Raises:
        TokenizerError: if an id occurs twice, or a special token has an invalid name.
    """

    def __init__(
        self,
        entries: Iterable[TokenEntry],
        *,
        form: TokenForm = "bytes",
        ignore: Collection[int] = (),
    ) -> None:
        tokens: dict[int, bytes] = {}
        kinds: list[TokenType] = []
        names: dict[int, str] = {}
        undecodable: list[int] = []
        control, unknown, unused = TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED
        for token_id, kind, content, display in entries:
            if ignore and token_id in ignore:
                continue
            if token_id in tokens:
                raise _misplaced(token_id, content, "is duplicated in the vocabulary")
            token = content
            if kind is control or kind is unknown:
                if len(content) > MAX_NAME:
                    raise TokenizerError(
                        f"the special token {token_id} has a name of {len(content):,} bytes",
                        hint=f"use a name of at most {MAX_NAME:,} bytes",
                    )
                names[token_id] = content.decode("utf-8", "backslashreplace")
                token = b""
            elif kind is unused:
                token = b""
            else:
                if form == "text":
                    token = content.decode("utf-8", "replace").encode()
                elif form == "raw":
                    token = display or content
                if not content:
                    undecodable.append(token_id)
            tokens[token_id] = token
            kinds.append(kind)
        self._tokens, self._kinds, self._names = tokens, kinds, dict(sorted(names.items()))
        self.ids = tokens.keys()
        self.undecodable = tuple(sorted(undecodable))

    def cut(self, width: int) -> dict[int, bytes]:
        """Take out the ids from a width on, and return their bytes or names by id."""
        outside = sorted(i for i in self._tokens if i >= width)
        if not outside:
            return {}
        left = [(i, kind) for i, kind in zip(self._tokens, self._kinds, strict=True) if i < width]
        self._kinds = [kind for _, kind in left]
        self.undecodable = tuple(i for i in self.undecodable if i < width)
        tokens = ((i, self._tokens.pop(i), self._names.pop(i, "")) for i in outside)
        return {i: token or name.encode() for i, token, name in tokens}

    def table(self, width: int) -> TokenTable:
        """Return the table of `width` ids.

        Raises:
            TokenizerError: if an id is outside the width.
        """
        outside = next((i for i in self.ids if not 0 <= i < width), None)
        if outside is not None:
            content = self._tokens[outside] or self._names.get(outside, "").encode()
            raise _misplaced(outside, content, f"of the vocabulary is outside its size {width}")
        ids = np.fromiter(self.ids, np.int64, len(self.ids))
        types = np.full(width, TokenType.UNUSED, np.uint8)
        types[ids] = np.frombuffer(bytes(self._kinds), np.uint8)
        lengths = np.zeros(width, np.int64)
        lengths[ids] = np.fromiter(map(len, self._tokens.values()), np.int64, len(ids))
        tokens = list(self._tokens.values())
        data = b"".join([tokens[place] for place in np.argsort(ids).tolist()])
        offsets = offsets_of(lengths)
        return TokenTable(np.frombuffer(data, np.uint8), offsets, types, self._names)


def _misplaced(token_id: int, content: bytes, problem: str) -> TokenizerError:
    return TokenizerError(
        f"token id {token_id} ({quoted(escape(content))}) {problem}",
        hint="the tokenizer's files are damaged: fetch them again",
    )


def same_tokens(ours: TokenTable | None, other: TokenTable | None) -> bool:
    """Check that two tables have the same bytes and control tokens; widths may differ.

    Types may differ too: Transformers treats some unknown tokens as control tokens.
    """
    if ours is None or other is None or ours is other:
        return ours is other
    width = min(len(ours), len(other))
    rests = ours.lengths[width:], other.lengths[width:]
    return (
        ours.control_names == other.control_names
        and not any(rest.any() for rest in rests)
        and np.array_equal(ours.lengths[:width], other.lengths[:width])
        and np.array_equal(ours.data, other.data)
    )


def differing_ids(ours: TokenTable, other: TokenTable) -> Iterator[int]:
    """Yield the ids that do not have the same bytes and control name in two tables, rising."""
    pairs = enumerate(zip_longest(ours.tokens(), other.tokens(), fillvalue=b""))
    names = ours.control_names, other.control_names
    return (i for i, (a, b) in pairs if a != b or names[0].get(i) != names[1].get(i))


def match_bytes(student: TokenTable, teacher: TokenTable) -> NDArray[np.int64]:
    """Return, for each student id, the teacher id of the same bytes, int64 `[V_student]`, or −1.

    Of several teacher ids with these bytes, it is the one that the tokenizer emits.
    """
    id_of = teacher.canonical_ids().get
    return np.fromiter(map(id_of, student.tokens(), repeat(-1)), np.int64, len(student))


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Return where each character of a text begins in its UTF-8, and the end, int64 `[n + 1]`.

    >>> byte_offsets("né").tolist()
    [0, 1, 3]
    """
    if text.isascii():
        return np.arange(len(text) + 1)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    return offsets_of(sizes)


def utf8_text(data: bytes) -> str | None:
    """Return bytes as text; None for what is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


_INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, by `surrogateescape`


def utf8_runs(data: bytes) -> list[str]:
    r"""Return text, and bytes that are not UTF-8, in turn; text, if empty, is first and last.

    >>> utf8_runs(b"n\xc3\xa9\xe6\x9d")
    ['né', '\udce6\udc9d', '']
    """
    return _INVALID.split(data.decode("utf-8", "surrogateescape"))
