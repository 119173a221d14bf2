"""Project a teacher's predictions from its own tokens to the student's tokens."""

from __future__ import annotations

import string
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok._lib.threads import available_cores
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import FlatIds
from xtok.maps.projection_map import ProjectionMap
from xtok.predictions.topk import TopK
from xtok.teachers import projector_kernels as kernels
from xtok.teachers.credit import chunk_sums, prefix_weights, shares
from xtok.teachers.projector_kernels import ID_BITS, ROOT
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable, TokenType, utf8_runs

_ROWS_AT_ONCE = 1 << 16
_CANDIDATES_AT_ONCE = 1 << 22  # 34 MB
_LEAST_ROOM = 1 << 18
_MAX_STEMS = 1 << 23
"""Maximum number of stems in the cache (300 MB). A full cache is cleared."""


class TokenPositions(NamedTuple):
    """The position of each student token in the teacher's tokens, and the chunk of each token."""

    position: NDArray[np.int64]  # [S], teacher token with the first byte; −1 if the texts differ
    inside: NDArray[np.int64]  # [S], offset of this byte in the teacher token
    is_aligned: NDArray[np.bool_]  # [S], whether both tokens start at the same byte
    s_chunks: NDArray[np.int64]  # [S], chunk
    t_chunks: NDArray[np.int64]  # [T], chunk
    num_chunks: int  # number of chunks + 1; the last chunk number means "no chunk"


class Projector:
    """Projects predictions for a pair of tokenizers with a map from the teacher to the student.

    - If a student token and a teacher token start at the same byte, the map converts the teacher's
      candidates, except the token of the text. The token of the text is joined with each candidate
      for the next token, and spelled in student tokens. The loop ends when no longer student token
      starts with the text so far.
    - If a student token starts inside a teacher token, only candidates count that begin with the
      same bytes as the teacher token. The student spells the remaining bytes of these candidates.

    In these two examples, a student token starts in teacher token number `position`, at the byte
    offset `inside`:

        teacher   |201| lamps|        |2|01| lamps|
        student   |2|01| lamps|       |201| lamps|
        position   0 0  1              0    2
        inside     0 1  0              0    0

    On the left, consider the student token `01`. The candidate `201` predicts `01`, the candidate
    `20` predicts `0`, and the candidate `2` predicts no token. On the right, consider the student
    token `201`. The map converts the candidate `3`. The token `2` of the text is joined with each
    candidate for the next teacher token, `01`.

    The rest of a row contains the probability of candidates beyond `top_k`, of bytes that the
    student cannot spell, and of unknown continuations. Spellings are cached. Only one call at a
    time is allowed.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: a map from the teacher (rows) to the student (columns), without scale slots; see
            `xtok.config.BACK_MAP`.
        num_threads: the number of threads; None uses one per available core.
        along_path: whether the token of the text is combined with the next predictions. If False,
            the map also converts the token of the text.

    Raises:
        ValueError: if the widths of the map and the pair differ, or if the map has scale slots.
    """

    def __init__(
        self,
        pair: Pair,
        back_map: ProjectionMap,
        num_threads: int | None = None,
        *,
        along_path: bool = True,
    ) -> None:
        student, teacher = pair.tables
        shape = len(teacher), len(student)
        if back_map.shape != shape or back_map.enable_scale_trick:
            raise ValueError(
                f"the map has shape {back_map.shape}, expected {shape} (teacher × student) "
                "without scale slots"
            )
        self.student, _ = pair.tokenizers
        self.is_same = pair.is_same
        self.num_threads, self.along_path = num_threads or available_cores(), along_path
        self.aligner = TokenAligner(pair)
        self._teacher = _arrays(teacher, student, back_map)
        self._tokens = teacher.tokens()
        self._by_bytes = teacher.canonical_ids()
        self._in_order = [self._tokens[i] for i in self.aligner.teacher.by_bytes]
        self._student = _spellings(student)
        self._lengths = student.lengths.tolist()
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

        A student token has a prediction if both sides of its chunk have the same bytes, and if the
        teacher token that contains its first byte has a prediction.

        Args:
            teacher: checked predictions.
            student_ids: int32 `[tokens]`, the student's tokens of these documents.
            student_bounds: int64 `[documents + 1]`, the start of each document in `student_ids`.
            top_k: maximum number of candidates per row. Other candidates are added to the rest.

        Returns:
            the predictions. `realized_logprob` is the token's share of the log-probability of its
            chunk; see `prefix_weights`.
        """
        student = self.aligner.student.flat(student_ids, student_bounds)
        texts = self.aligner.teacher.flat(teacher.token_ids, teacher.bounds)
        positions = self.positions(student, texts)
        position, inside, is_aligned = positions[:3]
        credit = self._credit(student, texts, teacher, positions)
        indices = np.flatnonzero(position >= 0)
        indices = indices[teacher.valid[position[indices]]]
        ends = texts.bounds[np.searchsorted(texts.bounds, position, side="right")]
        predictions = teacher._replace(token_ids=texts.ids)
        count = np.zeros(len(position), np.int64)
        rest, realized = np.full((2, len(position)), np.nan, np.float32)
        ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
        at_once = min(_ROWS_AT_ONCE, max(1, _CANDIDATES_AT_ONCE // top_k))
        for start in range(0, len(indices), at_once):
            some = indices[start : start + at_once]
            rows = kernels.RowBlock(
                position[some], inside[some], is_aligned[some], ends[some], student.ids[some],
                np.full(len(some), -1), np.empty((len(some), top_k), np.int32),
                *np.empty((1, len(some), top_k), np.float32),
                *np.full((2, len(some)), np.nan, np.float32),
            )  # fmt: skip
            self._fill(rows, predictions, top_k)
            is_kept = np.arange(top_k) < rows.size[:, None]
            ids.append(rows.ids[is_kept])
            logprobs.append(rows.logprobs[is_kept])
            count[some], rest[some], realized[some] = rows.size, rows.rest, rows.own
        return TopK(
            student.ids, student.bounds, offsets_of(count),
            np.concatenate(ids), np.concatenate(logprobs), rest,
            np.where(np.isnan(credit), realized, credit),
        )  # fmt: skip

    def positions(self, student: FlatIds, teacher: FlatIds) -> TokenPositions:
        """Find the teacher token in which each student token starts."""
        alignment = self.aligner.align_sequences(student, teacher)
        s_chunks, t_chunks = alignment.numbers(np.diff(student.bounds), np.diff(teacher.bounds))
        is_shared = np.append(alignment.is_correct, False)
        s, t = np.flatnonzero(is_shared[s_chunks]), np.flatnonzero(is_shared[t_chunks])
        # Both sides have the same symbols in these chunks, so their offsets can be compared.
        s_lengths = np.diff(self.aligner.student.offsets)[student.ids[s]]
        t_lengths = np.diff(self.aligner.teacher.offsets)[teacher.ids[t]]
        s_starts, t_starts = np.cumsum(s_lengths) - s_lengths, np.cumsum(t_lengths) - t_lengths
        at = np.searchsorted(t_starts, s_starts, side="right") - 1
        size = len(student.ids)
        position, inside = np.full(size, -1), np.zeros(size, np.int64)
        is_aligned = np.zeros(size, np.bool_)
        position[s], inside[s] = t[at], s_starts - t_starts[at]
        is_aligned[s] = np.isin(t_starts, s_starts)[at]
        return TokenPositions(position, inside, is_aligned, s_chunks, t_chunks, len(is_shared))

    def _credit(
        self, student: FlatIds, teacher: FlatIds, predictions: TopK, positions: TokenPositions
    ) -> NDArray[np.float32]:
        """Return each student token's share of its chunk's log-probability, or NaN."""
        *_, s_chunks, t_chunks, size = positions
        is_shared = positions.position >= 0
        sums = chunk_sums(t_chunks, predictions.realized_logprob, size)
        chunk_ids = np.where(is_shared, s_chunks, size - 1), t_chunks
        weights = prefix_weights(self.aligner, student, teacher, chunk_ids, predictions, sums)
        credit = shares(sums, s_chunks, np.flatnonzero(is_shared), weights)
        return np.where(is_shared, credit, np.float32(np.nan))

    def _fill(self, rows: kernels.RowBlock, predictions: TopK, top_k: int) -> None:
        room = max(_LEAST_ROOM, 2 * int(np.diff(predictions.starts).max()) + 3)
        width = len(self.student.table)

        def run(todo: NDArray[np.int64]) -> NDArray[np.int64]:
            tokens, kept, order = np.empty((3, width + 1), np.int32)
            scratch = kernels.Scratch(
                np.zeros(width), tokens, np.empty(width + 1), kept, order,
                np.zeros(kernels.BUCKETS, np.int64), np.empty(room, np.int64),
            )  # fmt: skip
            arrays = kernels.ProjectorArrays(self._teacher, predictions, self.stems, rows)
            kernels.project_rows(arrays, todo, self.is_same, top_k, scratch)
            return scratch.missing[1 : scratch.missing[0] + 1]

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
        self.stems = _empty_stems(_LEAST_ROOM)

    def learn(self, keys: NDArray[np.int64]) -> None:
        """Add stems to the `StemTable`.

        If a new stem is a known stem followed by a token, both usually have the same first student
        token. The new stem is spelled only if the first tokens can differ, for example because a
        student token can span both parts.
        """
        size = self._size + len(keys)
        self._make_room(size)
        _, all_keys, first, token_or_row, may_grow, is_boundary, num_same_start = self.stems
        new = slice(self._size, size)
        all_keys[new] = keys
        is_root = keys >> ROOT != 0
        token = keys & (1 << ID_BITS) - 1
        other = (keys & (1 << ROOT) - 1) >> ID_BITS  # omitted bytes, or a stem's number + 1
        bytes_left = other[is_root]  # [root keys], number of omitted bytes
        # The stem before each key's token (number + 1), or -1 for a root key.
        stem_ids, stem_index = np.unique(np.where(is_root, -1, other), return_inverse=True)
        spelled = [self._stem_bytes(e - 1) if e > 0 else (b"", b"") for e in stem_ids.tolist()]
        stem_index[is_root] = len(spelled) + np.arange(len(bytes_left))
        # `spelled` contains the bytes before each stem and the bytes of the stem: first for
        # `stem_ids`, then for the root keys. Key n starts with the stem spelled[stem_index[n]].
        roots = zip(token[is_root].tolist(), bytes_left.tolist(), strict=True)
        spelled += [(self._tokens[t][:u], self._tokens[t][u:]) for t, u in roots]
        stem_texts = [text for _, text in spelled]
        data, offsets = self._teacher[:2]
        starts = offsets[token + is_root]  # root keys append nothing to their stem
        is_spelled = np.empty(len(keys), np.bool_)
        wholes = [before + text for before, text in spelled]
        lengths = np.array([len(before) for before, _ in spelled])
        whole_arrays = np.frombuffer(b"".join(wholes), np.uint8), offsets_of([*map(len, wholes)])
        both, more = (*whole_arrays, lengths, stem_index), (data, starts, offsets[token + 1])
        kernels.find_seams(self._student, both, more, is_spelled, may_grow[new])
        may_grow[new] &= self.along_path
        is_spelled |= is_root | ~self._is_utf8[token]
        is_spelled |= np.array([*map(may_split, wholes)])[stem_index]
        todo = np.flatnonzero(is_spelled)
        texts = [
            (spelled[stem][0], stem_texts[stem] + data[start:end].tobytes())
            for stem, start, end in zip(
                stem_index[todo].tolist(), starts[todo].tolist(), offsets[token[todo] + 1].tolist(),
                strict=True,
            )
        ]  # fmt: skip
        # If a key is not spelled, it has the same first student token as its stem.
        first[new], is_boundary[new] = first[other - 1], is_boundary[other - 1]
        first[new][todo], is_boundary[new][todo] = self._first_tokens(texts)
        # [root keys], teacher token with the same bytes as the stem, or −1
        ids = np.array(
            [self._by_bytes.get(stem, -1) for stem in stem_texts[len(stem_ids) :]], np.int64
        )
        ids = np.where(bytes_left == 0, token[is_root], ids)
        has_row = (ids >= 0) & (np.diff(self._teacher.row_bounds)[ids] > 0)
        token_or_row[new] = first[new]
        token_or_row[new][is_root] = np.where(has_row, -2 - ids, first[new][is_root])
        befores = [before for before, _ in spelled[len(stem_ids) :]]
        num_same_start[new][is_root] = [*map(self._num_alike, befores)]
        kernels.add_stems(self.stems.slots, all_keys[:size], self._size)
        self._size = size

    def _make_room(self, size: int) -> None:
        old = self.stems
        if size <= len(old.keys):
            return
        self.stems = _empty_stems(max(size, 2 * len(old.keys)))
        arrays: Any = zip(self.stems[1:], old[1:], strict=True)
        for array, before in arrays:
            array[: self._size] = before[: self._size]
        kernels.add_stems(self.stems.slots, self.stems.keys[: self._size], 0)

    def _stem_bytes(self, stem: int) -> tuple[bytes, bytes]:
        """Return the bytes that the stem omits from its first token, and the bytes of the stem."""
        parts: list[bytes] = []  # collected in reverse order
        while True:
            key = int(self.stems.keys[stem])
            token, other = self._tokens[key & (1 << ID_BITS) - 1], key >> ID_BITS
            if key >> ROOT:
                inside = other - (1 << ROOT - ID_BITS)
                return token[:inside], b"".join([token[inside:], *reversed(parts)])
            parts.append(token)
            stem = other - 1

    def _num_alike(self, prefix: bytes) -> int:
        first = bisect_left(self._in_order, prefix)
        return bisect_right(self._in_order, prefix, first, key=lambda x: x[: len(prefix)]) - first

    def _first_tokens(self, texts: Sequence[tuple[bytes, bytes]]) -> tuple[list[int], list[bool]]:
        r"""Return the student's first token of each text, which depends on the bytes before it.

        For example, many tokenizers have a token `(a`, but split `\(a` between `(` and `a`. If no
        token starts at the beginning of the text, the text is spelled without the preceding bytes.

        Returns:
            token ids, and whether a token starts at the beginning of the text. If the student
            cannot spell the text: −1 and True.
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
        offset = 0
        for token in ids or ():
            if offset >= byte:
                return token if offset == byte else -1
            offset += self._lengths[token]
        return -1


def _empty_stems(room: int) -> kernels.StemTable:
    slots = np.full(1 << (2 * room).bit_length(), -1, np.int32)
    first, token_or_row, num_same_start = np.empty((3, room), np.int32)
    may_grow, is_boundary = np.empty((2, room), np.bool_)
    return kernels.StemTable(
        slots, np.empty(room, np.int64), first, token_or_row, may_grow, is_boundary, num_same_start
    )


def _spellings(student: TokenTable) -> kernels.StudentTokens:
    canonical_ids = student.canonical_ids()
    order = np.array([canonical_ids[token] for token in sorted(canonical_ids)], np.int32)
    return kernels.StudentTokens(np.ascontiguousarray(student.data), student.offsets, order)


def may_split(stem: bytes) -> bool:
    """Whether the bytes after this stem can change how a pre-tokenizer splits it."""
    [text, *more] = utf8_runs(stem)
    return bool(more) or text != text.rstrip().lower() or "'" in text or "’" in text


def _arrays(
    teacher: TokenTable, student: TokenTable, back_map: ProjectionMap
) -> kernels.TeacherTokens:
    is_open, joined = seams(teacher, student)
    entries = np.stack([back_map.teacher_ids, back_map.weights.view(np.int32)], 1)
    return kernels.TeacherTokens(
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
    """Find teacher tokens that the student can spell differently, depending on the next token.

    Returns:
        a mask of these tokens, bool `[V_teacher]`, and a mask of pairs of bytes (the last byte of a
        token, the first byte of the next) that a student token can span, bool `[256, 256]`.
    """
    joined = np.zeros((256, 256), np.bool_)
    within = np.ones(len(student.data), np.bool_)
    # The first byte of a token has no preceding byte. `%` is needed because empty last tokens point
    # past the end.
    within[student.offsets[1:-1] % max(1, len(student.data))] = False
    joined[student.data[:-1][within[1:]], student.data[1:][within[1:]]] = True
    # A letter, or a part of a letter, can extend a word and so change the split.
    letters = [*range(0x80, 0x100), *map(ord, string.ascii_letters)]
    joined[:, letters] = True
    texts = [token.decode("utf-8", "replace") for token in teacher.tokens()]
    # Pre-tokenizers look ahead to split trailing whitespace.
    is_open = np.array([text != text.rstrip() for text in texts], np.bool_)
    return is_open, joined
