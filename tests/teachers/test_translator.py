"""`serve` returns a value for each token, and preserves the teacher's sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import Load
from naive_projecting import Small, map_of, small

import xtok
from xtok.predictions.topk import TopK
from xtok.teachers.formats.ranked import RankedTopK, ranked_entries
from xtok.teachers.serving.server import score
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenEntry, TokenType


def ranked_scores(ids: Sequence[int], width: int, seed: int = 0) -> RankedTopK:
    """Return scores with each token after the first and three other candidates, and a rest."""
    generator = np.random.default_rng(seed)
    own, size = np.array(ids, np.int32), len(ids)
    candidates = np.stack([own, *((own + n + 1) % width for n in range(3))], 1)[1:]
    shares = np.sort(generator.dirichlet(np.ones(5), size - 1)[:, :4] + 1e-6, axis=1)[:, ::-1]
    with np.errstate(divide="ignore"):
        rest = np.log(np.maximum(0, 1 - shares.sum(1)))
    none = np.full(1, np.nan)
    values = (
        np.concatenate([none, row]).astype(np.float32) for row in (rest, np.log(shares[:, 0]))
    )
    topk = TopK(
        own, np.array([0, size]), np.arange(-1, size).clip(0) * 4,
        candidates.ravel().astype(np.int32), np.log(shares).ravel().astype(np.float32), *values,
    )  # fmt: skip
    return RankedTopK(topk, np.ones(size, np.int64))


def translator(pair: Pair) -> Translator:
    """Return a translator that uses only the path: the map has no rows."""
    back_map = map_of({}, pair.tokenizers[1], pair.tokenizers[0])
    return Translator(pair, back_map, num_threads=1)


def check_scores(
    translating: Translator, ids: Sequence[int]
) -> tuple[list[int], list[float], list[float]]:
    """Check that all values are finite and have the teacher's sum.

    Return the teacher's ids, the values of all tokens but the first, and the teacher's own values.
    """
    text = translating.from_student_ids(ids)
    teacher_ids: list[int] = text.teacher_ids.tolist()
    teacher_scores = ranked_scores(teacher_ids, len(translating.teacher.table))
    scores = score(translating, text, teacher_scores, 8)
    values = scores.topk.realized_logprob[1:]
    assert np.isfinite(values).all(), np.array(ids[1:])[~np.isfinite(values)]
    ends = np.cumsum([len(translating.teacher.table[i]) for i in teacher_ids])
    begin = (
        int(np.searchsorted(ends, len(translating.student.table[ids[0]]))) + 1
    )  # after the first token
    teacher_sum = teacher_scores.topk.realized_logprob[begin:].sum(dtype=np.float64)
    assert values.sum(dtype=np.float64) == pytest.approx(teacher_sum, abs=1e-4 * len(ids))
    return teacher_ids, values.tolist(), teacher_scores.topk.realized_logprob[1:].tolist()


def test_a_wider_teacher_of_the_same_tokenizer(digits: Tokenizer, small: Path) -> None:
    """The rest includes the probabilities of ids that the student lacks."""
    width = len(digits.table)
    wide = load_tokenizer(str(small / "small-digits"), vocab_size=width + 64)
    translating = translator(xtok.load_pair(digits, wide))
    text = translating.from_student_ids([5, 6, 7])
    none, n = np.float32(np.nan), np.log
    topk = TopK(
        np.array([5, 6, 7], np.int32), np.array([0, 3]), np.array([0, 0, 2, 4]),
        np.array([width + 3, 6, 7, 8], np.int32),
        n([0.5, 0.25, 0.5, 0.25]).astype(np.float32),
        np.array([none, n(0.25), n(0.25)], np.float32),
        np.array([none, n(0.25), n(0.5)], np.float32),
    )  # fmt: skip
    scores = score(translating, text, RankedTopK(topk, np.array([0, 2, 1])), 8)
    assert scores.topk.starts.tolist() == [0, 0, 1, 3]
    assert scores.topk.ids.tolist() == [6, 7, 8]
    assert scores.topk.rest_logprob[1:].tolist() == pytest.approx([n(0.75), n(0.25)])
    assert scores.topk.realized_logprob[1:].tolist() == topk.realized_logprob[1:].tolist()
    assert scores.ranks[1:].tolist() == [1, 1]


class Calls(Small):
    """A small vocabulary; its last token starts a tool call."""

    def entries(self) -> Iterable[TokenEntry]:
        *others, last = super().entries()
        return [*others, last._replace(type=TokenType.CONTROL)]


def test_a_control_token_without_a_counterpart() -> None:
    """The teacher reads the token's name as text, and the token gets the value of this text."""
    tokens = [b"a", b"b", b"<", b">"]
    student = Tokenizer(Calls([*tokens, b"<ab>"], merges=False), model_id="small")
    pair = xtok.load_pair(student, small(tokens))
    assert 5 not in pair.equal_roles
    teacher_ids, values, teacher_values = check_scores(translator(pair), [1, 2, 5, 1, 2])
    assert teacher_ids == [1, 2, 3, 1, 2, 4, 1, 2]
    assert values == pytest.approx(
        [teacher_values[0], sum(teacher_values[1:5]), *teacher_values[5:]], abs=1e-5
    )


@pytest.mark.real
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ("llama3.tiktoken", "qwen.tiktoken"), ("llama3.tiktoken", "deepseek-v3"),
        ("deepseek-v3", "mistral-v3.model"), ("tekken.json", "claude-2"),
    ],
)  # fmt: skip
def test_each_control_token(load_real: Load, student: str, teacher: str) -> None:
    """The ids include ids without text."""
    pair = xtok.load_pair(load_real(student), load_real(teacher))
    table = pair.tables[0]
    ids = np.flatnonzero(table.lengths == 0).tolist()
    begin = [pair.tokenizers[0].segment(text)[0] for text in ("a", " b")]
    check_scores(translator(pair), [*begin, *ids])


@pytest.mark.real
@pytest.mark.parametrize(
    ("student", "teacher"),
    [("mistral-v1.model", "qwen.tiktoken"), ("mistral-v3.model", "claude-2")],
)
def test_every_token_has_a_score(load_real: Load, student: str, teacher: str) -> None:
    """The text is a word and all ids in order.

    All pairs of fetched tokenizers were checked manually.
    """
    pair = xtok.load_pair(load_real(student), load_real(teacher))
    begin = [pair.tokenizers[0].segment(text)[0] for text in ("a", " b")]
    translating, num_ids = translator(pair), len(pair.tables[0])
    for first in range(0, num_ids, 2000):
        check_scores(translating, [*begin, *range(first, min(first + 2000, num_ids))])


@pytest.mark.parametrize("own", [-55.26, -7.5, -9.0])
def test_ranks_follow_the_values_of_fillers_too(own: float) -> None:
    """A token that is less likely than the unknown tokens has a rank after them."""
    nan, rest = np.nan, np.log(0.1)
    topk = TopK(
        np.array([7, 8], np.int32), np.array([0, 2]), np.array([0, 0, 1]),
        np.array([9], np.int32), np.array([np.log(0.9)], np.float32),
        np.array([nan, rest], np.float32), np.array([nan, own], np.float32),
    )  # fmt: skip
    _, logprobs, ranks, sizes = ranked_entries(RankedTopK(topk, np.array([1, 2])), 3, 1000)
    by_rank = np.argsort(ranks[1])
    assert (np.diff(logprobs[1][by_rank]) <= 0).all()
    filler = np.log(0.1 / 999)
    assert logprobs[1][1:].tolist() == pytest.approx([np.log(0.9), filler, filler])
    expected = [2, 1, 3, 4] if own > filler else [4, 1, 2, 3]
    assert ranks[1].tolist() == expected
    assert sizes.tolist() == ([0, 3] if own > filler else [0, 4])
