"""Layouts and placeholders of servers, and values that contradict each other."""

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
from xtok.tokenizers import Tokenizer

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


def response_of(row: Row, kind: str) -> Row:
    copy: Row = json.loads(json.dumps(row))
    if kind == "sglang":
        return {**teachers.sglang_response(copy), "prompt": row["text"]}
    return teachers.vllm_response(copy) if kind == "vllm" else copy


def read_vllm(response: Row) -> list[Any]:
    rows: list[Any] = response["choices"][0]["prompt_logprobs"]
    return rows


# Placeholders for the value of a realized token


def with_placeholder(row: Row, kind: str, position: int, value: Any) -> Row:
    """Set the value of a realized token to a server's placeholder for −∞."""
    response, token = response_of(row, kind), row["input_ids"][position]
    if kind == "vllm":
        read_vllm(response)[position][str(token)]["logprob"] = value
    elif kind == "sglang":
        info = response["meta_info"]
        info["input_token_logprobs"][position][0] = value
        top = info["input_top_logprobs"]
        top[position] = [entry for entry in top[position] if entry[1] != token]
    else:
        at = response["topk_ids"][position].index(token)
        response["topk_logprobs"][position][at] = value
    return response


@pytest.mark.parametrize(
    ("kind", "value"),
    [("vllm", -9999.0), ("vllm", None), ("sglang", None), ("sglang", -9999.0),
     ("neutral", -9999.0), ("neutral", -99999.0)],
)  # fmt: skip
def test_placeholder_log_probabilities_are_ignored(
    kind: str, value: Any, row: Row, projected: Any
) -> None:
    plain, before = projected(kind, response_of(row, kind))
    changed = with_placeholder(row, kind, 9, value)
    projected_row, result = projected(kind, changed)
    assert result.teacher_bits_per_byte < 2 * before.teacher_bits_per_byte + 5
    assert result.teacher_is_bound
    realized = projected_row["realized_logprob"]
    assert realized.count(None) >= plain["realized_logprob"].count(None)
    lines, _ = projected(kind, changed, "vllm")
    values = [e["logprob"] for candidates in read_vllm(lines) for e in (candidates or {}).values()]
    values += [
        v
        for logprobs in (realized, *projected_row["topk_logprobs"])
        for v in logprobs
        if v is not None
    ]
    assert min(values) > -100


# A first token


@pytest.mark.parametrize("kind", ["vllm", "sglang", "neutral", "realized"])
def test_value_of_the_first_token_is_ignored(kind: str, row: Row, projected: Any) -> None:
    """A server may write 0.0 for the first token although nothing predicts it."""
    layout = "neutral" if kind == "realized" else kind
    plain, before = projected(layout, response_of(row, layout))
    response, token = response_of(row, layout), row["input_ids"][0]
    if kind == "vllm":
        read_vllm(response)[0] = {str(token): {"logprob": 0.0, "rank": 1}}
    elif kind == "sglang":
        response["meta_info"]["input_token_logprobs"][0][0] = 0.0
        response["meta_info"]["input_top_logprobs"][0] = [[0.0, token, None], [-9999.0, 5, None]]
    elif kind == "neutral":
        response["topk_ids"][0], response["topk_logprobs"][0] = [token], [0.0]
    else:
        response["realized_logprob"] = [0.0] + [None] * (len(row["input_ids"]) - 1)
    assert projected(layout, response) == (plain, before)


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
    response = cut if layout == "neutral" else response_of({**cut, "text": "a"}, layout)
    if kind == "vllm":
        entries = zip(cut["topk_ids"], cut["topk_logprobs"], strict=True)
        response["choices"][0]["prompt_logprobs"] = [
            {str(i): {"logprob": lp} for i, lp in zip(*row_entries, strict=True)}
            for row_entries in entries
        ]
    with pytest.raises(XtokError):
        projected(layout, response)


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


def sglang_flat(response: Row, *, base: bool, name: str = "", covered: bool = True) -> Row:
    about = response["meta_info"]
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
    return response


def vllm_flat(response: Row) -> Row:
    """Use vLLM's `FlatLogprobs`, where the realized token may occur twice."""
    choice = response["choices"][0]
    flat: Row = {"start_indices": [], "end_indices": [], "token_ids": [], "logprobs": []}
    for row in choice["prompt_logprobs"]:
        flat["start_indices"].append(len(flat["token_ids"]))
        entries = [*(row or {}).items()]
        for token, entry in [*entries, *entries[:1]]:
            flat["token_ids"].append(int(token))
            flat["logprobs"].append(entry["logprob"])
        flat["end_indices"].append(len(flat["token_ids"]))
    choice["prompt_logprobs"] = {**flat, "ranks": [], "decoded_tokens": []}
    return response


def vllm_floats(response: Row) -> Row:
    rows = read_vllm(response)
    rows[:] = [row and {i: entry["logprob"] for i, entry in row.items()} for row in rows]
    return response


def sglang_null(response: Row) -> Row:
    response["meta_info"]["input_top_logprobs"][3].append([None, 7, None])
    return response


LAYOUTS: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "flat": ("sglang", lambda response: sglang_flat(response, base=False)),
    "flat, all rows": ("sglang", lambda response: sglang_flat(response, base=False, covered=False)),
    "flat names": ("sglang", lambda response: sglang_flat(response, base=False, name="_flat")),
    "base64": ("sglang", lambda response: sglang_flat(response, base=True)),
    "null": ("sglang", sglang_null),
    "vllm flat": ("vllm", vllm_flat),
    "vllm floats": ("vllm", vllm_floats),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_a_format_give_equal_predictions(name: str, row: Row, projected: Any) -> None:
    kind, changed = LAYOUTS[name]
    plain = projected(kind, response_of(row, kind))
    assert projected(kind, changed(response_of(row, kind))) == plain


# Contradictory and unknown fields


def test_error_names_an_unknown_layout_of_sglang(row: Row, projected: Any) -> None:
    """Errors: an unknown layout, and a realized value that differs from the same candidate's."""
    unread, torn = response_of(row, "sglang"), response_of(row, "sglang")
    unread["meta_info"]["input_top_things"] = unread["meta_info"].pop("input_top_logprobs")
    realized = torn["meta_info"]["input_token_logprobs"]
    realized[5] = [realized[5][0] - 0.5, *realized[5][1:]]
    assert "input_top_things" in error_of(lambda: projected("sglang", unread))
    assert "position 5: " in error_of(lambda: projected("sglang", torn))


def test_candidates_and_the_realized_token_sum_to_at_most_1(row: Row, projected: Any) -> None:
    value = response_of(row, "neutral")
    value["realized_logprob"] = [None] + [-0.01] * (len(row["input_ids"]) - 1)
    for position, token in enumerate(row["input_ids"][1:], start=1):
        at = value["topk_ids"][position].index(token)
        del value["topk_ids"][position][at], value["topk_logprobs"][position][at]
    assert "position 1: " in error_of(lambda: projected("neutral", value))


def test_realized_values_that_contradict_most_rows_are_an_error(row: Row, projected: Any) -> None:
    value = response_of(row, "neutral")
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


@pytest.mark.parametrize("value", [-math.inf, -9999.0, -99999.0])
def test_padding_is_not_a_candidate(value: float, row: Row, projected: Any) -> None:
    """Entries with probability 0 are ignored for any id."""
    padded: Row = json.loads(json.dumps(row))
    for position in range(1, len(row["input_ids"])):
        padded["topk_ids"][position] += [0, 0]
        padded["topk_logprobs"][position] += [value, value]
    assert projected("neutral", padded) == projected("neutral", row)
