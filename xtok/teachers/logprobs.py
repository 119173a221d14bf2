"""Divide a teacher's log-probabilities among a student's tokens, for on-policy distillation."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import num_common, offsets_of
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.sequences import Sequences
from xtok.errors import XtokError
from xtok.predictions.checked import (
    PredictionError,
    checked,
    exceeds,
    is_placeholder,
    realized_logprobs,
)
from xtok.predictions.topk import TopK, document_starts
from xtok.teachers.credit import chunk_sums, prefix_weights, shares
from xtok.tokenizers.display import escape

SHOWN_AROUND = 24
"""Number of characters that an error prints before and after the first difference of two texts."""


@dataclass(frozen=True, eq=False)
class StudentCredit:
    """Credit in proportion to the student's log-probabilities."""

    logprobs: Any  # same shape as the student's ids; None or NaN for tokens without a score


@dataclass(frozen=True, eq=False)
class PrefixCredit:
    """Credit according to the teacher's candidates (most accurate); see `prefix_weights`.

    Both arrays have the shape of the teacher's ids and an additional last dimension K. The
    candidates can include the token that occurs in the text. A log-probability of −inf or NaN marks
    padding.
    """

    ids: Any
    logprobs: Any


Credit: TypeAlias = Literal["uniform"] | StudentCredit | PrefixCredit


@dataclass(frozen=True, eq=False)
class ProjectedLogprobs:
    """A teacher's log-probabilities for the student's tokens.

    Both fields have the same shape as the student's ids.
    """

    logprobs: Any  # float32 [S] or [B, S], or a list of [S]; 0 where not valid
    valid: Any  # bool, True for tokens that got a share of a log-probability


def project_logprobs(
    aligner: TokenAligner,
    student_ids: Any,
    teacher_ids: Any,
    teacher_logprobs: Any,
    *,
    credit: Credit = "uniform",
    attention_masks: tuple[Any, Any] = (None, None),
    response_mask: Any = None,
    partial: bool = False,
) -> ProjectedLogprobs:
    """Divide a teacher's log-probabilities for a text among the student's tokens.

    In each chunk, the student tokens' float32 shares add up exactly to the sum of the teacher's
    log-probabilities. A student token is valid only if both sides of its chunk have the same bytes
    or the same special role.

    Ids are one sequence `[S]`, a padded batch `[B, S]`, or a list of sequences, as NumPy arrays,
    torch tensors or lists. The result has the type, shape and device of the student's ids.

    Args:
        aligner: aligner of the two tokenizers.
        student_ids: a text in the student's tokens.
        teacher_ids: the same text in the teacher's tokens.
        teacher_logprobs: the log-probability of each teacher token, given the preceding tokens, in
            the same shape as `teacher_ids`. None or NaN marks a token without a score, which is
            allowed for the first token and outside `response_mask`. A chunk with such a token is
            not valid. A chunk with the value −9999.0, which servers return for −∞, is not valid
            either.
        credit: `"uniform"` for equal shares, a `StudentCredit`, or a `PrefixCredit`.
        attention_masks: the masks of the student's and the teacher's batch, 0 for padding. By
            default, tokens with the role pad are padding.
        response_mask: a mask with the same shape as `student_ids`, True for tokens that can be
            valid. A chunk is not valid if the mask excludes a student token of the chunk.
        partial: whether to skip chunks in which the texts differ. If False, a difference is an
            error, unless one text is a prefix of the other, or U+FFFD replaces bytes that are not
            UTF-8.

    Raises:
        XtokError: if the texts differ and `partial` is False.
        ValueError: if a log-probability is positive or missing, if shapes do not match, if an id is
            unknown, if a candidate occurs twice, or if candidates sum to more than 1.
    """
    if not (isinstance(credit, StudentCredit | PrefixCredit) or credit == "uniform"):
        raise ValueError(f"credit is {credit!r}, expected 'uniform', StudentCredit or PrefixCredit")
    student = Sequences(aligner.student, student_ids, attention_masks[0])
    teacher = Sequences(aligner.teacher, teacher_ids, attention_masks[1])
    alignment = aligner.align_sequences(student, teacher)
    s_chunks, t_chunks = alignment.numbers(np.diff(student.bounds), np.diff(teacher.bounds))
    # [chunks + 1], whether the tokens of a chunk can be valid; the last entry means "no chunk"
    shared = np.append(alignment.is_correct, False)
    if not partial:
        is_outside = ~shared[s_chunks], ~shared[t_chunks]
        _require_one_text((student, teacher), aligner, is_outside)
    t_values = _logprobs("teacher_logprobs", teacher_logprobs, teacher)
    if response_mask is not None:
        shared[s_chunks[~student.values("response_mask", response_mask, np.bool_)]] = False
    is_unscored = np.isnan(realized_logprobs(t_values, document_starts(teacher.bounds)))
    _exclude_unscored(shared, t_chunks, "teacher_logprobs", teacher, t_values, is_unscored)
    weights = np.ones(len(student.ids))
    if isinstance(credit, StudentCredit):
        s_values = _logprobs("student_logprobs", credit.logprobs, student)
        is_unscored = ~np.isfinite(s_values)
        _exclude_unscored(shared, s_chunks, "student_logprobs", student, s_values, is_unscored)
        weights = np.maximum(0.0, -s_values)
    valid = shared[s_chunks]
    sums = chunk_sums(t_chunks, t_values, len(shared))
    if isinstance(credit, PrefixCredit):
        predictions = _predictions(aligner, teacher, t_values, credit)
        chunk_ids = np.where(valid, s_chunks, len(shared) - 1), t_chunks
        weights = prefix_weights(aligner, student, teacher, chunk_ids, predictions, sums)
    logprobs = shares(sums, s_chunks, np.flatnonzero(valid), weights)
    return ProjectedLogprobs(student.restore(logprobs, 0.0), student.restore(valid, False))


def _exclude_unscored(
    shared: NDArray[np.bool_],
    chunk_ids: NDArray[np.int64],
    name: str,
    rows: Sequences,
    values: NDArray[np.float64],
    is_unscored: NDArray[np.bool_],
) -> None:
    """Set `shared` to False for chunks with a placeholder or an unscored first token, in place.

    Raise an error if a remaining chunk contains a token without a score.
    """
    is_first = np.isin(np.arange(len(values)), document_starts(rows.bounds))
    shared[chunk_ids[is_placeholder(values) | (is_unscored & is_first)]] = False
    unscored = np.flatnonzero(is_unscored & shared[chunk_ids])
    if len(unscored):
        index = rows.original_index(unscored[0])
        raise ValueError(
            f"{name}: {values[unscored[0]]} at {index}, expected a log-probability; "
            "only the first token and tokens outside response_mask can be unscored"
        )


def _logprobs(name: str, values: Any, rows: Sequences, *, ndim: int = 1) -> NDArray[np.float64]:
    flat = rows.values(name, values, np.float64, ndim=ndim)
    wrong = np.argwhere(exceeds(flat, 0))
    if len(wrong):
        first = tuple(wrong[0].tolist())
        value = f"{flat[first]:g} at {rows.original_index(first[0])}"
        raise ValueError(f"{name}: {value}, expected log-probabilities of at most 0")
    return flat


def _predictions(
    aligner: TokenAligner, teacher: Sequences, realized: NDArray[np.float64], credit: PrefixCredit
) -> TopK:
    values = _logprobs("candidates", credit.logprobs, teacher, ndim=2)
    token_ids = teacher.values("candidates", credit.ids, np.int64, ndim=2)
    if token_ids.shape != values.shape:
        shapes = f"ids {list(token_ids.shape)} and log-probabilities {list(values.shape)}"
        raise ValueError(f"the shapes of the candidates differ: {shapes}")
    # NaN marks padding. −∞ is a known log-probability, so candidates with −∞ are kept.
    known, own = ~np.isnan(values), realized.astype(np.float32)
    unknown = np.full(len(own), np.nan, np.float32)
    candidates = TopK(
        teacher.ids, teacher.bounds, offsets_of(known.sum(1)), token_ids[known],
        values[known].astype(np.float32), unknown, np.where(np.isinf(own), unknown, own),
    )  # fmt: skip
    try:
        topk = checked(candidates, len(aligner.teacher.table), begins=False)
    except PredictionError as error:
        index = teacher.original_index(error.row)
        raise ValueError(f"candidates at {index}: {error.problem}; {error.hint}") from error
    return topk._replace(ids=topk.ids.astype(np.int32), realized_logprob=own)


def _require_one_text(
    sides: tuple[Sequences, Sequences],
    aligner: TokenAligner,
    is_outside: tuple[NDArray[np.bool_], NDArray[np.bool_]],
) -> None:
    """Raise an error if the two texts of a row differ."""
    tables, rows = (aligner.student.table, aligner.teacher.table), set[int]()
    for sequences, table, outside in zip(sides, tables, is_outside, strict=True):
        indices = np.flatnonzero(outside & (table.lengths[sequences.ids] > 0))
        rows |= {*(np.searchsorted(sequences.bounds, indices, side="right") - 1).tolist()}
    for row in sorted(rows):
        texts = []
        for sequences, table in zip(sides, tables, strict=True):
            ids = sequences.ids[sequences.bounds[row] : sequences.bounds[row + 1]]
            texts.append(table.spell(ids.tolist()))
        if difference := _difference(*texts):
            common, student, teacher = difference
            place = f" of row {row}" if sides[0].kept.ndim > 1 else ""
            raise XtokError(
                f"the texts{place} differ at byte {len(common.encode())}, after "
                f'"{escape(common[-SHOWN_AROUND:].encode())}": the student has '
                f"{_excerpt(student, teacher)}, the teacher has {_excerpt(teacher, student)}",
                hint="score the student's text, or set {option}True to skip chunks that differ",
                parameter="partial",
            )


def _difference(student: bytes, teacher: bytes) -> tuple[str, str, str] | None:
    """Return the common prefix of two texts, and the remainder of each text.

    Return None if one text is a prefix of the other. Bytes that are not UTF-8 are treated as
    U+FFFD. An incomplete character at the end is ignored.
    """
    decoder = codecs.getincrementaldecoder("utf-8")
    texts = [decoder("replace").decode(text) for text in (student, teacher)]
    end = num_common(*texts)
    if end == min(map(len, texts)):
        return None
    return texts[0][:end], texts[0][end:], texts[1][end:]


def _excerpt(text: str, other: str) -> str:
    shown = f'"{escape(text[:SHOWN_AROUND].encode())}"'
    looks = [normalize("NFKC", string[:SHOWN_AROUND])[:1] for string in (text, other)]
    if looks[0] != looks[1]:
        return shown
    return f"{shown} ({' '.join(f'U+{ord(char):04X}' for char in text[:2])})"
