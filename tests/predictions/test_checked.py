"""Validation of predictions: placeholders, shifted rows, wrong units."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import stored_teachers as teachers
from checks import error_of
from stored_teachers import Row

import xtok
from xtok.config import CacheFormat
from xtok.errors import XtokError
from xtok.predictions.checked import PredictionError, checked
from xtok.predictions.topk import TopK
from xtok.tokenizers import Tokenizer
from xtok.training.topk_collator import TopKCollator

TEXT = "The harbour master counted 201 boats."
K = 8


@pytest.fixture(scope="module")
def row(byte_level: Tokenizer) -> Row:
    [made] = teachers.teacher_rows(byte_level, [TEXT], K, with_text=True)
    return made


@pytest.fixture
def projected(digits: Tokenizer, byte_level: Tokenizer, back_map: Path, tmp_path: Path) -> Any:
    """Write a cache of one document, project it, and return the row and the report."""

    def run(kind: str, value: Any, to: CacheFormat = "neutral", **about: Any) -> tuple[Row, Any]:
        if kind == "neutral":
            path = teachers.write_neutral(tmp_path / "a.parquet", [value], **about)
        else:
            path = teachers.write_lines(tmp_path / "a.jsonl", [value])
        out = tmp_path / f"out.{'jsonl' if to == 'vllm' else 'parquet'}"
        config = xtok.ProjectConfig(to=to)
        pair = xtok.load_pair(digits, byte_level)
        result = xtok.project(path, pair, out, config, back_map=back_map)
        if to == "vllm":
            return json.loads(out.read_text()), result
        [student_row] = pyarrow.parquet.read_table(out).to_pylist()
        return {n: v for n, v in student_row.items() if n not in ("id", "text")}, result

    return run


def answer_of(row: Row, kind: str) -> Row:
    copy: Row = json.loads(json.dumps(row))
    if kind == "sglang":
        return {**teachers.sglang_answer(copy), "prompt": row["text"]}
    return teachers.vllm_answer(copy) if kind == "vllm" else copy


def read_vllm(answer: Row) -> list[Any]:
    rows: list[Any] = answer["choices"][0]["prompt_logprobs"]
    return rows


# Placeholders for the value of a text's own token


def own_unknown(row: Row, kind: str, position: int, value: Any) -> Row:
    """Set the value of a text's own token to a server's placeholder for −∞."""
    answer, token = answer_of(row, kind), row["input_ids"][position]
    if kind == "vllm":
        read_vllm(answer)[position][str(token)]["logprob"] = value
    elif kind == "sglang":
        info = answer["meta_info"]
        info["input_token_logprobs"][position][0] = value
        top = info["input_top_logprobs"]
        top[position] = [entry for entry in top[position] if entry[1] != token]
    else:
        at = answer["topk_ids"][position].index(token)
        answer["topk_logprobs"][position][at] = value
    return answer


@pytest.mark.parametrize(
    ("kind", "value"),
    [("vllm", -9999.0), ("vllm", None), ("sglang", None), ("sglang", -9999.0),
     ("neutral", -9999.0), ("neutral", -99999.0)],
)  # fmt: skip
def test_placeholder_log_probabilities_are_ignored(
    kind: str, value: Any, row: Row, projected: Any
) -> None:
    plain, before = projected(kind, answer_of(row, kind))
    changed = own_unknown(row, kind, 9, value)
    projected_row, result = projected(kind, changed)
    assert result.teacher_bits_per_byte < 2 * before.teacher_bits_per_byte + 5
    assert result.teacher_is_bound
    owns = projected_row["realized_logprob"]
    assert owns.count(None) >= plain["realized_logprob"].count(None)
    lines, _ = projected(kind, changed, "vllm")
    values = [e["logprob"] for candidates in read_vllm(lines) for e in (candidates or {}).values()]
    values += [
        v for logprobs in (owns, *projected_row["topk_logprobs"]) for v in logprobs if v is not None
    ]
    assert min(values) > -100


# A first token


@pytest.mark.parametrize("kind", ["vllm", "sglang", "neutral", "realized"])
def test_value_of_the_first_token_is_ignored(kind: str, row: Row, projected: Any) -> None:
    """A server may write 0.0 for the first token although nothing predicts it."""
    layout = "neutral" if kind == "realized" else kind
    plain, before = projected(layout, answer_of(row, layout))
    answer, token = answer_of(row, layout), row["input_ids"][0]
    if kind == "vllm":
        read_vllm(answer)[0] = {str(token): {"logprob": 0.0, "rank": 1}}
    elif kind == "sglang":
        answer["meta_info"]["input_token_logprobs"][0][0] = 0.0
        answer["meta_info"]["input_top_logprobs"][0] = [[0.0, token, None], [-9999.0, 5, None]]
    elif kind == "neutral":
        answer["topk_ids"][0], answer["topk_logprobs"][0] = [token], [0.0]
    else:
        answer["realized_logprob"] = [0.0] + [None] * (len(row["input_ids"]) - 1)
    assert projected(layout, answer) == (plain, before)


@pytest.mark.parametrize("length", [2, 3, 20])
@pytest.mark.parametrize("kind", ["neutral", "realized", "vllm", "sglang"])
def test_rows_of_the_next_token_are_an_error_for_any_number(
    kind: str, length: int, row: Row, projected: Any
) -> None:
    cut = {**row, **{n: row[n][:length] for n in teachers.NAMES}, "text": None}
    for name in ("topk_ids", "topk_logprobs"):
        cut[name] = [*cut[name][1:], []]
    if kind == "realized":
        cut |= {"topk_ids": [[]] * length, "topk_logprobs": [[]] * length}
        cut["realized_logprob"] = [*[-1.0] * (length - 1), None]
    layout = "neutral" if kind == "realized" else kind
    answer = cut if layout == "neutral" else answer_of({**cut, "text": "a"}, layout)
    if kind == "vllm":
        entries = zip(cut["topk_ids"], cut["topk_logprobs"], strict=True)
        answer["choices"][0]["prompt_logprobs"] = [
            {str(i): {"logprob": lp} for i, lp in zip(*row_entries, strict=True)}
            for row_entries in entries
        ]
    with pytest.raises(XtokError):
        projected(layout, answer)


@pytest.mark.parametrize("length", [6, 11])
@pytest.mark.parametrize("kind", ["neutral", "distillkit"])
def test_a_few_rows_of_the_next_token_after_an_empty_row(
    kind: str, length: int, row: Row, digits: Tokenizer, byte_level: Tokenizer, back_map: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    def run(name: str, by: int) -> None:
        cut = {"id": "a", "input_ids": row["input_ids"][:length]}
        for column in ("topk_ids", "topk_logprobs"):
            cut[column] = [[], *row[column][1 + by : length + by]]
        path = tmp_path / f"{name}.parquet"
        if kind == "neutral":
            teachers.write_neutral(path, [cut])
        else:
            teachers.write_distillkit(path, [cut], compressed=False, d=1280)
        out = tmp_path / f"{name}.out.parquet"
        xtok.project(path, xtok.load_pair(digits, byte_level), out, back_map=back_map)

    run("right", 0)
    with pytest.raises(XtokError, match="shifted by one"):
        run("next", 1)


# Layouts


def sglang_flat(answer: Row, *, base: bool, name: str = "", covered: bool = True) -> Row:
    about = answer["meta_info"]
    top = about.pop("input_top_logprobs")
    rows = [candidates for candidates in top if candidates]
    values = (
        [v for candidates in rows for v, *_ in candidates],
        [i for candidates in rows for _, i, *_ in candidates],
    )
    for what, flat, dtype in zip(("val", "idx"), values, ("<f4", "<i4"), strict=True):
        name_of = f"input_top_logprobs_{what}_flat"
        if base:
            data = base64.b64encode(np.array(flat, dtype).tobytes()).decode()
            about |= {f"{name_of}_b64": data, f"{name_of}_b64_dtype": "float32"}
        else:
            about[name_of] = flat
    about[f"input_top_logprobs{name}_shape"] = [len(rows) + (not covered), K]
    about[f"input_top_logprobs{name}_null_prefix"] = 1
    return answer


def vllm_flat(answer: Row) -> Row:
    """In `FlatLogprobs`, the text's own token may occur twice."""
    choice = answer["choices"][0]
    flat: Row = {"start_indices": [], "end_indices": [], "token_ids": [], "logprobs": []}
    for row in choice["prompt_logprobs"]:
        flat["start_indices"].append(len(flat["token_ids"]))
        entries = [*(row or {}).items()]
        for token, entry in [*entries, *entries[:1]]:
            flat["token_ids"].append(int(token))
            flat["logprobs"].append(entry["logprob"])
        flat["end_indices"].append(len(flat["token_ids"]))
    choice["prompt_logprobs"] = {**flat, "ranks": [], "decoded_tokens": []}
    return answer


def vllm_floats(answer: Row) -> Row:
    rows = read_vllm(answer)
    rows[:] = [row and {i: entry["logprob"] for i, entry in row.items()} for row in rows]
    return answer


def sglang_null(answer: Row) -> Row:
    answer["meta_info"]["input_top_logprobs"][3].append([None, 7, None])
    return answer


LAYOUTS: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "flat": ("sglang", lambda answer: sglang_flat(answer, base=False)),
    "flat, all rows": ("sglang", lambda answer: sglang_flat(answer, base=False, covered=False)),
    "flat names": ("sglang", lambda answer: sglang_flat(answer, base=False, name="_flat")),
    "base64": ("sglang", lambda answer: sglang_flat(answer, base=True)),
    "null": ("sglang", sglang_null),
    "vllm flat": ("vllm", vllm_flat),
    "vllm floats": ("vllm", vllm_floats),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_a_format_give_equal_predictions(name: str, row: Row, projected: Any) -> None:
    kind, changed = LAYOUTS[name]
    plain = projected(kind, answer_of(row, kind))
    assert projected(kind, changed(answer_of(row, kind))) == plain


# Contradictory and unknown fields


def test_error_names_an_unknown_layout_of_sglang(row: Row, projected: Any) -> None:
    """Errors: an unknown layout, and an own value that differs from the value of its candidate."""
    unread, torn = answer_of(row, "sglang"), answer_of(row, "sglang")
    unread["meta_info"]["input_top_things"] = unread["meta_info"].pop("input_top_logprobs")
    owns = torn["meta_info"]["input_token_logprobs"]
    owns[5] = [owns[5][0] - 0.5, *owns[5][1:]]
    assert "input_top_things" in error_of(lambda: projected("sglang", unread))
    assert "position 5: " in error_of(lambda: projected("sglang", torn))


def test_candidates_and_the_own_token_sum_to_at_most_1(row: Row, projected: Any) -> None:
    value = answer_of(row, "neutral")
    value["realized_logprob"] = [None] + [-0.01] * (len(row["input_ids"]) - 1)
    for position, token in enumerate(row["input_ids"][1:], start=1):
        at = value["topk_ids"][position].index(token)
        del value["topk_ids"][position][at], value["topk_logprobs"][position][at]
    assert "position 1: " in error_of(lambda: projected("neutral", value))


def test_realized_values_that_contradict_most_rows_are_an_error(row: Row, projected: Any) -> None:
    value = answer_of(row, "neutral")
    listed: list[Any] = [
        dict(zip(ids, logprobs, strict=True)).get(token)
        for ids, logprobs, token in zip(
            value["topk_ids"], value["topk_logprobs"], value["input_ids"], strict=True
        )
    ]
    value["realized_logprob"] = [None, *listed[1:]]
    projected("neutral", value)
    value["realized_logprob"][1] -= 0.7  # programs round differently, so one such row is accepted
    projected("neutral", value)
    value["realized_logprob"][2:] = [x - 0.7 for x in listed[2:]]
    assert "different log-probability" in error_of(lambda: projected("neutral", value))


@pytest.mark.parametrize(
    ("key", "value"),
    [("k", "4"), ("k", "many"), ("vocab_size", "50"), ("normalized", "topk")],
)
def test_a_footer_that_contradicts_the_rows(key: str, value: str, row: Row, projected: Any) -> None:
    assert f"{key}={value}" in error_of(lambda: projected("neutral", row, **{key: value}))
    projected("neutral", row, k="8", vocab_size="2000", normalized="false")


# `project_logprobs`


@pytest.mark.parametrize("credit", ["uniform", "prefix"])
def test_project_logprobs_ignores_placeholders(
    credit: Any, digits: Tokenizer, byte_level: Tokenizer
) -> None:
    aligner = xtok.TokenAligner(xtok.load_pair(digits, byte_level))
    student, teacher = (side.segment(TEXT.encode()) for side in (digits, byte_level))
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


# Impossible predictions


V, T = 420, 31
Rows = list[Any]


def teacher_rows(seed: int, k: int = 20) -> tuple[Any, Rows, Rows, Rows]:
    """Return a text of 30 tokens; ids, log-probabilities and logits of its top k; its own values.

    There are 20 kinds of random teachers. Their logits are normal, follow Zipf's law, or share a
    common vocabulary. The text is sampled from them; every other teacher also has the text's own
    token among its candidates.
    """
    generator = np.random.default_rng(seed)
    spread = (1.5, 2.0, 2.5, 3.0)[seed % 20 // 5]
    logits = spread * generator.normal(size=(T, V))
    if seed % 5 > 2:
        ranks = generator.permuted(np.tile(np.arange(1, V + 1), (T, 1)), axis=1)
        logits = 0.3 * logits - spread / 1.5 * np.log(ranks)
    elif seed % 5 > 1:
        logits -= np.log(np.arange(1, V + 1))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    text = (logprobs + generator.gumbel(size=logprobs.shape)).argmax(1)
    ids = [np.argsort(-row)[:k] for row in logprobs]
    if seed % 2:
        ids = [i if own in i else np.append(i, own) for i, own in zip(ids, text, strict=True)]
    pick = [[row[i] for row, i in zip(full, ids, strict=True)] for full in (logprobs, logits)]
    return text, ids, *pick


def refusal(text: Any, ids: Rows, logprobs: Rows, width: int = V) -> str:
    """Return the reason for which a document is rejected, or "". The first row is ignored."""
    starts = np.cumsum([0, 0, *map(len, ids[1:])])
    nothing = np.full(len(text), np.nan, np.float32)
    flat = np.concatenate(ids[1:]), np.concatenate(logprobs[1:]).astype(np.float32)
    topk = TopK(text, np.array([0, len(text)]), starts, *flat, nothing, nothing)
    try:
        checked(topk, width)
    except PredictionError as error:
        return error.problem
    return ""


def bfloat16(logprobs: Any) -> Any:
    bits = np.asarray(logprobs, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def test_valid_rows_of_any_teacher_are_accepted() -> None:
    """Rows in vLLM's flat layout and rows in half precision are valid as well."""
    for seed in range(100):
        text, ids, logprobs, _ = teacher_rows(seed, k=(4, 8, 20, 64)[seed % 4])
        for stored in (np.float32, np.float16, bfloat16):
            assert refusal(text, ids, [stored(values) for values in logprobs]) == ""
    flat = [np.full(8, -math.log(V))] * T
    for stored in (np.float16, bfloat16):
        rounded = [stored(values) for values in flat]
        assert refusal(text, [np.arange(8)] * T, rounded) == ""


def moved(rows: Rows, by: int) -> Rows:
    return [rows[0], *(rows[min(max(1, i + by), T - 1)] for i in range(1, T))]


WRONG: dict[str, Callable[[Any, Rows, Rows, Rows], tuple[Any, ...]]] = {
    "base 2": lambda t, i, p, z: (t, i, [x / math.log(2) for x in p]),
    "base 10": lambda t, i, p, z: (t, i, [x / math.log(10) for x in p]),
    "logits": lambda t, i, p, z: (t, i, z),
    "logits below 0": lambda t, i, p, z: (t, i, [x - 30 for x in z]),
    "divided": lambda t, i, p, z: (t, i, [x / 2 for x in p]),
    "multiplied": lambda t, i, p, z: (t, i, [x * 1.5 for x in p]),
    "next": lambda t, i, p, z: (t, moved(i, 1), moved(p, 1)),
    "previous": lambda t, i, p, z: (t, moved(i, -1), moved(p, -1)),
    "another tokenizer": lambda t, i, p, z: (t, [(x * 11 + 5) % V for x in i], p),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_rows_are_refused(name: str) -> None:
    refused = sum(bool(refusal(*WRONG[name](*teacher_rows(seed)))) for seed in range(100))
    assert refused >= 95


def test_each_document_is_compared_separately() -> None:
    """Only one of 12 documents is shifted; each has enough rows for a reliable decision."""
    caches = [teacher_rows(seed) for seed in range(12)]
    bad = list(caches)
    bad[7] = (caches[7][0], moved(caches[7][1], 1), moved(caches[7][2], 1), caches[7][3])
    for documents in (caches, bad):
        text = np.concatenate([document[0] for document in documents])
        counts = [n for document in documents for n in (0, *map(len, document[1][1:]))]
        ids, logprobs = (
            np.concatenate([row for document in documents for row in document[part][1:]])
            for part in (1, 2)
        )
        nothing = np.full(len(text), np.nan, np.float32)
        bounds = np.arange(13) * T
        starts = np.cumsum([0, *counts])
        topk = TopK(text, bounds, starts, ids, logprobs.astype(np.float32), nothing, nothing)
        if documents is caches:
            checked(topk, V)
            continue
        with pytest.raises(PredictionError, match="shifted by one") as error:
            checked(topk, V)
        assert (error.value.row, error.value.is_document) == (7 * T, True)


@pytest.mark.parametrize("value", [-math.inf, -9999.0, -99999.0])
def test_padding_is_not_a_candidate(value: float, row: Row, projected: Any) -> None:
    """Entries with probability 0 are ignored for any id."""
    padded: Row = json.loads(json.dumps(row))
    for position in range(1, len(row["input_ids"])):
        padded["topk_ids"][position] += [0, 0]
        padded["topk_logprobs"][position] += [value, value]
    assert projected("neutral", padded) == projected("neutral", row)


@pytest.mark.parametrize("name", ["true", *WRONG])
def test_collator_refuses_impossible_rows(name: str) -> None:
    """The collator has no vocabulary size, so 80 of 100 candidates are enough."""
    refused = 0
    for seed in range(100):
        rows = teacher_rows(seed)
        text, ids, logprobs = WRONG[name](*rows) if name in WRONG else rows[:3]
        row: Row = {"input_ids": text.tolist()}
        row["topk_ids"] = [[], *(values.tolist() for values in ids[1:])]
        row["topk_logprobs"] = [[], *(values.tolist() for values in logprobs[1:])]
        try:
            TopKCollator()([row])
        except ValueError:
            refused += 1
    assert refused == 0 if name == "true" else refused >= 80
