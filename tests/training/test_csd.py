"""`csd` equals a plain implementation and manual values; the index; invalid input."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

import naive_losses
import pytest
import torch
from csd_inputs import (
    BOTH,
    INDEX,
    OPTIONS,
    ROWS,
    STUDENT,
    TEACHER,
    V_S,
    V_T,
    Chunk,
    csd_batch,
    spelling_map,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_inputs import alignment
from make_tokenizers import byte_ranks
from naive_losses import Spelled, value_and_gradient
from torch import Tensor

import xtok
from xtok.alignment.aligner import ShiftedAlignment
from xtok.training.collator import prepare
from xtok.training.losses import CSDConfig, SpellingIndex, csd, spelling_index
from xtok.training.losses.chunks import Chunks, number_chunks
from xtok.training.losses.config import ChunkFilter
from xtok.training.losses.csd import count_completed


def starting(aligned: Any) -> Chunks:
    """Return the chunks for which both sides predict the first token."""
    return number_chunks(aligned, ChunkFilter(starts_only=True))


def naive(
    student: Tensor, teacher: Tensor, targets: Any, aligned: ShiftedAlignment[Tensor],
    both: Any = BOTH, **options: Any,
) -> Tensor:  # fmt: skip
    ids = torch.as_tensor(aligned.student_chunk_id), torch.as_tensor(aligned.teacher_chunk_id)
    valid = torch.as_tensor(aligned.pair_valid)
    if "reverse_kl" in options:
        options["reverse"] = options.pop("reverse_kl")
    return naive_losses.csd(student, teacher, both, targets, ids, valid, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_loss_matches_the_reference(options: dict[str, Any]) -> None:
    student, teacher, targets, aligned = csd_batch(ROWS, wider=2)
    loss = csd(student, teacher, INDEX, targets, aligned, CSDConfig(**options))
    plain = naive(student, teacher, targets, aligned, **options)
    ours, theirs = (value_and_gradient(3 * x, student) for x in (loss, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    # All chunks are counted except three with fewer than two completions of the prefix.
    assert count_completed(INDEX, targets, starting(aligned)) == 9


def test_values_by_hand() -> None:
    """A 1:2 chunk with the prefix 0: student tokens 4, 5 and 6, and teacher tokens 2, 1 and 3."""
    student = torch.full((1, 1, V_S), -torch.inf)
    student[0, 0, [4, 5, 6, 7]] = torch.tensor([2.0, 2.0, 4.0, 8.0]).log()
    teacher = torch.full((1, 2, V_T), -torch.inf)
    teacher[0, 0, [0, 3]] = 0.0  # 0 is the prefix; 3 is in the rest
    teacher[0, 1, [2, 1]] = torch.tensor([3.0, 1.0]).log()
    targets, aligned = (torch.tensor([[4]]), torch.tensor([[0, 2]])), alignment([[1]], [[1, 1]])
    value = float(csd(student, teacher, INDEX, targets, aligned))
    assert value == pytest.approx(3 / 8 * log(3) + 0 + 1 / 2 * log(1), abs=1e-6)


def test_shared_tokens_by_hand() -> None:
    """Half of each side's probability is on tokens that are not shared."""
    student = torch.tensor([[[1.0, 2.0, 1.0, 0.0, 4.0, 0, 0, 0, 0, 0]]]).log()
    teacher = torch.tensor([[[2.0, 1.0, 1.0, 2.0, 2.0, 0, 0, 0]]]).log()
    targets, aligned = (torch.tensor([[1]]), torch.tensor([[2]])), alignment([[1]], [[1]])
    value = float(csd(student, teacher, INDEX, targets, aligned))
    expected = log(2) / 4 + log(1 / 2) / 8 + log(1) / 8 + log(1) / 2
    assert value == pytest.approx(expected, abs=1e-6)


def test_tokens_with_equal_spellings_share_the_lowest_id() -> None:
    both = [[1], [1], [0, 1], [0, 1], [0, 0]], [[], [], [0, 1]]
    index = spelling_index(spelling_map(*both))
    assert index.student_partner.tolist() == [1, -1, -1, -1, -1]
    assert index.teacher_partner.tolist() == [-1, 0, -1]
    node = index.student_trie.nodes(torch.tensor([0]), torch.tensor([0]), torch.tensor([1]), 1)
    counts = index.student_trie.counts(node)
    number, tokens, pieces = index.student_trie.expand(node, counts, int(counts.sum()))
    assert (number.tolist(), tokens.tolist(), pieces.tolist()) == ([0, 0], [2, 4], [1, 0])


def test_a_map_without_completions() -> None:
    """With `bytes` on both sides, chunks with several tokens have no completions."""
    index = spelling_index(spelling_map([[0], [1]], [[0], [1]]))
    student, teacher, targets, aligned = csd_batch([[([0], [0]), ([1], [1, 0]), ([0, 0], [1, 1])]])
    loss = csd(student, teacher, index, targets, aligned)
    plain = naive(student, teacher, targets, aligned, ([[0], [1]], [[0], [1]]))
    torch.testing.assert_close(loss, plain)
    assert count_completed(index, targets, starting(aligned)) == 2


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Spelled, Spelled], list[list[Chunk]]]:
    """Draw random spellings, mostly 1:1 for shared tokens, and chunks that contain them often."""
    widths = draw(st.integers(2, 6)), draw(st.integers(2, 6))
    both = []
    for own, other in (widths, widths[::-1]):
        piece = st.integers(0, other - 1)
        several = st.lists(piece, min_size=2, max_size=4)
        both.append(draw(st.lists(st.just([]) | several, min_size=own, max_size=own)))
    for s, t in zip(draw(st.permutations(range(widths[0]))), range(widths[1]), strict=False):
        if draw(st.booleans()):
            both[0][s], both[1][t] = [t], [s]
    spelled = [
        *(([s], pieces) for s, pieces in enumerate(both[0]) if pieces),
        *((pieces, [t]) for t, pieces in enumerate(both[1]) if pieces),
    ]
    tokens = [st.lists(st.integers(0, width - 1), min_size=1, max_size=3) for width in widths]
    chunk = st.tuples(*tokens)
    chunks = st.lists(st.sampled_from(spelled) | chunk if spelled else chunk, max_size=6)
    return (both[0], both[1]), draw(st.lists(chunks, min_size=1, max_size=3))


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(OPTIONS), st.integers(0, 9))
def test_random_pairs_match_the_reference(case: Any, options: dict[str, Any], seed: int) -> None:
    both, rows = case
    student, teacher, targets, aligned = csd_batch(rows, seed)
    index = spelling_index(spelling_map(*both))
    loss = csd(student, teacher, index, targets, aligned, CSDConfig(**options))
    if not count_completed(index, targets, starting(aligned)):
        value, gradient = value_and_gradient(loss, student)
        assert float(value) == 0
        assert not gradient.any()
        return
    plain = naive(student, teacher, targets, aligned, both, **options)
    ours, theirs = (value_and_gradient(x, student) for x in (loss, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


ALPHABET = "aab é日12"


@st.composite
def merged(draw: st.DrawFn) -> list[bytes]:
    """Return tokens of several bytes, merged from two earlier tokens, also inside characters."""
    tokens = [bytes([b]) for b in sorted({*ALPHABET.encode()})]
    for _ in range(draw(st.integers(0, 10))):
        left, right = (draw(st.sampled_from(tokens)) for _ in range(2))
        if left + right not in tokens:
            tokens.append(left + right)
    return [token for token in tokens if len(token) > 1]


@settings(max_examples=60, deadline=None)
@given(
    merged(), merged(), st.lists(st.text(ALPHABET, min_size=2, max_size=12), min_size=1,
    max_size=3), st.sampled_from(OPTIONS), st.integers(0, 9),
)  # fmt: skip
def test_tokenizers_from_their_files_to_the_loss(
    tmp_path: Path, ours: Any, theirs: Any, texts: list[str], options: dict[str, Any], seed: int
) -> None:
    """For random BPE tokenizers, equal tokens, segments, and plain loops give the same loss."""
    pair = xtok.load_pair(
        byte_ranks(tmp_path / "s.tiktoken", *ours), byte_ranks(tmp_path / "t.tiktoken", *theirs)
    )
    spelling = xtok.spellings(pair)
    tables = [table.tokens() for table in pair.tables]
    both = tuple(
        [[others.index(t)] if t in others else other.segment(t) for t in tokens]
        for tokens, others, other in zip(
            tables, tables[::-1], pair.tokenizers[::-1], strict=True
        )
    )  # fmt: skip
    collated = prepare(xtok.DistillationCollator(*pair.tokenizers)(texts))
    [side] = collated["teachers"]
    targets = collated["targets"], side["targets"]
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        2 * torch.randn((*side_targets.shape, width), generator=generator, dtype=torch.float64)
        for side_targets, width in zip(targets, pair.shape, strict=True)
    )
    student.requires_grad_()
    loss = csd(
        student, teacher, spelling_index(spelling), targets, side["shifted"], CSDConfig(**options)
    )
    if not count_completed(spelling_index(spelling), targets, starting(side["shifted"])):
        assert float(loss.detach()) == 0
        return
    plain = naive(student, teacher, targets, side["shifted"], both, **options)
    actual, expected = (value_and_gradient(x, student) for x in (loss, plain))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)


def test_index_moves_to_a_device() -> None:
    moved: SpellingIndex = INDEX.to("cpu")
    assert moved.widths == (V_S, V_T)
    assert moved.student_trie.keys.tolist() == INDEX.student_trie.keys.tolist()


# The rules of CSD's authors for chunks of one and several tokens. A teacher with a top-k counts
# chunks with the text as their only completion; here K is the whole vocabulary.


@pytest.mark.parametrize(
    ("chunk", "num_completions"),
    [(([4], [0, 2]), 3), (([7], [1, 3, 3]), 2), (([2, 3], [4]), 2), (([0, 0], [3]), 1)],
)
def test_chunks_of_one_and_several_tokens(chunk: Chunk, num_completions: int) -> None:
    """One-to-many and many-to-one chunks equal the paper's formulas over the whole vocabulary."""
    student, teacher, targets, aligned = csd_batch([[chunk]], seed=6)
    loss = csd(student, teacher, INDEX, targets, aligned)
    own, other = chunk
    p, q = (x.detach().log_softmax(-1)[0] for x in (student, teacher))
    if len(own) == 1:
        pairs = [
            (u, pieces[-1])
            for u, pieces in enumerate(STUDENT)
            if pieces[:-1] == other[:-1] and pieces
        ]
    else:
        pairs = [
            (pieces[-1], v)
            for v, pieces in enumerate(TEACHER)
            if pieces[:-1] == own[:-1] and pieces
        ]
    assert len(pairs) == num_completions
    assert (own[-1], other[-1]) in pairs
    path_s = sum(float(p[position, token]) for position, token in enumerate(own[:-1]))
    path_t = sum(float(q[position, token]) for position, token in enumerate(other[:-1]))
    q_s = [path_s + float(p[len(own) - 1, u]) for u, _ in pairs]
    q_t = [path_t + float(q[len(other) - 1, v]) for _, v in pairs]
    rest_s, rest_t = (log(1 - sum(exp(x) for x in side)) for side in (q_s, q_t))
    expected = sum(exp(t) * (t - s) for s, t in zip([*q_s, rest_s], [*q_t, rest_t], strict=True))
    assert expected > 0
    # With whole logits, a chunk with a single completion does not count.
    counts = num_completions > 1
    assert count_completed(INDEX, targets, starting(aligned)) == counts
    assert float(loss.detach()) == pytest.approx(expected if counts else 0, rel=1e-9)
