"""Event KL: both softmaxes summed by event, and compared by KL where both begin at one byte."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok.maps.event_map import EventMap
from xtok.training.losses.chunks import Chunks, loss_over_chunks
from xtok.training.losses.config import ChunkLossConfig
from xtok.training.module import block_length, work_dtype


class EventSide(NamedTuple):
    """One vocabulary's events, as the tokens that each event is the sum of; int64 each.

    Most events have one token of a side, which is picked; only the others are added.

    Attributes:
        event: `[V]`, the event of each token.
        first: `[E]`, the lowest token of each event.
        others: the tokens that are not the lowest of their event, rising.
        event_of_others: their events.
    """

    event: Tensor
    first: Tensor
    others: Tensor
    event_of_others: Tensor

    @staticmethod
    def of(events: NDArray[np.int32]) -> EventSide:
        """Return a side of an `EventMap`."""
        _, first = np.unique(events, return_index=True)
        is_other = np.ones(len(events), np.bool_)
        is_other[first] = False
        others = np.flatnonzero(is_other)
        arrays = (events, first, others, events[others])
        return EventSide(*(torch.from_numpy(array.astype(np.int64)) for array in arrays))

    def sums(self, probs: Tensor) -> Tensor:
        """Return probabilities `[n, V]` summed by event, `[n, E]`."""
        sums = probs.index_select(1, self.first)
        if len(self.others):
            added = probs.index_select(1, self.others)
            sums.scatter_add_(1, self.event_of_others.expand(len(probs), -1), added)
        return sums


class EventIndex(NamedTuple):
    """An event map on a device, as `event_kl` takes it."""

    student: EventSide
    teacher: EventSide

    def to(self, device: torch.device | str) -> EventIndex:
        """Return the index on a device."""
        return EventIndex(*(EventSide(*(ids.to(device) for ids in side)) for side in self))

    @property
    def widths(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return len(self.student.event), len(self.teacher.event)


def event_index(events: EventMap) -> EventIndex:
    """Return an event map's index, on the CPU."""
    return EventIndex(EventSide.of(events.student_event), EventSide.of(events.teacher_event))


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
        ctx.grad = grad
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, None]:
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError("event_kl keeps its gradient for one backward; compute it again")
        return grad.mul_(grad_loss.to(grad.dtype)), None


def _compare(logits: Tensor, grad: Tensor | None, job: _Job) -> Tensor:
    """Return the loss; write its gradient into `grad`, zeros like the logits."""
    width, teacher_width = job.events.widths
    dtype = work_dtype(logits, job.teacher_logits)
    num, temperature = len(job.places[0]), job.config.temperature
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    step = block_length(logits, max(width, teacher_width))
    for start in range(0, num, step):
        ours, theirs = (
            (
                places[start : start + step] // side.shape[1],
                places[start : start + step] % side.shape[1],
            )
            for places, side in zip(job.places, (logits, job.teacher_logits), strict=True)
        )
        p = torch.softmax(logits[ours][:, :width].to(dtype) / temperature, -1)
        s = job.events.student.sums(p)
        q = torch.softmax(job.teacher_logits[theirs][:, :teacher_width].to(dtype) / temperature, -1)
        r = job.events.teacher.sums(q)
        tiny = torch.finfo(dtype).tiny
        difference = r.clamp(min=tiny).log_().sub_(s.clamp(min=tiny).log_())
        if job.config.reverse_kl:
            total -= (s * difference).sum(dtype=torch.float64)
            to_sums = difference.neg_()  # and a constant, which the softmax takes out
        else:
            total += (r * difference).sum(dtype=torch.float64)
            to_sums = r.div_(s.clamp(min=tiny)).neg_()
        if grad is not None:
            mean = (to_sums * s).sum(1, keepdim=True)
            back = to_sums.sub_(mean).index_select(1, job.events.student.event).mul_(p)
            grad[ours[0], ours[1], :width] = back.mul_(temperature / num).to(grad.dtype)
    return (total * (temperature**2 / num)).to(dtype)
