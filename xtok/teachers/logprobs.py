"""A teacher's log-probabilities on a student's tokens, for on-policy distillation."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from xtok._lib.ragged import offsets_of
from xtok.alignment.aligner import FlatAlignment, TokenAligner
from xtok.alignment.sequences import Sequences
from xtok.errors import XtokError
from xtok.predictions.checked import (
    STORED_ROUNDING,
    PredictionError,
    checked,
    is_stand_in,
    own_logprobs,
)
from xtok.predictions.topk import TopK, firsts_of
from xtok.teachers.credit import chunk_sums, prefix_weights, shares
from xtok.tokenizers.display import escape

Credit: TypeAlias = Literal["uniform", "student", "prefix"]

SHOWN_AROUND = 24
"""Characters that an error shows before and after the place where two texts part."""


@dataclass(frozen=True, eq=False)
class ProjectedLogprobs:
    """A teacher's log-probabilities on the student's tokens, in the form of the student's ids."""

    logprobs: Any  # float32 [S] or [B, S], or a list of such; 0 where not valid
    valid: Any  # bool: the token has a share of a teacher's log-probability


def project_logprobs(
    aligner: TokenAligner,
    student_ids: Any,
    teacher_ids: Any,
    teacher_logprobs: Any,
    *,
    student_logprobs: Any = None,
    teacher_topk: tuple[Any, Any] | None = None,
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
            valid), and in chunks that `response_mask` leaves out. So is 0.0 for a first token. A
            chunk with what servers write for −∞ (−9999.0) is not valid.
        student_logprobs: the student's own, in the form of `student_ids`, for `credit="student"`.
            None or NaN as for the teacher's.
        teacher_topk: the teacher's candidates for each of its tokens, for `credit="prefix"`: ids
            and log-probabilities, both in the form of `teacher_ids` with a last dimension K. The
            token itself may be among them; −inf and NaN are padding.
        credit: `uniform` shares a chunk's sum equally. `student` shares it in proportion to the
            student's own log-probabilities: the token that surprised the student most takes most;
            equally if all are 0. `prefix` gives each token what the teacher's candidates say of its
            bytes, and the last one what is left: nearest to the truth, see `prefix_weights`.
        student_attention_mask: of a padded batch, 0 where a token is padding. Without it, tokens of
            the pad role are, as in `TokenAligner.align`.
        teacher_attention_mask: the same for `teacher_ids`.
        response_mask: in the form of `student_ids`, True for tokens that may be valid, such as
            those after the prompt. A chunk with any other token is not valid.
        partial: accept texts that differ, and leave out the chunks that do. By default they are an
            error. No difference: one text ends before the other; characters that one side has as
            U+FFFD because the other side's bytes are not UTF-8.

    Raises:
        XtokError: if the texts part, with the place.
        ValueError: for log-probabilities that are greater than 0 or missing, shapes that do not
            fit, ids that the vocabulary does not have, and candidates that occur twice or have
            probabilities above 1 together.
    """
    _check_credit(credit, student_logprobs, teacher_topk)
    student = Sequences(aligner.student, student_ids, student_attention_mask)
    teacher = Sequences(aligner.teacher, teacher_ids, teacher_attention_mask)
    alignment = aligner.align_sequences(student, teacher)
    if not partial:
        _require_one_text(aligner, student, teacher, alignment)
    theirs = _logprobs("teacher_logprobs", teacher_logprobs, teacher)
    ours = np.zeros(len(student.ids))
    if student_logprobs is not None:
        ours = _logprobs("student_logprobs", student_logprobs, student)
    counts = np.ones(len(student.ids), np.bool_)
    if response_mask is not None:
        counts = student.values("response_mask", response_mask, np.bool_)
    ours_in, theirs_in = alignment.numbers(np.diff(student.bounds), np.diff(teacher.bounds))
    shared = np.append(alignment.is_correct, False)  # the last is for tokens that are in no chunk
    shared[ours_in[~counts]] = False
    sides = [("teacher_logprobs", teacher, theirs, theirs_in, np.isnan(theirs))]
    if credit == "student":
        sides += [("student_logprobs", student, ours, ours_in, ~np.isfinite(ours))]
    for _, side, values, number, missing in sides:
        firsts = firsts_of(side.bounds)
        shared[number[firsts[missing[firsts]]]] = False
        shared[number[is_stand_in(values)]] = False
    firsts = firsts_of(teacher.bounds)
    shared[theirs_in[firsts[np.isnan(own_logprobs(theirs, firsts)[firsts])]]] = False
    for name, side, values, number, missing in sides:
        wrong = np.flatnonzero(missing & shared[number])
        if len(wrong):
            raise ValueError(
                f"{name} have {values[wrong[0]]} at {side.place(wrong[0])}; only a first token, "
                "or what response_mask leaves out, may be without"
            )
    valid = shared[ours_in]
    sums = chunk_sums(theirs_in, theirs, len(shared))
    weights = np.ones(len(student.ids))
    if credit == "prefix" and teacher_topk is not None:
        predictions = _predictions(aligner, teacher, theirs, *teacher_topk)
        numbers = np.where(valid, ours_in, len(shared) - 1), theirs_in
        weights = prefix_weights(aligner, student, teacher, numbers, predictions, sums)
    elif credit == "student":
        weights = np.maximum(0.0, -ours)
    logprobs = shares(sums, ours_in, np.flatnonzero(valid), weights)
    return ProjectedLogprobs(
        logprobs=student.restore(logprobs, 0.0), valid=student.restore(valid, False)
    )


def _check_credit(credit: Credit, student_logprobs: Any, teacher_topk: Any) -> None:
    if credit not in get_args(Credit):
        raise ValueError(f"credit is {credit!r}, and must be one of {', '.join(get_args(Credit))}")
    if credit == "student" and student_logprobs is None:
        raise ValueError("credit='student' needs student_logprobs")
    if credit == "prefix" and teacher_topk is None:
        raise ValueError("credit='prefix' needs teacher_topk")


def _logprobs(name: str, values: Any, side: Sequences, *, ndim: int = 1) -> NDArray[np.float64]:
    """Return log-probabilities `[tokens]`; what is missing is checked where it counts."""
    flat = side.values(name, values, np.float64, ndim=ndim)
    with np.errstate(invalid="ignore"):
        wrong = np.argwhere(flat > STORED_ROUNDING)
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise ValueError(
            f"{name} have {flat[first]:g} at {side.place(first[0])}: no log-probability, which is "
            "at most 0"
        )
    return flat


def _predictions(
    aligner: TokenAligner,
    teacher: Sequences,
    realized: NDArray[np.float64],
    ids: Any,
    logprobs: Any,
) -> TopK:
    """Return a teacher's candidates as flat arrays, without padding; they are checked."""
    values = _logprobs("teacher_topk", logprobs, teacher, ndim=2)
    token_ids = teacher.values("teacher_topk", ids, np.int64, ndim=2)
    if token_ids.shape != values.shape:
        raise ValueError(
            f"teacher_topk are {token_ids.shape} ids, {values.shape} log-probabilities"
        )
    kept, own = ~np.isnan(values), realized.astype(np.float32)  # −∞ is impossible, not unknown
    unknown = np.full(len(own), np.nan, np.float32)
    given = TopK(
        teacher.ids, teacher.bounds, offsets_of(kept.sum(1)), token_ids[kept],
        values[kept].astype(np.float32), unknown, np.where(np.isinf(own), unknown, own),
    )  # fmt: skip
    try:
        topk = checked(given, len(aligner.teacher.table), begins=False)
    except PredictionError as error:
        place = teacher.place(error.row)
        raise ValueError(f"teacher_topk at {place}: {error.problem}; {error.hint}") from error
    return topk._replace(ids=topk.ids.astype(np.int32), realized_logprob=own)


def _require_one_text(
    aligner: TokenAligner, student: Sequences, teacher: Sequences, alignment: FlatAlignment
) -> None:
    """Check that of each two texts one begins with the other; only those not aligned are read."""
    first = np.cumsum(alignment.num_chunks)
    rows = [np.unique(np.searchsorted(first, np.flatnonzero(~alignment.is_correct), side="right"))]
    for side, symbols, chunk in (
        (student, aligner.student, alignment.student_chunk_id),
        (teacher, aligner.teacher, alignment.teacher_chunk_id),
    ):
        outside = np.flatnonzero((chunk < 0) & (symbols.table.lengths[side.ids] > 0))
        rows.append(np.searchsorted(side.bounds, outside, side="right") - 1)
    for row in np.unique(np.concatenate(rows)).tolist():
        texts = []
        for side, symbols in ((student, aligner.student), (teacher, aligner.teacher)):
            ids = side.ids[side.bounds[row] : side.bounds[row + 1]].tolist()
            texts.append(b"".join(symbols.table[i] for i in ids))
        parting = _parting(*texts)
        if parting is not None:
            common, ours, theirs = parting
            of_row = f" of row {row}" if student.kept.ndim > 1 else ""
            raise XtokError(
                f"the texts{of_row} part at byte {len(common.encode())}, after "
                f'"{escape(common[-SHOWN_AROUND:].encode())}": the student has '
                f"{_shown(ours, theirs)}, the teacher {_shown(theirs, ours)}",
                hint="score the text that the student wrote, or give {option}True to leave out "
                "what differs",
                parameter="partial",
            )


def _parting(ours: bytes, theirs: bytes) -> tuple[str, str, str] | None:
    """Return what two texts share and how each goes on; None if one begins with the other.

    They are compared as a tokenizer reads what another one decoded: bytes that are not UTF-8 are
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


def _shown(text: str, other: str) -> str:
    """Return how a text begins; with its code points, where the other begins with the same look."""
    shown = f'"{escape(text[:SHOWN_AROUND].encode())}"'
    looks = [normalize("NFKC", side[:SHOWN_AROUND])[:1] for side in (text, other)]
    if looks[0] != looks[1]:
        return shown
    return f"{shown} ({' '.join(f'U+{ord(char):04X}' for char in text[:2])})"
