"""Stems: byte strings of teacher tokens, and the first token of their student spelling."""

from __future__ import annotations

import string
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.teachers import stem_kernels as kernels
from xtok.teachers.stem_kernels import ID_BITS, ROOT
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import utf8_runs

_MIN_CAPACITY = 1 << 18
_MAX_STEMS = 1 << 23
_ID_MASK = (1 << ID_BITS) - 1

StemBytes: TypeAlias = tuple[bytes, bytes]
"""The bytes that a stem omits from its first token, and the bytes of the stem."""


class StemTable(NamedTuple):
    """Stems as arrays, with room for more stems.

    A stem is a byte string that the student spells. A *root* consists of a teacher token without
    its first u bytes, the *omitted bytes*. A *child* consists of a stem and a following teacher
    token, so the stems form a trie. The root of token t has the key `1 << ROOT | u << ID_BITS | t`.
    The child of stem e with token t has the key `(e + 1) << ID_BITS | t`. An example with the
    teacher tokens 7 (`20`) and 5 (`1`):

        stem   bytes   key
        0      20      1 << ROOT | 0 << ID_BITS | 7    token 7
        1      201     (0 + 1) << ID_BITS | 5          stem 0, then token 5
        2      0       1 << ROOT | 1 << ID_BITS | 7    token 7 without its first byte
    """

    slots: NDArray[np.int32]  # [2**n], hash table (open addressing): key → stem, −1 if free
    keys: NDArray[np.int64]  # [capacity]
    first_token: NDArray[np.int32]  # [capacity], first student token of the stem, or −1
    # [capacity], destination if the next token is unknown: a token, or `-2 - t` for map row t
    token_or_row: NDArray[np.int32]
    is_prefix: NDArray[np.bool_]  # [capacity], whether a longer student token starts with the stem
    # [capacity], whether the student splits between the omitted bytes and the stem
    is_boundary: NDArray[np.bool_]
    # [capacity], number of teacher tokens that start with the omitted bytes; 0 for children
    num_same_start: NDArray[np.int32]


class SortedTokens(NamedTuple):
    """A student's tokens, sorted by their bytes."""

    data: NDArray[np.uint8]  # token t is data[offsets[t]:offsets[t + 1]]
    offsets: NDArray[np.int64]  # [V_student + 1]
    order: NDArray[np.int32]  # ids in the order of the tokens' bytes, without duplicate tokens


class StemCache:
    """The stems that occurred in texts so far, with the first token of their student spelling.

    `table` is a `StemTable`: six arrays of length `capacity`, and a hash table of 2 to 4 times this
    length. The first `size` entries of the six arrays are used.

    A stem takes 38 bytes: 22 in the arrays and 16 in the hash table. The capacity starts at 2**18
    (10 MB) and doubles when necessary. Before each block of rows, `clear_if_full` removes all stems
    if there are more than 2**23 (320 MB). While a block is projected, the number of stems can
    exceed this limit: stems cannot be removed, because the keys of children contain the indices of
    their parents.

    Args:
        pair: the student and the teacher, with their tokenizers.
        has_row: bool `[V_teacher]`, whether the map from the teacher has a row for the token.
    """

    def __init__(self, pair: Pair, has_row: NDArray[np.bool_]) -> None:
        student, teacher = pair.tables
        self._student, self._has_row = pair.tokenizers[0], has_row
        self._student_lengths = student.lengths.tolist()
        order = np.array([i for _, i in sorted(student.canonical_ids().items())], np.int32)
        self._by_bytes = SortedTokens(np.ascontiguousarray(student.data), student.offsets, order)
        self._data, self._offsets = np.ascontiguousarray(teacher.data), teacher.offsets
        self._tokens = teacher.tokens()
        self._sorted = sorted(filter(None, self._tokens))
        self._ids_by_bytes = teacher.canonical_ids()
        self._is_utf8 = np.array([len(utf8_runs(token)) == 1 for token in self._tokens])
        self.size, self.table = 0, _empty_table(_MIN_CAPACITY)

    def clear_if_full(self) -> None:
        """Remove all stems if there are too many."""
        if self.size > _MAX_STEMS:
            self.size, self.table = 0, _empty_table(_MIN_CAPACITY)

    def add(self, keys: NDArray[np.int64]) -> None:
        """Add the stems of new keys, int64 `[stems]`, ascending.

        Keys of children refer to stems that were added before.
        """
        self._reserve(self.size + len(keys))
        first_root = np.searchsorted(keys, 1 << ROOT)
        self._add_children(keys[:first_root])
        self._add_roots(keys[first_root:])

    def _add_roots(self, keys: NDArray[np.int64]) -> None:
        ids, num_omitted = keys & _ID_MASK, (keys ^ 1 << ROOT) >> ID_BITS
        tokens = zip([self._tokens[t] for t in ids.tolist()], num_omitted.tolist(), strict=True)
        stems = [(token[:u], token[u:]) for token, u in tokens]
        first, is_boundary = self._first_tokens(stems)
        end = np.zeros_like(ids)  # no token follows
        _, is_prefix = self._compare(stems, (np.arange(len(stems)), end, end))
        # [roots], teacher token with the same bytes as the root, or −1
        same = np.array([self._ids_by_bytes.get(stem, -1) for _, stem in stems], np.int64)
        same = np.where(num_omitted == 0, ids, same)
        token_or_row = np.where((same >= 0) & self._has_row[same], -2 - same, first)
        num_same_start = [self._num_starting_with(omitted) for omitted, _ in stems]
        self._append(keys, first, token_or_row, is_prefix, is_boundary, num_same_start)

    def _add_children(self, keys: NDArray[np.int64]) -> None:
        """Add stems that consist of an existing stem (the parent) and a following token.

        Usually, a child has the same first student token as its parent. The child is spelled only
        if the first tokens can differ, for example because a student token can span both parts.
        """
        parents, ids = (keys >> ID_BITS) - 1, keys & _ID_MASK
        distinct, index = np.unique(parents, return_inverse=True)
        stems = [self._bytes_of(parent) for parent in distinct.tolist()]  # [distinct parents]
        starts, ends = self._offsets[ids], self._offsets[ids + 1]
        is_crossed, is_prefix = self._compare(stems, (index, starts, ends))
        may_resplit = np.array([_may_resplit(omitted + stem) for omitted, stem in stems], np.bool_)
        spelled = np.flatnonzero(is_crossed | may_resplit[index] | ~self._is_utf8[ids])
        pairs = zip(index[spelled].tolist(), ids[spelled].tolist(), strict=True)
        children = [(stems[n][0], stems[n][1] + self._tokens[t]) for n, t in pairs]
        first, is_boundary = self.table.first_token[parents], self.table.is_boundary[parents]
        first[spelled], is_boundary[spelled] = self._first_tokens(children)
        self._append(keys, first, first, is_prefix, is_boundary, 0)

    def _compare(self, stems: Sequence[StemBytes], pairs: Any) -> Any:
        """Call `compare_pairs` for `stems`. `pairs[0]` contains indices into `stems`."""
        texts = [omitted + stem for omitted, stem in stems]
        data, offsets = np.frombuffer(b"".join(texts), np.uint8), offsets_of([*map(len, texts)])
        arrays = data, offsets, np.array([len(omitted) for omitted, _ in stems], np.int64)
        return kernels.compare_pairs(self._by_bytes, arrays, pairs, self._data)

    def _append(self, *columns: Any) -> None:
        """Append stems. The columns are the fields of `StemTable` after `slots`, in this order."""
        new = slice(self.size, self.size + len(columns[0]))
        arrays: Any = zip(self.table[1:], columns, strict=True)
        for array, values in arrays:
            array[new] = values
        kernels.insert_stems(self.table.slots, self.table.keys[: new.stop], new.start)
        self.size = new.stop

    def _reserve(self, size: int) -> None:
        old, count = self.table, self.size
        if size > len(old.keys):
            self.table, self.size = _empty_table(max(size, 2 * len(old.keys))), 0
            self._append(*(array[:count] for array in old[1:]))

    def _bytes_of(self, stem: int) -> StemBytes:
        tokens: list[bytes] = []  # in reverse order
        while True:
            key = int(self.table.keys[stem])
            tokens.append(self._tokens[key & _ID_MASK])
            if key >> ROOT:
                omitted = (key ^ 1 << ROOT) >> ID_BITS
                text = b"".join(reversed(tokens))
                return text[:omitted], text[omitted:]
            stem = (key >> ID_BITS) - 1

    def _num_starting_with(self, prefix: bytes) -> int:
        first = bisect_left(self._sorted, prefix)
        return bisect_right(self._sorted, prefix, first, key=lambda x: x[: len(prefix)]) - first

    def _first_tokens(self, stems: Sequence[StemBytes]) -> tuple[list[int], list[bool]]:
        r"""Return the student's first token of each stem.

        This token depends on the omitted bytes. For example, many tokenizers have a token `(a`, but
        split `\(a` between `(` and `a`. If no student token starts at the beginning of the stem,
        the stem is spelled without the omitted bytes.

        Returns:
            token ids, and whether a student token starts at the beginning of the stem. If the
            student cannot spell the stem, the id is −1 and the second value is True.
        """
        spellings = self._student.segment_batch([omitted + stem for omitted, stem in stems])
        pairs = zip(stems, spellings, strict=True)
        first = [self._token_at(len(omitted), ids) for (omitted, _), ids in pairs]
        is_boundary = [token >= 0 or not ids for token, ids in zip(first, spellings, strict=True)]
        crossed = [n for n, token in enumerate(first) if token < 0 and stems[n][0]]
        spellings = self._student.segment_batch([stems[n][1] for n in crossed])
        for n, ids in zip(crossed, spellings, strict=True):
            first[n] = self._token_at(0, ids)
        return first, is_boundary

    def _token_at(self, byte: int, ids: Sequence[int] | None) -> int:
        """Return the token that starts at a byte of a spelling; −1 if no token starts there."""
        offset = 0
        for token in ids or ():
            if offset >= byte:
                return token if offset == byte else -1
            offset += self._student_lengths[token]
        return -1


def _empty_table(capacity: int) -> StemTable:
    slots = np.full(1 << (2 * capacity).bit_length(), -1, np.int32)
    arrays: Any = [np.empty(capacity, dtype) for dtype in ("i8", "i4", "i4", "?", "?", "i4")]
    return StemTable(slots, *arrays)


def _may_resplit(text: bytes) -> bool:
    """Whether following bytes can change the positions at which a pre-tokenizer splits a text."""
    [start, *more] = utf8_runs(text)
    return bool(more) or start != start.rstrip().lower() or "'" in start or "’" in start


def crossable_boundaries(pair: Pair) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Find the teacher tokens after which the next token can change the student's spelling.

    Returns:
        bool `[V_teacher]`, whether a token ends with whitespace, so that any following token can
        change its spelling; and bool `[256, 256]`, whether the spelling of other tokens can change,
        given the last byte of the token and the first byte of the following token.
    """
    student, teacher = pair.tables
    owners, data = np.repeat(np.arange(len(student)), student.lengths), student.data
    is_inside = owners[1:] == owners[:-1]  # whether a byte and the next byte are in one token
    may_join = np.zeros((256, 256), np.bool_)
    may_join[data[:-1][is_inside], data[1:][is_inside]] = True
    # A letter, or a byte of a letter, can extend a word, which changes the split.
    letters = [*range(0x80, 0x100), *map(ord, string.ascii_letters)]
    may_join[:, letters] = True
    texts = [token.decode("utf-8", "replace") for token in teacher.tokens()]
    # Pre-tokenizers look ahead to split trailing whitespace.
    ends_in_space = np.array([text != text.rstrip() for text in texts], np.bool_)
    return ends_in_space, may_join
