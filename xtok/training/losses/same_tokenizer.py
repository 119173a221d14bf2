"""KL to a teacher of the same tokenizer, position by position."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from xtok.training.losses.boundaries import first_positions, kl
from xtok.training.losses.chunks import chunks_of, top_columns
from xtok.training.losses.config import ChunkLossConfig, SameTokenizerConfig
from xtok.training.losses.logits import AnyLogits, Logits, Positions, as_logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Rows, Side, one_pass
from xtok.training.sparse import work_dtype


def same_tokenizer_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    mask: Tensor,
    config: SameTokenizerConfig | None = None,
) -> Tensor:
    """Return the KL on k tokens, position by position, to a teacher of the same tokenizer.

    K are the k tokens with the largest maximum teacher logit in the microbatch; both sides' softmax
    at temperature τ is taken within K (Hinton et al., arXiv 1503.02531; the selection is that of
    NeMo-RL's teachers without a map):

        loss = τ² · mean over positions of Σ_{j∈K} r_j (log r_j − log s_j)

    Position t of a row is compared with position t: both sides must have the same ids and padding.
    The loss `same-tokenizer` of `make_loss` compares aligned tokens instead, so that sides may be
    padded, cut and rendered differently.

    Args:
        student_logits: `[B, T, V]`, a tensor or `HiddenLogits`; computed in float32 under any
            autocast (float64 if they are).
        teacher_logits: `[B, T, V]`, either; columns beyond the narrower side's width are ignored.
        mask: `[B, T]`, 0 where a position does not count: padding, and the last one, which
            predicts nothing.
        config: the options; the defaults if None.

    Returns:
        A scalar; 0 with a gradient of zeros where no position counts.

    Raises:
        ValueError: for shapes that do not fit, and logits of NaN or +∞.
    """
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    if not student.shape[:-1] == teacher.shape[:-1] == mask.shape:
        raise ValueError(
            f"student's logits {list(student.shape)}, teacher's "
            f"{list(teacher.shape)} and mask {list(mask.shape)} do not fit"
        )
    rows, places = (mask != 0).nonzero(as_tuple=True)
    plan = _plan(student, teacher, ((rows, places), (rows, places)), config)
    return one_pass(student_logits, [plan])[0]


def plan_same_tokenizer_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    alignment: Any,
    config: SameTokenizerConfig | None = None,
) -> Plan:
    """Return what `same_tokenizer_kl` compares where chunks begin, as `event_kl` does."""
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    chunks = chunks_of(
        alignment, student, teacher, (0, 0), ChunkLossConfig(), None, starts_only=True
    )
    ours, theirs = (
        first_positions(numbers, chunks.total) for numbers in (chunks.student, chunks.teacher)
    )
    return _plan(student, teacher, (ours, theirs), config)


def _plan(
    student: Logits,
    teacher: Logits,
    positions: tuple[Positions, Positions],
    config: SameTokenizerConfig | None,
) -> Plan:
    """Return the KL between both sides' logits at n positions of each."""
    config = config or SameTokenizerConfig()
    ours, (rows, places) = positions
    dtype, width = work_dtype(student, teacher), min(student.shape[-1], teacher.shape[-1])
    columns = None
    if config.top_k is not None and config.top_k < width and len(rows):
        columns = top_columns(teacher.largest()[:width], config.top_k)

    def compare(block: LogitBlock, entries: Rows) -> tuple[Tensor, Tensor]:
        theirs = teacher.at((rows[entries.numbers], places[entries.numbers]), dtype)[:, :width]
        if columns is None:
            shared = width, config.temperature
            log_s, s = block.log_probabilities(*shared), block.probabilities(*shared)
            log_r = log_probabilities(theirs, config.temperature)
            return kl(log_s, s, log_r, reverse=config.reverse_kl)
        log_s, log_r = (
            log_probabilities(logits.index_select(1, columns), config.temperature)
            for logits in (block.logits, theirs)
        )
        lost, of_columns = kl(log_s, log_s.exp(), log_r, reverse=config.reverse_kl)
        back = of_columns.new_zeros(len(of_columns), width)
        return lost, back.index_copy_(1, columns, of_columns)

    parts = [Part(ours, compare, teacher.shape[-1])] if len(rows) else []
    sides = Side("student", student, ours, width), Side("teacher", teacher, positions[1], width)
    return Plan(parts, len(rows), dtype, config.temperature, sides=sides)
