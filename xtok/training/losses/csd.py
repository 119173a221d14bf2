"""CSD: compares both models, chunk by chunk, on completions with the same text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log, log1p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.training.losses.chunk_tokens import ChunkTokens, Targets, both_tokens, check_targets
from xtok.training.losses.chunks import Chunks, require_type
from xtok.training.losses.config import CSDConfig
from xtok.training.losses.in_chunks import (
    BlockTokens,
    Chunked,
    ChunkedLogits,
    TokenGradients,
    chunk_loss,
    chunk_part,
    picked,
    to_logits,
)
from xtok.training.losses.logits import AnyLogits, Logits, log_probabilities
from xtok.training.losses.one_pass import LogitBlock, Part, Plan, Read, Rows
from xtok.training.losses.spelling_index import Events, SpellingIndex

LEAST = 1e-12
"""Lower bound of the rest's probability, as in NeMo-RL."""


def csd(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    index: SpellingIndex,
    targets: Targets,
    alignment: Any,
    config: CSDConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the Common-Support Distillation loss (arXiv 2610.28895) of NeMo-RL's draft.

    A chunk consists of student tokens s_1 … s_M and teacher tokens t_1 … t_N with equal bytes. Its
    events replace the last token of each side by one of K completions with the same text, u_k and
    v_k. At temperature τ

        q_S(k) = [∏_{r<M} p_S(s_r)] · p_S(u_k)      P_S = (q_S(1) … q_S(K), 1 − Σ q_S(k))

    P_T is the teacher's. The last event, the rest, is at least 1e-12. Completions are

    - M = N = 1: all shared tokens;
    - M = 1: the student tokens with the spelling t_1 … t_{N−1}, v; N = 1: the mirror image;
    - M, N > 1: only the text's own tokens.

        loss = τ² · (Σ_{1:1} D(P_T ‖ P_S) + β Σ_{others} D(P_T ‖ P_S)) / number of chunks

    D is KL(P_T ‖ P_S), the reverse KL, or with `jsd_beta` b the generalized JSD b KL(P_T ‖ m) +
    (1 − b) KL(P_S ‖ m), m = (1 − b) P_S + b P_T. `alpha` α adds βα times a comparison of shared
    tokens at the first position of chunks that are not 1:1; there, the chunk's first tokens and
    completions belong to the rest.

    As in NeMo-RL, 1:N and N:1 chunks with fewer than two completions do not count. The rest of 1:1
    chunks is a sum, which is more accurate than NeMo-RL's 1 − Σ q.

    `index` is `spelling_index(spellings)`, on the logits' device. `targets` are the predicted ids,
    int64 `[B, T_s]` and `[B, T_t]`. See `event_kl` for the other arguments, result and errors.

    Raises:
        ValueError: also if a target in a chunk is not an id.
    """
    plan, both = partial(plan_csd, index=index, targets=targets), (student_logits, teacher_logits)
    return chunk_loss(plan, both, alignment, config or CSDConfig(), sample_mask)


def plan_csd(
    both: ChunkedLogits, index: SpellingIndex, config: CSDConfig, targets: Targets
) -> Plan:
    """Plan `csd` for one pass."""
    require_type(index, SpellingIndex, "spelling_index(spellings)")
    ours, theirs = tokens = both.tokens(index.widths, targets)
    if not both.chunks.total:
        return Plan((), 0, both.dtype)
    events = index.events(ours, theirs)
    step = _CSDStep(both.teacher, index, config, both.dtype, ours, theirs, events)
    parts = [step.shared_part(events.singles), step.completed_part()]
    if weight := config.alpha * config.beta:
        parts.append(step.shared_part(events.others, step.excluded(), weight))
    plan = both.plan(
        parts, tokens, index.widths,
        temperature=config.temperature, explain=partial(check_targets, tokens, index.widths),
    )  # fmt: skip
    return plan._replace(num_terms=events.num_chunks)


def count_completed(index: SpellingIndex, targets: Targets, chunks: Chunks) -> int:
    """Return the number of chunks that `csd` averages over."""
    if not chunks.total:
        return 0
    return index.events(*both_tokens(chunks, targets, index.widths)).num_chunks


class _CSDStep(NamedTuple):
    teacher: Logits
    spellings: SpellingIndex
    config: CSDConfig
    dtype: torch.dtype
    ours: ChunkTokens
    theirs: ChunkTokens
    events: Events

    def shared_part(
        self, chunks: Tensor, excluded: tuple[Tensor, Tensor] | None = None, weight: float = 1.0
    ) -> Part:
        """Compare the shared tokens at the start of some chunks, without the `excluded` tokens."""

        def compare(block: LogitBlock, rows: Rows) -> tuple[Tensor, Tensor]:
            cells = None
            if excluded is not None:
                [entries] = rows.entries
                row, is_there = rows.entries_at(excluded[0], entries)
                cells = row, excluded[1][entries], is_there
            lost, back = self._compare_shared(block, rows.teacher_logits, cells)
            return lost * weight, back if weight == 1 else back.mul_(weight)

        ours = self.ours.at(self.ours.starts[chunks])
        read = Read(self.teacher, self.theirs.at(self.theirs.starts[chunks]))
        places = [] if excluded is None else excluded[:1]
        return Part(ours, compare, read, self.teacher.shape[2], places)

    def excluded(self) -> tuple[Tensor, Tensor]:
        """Return sorted cells of the rest: places among the other chunks, student tokens."""
        index, chunks = self.spellings, self.events.others
        numbers = torch.arange(len(chunks), device=chunks.device)
        ours, theirs = (tokens.ids[tokens.starts[chunks]] for tokens in (self.ours, self.theirs))
        tokens = torch.cat([ours, index.teacher_partner[theirs], self.events.student])
        number = torch.cat([numbers, numbers, self.events.place])
        is_shared = (tokens >= 0) & (index.student_partner[tokens] >= 0)
        width = index.widths[0]
        cells = torch.where(is_shared, number * width + tokens, len(chunks) * width).sort().values
        is_twice = torch.zeros_like(cells, dtype=torch.bool)
        is_twice[1:] = cells[1:] == cells[:-1]
        cells = cells.masked_fill(is_twice, len(chunks) * width).sort().values
        return cells // width, cells % width

    def _compare_shared(
        self, block: LogitBlock, teacher_logits: Tensor, excluded: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses' sum and its gradient; `excluded` cells belong to the rest."""
        index, temperature = self.spellings, self.config.temperature
        ours, theirs = index.student_rest, index.teacher_rest
        log_p = block.log_probabilities(index.widths[0], temperature)
        log_q = log_probabilities(teacher_logits[:, : index.widths[1]], temperature)
        log_t = log_q.index_select(1, index.student_partner.clamp(min=0))
        p, (value, slope) = (
            block.probabilities(index.widths[0], temperature),
            _divergence(log_p, log_t, self.config),
        )
        parts = {id(part): part for part in (value, slope)}.values()
        for part in parts:
            part.index_fill_(1, ours, 0)
        p_others = p.index_select(1, ours)
        p_rest, q_rest = p_others.sum(1), log_q.index_select(1, theirs).exp_().sum(1)
        if excluded is not None:
            row, token, is_there = excluded
            for part in parts:
                part.index_put_((row, token), -part[row, token] * is_there, accumulate=True)
            p_rest.index_add_(0, row, p[row, token] * is_there)
            q_rest.index_add_(0, row, log_t[row, token].exp() * is_there)
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
            of_cells = p[row, token] * ratio[row, 0] * is_there
            back.index_put_((row, token), of_cells, accumulate=True)
        return lost, back

    def completed_part(self) -> Part:
        """Compare the G chunks that are not 1:1."""
        events, config, widths = self.events, self.config, self.spellings.widths
        ours, theirs = (
            tokens.only(events.others, size)
            for tokens, size in zip((self.ours, self.theirs), events.sizes, strict=True)
        )
        is_one = (ours.sizes == 1) & (theirs.sizes == 1)
        weights = torch.where(is_one, 1.0, config.beta).to(self.dtype)

        def compare(block: LogitBlock, inside: Chunked) -> tuple[Tensor, Tensor]:
            log_q = log_probabilities(inside.teacher_logits[:, : widths[1]], config.temperature)
            [which] = inside.others
            place = events.place[which] - inside.chunks.start
            student, of_tokens = _completed(
                block.log_probabilities(widths[0], config.temperature), inside.ours, place,
                events.student[which],
            )  # fmt: skip
            teacher, _ = _completed(log_q, inside.theirs, place, events.teacher[which])
            with torch.enable_grad():
                log_p = student.requires_grad_()
                rests = [
                    (1 - side.new_zeros(inside.num_chunks).index_add(0, place, side.exp()))
                    .clamp(min=LEAST).log()
                    for side in (log_p, teacher)
                ]  # fmt: skip
                of_rest, _ = _divergence(rests[0], rests[1], config)
                of_each, _ = _divergence(log_p, teacher, config)
                lost = of_rest.index_add(0, place, of_each).dot(weights[inside.chunks])
                (to_each,) = torch.autograd.grad(lost, log_p)
            p = block.probabilities(widths[0], config.temperature)
            return lost.detach(), to_logits(p, of_tokens(to_each))

        return chunk_part(ours, theirs, compare, self.teacher, widths[1], [events.place])


def _completed(
    log_p: Tensor, inside: BlockTokens, place: Tensor, ends: Tensor
) -> tuple[Tensor, Callable[[Tensor], list[TokenGradients]]]:
    """Return the log-probabilities of e completions, and a function for their gradients."""
    rows, sizes = torch.arange(len(inside.ids), device=place.device), inside.sizes
    last = sizes.cumsum(0) - 1
    is_path = rows != last[inside.chunk]
    path, at = picked(log_p, rows, inside.ids), last[place]
    of_ends = picked(log_p, at, ends)
    sums = path.new_zeros(len(sizes)).index_add(0, inside.chunk, path.where(is_path, 0))

    def of_tokens(to_each: Tensor) -> list[TokenGradients]:
        to_chunk = to_each.new_zeros(len(sizes)).index_add(0, place, to_each)
        to_path = to_chunk[inside.chunk] * is_path
        return [(rows, inside.ids, path, to_path), (at, ends, of_ends, to_each)]

    return of_ends + sums[place], of_tokens


def _divergence(log_p: Tensor, log_t: Tensor, config: CSDConfig) -> tuple[Tensor, Tensor]:
    """Return each event's term of D(t ‖ p), and p times its derivative, up to a constant."""
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
