"""`project`: predictions of a teacher that reads more context than the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from chat_families import CHAT, TURNS
from stored_teachers import Row, predicted, write_neutral

import xtok
from xtok import ProjectConfig, XtokError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

TEXT, CONTEXT = "The keeper lit 201 lamps.", "Notes on the light: 201 lamps.\n"

LONG_CHAT = [
    {"role": "system", "content": "The tower has 201 steps."},
    {"role": "user", "content": "How many lamps?"},
    {"role": "assistant", "content": "There are 2 lamps."},
    *CHAT,
]


def projected(folder: Path, pair: Pair, back_map: Path, row: Row, **options: Any) -> Row:
    """Project a teacher's row, and return the student's row."""
    cache, output = write_neutral(folder / "a.parquet", [row]), folder / "b.parquet"
    xtok.project(cache, pair, output, ProjectConfig(**options), back_map=back_map)
    [read_row] = pyarrow.parquet.read_table(output).to_pylist()
    output.unlink()
    result: Row = read_row
    return result


def shifted(row: Row, ids: list[int], sources: list[int]) -> Row:
    """Return a row of other ids, with predictions copied from the positions `sources`; −1: none."""
    cache_row: Row = {"input_ids": ids}
    for name in ("topk_ids", "topk_logprobs"):
        cache_row[name] = [row[name][source] if source >= 0 else [] for source in sources]
    return cache_row


def predictions_of(row: Row) -> list[tuple[list[int], list[float], float | None]]:
    names = "topk_ids", "topk_logprobs", "realized_logprob"
    return [*zip(*(row[name] for name in names), strict=True)]


def test_predictions_after_a_context_equal_those_of_the_text(
    back: Pair, back_map: Path, tmp_path: Path
) -> None:
    """Context does not change the output if the predictions at the shared tokens are equal."""
    teacher = back.tokenizers[1]
    [bos] = teacher.table.roles["bos"]
    context, text = teacher.encode_batch([CONTEXT, TEXT])
    row = predicted([bos, *context, *text], len(teacher.table), 8)
    sources = [-1, *range(1 + len(context), len(row["input_ids"]))]
    usual = shifted(row, [bos, *text], sources)
    more = {**row, "text": CONTEXT + TEXT, "student_text": TEXT}
    student_row = projected(tmp_path, back, back_map, more)
    expected = projected(tmp_path, back, back_map, {**usual, "text": TEXT})
    assert student_row["input_ids"] == expected["input_ids"]
    assert predictions_of(student_row) == predictions_of(expected)
    assert all(student_row["topk_ids"][1:])


def test_token_across_the_context_has_no_prediction(
    back: Pair, back_map: Path, tmp_path: Path
) -> None:
    teacher = back.tokenizers[1]
    whole, end = "The keeper lit 201 lamps.", "eper lit 201 lamps."
    row = predicted(teacher.encode(whole).ids.tolist(), len(teacher.table), 8)
    student_row = projected(tmp_path, back, back_map, {**row, "text": whole, "student_text": end})
    student = back.tokenizers[0]
    assert student_row["input_ids"] == student.encode(end).ids.tolist()
    assert student_row["topk_ids"][-1]


def test_only_the_answers_of_a_conversation_have_predictions(
    back: Pair, back_map: Path, tmp_path: Path
) -> None:
    student, teacher = back.tokenizers
    templates: Any = {"student_template": TURNS, "teacher_template": TURNS}
    rendered, plain = (xtok.render(teacher, chat, template=TURNS) for chat in (LONG_CHAT, CHAT))
    row = predicted(rendered.ids.tolist(), len(teacher.table), 8)
    size = len(plain.ids) - int(np.flatnonzero(plain.assistant_mask)[0])
    sources = [-1] * (len(plain.ids) - size) + list(
        range(len(rendered.ids) - size, len(rendered.ids))
    )
    usual = shifted(row, plain.ids.tolist(), sources)
    more = {**row, "messages": LONG_CHAT, "student_messages": CHAT}
    student_row = projected(tmp_path, back, back_map, more, **templates)
    expected = projected(tmp_path, back, back_map, {**usual, "messages": CHAT}, **templates)
    ours = xtok.render(student, CHAT, template=TURNS)
    assert student_row["input_ids"] == ours.ids.tolist()
    assert student_row["loss_mask"] == ours.assistant_mask.tolist()
    assert any(student_row["topk_ids"])
    for ids, other, is_target in zip(
        student_row["topk_ids"], expected["topk_ids"], ours.assistant_mask, strict=True
    ):
        assert ids == (other if is_target else [])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"text": CONTEXT + TEXT, "student_text": "The keeper"}, "byte 9"),
        ({"student_text": TEXT}, "no text"),
        ({"student_messages": CHAT}, "no messages"),
        ({"messages": LONG_CHAT, "student_messages": CHAT * 3}, "contains 3 answers"),
        ({"messages": CHAT, "student_text": TEXT}, "no text"),
    ],
)
def test_error_names_columns_that_do_not_fit(
    back: Pair, back_map: Path, tmp_path: Path, byte_level: Tokenizer, change: Row, word: str
) -> None:
    ids = byte_level.encode(CONTEXT + TEXT).ids.tolist()
    if "messages" in change:
        ids = xtok.render(byte_level, change["messages"], template=TURNS).ids.tolist()
    row = predicted(ids, len(byte_level.table), 8) | change
    templates: Any = {"student_template": TURNS, "teacher_template": TURNS}
    with pytest.raises(XtokError, match=word):
        projected(tmp_path, back, back_map, row, **templates)
