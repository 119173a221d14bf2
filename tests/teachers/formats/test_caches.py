"""Caches of every format: reading, writing, and errors."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import stored_teachers as teachers
import torch
import yaml
from make_maps import built
from naive_projecting import END, Small, top_k
from stored_teachers import TEXTS, Row, read_documents

import xtok
from xtok.config import BACK_MAP, CacheFormat, ProjectConfig
from xtok.errors import XtokError
from xtok.teachers.formats import axolotl, distillkit, vllm
from xtok.teachers.formats import neutral as neutral_format
from xtok.teachers.formats.caches import open_cache
from xtok.teachers.formats.columns import StudentSide
from xtok.teachers.formats.distillkit import Bin, Compression, decompressed_rows
from xtok.teachers.formats.documents import Documents
from xtok.teachers.project import Projected
from xtok.tokenizers import Tokenizer

K = 8


@pytest.fixture(scope="module")
def rows(byte_level: Tokenizer) -> list[Row]:
    return teachers.teacher_rows(byte_level, TEXTS, K)


Project = Callable[..., tuple[Projected, list[Row]]]


@pytest.fixture
def project(byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path) -> Project:
    """Project rows, or a cache; return the report and the rows of the output."""

    def run(
        given: Any, student: Tokenizer = digits, teacher: Tokenizer = byte_level, **options: Any
    ) -> tuple[Projected, list[Row]]:
        if student is digits and teacher is byte_level:
            options["back_map"] = back_map
        options.setdefault("back_map", built(teacher, student, BACK_MAP))
        templates = {name: options.pop(name) for name in (*BOTH_PLAIN,) if name in options}
        if templates:
            options["config"] = replace(options.get("config", ProjectConfig()), **templates)
        path, out = given, tmp_path / "out.parquet"
        if not isinstance(given, Path):
            path = teachers.write_neutral(tmp_path / "a.parquet", given)
        projected = xtok.project(path, xtok.load_pair(student, teacher), out, **options)
        return projected, pyarrow.parquet.read_table(out).to_pylist()

    return run


def predicted(tokenizer: Tokenizer, ids: Any) -> Row:
    return teachers.predicted(list(ids), tokenizer.vocabulary.vocab_size, K)


def project_error(path: Path, student: Tokenizer, teacher: Tokenizer, **options: Any) -> XtokError:
    """Check that a cache is an error and leaves no file; return the error."""
    options.setdefault("back_map", built(teacher, student, BACK_MAP))
    with pytest.raises(XtokError) as error:
        xtok.project(
            path, xtok.load_pair(student, teacher), path.with_name("out.parquet"), **options
        )
    assert [*path.parent.iterdir()] == [path]
    return error.value


def write(path: Path, kind: str, rows: list[Row], d: int) -> Path:
    if kind == "neutral":
        return teachers.write_neutral(path / "a.parquet", rows)
    if kind == "sglang":
        return teachers.write_lines(path / "a.jsonl", [teachers.sglang_answer(r) for r in rows])
    if kind.startswith("distillkit"):
        compressed = kind.endswith("compressed")
        return teachers.write_distillkit(path / "a.parquet", rows, compressed=compressed, d=d)
    answers = [teachers.vllm_answer(row) for row in rows]
    if kind == "vllm, a batch":  # one request with several prompts
        choices = [answer["choices"][0] for answer in answers]
        answers = [{"id": "all", "choices": choices}]
    if kind == "vllm, chat":  # the answer has the prompt's fields, not its choices
        answers = [{"id": a["id"], **a["choices"][0], "choices": [{"index": 0}]} for a in answers]
    written = teachers.write_lines(path / "a.jsonl", answers)
    if kind == "vllm, gz":
        written = path / "a.jsonl.gz"
        written.write_bytes(gzip.compress((path / "a.jsonl").read_bytes()))
    return written


def neutral(parts: list[Documents]) -> list[Row]:
    return [row for rows in parts for row in neutral_format.table(rows).to_pylist()]


KINDS = (
    *("neutral", "sglang", "distillkit", "distillkit, compressed"),
    *("vllm", "vllm, gz", "vllm, chat"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_all_formats_give_the_same_rows(
    kind: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path, kind, rows, byte_level.vocabulary.vocab_size)
    assert open_cache(path).kind == kind.partition(",")[0]
    read_rows = neutral(read_documents(path, byte_level))
    assert [{name: row[name] for name in rows[0]} for row in read_rows] == rows
    for row in read_rows:
        assert row["rest_logprob"][0] is row["realized_logprob"][0] is None
        own = [
            dict(zip(ids, logprobs, strict=True))[token]
            for token, ids, logprobs in list(zip(*map(row.get, teachers.NAMES), strict=True))[1:]
        ]
        assert row["realized_logprob"][1:] == own
        rests = [1 - sum(map(math.exp, logprobs)) for logprobs in row["topk_logprobs"][1:]]
        assert row["rest_logprob"][1:] == pytest.approx([math.log(r) for r in rests], rel=1e-4)


def test_a_batch_of_prompts_in_the_same_answer(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    read_rows = neutral(read_documents(write(tmp_path, "vllm, a batch", rows, 0), byte_level))
    assert [row["id"] for row in read_rows] == [f"all-{n}" for n in range(len(rows))]
    assert [row["topk_ids"] for row in read_rows] == [row["topk_ids"] for row in rows]


def test_several_completions_of_the_same_prompt(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """With `n: 2`, vLLM's answer contains the predictions of each prompt twice."""
    choices = [teachers.vllm_answer(row)["choices"][0] for row in rows for _ in range(2)]
    ids = [choice.pop("prompt_token_ids") for choice in choices[::2]]
    usage = {"prompt_tokens": sum(map(len, ids))}
    answer = {"id": "all", "choices": choices, "prompt": ids, "usage": usage}
    path = teachers.write_lines(tmp_path / "a.jsonl", [answer])
    read_rows = neutral(read_documents(path, byte_level))
    assert [row["id"] for row in read_rows] == [
        "all-0",
        "all-1",
        "all-2",
        "all-3",
        "all-4",
        "all-5",
    ]
    assert [row["topk_ids"] for row in read_rows] == [row["topk_ids"] for row in rows]


def test_large_row_groups_come_in_pieces(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """Memory depends neither on the file size nor on the sizes of row groups."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows * 50, row_group_size=300)
    sizes = [len(part.topk.ids) for part in read_documents(path, byte_level, candidates=4000)]
    assert len(sizes) > 10
    assert max(sizes) < 8000
    lines = write(tmp_path, "vllm", rows * 50, 0)
    parts = read_documents(lines, byte_level, candidates=4000)
    assert len(parts[0].topk.ids) < 8000
    assert len(neutral(parts)) == 300


def test_distillkits_compression_is_decoded() -> None:
    """Two exact values, a line through the deltas of the others, and residuals of four bits."""
    config = Compression(
        d=300, k=4, exact_k=2, exact_dtype="float16", polynomial_terms=[0, 1],
        residual_bins=[Bin("float32", 4, 2)],
    )  # fmt: skip
    data = np.array([-1.5, -0.5], "<f2").tobytes() + np.array([-0.25, -0.5, 0.125], "<f4").tobytes()
    data += bytes([0b1001_0110])  # 9 − 8 and 6 − 8
    values = np.frombuffer(data, np.uint8)
    ids = np.array(teachers.packed([f"{i:09b}" for i in (299, 0, 7, 256)]), np.uint8)
    both = [(np.array([0, len(a)]), a) for a in (ids, values)]
    candidates = decompressed_rows(both[0], both[1], config, "here")
    assert candidates[0].tolist() == [[299, 0, 7, 256]]
    # −1.5, then deltas −0.5, −0.25 + 0.125, −0.75 − 0.25
    assert candidates[1].tolist() == [[-1.5, -2.0, -2.125, -3.125]]
    with pytest.raises(XtokError, match=r"here: .*too short"):
        decompressed_rows(both[0], both[1], config._replace(exact_k=4), "here")


# Written files


STORED = Documents(
    top_k([[5, 6, 7], [4, 8]], [{}, {6: 0.5, 2: 0.25}, {9: 0.5}, {}, {}], None),
    {"id": pyarrow.array(["a", None])},
    ["row 0", "row 1"],
    np.array([False, True, True, True, True]),
)
TO = StudentSide(model="student", width=2, pad_id=99)


def rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return round(values, 4) if isinstance(values, float) else values


def test_axolotls_columns_predict_the_next_token() -> None:
    """Row i predicts token i + 1, renormalized, as in `DataCollatorForKD` of Axolotl 0.19."""
    columns = axolotl.table(STORED, TO).to_pydict()
    assert rounded([columns[name] for name in columns]) == [
        ["a", None],
        [[5, 6, 7], [4, 8]],
        [[1, 1, 1], [1, 1]],
        [[-100, 6, 7], [4, 8]],
        [[[6, 2], [9, 99], [99, 99]], [[99, 99], [99, 99]]],
        [[[-0.4055, -1.0986], [0.0, -1e9], [-1e9, -1e9]], [[-1e9, -1e9], [-1e9, -1e9]]],
        [[[1, 1], [1, 0], [0, 0]], [[0, 0], [0, 0]]],
    ]
    assert list(columns)[1:] == [
        *("input_ids", "attention_mask", "labels"),
        *("target_token_ids", "target_logprobs", "target_mask"),
    ]


def test_axolotls_columns_of_unlikely_candidates() -> None:
    """Their probabilities are 0 in float32, but the ratios of the probabilities are not."""
    topk = top_k([[5, 6]], [{}, {6: 0.5, 2: 0.5}], None)
    topk = topk._replace(logprobs=np.array([-200, -201], np.float32))
    table = axolotl.table(Documents(topk, {}, ["row 0"]), TO)
    assert rounded(table.to_pydict()["target_logprobs"]) == [[[-0.3133, -1.3133], [-1e9, -1e9]]]


def test_distillkits_columns_are_not_renormalized() -> None:
    """Row i predicts token i + 1, not renormalized; DistillKit masks row i by `labels[i]`."""
    columns = distillkit.table(STORED, TO).to_pydict()
    columns = {name: rounded(values) for name, values in columns.items()}
    assert columns == {
        "id": ["a", None],
        "input_ids": [[5, 6, 7], [4, 8]],
        "labels": [[5, 6, -100], [-100, -100]],
        "token_ids": [[[6, 2], [9, 99]], [[99, 99]]],
        "top_values": [[[-0.6931, -1.3863], [-0.6931, -1e4]], [[-1e4, -1e4]]],
    }


def test_vllms_lines_are_ordered_by_rank() -> None:
    """Entries are ordered by rank and include the text's own token; the first token has null."""
    realized = np.array([np.nan, -0.7, -0.6, np.nan, np.nan], np.float32)
    topk = STORED.topk._replace(realized_logprob=realized)
    first, second = map(json.loads, vllm.lines(STORED._replace(topk=topk), "student"))
    [choice] = first["choices"]
    assert (first["id"], first["model"], choice["prompt_token_ids"]) == ("a", "student", [5, 6, 7])
    nothing, *entries = choice["prompt_logprobs"]
    assert nothing is None
    assert [
        [(i, e["rank"], round(e["logprob"], 4)) for i, e in row.items()] for row in entries
    ] == [
        [("6", 1, -0.6931), ("2", 2, -1.3863)],
        [("7", 1, -0.6), ("9", 2, -0.6931)],
    ]
    assert second["choices"][0]["prompt_logprobs"] == [None, {}]


def test_vllms_lines_are_json() -> None:
    """NaN and infinity are null, also within lists."""
    columns = {
        "score": pyarrow.array([math.nan, 0.5]),
        "scores": pyarrow.array([[1.0, -math.inf], None]),
    }
    unknown = STORED.topk._replace(realized_logprob=np.full(5, np.nan, np.float32))
    lines = vllm.lines(STORED._replace(topk=unknown, columns=columns), "student")
    first, second = map(json.loads, lines)
    assert (first["score"], first["scores"]) == (None, [1.0, None])
    assert (second["score"], second["scores"]) == (0.5, None)


@pytest.mark.parametrize("to", ["neutral", "vllm", "distillkit"])
def test_equal_tokenizers_keep_every_row(
    to: CacheFormat, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    out = tmp_path / ("out.jsonl" if to == "vllm" else "out.parquet")
    config = ProjectConfig(top_k=K, to=to)
    pair = xtok.load_pair(byte_level, byte_level)
    back_map = built(byte_level, byte_level, BACK_MAP)
    projected = xtok.project(path, pair, out, config, back_map=back_map)
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert (projected.student_tokens, projected.targets) == (tokens, tokens - len(rows))
    written = neutral(read_documents(out, byte_level))
    assert [{name: row[name] for name in rows[0]} for row in written] == rows


# Rejected files


Change = Callable[[list[Row]], object]


def first_candidate(name: str, value: Any) -> Callable[[list[Row]], None]:
    def apply(rows: list[Row]) -> None:
        rows[1][name][3][0] = value

    return apply


def shift(by: int, *more: str) -> Change:
    """Shift the predictions, and the own values if their column is named."""

    def apply(rows: list[Row]) -> None:
        for row in rows:
            if more:
                row["realized_logprob"] = [
                    dict(zip(ids, logprobs, strict=True)).get(token)
                    for token, ids, logprobs in zip(*map(row.get, teachers.NAMES), strict=True)
                ]
            for name in ("topk_ids", "topk_logprobs", *more):
                row[name] = row[name][by:] + row[name][:by]

    return apply


# A change of the rows, and the position that the error names; "" if all rows are wrong.
BAD: dict[str, tuple[Change, str]] = {
    "candidate": (first_candidate("topk_ids", -1), "row 1, position 3"),
    "NaN": (first_candidate("topk_logprobs", math.nan), "row 1, position 3"),
    "lengths": (lambda rows: rows[1]["topk_ids"].pop(), "row 1"),
    "next": (shift(1), "row 0"),
    "last": (shift(-1), "row 0"),
    "realized, too": (shift(1, "realized_logprob"), "row 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_error_names_the_row_and_position_of_bad_values(
    name: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    apply, where = BAD[name]
    bad = json.loads(json.dumps(rows))
    apply(bad)
    path = teachers.write_neutral(tmp_path / "a.parquet", bad)
    message = project_error(path, byte_level, byte_level).message
    assert message.startswith(f"{path}, {where}: ")
    assert ("shifted" in message) == (where == "row 0")


def test_a_damaged_row_group(rows: list[Row], byte_level: Tokenizer, tmp_path: Path) -> None:
    """Only the data is damaged, not the file's footer."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    data = path.read_bytes()
    path.write_bytes(data[:3000] + b"\xff" * 200 + data[3200:])
    assert f"{path} cannot be read: " in project_error(path, byte_level, byte_level).message


def renormalized(rows: list[Row]) -> list[Row]:
    """Return rows with probabilities that sum to 1."""
    scaled: list[Row] = json.loads(json.dumps(rows))
    for row in scaled:
        for logprobs in row["topk_logprobs"]:
            total = sum(map(math.exp, logprobs))
            logprobs[:] = [value - math.log(total) for value in logprobs]
    return scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_renormalized_values_have_no_rest(
    dtype: torch.dtype, rows: list[Row], project: Project, tmp_path: Path
) -> None:
    """This includes values that were rounded."""
    notes: list[str] = []
    rows = renormalized(rows)
    for row in rows:
        row["topk_logprobs"] = [
            torch.tensor(values).to(dtype).tolist() for values in row["topk_logprobs"]
        ]
    projected, written = project(rows, note=notes.append)
    assert projected.mean_rest is None
    assert "the rest is unknown" in notes[0]
    schema = pyarrow.parquet.read_schema(tmp_path / "out.parquet")
    assert schema.metadata[b"normalized"] == b"topk"
    assert all(v is None for row in written for v in row["rest_logprob"])


def certain(row: Row, rest: float) -> Row:
    """Return a row with predictions that leave this rest."""
    others = row["input_ids"][1:]
    sure = np.log([1 - rest - 7e-6, *[1e-6] * (K - 1)]).tolist()
    ids = [[], *([(token + n) % 1280 for n in range(K)] for token in others)]
    return {**row, "topk_ids": ids, "topk_logprobs": [[], *[sure] * len(others)]}


def test_a_predictable_text_is_not_renormalized(
    rows: list[Row], project: Project, tmp_path: Path
) -> None:
    """A rest below any rounding error is an error, and the hint describes the fix."""
    path = tmp_path / "a.parquet"
    teachers.write_neutral(path, [certain(rows[0], 5e-4), *rows[1:]], row_group_size=1)
    assert project(path)[0].mean_rest is not None
    (tmp_path / "out.parquet").unlink()
    teachers.write_neutral(path, [certain(rows[0], 5e-6), *rows[1:]], row_group_size=1)
    with pytest.raises(XtokError) as raised:
        project(path)
    error, total = raised.value, sum(map(math.exp, rows[1]["topk_logprobs"][1]))
    assert error.message.startswith(f"{path}, row 1, position 1: ")
    assert f" {total:.4g}," in error.message
    assert "normalized=false" in error.hint
    shutil.rmtree(tmp_path / "out.parquet.checkpoint")
    teachers.write_neutral(path, [rows[1], certain(rows[0], 5e-6), *rows[2:]], row_group_size=1)
    assert project(path)[0].mean_rest is not None


def test_a_file_without_rows_next_to_renormalized_files(
    rows: list[Row], project: Project, byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    pair = xtok.load_pair(digits, byte_level)
    full = teachers.write_neutral(tmp_path / "b.parquet", renormalized(rows))
    table = pyarrow.parquet.read_table(full).slice(0, 0)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    xtok.project([tmp_path / "a.parquet", full], pair, tmp_path / "out.parquet")
    assert pyarrow.parquet.read_schema(tmp_path / "out.parquet").metadata[b"normalized"] == b"topk"


@pytest.mark.parametrize("kind", ["neutral", "vllm"])
def test_rows_of_the_whole_vocabulary_have_no_rest(
    kind: str, byte_level: Tokenizer, project: Project, tmp_path: Path
) -> None:
    """Candidates of servers sum to 1 if impossible tokens have the value −9999."""
    width = byte_level.vocabulary.vocab_size
    rows = renormalized(teachers.teacher_rows(byte_level, TEXTS, width))
    for row in rows:
        for logprobs in row["topk_logprobs"][1:]:
            logprobs[-1] = -9999.0
    path = write(tmp_path, kind, rows, width)
    notes: list[str] = []
    projected, _ = project(path, note=notes.append)
    assert all("do not start with" in note for note in notes)
    assert projected.mean_rest is not None
    for part in read_documents(path, byte_level):
        assert np.isneginf(part.topk.rest_logprob[part.topk.valid]).all()


@pytest.mark.parametrize("declaration", ["normalized", "rest_logprob"])
def test_declared_normalization_overrides_the_detection(
    declaration: str, rows: list[Row], project: Project, tmp_path: Path
) -> None:
    """The rows of a confident teacher sum to 1 as well."""
    sure = json.loads(json.dumps(rows))
    for row in sure:
        for logprobs in row["topk_logprobs"][1:]:
            logprobs[:] = [-1e-4, *(-12.0 - i for i in range(1, K))]
        if declaration == "rest_logprob":
            row["rest_logprob"] = [None] + [-11.0] * (len(row["input_ids"]) - 1)
    about: dict[str, Any] = {"normalized": "false"} if declaration == "normalized" else {}
    path = teachers.write_neutral(tmp_path / "a.parquet", sure, **about)
    assert project(path)[0].mean_rest is not None


def test_other_tokenizers_are_refused(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    about: dict[str, Any] = {"tokenizer": "them", "tokenizer_sha256": "0" * 64}
    path = teachers.write_neutral(tmp_path / "a.parquet", rows, **about)
    assert "belong to them" in project_error(path, digits, byte_level).message
    teachers.write_neutral(path, rows)
    assert project_error(path, byte_level, byte_level, back_map=back_map).parameter == "back_map"


def test_a_cache_without_realized_logprob_loses_targets(
    byte_level: Tokenizer, project: Project
) -> None:
    """A note names the missing column. With the column, no rows are lost."""
    ids = byte_level.segment(TEXTS[0].encode())
    row: Row = {"id": "a", **predicted(byte_level, ids)}
    owns: list[float | None] = [None] * len(ids)
    outside = range(1, len(ids), 2)  # positions with tokens that are not candidates
    for i in outside:
        at = row["topk_ids"][i].index(ids[i])
        del row["topk_ids"][i][at]
        owns[i] = row["topk_logprobs"][i].pop(at)
    without, _ = project([row])
    complete, _ = project([{**row, "realized_logprob": owns}])
    assert without.targets < complete.targets
    assert complete.notes == ()
    assert without.notes == (
        f"{len(outside)} tokens of the text are not candidates, and the cache has no "
        "realized_logprob for them; student tokens that start inside such a token have no target",
    )


# The text of the rows


def text_of(tokenizer: Tokenizer, row: Row) -> bytes:
    return b"".join(tokenizer.table[i] for i in row["input_ids"])


def test_text_and_other_columns_are_copied(
    byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    rows = teachers.teacher_rows(byte_level, TEXTS, K, with_text=True)
    for row in rows:
        row["score"] = [0.5, 1.0]
        row["loss_mask"] = [i > 3 for i in range(len(row["input_ids"]))]
    _, written = project(rows)
    for row, given in zip(written, rows, strict=True):
        assert [row[name] for name in ("id", "text", "score")] == [
            given["id"],
            given["text"],
            [0.5, 1],
        ]
        assert row["input_ids"] == digits.encode_batch([given["text"]])[0]
        begin = sum(map(len, map(byte_level.table.__getitem__, given["input_ids"][:4])))
        starts = np.cumsum([0, *map(len, map(digits.table.__getitem__, row["input_ids"][:-1]))])
        assert row["loss_mask"] == (starts >= begin).tolist()
    without = [{name: row[name] for name in ("id", *teachers.NAMES)} for row in rows]
    assert [row["topk_ids"] for row in project(without)[1]] == [row["topk_ids"] for row in written]


@pytest.mark.parametrize(
    ("name", "text", "targets"),
    [
        ("sentencepiece", "the keeper lit lamps", " lit"),  # adds a leading space
        ("composing", "ﬁ ﬁ ﬁ ﬁ so the keeper lit lamps", " lit"),  # normalizes ﬁ to two letters
    ],
)
def test_a_mask_of_normalized_text_marks_the_same_words(
    name: str, text: str, targets: str, digits: Tokenizer, request: pytest.FixtureRequest,
    project: Project,
) -> None:  # fmt: skip
    """The same words are targets if the teacher's text has other bytes before them."""
    other = request.getfixturevalue(name)
    for student, teacher in ((digits, other), (other, digits)):
        [ids] = teacher.encode_batch([text])
        row = {"text": text, **predicted(teacher, ids)}
        ends = np.cumsum([len(teacher.table[i]) for i in ids])
        start = int(ends[-1]) - len(" lit lamps")
        row["loss_mask"] = [bool(start < end <= start + len(targets)) for end in ends]
        back_map = built(teacher, student, BACK_MAP)
        _, [student_row] = project([row], student, teacher, back_map=back_map)
        kept = zip(student_row["input_ids"], student_row["loss_mask"], strict=True)
        assert b"".join(student.table[i] for i, is_kept in kept if is_kept) == targets.encode()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_lines_of_vllm_and_sglang_have_masks(
    kind: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """In lines, `loss_mask` and `labels` work as in Parquet; by default, all are targets."""
    masks = [[i % 3 == 0 for i in range(len(row["input_ids"]))] for row in rows]
    masked: list[dict[str, Any]] = [
        {"loss_mask": masks[0], "labels": None},
        {"loss_mask": None, "labels": [5 if kept else -100 for kept in masks[1]]},
        {"loss_mask": None, "labels": None},
    ]
    padding = [0, 0, *[1] * (len(rows[2]["input_ids"]) - 2)]
    masked[2]["attention_mask"] = padding
    answers: list[dict[str, Any]] = [getattr(teachers, f"{kind}_answer")(row) for row in rows]
    lines = [{**line, **more} for line, more in zip(answers, masked, strict=False)]
    path = teachers.write_lines(tmp_path / "a.jsonl", lines)
    [documents] = read_documents(path, byte_level)
    assert documents.loss_mask is not None
    bounds = documents.topk.bounds
    assert documents.loss_mask[: bounds[2]].tolist() == [*masks[0], *masks[1]]
    assert documents.loss_mask[bounds[2] :].all()
    third = documents.topk.token_ids[bounds[2] : bounds[3]]
    assert third.tolist() == rows[2]["input_ids"][2:]
    assert not {"loss_mask", "labels"} & documents.columns.keys()


def test_distillkit_labels_are_shifted_back(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """DistillKit shifts labels by one position; reading the output as a cache reverses this."""
    row = predicted(byte_level, byte_level.encode_batch(["the keeper lit lamps"])[0])
    row["loss_mask"] = [i in (2, 3, 5) for i in range(len(row["input_ids"]))]
    path = teachers.write_neutral(tmp_path / "a.parquet", [row])
    formats: list[CacheFormat] = ["neutral", "distillkit"]
    masks = []
    for to in formats:
        config, out = ProjectConfig(to=to), tmp_path / to / "out.parquet"
        xtok.project(path, xtok.load_pair(digits, byte_level), out, config, back_map=back_map)
        masks += [np.array(rows.loss_mask).tolist() for rows in read_documents(out, digits)]
    assert masks[0] == masks[1]
    assert sum(masks[0]) >= 3


def test_a_mask_of_control_tokens(
    byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """The token that ends a turn is a target; the next token is not. Neither has bytes."""
    marks = ["<|im_end|>", "<|im_start|>", "<|end_of_text|>"]
    ids, ours = (
        [i for part in ["lamps", *marks] for i in tokenizer.encode(part).ids.tolist()]
        for tokenizer in (byte_level, digits)
    )
    mask = [*[True] * (len(ids) - 2), False, False]
    _, [student_row] = project([{**predicted(byte_level, ids), "loss_mask": mask}])
    assert student_row["input_ids"] == ours
    assert student_row["loss_mask"] == [*[True] * (len(ours) - 2), False, False]


TAGGED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
BOTH_PLAIN: dict[str, Any] = {"student_template": "plain", "teacher_template": "plain"}


def test_conversations_are_rendered_on_both_sides(
    byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """Contents of these roles are targets; text of the template is not."""
    templates = {
        "teacher_template": "plain",
        "student_template": TAGGED.replace("<|im_end|>", "\n"),
    }
    teacher = xtok.render(byte_level, teachers.CHAT, template="plain")
    student = xtok.render(digits, teachers.CHAT, template=templates["student_template"])
    row = predicted(byte_level, teacher.ids.tolist())
    chats = [{"id": "a", "messages": teachers.CHAT, **row}, {"id": "b", "messages": None, **row}]
    _, [rendered, plain] = project(chats, **templates)
    assert rendered["input_ids"] == student.ids.tolist()
    assert rendered["loss_mask"] == student.assistant_mask.tolist()
    has_target = [bool(ids) for ids in rendered["topk_ids"]]
    within = np.zeros(len(student.ids), bool)
    for span in student.message_spans:
        assert span.content is not None
        within[slice(*span.content.tokens)] = True
    assert sum(has_target) >= 0.8 * within.sum()
    assert not any(np.array(has_target) & ~within)
    assert plain["input_ids"] == digits.encode_batch([teacher.text])[0]
    cut = {
        "id": "a",
        "messages": teachers.CHAT,
        **{name: row[name][:-6] for name in teachers.NAMES},
    }
    _, [short] = project([cut], **templates)
    assert short["input_ids"] == rendered["input_ids"]
    assert 0 < sum(map(bool, short["topk_ids"])) < sum(has_target)


@pytest.mark.parametrize("to", ["neutral", "axolotl", "distillkit", "vllm"])
def test_only_rows_with_messages_have_a_mask(
    to: CacheFormat, rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Conversations have a mask; all tokens of texts are targets."""
    row = predicted(
        byte_level, xtok.render(byte_level, teachers.CHAT, template="plain").ids.tolist()
    )
    chat = {"id": "chat", "messages": teachers.CHAT, "text": None, **row}
    plain = [{"messages": None, **row} for row in rows[:3]]
    path = teachers.write_neutral(tmp_path / "a.parquet", [chat, chat, *plain])
    out = tmp_path / "new" / ("out.jsonl" if to == "vllm" else "out.parquet")
    pair, config = xtok.load_pair(digits, byte_level), ProjectConfig(to=to, **BOTH_PLAIN)
    summary = xtok.project(path, pair, out, config, back_map=back_map)
    assert summary.documents == 5
    if to == "neutral":
        back = tmp_path / "back.parquet"
        config = ProjectConfig(**BOTH_PLAIN)
        forth = built(digits, byte_level, BACK_MAP)
        assert xtok.project(out, pair.reversed, back, config, back_map=forth).documents == 5


def test_conversations_are_recovered_from_ids(
    byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """Ids are read as messages; the student's text stops where the ids stop."""
    row = predicted(
        byte_level, xtok.render(byte_level, teachers.CHAT, template="chatml").ids.tolist()
    )
    cut = {name: row[name][:-6] for name in teachers.NAMES}
    other = {name: row[name][1:] for name in teachers.NAMES}  # without its first control token
    other["topk_ids"][0], other["topk_logprobs"][0] = [], []
    unknown = [{"id": "a", "messages": None, **predictions} for predictions in (row, cut, other)]
    _, [with_messages, without, short, spelled] = project(
        [{"id": "a", "messages": teachers.CHAT, **row}, *unknown],
        teacher_template="chatml",
        student_template=TAGGED,
    )
    assert {**without, "messages": with_messages["messages"]} == with_messages
    assert 10 < len(short["input_ids"]) < len(with_messages["input_ids"])
    assert text_of(digits, with_messages).startswith(text_of(digits, short))
    assert short["loss_mask"][-1]
    assert b"<user>" not in text_of(digits, spelled)


@pytest.mark.parametrize("has_messages", [True, False])
def test_a_mask_can_exclude_turns_of_a_conversation(
    has_messages: bool, byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """This resembles the response mask of a rollout. It includes the student's end of a turn."""
    later = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "In 2012."}]
    teacher = xtok.render(byte_level, [*teachers.CHAT, *later], template="chatml")
    turn = teacher.message_spans[3].whole
    assert turn is not None
    last = teacher.assistant_mask & (teacher.bounds[:-1] >= turn.bytes[0])
    row = {**predicted(byte_level, teacher.ids.tolist()), "loss_mask": last.tolist()}
    row["messages"] = [*teachers.CHAT, *later] if has_messages else None
    templates = {"teacher_template": "chatml", "student_template": TAGGED}
    for template in (TAGGED, TAGGED.replace("<|im_end|>", ".\n")):
        templates["student_template"] = template
        student = xtok.render(digits, [*teachers.CHAT, *later], template=template)
        _, [student_row] = project([row], **templates)
        assert student_row["input_ids"] == student.ids.tolist()
        our_turn = student.message_spans[3].whole
        assert our_turn is not None
        expected = student.assistant_mask & (np.arange(len(student.ids)) >= our_turn.tokens[0])
        assert student_row["loss_mask"] == expected.tolist()
        assert (student.assistant_mask & ~expected).any()


def test_rows_are_spelled_if_the_template_drops_an_answer(
    byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """As in `serve`, ids are spelled as text if the student's template would omit their answer."""
    row = predicted(
        byte_level, xtok.render(byte_level, teachers.CHAT, template="chatml").ids.tolist()
    )
    words = b"There were 201 of them in 2012."
    _, [whole] = project([{"id": "a", **row}], teacher_template="chatml", student_template=TAGGED)
    assert text_of(digits, whole) == b"<user>How many steps did it take?<assistant>" + words
    assert "loss_mask" in whole
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
    ids_only = {"id": "a", **row}
    report, [spelled] = project([ids_only], teacher_template="chatml", student_template=users)
    assert text_of(digits, spelled).endswith(b"assistant\n" + words + b"\n")
    assert "loss_mask" not in spelled
    assert any("could not be parsed as conversations" in note for note in report.notes)
    row["loss_mask"] = [True] * len(row["input_ids"])
    report, _ = project([{"id": "a", **row}], teacher_template="chatml", student_template=users)
    assert report.notes == ()


THOUGHTLESS = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>

</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.mark.parametrize("num_missing", [0, 6])
def test_an_empty_thought_belongs_to_the_prompt_without_thinking(
    num_missing: int, byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """As in Qwen 3: the student's template writes no thought, so the thought is no target."""
    chat = xtok.render(byte_level, teachers.CHAT, template=THOUGHTLESS)
    row = predicted(byte_level, chat.ids.tolist()[: len(chat.ids) - num_missing])
    templates = {"teacher_template": THOUGHTLESS, "student_template": TAGGED}
    report, [student_row] = project([{"id": "a", **row}], **templates)
    expected = xtok.render(digits, teachers.CHAT, template=TAGGED)
    whole = text_of(digits, {"input_ids": expected.ids.tolist()})
    assert whole.startswith(text_of(digits, student_row))
    first = int(expected.assistant_mask.argmax())
    assert student_row["loss_mask"].index(True) == first
    assert student_row["input_ids"][:first] == expected.ids.tolist()[:first]
    if not num_missing:
        assert student_row["input_ids"] == expected.ids.tolist()
    assert report.notes == ()


def test_labels_replace_the_mask_of_each_row(project: Project, rows: list[Row]) -> None:
    """Two caches that were concatenated can have different columns."""
    size, last = len(rows[0]["input_ids"]), len(rows[1]["input_ids"])
    half = [-100] * (last // 2) + rows[1]["input_ids"][last // 2 :]
    both = [
        {**rows[0], "loss_mask": [True] * size, "labels": None},
        {**rows[1], "loss_mask": None, "labels": half},
    ]
    _, [first, second] = project(both)
    assert all(first["loss_mask"])
    assert 0 < sum(second["loss_mask"]) < len(second["loss_mask"])
    _, [alone] = project([{**rows[1], "labels": half}])
    assert second["loss_mask"] == alone["loss_mask"]


def test_a_teacher_without_its_bos_is_noted(byte_level: Tokenizer, project: Project) -> None:
    bos = byte_level.bos_id
    assert bos is not None
    [ids] = byte_level.encode_batch([TEXTS[0]])
    with_bos, without = predicted(byte_level, [bos, *ids]), predicted(byte_level, ids)
    for rows, count in (([with_bos] * 2, 0), ([with_bos, without], 1)):
        notes: list[str] = []
        project(rows, note=notes.append)
        words = f"1 of the first 2 rows do not start with <|begin_of_text|> (id {bos})"
        assert [words in note for note in notes] == [True] * count


@pytest.mark.parametrize("has_text", [True, False])
def test_a_teacher_with_two_bos_is_noted(
    byte_level: Tokenizer, digits: Tokenizer, project: Project, has_text: bool
) -> None:
    bos = byte_level.bos_id
    assert bos is not None
    row = predicted(byte_level, [bos, bos, *byte_level.encode_batch([TEXTS[0]])[0]])
    notes: list[str] = []
    _, [student_row] = project(
        [{**row, **({"text": TEXTS[0]} if has_text else {})}], note=notes.append
    )
    [note] = [note for note in notes if "bos token twice" in note]
    assert "1 of the first 1 rows" in note
    if has_text:
        library = digits.library(TEXTS[0])["input_ids"]
        assert student_row["input_ids"] == library


def test_templates_that_write_the_date_are_noted(byte_level: Tokenizer, project: Project) -> None:
    """The note precedes the projection, and also covers ids that were rendered on another day."""
    dated = "{{ day if day is defined else strftime_now('%d %b %Y') }}{% for m in messages %}"
    dated += "{{ m.content }}\n{% endfor %}"
    theirs = xtok.render(
        byte_level, teachers.CHAT, template=dated, variables={"day": "26 Jul 2024"}
    )
    chat: Row = {"id": "a", "messages": teachers.CHAT, **predicted(byte_level, theirs.ids.tolist())}
    notes: list[str] = []
    options = {"note": notes.append, "teacher_template": dated, "student_template": dated}
    project([{**chat, "chat_template_kwargs": {"day": "26 Jul 2024"}}], **options)
    assert not any("date" in note for note in notes)
    with pytest.raises(XtokError, match="messages") as error:
        project([chat], **options)
    said = "the template writes today's date; set the variable day to get the same ids every day "
    said += "(in a file, set it in the chat_template_kwargs of each conversation)"
    assert error.value.hint.endswith(f"; {said}")
    assert sum(note.endswith(said) for note in notes) == 1


@pytest.mark.parametrize(
    ("name", "other"), [("digits", "sentencepiece"), ("sentencepiece", "digits")]
)
def test_a_space_before_the_text(
    name: str, other: str, tokenizers: dict[str, Tokenizer], project: Project
) -> None:
    """SentencePiece adds the space, and the tokens after it have predictions."""
    student, teacher = tokenizers[name], tokenizers[other]
    text = "The lighthouse stands on the last rock"
    [ids], [ours] = teacher.encode_batch([text]), student.encode_batch([text])
    spaced = tokenizers["sentencepiece"].table[(ours if name == "sentencepiece" else ids)[0]]
    assert spaced.startswith(b" ")
    bos, eos = (teacher.table.roles[role][0] for role in ("bos", "eos"))
    row = predicted(teacher, [bos, *ids, eos])
    back_map = built(teacher, student, BACK_MAP)
    _, [student_row] = project(
        [{"id": "a", "text": text, **row}], student, teacher, back_map=back_map
    )
    assert student_row["input_ids"][1:-1] == ours
    assert student_row["input_ids"][-1] == student.table.roles["eos"][0]
    assert all(student_row["topk_ids"][-5:])
    assert sum(map(bool, student_row["topk_ids"])) > len(student_row["topk_ids"]) / 2


def test_a_space_that_both_put_before_the_text(sentencepiece: Tokenizer, project: Project) -> None:
    """Both sides have the same text, so predictions of equal tokenizers do not change."""
    text = "The lighthouse stands on the last rock"
    [ids] = sentencepiece.encode_batch([text])
    row = predicted(sentencepiece, ids)
    _, [student_row] = project([{"id": "a", "text": text, **row}], sentencepiece, sentencepiece)
    assert student_row["input_ids"] == row["input_ids"]
    assert student_row["topk_ids"] == row["topk_ids"]


def test_a_text_that_begins_and_ends_with_special_tokens(
    byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """Ids equal the library's ids, with and without special tokens around the text."""
    eos = byte_level.table.roles["eos"][0]
    text = f"The lighthouse{byte_level.table.control_names[eos]}"
    text = f"{byte_level.table.control_names[eos]}{text}"
    [ids] = byte_level.encode_batch([text])
    assert ids[0] == ids[-1] == eos
    for own in (ids, [eos, *ids], [eos, *ids, eos]):
        _, [student_row] = project([{"id": "a", "text": text, **predicted(byte_level, own)}])
        assert text_of(digits, student_row) == b"The lighthouse"
        assert student_row["input_ids"].count(digits.table.roles["eos"][0]) == own.count(eos)


def test_an_answer_without_tokens(byte_level: Tokenizer, project: Project, tmp_path: Path) -> None:
    """The answer is an empty document, as in Parquet, alone or with other documents."""
    empty = {"id": "a", "choices": [{"prompt_logprobs": [], "prompt_token_ids": []}]}
    full = teachers.vllm_answer(teachers.teacher_rows(byte_level, TEXTS[:1], K)[0], id="b")
    for lines in ([empty], [full, empty]):
        _, written = project(teachers.write_lines(tmp_path / "a.jsonl", lines))
        assert [row["id"] for row in written] == [line["id"] for line in lines]
        assert written[-1]["input_ids"] == written[-1]["topk_ids"] == []


def test_the_config_of_another_cache_is_not_replaced(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """A compressed cache requires its own config. An equal config can be written again."""
    path = teachers.write_distillkit(tmp_path / "a.parquet", rows, compressed=True, d=4096)
    config = tmp_path / "compression_config.yaml"
    before = config.read_bytes()
    pair, to = xtok.load_pair(digits, byte_level), ProjectConfig(to="distillkit")
    with pytest.raises(XtokError, match=str(config)):
        xtok.project(path, pair, tmp_path / "out.parquet", to, back_map=back_map)
    assert config.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"a.parquet", "compression_config.yaml"}
    out = tmp_path / "new" / "out.parquet"
    for _ in range(2):
        xtok.project(path, pair, out, to, back_map=back_map)
    assert {p.name for p in out.parent.iterdir()} == {"out.parquet", "compression_config.yaml"}


def test_the_first_token_has_no_prediction(
    sentencepiece: Tokenizer, ranks: Tokenizer, project: Project
) -> None:
    """The student has no BOS token, and the teacher's text begins with one."""
    ids = [sentencepiece.table.roles["bos"][0], *sentencepiece.segment("The lighthouse")]
    assert "bos" not in ranks.table.roles
    _, [student_row] = project([{"id": "a", **predicted(sentencepiece, ids)}], ranks, sentencepiece)
    assert student_row["topk_ids"][0] == []
    assert student_row["rest_logprob"][0] is None
    assert any(student_row["topk_ids"])


def test_bits_per_byte_of_the_teacher(
    rows: list[Row], byte_level: Tokenizer, project: Project
) -> None:
    """The unit is −log₂ p of the text's own tokens per byte."""
    report, _ = project(rows)
    nats = num_bytes = 0.0
    for row in rows:
        for token, ids, logprobs in list(zip(*map(row.get, teachers.NAMES), strict=True))[1:]:
            nats -= dict(zip(ids, logprobs, strict=True))[token]
            num_bytes += len(byte_level.table[token])
    assert report.teacher_bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes)
    assert not report.teacher_is_bound
    assert report.notes == ()


# Metadata of files


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("kind", "mask"),
    [("neutral", True), ("neutral", False), ("distillkit", False), ("vllm", False)],
)
def test_padding_is_not_text(
    kind: str, side: str, mask: bool, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """An attention mask marks padding; without it, the pad token does."""
    [pad] = byte_level.table.roles["pad"]
    row, count = rows[0], 3
    size = len(row["input_ids"])
    several = {"input_ids": [pad] * count, "topk_ids": [[]] * count, "topk_logprobs": [[]] * count}
    padded: Row = {"id": "row 0"}
    for name, more in several.items():
        padded[name] = row[name] + more if side == "right" else more + row[name]
    if kind == "distillkit":  # DistillKit adds one pad token after a text, and a row for it
        for name, last in (("topk_ids", [5, 6]), ("topk_logprobs", [-0.5, -1.0])):
            padded[name][-count if side == "right" else 0] = last
            padded[name] = [x if n and x else [*range(8)] for n, x in enumerate(padded[name])]
        padded["topk_logprobs"] = [
            [-2.5] * len(logprobs) if logprobs == [*range(8)] else logprobs
            for logprobs in padded["topk_logprobs"]
        ]
    if mask:
        masks = [[1] * size, [0] * count]
        first, last = masks if side == "right" else masks[::-1]
        padded["attention_mask"] = first + last
    path = write(tmp_path, kind, [padded], 1280)
    [documents] = read_documents(path, byte_level)
    assert documents.topk.token_ids.tolist() == row["input_ids"]
    assert documents.topk.valid.tolist() == [False] + [True] * (size - 1)
    assert neutral([documents])[0]["topk_ids"] == row["topk_ids"]


class PaddedByBos(Small):
    """Return a small vocabulary with a single token for pad and bos."""

    def declared_roles(self) -> dict[str, dict[int, str]]:
        return {"bos": {END: "the file"}, "pad": {END: "the file"}, "eos": {}}


def test_padding_by_the_bos_token_leaves_the_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(PaddedByBos([b"a", b"b", b"c"], merges=False), model_id="small")
    ids = [*[END] * 3, 1, 2, 3, *[END] * 2]
    rows = [[], [], [], [1], [2], [3], [], []]
    logprobs = [[-0.5] * len(row) for row in rows]
    path = teachers.write_neutral(
        tmp_path / "a.parquet", [{"input_ids": ids, "topk_ids": rows, "topk_logprobs": logprobs}]
    )
    [documents] = read_documents(path, tokenizer)
    assert documents.topk.token_ids.tolist() == [END, 1, 2, 3]
    assert documents.topk.valid.tolist() == [False, True, True, True]


def test_masks_are_written_to_vllms_lines_and_read_again(
    rows: list[Row], digits: Tokenizer, byte_level: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """The mask is the same after it is read back."""
    masked = {**rows[0], "loss_mask": [i > 4 for i in range(len(rows[0]["input_ids"]))]}
    path = teachers.write_neutral(tmp_path / "a.parquet", [masked])
    masks = []
    formats: list[CacheFormat] = ["vllm", "neutral"]
    for to in formats:
        out = tmp_path / f"out.{'jsonl' if to == 'vllm' else 'parquet'}"
        xtok.project(
            path, xtok.load_pair(digits, byte_level), out, ProjectConfig(to=to), back_map=back_map
        )
        [documents] = read_documents(out, digits)
        masks.append(np.array(documents.loss_mask).tolist())
    assert masks[0] == masks[1]
    assert 0 < sum(masks[0]) < len(masks[0])


SAYS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": "0.7"}, "temperature=0.7"),
    "no temperature": ({"temperature": "warm"}, "temperature=warm"),
    "vocabulary": ({"vocab_size": "1000"}, "vocab_size=1000"),
    "k": ({"k": "4"}, "k=4"),
}


@pytest.mark.parametrize("name", SAYS)
def test_footer_that_contradicts_the_rows_is_refused(
    name: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    about, words = SAYS[name]
    path = teachers.write_neutral(tmp_path / "a.parquet", rows, **about)
    assert words in project_error(path, byte_level, byte_level).message
    as_it_is: dict[str, Any] = {"temperature": "1", "vocab_size": "1280", "k": "8"}
    read_documents(teachers.write_neutral(path, rows, **as_it_is), byte_level)


DISTILLKIT: dict[str, tuple[bool, dict[str, Any], str]] = {
    "a row too many": (False, {"token_ids": 1, "top_values": 1}, "rows"),
    "a row too few": (False, {"token_ids": -1, "top_values": -1}, "rows"),
    "no ids": (False, {"input_ids": None}, "no input_ids"),
    "k of plain rows": (False, {"k": 4, "exact_k": 4}, "k: 4"),
    "d of plain rows": (False, {"d": 400}, "d=400"),
    "fewer candidates": (True, {"k": 4, "exact_k": 4}, "too long"),
    "smaller ids": (True, {"d": 448}, "too long"),
    "other floats": (True, {"exact_dtype": "float16"}, "too long"),
    "more candidates": (True, {"k": 9, "exact_k": 9}, "too short"),
}


@pytest.mark.parametrize("name", DISTILLKIT)
def test_distillkits_config_contradicts_the_rows(
    name: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    compressed, changes, words = DISTILLKIT[name]
    d, path = byte_level.vocabulary.vocab_size, tmp_path / "a.parquet"
    teachers.write_distillkit(path, rows, compressed=True, d=d)
    config = tmp_path / "compression_config.yaml"
    teachers.write_distillkit(path, rows, compressed=compressed, d=d)
    read_documents(path, byte_level)
    config_changes = {n: v for n, v in changes.items() if n in distillkit.Compression._fields}
    if config_changes:
        config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **config_changes}))
    else:
        table = pyarrow.parquet.read_table(path).to_pylist()
        for column, by in changes.items():
            values = table[1][column]
            table[1][column] = by and ([*values, values[-1]] if by > 0 else values[:-1])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    with pytest.raises(XtokError, match=words) as error:
        read_documents(path, byte_level)
    assert error.value.message.startswith(str(path))
