"""`xtok serve` in front of a small model's server: the values of each route."""

from __future__ import annotations

import base64
import io
import math
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from running_servers import (
    KINDS,
    TEXT,
    Served,
    ServePair,
    check_rows,
    post,
    prompt_rows,
    running,
    serving,
    token_logprobs,
)
from served_teachers import TeacherServer

import xtok
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.table import TokenType

SIDES = [
    ("byte_level", "digits"), ("digits", "byte_level"), ("sentencepiece", "digits"),
    ("byte_level", "sentencepiece"), ("ranks", "byte_level"),
]  # fmt: skip


@KINDS
@pytest.mark.parametrize(("student", "teacher"), SIDES)
def test_sums_of_chunks_equal_the_teachers(
    serve_pair: ServePair, student: str, teacher: str, kind: str
) -> None:
    served = serve_pair(student, teacher, kind)
    ours, theirs = served.pair.tokenizers
    ids = ours.encode(TEXT).ids.tolist()
    bos = list(ours.table.roles.get("bos", ())[:1])
    served.model.requested_ids.clear()
    [rows] = served.rows([*bos, *ids])
    check_rows([*bos, *ids], rows, 5, len(ours.table))
    [teacher_ids] = served.model.requested_ids
    assert b"".join(theirs.table[i] for i in teacher_ids) == b"".join(ours.table[i] for i in ids)
    values = [math.nan] * (not bos) + token_logprobs([*bos, *ids], rows)
    teacher_values = [math.nan, *served.model.token_logprobs(teacher_ids)]
    num_bos = 1 if theirs.table.lengths[teacher_ids[0]] == 0 else 0
    seen = 0
    for chunk in xtok.TokenAligner(served.pair).pairs(ids, teacher_ids[num_bos:]):
        (a, b), (c, d) = chunk.student_tokens, chunk.teacher_tokens
        if a or bos:
            expected = sum(teacher_values[num_bos + c : num_bos + d])
            assert sum(values[a:b]) == pytest.approx(expected, abs=1e-5)
        seen += b - a
    assert seen == len(ids)


@KINDS
def test_equal_tokenizers_get_the_teachers_own_response(serve_pair: ServePair, kind: str) -> None:
    served = serve_pair("digits", "digits", kind)
    tokenizer = served.pair.tokenizers[0]
    unused = np.flatnonzero(tokenizer.table.types == TokenType.UNUSED).tolist()
    ids = [*tokenizer.encode(TEXT).ids.tolist(), unused[0], 5]
    [rows] = served.rows(ids, top_k=7)
    assert served.model.requested_ids[-1] == ids
    for i, row, values in zip(ids[1:], rows[1:], served.model.logprobs(ids), strict=True):
        best = values.topk(7)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        row_values = {str(i): float(values[i]), **{str(j): value for j, value in pairs}}
        assert {j: entry["logprob"] for j, entry in row.items()} == row_values
        if kind == "vllm":
            assert row[str(i)]["rank"] == int((values >= values[i]).sum())


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize(("student", "teacher"), SIDES[:3])
def test_requests_with_any_ids_get_a_response(
    serve_pair: ServePair, student: str, teacher: str, data: Any
) -> None:
    """The ids include broken characters, control tokens and unused ids."""
    served = serve_pair(student, teacher)
    width = len(served.pair.tokenizers[0].table)
    ids = st.lists(st.integers(0, width - 1), min_size=1, max_size=12)
    batch = data.draw(st.lists(ids, min_size=1, max_size=4))
    top_k = data.draw(st.sampled_from([0, 1, 5, 64]))
    for sequence, rows in zip(batch, served.rows(*batch, top_k=top_k), strict=True):
        check_rows(sequence, rows, top_k, width)


@pytest.mark.parametrize("top_k", [255, 256, 257, 300])
def test_more_candidates_than_the_student_has_ids(digits: Tokenizer, top_k: int) -> None:
    pair, ids = xtok.load_pair(xtok.load_tokenizer("bytes"), digits), [*b"In 2014"]
    with (
        running(TeacherServer(digits, max_logprobs=300).app) as teacher_url,
        serving(pair, teacher_url) as url,
    ):
        [rows] = prompt_rows(post(url, ids, top_k))
        body = {"input_ids": ids, "top_logprobs_num": top_k, "logprob_start_len": 0, **SCORED}
        response = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    if top_k == 255:
        check_rows(ids, rows, top_k, 256)
    for row, best in zip(rows[1:], response["meta_info"]["input_top_logprobs"][1:], strict=True):
        for candidates in (sorted(map(int, row)), sorted(i for _, i, _ in best)):
            assert len({*candidates}) == len(candidates)
            assert {*candidates} <= {*range(256)}
            assert len(candidates) in {min(top_k, 256), min(top_k + 1, 256)}


class TextRows(NamedTuple):
    """A text's ids and its rows from vLLM's route."""

    served: Served
    ids: list[int]
    rows: list[Any]

    def matrix(self, token_ids: list[list[int]], start: int) -> NDArray[np.float32]:
        """Return the log-probabilities of chosen ids from vLLM's route for ids."""
        sampling: dict[str, Any] = {"max_tokens": 1, "prompt_logprob_start": start - 1}
        sampling["prompt_logprob_token_ids"] = token_ids
        response = self.served.post(
            "/inference/v1/generate", token_ids=self.ids, sampling_params=sampling
        )
        matrix: NDArray[np.float32] = np.load(
            io.BytesIO(base64.b64decode(response["prompt_token_id_logprobs"]))
        )
        assert matrix.dtype == np.float32
        assert matrix.shape == (len(token_ids), 3)
        return matrix


@pytest.fixture
def text_rows(serve_pair: ServePair) -> TextRows:
    served = serve_pair("byte_level", "digits")
    ids = served.pair.tokenizers[0].encode(TEXT).ids.tolist()
    return TextRows(served, ids, served.rows(ids, top_k=3)[0])


# SGLang's route

SCORED: dict[str, Any] = {"return_logprob": True}
SGLANG: dict[str, Any] = {**SCORED, "sampling_params": {"max_new_tokens": 0}}


def test_sglangs_route_returns_the_values_of_vllms_route(text_rows: TextRows) -> None:
    served, ids, rows = text_rows
    info = served.post("/generate", input_ids=ids, logprob_start_len=0, **SGLANG)["meta_info"]
    assert info["prompt_tokens"] == len(ids)
    assert "input_top_logprobs" not in info
    scored = info["input_token_logprobs"]
    assert scored[0] == [None, ids[0], None]
    assert [entry[1] for entry in scored] == ids
    assert [entry[0] for entry in scored[1:]] == token_logprobs(ids, rows)


def test_sglangs_batches_begin_at_the_start_position(text_rows: TextRows) -> None:
    served, ids, rows = text_rows
    [whole, part] = served.post(
        "/generate", input_ids=[ids, ids[:6]], logprob_start_len=4, **SGLANG
    )
    scored = [[value, i, None] for value, i in zip(token_logprobs(ids, rows), ids[1:], strict=True)]
    assert whole["meta_info"]["input_token_logprobs"] == [[None, ids[4], None], *scored[4:]]
    begin, [value, *about_last] = part["meta_info"]["input_token_logprobs"]
    assert (begin, about_last) == ([None, ids[4], None], [ids[5], None])
    assert value == pytest.approx(scored[4][0], abs=1e-4)  # computed for a shorter sequence


def test_sglangs_default_start_scores_only_the_last_token(text_rows: TextRows) -> None:
    """SGLang's default start is −1."""
    response = text_rows.served.post("/generate", input_ids=text_rows.ids, **SGLANG)
    last = [[None, text_rows.ids[-1], None]]
    assert response["meta_info"]["input_token_logprobs"] == last


def test_sglangs_best_candidates_are_vllms(text_rows: TextRows) -> None:
    served, ids, rows = text_rows
    response = served.post(
        "/generate", input_ids=ids, logprob_start_len=4, top_logprobs_num=3, **SGLANG
    )
    first, *others = response["meta_info"]["input_top_logprobs"]
    assert first is None
    for row, top in zip(rows[5:], others, strict=True):
        best = sorted(row.items(), key=lambda item: item[1]["rank"])[:3]
        assert [int(i) for i, _ in best] == [i for _, i, _ in top]
        assert [e["logprob"] for _, e in best] == pytest.approx([v for v, _, _ in top], abs=1e-2)


def test_sglangs_chosen_ids_of_all_positions(text_rows: TextRows) -> None:
    served, ids, rows = text_rows
    chosen = [ids[5], 7]
    response = served.post(
        "/generate", input_ids=ids, logprob_start_len=4, token_ids_logprob=chosen, **SGLANG
    )
    first = response["meta_info"]["input_token_ids_logprobs"][1]
    assert [entry[1] for entry in first] == chosen
    assert first[0][0] == token_logprobs(ids, rows)[4]
    assert all(math.isfinite(value) and value < 0 for value, _, _ in first)


def test_sglangs_chosen_ids_of_each_position(text_rows: TextRows) -> None:
    served, ids, rows = text_rows
    each = [[], *([i, 3] for i in ids[1:])]
    positions = served.post(
        "/generate", input_ids=ids, logprob_start_len=0, token_ids_logprob_positions=each, **SGLANG
    )["meta_info"]["input_token_ids_logprobs"]
    assert [[entry[1] for entry in row] for row in positions[1:]] == each[1:]
    assert [row[0][0] for row in positions[1:]] == token_logprobs(ids, rows)


# vLLM's other routes


def test_vllms_demo_route_returns_the_same_values(text_rows: TextRows) -> None:
    served, ids, rows = text_rows
    response = served.post("/generate", prompt={"prompt_token_ids": ids}, prompt_logprobs=3)
    plain = [row and {i: entry["logprob"] for i, entry in row.items()} for row in rows]
    assert response["prompt_logprobs"] == plain


def test_vllms_route_for_ids_returns_the_same_rows(text_rows: TextRows) -> None:
    served, ids, rows = text_rows
    sampling = {"temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 3, "max_tokens": 1}
    response = served.post(
        "/inference/v1/generate", model="the-teacher", token_ids=ids, sampling_params=sampling
    )
    assert response["prompt_logprobs"] == rows
    assert isinstance(response["request_id"], str)
    [choice] = response["choices"]
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, [], "length")


def test_vllms_chosen_ids_are_a_matrix(text_rows: TextRows) -> None:
    """The id −1 pads a row."""
    _, ids, rows = text_rows
    matrix = text_rows.matrix([[i, 9, -1] for i in ids[6:]], 6)
    assert matrix[:, 0].astype(float).tolist() == token_logprobs(ids, rows)[5:]
    assert np.isfinite(matrix[:, 1]).all()
    assert np.isneginf(matrix[:, 2]).all()


def test_vllms_rows_without_chosen_ids_are_counted(text_rows: TextRows) -> None:
    chosen = [[i, 9, -1] for i in text_rows.ids[6:]]
    some = text_rows.matrix([[], [], *chosen[2:]], 6)
    assert np.isneginf(some[:2]).all()
    assert some[2:].tolist() == text_rows.matrix(chosen, 6)[2:].tolist()


def test_models_and_metrics(serve_pair: ServePair) -> None:
    served = serve_pair("byte_level", "digits")
    student, _ = served.pair.tokenizers
    [card] = served.client.get(f"{served.url}/v1/models").json()["data"]
    assert (card["id"], card["root"]) == (student.vocabulary.model_id, "the-teacher")
    assert 1000 < card["max_model_len"] < 2048
    served.rows(student.encode(TEXT).ids.tolist())
    served.client.post(f"{served.url}/v1/completions", json={})
    metrics = served.client.get(f"{served.url}/metrics").text
    assert 'xtok_requests_total{route="/v1/completions",status="400"}' in metrics
    assert 'xtok_tokens_total{side="teacher"}' in metrics
    assert "xtok_teacher_seconds_sum" in metrics
    assert "xtok_own_seconds_sum" in metrics
    [rest] = [line for line in metrics.splitlines() if line.startswith("xtok_rest_sum")]
    assert float(rest.split()[1]) > 0
