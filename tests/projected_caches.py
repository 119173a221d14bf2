"""Caches of every format, and projections of their rows."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import stored_teachers as teachers
from make_maps import built
from stored_teachers import Row

import xtok
from xtok.config import BACK_MAP, ProjectConfig
from xtok.errors import XtokError
from xtok.teachers.formats import neutral as neutral_format
from xtok.teachers.formats.documents import Documents
from xtok.teachers.project import Projected
from xtok.tokenizers import Tokenizer

K = 8
Project = Callable[..., tuple[Projected, list[Row]]]


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
        return teachers.write_lines(path / "a.jsonl", [teachers.sglang_response(r) for r in rows])
    if kind.startswith("distillkit"):
        compressed = kind.endswith("compressed")
        return teachers.write_distillkit(path / "a.parquet", rows, compressed=compressed, d=d)
    responses = [teachers.vllm_response(row) for row in rows]
    if kind == "vllm, a batch":  # one request with several prompts
        choices = [response["choices"][0] for response in responses]
        responses = [{"id": "all", "choices": choices}]
    if kind == "vllm, chat":  # the response has the prompt's fields, not its choices
        responses = [
            {"id": a["id"], **a["choices"][0], "choices": [{"index": 0}]} for a in responses
        ]
    written = teachers.write_lines(path / "a.jsonl", responses)
    if kind == "vllm, gz":
        written = path / "a.jsonl.gz"
        written.write_bytes(gzip.compress((path / "a.jsonl").read_bytes()))
    return written


def neutral(parts: list[Documents]) -> list[Row]:
    return [row for rows in parts for row in neutral_format.table(rows).to_pylist()]


def text_of(tokenizer: Tokenizer, row: Row) -> bytes:
    return b"".join(tokenizer.table[i] for i in row["input_ids"])


BOTH_PLAIN: dict[str, Any] = {"student_template": "plain", "teacher_template": "plain"}


def projecting(student: Tokenizer, teacher: Tokenizer, back_map: Path, folder: Path) -> Project:
    """Return a function that projects rows, or a cache.

    It returns the report and the rows of the output. `back_map` belongs to these tokenizers.
    """
    sides = student, teacher

    def run(
        given: Any, student: Tokenizer = student, teacher: Tokenizer = teacher, **options: Any
    ) -> tuple[Projected, list[Row]]:
        if (student, teacher) == sides:
            options["back_map"] = back_map
        options.setdefault("back_map", built(teacher, student, BACK_MAP))
        templates = {name: options.pop(name) for name in (*BOTH_PLAIN,) if name in options}
        if templates:
            options["config"] = replace(options.get("config", ProjectConfig()), **templates)
        path, out = given, folder / "out.parquet"
        if not isinstance(given, Path):
            path = teachers.write_neutral(folder / "a.parquet", given)
        projected = xtok.project(path, xtok.load_pair(student, teacher), out, **options)
        return projected, pyarrow.parquet.read_table(out).to_pylist()

    return run
