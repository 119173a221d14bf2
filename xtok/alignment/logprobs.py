"""A teacher's log-probabilities on a student's tokens, for on-policy distillation."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok.alignment.aligner import FlatAlignment, SymbolTable, TokenAligner, to_array
from xtok.errors import XtokError
from xtok.maps.file import MapLike, as_map
from xtok.vocab.display import escape
from xtok.vocab.table import TokenTable

if TYPE_CHECKING:
    import torch

Credit: TypeAlias = Literal["uniform", "student"]
Arrays: TypeAlias = "NDArray[Any] | torch.Tensor | list[NDArray[Any]] | list[torch.Tensor]"

ROUNDING = 1e-4
"""How far above 0 a log-probability may be: what a log-softmax in float32 rounds to."""

SHOWN_AROUND = 24
"""Characters that an error shows before and after the place where two texts part."""


@dataclass(frozen=True, eq=False)
class ProjectedLogprobs:
    """A teacher's log-probabilities on the student's tokens, in the form of the student's ids.

    Attributes:
        logprobs: float32 `[S]` or `[B, S]`, or a list of such; 0 where not valid.
        valid: bool, likewise: the token has a share of a teacher's log-probability.
    """

    logprobs: Any
    valid: Any


@dataclass(frozen=True, eq=False)
class ProjectedTopK:
    """A teacher's most likely tokens as student tokens, in the form of the student's ids.

    Attributes:
        ids: int64 `[S, K]` or `[B, S, K]`, or a list of such: student ids, the most likely first,
            padded with −1.
        logprobs: float32, likewise, padded with −inf.
        valid: bool `[S]` or `[B, S]`, or a list of such: the position has at least one id.
    """

    ids: Any
    logprobs: Any
    valid: Any


def project_logprobs(
    aligner: TokenAligner,
    student_ids: Any,
    teacher_ids: Any,
    teacher_logprobs: Any,
    *,
    student_logprobs: Any = None,
    credit: Credit = "uniform",
    student_attention_mask: Any = None,
    teacher_attention_mask: Any = None,
    response_mask: Any = None,
    partial: bool = False,
) -> ProjectedLogprobs:
    """Share a teacher's log-probabilities of a text among the student's tokens of that text.

    The student's tokens of a chunk share the sum of its teacher tokens. That sum, in float64 and
    rounded to float32, is what the float32 shares add up to, bit for bit. Tokens that are in no
    chunk of equal bytes (or of one special role) on both sides are not valid: special tokens that
    only one side has, and what truncation left on one side.

    Ids are one sequence `[S]`, a padded batch `[B, S]`, or a list of sequences; NumPy arrays, torch
    tensors or lists. The result has the student's form: NumPy arrays, or tensors on the device of
    the student's ids if these are tensors; for a list of sequences, a list of these.

    Args:
        aligner: of the two tokenizers.
        student_ids: what the student wrote, S tokens.
        teacher_ids: the same text, T tokens, as the teacher scored it.
        teacher_logprobs: in the form of `teacher_ids`; entry t is log p(token t | all before). None
            or NaN is a token that was not scored: allowed for a first token (its chunk is not
            valid), and in chunks that `response_mask` leaves out.
        student_logprobs: the student's own, in the form of `student_ids`, for `credit="student"`.
        credit: `uniform` shares a chunk's sum equally. `student` shares it in proportion to the
            student's own log-probabilities: the token that surprised the student most takes most;
            equally if all are 0.
        student_attention_mask: of a padded batch, 0 where a token is padding. Without it, tokens of
            the pad role are, as in `TokenAligner.align`.
        teacher_attention_mask: likewise.
        response_mask: in the form of `student_ids`, True for tokens that may be valid, such as
            those after the prompt. A chunk with any other token is not valid.
        partial: accept texts that differ, and leave out the chunks that do. By default they are an
            error. No difference: one text ends before the other; characters that one side has as
            U+FFFD because the other side's bytes are no UTF-8.

    Raises:
        XtokError: if the texts part, with the place.
        ValueError: for log-probabilities that are greater than 0 or missing, shapes that do not
            fit, and ids that the vocabulary does not have.
    """
    student = _Sequences.of(aligner.student, student_ids, student_attention_mask)
    teacher = _Sequences.of(aligner.teacher, teacher_ids, teacher_attention_mask)
    alignment = _align(aligner, student, teacher, partial=partial)
    counts = None
    if response_mask is not None:
        counts = student.values("response_mask", response_mask, np.bool_)
    return _share(
        alignment, student, teacher, teacher_logprobs, student_logprobs, credit, (counts, None)
    )


def share_of_chat(
    alignment: FlatAlignment,
    sides: tuple[tuple[NDArray[Any], NDArray[np.bool_]], tuple[NDArray[Any], NDArray[np.bool_]]],
    teacher_logprobs: Any,
    student_logprobs: Any,
    credit: Credit,
) -> ProjectedLogprobs:
    """Share log-probabilities over one aligned document; each side is ids and what counts."""
    student, teacher = (
        _Sequences(side, ids) for side, (ids, _) in zip(("student", "teacher"), sides, strict=True)
    )
    counts = (sides[0][1], sides[1][1])
    return _share(alignment, student, teacher, teacher_logprobs, student_logprobs, credit, counts)


def project_topk(
    aligner: TokenAligner,
    student_ids: Any,
    teacher_ids: Any,
    topk_ids: Any,
    topk_logprobs: Any,
    *,
    projection: MapLike | None = None,
    top_k: int | None = None,
    student_attention_mask: Any = None,
    teacher_attention_mask: Any = None,
    partial: bool = False,
) -> ProjectedTopK:
    """Turn a teacher's most likely tokens into student tokens, where both sides' tokens begin.

    Where a student token and a teacher token begin at one byte, both predict the same text. There a
    student token gets log Σ p(teacher token) · weight over the teacher's tokens that lead to it.
    Elsewhere nothing is valid. What has no counterpart is left out, and nothing is normalized: the
    probabilities are the teacher's own, and sum to at most 1.

    Args:
        aligner: of the two tokenizers.
        student_ids: as in `project_logprobs`.
        teacher_ids: likewise.
        topk_ids: integers `[T, K]` or `[B, T, K]`, or a list of such: at t, the teacher's
            candidates for token t itself; −1 for none.
        topk_logprobs: floats, likewise. NaN is allowed for a first token, which was not scored.
        projection: a map **from the teacher's tokens to the student's**: counted with the roles
            swapped (`xtok.estimate`), or built so with `BuildConfig.for_loss("p-kl",
            target="start")`. None takes the student's token of the same bytes or role, with
            weight 1.
        top_k: student tokens to keep for each position, ties by lower id; K if None.
        student_attention_mask: as in `project_logprobs`.
        teacher_attention_mask: likewise.
        partial: likewise.

    Raises:
        XtokError: if the texts part, or the map is not from the teacher to the student.
        ValueError: as `project_logprobs`, and if the probabilities of a position sum to more than
            1.
    """
    from xtok.alignment.kernels import topk_at_starts

    student = _Sequences.of(aligner.student, student_ids, student_attention_mask)
    teacher = _Sequences.of(aligner.teacher, teacher_ids, teacher_attention_mask)
    candidates = teacher.values("topk_ids", topk_ids, np.int64, trailing=1)
    logprobs = teacher.values("topk_logprobs", topk_logprobs, np.float64, trailing=1)
    if candidates.shape != logprobs.shape:
        raise ValueError(
            f"topk_ids are {candidates.shape[-1]} per token, topk_logprobs {logprobs.shape[-1]}"
        )
    rows = _rows_of_teacher(aligner, projection)
    if ((candidates < -1) | (candidates >= len(rows[0]) - 1)).any():
        place = np.argwhere((candidates < -1) | (candidates >= len(rows[0]) - 1))[0]
        raise ValueError(
            f"topk_ids have {candidates[tuple(place)]} at {teacher.place(place[0])}, which is not "
            f"in 0..{len(rows[0]) - 2}, nor −1 for none"
        )
    _require_logprobs("topk_logprobs", np.where(candidates < 0, -np.inf, logprobs), teacher)
    top_k = candidates.shape[-1] if top_k is None else top_k
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}, and must be at least 1")
    alignment = _align(aligner, student, teacher, partial=partial)
    ids = np.full((len(student.ids), top_k), -1, np.int64)
    out = np.full((len(student.ids), top_k), -np.inf, np.float32)
    wrong = topk_at_starts(
        student.bounds, alignment.student_chunk_id, teacher.bounds, alignment.teacher_chunk_id,
        alignment.num_chunks, alignment.is_correct, candidates, logprobs, *rows, ids, out,
    )  # fmt: skip
    if wrong >= 0:
        has_nan = np.isnan(logprobs[wrong][candidates[wrong] >= 0]).any()
        problem = "are missing" if has_nan else "sum to a probability greater than 1"
        raise ValueError(f"topk_logprobs at {teacher.place(wrong)} {problem}")
    return ProjectedTopK(
        ids=student.restore(ids, -1),
        logprobs=student.restore(out, -np.inf),
        valid=student.restore(ids[:, 0] >= 0, False),
    )


class _Sequences:
    """Sequences of one side on flat arrays without padding, and how to give results their form.

    Attributes:
        ids: integers `[tokens]`.
        bounds: int64 `[sequences + 1]`.
    """

    def __init__(self, side: str, ids: Any, mask: Any = None) -> None:
        self._side = side
        self._like = ids
        self._is_list = _is_list(ids)
        if self._is_list:
            if mask is not None:
                raise ValueError(f"{side}_attention_mask is of a padded batch, not of a list")
            self._like = ids[0]
            rows = [to_array(row) for row in ids]
            for row in rows:
                self._require_integers(row, (1,))
            self.ids = np.concatenate(rows)
            self.bounds = np.cumsum([0, *map(len, rows)])
            return
        array = to_array(ids)
        self._require_integers(array, (1, 2))
        self._is_one = array.ndim == 1
        self._kept = np.ones(array.shape, np.bool_) if mask is None else to_array(mask) != 0
        if self._kept.shape != array.shape:
            raise ValueError(
                f"{side}_attention_mask is of shape {list(self._kept.shape)}, "
                f"{side}_ids of {list(array.shape)}"
            )
        self.ids = array[self._kept]
        rows_kept = self._kept[None] if self._is_one else self._kept
        self.bounds = np.concatenate([[0], np.cumsum(rows_kept.sum(axis=1))])

    @classmethod
    def of(cls, symbols: SymbolTable, ids: Any, mask: Any) -> _Sequences:
        """Return the sequences of a side; of a batch without a mask, less its padding."""
        if mask is None and not _is_list(ids):
            array = to_array(ids)
            if array.ndim == 2:
                mask = ~symbols.padding(array)
        return cls(symbols.side, ids, mask)

    def values(self, name: str, values: Any, dtype: Any, trailing: int = 0) -> NDArray[Any]:
        """Return per-token values in the form of the ids as a flat array, `[tokens, …]`."""
        if self._is_list:
            rows = [_as_array(row, dtype) for row in values]
            lengths = [len(row) if row.ndim == 1 + trailing else None for row in rows]
            expected: Any = np.diff(self.bounds).tolist()
            if lengths != expected or len({row.shape[1:] for row in rows}) != 1:
                shapes = [list(row.shape) for row in rows]
                raise ValueError(f"{name} are of shapes {shapes}, {self._side}_ids of {expected}")
            return np.concatenate(rows)
        array = _as_array(values, dtype)
        if array.shape[: array.ndim - trailing] != self._kept.shape:
            raise ValueError(
                f"{name} are of shape {list(array.shape)}, "
                f"{self._side}_ids of {list(self._kept.shape)}"
            )
        flat: NDArray[Any] = array[self._kept]
        return flat

    def restore(self, flat: NDArray[Any], fill: Any) -> Any:
        """Return flat results in the form of the ids, with `fill` at padding."""
        if self._is_list:
            return [self._to_like(flat[a:b]) for a, b in pairwise(self.bounds.tolist())]
        result = np.full((*self._kept.shape, *flat.shape[1:]), fill, flat.dtype)
        result[self._kept] = flat
        return self._to_like(result)

    def place(self, index: int) -> list[int]:
        """Return where the caller has a token of the flat array: `[t]`, or `[row, t]`."""
        if not self._is_list:
            place: list[int] = np.argwhere(self._kept)[index].tolist()
            return place
        row = int(np.searchsorted(self.bounds, index, side="right")) - 1
        return [row, int(index - self.bounds[row])]

    def rows_of(self, tokens: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the sequences that have any of these tokens."""
        return np.unique(np.searchsorted(self.bounds, np.flatnonzero(tokens), side="right") - 1)

    def text(self, table: TokenTable, row: int) -> bytes:
        ids = self.ids[self.bounds[row] : self.bounds[row + 1]].tolist()
        return b"".join(table[i] for i in ids)

    def name(self, row: int) -> str:
        """Return how an error calls a sequence, "" for the only one."""
        return f" of row {row}" if self._is_list or not self._is_one else ""

    def _to_like(self, array: NDArray[Any]) -> Any:
        if not hasattr(self._like, "detach"):
            return array
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(self._like.device)

    def _require_integers(self, array: NDArray[Any], dimensions: tuple[int, ...]) -> None:
        if array.dtype.kind not in "iu" or array.ndim not in dimensions:
            raise ValueError(
                f"{self._side}_ids are {array.dtype} of shape {list(array.shape)}, and must be "
                "integers [T] or [B, T], or a list of [T]"
            )


def _is_list(ids: Any) -> bool:
    """Tell whether ids are a list of sequences."""
    if not isinstance(ids, list | tuple) or not ids:
        return False
    return isinstance(ids[0], list | tuple) or getattr(ids[0], "ndim", 0) > 0


def _as_array(values: Any, dtype: Any) -> NDArray[Any]:
    """Return values as an array; None becomes NaN."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values, dtype)


def _align(
    aligner: TokenAligner, student: _Sequences, teacher: _Sequences, *, partial: bool
) -> FlatAlignment:
    if len(student.bounds) != len(teacher.bounds):
        raise ValueError(
            f"{len(student.bounds) - 1} student sequences, {len(teacher.bounds) - 1} of the teacher"
        )
    alignment = aligner.align_ids(student.ids, student.bounds, teacher.ids, teacher.bounds)
    if not partial:
        _require_one_text(aligner, student, teacher, alignment)
    return alignment


def _require_one_text(
    aligner: TokenAligner, student: _Sequences, teacher: _Sequences, alignment: FlatAlignment
) -> None:
    """Check that of each two texts one begins with the other; only those not aligned are read."""
    first = np.cumsum(alignment.num_chunks)
    rows = [np.unique(np.searchsorted(first, np.flatnonzero(~alignment.is_correct), side="right"))]
    for side, symbols, chunk in (
        (student, aligner.student, alignment.student_chunk_id),
        (teacher, aligner.teacher, alignment.teacher_chunk_id),
    ):
        rows.append(side.rows_of((chunk < 0) & (symbols.table.lengths[side.ids] > 0)))
    for row in np.unique(np.concatenate(rows)).tolist():
        sides = (
            side.text(symbols.table, row)
            for side, symbols in ((student, aligner.student), (teacher, aligner.teacher))
        )
        parting = _parting(*sides)
        if parting is not None:
            common, ours, theirs = parting
            raise XtokError(
                f"the texts{student.name(row)} part at byte {len(common.encode())}, after "
                f'"{_shown(common[-SHOWN_AROUND:])}": the student has "{_shown(ours)}", the '
                f'teacher "{_shown(theirs)}"',
                hint="score the text that the student wrote, or give {option}True to leave out "
                "what differs",
                parameter="partial",
            )


def _parting(ours: bytes, theirs: bytes) -> tuple[str, str, str] | None:
    """Return what two texts share and how each goes on; None if one begins with the other.

    They are compared as a tokenizer reads what another one decoded: bytes that are no UTF-8 are
    U+FFFD. A character that one text breaks off is part of neither.
    """
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")
    texts = [decoder("replace").decode(text) for text in (ours, theirs)]
    length = min(map(len, texts))
    if texts[0][:length] == texts[1][:length]:
        return None
    end = next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
    return texts[0][:end], texts[0][end:], texts[1][end:]


def _shown(text: str) -> str:
    return escape(text[:SHOWN_AROUND].encode())


def _share(
    alignment: FlatAlignment,
    student: _Sequences,
    teacher: _Sequences,
    teacher_logprobs: Any,
    student_logprobs: Any,
    credit: Credit,
    counts: tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None],
) -> ProjectedLogprobs:
    from xtok.alignment.kernels import share_logprobs

    if credit not in ("uniform", "student"):
        raise ValueError(f"credit is {credit!r}, and must be 'uniform' or 'student'")
    if credit == "student" and student_logprobs is None:
        raise ValueError("credit='student' needs student_logprobs")
    theirs = teacher.values("teacher_logprobs", teacher_logprobs, np.float64)
    _require_logprobs("teacher_logprobs", theirs, teacher)
    ours = np.empty(0)
    if student_logprobs is not None:
        ours = student.values("student_logprobs", student_logprobs, np.float64)
        _require_logprobs("student_logprobs", ours, student)
    masks = [
        np.ones(len(side.ids), np.bool_) if mask is None else mask
        for side, mask in zip((student, teacher), counts, strict=True)
    ]
    logprobs = np.zeros(len(student.ids), np.float32)
    valid = np.zeros(len(student.ids), np.bool_)
    wrong_teacher, wrong_student = share_logprobs(
        student.bounds, alignment.student_chunk_id, teacher.bounds, alignment.teacher_chunk_id,
        alignment.num_chunks, alignment.is_correct, *masks, theirs, ours, credit == "student",
        logprobs, valid,
    )  # fmt: skip
    for name, side, values, index in (
        ("teacher_logprobs", teacher, theirs, wrong_teacher),
        ("student_logprobs", student, ours, wrong_student),
    ):
        if index >= 0:
            raise ValueError(
                f"{name} have {values[index]} at {side.place(index)}; only a first token, or what "
                "response_mask leaves out, may be without"
            )
    return ProjectedLogprobs(
        logprobs=student.restore(logprobs, 0.0), valid=student.restore(valid, False)
    )


def _require_logprobs(name: str, flat: NDArray[np.float64], side: _Sequences) -> None:
    """Check that nothing is greater than 0; what is missing is checked where it counts."""
    with np.errstate(invalid="ignore"):
        wrong = flat > ROUNDING
    if wrong.any():
        place = np.argwhere(wrong)[0]
        raise ValueError(
            f"{name} have {flat[tuple(place)]:g} at {side.place(int(place[0]))}: no "
            "log-probability, which is at most 0"
        )


def _rows_of_teacher(
    aligner: TokenAligner, projection: MapLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
    """Return the rows of the map from teacher to student ids: starts, student ids, weights."""
    if projection is None:
        pairs = aligner.student_id_of
        starts = np.concatenate([[0], np.cumsum(pairs >= 0)])
        ids = pairs[pairs >= 0]
        return starts, ids, np.ones(len(ids))
    projection = as_map(projection)
    sides = (
        (projection.student.table, aligner.teacher.table, projection.shape[0]),
        (projection.teacher.table, aligner.student.table, projection.shape[1]),
    )
    for own, table, width in sides:
        fits = len(table) <= width if own is None else own.sha256() == table.sha256()
        if not fits:
            raise XtokError(
                f"the map is from {projection.student.model_id} to {projection.teacher.model_id}, "
                "not from the aligner's teacher to its student",
                hint="build a map with the roles swapped, xtok.build(teacher, student), or give "
                "{option}None for equal bytes only",
                parameter="projection",
            )
    edges = projection.edges
    if projection.enable_scale_trick:
        edges = edges.take(~projection.is_slot).normalized()
    entries = np.bincount(edges.student_ids, minlength=projection.shape[0])
    starts = np.concatenate([[0], np.cumsum(entries)])
    return starts, edges.teacher_ids, edges.weights.astype(np.float64)
