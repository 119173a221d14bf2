"""Reference implementations of the losses: dense, a loop over chunks, autograd, float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-10


def value_and_gradient(loss: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a loss, and its gradient for the student's logits."""
    student.grad = None
    loss.backward()
    assert student.grad is not None
    return loss.detach(), student.grad


def check_gradient(loss: Callable[[Tensor], Tensor], student: Tensor, step: float = 1e-4) -> None:
    """Compare a loss's gradient with differences along three directions.

    `torch.autograd.gradcheck` would run `backward` twice.
    """
    _, gradient = value_and_gradient(loss(student), student)
    assert bool(gradient.any())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(3):
            way = torch.randn(student.shape, generator=generator, dtype=student.dtype)
            rise = (loss(student + step * way) - loss(student - step * way)) / (2 * step)
            torch.testing.assert_close((gradient * way).sum(), rise, rtol=1e-5, atol=1e-7)


def members(chunk_id: Tensor, row: int, chunk: int) -> list[int]:
    return [i for i, c in enumerate(chunk_id[row].tolist()) if c == chunk]


def divergence(log_s: Tensor, log_r: Tensor, *, reverse: bool) -> Tensor:
    if reverse:
        log_s, log_r = log_r, log_s
    return (log_r.exp() * (log_r - log_s)).sum()


def mean_over_chunks(chunk_losses: list[Tensor], temperature: float) -> Tensor:
    return torch.stack(chunk_losses).mean() * temperature**2


def p_kl(
    student: Tensor,
    teacher: Tensor,
    matrix: Tensor,
    ids: tuple[Tensor, Tensor],
    valid: Tensor,
    *,
    top_k: int | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
) -> Tensor:
    student, teacher = student[..., : matrix.shape[0]], teacher[..., : matrix.shape[1]]
    columns = teacher.amax((0, 1)).topk(top_k or matrix.shape[1]).indices
    losses = []
    for row, chunk in valid.nonzero().tolist():
        student_positions, teacher_positions = (members(side, row, chunk) for side in ids)
        if not student_positions or not teacher_positions:
            continue
        projected = torch.softmax(student[row, student_positions] / temperature, -1) @ matrix
        mean = projected[:, columns].sum(0) / (len(student_positions) + EPSILON)
        share = mean / (mean.sum() + EPSILON)
        within = torch.log_softmax(teacher[row, teacher_positions][:, columns] / temperature, -1)
        target = within.sum(0) / (len(teacher_positions) + EPSILON)
        losses.append(divergence((share + EPSILON).log(), target, reverse=reverse))
    return mean_over_chunks(losses, temperature)


def gold(
    student: Tensor,
    teacher: Tensor,
    pairs: list[tuple[int, int]],
    ids: tuple[Tensor, Tensor],
    valid: Tensor,
    *,
    uncommon_topk: int = 8192,
    temperature: float = 1.0,
    reverse: bool = False,
) -> Tensor:
    losses = []
    for row, chunk in valid.nonzero().tolist():
        student_positions, teacher_positions = (members(side, row, chunk) for side in ids)
        if not student_positions or not teacher_positions:
            continue
        log_s = torch.log_softmax(student[row, student_positions] / temperature, -1).mean(0)
        log_r = torch.log_softmax(teacher[row, teacher_positions] / temperature, -1).mean(0)
        common_s, common_t = [s for s, _ in pairs], [t for _, t in pairs]
        loss = divergence(log_s[common_s], log_r[common_t], reverse=reverse)
        rest_s = [i for i in range(len(log_s)) if i not in common_s]
        rest_t = [i for i in range(len(log_r)) if i not in common_t]
        length = min(len(rest_s), len(rest_t), uncommon_topk)
        falling = [
            side.exp().sort(descending=True).values[:length]
            for side in (log_s[rest_s], log_r[rest_t])
        ]
        losses.append(loss + (falling[0] - falling[1]).abs().sum())
    return mean_over_chunks(losses, temperature)


def chunks_from_their_start(
    ids: tuple[Tensor, Tensor], valid: Tensor
) -> list[tuple[int, list[int], list[int]]]:
    """Return the row and both sides' positions of each chunk with a predicted first token."""
    chunks = []
    for row, chunk in valid.nonzero().tolist():
        student, teacher = (members(side, row, chunk) for side in ids)
        if student and teacher and (chunk or (student[0] > 0 and teacher[0] > 0)):
            chunks.append((row, student, teacher))
    return chunks


def path(logits: Tensor, targets: Tensor, row: int, positions: list[int], t: float = 1) -> Tensor:
    """Return the log-probabilities of some tokens of a text, from logits at temperature t."""
    total = logits.new_zeros((), dtype=torch.float64)
    for i in positions:
        total = total + torch.log_softmax(logits[row, i].double() / t, -1)[targets[row, i]]
    return total


def alm(
    student: Tensor,
    teacher: Tensor,
    targets: tuple[Tensor, Tensor],
    ids: tuple[Tensor, Tensor],
    valid: Tensor,
    *,
    temperature: float = 1.0,
    reverse: bool = False,
) -> Tensor:
    losses = []
    for row, student_positions, teacher_positions in chunks_from_their_start(ids, valid):
        x, y = (
            (path(logits, side_targets, row, positions) / temperature - 1e-6).exp()
            for logits, side_targets, positions in zip(
                (student, teacher), targets, (student_positions, teacher_positions), strict=True
            )
        )
        if reverse:
            x, y = y, x
        losses.append(y * (y / x).log() + (1 - y) * ((1 - y) / (1 - x)).log())
    return torch.stack(losses).mean() * temperature


Spelled = list[list[int]]
"""The spelling of each token; empty for tokens without a spelling."""


def completions(spellings: Spelled, prefix: list[int]) -> list[tuple[int, int]]:
    """Return the tokens with the bytes of a prefix and a piece, and these pieces."""
    tokens_by_piece: dict[int, int] = {}
    for token, pieces in enumerate(spellings):
        if len(pieces) == len(prefix) + 1 and pieces[:-1] == prefix:
            tokens_by_piece.setdefault(pieces[-1], token)
    return [(token, piece) for piece, token in tokens_by_piece.items()]


def with_rest(events: Tensor) -> Tensor:
    return torch.cat([events, (1 - events.sum()).clamp(min=1e-12)[None]])


def between(p: Tensor, t: Tensor, *, reverse: bool, jsd_beta: float | None) -> Tensor:
    """Return D(t ‖ p), D(p ‖ t) or the generalized Jensen-Shannon divergence."""
    if jsd_beta is None:
        a, b = (p, t) if reverse else (t, p)
        return (a * (a / b).log()).sum()
    m = (1 - jsd_beta) * p + jsd_beta * t
    towards = jsd_beta * t * (t / m).log() + (1 - jsd_beta) * p * (p / m).log()
    return towards.sum()


def csd(
    student: Tensor,
    teacher: Tensor,
    spelled: tuple[Spelled, Spelled],
    targets: tuple[Tensor, Tensor],
    ids: tuple[Tensor, Tensor],
    valid: Tensor,
    *,
    temperature: float = 1.0,
    reverse: bool = False,
    jsd_beta: float | None = None,
    beta: float = 1.0,
    alpha: float = 0.0,
) -> Tensor:
    student, teacher = (
        x[..., : len(of)] for x, of in zip((student, teacher), spelled, strict=True)
    )
    shared = completions(spelled[0], [])
    losses = []

    def compare(u: list[int], v: list[int], indices: tuple[int, int, int], paths: Any) -> Tensor:
        row, i, j = indices
        p, t = (
            with_rest(
                path.exp() * torch.softmax(logits[row, at].double() / temperature, -1)[events]
            )
            for path, logits, at, events in zip(
                paths, (student, teacher), (i, j), (u, v), strict=True
            )
        )
        return between(p, t, reverse=reverse, jsd_beta=jsd_beta)

    nothing = torch.zeros((), dtype=torch.float64)
    for row, student_positions, teacher_positions in chunks_from_their_start(ids, valid):
        own, other = (
            [int(of[row, i]) for i in side]
            for of, side in zip(targets, (student_positions, teacher_positions), strict=True)
        )
        last, first = (
            (row, student_positions[-1], teacher_positions[-1]),
            (row, student_positions[0], teacher_positions[0]),
        )
        if len(own) == len(other) == 1:
            losses.append(compare(*split(shared), last, (nothing, nothing)))
            continue
        events = [(own[-1], other[-1])]
        if len(own) == 1:
            events = completions(spelled[0], other[:-1])
        elif len(other) == 1:
            events = [(piece, token) for token, piece in completions(spelled[1], own[:-1])]
        if len(events) < 2 and 1 in (len(own), len(other)):
            continue
        paths = [
            path(logits, of, row, side[:-1], temperature)
            for logits, of, side in zip(
                (student, teacher), targets, (student_positions, teacher_positions), strict=True
            )
        ]
        loss = compare(*split(events), last, paths)
        if alpha:
            taken = [u for u, _ in events]
            left = [(u, v) for u, v in shared if u != own[0] and v != other[0] and u not in taken]
            loss = loss + alpha * compare(*split(left), first, (nothing, nothing))
        losses.append(beta * loss)
    return mean_over_chunks(losses, temperature)


def split(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [u for u, _ in pairs], [v for _, v in pairs]
