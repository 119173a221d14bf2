"""The partition KL: which byte strings are its events, and what it makes of them."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest
import torch
from test_losses import alignment
from torch import Tensor

from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.training.losses import ByteEvents, PartitionConfig, partition_kl
from xtok.training.subtokens import Subtokens, subtokens

# The student has a b ab abc abd; the teacher a b c d ab bb.
STUDENT = ["a", "b", "ab", "abc", "abd"]
TEACHER = ["a", "b", "c", "d", "ab", "bb"]


def table(rows: list[list[int]]) -> Subtokens:
    lengths = np.array([len(row) for row in rows])
    padded = [row + [-1] * (max(lengths) - len(row)) for row in rows]
    return Subtokens(np.array(padded), lengths)


OURS = table([[0], [1], [4], [4, 2], [4, 3]])
THEIRS = table([[0], [1], [], [], [2], [1, 1]])
EVENTS = ByteEvents(OURS, THEIRS)


def test_events_of_tables() -> None:
    assert EVENTS.widths == (5, 6)
    assert EVENTS.common.tolist() == [[0, 1, 2], [0, 1, 4]]
    assert EVENTS.forward == {(4,): ([3, 4], [2, 3])}
    assert EVENTS.reverse == {(1,): ([1], [5])}
    twice = ByteEvents(table([[1], [0], [1]]), table([[1], [0]]))
    assert twice.common.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="two tokenizers, or two tables"):
        ByteEvents(OURS, "gpt2")  # type: ignore[arg-type]


def loss_of(
    student: list[list[float]],
    teacher: list[list[float]],
    ours: list[int],
    theirs: list[int],
    chunks: tuple[list[int], list[int]],
    **options: Any,
) -> float:
    logs = [torch.tensor([rows], dtype=torch.float64).log() for rows in (student, teacher)]
    loss = partition_kl(
        logs[0],
        logs[1],
        EVENTS,
        torch.tensor([ours]),
        torch.tensor([theirs]),
        alignment([chunks[0]], [chunks[1]]),
        PartitionConfig(**options),
    )
    return float(loss)


def kl(r: list[float], s: list[float]) -> float:
    return sum(x * log(x / y) for x, y in zip(r, s, strict=True))


def test_one_token_on_each_side() -> None:
    # Events: the tokens that both have, a, b and ab, and the rest.
    found = loss_of(
        [[0.4, 0.3, 0.1, 0.1, 0.1]], [[0.2, 0.1, 0.3, 0.1, 0.2, 0.1]], [0], [0], ([0], [0])
    )
    assert found == pytest.approx(kl([0.2, 0.1, 0.2, 0.5], [0.4, 0.3, 0.1, 0.2]))


def test_only_the_likeliest_events_are_told_apart() -> None:
    rows = [[0.4, 0.3, 0.1, 0.1, 0.1]], [[0.2, 0.1, 0.3, 0.1, 0.25, 0.05]]
    found = loss_of(*rows, [0], [0], ([0], [0]), max_events=2)
    assert found == pytest.approx(kl([0.2, 0.25, 0.55], [0.4, 0.1, 0.5]))


def test_one_student_token_and_several_teacher_tokens() -> None:
    # The text is abc: the events abc and abd, each as ab and one more token of the teacher's.
    student = [[0.1, 0.2, 0.1, 0.4, 0.2]]
    teacher = [[0.1, 0.1, 0.1, 0.1, 0.5, 0.1], [0.1, 0.1, 0.6, 0.1, 0.05, 0.05]]
    found = loss_of(student, teacher, [3], [4, 2], ([0], [0, 0]))
    assert found == pytest.approx(kl([0.3, 0.05, 0.65], [0.4, 0.2, 0.4]))
    reverse = loss_of(student, teacher, [3], [4, 2], ([0], [0, 0]), reverse_kl=True)
    assert reverse == pytest.approx(kl([0.4, 0.2, 0.4], [0.3, 0.05, 0.65]))


def test_several_student_tokens_and_one_teacher_token() -> None:
    student = [[0.1, 0.5, 0.2, 0.1, 0.1], [0.2, 0.4, 0.2, 0.1, 0.1]]
    teacher = [[0.1, 0.1, 0.1, 0.1, 0.1, 0.5]]
    found = loss_of(student, teacher, [1, 1], [5], ([0, 0], [0]))
    assert found == pytest.approx(kl([0.5, 0.5], [0.2, 0.8]))


def test_several_tokens_on_both_sides_are_their_own_only_event() -> None:
    student = [[0.1, 0.5, 0.2, 0.1, 0.1], [0.2, 0.4, 0.2, 0.1, 0.1]]
    teacher = [[0.5, 0.1, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1, 0.1, 0.5]]
    found = loss_of(student, teacher, [1, 2], [0, 5], ([0, 0], [0, 0]))
    assert found == pytest.approx(kl([0.25, 0.75], [0.1, 0.9]))


def test_a_mean_over_chunks_at_a_temperature() -> None:
    student = [[0.4, 0.3, 0.1, 0.1, 0.1], [0.1, 0.2, 0.1, 0.4, 0.2]]
    teacher = [
        [0.2, 0.1, 0.3, 0.1, 0.2, 0.1],
        [0.1, 0.1, 0.1, 0.1, 0.5, 0.1],
        [0.1, 0.1, 0.6, 0.1, 0.05, 0.05],
    ]
    chunks = ([0, 1], [0, 1, 1])
    first = loss_of(student[:1], teacher[:1], [0], [0], ([0], [0]), temperature=2)
    second = loss_of(student[1:], teacher[1:], [3], [4, 2], ([0], [0, 0]), temperature=2)
    both = loss_of(student, teacher, [0, 3], [0, 4, 2], chunks, temperature=2)
    assert both == pytest.approx((first + second) / 2)
    assert first != pytest.approx(loss_of(student[:1], teacher[:1], [0], [0], ([0], [0])))


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(1, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(1, 5, 6, dtype=torch.float64, generator=generator)
    labels = torch.tensor([[0, 3, 1, 1]]), torch.tensor([[0, 4, 2, 5, 0]])
    aligned = alignment([[0, 1, 2, 2]], [[0, 1, 1, 2, -1]])

    def loss(student: Tensor) -> Tensor:
        return partition_kl(student, teacher, EVENTS, *labels, aligned)

    assert torch.autograd.gradcheck(loss, student)
    masked = student.detach().clone()
    masked[0, :, 4] = -torch.inf
    masked.requires_grad_()
    loss(masked).backward()
    assert masked.grad is not None
    assert bool(torch.isfinite(masked.grad).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32_under_autocast(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(1, 4, 5, generator=generator).to(dtype).requires_grad_()
    teacher = torch.randn(1, 5, 6, generator=generator).to(dtype)
    exact = student.detach().float().requires_grad_()
    labels = torch.tensor([[0, 3, 1, 1]]), torch.tensor([[0, 4, 2, 5, 0]])
    aligned = alignment([[0, 1, 2, 2]], [[0, 1, 1, 2, -1]])
    with torch.autocast("cpu", torch.bfloat16):
        loss = partition_kl(student, teacher, EVENTS, *labels, aligned)
        loss.backward()
    expected = partition_kl(exact, teacher.float(), EVENTS, *labels, aligned)
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), expected.detach())
    assert student.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(student.grad, exact.grad.to(dtype))


def test_bad_input() -> None:
    student, teacher = torch.zeros(1, 1, 5), torch.zeros(1, 1, 6)
    aligned = alignment([[0]], [[0]])
    one = torch.tensor([[0]])
    with pytest.raises(ValueError, match="a position in a chunk has no label"):
        partition_kl(student, teacher, EVENTS, torch.tensor([[-100]]), one, aligned)
    with pytest.raises(ValueError, match=r"labels \[1, 2\] do not fit"):
        partition_kl(student, teacher, EVENTS, torch.tensor([[0, 1]]), one, aligned)
    with pytest.raises(XtokError, match="the student's logits are 4 wide, the map's student 5"):
        partition_kl(student[..., :4], teacher, EVENTS, one, one, aligned)
    with pytest.raises(XtokError, match="the teacher's logits are 5 wide, the map's teacher 6"):
        partition_kl(student, teacher[..., :5], EVENTS, one, one, aligned)
    nothing = alignment([[-1]], [[-1]], np.zeros((1, 1), bool))
    broken = torch.full_like(student, torch.nan).requires_grad_()
    loss = partition_kl(broken, teacher, EVENTS, one, one, nothing)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert broken.grad is not None
    assert not broken.grad.any()


def test_events_of_tokenizers(byte_level: Tokenizer, digits: Tokenizer) -> None:
    events = ByteEvents(digits, byte_level)  # the student has 201 as one token
    *prefix, last = byte_level.segment(b"201")
    s, t = events.forward[tuple(prefix)]
    assert (digits.segment(b"201")[0], last) in list(zip(s, t, strict=True))
    for ours, theirs in zip(s, t, strict=True):
        assert byte_level.segment(digits.table[ours]) == [*prefix, theirs]
    tables = subtokens(digits, byte_level), subtokens(byte_level, digits)
    assert ByteEvents(*tables).forward == events.forward
