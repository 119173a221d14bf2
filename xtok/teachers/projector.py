"""Project a teacher's predictions from the teacher's tokens to the student's tokens."""

from __future__ import annotations

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
from xtok.teachers.stems import StemCache, crossable_boundaries
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenType

_MAX_ROWS = 1 << 16  # maximum number of rows in a block
_MAX_CANDIDATES = 1 << 22  # maximum number of candidates in a block, 34 MB
_MIN_MISSING = 1 << 18  # minimum space for keys of missing stems, per thread and turn


class TokenPositions(NamedTuple):
    """The position of each student token in the teacher's tokens, and the chunk of each token."""

    # [S], index of the teacher token that contains the student token's first byte; −1 if the texts
    # differ
    position: NDArray[np.int64]
    inside: NDArray[np.int64]  # [S], offset of this byte in the teacher token
    is_aligned: NDArray[np.bool_]  # [S], whether both tokens start at the same byte
    s_chunks: NDArray[np.int64]  # [S], chunk number of each student token
    t_chunks: NDArray[np.int64]  # [T], chunk number of each teacher token
    num_chunks: int  # number of chunks + 1; the last chunk number means "no chunk"


class Projector:
    """Projects predictions for a pair of tokenizers with a map from the teacher to the student.

    A *realized token* is a token that occurs in the text. Every other candidate is an alternative.

    - If a student token and a teacher token start at the same byte, the map converts the
      alternatives. The realized token is joined with each candidate for the next teacher token, and
      the student spells the joined bytes. This step is repeated along the text, as long as the
      joined realized tokens are a prefix of a longer student token.
    - If a student token starts inside a teacher token, only the candidates that begin with the same
      bytes as the teacher token contribute. The student spells the remaining bytes of each such
      candidate.

    In the following two examples, each student token starts in the teacher token with the index
    `position`, at the byte offset `inside`:

        teacher   |201| lamps|        |2|01| lamps|
        student   |2|01| lamps|       |201| lamps|
        position   0 0  1              0    2
        inside     0 1  0              0    0

    In the left example, consider the student token `01`. The candidate `201` predicts `01`, and the
    candidate `20` predicts `0`. The candidate `2` predicts no token, because its continuation is
    unknown. In the right example, consider the student token `201`. The map converts the
    alternatives, for example the candidate `3`. The realized token `2` is joined with each
    candidate for the next teacher token, for example with `01`.

    The rest of a row contains the probability of candidates beyond `top_k`, of bytes that the
    student cannot spell, and of unknown continuations. Spellings are cached. Do not call a
    projector from several threads at the same time.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: a map from the teacher (rows) to the student (columns), without scale slots; see
            `xtok.config.BACK_MAP`.
        num_threads: the number of threads; None uses one per available core.
        along_path: whether the realized token is joined with candidates for the next token. If
            False, the map also converts the realized token.

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
        self.is_same, self.along_path = pair.is_same, along_path
        self.num_threads = num_threads or available_cores()
        self.aligner = TokenAligner(pair)
        self.stems = StemCache(pair, back_map.entries_per_row > 0)
        self._teacher = _teacher_tokens(pair, back_map)
        self._width = len(student)

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
            student_ids: int32 `[tokens]`, the student's tokens of the documents.
            student_bounds: int64 `[documents + 1]`, the start of each document in `student_ids`.
            top_k: maximum number of candidates per row. Other candidates are added to the rest.

        Returns:
            the predictions. `realized_logprob` contains each token's share of the log-probability
            of its chunk; see `prefix_weights`.
        """
        student = self.aligner.student.flat(student_ids, student_bounds)
        texts = self.aligner.teacher.flat(teacher.token_ids, teacher.bounds)
        predictions = teacher._replace(token_ids=texts.ids)
        positions = self.positions(student, texts)
        position, inside, is_aligned = positions[:3]
        text_end = texts.bounds[np.searchsorted(texts.bounds, position, side="right")]
        path_end = text_end if self.along_path else position + 1
        predicted = np.flatnonzero(position >= 0)  # [rows], student token of each row
        predicted = predicted[teacher.valid[position[predicted]]]

        num_candidates = np.zeros(len(student.ids), np.int64)
        rest, realized = np.full((2, len(student.ids)), np.nan, np.float32)
        ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
        block_size = min(_MAX_ROWS, max(1, _MAX_CANDIDATES // top_k))
        for start in range(0, len(predicted), block_size):
            block = predicted[start : start + block_size]
            size = len(block)
            rows = kernels.RowBlock(
                position[block], inside[block], is_aligned[block], path_end[block],
                student.ids[block], np.full(size, -1), np.empty((size, top_k), np.int32),
                np.empty((size, top_k), np.float32), *np.full((2, size), np.nan, np.float32),
            )  # fmt: skip
            self._project_rows(rows, predictions, top_k)
            is_kept = np.arange(top_k) < rows.size[:, None]
            ids.append(rows.ids[is_kept])
            logprobs.append(rows.logprobs[is_kept])
            num_candidates[block] = rows.size
            rest[block], realized[block] = rows.rest_logprob, rows.realized_logprob
        credit = self._credit(student, texts, predictions, positions)
        return TopK(
            student.ids, student.bounds, offsets_of(num_candidates),
            np.concatenate(ids), np.concatenate(logprobs), rest,
            np.where(np.isnan(credit), realized, credit),
        )  # fmt: skip

    def positions(self, student: FlatIds, teacher: FlatIds) -> TokenPositions:
        """Find the teacher token in which each student token starts."""
        alignment = self.aligner.align_sequences(student, teacher)
        s_chunks, t_chunks = alignment.numbers(np.diff(student.bounds), np.diff(teacher.bounds))
        is_shared = np.append(alignment.is_correct, False)
        # In shared chunks, both sides have the same symbols, so their offsets can be compared.
        s, t = np.flatnonzero(is_shared[s_chunks]), np.flatnonzero(is_shared[t_chunks])
        s_lengths = np.diff(self.aligner.student.offsets)[student.ids[s]]
        t_lengths = np.diff(self.aligner.teacher.offsets)[teacher.ids[t]]
        s_starts, t_starts = np.cumsum(s_lengths) - s_lengths, np.cumsum(t_lengths) - t_lengths
        # [len(s)], index in t of the teacher token that contains the student token's first symbol
        at = np.searchsorted(t_starts, s_starts, side="right") - 1
        size = len(student.ids)
        position, inside = np.full(size, -1), np.zeros(size, np.int64)
        is_aligned = np.zeros(size, np.bool_)
        position[s], inside[s] = t[at], s_starts - t_starts[at]
        is_aligned[s] = np.isin(t_starts, s_starts)[at]
        return TokenPositions(position, inside, is_aligned, s_chunks, t_chunks, len(is_shared))

    def _project_rows(self, rows: kernels.RowBlock, predictions: TopK, top_k: int) -> None:
        """Project the rows of a block in threads, and write the results into the block.

        A row that needs a missing stem stays unfinished until the next turn.
        """
        max_missing = max(_MIN_MISSING, 2 * int(np.diff(predictions.starts).max()) + 3)

        def run(todo: NDArray[np.int64]) -> Any:
            arrays = self._teacher, predictions, self.stems.table, rows
            return kernels.project_rows(arrays, todo, self.is_same, top_k, self._width, max_missing)

        self.stems.clear_if_full()
        todo = np.arange(len(rows.size))
        with ThreadPoolExecutor(self.num_threads) as pool:
            while len(todo):
                missing = pool.map(run, np.array_split(todo, self.num_threads))
                keys = np.unique(np.concatenate([*missing]))
                if len(keys):
                    self.stems.add(keys)
                todo = todo[rows.size[todo] < 0]

    def _credit(
        self, student: FlatIds, teacher: FlatIds, predictions: TopK, positions: TokenPositions
    ) -> NDArray[np.float32]:
        """Return each student token's share of its chunk's log-probability; NaN if unknown."""
        *_, s_chunks, t_chunks, size = positions
        is_shared = positions.position >= 0
        sums = chunk_sums(t_chunks, predictions.realized_logprob, size)
        chunk_ids = np.where(is_shared, s_chunks, size - 1), t_chunks
        weights = prefix_weights(self.aligner, student, teacher, chunk_ids, predictions, sums)
        credit = shares(sums, s_chunks, np.flatnonzero(is_shared), weights)
        return np.where(is_shared, credit, np.float32(np.nan))


def _teacher_tokens(pair: Pair, back_map: ProjectionMap) -> kernels.TeacherTokens:
    _, teacher = pair.tables
    ends_in_space, may_join = crossable_boundaries(pair)
    # [nnz, 2], the student id and the weight of each entry; adjacent, so in the same cache line
    entries = np.stack([back_map.teacher_ids, back_map.weights.view(np.int32)], 1)
    return kernels.TeacherTokens(
        data=np.ascontiguousarray(teacher.data),
        offsets=np.ascontiguousarray(teacher.offsets),
        is_text=teacher.lengths > 0,
        ends_text=teacher.types == TokenType.CONTROL,
        ends_in_space=ends_in_space,
        row_bounds=offsets_of(back_map.entries_per_row),
        columns=entries.ravel(),
        weights=entries.ravel().view(np.float32),
        may_join=may_join,
        num_texts=len(teacher.text_ids),
    )
