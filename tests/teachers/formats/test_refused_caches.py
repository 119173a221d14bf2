"""Caches with invalid rows, other tokenizers or contradictory metadata; normalization."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
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
from projected_caches import (
    K,
    Project,
    predicted,
    project_error,
    write,
)
from stored_teachers import TEXTS, Row, read_documents

import xtok
from xtok.config import BACK_MAP
from xtok.errors import XtokError
from xtok.teachers.formats import distillkit
from xtok.tokenizers import Tokenizer

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
    assert "is unknown, here and in the output" in notes[0]
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
    back_map = built(byte_level, digits, BACK_MAP)
    xtok.project([tmp_path / "a.parquet", full], pair, tmp_path / "out.parquet", back_map=back_map)
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


SAYS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": "0.7"}, "temperature=0.7"),
    "no temperature": ({"temperature": "warm"}, "temperature=warm"),
    "vocabulary": ({"vocab_size": "1000"}, "vocab_size=1000"),
    "small vocabulary": ({"vocab_size": "50"}, "vocab_size=50"),
    "k": ({"k": "4"}, "k=4"),
    "no k": ({"k": "many"}, "k=many"),
    "normalization": ({"normalized": "topk"}, "normalized=topk"),
}


@pytest.mark.parametrize("name", SAYS)
def test_footer_that_contradicts_the_rows_is_refused(
    name: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    about, words = SAYS[name]
    path = teachers.write_neutral(tmp_path / "a.parquet", rows, **about)
    assert words in project_error(path, byte_level, byte_level).message
    for vocab_size in ("1280", "2000"):
        as_it_is: dict[str, Any] = {"temperature": "1", "vocab_size": vocab_size, "k": "8"}
        as_it_is["normalized"] = "false"
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
