"""Represent a vocabulary as a table of exact bytes and token types."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise, repeat, zip_longest
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.config import TokenForm
from xtok.errors import TokenizerError, XtokError
from xtok.tokenizers.display import escape, printable, quoted, shorten, text_bytes, unescape

Ids: TypeAlias = NDArray[np.int64]
"""One-dimensional array of token ids or event ids."""

SIDES = "student", "teacher"
"""Rows of a map belong to the student, columns to the teacher."""

MAX_WIDTH = 2**24
"""Maximum width of a vocabulary: 64 times the largest published width."""

MAX_NAME = 1 << 10
"""Maximum length of a special token's name in bytes. Published names are shorter than 100."""


class TokenType(IntEnum):
    """Type of a token id. Names and numbers are from SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenEntry(NamedTuple):
    """A token of a tokenizer, as the input of a `TokenTable`."""

    id: int
    type: TokenType
    content: bytes  # the token's bytes, or the name of a CONTROL or UNKNOWN token
    display: bytes = b""  # the token's string in the files; empty if equal to `content`


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The exact bytes of all token ids in a vocabulary of width V."""

    data: NDArray[np.uint8]  # [total], bytes of all tokens
    offsets: NDArray[np.int64]  # [V + 1], start of each token in `data`, then the total
    types: NDArray[np.uint8]  # [V], types; CONTROL, UNKNOWN and UNUSED ids have no bytes
    control_names: Mapping[int, str] = field(default_factory=dict)  # id → name (CONTROL, UNKNOWN)
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # declared ids first
    # Ids that the tokenizer emits for bytes with several ids, if `canonical_ids` would select other
    # ids by default.
    preferred_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.types)

    def __repr__(self) -> str:
        return f"TokenTable({len(self)} ids, {len(self.data)} bytes)"

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of an id (0 ≤ id < V), or empty bytes for an id without text."""
        if not 0 <= token_id < len(self):
            raise IndexError(f"token id {token_id} is outside 0..{len(self) - 1}")
        return self.data[self.offsets[token_id] : self.offsets[token_id + 1]].tobytes()

    def spell(self, token_ids: Iterable[int]) -> bytes:
        """Return the concatenated bytes of ids."""
        return b"".join(map(self.__getitem__, token_ids))

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of bytes per token, `[V]`, int64."""
        return np.diff(self.offsets)

    @property
    def has_upper_case(self) -> bool:
        """Whether more than 1 % of the tokens contain letters from A to Z."""
        is_upper = (self.data >= ord("A")) & (self.data <= ord("Z"))
        owners = np.repeat(np.arange(len(self)), self.lengths)
        return len(np.unique(owners[is_upper])) > len(self.text_ids) / 100

    @property
    def text_ids(self) -> NDArray[np.int64]:
        """The ids that have bytes, int64, ascending."""
        return np.flatnonzero(self.lengths)

    @functools.cached_property
    def is_control(self) -> NDArray[np.bool_]:
        """Mask of CONTROL and UNKNOWN ids, `[V]`, bool."""
        return np.isin(self.types, [TokenType.CONTROL, TokenType.UNKNOWN])

    def ids_of_type(self, *types: TokenType) -> NDArray[np.int64]:
        """Return the ids of the given types, int64, ascending."""
        return np.flatnonzero(np.isin(self.types, [int(t) for t in types]))

    def tokens(self) -> list[bytes]:
        """Return the bytes of all V ids. Do not modify the cached list."""
        return self._tokens

    @functools.cached_property
    def _tokens(self) -> list[bytes]:
        data, bounds = self.data.tobytes(), self.offsets.tolist()
        return [data[a:b] for a, b in pairwise(bounds)]

    @functools.cached_property
    def named_tokens(self) -> list[bytes]:
        """The bytes of each id. For a control token, the result contains the bytes of the name."""
        names = self.control_names
        return [names[i].encode() if i in names else token for i, token in enumerate(self._tokens)]

    def entries(self) -> Iterator[TokenEntry]:
        """Yield the entries of all ids that are not UNUSED, as input for `Decoded`."""
        for i, (kind, token) in enumerate(zip(self.types.tolist(), self.named_tokens, strict=True)):
            if kind != TokenType.UNUSED:
                yield TokenEntry(i, TokenType(kind), token)

    def like(self, table: TokenTable) -> TokenTable:
        """Return a copy with the roles and preferred ids of `table`, except UNUSED ids."""
        is_used = self.types != TokenType.UNUSED
        roles = {role: tuple(i for i in ids if is_used[i]) for role, ids in table.roles.items()}
        return replace(
            self,
            roles={role: ids for role, ids in roles.items() if ids},
            preferred_ids=tuple(i for i in table.preferred_ids if is_used[i]),
        )

    def canonical_ids(self) -> dict[bytes, int]:
        """Return one id for each byte string. Do not modify the cached dict.

        If several ids have the same bytes, the dict contains the id in `preferred_ids`, otherwise
        the lowest id that is not of type BYTE, otherwise the lowest id.
        """
        return self._canonical_ids

    @functools.cached_property
    def _canonical_ids(self) -> dict[bytes, int]:
        ids, tokens = self.text_ids, self._tokens
        ids_by_token = dict(zip(filter(None, tokens), ids.tolist(), strict=True))
        if len(ids_by_token) < len(ids):
            preferred = np.isin(ids, self.preferred_ids)
            last_wins = np.lexsort((-ids, self.types[ids] != TokenType.BYTE, preferred))
            ids_by_token = {tokens[i]: i for i in ids[last_wins].tolist()}
        return ids_by_token

    @functools.cached_property
    def emitted_ids(self) -> NDArray[np.int64]:
        """The values of `canonical_ids`, int64, ascending."""
        return np.sort(np.fromiter(self._canonical_ids.values(), np.int64))

    def ids_of(self, token: str | bytes) -> list[int]:
        r"""Return all ids of a token, ascending. Several ids can have the same bytes.

        Args:
            token: the token's exact bytes, its text (plain, or escaped with `\xe4` for a byte), or
                the name of a control token.

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
        """The roles of each id that has a role."""
        roles: dict[int, tuple[str, ...]] = {}
        for role, ids in self.roles.items():
            for i in ids:
                roles[i] = (*roles.get(i, ()), role)
        return roles

    def around(
        self, ids: Sequence[int], *, bos: bool = True, eos: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return the ids to add around a text: the bos id before it, and the eos id after it.

        Both results are lists. A list is empty if its flag is False, if the ids already have the
        token, or if the tokenizer has no such token.
        """
        bos_ids, eos_ids = (self.roles.get(role, ()) for role in ("bos", "eos"))
        return (
            [*bos_ids[:1]] if bos and not {*ids[:1]} & {*bos_ids} else [],
            [*eos_ids[:1]] if eos and not {*ids[-1:]} & {*eos_ids} else [],
        )

    def name(self, token_id: int) -> str:
        """Return a readable name of an id: the escaped bytes, the control name or the type."""
        if token := self[token_id]:
            return escape(token)
        name = self.control_names.get(token_id)
        if name is not None:
            return escape(name.encode())
        return f"({TokenType(int(self.types[token_id])).name.lower()})"

    def shown(self, token_id: int) -> str:
        """Return the shortened name of an id."""
        return shorten(self.name(token_id))

    def quoted(self, token_id: int) -> str:
        """Return the shortened name of an id in quotes, or `(none)` if the id is too large."""
        return quoted(self.name(token_id)) if token_id < len(self) else "(none)"

    def at_width(self, width: int) -> TokenTable:
        """Return a copy with another width. Adds UNUSED ids, or removes ids, at the end."""
        num_new, end = width - len(self), min(width, len(self))
        types = np.pad(self.types[:end], (0, max(0, num_new)), constant_values=TokenType.UNUSED)
        offsets = np.pad(self.offsets[: end + 1], (0, max(0, num_new)), mode="edge")
        return replace(self, types=types, offsets=offsets)

    def sha256(self) -> str:
        """Return a digest of the types, offsets, bytes and control names of all used ids."""
        return self._sha256

    @functools.cached_property
    def _sha256(self) -> str:
        used_ids = np.flatnonzero(self.types != TokenType.UNUSED)
        end = int(used_ids[-1]) + 1 if len(used_ids) else 0
        digest = hashlib.sha256(self.types[:end].tobytes())
        digest.update(self.offsets[: end + 1].astype("<i8").tobytes())
        digest.update(self.data.tobytes())
        names = [[i, self.control_names[i]] for i in sorted(self.control_names)]
        digest.update(json.dumps(names).encode())
        return digest.hexdigest()


Token: TypeAlias = str | bytes | int
"""A token argument: text, bytes or an id."""


def token_list(tokens: Token | Iterable[Token]) -> list[Token]:
    """Return one or more tokens as a list."""
    return [tokens] if isinstance(tokens, str | bytes | int | np.integer) else [*tokens]


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabularyFields:
    """The fields of a vocabulary that map files store as JSON."""

    model_id: str  # repo id, or last component of the path of a folder or file
    revision: str | None = None  # commit of the repo; if unknown, the requested revision
    backend: str | None = None  # hf, sentencepiece, tiktoken, tekken …
    vocab_size: int  # V, width of the model's logits
    # Source of the width: option, config, model type, tokenizer, map, or ids (the largest id in a
    # map that does not record a width).
    width_source: str
    tokenizer_vocab_size: int | None = None  # the tokenizer's largest id below V, plus 1
    # `Tokenizer.definition_sha256` when the map was created, or None if unknown.
    definition_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary(VocabularyFields):
    """The student's or the teacher's vocabulary: a token table and the model's name."""

    table: TokenTable | None = None  # None if the map of another program contains no tokens

    def __post_init__(self) -> None:
        """Convert the width to a Python integer, because JSON cannot contain NumPy numbers."""
        vars(self)["vocab_size"] = operator.index(self.vocab_size)

    @property
    def num_ids(self) -> int:
        """The tokenizer's largest id + 1, or the width if the tokenizer is unknown."""
        return self.tokenizer_vocab_size or self.vocab_size

    @property
    def is_lower_bound(self) -> bool:
        """Whether the width is only a lower bound, because a map's file records no exact width."""
        return self.table is None and self.width_source in ("ids", "map")

    def ids_of(self, token: Token) -> list[int]:
        """Return the ids of a token (see `TokenTable.ids_of`), or `[token]` if `token` is an id.

        Raises:
            XtokError: if the token or id does not exist, or the map contains no tokens.
        """
        if not isinstance(token, str | bytes):
            token = operator.index(token)
            if not 0 <= token < self.vocab_size:
                raise XtokError(
                    f"{self.model_id} has no id {token}, expected 0 to {self.vocab_size - 1}",
                    hint="pass an id in the expected range, or pass the token as text",
                )
            return [token]
        if self.table is None:
            raise XtokError(
                f"the map has no token table for {self.model_id}: xtok did not create the map",
                hint="use the token's id instead",
            )
        ids = self.table.ids_of(token)
        if not ids:
            shown = printable(token) if isinstance(token, str) else escape(token)
            number = token if isinstance(token, str) and token.isdecimal() else ""
            raise XtokError(
                f"{self.model_id} has no token '{shown}'",
                hint="write a token with its spaces, such as ' the', and bytes as '\\xe4'"
                + f"; for the id {number}, pass an id instead of a text" * bool(number),
            )
        return ids

    def all_ids_of(self, tokens: Token | Iterable[Token]) -> list[int]:
        """Return the ids of one or more tokens. An error names all missing tokens."""
        ids, error = self.find_ids(tokens)
        if error is not None:
            raise error
        return ids

    def find_ids(self, tokens: Token | Iterable[Token]) -> tuple[list[int], XtokError | None]:
        """Return the ids of the tokens that exist, and an error for the tokens that do not."""
        ids: list[int] = []
        errors: dict[str, str] = {}
        for token in token_list(tokens):
            try:
                ids += self.ids_of(token)
            except XtokError as error:
                errors[error.message] = error.hint
        hint = next(iter(errors.values()), "")
        return ids, XtokError("; ".join(errors), hint=hint) if errors else None


_FORMS: dict[TokenForm, Callable[[bytes, bytes], bytes]] = {
    "bytes": lambda content, display: content,
    "text": lambda content, display: content.decode("utf-8", "replace").encode(),
    "raw": lambda content, display: display or content,
}


class Decoded:
    """The tokens of a tokenizer, before the width of the table is known.

    The `TokenEntry` objects are not kept, because 100,000 objects slow down Python's garbage
    collector by 0.1 seconds.

    Args:
        entries: the entries of all ids, in any order.
        form: `bytes`, `text` (the bytes decoded as UTF-8, with U+FFFD for invalid bytes) or `raw`
            (the display string).
        ignore: ids to treat as UNUSED.
    """

    def __init__(
        self,
        entries: Iterable[TokenEntry],
        *,
        form: TokenForm = "bytes",
        ignore: Collection[int] = (),
    ) -> None:
        self._tokens: dict[int, bytes] = {}
        self._kinds: list[TokenType] = []
        self._names: dict[int, str] = {}
        undecodable: list[int] = []
        in_form, tokens = _FORMS[form], self._tokens
        for token_id, kind, content, display in entries:
            if token_id in ignore:
                continue
            if token_id in tokens or token_id < 0:
                problem = "is negative" if token_id < 0 else "is repeated in the vocabulary"
                raise TokenizerError(
                    f"token id {token_id} ({quoted(escape(content))}) {problem}",
                    hint="the tokenizer's files are damaged: download them again",
                )
            tokens[token_id] = b""
            self._kinds.append(kind)
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
                self._names[token_id] = _control_name(token_id, content)
            elif kind is not TokenType.UNUSED:
                tokens[token_id] = in_form(content, display)
                if not content:
                    undecodable.append(token_id)
        self.ids = tokens.keys()
        self.undecodable = tuple(sorted(undecodable))

    def outside(self, width: int) -> dict[int, bytes]:
        """Return the bytes or names of the ids that are not below `width`."""
        outside = sorted(i for i in self.ids if i >= width)
        return {i: self._tokens[i] or self._names.get(i, "").encode() for i in outside}

    def table(self, width: int) -> TokenTable:
        """Return a table of `width` ids. Ids that are not in the tokenizer are UNUSED."""
        tokens, ids = [*self._tokens.values()], np.fromiter(self.ids, np.int64, len(self.ids))
        order = np.argsort(ids)[: np.count_nonzero(ids < width)]
        types = np.full(width, TokenType.UNUSED, np.uint8)
        types[ids[order]] = np.frombuffer(bytes(self._kinds), np.uint8)[order]
        parts = [tokens[index] for index in order.tolist()]
        lengths = np.zeros(width, np.int64)
        lengths[ids[order]] = np.fromiter(map(len, parts), np.int64, len(parts))
        data = np.frombuffer(b"".join(parts), np.uint8)
        names = {i: name for i, name in sorted(self._names.items()) if i < width}
        return TokenTable(data, offsets_of(lengths), types, names)


def _control_name(token_id: int, content: bytes) -> str:
    if len(content) > MAX_NAME:
        raise TokenizerError(
            f"the name of the special token {token_id} has {len(content):,} bytes, "
            f"expected at most {MAX_NAME:,}",
            hint="fix the tokenizer's files",
        )
    return content.decode("utf-8", "backslashreplace")


def same_tokens(table: TokenTable | None, other: TokenTable | None) -> bool:
    """Whether two tables have the same bytes and control tokens. Widths and types can differ."""
    if table is None or other is None or table is other:
        return table is other
    # Types can differ, because Transformers changes some UNKNOWN tokens to CONTROL.
    width = min(len(table), len(other))
    rests = table.lengths[width:], other.lengths[width:]
    return (
        table.control_names == other.control_names
        and not any(rest.any() for rest in rests)
        and np.array_equal(table.lengths[:width], other.lengths[:width])
        and np.array_equal(table.data, other.data)
    )


def differing_ids(table: TokenTable, other: TokenTable) -> list[int]:
    """Return the ids with different bytes or control names in two tables, ascending."""
    pairs = enumerate(zip_longest(table.tokens(), other.tokens(), fillvalue=b""))
    names = table.control_names, other.control_names
    return [i for i, (a, b) in pairs if a != b or names[0].get(i) != names[1].get(i)]


def match_bytes(student: TokenTable, teacher: TokenTable) -> NDArray[np.int64]:
    """Return the teacher id with the same bytes as each student id, or −1, `[V_student]`, int64."""
    find_id = teacher.canonical_ids().get
    return np.fromiter(map(find_id, student.tokens(), repeat(-1)), np.int64, len(student))


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Return the UTF-8 offset of each character, and the end, `[n + 1]`, int64.

    >>> byte_offsets("né").tolist()
    [0, 1, 3]
    """
    if text.isascii():
        return np.arange(len(text) + 1)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    return offsets_of(sizes)


def utf8_text(data: bytes) -> str | None:
    """Decode UTF-8, or return None if the bytes are invalid."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


_INVALID = re.compile("([\udc80-\udcff]+)")  # invalid bytes, decoded with `surrogateescape`


def utf8_runs(data: bytes) -> list[str]:
    r"""Split bytes into alternating runs of text and invalid bytes, starting and ending with text.

    >>> utf8_runs(b"n\xc3\xa9\xe6\x9d")
    ['né', '\udce6\udc9d', '']
    """
    return _INVALID.split(data.decode("utf-8", "surrogateescape"))
