"""A teacher's predictions over its own tokens, as predictions over a student's."""

from __future__ import annotations

import string
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok._lib.threads import available_cores
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import FlatIds
from xtok.maps.projection_map import ProjectionMap
from xtok.predictions.topk import TopK
from xtok.teachers.credit import chunk_sums, prefix_weights, shares
from xtok.teachers.projector_kernels import (
    ID_BITS,
    ROOT,
    PrefixTable,
    RowBlock,
    TeacherTokens,
    add_hashes,
    add_stems,
    find_seams,
    project_rows,
)
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable, TokenType, utf8_runs

_ROWS_AT_ONCE = 1 << 16
_CANDIDATES_AT_ONCE = 1 << 22  # 34 MB of them
_LEAST_ROOM = 1 << 18
_MAX_STEMS = 1 << 23
"""Beyond this many byte strings, 300 MB, they are forgotten and recomputed."""


class Projector:
    """Turns predictions of a teacher into predictions of a student, for a pair and a map.

    Where both sides begin a token at one byte, the teacher's candidates go through the map. The one
    that the text really has goes along the path: its bytes and each candidate at the next place are
    spelled by the student, and so on while a token of the student's may still grow over them. Where
    the student's token begins inside the teacher's, the candidates that go on as the text did count
    by what is left of them, spelled as after the bytes before it; hardly those that the student
    would not split there. What is not known is spread evenly over the teacher's other tokens, and
    counts by how many of those go on as the text did.

    The same text, once with longer tokens of the teacher's, once with longer ones of the student's.
    `place` is the teacher's token in which a student's begins, `inside` how many bytes in:

        teacher   |201| lamps|        |2|01| lamps|
        student   |2|01| lamps|       |201| lamps|
        place      0 0  1              0    2
        inside     0 1  0              0    0

    Left, at `01`: of the teacher's candidates for `201`, those count that begin with `2`: `201` as
    `01`, `20` as `0`; what follows `2` alone is not known. Right, at `201`: the candidate `3` goes
    through the map, and `2` along the path: `2` and each candidate for `01`.

    Everything unknown goes to the rest: cut candidates, unspellable ones, and continuations nobody
    asked for. Of two equal tokenizers, predictions stay what they are.

    What the student makes of the bytes that teacher tokens spell is kept: a projector gets faster
    with what it has seen. One call at a time; it uses several threads itself.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: from the teacher (rows) to the student (columns), without scale slots; `build`
            makes it of the teacher and the student, in this order, with
            `BuildConfig.for_loss("p-kl", target="start", top_k=32)`.
        num_threads: one per available core if None. The result does not depend on it.
        along_path: if False, the token that the text really has goes through the map as well, and
            what follows it is not used.

    Raises:
        ValueError: if the map is not of these two widths, or has scale slots.
    """

    def __init__(
        self,
        pair: Pair,
        back_map: ProjectionMap,
        num_threads: int | None = None,
        *,
        along_path: bool = True,
    ) -> None:
        ours, theirs = pair.tables
        if back_map.shape != (len(theirs), len(ours)) or back_map.enable_scale_trick:
            raise ValueError(
                f"the map is {back_map.shape}, and must be {(len(theirs), len(ours))}, "
                "from the teacher to the student, without scale slots"
            )
        self.student, _ = pair.tokenizers
        self.is_same = pair.is_same
        self.num_threads, self.along_path = num_threads or available_cores(), along_path
        self.aligner = TokenAligner(pair)
        self._teacher = _arrays(theirs, ours, back_map)
        self._tokens = theirs.tokens()
        self._id_of = theirs.canonical_ids()
        self._in_order = [self._tokens[i] for i in self.aligner.teacher.by_bytes]
        self._student = _spellings(ours)
        self._lengths = ours.lengths.tolist()
        self._is_utf8 = np.array([len(utf8_runs(token)) == 1 for token in self._tokens])
        self._forget()

    def project(
        self,
        teacher: TopK,
        student_ids: NDArray[np.int32],
        student_bounds: NDArray[np.int64],
        top_k: int,
    ) -> TopK:
        """Project predictions onto the student's tokens of the same documents.

        A row is valid where the student's token begins at a byte that both sides spell alike, and
        the teacher's token at that byte has a prediction. `realized_logprob` shares what the
        teacher's tokens of a chunk have together among the student's, by byte prefixes: see
        `prefix_weights`. The sums are the teacher's, and each token of a chunk has its share, but
        where the teacher's tokens have none, as a document's first; there it is the row's own.

        Args:
            teacher: its predictions; not checked.
            student_ids: int32 `[tokens]`, the student's tokens of these documents.
            student_bounds: int64 `[documents + 1]`.
            top_k: the most candidates of a row; what is cut away is part of the rest.

        Raises:
            ValueError: for ids that a vocabulary does not have, and other numbers of documents.
        """
        student = self.aligner.student.flat(student_ids, student_bounds)
        texts = self.aligner.teacher.flat(teacher.token_ids, teacher.bounds)
        place, inside, is_aligned, credit = self._places(student, texts, teacher)
        numbers = np.flatnonzero(place >= 0)
        numbers = numbers[teacher.valid[place[numbers]]]
        ends = texts.bounds[np.searchsorted(texts.bounds, place, side="right")]
        given = teacher._replace(token_ids=texts.ids)
        count = np.zeros(len(place), np.int64)
        rest, own = np.full((2, len(place)), np.nan, np.float32)
        ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
        at_once = min(_ROWS_AT_ONCE, max(1, _CANDIDATES_AT_ONCE // top_k))
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            rows = RowBlock(
                place[some], inside[some], is_aligned[some], ends[some], student.ids[some],
                np.full(len(some), -1), np.empty((len(some), top_k), np.int32),
                *np.empty((1, len(some), top_k), np.float32),
                *np.full((2, len(some)), np.nan, np.float32),
            )  # fmt: skip
            self._fill(rows, given, top_k)
            kept = np.arange(top_k) < rows.size[:, None]
            ids.append(rows.ids[kept])
            logprobs.append(rows.logprobs[kept])
            count[some], rest[some], own[some] = rows.size, rows.rest, rows.own
        return TopK(
            student.ids, student.bounds, offsets_of(count),
            np.concatenate(ids), np.concatenate(logprobs), rest,
            np.where(np.isnan(credit), own, credit),
        )  # fmt: skip

    def _places(
        self, student: FlatIds, teacher: FlatIds, given: TopK
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.float32]]:
        """Return where the student's tokens begin in the teacher's, and their log-probabilities.

        For each of the student's tokens: the teacher's at its first byte, or −1; how many bytes of
        it are before that; whether one of the student's begins at the first of these; its share of
        what the chunk's teacher tokens have, NaN if there is none.
        """
        alignment = self.aligner.align_sequences(student, teacher)
        ours_in, theirs_in = alignment.numbers(np.diff(student.bounds), np.diff(teacher.bounds))
        shared = np.append(alignment.is_correct, False)
        s_shared = shared[ours_in]
        s, t = np.flatnonzero(s_shared), np.flatnonzero(shared[theirs_in])
        # Both sides have the same symbols in these chunks, so one count of them holds for both.
        s_lengths = np.diff(self.aligner.student.offsets)[student.ids[s]]
        t_lengths = np.diff(self.aligner.teacher.offsets)[teacher.ids[t]]
        begins, t_begins = np.cumsum(s_lengths) - s_lengths, np.cumsum(t_lengths) - t_lengths
        at = np.searchsorted(t_begins, begins, side="right") - 1
        place, inside = np.full(len(student.ids), -1), np.zeros(len(student.ids), np.int64)
        place[s], inside[s] = t[at], begins - t_begins[at]
        is_aligned = np.zeros(len(student.ids), np.bool_)
        is_aligned[s] = np.isin(t_begins, begins)[at]
        sums = chunk_sums(theirs_in, given.realized_logprob, len(shared))
        numbers = np.where(s_shared, ours_in, len(sums) - 1), theirs_in
        weights = prefix_weights(self.aligner, student, teacher, numbers, given, sums)
        credit = shares(sums, ours_in, s, weights)
        return place, inside, is_aligned, np.where(s_shared, credit, np.float32(np.nan))

    def _fill(self, rows: RowBlock, given: TopK, top_k: int) -> None:
        """Project rows, and work out what the student makes of bytes that are new."""
        room = max(_LEAST_ROOM, 2 * int(np.diff(given.starts).max()) + 2)
        num_students = len(self.student.table)

        def run(todo: NDArray[np.int64]) -> NDArray[np.int64]:
            missing = np.empty(room, np.int64)
            misses = project_rows(
                self._teacher, given, self.prefixes, rows, todo, self.is_same, top_k,
                np.zeros(num_students), np.empty(num_students + 1, np.int32), missing,
            )  # fmt: skip
            return missing[:misses]

        if self._size > _MAX_STEMS:
            self._forget()
        todo = np.arange(len(rows.size))
        with ThreadPoolExecutor(self.num_threads) as pool:
            while len(todo):
                parts = pool.map(run, np.array_split(todo, self.num_threads))
                keys = np.unique(np.concatenate(list(parts)))
                if len(keys):
                    self.learn(keys)
                todo = todo[rows.size[todo] < 0]

    def _forget(self) -> None:
        self._size = 0
        self.prefixes = _no_prefixes(_LEAST_ROOM)

    def learn(self, keys: NDArray[np.int64]) -> None:
        """Add stems; see `PrefixTable`.

        A token after a stem changes the stem's first token only if one of the student's reaches
        over the seam, or if the stem may be split in another way: only then are both spelled, as
        the student does after the bytes of the teacher's token that are before the stem.
        """
        size = self._size + len(keys)
        self._make_room(size)
        _, all_keys, first, token_or_row, may_grow, is_boundary, num_same_start = self.prefixes
        new = slice(self._size, size)
        all_keys[new] = keys
        is_root = keys >> ROOT != 0
        token = keys & (1 << ID_BITS) - 1
        other = (keys & (1 << ROOT) - 1) >> ID_BITS  # bytes left out, or a stem's number + 1
        left = other[is_root]
        # The stem of each key: what is left of a token and nothing more, or one with a token more.
        numbers, stem_of = np.unique(np.where(is_root, -1, other), return_inverse=True)
        spelled = [self._spelled(e - 1) if e > 0 else (b"", b"") for e in numbers.tolist()]
        stem_of[is_root] = len(spelled) + np.arange(len(left))
        roots = zip(token[is_root].tolist(), left.tolist(), strict=True)
        spelled += [(self._tokens[t][:u], self._tokens[t][u:]) for t, u in roots]
        stems = [text for _, text in spelled]
        data, offsets = self._teacher[:2]
        begins = offsets[token + is_root]
        is_spelled = np.empty(len(keys), np.bool_)
        wholes = [before + text for before, text in spelled]
        lengths = np.array([len(before) for before, _ in spelled])
        both = (
            np.frombuffer(b"".join(wholes), np.uint8),
            offsets_of([*map(len, wholes)]),
            lengths,
            stem_of,
        )
        more = data, begins, offsets[token + 1]
        find_seams(self._student, both, more, is_spelled, may_grow[new])
        may_grow[new] &= self.along_path
        is_spelled |= is_root | ~self._is_utf8[token]
        is_spelled |= np.array([*map(may_split, wholes)])[stem_of]
        asked = np.flatnonzero(is_spelled)
        texts = [
            (spelled[stem][0], stems[stem] + data[begin:end].tobytes())
            for stem, begin, end in zip(
                stem_of[asked].tolist(), begins[asked].tolist(), offsets[token[asked] + 1].tolist(),
                strict=True,
            )
        ]  # fmt: skip
        first[new], is_boundary[new] = first[other - 1], is_boundary[other - 1]
        first[new][asked], is_boundary[new][asked] = self._first_tokens(texts)
        whole = np.array([self._id_of.get(stem, -1) for stem in stems[len(numbers) :]], np.int64)
        whole = np.where(left == 0, token[is_root], whole)
        has_row = (whole >= 0) & (np.diff(self._teacher.row_bounds)[whole] > 0)
        token_or_row[new] = first[new]
        token_or_row[new][is_root] = np.where(has_row, -2 - whole, first[new][is_root])
        num_same_start[new][is_root] = [
            self._num_alike(before) for before, _ in spelled[len(numbers) :]
        ]
        add_stems(self.prefixes.slots, all_keys[:size], self._size)
        self._size = size

    def _make_room(self, size: int) -> None:
        """Make the table larger, if it has no room for so many stems."""
        old = self.prefixes
        if size <= len(old.keys):
            return
        self.prefixes = _no_prefixes(max(size, 2 * len(old.keys)))
        arrays: Any = zip(self.prefixes[1:], old[1:], strict=True)
        for array, before in arrays:
            array[: self._size] = before[: self._size]
        add_stems(self.prefixes.slots, self.prefixes.keys[: self._size], 0)

    def _spelled(self, stem: int) -> tuple[bytes, bytes]:
        """Return the bytes of the teacher's token that are before a stem, and those of the stem."""
        parts: list[bytes] = []  # the last token first
        while True:
            key = int(self.prefixes.keys[stem])
            token, other = self._tokens[key & (1 << ID_BITS) - 1], key >> ID_BITS
            if key >> ROOT:
                inside = other - (1 << ROOT - ID_BITS)
                return token[:inside], b"".join([token[inside:], *reversed(parts)])
            parts.append(token)
            stem = other - 1

    def _num_alike(self, prefix: bytes) -> int:
        """Return how many of the teacher's tokens begin with these bytes."""
        first = bisect_left(self._in_order, prefix)
        return bisect_right(self._in_order, prefix, first, key=lambda x: x[: len(prefix)]) - first

    def _first_tokens(self, texts: Sequence[tuple[bytes, bytes]]) -> tuple[list[int], list[bool]]:
        r"""Return the student's first token of each text after what is before it; −1 for none.

        What is before may change it: of `(a`, many tokenizers have `(a` in one, but `(` behind a
        `\`. Where no token begins with the text, it is spelled as if nothing were before it.

        Returns:
            the tokens, and whether one begins with the text, or nothing can be said.
        """
        whole = self.student.segment_batch([before + text for before, text in texts])
        first = [
            self._begins_at(len(before), ids) for (before, _), ids in zip(texts, whole, strict=True)
        ]
        is_boundary = [token >= 0 or not ids for token, ids in zip(first, whole, strict=True)]
        rest = [n for n, token in enumerate(first) if token < 0 and texts[n][0]]
        alone = self.student.segment_batch([texts[n][1] for n in rest])
        for n, ids in zip(rest, alone, strict=True):
            first[n] = self._begins_at(0, ids)
        return first, is_boundary

    def _begins_at(self, byte: int, ids: Sequence[int] | None) -> int:
        """Return the token that begins at a byte of a spelling; −1 if none does."""
        begin = 0
        for token in ids or ():
            if begin >= byte:
                return token if begin == byte else -1
            begin += self._lengths[token]
        return -1


def _no_prefixes(room: int) -> PrefixTable:
    """Return an empty table, with room for so many."""
    slots = np.full(1 << (2 * room).bit_length(), -1, np.int32)
    first, token_or_row, num_same_start = np.empty((3, room), np.int32)
    may_grow, is_boundary = np.empty((2, room), np.bool_)
    return PrefixTable(
        slots, np.empty(room, np.int64), first, token_or_row, may_grow, is_boundary, num_same_start
    )


def _spellings(student: TokenTable) -> tuple[NDArray[Any], ...]:
    """Return a student's tokens as `find_seams` takes them."""
    known = student.canonical_ids()
    order = np.array([known[token] for token in sorted(known)], np.int32)
    hashes = np.zeros(1 << (2 * len(order)).bit_length(), np.uint64)
    add_hashes(student.data, student.offsets, hashes)
    return np.ascontiguousarray(student.data), student.offsets, order, hashes


def may_split(stem: bytes) -> bool:
    """Whether what follows bytes may change how a tokenizer splits them into words.

    Spaces look ahead; an apostrophe begins a contraction, or not; a capital may be the last of a
    word, or its first.
    """
    [text, *more] = utf8_runs(stem)
    return bool(more) or text != text.rstrip().lower() or "'" in text or "’" in text


def _arrays(teacher: TokenTable, student: TokenTable, back_map: ProjectionMap) -> TeacherTokens:
    is_open, joined = seams(teacher, student)
    entries = np.stack([back_map.teacher_ids, back_map.weights.view(np.int32)], 1)
    return TeacherTokens(
        data=np.ascontiguousarray(teacher.data),
        offsets=np.ascontiguousarray(teacher.offsets),
        is_text=teacher.lengths > 0,
        ends_text=teacher.types == TokenType.CONTROL,
        is_open=is_open,
        row_bounds=offsets_of(back_map.entries_per_row),
        columns=entries.ravel(),
        weights=entries.ravel().view(np.float32),
        joined=joined,
        num_texts=len(teacher.text_ids),
    )


def seams(teacher: TokenTable, student: TokenTable) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where what follows a teacher token may change the student's tokens of it.

    That is after some tokens, bool `[V_teacher]`, and between some bytes, bool `[256, 256]`. Else a
    token of the student's ends there whatever follows, and it is not worked out pair by pair.
    """
    joined = np.zeros((256, 256), np.bool_)
    within = np.ones(len(student.data), np.bool_)
    # A token's first byte, which has no neighbour before it; those behind the end are the first's.
    within[student.offsets[1:-1] % max(1, len(student.data))] = False
    joined[student.data[:-1][within[1:]], student.data[1:][within[1:]]] = True
    # A letter, or a part of one, may change what is a word, and so where a tokenizer splits.
    letters = [*range(0x80, 0x100), *map(ord, string.ascii_letters)]
    joined[:, letters] = True
    texts = [token.decode("utf-8", "replace") for token in teacher.tokens()]
    is_open = np.array([text != text.rstrip() for text in texts], np.bool_)  # a look ahead
    return is_open, joined
