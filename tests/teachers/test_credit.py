"""Prefix credit: division of a teacher token's log-probability among student tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_projecting import ids_and_bounds, map_of, small, top_k

import xtok
from xtok.alignment.aligner import TokenAligner
from xtok.teachers.logprobs import PrefixCredit, ProjectedLogprobs
from xtok.teachers.projector import Projector
from xtok.tokenizers import Tokenizer

LETTERS = [b"a", b"b"]
DIGITS = [b"0", b"1", b"2"]
Credit = Callable[..., ProjectedLogprobs]
words = st.lists(st.text("ab", min_size=2, max_size=4).map(str.encode), max_size=6, unique=True)


@pytest.fixture
def sides() -> tuple[Tokenizer, Tokenizer]:
    """A student that spells `201` as `2` and `01`, and a teacher with `201` and `20`."""
    return small([*DIGITS, b"01"]), small([*DIGITS, b"20", b"201"])


@pytest.fixture
def credit(sides: tuple[Tokenizer, Tokenizer]) -> Credit:
    return partial(xtok.project_logprobs, TokenAligner(xtok.load_pair(*sides)))


def padded(rows: Sequence[dict[int, float]]) -> tuple[Any, Any]:
    """Return candidates and their log-probabilities as matrices."""
    size = max(map(len, rows))
    ids = [[*row, *[-1] * (size - len(row))] for row in rows]
    return ids, [[*np.log([*row.values()]), *[-np.inf] * (size - len(row))] for row in rows]


def test_token_has_the_probability_of_its_bytes(credit: Credit, sides: Any) -> None:
    """Three candidates begin with `2`, together 0.95; equal shares would be 0.548 twice."""
    row = {4: 0.5, 5: 0.3, 3: 0.15}
    shares = credit([3, 4], [5], np.log([0.3]), credit=PrefixCredit(*padded([row])))
    # The remaining 0.05 belongs to the other two tokens, `0` and `1`.
    assert np.exp(shares.logprobs) == pytest.approx([0.95, 0.3 / 0.95], abs=1e-6)
    assert shares.logprobs.astype(np.float64).sum() == np.float32(np.log(0.3))
    projector = Projector(xtok.load_pair(*sides), map_of({}, *sides[::-1]))
    rows = top_k([[1, 5]], [{}, row], None)
    realized = projector.project(rows, *ids_and_bounds([[1, 3, 4]]), 9).realized_logprob
    assert np.isnan(realized[0])
    assert realized[1:].tolist() == shares.logprobs.tolist()


def test_the_rest_is_shared_by_all_other_tokens(credit: Credit) -> None:
    """`0`, `1`, `2` and `20` share the rest of 0.2; the text's token is not a candidate."""
    topk = [[1, -1]], [[math.log(0.5), -math.inf]]
    shares = credit([3, 4], [5], np.log([0.3]), credit=PrefixCredit(*topk))
    assert np.exp(shares.logprobs[0]) == pytest.approx(0.3 + 0.2 * 2 / 3, abs=1e-6)


def test_without_candidates_shares_are_equal(credit: Credit) -> None:
    none = np.zeros((3, 0), np.int64), np.zeros((3, 0))
    padding = np.zeros((3, 2), np.int64), np.full((3, 2), -9999.0)
    for topk in (none, padding):
        shares = credit([1, 3, 4, 2], [1, 5, 2], [-1.0, -4.0, -2.0], credit=PrefixCredit(*topk))
        assert shares.logprobs.tolist() == [-1, -2, -2, -2]


def test_shares_are_finite_if_their_sum_is(credit: Credit) -> None:
    """After a token with probability 1, the others have 0; their shares are finite nevertheless."""
    topk = padded([{3: 0.5, 1: 0.5}])
    for logprob, expected in ((-900.0, [math.log(0.5), -900 - math.log(0.5)]), (-math.inf, None)):
        shares = credit([3, 4], [5], [logprob], credit=PrefixCredit(*topk))
        assert shares.logprobs.tolist() == pytest.approx(expected or [-math.inf] * 2, abs=1e-3)


@settings(max_examples=150)
@given(st.data(), words, words)
def test_shares_match_the_reference(
    data: st.DataObject, ours: list[bytes], theirs: list[bytes]
) -> None:
    """Sums are equal bit for bit; each token of a chunk has a finite share of at most 0."""
    student, teacher = small(LETTERS + ours), small(LETTERS + theirs)
    text = data.draw(st.text("ab", min_size=1, max_size=24)).encode()
    s, t = student.segment(text), teacher.segment(text)
    width = len(teacher.table)
    rows, own = list[dict[int, float]](), []
    for i in t:
        least = 0 if rows else 1  # probability 1 for a first token means that it has no prediction
        weights = data.draw(st.lists(st.integers(least, 9), min_size=width, max_size=width))
        p = np.array(weights) + np.eye(width)[i]
        p /= p.sum()
        own.append(float(np.log(p[i])))
        best = np.argsort(-p, kind="stable")[: data.draw(st.integers(1, 4))]
        rows.append({k: float(p[k]) for k in best.tolist() if p[k]})
    aligner = TokenAligner(xtok.load_pair(student, teacher))
    topk = padded(rows)
    projected = xtok.project_logprobs(aligner, s, t, own, credit=PrefixCredit(*topk))
    assert projected.valid.all()
    assert np.isfinite(projected.logprobs).all()
    assert (projected.logprobs <= 0).all()
    tokens = teacher.table.tokens()
    pieces = [student.table[i] for i in s], [tokens[i] for i in t]
    for positions, teacher_positions in naive.common_boundaries(*pieces):
        expected = naive.prefix_credit(
            [pieces[0][i] for i in positions],
            [pieces[1][j] for j in teacher_positions],
            [{tokens[k]: p for k, p in rows[j].items()} for j in teacher_positions],
            [own[j] for j in teacher_positions],
            tokens[1:],
        )
        assert projected.logprobs[positions].tolist() == pytest.approx(expected, abs=1e-5)
        total = np.float32(math.fsum(own[j] for j in teacher_positions))
        assert projected.logprobs[positions].astype(np.float64).sum() == total


def test_equal_tokenizers_keep_their_log_probabilities(byte_level: Tokenizer) -> None:
    ids = byte_level.segment(b"The keeper lit 201 lamps.")
    logprobs = -np.random.default_rng(0).exponential(3, len(ids)).astype(np.float32)
    topk = np.array(ids)[:, None], logprobs[:, None]
    aligner = TokenAligner(xtok.load_pair(byte_level, byte_level))
    projected = xtok.project_logprobs(aligner, ids, ids, logprobs, credit=PrefixCredit(*topk))
    assert projected.logprobs.tolist() == logprobs.tolist()


def test_prefix_credit_accepts_lists_and_batches_of_fitting_shapes(credit: Credit) -> None:
    """The matrices may be padded batches or lists of sequences, like the other arguments."""
    ids, logprobs = [[4, 5, 3], [1, 2, 3]], np.log([[0.5, 0.3, 0.15], [0.4, 0.3, 0.3]])
    expected = [math.log(0.95), math.log(0.3 / 0.95), math.log(0.3)]
    own = np.log([0.3, 0.3])
    topk: Any = [ids, ids[1:]], [logprobs, logprobs[1:]]
    rows = credit([[3, 4, 2], [2]], [[5, 2], [2]], [own, own[1:]], credit=PrefixCredit(*topk))
    assert rows.logprobs[0].tolist() == pytest.approx(expected)
    batch = credit(
        np.array([[3, 4, 2], [2, 0, 0]]), np.array([[5, 2], [2, 0]]), np.stack([own, own[::-1]]),
        credit=PrefixCredit(np.array([ids, ids[::-1]]), np.stack([logprobs, logprobs[::-1]])),
        attention_masks=([[1, 1, 1], [1, 0, 0]], [[1, 1], [1, 0]]),
    )  # fmt: skip
    assert batch.logprobs[0].tolist() == pytest.approx(expected)
    assert batch.logprobs[1].tolist() == pytest.approx([math.log(0.3), 0, 0])
    for topk, message in (
        (([4, 5], [-1, -1]), r"\[2\], but teacher_ids require \[2, K\]"),
        ((ids, logprobs[:, :2]), r"ids \[2, 3\] and .* \[2, 2\]"),
        (
            ([[4, 6], [1, 2]], [[-1, -1]] * 2),
            r"at \[0\]: the id 6",
        ),
        (([[4, 5], [1, 2]], [[-1, -1], [-1, 0.5]]), r"candidates: 0.5 at \[1\]"),
        (
            ([[5, 4, 5], [1, 2, 3]], [[-1.2, -2, -1.2]] * 2),
            r"at \[0\]: the candidate 5",
        ),
        (
            ([[4, 5], [1, 2]], [[-1, -1], [-0.1, -0.2]]),
            r"at \[1\]: .*1\.724",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            credit([3, 4, 2], [5, 2], own, credit=PrefixCredit(*topk))


@pytest.mark.real
@pytest.mark.parametrize(
    "names", [("qwen.tiktoken", "llama3.tiktoken"), ("mistral-v3.model", "qwen.tiktoken")]
)
def test_every_token_of_a_real_student_has_a_share(load_real: Any, names: tuple[str, str]) -> None:
    """A projector also preserves the teacher's sum of each chunk."""
    pair = xtok.load_pair(*map(load_real, names))
    student, teacher = pair.tokenizers
    text = "In 2014 the price was 1299 dollars, in 東京 too. Größe, 👨\u200d👩.\n\tdef f(x): pass\n"
    s, t = student.segment(text.encode()), teacher.segment(text.encode())
    draw = np.random.default_rng(0)
    rows: list[dict[int, float]] = [{}]
    for i in t[1:]:
        ids = [i, *draw.choice(teacher.table.text_ids, 15, replace=False).tolist()]
        rows.append(dict(zip(ids, (draw.dirichlet(np.ones(16)) * 0.9).tolist(), strict=False)))
    given_rows = top_k([t], rows, None)
    projector = Projector(pair, map_of({}, teacher, student))
    realized = projector.project(given_rows, *ids_and_bounds([s]), 16).realized_logprob
    chunks = naive.common_boundaries([student.table[i] for i in s], [teacher.table[i] for i in t])
    assert sum(len(positions) > 1 for positions, _ in chunks) > 3
    for positions, theirs in chunks[1:]:
        assert np.isfinite(realized[positions]).all()
        assert (realized[positions] <= 0).all()
        total = given_rows.realized_logprob[theirs].sum(dtype=np.float64)
        assert realized[positions].sum(dtype=np.float64) == pytest.approx(total, abs=1e-5)
