"""Event KL: both softmaxes summed by event, and compared by KL where both begin at one byte."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok.maps.events import EventMap
from xtok.training.losses.boundaries import first_positions, kl
from xtok.training.losses.chunks import (
    Chunks,
    number_chunks,
    require_fit,
    require_type,
    top_columns,
)
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.losses.logits import AnyLogits, Logits, Positions, as_logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Read, Rows, one_pass, sides_of
from xtok.training.sparse import work_dtype

LOWEST = -700.0
"""Log-probabilities below this count as this in sums over events: float64 has their exponential."""


class EventIndex(NamedTuple):
    """An event map on a device, as `event_kl` takes it; int64 tensors.

    Most events have one token on each side: the teacher's log-probability is picked. In the C
    others probabilities are added up.
    """

    partner: Tensor  # [V_student], the teacher token of the same event; any, where it has several
    student_tokens: Tensor  # those of events that have several tokens, rising
    student_sums: Tensor  # the number in 0..C − 1 of each one's event
    teacher_tokens: Tensor
    teacher_sums: Tensor
    widths: tuple[int, int]  # (V_student, V_teacher)
    num_sums: int  # C

    def to(self, device: torch.device | str) -> EventIndex:
        """Return the index on a device."""
        tensors = {n: v for n, v in self._asdict().items() if isinstance(v, Tensor)}
        moved: dict[str, Any] = {n: tensor.to(device) for n, tensor in tensors.items()}
        return self._replace(**moved)


def event_index(events: EventMap) -> EventIndex:
    """Return an event map's index, on the CPU."""
    sides = events.student_event, events.teacher_event
    counts = [np.bincount(side, minlength=events.num_events) for side in sides]
    has_several = (counts[0] > 1) | (counts[1] > 1)
    number = np.cumsum(has_several) - 1
    tokens = [np.flatnonzero(has_several[side]) for side in sides]
    _, first = np.unique(events.teacher_event, return_index=True)

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64))

    return EventIndex(
        partner=tensor(first[events.student_event]),
        student_tokens=tensor(tokens[0]),
        student_sums=tensor(number[sides[0][tokens[0]]]),
        teacher_tokens=tensor(tokens[1]),
        teacher_sums=tensor(number[sides[1][tokens[1]]]),
        widths=events.shape,
        num_sums=int(has_several.sum()),
    )


def event_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    index: EventIndex,
    alignment: Any,
    config: ChunkLossConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the KL between both models' distributions over events, where both begin at one byte.

    Each chunk has one position on each side that predicts its first token, from the same text.
    With s_e and r_e the sums of the student's and the teacher's softmax at temperature τ over the
    tokens of event e:

        loss = τ² · mean over chunks of Σ_e r_e (log r_e − log s_e)

    Reversed, Σ_e s_e (log s_e − log r_e). By the data processing inequality (Cover and Thomas,
    Elements of Information Theory, 2nd ed., section 2.8) it is at most the divergence of the
    models' own predictions. The first chunk of a row counts only where its first token is
    predicted: not where position 0, which predicts token 1, is already in it.

    The gradient to the student's logits is the one large allocation, in their own dtype; with
    `HiddenLogits` there is none. It is computed with the loss, a block of positions at a time, and
    used up by `backward`, which can run once.

    Args:
        student_logits: `[B, T_s, V]`, a tensor or `HiddenLogits`; computed in float32 under any
            autocast (float64 if they are). Columns beyond the events' width are ignored.
        teacher_logits: `[B, T_t, V]`, either; no gradient.
        index: `event_index(events)`, on the logits' device.
        alignment: of the predicted tokens, as `xtok.shift_to_predictions` returns it.
        config: the options; the defaults if None.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a gradient of zeros where no chunk counts.

    Raises:
        XtokError: if logits are narrower than the events.
        ValueError: for shapes that do not fit, chunk ids that fall, and logits of NaN or +∞.
    """
    config = config or ChunkLossConfig()
    kind = config.exact_token_match_only, True
    chunks = number_chunks(alignment, kind, sample_mask, student_logits.device)
    return one_pass(
        student_logits, [plan_event_kl(student_logits, teacher_logits, index, chunks, config)]
    )[0]


def plan_event_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    index: EventIndex,
    chunks: Chunks,
    config: ChunkLossConfig,
) -> Plan:
    """Return what `event_kl` compares where chunks begin."""
    require_type(index, EventIndex, "event_index(events)")
    both = as_logits(student_logits), as_logits(teacher_logits)
    require_fit(chunks, both, index.widths)
    return plan_kl(*both, starts_of(chunks), config, index)


def starts_of(chunks: Chunks) -> tuple[Positions, Positions]:
    """Return where chunks begin on both sides."""
    ours, theirs = (first_positions(numbers, chunks.total) for numbers in chunks[:2])
    return ours, theirs


def plan_kl(
    student: Logits,
    teacher: Logits,
    positions: tuple[Positions, Positions],
    config: Any,
    index: EventIndex | None = None,
    top_k: int | None = None,
) -> Plan:
    """Return the KL at n positions of each side, over events or over tokens of the same id.

    With `top_k` over those k that have the largest logits of the teacher.
    """
    ours, theirs = positions
    count, dtype, temperature = len(ours[0]), work_dtype(student, teacher), config.temperature
    same = min(student.shape[-1], teacher.shape[-1])
    width, of_teacher = (same, same) if index is None else index.widths
    columns, compared = None, teacher
    if top_k is not None and top_k < of_teacher and count:
        columns = top_columns(teacher.largest()[:of_teacher], top_k)
        compared = teacher.only(columns)

    def compare(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        """Compare, by sharing each event's teacher mass among its student tokens as they are: t.

        Then KL(t ‖ p) over the student's tokens is the KL over events, and its gradient is p − t.
        """
        log_q = log_probabilities(rows.teacher_logits[:, :of_teacher], temperature)
        if columns is not None:
            log_p = log_probabilities(block.logits.index_select(1, columns), temperature)
            lost, of_columns = kl(log_p, log_p.exp(), log_q, reverse=config.reverse_kl)
            back = of_columns.new_zeros(len(of_columns), width)
            return lost, back.index_copy_(1, columns, of_columns)
        log_p = block.log_probabilities(width, temperature)
        p = block.probabilities(width, temperature)
        log_t = log_q if index is None else _shared_out(log_p, log_q, index)
        return kl(log_p, p, log_t, reverse=config.reverse_kl)

    parts = [Part(ours, compare, Read(compared, theirs), teacher.shape[2])] if count else []
    sides = sides_of((student, teacher), positions, (width, of_teacher))
    return Plan(parts, count, dtype, temperature, sides)


def _log_sums(log_p: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return the log of sums of probabilities, `[n, count]`, by the events' `numbers`."""
    sums = torch.zeros((len(log_p), count), dtype=torch.float64, device=log_p.device)
    p = log_p.to(sums.dtype, copy=True).exp_()
    sums.scatter_add_(1, numbers.expand(len(p), -1), p)
    return sums.clamp_(min=torch.finfo(sums.dtype).tiny).log_().to(log_p.dtype)


def _shared_out(log_p: Tensor, log_q: Tensor, events: EventIndex) -> Tensor:
    """Return log t `[n, V_student]` for the student's log p and the teacher's log q."""
    log_t = log_q.index_select(1, events.partner)
    if len(events.student_tokens):
        ours, theirs = (
            log.index_select(1, tokens).clamp_(min=LOWEST)
            for log, tokens in ((log_p, events.student_tokens), (log_q, events.teacher_tokens))
        )
        ratio = _log_sums(theirs, events.teacher_sums, events.num_sums)
        ratio -= _log_sums(ours, events.student_sums, events.num_sums)
        log_t.index_copy_(
            1, events.student_tokens, ours + ratio.index_select(1, events.student_sums)
        )
    return log_t
