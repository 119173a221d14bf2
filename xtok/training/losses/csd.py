"""CSD: both models compared, chunk by chunk, on completions of the text that mean the same."""

from __future__ import annotations

from functools import cached_property
from math import log, log1p
from typing import Any

import torch
from torch import Tensor

from xtok.training.losses.boundaries import (
    Positions,
    add_at,
    gradient_for,
    with_gradient,
)
from xtok.training.losses.chunks import (
    Chunks,
    log_probabilities,
    loss_over_chunks,
    no_chunks,
    number_chunks,
    require,
)
from xtok.training.losses.config import CSDConfig
from xtok.training.losses.picked import Picked, Targets, Tokens, pick, tokens_in
from xtok.training.losses.spelling_index import Events, SpellingIndex
from xtok.training.sparse import work_dtype

LEAST = 1e-12
"""The least probability of the rest, as in NeMo-RL."""


def csd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    index: SpellingIndex,
    targets: Targets,
    alignment: Any,
    config: CSDConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the Common-Support Distillation loss (arXiv 2610.28895) as NeMo-RL's draft has it.

    A chunk is student tokens s_1 … s_M and teacher tokens t_1 … t_N of equal bytes. All but the
    last token of a side stays as it is, and the last is replaced by each of K completions, u_k of
    the student and v_k of the teacher, that mean the same text. At temperature τ

        q_S(k) = [∏_{r<M} p_S(s_r)] · p_S(u_k)      P_S = (q_S(1) … q_S(K), 1 − Σ q_S(k))

    P_T is the teacher's, and the last event the rest, at least 1e-12. What completes a chunk:

    - one token on each side: all shared tokens;
    - M = 1: the student tokens whose spelling is t_1 … t_{N−1}, v; N = 1: the mirror image;
    - both above 1: what the text says, alone.

        loss = τ² · (Σ_{1:1} D(P_T ‖ P_S) + β Σ_{others} D(P_T ‖ P_S)) / number of chunks

    D is KL(P_T ‖ P_S), the reverse KL, or with `jsd_beta` b the generalized JSD b KL(P_T ‖ m) +
    (1 − b) KL(P_S ‖ m), m = (1 − b) P_S + b P_T. With `alpha` α a chunk that is not 1:1 also
    compares shared tokens at its first place, times βα; the tokens that the chunk has there, and
    its completions, are in the rest. As in NeMo-RL, a chunk with M = 1 or N = 1 that has fewer than
    two completions does not count, nor is it in the number of chunks.

    The first chunk of a row counts only where its first token is predicted, as in `event_kl`; what
    is said there of memory holds here. NeMo-RL has the rest from 1 − Σ q; here that of 1:1 chunks
    is summed up, which keeps its digits where it is small.

    Args:
        student_logits: `[B, T_s, V]`; computed in float32 under any autocast (float64 if they are).
            Columns beyond the index's width are ignored.
        teacher_logits: `[B, T_t, V]`; no gradient.
        index: `spelling_index(spellings)`, on the logits' device.
        targets: the ids that both sides' positions predict, int64 `[B, T_s]` and `[B, T_t]`; any
            outside of chunks.
        alignment: of the predicted tokens, as `xtok.shift_to_predictions` returns it.
        config: the options; the defaults if None.
        sample_mask: `[B]`, 0 where a row does not count.

    Returns:
        A scalar; 0 with a gradient of zeros where no chunk counts.

    Raises:
        XtokError: if logits are narrower than the index.
        ValueError: for shapes that do not fit, chunk ids that fall, targets in a chunk that are no
            ids, and logits of NaN or +∞.
    """
    config = config or CSDConfig()
    require(index, SpellingIndex, "spelling_index(spellings)")

    def over_chunks(chunks: Chunks) -> Tensor:
        dtype = work_dtype(student_logits, teacher_logits)
        step = _Step(student_logits, index, chunks, targets, config, dtype)
        count = int(step.events.is_counted.sum())
        if not count:
            return no_chunks(student_logits)
        total = step.shared(teacher_logits) + step.completed(teacher_logits)
        loss = (total * (config.temperature**2 / count)).to(step.dtype)
        return with_gradient(student_logits, loss, step.grad, config.temperature / count)

    return loss_over_chunks(
        over_chunks, student_logits, teacher_logits, alignment, config, sample_mask, index.widths,
        starts_only=True,
    )  # fmt: skip


def count_completed(
    index: SpellingIndex,
    targets: Targets,
    alignment: Any,
    *,
    exact_token_match_only: bool = False,
) -> int:
    """Return how many chunks `csd` is the mean of."""
    device = targets[0].device
    chunks = number_chunks(
        alignment, exactly=exact_token_match_only, starts_only=True, device=device
    )
    return int(_events(index, chunks, targets)[2].is_counted.sum())


def _events(
    index: SpellingIndex, chunks: Chunks, targets: Targets
) -> tuple[Tokens, Tokens, Events]:
    ours, theirs = (
        tokens_in(side, numbers, chunks.total, ids, width)
        for side, numbers, ids, width in zip(
            ("student", "teacher"), chunks[:2], targets, index.widths, strict=True
        )
    )
    return ours, theirs, index.events(ours, theirs)


class _Step:
    """One computation of the loss: chunks, events, and the gradient to the student's logits.

    Sums of losses are of chunks, without τ²; gradients are to the logits over τ.
    """

    def __init__(
        self,
        logits: Tensor,
        index: SpellingIndex,
        chunks: Chunks,
        targets: Targets,
        config: CSDConfig,
        dtype: torch.dtype,
    ) -> None:
        self.logits, self.index, self.config, self.dtype = logits, index, config, dtype
        self.ours, self.theirs, self.events = _events(index, chunks, targets)
        self.grad = gradient_for(logits)

    @cached_property
    def rest(self) -> tuple[Tensor, Tensor]:
        """The student's and the teacher's tokens that are not shared."""
        partners = self.index.student_partner, self.index.teacher_partner
        ours, theirs = ((partner < 0).nonzero()[:, 0] for partner in partners)
        return ours, theirs

    # Shared tokens

    def shared(self, teacher_logits: Tensor) -> Tensor:
        """Compare all shared tokens: in 1:1 chunks, and with `alpha` at others' first places."""
        single = self.ours.starts[self.events.is_single], self.theirs.starts[self.events.is_single]

        def compare(log_p: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
            return self._compare_shared(log_p, teacher_logits, positions)

        total = self._add_at(self.ours.at(single[0]), self.theirs.at(single[1]), compare)
        weight = self.config.alpha * self.config.beta
        if not weight:
            return total
        chunks, place = self._completed_chunks()
        width = self.index.widths[0]
        excluded = self._excluded(chunks, place)

        def compare_first(log_p: Tensor, numbers: Positions) -> tuple[Tensor, Tensor]:
            first, last = numbers[0][0], numbers[0][-1] + 1
            start, stop = torch.searchsorted(excluded, torch.stack([first, last]) * width).tolist()
            cells = excluded[start:stop] - first * width
            positions = self.theirs.at(self.theirs.starts[chunks[numbers[0]]])
            lost, back = self._compare_shared(
                log_p, teacher_logits, positions, (cells // width, cells % width)
            )
            return lost * weight, back.mul_(weight)

        numbers = torch.arange(len(chunks), device=chunks.device)
        first = self.ours.at(self.ours.starts[chunks])
        return total + self._add_at(first, (numbers, numbers), compare_first)

    def _add_at(self, ours: Positions, theirs: Positions, compare: Any) -> Tensor:
        widths, temperature = self.index.widths, self.config.temperature
        return add_at(
            ours, theirs, compare, self.logits, self.grad, widths, self.dtype, temperature
        )

    def _completed_chunks(self) -> tuple[Tensor, Tensor]:
        """Return the other chunks that count, `[G]`, and which of them each completion is of."""
        events = self.events
        chunks = (events.is_counted & ~events.is_single).nonzero()[:, 0]
        return chunks, torch.searchsorted(chunks, events.chunk)

    def _excluded(self, chunks: Tensor, place: Tensor) -> Tensor:
        """Return what is in the rest at first places: chunk · V_student + token, rising."""
        index, width = self.index, self.index.widths[0]
        numbers = torch.arange(len(chunks), device=chunks.device)
        ours = self.ours.ids[self.ours.starts[chunks]]
        theirs = index.teacher_partner[self.theirs.ids[self.theirs.starts[chunks]]]
        tokens = torch.cat([ours, theirs, self.events.student])
        of = torch.cat([numbers, numbers, place])
        kept = (tokens >= 0) & (index.student_partner[tokens] >= 0)
        cells: Tensor = (of[kept] * width + tokens[kept]).unique()
        return cells

    def _compare_shared(
        self,
        log_p: Tensor,
        teacher_logits: Tensor,
        positions: Positions,
        excluded: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of losses of n positions, and its gradient to the student's logits.

        Both sides' other tokens are the rest; so are `excluded` cells of `[n, V_student]`.
        """
        ours, theirs = self.rest
        picked = teacher_logits[positions][:, : self.index.widths[1]].to(self.dtype)
        log_q = log_probabilities(picked, self.config.temperature)
        log_t = log_q.index_select(1, self.index.student_partner.clamp(min=0))
        p, (value, slope) = log_p.exp(), _divergence(log_p, log_t, self.config)
        parts = {id(part): part for part in (value, slope)}.values()
        for part in parts:
            part.index_fill_(1, ours, 0)
        p_others = p.index_select(1, ours)
        p_rest, q_rest = p_others.sum(1), log_q.index_select(1, theirs).exp_().sum(1)
        if excluded is not None:
            for part in parts:
                part[excluded] = 0
            p_rest.index_add_(0, excluded[0], p[excluded])
            q_rest.index_add_(0, excluded[0], log_t[excluded].exp())
        is_empty, p_rest = p_rest < LEAST, p_rest.clamp(min=LEAST)
        of_rest = _divergence(p_rest.log(), q_rest.clamp(min=LEAST).log(), self.config)
        # The gradient is Σ_e slope_e · (the share of a token in e − its probability).
        slope_of_rest = of_rest[1].masked_fill(is_empty, 0)
        lost = value.sum() + of_rest[0].sum()
        ratio = (slope_of_rest / p_rest)[:, None]
        sums = (slope.sum(1) + slope_of_rest)[:, None]
        back = slope.addcmul_(p, sums, value=-1)
        back.index_add_(1, ours, p_others.mul_(ratio))
        if excluded is not None:
            back.index_put_(excluded, p[excluded] * ratio[excluded[0], 0], accumulate=True)
        return lost, back

    # Completions

    def completed(self, teacher_logits: Tensor) -> Tensor:
        """Compare chunks that are not 1:1 by their completions."""
        chunks, place = self._completed_chunks()
        before, number = _before_last(self.theirs, chunks)
        sums = torch.zeros(len(chunks), dtype=self.dtype, device=chunks.device)
        if len(before):
            path = self._pick(teacher_logits, self.theirs.at(before), self.theirs.ids[before], 1)
            sums.index_add_(0, number, path.logprobs)
        last = self.theirs.at(self.theirs.last(chunks))
        of_last = self._pick(teacher_logits, last, self.events.teacher, 1, place).logprobs
        return self._compare(chunks, place, self.events.student, of_last + sums[place])

    def _compare(self, chunks: Tensor, place: Tensor, students: Tensor, log_q: Tensor) -> Tensor:
        """Compare completions, and the rest, of G chunks.

        Args:
            chunks: int64 `[G]`.
            place: int64 `[e]`, which of them a completion is of, rising.
            students: int64 `[e]`, the student's last tokens.
            log_q: `[e]`, the teacher's log-probabilities.
        """
        if not len(chunks):
            return log_q.new_zeros((), dtype=torch.float64)
        ours, size = self.ours, len(chunks)
        before, number = _before_last(ours, chunks)
        path = self._pick(self.logits, ours.at(before), ours.ids[before], 0)
        last = self._pick(self.logits, ours.at(ours.last(chunks)), students, 0, place)
        sums = log_q.new_zeros(size).index_add_(0, number, path.logprobs)
        weights = torch.where(self.events.is_single[chunks], 1.0, self.config.beta).to(self.dtype)
        with torch.enable_grad():
            log_p = (last.logprobs + sums[place]).requires_grad_()
            p_rest, q_rest = (
                1 - log_p.new_zeros(size).index_add(0, place, side.exp()) for side in (log_p, log_q)
            )
            rests = p_rest.clamp(min=LEAST).log(), q_rest.clamp(min=LEAST).log()
            of_rest, _ = _divergence(*rests, self.config)
            of_each, _ = _divergence(log_p, log_q, self.config)
            lost = of_rest.index_add(0, place, of_each).dot(weights)
            (to_logprobs,) = torch.autograd.grad(lost, log_p)
        if self.grad is not None:
            of_paths = log_q.new_zeros(size).index_add_(0, place, to_logprobs)
            path.add_gradient(self.grad, self.logits, of_paths[number])
            last.add_gradient(self.grad, self.logits, to_logprobs)
        return lost.detach().double()

    def _pick(
        self, logits: Tensor, at: Positions, ids: Tensor, side: int, place: Tensor | None = None
    ) -> Picked:
        width, temperature = self.index.widths[side], self.config.temperature
        return pick(logits, at, ids, place, width=width, dtype=self.dtype, temperature=temperature)


def _before_last(tokens: Tokens, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of all tokens of some chunks but the last, and which chunk each is of."""
    counts = tokens.sizes[chunks] - 1
    number = torch.arange(len(chunks), device=chunks.device).repeat_interleave(counts)
    first = tokens.starts[chunks] - counts.cumsum(0) + counts
    return torch.arange(len(number), device=chunks.device) + first[number], number


def _divergence(log_p: Tensor, log_t: Tensor, config: CSDConfig) -> tuple[Tensor, Tensor]:
    """Return each event's term of D(t ‖ p), and p times its derivative to p, but for a constant."""
    if config.jsd_beta is not None:
        share = config.jsd_beta
        log_m = torch.logaddexp(log_p + log1p(-share), log_t + log(share))
        towards = (1 - share) * log_p.exp() * (log_p - log_m)
        return share * log_t.exp() * (log_t - log_m) + towards, towards
    if config.reverse_kl:
        term = log_p.exp() * (log_p - log_t)
        return term, term
    t = log_t.exp()
    return t * (log_t - log_p), -t
