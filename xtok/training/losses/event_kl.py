"""Event KL: both softmaxes summed by event, and compared by KL where both begin at one byte."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok.maps.events import EventMap
from xtok.training.losses.boundaries import first_positions, kl
from xtok.training.losses.chunks import chunks_of, require_type
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.losses.logits import AnyLogits, as_logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Rows, Side, one_pass
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
    plan = plan_event_kl(
        student_logits, teacher_logits, index, alignment, config, sample_mask=sample_mask
    )
    return one_pass(student_logits, [plan])[0]


def plan_event_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    index: EventIndex,
    alignment: Any,
    config: ChunkLossConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Plan:
    """Return what `event_kl` compares where chunks begin."""
    config = config or ChunkLossConfig()
    require_type(index, EventIndex, "event_index(events)")
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    dtype, (width, of_teacher) = work_dtype(student, teacher), index.widths
    chunks = chunks_of(
        alignment, student, teacher, index.widths, config, sample_mask, starts_only=True
    )
    ours, theirs = (
        first_positions(numbers, chunks.total) for numbers in (chunks.student, chunks.teacher)
    )

    def compare(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        """Compare, by sharing each event's teacher mass among its student tokens as they are: t.

        Then KL(t ‖ p) over the student's tokens is the KL over events, and its gradient is p − t.
        """
        log_p = block.log_probabilities(width, config.temperature)
        at = theirs[0][rows.numbers], theirs[1][rows.numbers]
        log_q = log_probabilities(teacher.at(at, dtype)[:, :of_teacher], config.temperature)
        p, log_t = block.probabilities(width, config.temperature), _shared_out(log_p, log_q, index)
        return kl(log_p, p, log_t, reverse=config.reverse_kl)

    parts = [Part(ours, compare, teacher.shape[2])] if chunks.total else []
    sides = Side("student", student, ours, width), Side("teacher", teacher, theirs, of_teacher)
    return Plan(parts, chunks.total, dtype, config.temperature, sides=sides)


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
