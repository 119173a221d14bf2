"""CSD: compare the models' probabilities of completions with the same text, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log, log1p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.chunks import (
    BothLogits,
    ChunkRows,
    Chunks,
    ChunkTokens,
    TargetIds,
    TokenGradients,
    both_tokens,
    check_targets,
    chunk_loss,
    chunk_part,
    gather,
    logit_gradient,
    require_type,
)
from xtok.training.losses.config import CSDConfig
from xtok.training.losses.logits import AnyLogits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Plan, PlanPart, Read, Rows
from xtok.training.losses.spelling_index import Events, SpellingIndex

MIN_REST = 1e-12
"""Lower bound for the probability of the last event, the rest. NeMo-RL uses the same bound."""


def csd(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    index: SpellingIndex,
    targets: TargetIds,
    alignment: Any,
    config: CSDConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the Common-Support Distillation loss (arXiv 2610.28895) of NeMo-RL's draft.

    A chunk consists of student tokens s_1 … s_M and teacher tokens t_1 … t_N with equal bytes. A
    chunk has K events. Event k replaces the last token of each side: the completion u_k replaces
    s_M, and the completion v_k replaces t_N. After the replacement, both sides have equal bytes
    again. The student's distribution at temperature τ is

        q_S(k) = [∏_{r<M} p_S(s_r)] · p_S(u_k)      P_S = (q_S(1) … q_S(K), 1 − Σ q_S(k))

    P_T is defined in the same way for the teacher. The last event, called the rest, contains all
    other outcomes. If the probability of the rest is below 1e-12, it is increased to 1e-12. The
    completions are

    - M = N = 1: all shared tokens;
    - M = 1: all student tokens with the spelling t_1 … t_{N−1}, v, for any teacher token v; N = 1:
      the same, with student and teacher exchanged;
    - M, N > 1: only s_M and t_N.

        loss = τ² · (Σ_{1:1} D(P_T ‖ P_S) + β Σ_{others} D(P_T ‖ P_S)) / number of chunks

    D is KL(P_T ‖ P_S) by default, and KL(P_S ‖ P_T) with `reverse_kl`. With `jsd_beta` b, D is the
    generalized JSD b KL(P_T ‖ m) + (1 − b) KL(P_S ‖ m), where m = (1 − b) P_S + b P_T. If `alpha` α
    is above 0, the loss also compares the probabilities of shared tokens at the first position of
    each chunk that is not 1:1, with the weight βα. In this comparison, the rest also contains the
    first tokens of the chunk, and the completions.

    Like NeMo-RL, `csd` excludes 1:N and N:1 chunks with fewer than two completions. For a 1:1
    chunk, the probability of the rest is the sum over the remaining tokens, which is more accurate
    than NeMo-RL's 1 − Σ q.

    `index` is `spelling_index(spellings)`, on the logits' device. `targets` are the predicted ids,
    int64 `[B, T_s]` and `[B, T_t]`. See `event_kl` for the other arguments and the result.

    Raises:
        ValueError: if a target in a chunk is not a valid id, or for the same reasons as `event_kl`.
    """
    plan, logits = partial(plan_csd, index=index), (student_logits, teacher_logits)
    options = config or CSDConfig()
    return chunk_loss(plan, logits, alignment, options, sample_mask, targets=targets)


def plan_csd(sides: BothLogits, index: SpellingIndex, config: CSDConfig) -> Plan:
    """Return the plan with which `one_pass` computes `csd`."""
    require_type(index, SpellingIndex, "spelling_index(spellings)")
    tokens = sides.tokens(index.widths, sides.targets)
    if not sides.chunks.total:
        return Plan((), 0, sides.dtype)
    events = index.events(*tokens)
    shared = _SharedTokens(sides, index, config, tokens)
    parts = [shared.part(events.singles), _group_part(sides, index.widths, config, tokens, events)]
    if weight := config.alpha * config.beta:
        parts.append(shared.part(events.groups, shared.rest_cells(events), weight))
    check = partial(check_targets, tokens, index.widths)
    return Plan(parts, events.num_chunks, sides.dtype, config.temperature, check)


def count_completed(index: SpellingIndex, targets: TargetIds, chunks: Chunks) -> int:
    """Return the number of chunks that contribute to `csd`."""
    if not chunks.total:
        return 0
    return index.events(*both_tokens(chunks, targets, index.widths)).num_chunks


class _SharedTokens(NamedTuple):
    """Compares shared tokens at the first positions of chunks. All other tokens form one event."""

    logits: BothLogits
    spellings: SpellingIndex
    config: CSDConfig
    tokens: Sequence[ChunkTokens]

    def part(
        self, chunks: Tensor, cells: tuple[Tensor, Tensor] | None = None, weight: float = 1.0
    ) -> PlanPart:
        """Return a part for `chunks`. `cells` are pairs (chunk, student token) in the rest."""

        def compare(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
            block_cells = None
            if cells is not None:
                [entries] = rows.entries
                row = torch.searchsorted(rows.indices, cells[0][entries])
                row = row.clamp_(max=len(rows.indices) - 1)
                is_in_block = rows.indices[row] == cells[0][entries]
                block_cells = row[is_in_block], cells[1][entries][is_in_block]
            loss, grad = self.compare(block, rows.teacher_logits, block_cells)
            return loss * weight, grad.mul_(weight)

        firsts = [tokens.positions[tokens.starts[chunks]] for tokens in self.tokens]
        teacher = self.logits.teacher
        entry_positions = [] if cells is None else cells[:1]
        read = Read(teacher, firsts[1])
        return PlanPart(firsts[0], compare, read, teacher.shape[2], entry_positions)

    def rest_cells(self, events: Events) -> tuple[Tensor, Tensor]:
        """Return cells for the first tokens and the completions of all chunks that are not 1:1."""
        width = self.spellings.widths[0]
        rest_chunks = torch.arange(len(events.groups), device=events.groups.device)
        student, teacher = (x.ids[x.starts[events.groups]] for x in self.tokens)
        tokens = torch.cat([student, self.spellings.teacher_partner[teacher], events.student])
        chunks = torch.cat([rest_chunks, rest_chunks, events.chunk])
        is_shared = (tokens >= 0) & (self.spellings.student_partner[tokens] >= 0)
        cells = torch.unique((chunks * width + tokens)[is_shared])
        return cells // width, cells % width

    def compare(
        self, block: LogitBlock, teacher_logits: Tensor, cells: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and its gradient. Tokens in `cells` belong to the rest."""
        index, temperature = self.spellings, self.config.temperature
        rest, teacher_rest = index.student_rest, index.teacher_rest
        log_p = block.log_probabilities(index.widths[0], temperature)
        log_q = log_probabilities(teacher_logits[:, : index.widths[1]], temperature)
        log_t = log_q.index_select(1, index.student_partner.clamp(min=0))
        p = block.probabilities(index.widths[0], temperature)
        value, slope = (x.index_fill_(1, rest, 0) for x in _divergence(log_p, log_t, self.config))
        p_others = p.index_select(1, rest)
        p_rest, q_rest = p_others.sum(1), log_q.index_select(1, teacher_rest).exp_().sum(1)
        if cells is not None:
            value[cells], slope[cells] = 0, 0
            p_rest.index_add_(0, cells[0], p[cells])
            q_rest.index_add_(0, cells[0], log_t[cells].exp())
        is_empty, p_rest = p_rest < MIN_REST, p_rest.clamp(min=MIN_REST)
        rest_terms = _divergence(p_rest.log(), q_rest.clamp(min=MIN_REST).log(), self.config)
        # The gradient is Σ_e slope_e · (the token's share of event e − the token's probability).
        rest_slope = rest_terms[1].masked_fill(is_empty, 0)
        loss = value.sum() + rest_terms[0].sum()
        sums, ratio = (slope.sum(1) + rest_slope)[:, None], (rest_slope / p_rest)[:, None]
        grad = slope.addcmul_(p, sums, value=-1)
        grad.index_add_(1, rest, p_others.mul_(ratio))
        if cells is not None:
            grad[cells] += p[cells] * ratio[cells[0], 0]
        return loss, grad


def _group_part(
    sides: BothLogits,
    widths: tuple[int, int],
    config: CSDConfig,
    tokens: Sequence[ChunkTokens],
    events: Events,
) -> PlanPart:
    # the G chunks that are not 1:1
    groups = [x.select(events.groups, size) for x, size in zip(tokens, events.sizes, strict=True)]

    def compare(block: LogitBlock, chunks: ChunkRows) -> tuple[Tensor, Tensor]:
        log_p = block.log_probabilities(widths[0], config.temperature)
        log_q = log_probabilities(chunks.teacher_logits[:, : widths[1]], config.temperature)
        [span] = chunks.entries
        chunk = events.chunk[span] - chunks.chunks.start
        student, gradients = _complete(log_p, chunks.student, chunk, events.student[span])
        teacher, _ = _complete(log_q, chunks.teacher, chunk, events.teacher[span])
        with torch.enable_grad():
            student.requires_grad_()
            zeros = student.new_zeros(len(chunks.student.sizes))
            masses = [zeros.index_add(0, chunk, x.exp()) for x in (student, teacher)]
            rests = [(1 - mass).clamp(min=MIN_REST).log() for mass in masses]
            rest_terms, _ = _divergence(rests[0], rests[1], config)
            terms, _ = _divergence(student, teacher, config)
            loss = config.beta * (rest_terms.sum() + terms.sum())
            (term_grad,) = torch.autograd.grad(loss, student)
        p = block.probabilities(widths[0], config.temperature)
        return loss.detach(), logit_gradient(p, gradients(term_grad))

    return chunk_part(groups[0], groups[1], compare, sides.teacher, widths[1], [events.chunk])


def _complete(
    log_p: Tensor, tokens: ChunkTokens, chunk: Tensor, ends: Tensor
) -> tuple[Tensor, Callable[[Tensor], list[TokenGradients]]]:
    rows, last = torch.arange(len(tokens.ids), device=chunk.device), tokens.last(chunk)
    is_path = rows != tokens.last(tokens.chunk)
    path, ending = gather(log_p, rows, tokens.ids), gather(log_p, last, ends)
    sums = tokens.sums(path.where(is_path, 0))

    def gradients(grad: Tensor) -> list[TokenGradients]:
        chunk_grad = torch.zeros_like(sums).index_add(0, chunk, grad)
        path_grad = chunk_grad[tokens.chunk] * is_path
        return [(rows, tokens.ids, path, path_grad), (last, ends, ending, grad)]

    return ending + sums[chunk], gradients


def _divergence(log_p: Tensor, log_t: Tensor, config: CSDConfig) -> tuple[Tensor, Tensor]:
    """Return each event's term of D(t ‖ p), and its derivative with respect to log p.

    The derivative omits multiples of p, which do not change the gradient of the logits.
    """
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
