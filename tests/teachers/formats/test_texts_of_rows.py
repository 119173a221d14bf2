"""The text of projected rows, its masks and its special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_teachers as teachers
from chat_families import CHAT
from make_maps import built
from projected_caches import (
    K,
    Project,
    predicted,
    text_of,
)
from stored_teachers import TEXTS, Row, read_documents

import xtok
from xtok.config import BACK_MAP, CacheFormat, ProjectConfig
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer


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
    responses: list[dict[str, Any]] = [getattr(teachers, f"{kind}_response")(row) for row in rows]
    lines = [{**line, **more} for line, more in zip(responses, masked, strict=False)]
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
    _, [masked] = project([{**rows[0], "loss_mask": [True] * size, "labels": [5]}])
    assert masked == {**first, "id": masked["id"]}  # the labels are not read


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
    theirs = xtok.render(byte_level, CHAT, template=dated, variables={"day": "26 Jul 2024"})
    chat: Row = {"id": "a", "messages": CHAT, **predicted(byte_level, theirs.ids.tolist())}
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


def test_a_response_without_tokens(byte_level: Tokenizer, project: Project, tmp_path: Path) -> None:
    """The response is an empty document, as in Parquet, alone or with other documents."""
    empty = {"id": "a", "choices": [{"prompt_logprobs": [], "prompt_token_ids": []}]}
    full = teachers.vllm_response(teachers.teacher_rows(byte_level, TEXTS[:1], K)[0], id="b")
    for lines in ([empty], [full, empty]):
        _, written = project(teachers.write_lines(tmp_path / "a.jsonl", lines))
        assert [row["id"] for row in written] == [line["id"] for line in lines]
        assert written[-1]["input_ids"] == written[-1]["topk_ids"] == []
