"""Event KL: both softmaxes summed by event, and compared by KL where both begin at one byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok.maps.event_map import EventMap
from xtok.training.losses.chunks import Chunks, log_probabilities, loss_over_chunks
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.module import block_length, work_dtype


@dataclass(frozen=True, eq=False)
class EventIndex:
    """An event map on a device, as `event_kl` takes it; int64 tensors.

    Most events have one token on each side: the teacher's log-probability is picked. In the C
    others probabilities are added up.

    Attributes:
        partner: `[V_student]`, the teacher token of the same event; any of them, where an event has
            several tokens.
        student_tokens: the student tokens of events that have several tokens, rising.
        student_sums: the number in 0..C − 1 of each one's event.
        teacher_tokens: the teacher tokens of these events, rising.
        teacher_sums: the number of each one's event.
        widths: `(V_student, V_teacher)`.
        num_sums: C.
    """

    partner: Tensor
    student_tokens: Tensor
    student_sums: Tensor
    teacher_tokens: Tensor
    teacher_sums: Tensor
    widths: tuple[int, int]
    num_sums: int

    def to(self, device: torch.device | str) -> EventIndex:
        """Return the index on a device."""
        moved = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]


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
    student_logits: Tensor,
    teacher_logits: Tensor,
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

    The gradient to the student's logits is the one large allocation, in their own dtype; it is
    computed with the loss, and used up by `backward`, which can run once.

    Args:
        student_logits: `[B, T_s, V]`; computed in float32 under any autocast (float64 if they are).
            Columns beyond the events' width are ignored.
        teacher_logits: `[B, T_t, V]`, likewise; no gradient.
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

    def compare(chunks: Chunks) -> Tensor:
        ends = [_first_positions(ids, chunks.total) for ids in (chunks.student, chunks.teacher)]
        known = torch.ones(chunks.total, dtype=torch.bool, device=student_logits.device)
        for side, numbers in (("student", chunks.student), ("teacher", chunks.teacher)):
            ids = torch.as_tensor(getattr(alignment, f"{side}_chunk_id"), device=known.device)
            doubtful = numbers[:, 0][ids[:, 0] == 0]
            known[doubtful[doubtful < chunks.total]] = False
        places = tuple(end[known] for end in ends)
        if not len(places[0]):
            return student_logits.sum() * 0
        job = _Job(teacher_logits.detach(), index, places, config)
        loss: Tensor = _EventKL.apply(student_logits, job)  # type: ignore[no-untyped-call]
        return loss

    return loss_over_chunks(
        compare, student_logits, teacher_logits, alignment, config, sample_mask, index.widths
    )


def _first_positions(numbers: Tensor, total: int) -> Tensor:
    """Return the first position of each chunk in the flattened batch, int64 `[total]`."""
    flat = numbers.flatten()
    first = torch.full((total + 1,), len(flat), device=flat.device)
    places = torch.arange(len(flat), device=flat.device)
    return first.scatter_reduce(0, flat, places, "amin")[:-1]


class _Job(NamedTuple):
    """What is compared with the student's logits, and where."""

    teacher_logits: Tensor
    events: EventIndex
    places: tuple[Tensor, ...]
    config: ChunkLossConfig

    @property
    def widths(self) -> tuple[int, int]:
        return self.events.widths


class _EventKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, job: _Job) -> Tensor:
        grad = (
            torch.zeros_like(logits, memory_format=torch.contiguous_format)
            if ctx.needs_input_grad[0]
            else None
        )
        with torch.autocast(logits.device.type, enabled=False):
            loss = _compare(logits, grad, job)
        ctx.grad, ctx.scale = grad, job.config.temperature / len(job.places[0])
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, None]:
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError("event_kl keeps its gradient for one backward; compute it again")
        return grad.mul_((grad_loss * ctx.scale).to(grad.dtype)), None


def _compare(logits: Tensor, grad: Tensor | None, job: _Job) -> Tensor:
    """Return the loss; write its gradient, times N / τ, into `grad`, zeros like the logits.

    Each event's teacher mass is shared among its student tokens as the student shares it: t. Then
    KL(t ‖ p) over the student's tokens is the KL over events, and its gradient is p − t.
    """
    dtype = work_dtype(logits, job.teacher_logits)
    num, temperature = len(job.places[0]), job.config.temperature
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    step = block_length(logits, max(job.widths))
    for start in range(0, num, step):
        rows, log_probs = [], []
        for side, places, width in zip(
            (logits, job.teacher_logits), job.places, job.widths, strict=True
        ):
            part = places[start : start + step]
            rows.append((part // side.shape[1], part % side.shape[1]))
            picked = side[rows[-1]][:, :width].to(dtype)
            log_probs.append(log_probabilities(picked, temperature))
        log_p, p = log_probs[0], log_probs[0].exp()
        log_t = _shared_out(log_p, log_probs[1], job.events)
        if job.config.reverse_kl:
            difference = log_p - log_t
            total += torch.dot(p.view(-1), difference.view(-1))
            back = difference.sub_((p * difference).sum(1, keepdim=True)).mul_(p)
        else:
            t = log_t.exp()
            total += torch.dot(t.view(-1), log_t.sub_(log_p).view(-1))
            back = p.sub_(t)
        if grad is not None:
            grad[rows[0][0], rows[0][1], : job.widths[0]] = back.to(grad.dtype)
    return (total * (temperature**2 / num)).to(dtype)


def _shared_out(log_p: Tensor, log_q: Tensor, events: EventIndex) -> Tensor:
    """Return log t `[n, V_student]` for the student's log p and the teacher's log q."""
    log_t = log_q.index_select(1, events.partner)
    if len(events.student_tokens):
        ours = log_p.index_select(1, events.student_tokens)
        theirs = log_q.index_select(1, events.teacher_tokens)
        sums = [
            torch.zeros((len(part), events.num_sums), dtype=part.dtype, device=part.device)
            .scatter_add_(1, numbers.expand(len(part), -1), part.exp())
            .clamp_(min=torch.finfo(part.dtype).tiny)
            .log_()
            for part, numbers in ((ours, events.student_sums), (theirs, events.teacher_sums))
        ]
        ratio = sums[1].sub_(sums[0])
        log_t.index_copy_(
            1, events.student_tokens, ours + ratio.index_select(1, events.student_sums)
        )
    return log_t
