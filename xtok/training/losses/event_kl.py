"""KL between next-token distributions: over events at chunk starts, or over equal token ids."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok.maps.events import EventMap
from xtok.training.losses.chunks import BothLogits, chunk_loss, require_type
from xtok.training.losses.config import ChunkLossConfig, SameTokenizerConfig
from xtok.training.losses.logits import AnyLogits, Logits, as_logits, log_probabilities, top_columns
from xtok.training.losses.one_pass import LogitBlock, Plan, PlanPart, Read, Rows, one_pass
from xtok.training.rows import to_device
from xtok.training.sparse import work_dtype

LOWEST = -700.0
"""Lower bound for log-probabilities in sums over events: float64 can represent exp(−700)."""


class EventIndex(NamedTuple):
    """An event map on a device, as int64 tensors.

    C is the number of events with several student tokens or several teacher tokens.
    """

    partner: Tensor  # [V_student], one teacher token of the same event
    student_tokens: Tensor  # tokens of events with several tokens, ascending
    student_sums: Tensor  # number of each token's event, 0..C − 1
    teacher_tokens: Tensor
    teacher_sums: Tensor
    widths: tuple[int, int]  # (V_student, V_teacher)
    num_sums: int  # C

    def to(self, device: torch.device | str) -> EventIndex:
        """Return the index on a device."""
        return to_device(self, device)


def event_index(events: EventMap) -> EventIndex:
    """Convert an event map to an index on the CPU."""
    sides = events.student_event, events.teacher_event
    counts = [np.bincount(event_ids, minlength=events.num_events) for event_ids in sides]
    has_several = (counts[0] > 1) | (counts[1] > 1)
    sum_ids = np.cumsum(has_several) - 1
    tokens = [np.flatnonzero(has_several[event_ids]) for event_ids in sides]
    _, first = np.unique(events.teacher_event, return_index=True)

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64))

    sums = [sum_ids[event_ids[ids]] for event_ids, ids in zip(sides, tokens, strict=True)]
    return EventIndex(
        partner=tensor(first[events.student_event]),
        student_tokens=tensor(tokens[0]), student_sums=tensor(sums[0]),
        teacher_tokens=tensor(tokens[1]), teacher_sums=tensor(sums[1]),
        widths=events.shape, num_sums=int(has_several.sum()),
    )  # fmt: skip


def event_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    index: EventIndex,
    alignment: Any,
    config: ChunkLossConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the KL between the models' distributions over events at chunk starts.

    At the position that predicts a chunk's first token, let s_e be the student's probability of
    event e, and r_e the teacher's probability of the same event. The probability of an event is the
    sum of the softmax at temperature τ over the event's tokens. Then

        loss = τ² · mean over chunks of Σ_e r_e (log r_e − log s_e)

    `reverse_kl` computes Σ_e s_e (log s_e − log r_e). The loss is at most the KL between the
    models' own predictions (data processing inequality). A chunk is excluded if no position
    predicts its first token, for example at the start of a row.

    If the student's probabilities are uniform and the teacher is certain of `i`, the loss is log
    256:

    >>> import torch
    >>> batch = xtok.training.prepare(xtok.DistillationCollator("bytes", "bytes")(["hi"]))
    >>> [side_batch] = batch["teachers"]
    >>> index = xtok.losses.event_index(xtok.events("bytes", "bytes"))
    >>> student, teacher = torch.zeros(2, 1, 2, 256)  # two tensors `[B, T, V]`
    >>> teacher[0, 0, ord("i")] = 100  # position 0 predicts token 1
    >>> xtok.losses.event_kl(student, teacher, index, side_batch["shifted"])
    tensor(5.5452)

    If the student's logits are a tensor, the only large allocation is their gradient. `backward`
    consumes this gradient, so `backward` can run only once.

    Args:
        student_logits: `[B, T_s, V]`, a tensor or `HiddenLogits`. The loss is computed in float32
            even under autocast, or in float64 for float64 inputs. Columns beyond the index's width
            are ignored.
        teacher_logits: `[B, T_t, V]`, a tensor or `HiddenLogits`. Receives no gradient.
        index: `event_index(events)`, on the logits' device.
        alignment: the result of `xtok.shift_to_predictions`.
        config: the options; None uses the defaults.
        sample_mask: `[B]`, 0 for rows that do not contribute to the loss.

    Returns:
        A scalar. If no chunk contributes, the loss is 0, with zero gradients.

    Raises:
        XtokError: if logits are narrower than the index.
        ValueError: if shapes do not match, chunk ids decrease, or logits are NaN or +∞.
    """
    require_type(index, EventIndex, "event_index(events)")
    plan, logits = partial(plan_event_kl, index=index), (student_logits, teacher_logits)
    return chunk_loss(plan, logits, alignment, config or ChunkLossConfig(), sample_mask)


def same_tokenizer_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    mask: Tensor,
    config: SameTokenizerConfig | None = None,
) -> Tensor:
    """Return the KL between a student and a teacher with the same tokenizer.

    K contains the `top_k` tokens with the teacher's largest logits in the microbatch, as in
    NeMo-RL. The softmax of each model is restricted to K (Hinton et al., arXiv 1503.02531):

        loss = τ² · mean over positions of Σ_{j∈K} r_j (log r_j − log s_j)

    The logits, `[B, T, V]`, must result from the same ids and the same padding for both models. If
    one model has more columns than the other, the additional columns are ignored. `mask`, `[B, T]`,
    is 0 for padding and the last token. The loss `same-tokenizer` of `make_loss` compares aligned
    tokens instead, so the two models' rows can differ in padding, truncation and chat template.

    Returns:
        A scalar. If no position contributes, the loss is 0, with zero gradients.

    Raises:
        ValueError: if shapes do not match, or logits are NaN or +∞.
    """
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    if not student.shape[:-1] == teacher.shape[:-1] == mask.shape:
        raise ValueError(
            f"the student's logits {list(student.shape)}, the teacher's logits "
            f"{list(teacher.shape)} and the mask {list(mask.shape)} differ in [B, T]"
        )
    [positions] = (mask.flatten() != 0).nonzero(as_tuple=True)
    plan = plan_kl(student, teacher, (positions, positions), config or SameTokenizerConfig())
    return one_pass(student_logits, [plan])[0]


def plan_event_kl(sides: BothLogits, index: EventIndex | None = None, *, config: Any) -> Plan:
    """Return the plan with which `one_pass` computes `event_kl`, or plain KL without `index`."""
    student, teacher = sides.tokens((0, 0) if index is None else index.widths)
    firsts = student.positions[student.starts], teacher.positions[teacher.starts]
    return plan_kl(sides.student, sides.teacher, firsts, config, index)


def plan_kl(
    student: Logits,
    teacher: Logits,
    positions: tuple[Tensor, Tensor],
    config: Any,
    index: EventIndex | None = None,
) -> Plan:
    """Return a plan of the KL at n positions, over events or (without `index`) over equal ids."""
    count, dtype, temperature = len(positions[0]), work_dtype(student, teacher), config.temperature
    shared_width = min(student.shape[-1], teacher.shape[-1])
    width, teacher_width = (shared_width, shared_width) if index is None else index.widths
    columns, compared = None, teacher
    top_k = getattr(config, "top_k", None)
    if top_k is not None and top_k < teacher_width and count:
        columns = top_columns(teacher, positions[1], teacher_width, top_k)
        compared = teacher.select(columns)

    def compare(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
        """Divide the teacher's probability of each event among student tokens, in proportion to p.

        For the resulting distribution t, KL(t ‖ p) over tokens equals the KL over events. Its
        gradient with respect to the logits is p − t.
        """
        log_q = log_probabilities(rows.teacher_logits[:, :teacher_width], temperature)
        if columns is not None:
            log_p = log_probabilities(block.logits.index_select(1, columns), temperature)
            loss, column_grad = _kl(log_p, log_p.exp(), log_q, reverse=config.reverse_kl)
            grad = column_grad.new_zeros(len(column_grad), width)
            return loss, grad.index_copy_(1, columns, column_grad)
        log_p = block.log_probabilities(width, temperature)
        p = block.probabilities(width, temperature)
        log_t = log_q if index is None else _share_mass(log_p, log_q, index)
        return _kl(log_p, p, log_t, reverse=config.reverse_kl)

    part = PlanPart(positions[0], compare, Read(compared, positions[1]), teacher.shape[2])
    return Plan([part], count, dtype, temperature)


def _kl(log_p: Tensor, p: Tensor, log_t: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of KL(t ‖ p) over n positions, and its gradient with respect to p's logits.

    With `reverse`, the divergence is KL(p ‖ t). `log_t`, `[n, V]`, is overwritten.
    """
    if reverse:
        difference = log_t.neg_().add_(log_p)
        means = (p * difference).sum(1, keepdim=True)
        return means.sum(dtype=torch.float64), difference.sub_(means).mul_(p)
    t = log_t.exp()
    loss = log_t.sub_(log_p).mul_(t).sum(1).sum(dtype=torch.float64)
    return loss, t.neg_().add_(p)


def _log_sums(log_p: Tensor, sum_ids: Tensor, count: int) -> Tensor:
    sums = torch.zeros((len(log_p), count), dtype=torch.float64, device=log_p.device)
    p = log_p.to(sums.dtype, copy=True).exp_()
    sums.scatter_add_(1, sum_ids.expand(len(p), -1), p)
    return sums.clamp_(min=torch.finfo(sums.dtype).tiny).log_().to(log_p.dtype)


def _share_mass(log_p: Tensor, log_q: Tensor, events: EventIndex) -> Tensor:
    """Divide the teacher's probability of each event among the event's student tokens.

    The shares are proportional to the student's probabilities. Returns logarithms, `[n,
    V_student]`.
    """
    log_t = log_q.index_select(1, events.partner)
    if len(events.student_tokens):
        student_log = log_p.index_select(1, events.student_tokens).clamp_(min=LOWEST)
        teacher_log = log_q.index_select(1, events.teacher_tokens).clamp_(min=LOWEST)
        ratio = _log_sums(teacher_log, events.teacher_sums, events.num_sums)
        ratio -= _log_sums(student_log, events.student_sums, events.num_sums)
        shifted = student_log + ratio.index_select(1, events.student_sums)
        log_t.index_copy_(1, events.student_tokens, shifted)
    return log_t
