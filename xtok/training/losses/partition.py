"""Partition KL: both models' probabilities of the byte strings that a chunk may go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok.tokenizers import Tokenizer
from xtok.training.losses.chunks import EPSILON, FLOOR, Chunks, divergence, loss_over_chunks
from xtok.training.losses.config import PartitionConfig
from xtok.training.losses.p_kl import largest_columns
from xtok.training.module import work_dtype
from xtok.training.subtokens import Subtokens, subtokens

_Alternatives = dict[tuple[int, ...], tuple[list[int], list[int]]]


class ByteEvents:
    """Which tokens of a student and a teacher spell the same bytes, given the tokens before them.

    It holds no tensors, and can be pickled.

    Args:
        student: a tokenizer, or its tokens spelled in the teacher's (`training.subtokens`).
        teacher: a tokenizer, or its tokens spelled in the student's.

    Attributes:
        widths: `(V_student, V_teacher)`.
        common: int64 `[2, P]`, the student's and the teacher's ids of tokens that both have,
            rising by student id; a teacher id belongs to the lowest student id that it spells.
        teacher_of: the same pairs, from the student's id to the teacher's.
        forward: teacher ids to (student ids, teacher ids): student tokens that the teacher spells
            as these ids and one more, and that one.
        reverse: student ids to (student ids, teacher ids): teacher tokens that the student spells
            as these ids and one more; the one, and the teacher tokens.
    """

    def __init__(self, student: Tokenizer | Subtokens, teacher: Tokenizer | Subtokens) -> None:
        if isinstance(student, Tokenizer) and isinstance(teacher, Tokenizer):
            ours, theirs = subtokens(student, teacher), subtokens(teacher, student)
        elif isinstance(student, Subtokens) and isinstance(teacher, Subtokens):
            ours, theirs = student, teacher
        else:
            raise ValueError("give two tokenizers, or two tables of subtokens")
        self.widths = (len(ours.lengths), len(theirs.lengths))
        rows = np.flatnonzero(ours.lengths == 1)
        columns, first = np.unique(ours.subtoks[rows, 0], return_index=True)
        order = np.argsort(rows[first])
        self.common: NDArray[np.int64] = np.stack([rows[first], columns])[:, order]
        self.teacher_of: dict[int, int] = dict(zip(*self.common.tolist(), strict=True))
        self.forward = _by_prefix(ours)
        self.reverse = {prefix: (last, ids) for prefix, (ids, last) in _by_prefix(theirs).items()}


def _by_prefix(spelled: Subtokens) -> _Alternatives:
    """Group tokens by all but the last of their pieces; of those with equal pieces, the first."""
    groups: _Alternatives = {}
    for token_id in np.flatnonzero(spelled.lengths > 1).tolist():
        *prefix, last = spelled.subtoks[token_id, : spelled.lengths[token_id]].tolist()
        ids, lasts = groups.setdefault(tuple(prefix), ([], []))
        if last not in lasts:
            ids.append(token_id)
            lasts.append(last)
    return groups


def partition_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    events: ByteEvents,
    student_labels: Tensor,
    teacher_labels: Tensor,
    alignment: Any,
    config: PartitionConfig | None = None,
    *,
    sample_mask: Tensor | None = None,
) -> Tensor:
    """Return the KL between both models' distributions over byte strings that both can tell apart.

    For each chunk, disjoint events E and a rest that is everything else:

    - one token on each side, which both have: each token that both have is an event;
    - one student token, n teacher tokens t_1 … t_n: each student token that the teacher spells as
      t_1 … t_{n−1} and one more token; its teacher probability is that of the whole chain;
    - m student tokens and one teacher token: the same, the other way round;
    - else: the chunk's own bytes are the only event, as in ALM.

        loss = τ² · mean over chunks of Σ_{e∈E∪{rest}} r_e (log r_e − log s_e)
        log s_e = Σ of the log-softmax at temperature τ along e's student tokens; rest = 1 − Σ

    Sources: approximate likelihood matching (Minixhofer et al., arXiv 2503.20083) for
    comparing the likelihoods of whole chunks, with a rest; the options documented at NeMo-RL's
    `prefix_bidir_partition_kl_v3` for the alternatives by their prefix in subtoken tables. What
    these leave open is settled here: tokens that a tokenizer would not spell so are no events, the
    chunk's own bytes always are one, and a chunk's one-to-one tokens have a rest too. Its term at
    a chunk's first position and its other divergences (JSD, BCE) are not built.

    Labels are int64 `[B, T]`, the id that each position predicts. The other arguments, the result
    and the errors are those of `p_kl`.
    """
    config = config or PartitionConfig()

    def compare(chunks: Chunks) -> Tensor:
        student = _chunk_ends(student_logits, student_labels, chunks.student, chunks.total, config)
        teacher = _chunk_ends(
            teacher_logits.detach(), teacher_labels, chunks.teacher, chunks.total, config
        )
        picked = _pick(events, student.labels, teacher.labels)
        loss = _divergence_of_events(student, teacher, picked, config)
        if picked.one_to_one:
            loss = loss + _divergence_of_common(student, teacher, events, picked, config)
        return loss * (config.temperature**2 / chunks.total)

    return loss_over_chunks(
        compare, student_logits, teacher_logits, alignment, config, sample_mask, events.widths
    )


class _ChunkEnds(NamedTuple):
    """One side's chunks, by their last tokens.

    Attributes:
        labels: the token ids of each of the N chunks.
        prefix: `[N]`, the log-probability of all tokens but the last.
        last: `[N, V]`, the logits that predict the last token, divided by the temperature.
        normalizer: `[N]`, their log-sum-exp.
    """

    labels: list[list[int]]
    prefix: Tensor
    last: Tensor
    normalizer: Tensor

    def log_probability(self, chunk: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probability of chunks' last tokens; −∞ counts as `FLOOR`."""
        log_probs = self.last[chunk, ids] - self.normalizer[chunk]
        return log_probs.masked_fill(torch.isneginf(log_probs), FLOOR)


def _chunk_ends(
    logits: Tensor, labels: Tensor, chunk: Tensor, count: int, config: PartitionConfig
) -> _ChunkEnds:
    if labels.shape != chunk.shape:
        raise ValueError(f"labels {list(labels.shape)} do not fit logits {list(logits.shape)}")
    inside = (chunk.flatten() < count).nonzero().flatten()
    number, wanted = chunk.flatten()[inside], labels.flatten()[inside]
    if bool(((wanted < 0) | (wanted >= logits.shape[-1])).any()):
        raise ValueError("a position in a chunk has no label")
    is_last = torch.ones_like(number, dtype=torch.bool)
    is_last[:-1] = number[1:] != number[:-1]
    rows = logits.flatten(0, 1)
    early, dtype = ~is_last, work_dtype(logits)
    before = rows[inside[early]].to(dtype) / config.temperature
    own = before.gather(1, wanted[early][:, None])[:, 0] - before.logsumexp(1)
    own = own.masked_fill(torch.isneginf(own), FLOOR)
    prefix = torch.zeros(count, dtype=dtype, device=logits.device)
    last = rows[inside[is_last]].to(dtype) / config.temperature
    sizes = torch.bincount(number, minlength=count).tolist()
    ids = [part.tolist() for part in wanted.cpu().split(sizes)]
    return _ChunkEnds(ids, prefix.index_add(0, number[early], own), last, last.logsumexp(1))


class _Picked(NamedTuple):
    """The events: those of chunk `chunk[i]` end in `student[i]`, `teacher[i]`."""

    chunk: list[int]
    student: list[int]
    teacher: list[int]
    one_to_one: list[int]


def _pick(
    events: ByteEvents, student: Sequence[list[int]], teacher: Sequence[list[int]]
) -> _Picked:
    picked = _Picked([], [], [], [])
    for chunk, (ours, theirs) in enumerate(zip(student, teacher, strict=True)):
        alternatives: tuple[list[int], list[int]] = ([], [])
        if len(ours) == len(theirs) == 1:
            if events.teacher_of.get(ours[0]) == theirs[0]:
                picked.one_to_one.append(chunk)
                continue
        elif len(ours) == 1:
            alternatives = events.forward.get(tuple(theirs[:-1]), alternatives)
        elif len(theirs) == 1:
            alternatives = events.reverse.get(tuple(ours[:-1]), alternatives)
        own = (ours[-1], theirs[-1])
        others = [
            pair
            for pair in zip(*alternatives, strict=True)
            if pair[0] != own[0] and pair[1] != own[1]
        ]
        for s, t in (own, *others):
            picked.chunk.append(chunk)
            picked.student.append(s)
            picked.teacher.append(t)
    return picked


def _divergence_of_events(
    student: _ChunkEnds, teacher: _ChunkEnds, picked: _Picked, config: PartitionConfig
) -> Tensor:
    """Return the sum over chunks of the KL over their listed events and the rest."""
    device = student.last.device
    chunk = torch.tensor(picked.chunk, dtype=torch.int64, device=device)
    sides = []
    for side, last in ((student, picked.student), (teacher, picked.teacher)):
        ids = torch.tensor(last, dtype=torch.int64, device=device)
        log_probs = side.prefix[chunk] + side.log_probability(chunk, ids)
        mass = torch.zeros_like(side.prefix).index_add(0, chunk, log_probs.exp())
        listed = torch.zeros_like(side.prefix, dtype=torch.bool).index_fill(0, chunk, True)
        sides.append(torch.cat([log_probs, _log_rest(mass[listed])]))
    return divergence(sides[0], sides[1], reverse=config.reverse_kl)


def _divergence_of_common(
    student: _ChunkEnds,
    teacher: _ChunkEnds,
    events: ByteEvents,
    picked: _Picked,
    config: PartitionConfig,
) -> Tensor:
    """Return the sum over the chunks whose events are the tokens that both sides have."""
    device = student.last.device
    chunk = torch.tensor(picked.one_to_one, dtype=torch.int64, device=device)
    common = torch.from_numpy(events.common).to(device)
    kept = largest_columns(teacher.last[chunk][:, common[1]][None], config.max_events)
    sides = []
    for side, ids in ((student, common[0, kept]), (teacher, common[1, kept])):
        log_probs = side.log_probability(chunk[:, None], ids)
        sides.append(torch.cat([log_probs, _log_rest(log_probs.exp().sum(1))[:, None]], 1))
    return divergence(sides[0], sides[1], reverse=config.reverse_kl)


def _log_rest(mass: Tensor) -> Tensor:
    return (1 - mass).clamp(min=EPSILON).log()
