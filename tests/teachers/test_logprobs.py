"""A teacher's log-probabilities on a student's tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from command_lines import run_python
from conftest import Aligners, Tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import byte_ranks

import xtok
from xtok.alignment.aligner import TokenAligner
from xtok.errors import XtokError
from xtok.teachers.logprobs import ProjectedLogprobs, StudentCredit
from xtok.tokenizers import Tokenizer

LOGPROBS = st.floats(-50, 0, width=32) | st.sampled_from([0.0, -0.0, -1e-30, -1e3, -math.inf])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A student with 'ab' (256), 'abc' (257), 'de' (258); a teacher with 'bc' (256), 'cd' (257)."""
    folder = tmp_path_factory.mktemp("tiny")
    student = byte_ranks(folder / "student.tiktoken", "ab", "abc", "de")
    return student, byte_ranks(folder / "teacher.tiktoken", "bc", "cd")


def ids(text: str, *tokens: int) -> list[int]:
    """The ids of bytes, then further ids."""
    return [*text.encode(), *tokens]


def shares(projected: ProjectedLogprobs) -> tuple[list[float], list[bool]]:
    assert projected.logprobs.dtype == np.float32
    assert projected.valid.dtype == np.bool_
    return projected.logprobs.tolist(), projected.valid.tolist()


Project = Callable[..., ProjectedLogprobs]


@pytest.fixture
def project(tiny: tuple[Tokenizer, Tokenizer]) -> Project:
    return partial(xtok.project_logprobs, TokenAligner(xtok.load_pair(*tiny)))


# One chunk at a time


def test_the_student_tokens_of_a_chunk_share_its_sum(project: Project) -> None:
    s = ids("xab", 256, *b"cx")  # x a b (ab) c x
    t = ids("xaba", 256, *b"x")  # x a b a (bc) x
    projected = project(s, t, [-1.0, -2.0, -4.0, -8.0, -16.0, -0.5])
    assert shares(projected) == ([-1, -2, -4, -12, -12, -0.5], [True] * 6)


def test_equal_shares_differ_in_the_last_bit_of_the_sum_at_most(
    tiny: tuple[Tokenizer, Tokenizer], project: Project
) -> None:
    projected = project([256, *b"cde"], [*b"a", 256, *b"de"], [-0.5, -0.5, 0, 0])
    assert projected.logprobs.tolist() == [-0.5, -0.5, 0.0, 0.0]
    third = xtok.project_logprobs(
        TokenAligner(xtok.load_pair(*tiny[::-1])), [*b"abc"], [257], [-1.0]
    ).logprobs
    bits = [2796203, 2796202, 2796203]  # of 2 ** -23, the last bit of 1.0 in float32
    assert third.tolist() == [-n * 2.0**-23 for n in bits]
    assert third.astype(np.float64).sum() == -1.0


@pytest.mark.parametrize(
    ("credit", "student", "expected"),
    [("student", [-0.5, -1.5], [-1, -3]), ("student", [0.0, -0.0], [-2, -2]),
     ("uniform", [-1, 0], [-2, -2])],
)  # fmt: skip
def test_credit_goes_to_the_tokens_that_surprised_the_student(
    project: Project, credit: str, student: list[float], expected: list[float]
) -> None:
    arguments = [256, *b"c"], [*b"a", 256], [-1, -3]
    projected = project(
        *arguments, credit=StudentCredit(student) if credit == "student" else "uniform"
    )
    assert shares(projected) == (expected, [True, True])


@pytest.mark.parametrize("credit", ["uniform", "student"])
def test_impossible_tokens_stay_impossible(project: Project, credit: str) -> None:
    projected = project(
        ids("", 256, *b"cx"), ids("a", 256, *b"x"), [-math.inf, -3, -1],
        credit=StudentCredit([0, -1, -1]) if credit == "student" else "uniform",
    )  # fmt: skip
    assert shares(projected) == ([-math.inf, -math.inf, -1], [True] * 3)


# Sums, as a property


@given(data=st.data())
@settings(max_examples=150)
def test_sums_are_preserved_exactly(
    aligners: Aligners, tokenizers: Tokenizers, data: st.DataObject
) -> None:
    """The shares of a chunk, in float64, sum exactly to the teacher's sum rounded to float32."""
    pair = data.draw(st.sampled_from(list(aligners)))
    text = data.draw(st.text("ab 12é東\U0001f468\n.", max_size=40)).encode()
    s, t = (tokenizers[name].segment(text) for name in pair)
    s = s[: len(s) - data.draw(st.integers(0, min(2, len(s))))]
    teacher = data.draw(st.lists(LOGPROBS, min_size=len(t), max_size=len(t)))
    if teacher[:1] == [0.0]:
        teacher[0] = -0.5  # for a first token, 0 means a missing prediction
    student = data.draw(st.lists(st.floats(-50, 0), min_size=len(s), max_size=len(s)))
    is_student = data.draw(st.booleans())
    projected = xtok.project_logprobs(
        aligners[pair], s, t, teacher, credit=StudentCredit(student) if is_student else "uniform"
    )
    rows, columns = (tokenizers[name].table for name in pair)
    chunks = naive.common_boundaries([rows[i] for i in s], [columns[j] for j in t])
    for positions, teacher_positions in chunks:
        total = float(np.float32(sum(teacher[j] for j in teacher_positions)))
        assert math.fsum(projected.logprobs[positions].tolist()) == total
        assert float(projected.logprobs[positions].astype(np.float64).sum()) == total
    inside = {i for positions, _ in chunks for i in positions}
    assert np.flatnonzero(projected.valid).tolist() == sorted(inside)
    assert not projected.logprobs[~projected.valid].any()
    assert (projected.logprobs <= 0).all()
    if all(map(math.isfinite, teacher)):
        expected = naive.projected_logprobs(
            chunks, len(s), teacher, student if is_student else None
        )
        assert shares(projected) == expected


# Input types


def test_result_has_the_type_and_shape_of_the_students_ids(project: Project) -> None:
    s, t, logprobs = ids("", 256, *b"cx"), ids("a", 256, *b"x"), [-1.0, -3.0, -5.0]
    expected = [-2.0, -2.0, -5.0]
    for array in (list, tuple, np.array, torch.tensor):
        projected = project(array(s), array(t), array(logprobs))
        assert isinstance(projected.logprobs, torch.Tensor if array is torch.tensor else np.ndarray)
        assert projected.logprobs.tolist() == expected
        assert projected.valid.tolist() == [True] * 3
        rows = [array(s), array(s[:1])]
        ragged = project(rows, [array(t), array(t)], [array(logprobs), array(logprobs)])
        assert [type(row) for row in ragged.logprobs] == [type(projected.logprobs)] * 2
        assert [row.tolist() for row in ragged.logprobs] == [expected, [0.0]]
        assert [row.tolist() for row in ragged.valid] == [[True] * 3, [False]]
    tensors = project(torch.tensor(s), np.array(t), torch.tensor(logprobs, dtype=torch.bfloat16))
    assert tensors.logprobs.dtype == torch.float32
    assert tensors.valid.dtype == torch.bool
    assert tensors.logprobs.tolist() == expected


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_batches_with_masks(project: Project, padding: str) -> None:
    rows = [(ids("", 256, *b"cx"), ids("a", 256, *b"x"), [-1.0, -3.0, -5.0]), ([97], [97], [-7.0])]

    def padded(column: int, fill: Any) -> Any:
        values = [row[column] for row in rows]
        width = max(map(len, values)) + 1
        return np.array(
            [[*v, *[fill] * (width - len(v))] if padding == "right"
             else [*[fill] * (width - len(v)), *v] for v in values]
        )  # fmt: skip

    s, t, logprobs = padded(0, 999), padded(1, -5), padded(2, math.nan)
    projected = project(
        s, t, logprobs,
        attention_masks=(s != 999, t != -5),
    )  # fmt: skip
    right = [[-2, -2, -5, 0], [-7, 0, 0, 0]]
    left = [[0, -2, -2, -5], [0, 0, 0, -7]]
    assert projected.logprobs.tolist() == (right if padding == "right" else left)
    assert (projected.valid == (projected.logprobs != 0)).all()


def test_empty_sequences_have_no_values(project: Project) -> None:
    assert shares(project([], [], [])) == ([], [])
    projected = project([[], [97]], [[97], []], [[-1.0], []])
    assert [row.tolist() for row in projected.logprobs] == [[], [0.0]]
    none = np.zeros((0, 3), np.int64)
    assert project(none, none, none).logprobs.shape == (0, 3)


# Tokens without a valid value


def test_special_tokens_align_by_role(aligners: Aligners, tokenizers: Tokenizers) -> None:
    rows, columns = tokenizers["byte_level"].table, tokenizers["sentencepiece"].table
    bos, eos = rows.roles["bos"][0], rows.roles["eos"][0]
    s = [bos, *tokenizers["byte_level"].segment(b" a"), eos]
    t = [*tokenizers["sentencepiece"].segment(b" a"), columns.roles["eos"][0]]
    projected = xtok.project_logprobs(
        aligners["byte_level", "sentencepiece"], s, t, [-1.0] * len(t)
    )
    assert projected.valid.tolist() == [False, *[True] * (len(s) - 1)]


@pytest.mark.parametrize("missing", [None, math.nan])
def test_the_first_token_need_not_be_scored(project: Project, missing: Any) -> None:
    projected = project(ids("abx"), ids("abx"), [missing, -1.0, -2.0])
    assert shares(projected) == ([0, -1, -2], [False, True, True])
    projected = project([256, *b"x"], ids("abx"), [missing, -1.0, -2.0])
    assert shares(projected) == ([0, -2], [False, True])
    with pytest.raises(ValueError, match=r"teacher_logprobs: nan at \[1\]"):
        project(ids("abx"), ids("abx"), [-1.0, missing, -2.0])


def test_a_response_mask_leaves_out_the_prompt(project: Project) -> None:
    s, t = ids("xabc"), ids("xa", 256)  # the teacher's 'bc' is a token; the response begins at 'c'
    mask = [False, False, False, True]
    projected = project(s, t, [None, None, -1.0], response_mask=mask)
    assert shares(projected) == ([0] * 4, [False] * 4)
    mask[2] = True
    projected = project(s, t, [None, None, -1.0], response_mask=mask)
    assert shares(projected) == ([0, 0, -0.5, -0.5], [False, False, True, True])


PART = {"partial": True}
VALID: list[tuple[list[int], list[int], dict[str, bool], list[int]]] = [
    # Either side may be cut off.
    (ids("xab"), ids("xa", 256, *b"x"), {}, [1, 1, 0]),
    (ids("xabcx"), ids("xa"), {}, [1, 1, 0, 0, 0]),
    # Teachers read the decoded text, with U+FFFD in place of incomplete characters.
    ([*b"a", *"東".encode()[:2]], ids("a\ufffd"), {}, [1, 0, 0]),
    ([*b"a", 0xFF, *b"b" * 20], ids("a\ufffd" + "b" * 20), {}, [1, 0, *[1] * 20]),
    # Texts may differ if the option allows it.
    (ids("the price was 12 dollars"), ids("the price was 7 dollars"), PART,
     [1] * 14 + [0] * 2 + [1] * 8),
    (ids("abc"), ids("xyz"), PART, [0] * 3),
]  # fmt: skip


@pytest.mark.parametrize(("s", "t", "options", "valid"), VALID)
def test_tokens_are_valid_where_the_texts_are_equal(
    project: Project, s: Any, t: Any, options: Any, valid: list[int]
) -> None:
    assert project(s, t, [-1.0] * len(t), **options).valid.tolist() == [*map(bool, valid)]


# Different texts


def test_different_texts_are_an_error_with_their_position(project: Project) -> None:
    with pytest.raises(XtokError, match=r'byte 4, .*"12", .*"7"') as error:
        project(ids("é: 12"), ids("é: 7"), [-1.0] * 5)
    assert error.value.parameter == "partial"
    rows = [ids("a"), ids("one\x1b[31m" + "x" * 60)]
    with pytest.raises(XtokError, match="row 1 differ at byte 0") as error:
        project(rows, [ids("a"), ids("two")], [[-1.0], [-1.0] * 3])
    assert "\x1b" not in str(error.value)
    assert "x" * 30 not in str(error.value)


def test_error_shows_code_points_of_texts_that_look_equal(project: Project) -> None:
    s, t = ids("caf\u0065\u0301"), ids("caf\u00e9")
    with pytest.raises(XtokError, match=r"U\+0065 U\+0301\).*U\+00E9\)"):
        project(s, t, [-1.0] * len(t))
    with pytest.raises(XtokError) as error:
        project(ids("a"), ids(" a"), [-1.0] * 2)
    assert "U+" not in str(error.value)


# Bad input


def test_invalid_log_probabilities_are_refused(project: Project) -> None:
    with pytest.raises(ValueError, match=r"teacher_.*: 0.25 at \[1\]"):
        project(ids("ab"), ids("ab"), [-1.0, 0.25])
    student = StudentCredit([[-1], [math.inf]])
    with pytest.raises(ValueError, match=r"student_.*: inf at \[1, 0\]"):
        project([[97], [97]], [[97], [97]], [[-1], [-1]], credit=student)
    with pytest.raises(ValueError, match=r"student_.*: -inf at \[1\]"):
        project(
            ids("ab"), ids("ab"), [-1, -1],
            credit=StudentCredit([-1, -math.inf]),
        )  # fmt: skip
    rounded = project(ids("a"), ids("a"), [1e-6])
    assert rounded.logprobs[0] == np.float32(1e-6)


def test_an_error_names_the_index_in_the_padded_batch(project: Project) -> None:
    t = np.array([[0, 0, 97], [0, 97, 98]])
    logprobs = np.array([[5, 5, -1], [5, -1, math.nan]])
    with pytest.raises(ValueError, match=r"nan at \[1, 2\]"):
        project(t, t, logprobs, attention_masks=(t > 0, t > 0))


@pytest.mark.parametrize(
    ("s", "t", "logprobs", "options", "message"),
    [
        ([97], [97, 258], [-1, -1], {}, r"258 at \[1\]"),
        ([[97], [97, 97, -1]], [[97], [97]], [[-1], [-1]], {}, r"student id -1 at \[1, 2\]"),
        ([97], [97], [-1, -1], {}, r"teacher_logprobs .* \[2\]"),
        ([[97], [97]], [[97], [97]], [[-1], [-1, -1]], {}, r"\[\[1\], \[2\]\]"),
        ([[97], [97]], [97], [-1], {}, "2 student sequences"),
        ([97.5], [97], [-1], {}, "student_ids .*float64"),
        ([[97]], [97], [-1], {"attention_masks": ([[1]], None)}, "student_attention_mask"),
        (
            [97],
            [97],
            [-1],
            {"attention_masks": ([1, 1], None)},
            r"\[2\], but .* \[1\]",
        ),
        ([97], [97], [-1], {"response_mask": [1, 1]}, r"response_mask .* \[2\]"),
        ([97], [97], [-1], {"credit": "teacher"}, "credit is 'teacher'"),
    ],
)
def test_error_names_the_argument_that_does_not_fit(
    project: Project, s: Any, t: Any, logprobs: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        project(s, t, logprobs, **options)


# Real tokenizers


@pytest.mark.real
@pytest.mark.parametrize(
    "pair", [("qwen.tiktoken", "llama3.tiktoken"), ("mistral-v3.model", "qwen.tiktoken")]
)
def test_every_token_of_a_real_student_is_valid(load_real: Any, pair: tuple[str, str]) -> None:
    student, teacher = map(load_real, pair)
    aligner = TokenAligner(xtok.load_pair(student, teacher))
    texts = [
        "In 2014 the price was 1299 dollars, in 東京 too.\n\tdef f(x): return x\n",
        "敏捷的棕色狐狸跳过了懒狗。2024年,価格は1299ドルでした。👨\u200d👩\u200d👧",
        json.dumps({"größe": [1, 22, 333], "слово": "да"}, ensure_ascii=False),
    ]
    s, t = (side.segment_batch([text.encode() for text in texts]) for side in (student, teacher))
    draw = np.random.default_rng(0)
    logprobs = [-draw.standard_exponential(len(row or [])) for row in t]
    projected = xtok.project_logprobs(aligner, s, t, logprobs)
    assert all(row.all() for row in projected.valid)
    for ours, theirs, values, share in zip(s, t, logprobs, projected.logprobs, strict=True):
        for chunk in aligner.pairs(ours or [], theirs or []):
            total = np.float32(values[slice(*chunk.teacher_tokens)].sum())
            assert share[slice(*chunk.student_tokens)].astype(np.float64).sum() == total


def test_a_fresh_process_needs_no_torch(tmp_path: Path) -> None:
    """NumPy in, NumPy out: torch is not imported."""
    script = (
        "import sys, xtok\n"
        "aligner = xtok.TokenAligner(xtok.load_pair('bytes', 'bytes'))\n"
        "projected = xtok.project_logprobs(aligner, [97], [97], [-1.0])\n"
        "assert projected.logprobs.tolist() == [-1.0]\n"
        "assert 'torch' not in sys.modules\n"
    )
    run_python(script, cwd=tmp_path, check=True, timeout=300)


@pytest.mark.parametrize("credit", ["uniform", "prefix"])
def test_project_logprobs_ignores_placeholders(
    credit: Any, digits: Tokenizer, byte_level: Tokenizer
) -> None:
    aligner = xtok.TokenAligner(xtok.load_pair(digits, byte_level))
    student, teacher = (
        side.segment(b"The harbour master counted 201 boats.") for side in (digits, byte_level)
    )
    values = [-1.0] * len(teacher)
    candidates = [[i] for i in teacher], [[v] for v in values]
    columns: dict[str, Any] = {
        "credit": xtok.PrefixCredit(*candidates) if credit == "prefix" else credit
    }
    plain = xtok.project_logprobs(aligner, student, teacher, values, **columns)
    assert plain.valid.all()
    for position, value in ((len(teacher) - 1, -9999.0), (0, 0.0), (0, -9999.0)):
        odd = [*values[:position], value, *values[position + 1 :]]
        result = xtok.project_logprobs(aligner, student, teacher, odd, **columns)
        assert 0 < (~result.valid).sum() < 6
        assert not result.valid[0 if position == 0 else -1]
        assert np.array_equal(result.logprobs[result.valid], plain.logprobs[result.valid])
        assert not result.logprobs[~result.valid].any()
    assert math.isclose(plain.logprobs.sum(), -len(teacher))
