"""A teacher that reads more than the student: preceding text only for the teacher."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import chat_families
import numpy as np
import pyarrow.parquet
import pytest
import torch
from loss_inputs import check_same_batch
from tiny_models import tiny_model

import xtok
from xtok import DistillationCollator, XtokError
from xtok.conversation.files import chat_record
from xtok.conversation.texts import read_samples
from xtok.conversation.writing import render_file
from xtok.inspection.doctor import contexts_in
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.training.batches import Batch, SideBatch
from xtok.training.collator import prepare
from xtok.training.running import run

TEXT = "The keeper lit 201 lamps."
CONTEXT = "Notes on the light: 201 lamps. "


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_only_the_teacher_reads_a_context(
    digits: Tokenizer, byte_level: Tokenizer, sentencepiece: Tokenizer, bos: bool, eos: bool
) -> None:
    collator = DistillationCollator(digits, [byte_level, sentencepiece], bos=bos, eos=eos)
    plain = collator([TEXT, TEXT])
    batch = collator([{"text": TEXT, "teacher_context": [CONTEXT, None]}, {"text": TEXT}])
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    check_same_batch(
        {**batch, "teachers": batch["teachers"][1:]}, {**plain, "teachers": plain["teachers"][1:]}
    )
    [side, usual] = batch["teachers"][0], plain["teachers"][0]
    ids = usual["input_ids"][0].tolist()
    context = byte_level.encode(CONTEXT).ids.tolist()
    assert side["input_ids"][0].tolist() == [*ids[:bos], *context, *ids[bos:]]
    labels = usual["labels"][0].tolist()
    assert side["labels"][0].tolist() == [*labels[:bos], *[-100] * len(context), *labels[bos:]]
    chunk, usual_chunk = (x["alignment"].teacher_chunk_id[0].tolist() for x in (side, usual))
    assert chunk == [*usual_chunk[:bos], *[-1] * len(context), *usual_chunk[bos:]]
    for name in ("student_chunk_id", "pair_valid", "pair_is_correct", "num_chunks"):
        assert torch.equal(getattr(side["alignment"], name), getattr(usual["alignment"], name))
    # The first token is predicted by the context, also where a teacher has no bos.
    first = int(
        prepare(batch)["teachers"][0]["shifted"].teacher_chunk_id[0, len(context) + bos - 1]
    )
    assert first == bos


def test_an_empty_context_has_no_effect(digits: Tokenizer, byte_level: Tokenizer) -> None:
    collator = DistillationCollator(digits, byte_level, max_length=6)
    for nothing in ("", None, [""], [None]):
        check_same_batch(collator([{"text": TEXT, "teacher_context": nothing}]), collator([TEXT]))


def test_the_context_is_cut_from_its_left_and_the_text_never(
    digits: Tokenizer, byte_level: Tokenizer
) -> None:
    context = byte_level.encode(CONTEXT).ids.tolist()
    sample = {"text": TEXT, "teacher_context": CONTEXT}
    [usual] = DistillationCollator(digits, byte_level)([TEXT])["teachers"]
    ids = usual["input_ids"][0].tolist()
    for room in range(-2, len(context) + 1):
        length = len(ids) + room
        collator = DistillationCollator(digits, byte_level, max_length=length)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            [side] = collator([sample])["teachers"]
        kept = context[len(context) - max(0, room) :]
        assert side["input_ids"][0].tolist() == [ids[0], *kept, *ids[1:]][:length]
        chunk = side["alignment"].teacher_chunk_id[0]
        usual_chunk = collator([TEXT])["teachers"][0]["alignment"].teacher_chunk_id[0]
        assert chunk.tolist() == [*usual_chunk[:1], *[-1] * len(kept), *usual_chunk[1:]]
        notes = [str(w.message) for w in caught]
        assert any("text that only teacher" in note for note in notes) == (room < len(context))
        assert any("sample 0 (to nothing)" in note for note in notes) == (room <= 0)


@pytest.mark.parametrize("name", ["student_text", "student_messages"])
def test_teacher_fields_that_are_not_used_are_noted(
    digits: Tokenizer, byte_level: Tokenizer, name: str
) -> None:
    """A collator ignores the fields that only `project` reads."""
    collator = DistillationCollator(digits, byte_level)
    with pytest.warns(UserWarning, match=f"the key '?{name}"):
        collator([{"text": TEXT, name: TEXT}])
    sample = {"text": TEXT, "teacher_context": [CONTEXT]}
    assert not DistillationCollator(digits, [])([sample])["teachers"]


@pytest.mark.parametrize("name", ["teacher_context", "teacher_messages"])
def test_a_context_of_stored_logprobs_is_an_error(byte_level: Tokenizer, name: str) -> None:
    row = {"input_ids": [65, 66], "realized_logprob": [None, -1.0], name: TEXT}
    with pytest.raises(XtokError, match=f"sample 0: {name} .* input_ids"):
        DistillationCollator(byte_level, byte_level)([row])


# Conversations

CHAT = [
    {"role": "user", "content": "How many lamps?"},
    {"role": "assistant", "content": "There are 201 lamps."},
    {"role": "user", "content": "Are they lit?"},
    {"role": "assistant", "content": "They are lit."},
]
SYSTEM = {"role": "system", "content": "The keeper lit 201 lamps."}
SHOWN = [
    {"role": "user", "content": "How many boats?"},
    {"role": "assistant", "content": "There are 2 boats."},
]
HINTED = [{**CHAT[0], "content": "How many lamps? (The keeper has 201.)"}, *CHAT[1:]]
WAYS: dict[str, Any] = {
    "a system text": [SYSTEM, *CHAT],
    "turns before": [*SHOWN, *CHAT],
    "a hint": HINTED,
    "other questions": [{**m, "content": "?"} if m["role"] == "user" else m for m in CHAT],
    "all of it": {"messages": [SYSTEM, *SHOWN, *HINTED]},
}  # fmt: skip
TEMPLATES = (
    "cohere2", "gemma3", "glm4moe", "lfm2", "llama3", "llama3_1", "phi3", "qwen2_5", "qwen3",
    "nemotron_3_nano",
)  # fmt: skip
quietly = pytest.mark.filterwarnings(
    "ignore:.*(the targets contain no end-of-turn token|writes today's date|omits):UserWarning"
)


@pytest.fixture(scope="module")
def family(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Return a byte-level tokenizer with the chat template of a family, or skip the test."""

    @cache
    def load(name: str) -> Tokenizer:
        if name not in chat_families.NAMES:
            pytest.skip("the templates are missing: run scripts/fetch_tokenizers.py")
        folder = tmp_path_factory.mktemp(name)
        chat_families.write(name, small / "small-byte-level", folder)
        return load_tokenizer(folder)

    return load


def given_to(way: Any) -> list[dict[str, str]]:
    """Return the messages with the context in one of the possible places."""
    messages: list[dict[str, str]] = way["messages"] if isinstance(way, dict) else way
    return messages


def read_row(side: SideBatch, row: int) -> tuple[list[int], list[int], list[int]]:
    """Return a row's ids, labels and chunks, without padding."""
    kept = side["attention_mask"][row] != 0
    columns = side["input_ids"], side["labels"], side["alignment"].teacher_chunk_id
    ids, labels, chunk = (values[row][kept].tolist() for values in columns)
    return ids, labels, chunk


def in_chunks(ids: list[int], chunk: list[int]) -> list[tuple[int, int]]:
    return [(number, i) for i, number in zip(ids, chunk, strict=True) if number >= 0]


@quietly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_only_the_answers_are_compared(
    family: Callable[[str], Tokenizer], digits: Tokenizer, name: str, way: str
) -> None:
    """Only one teacher reads more. Its ids differ, but its chunks and targets are equal."""
    teacher = family(name)
    collator = DistillationCollator(digits, [teacher, teacher], student_template="plain")
    batch = collator([{"messages": CHAT, "teacher_messages": [WAYS[way], None]}, CHAT[:2]])
    more, usual = batch["teachers"]
    check_same_batch({**batch, "teachers": [usual]}, drop_first(collator([CHAT, CHAT[:2]])))
    ids, labels, chunk = read_row(more, 0)
    usual_ids, usual_labels, usual_chunk = read_row(usual, 0)
    assert ids == xtok.render(teacher, given_to(WAYS[way])).ids.tolist() != usual_ids
    assert [i for i in labels if i >= 0] == [i for i in usual_labels if i >= 0]
    assert in_chunks(ids, chunk) == in_chunks(usual_ids, usual_chunk)
    for field in ("student_chunk_id", "pair_valid", "pair_is_correct", "num_chunks"):
        assert torch.equal(getattr(more["alignment"], field), getattr(usual["alignment"], field))
    assert_by_hand(prepare(batch)["teachers"][0], ids, chunk)


def drop_first(batch: Batch) -> Batch:
    return {**batch, "teachers": batch["teachers"][1:]}


def assert_by_hand(side: SideBatch, ids: list[int], chunk: list[int]) -> None:
    """Check the logits of a batch's first row at all positions that predict tokens of a chunk.

    They must equal the teacher's logits for the ids of that row alone.
    """
    model = tiny_model(int(side["input_ids"].max()) + 1, seed=1, sharp=0.5)
    with torch.no_grad():
        logits = run(model, side).logits[0]
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    positions = [t for t, number in enumerate(chunk[1:]) if number >= 0]
    shifted = side["shifted"].teacher_chunk_id[0]
    kept = np.flatnonzero(side["attention_mask"][0])
    assert np.flatnonzero(shifted >= 0).tolist() == [int(kept[t]) for t in positions]
    torch.testing.assert_close(logits[kept[positions]], expected[positions])


@quietly
def test_teacher_messages_equal_to_the_messages_have_no_effect(
    family: Callable[[str], Tokenizer], digits: Tokenizer
) -> None:
    options: Any = {"student_template": "plain", "max_length": 50}
    collator = DistillationCollator(digits, family("qwen3"), **options)
    expected = collator([CHAT])
    for same in (CHAT, {"messages": CHAT}, [CHAT], json.dumps(CHAT), [None]):
        check_same_batch(collator([{"messages": CHAT, "teacher_messages": same}]), expected)


@quietly
def test_the_conversation_before_an_answer_is_cut_from_its_left(
    family: Callable[[str], Tokenizer], digits: Tokenizer
) -> None:
    teacher, system = family("llama3"), {**SYSTEM, "content": 5 * SYSTEM["content"]}
    sample = {"messages": CHAT[:2], "teacher_messages": [system, *CHAT[:2]]}
    [side] = DistillationCollator(digits, teacher, student_template="plain")([sample])["teachers"]
    ids, _, chunk = read_row(side, 0)
    for cut in (1, 9, 30):
        end = len(ids) - cut
        collator = DistillationCollator(digits, teacher, student_template="plain", max_length=end)
        with pytest.warns(UserWarning, match="only teacher .*sample 0$"):
            [side] = collator([sample])["teachers"]
        cut_row = read_row(side, 0)
        assert cut_row[0] == [ids[0], *ids[cut + 1 :]]
        assert cut_row[2] == [chunk[0], *chunk[cut + 1 :]]


# On policy


@quietly
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_the_student(
    family: Callable[[str], Tokenizer], digits: Tokenizer, way: str, padding: str
) -> None:
    teacher, messages = family("qwen3"), given_to(WAYS[way])
    prompt, answer = (digits.encode(text).ids.tolist() for text in ("Lit?", CHAT[3]["content"]))
    row, size = [*prompt, *answer], len(prompt) + len(answer) + 3
    ids, mask, labels = (torch.full((2, size), fill) for fill in (0, 0, -100))
    for n, length in enumerate((len(row), len(row) - 2)):
        span = slice(size - length, size) if padding == "left" else slice(length)
        ids[n, span] = torch.tensor(row[:length])
        mask[n, span], labels[n, span] = 1, ids[n, span]
        labels[n, span][: len(prompt)] = -100
    collator = DistillationCollator(digits, [teacher, teacher])
    plain = collator.from_student_ids(ids, mask, labels)
    batch = collator.from_student_ids(
        ids, mask, labels, teacher_messages=[[messages, None], [None, messages[:-1]]]
    )
    rendered = xtok.render(teacher, messages[:-1], add_generation_prompt=True).ids.tolist()
    for n, (more, usual) in enumerate((batch["teachers"], batch["teachers"][::-1])):
        teacher_ids, _, chunk = read_row(more, n)
        usual_ids, _, usual_chunk = read_row(usual, n)
        begins = usual_ids.index(in_chunks(usual_ids, usual_chunk)[0][1])
        assert teacher_ids == [*rendered, *usual_ids[begins:]]
        assert in_chunks(teacher_ids, chunk) == in_chunks(usual_ids, usual_chunk)
        assert (usual_ids, usual_chunk) == read_row(plain["teachers"][n], n)[::2]


def test_texts_of_the_student(digits: Tokenizer, byte_level: Tokenizer) -> None:
    """The extra text may replace the prompt, or precede the text."""
    prompt, answer = (digits.encode(text).ids.tolist() for text in ("Lamps: ", "201."))
    ids = torch.tensor([[*prompt, *answer]])
    labels = ids.clone()
    labels[0, : len(prompt)] = -100
    collator = DistillationCollator(digits, byte_level)
    [bos] = byte_level.table.roles["bos"]
    context_ids = byte_level.encode(CONTEXT).ids.tolist()
    rows = [
        read_row(collator.from_student_ids(ids, ids > -1, labels, **options)["teachers"][0], 0)
        for options in ({}, {"teacher_context": [CONTEXT]}, {"teacher_messages": [CONTEXT]})
    ]
    theirs = rows[0][0]
    answered = [i for i in rows[0][1] if i >= 0]
    assert theirs[0] == bos
    assert rows[1][0] == [bos, *context_ids, *theirs[1:]]
    assert rows[2][0] == [bos, *context_ids, *answered]
    assert in_chunks(*rows[1][::2]) == in_chunks(*rows[2][::2]) == in_chunks(*rows[0][::2])


# Output of commands


def test_rendering_counts_the_extra_tokens_of_teachers(digits: Tokenizer) -> None:
    row = {"messages": CHAT, "teacher_messages": [[SYSTEM, *CHAT], None]}
    chats = [chat_record(record, "line") for record in (row, {"messages": CHAT})]
    result = render_file(digits, chats, BytesIO(), template="plain")
    own, teacher_size = (
        len(xtok.render(digits, m, template="plain").ids) for m in (CHAT, [SYSTEM, *CHAT])
    )
    assert (result.conversations, result.tokens) == (2, 2 * own)
    assert (result.teacher_differs, result.extra_tokens) == (1, teacher_size - own)


def test_contexts_of_text_files_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "ab"}, {"text": "ab", "teacher_context": "é"},
        {"text": "ab", "teacher_context": [None, "abcd"]}, {"text": "", "teacher_context": None},
    ]  # fmt: skip
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    table = pyarrow.Table.from_pylist([row | {"teacher_context": "abcd"} for row in rows[:2]])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("ab", encoding="utf-8")
    assert contexts_in(lines, "text") == (4, 2, 2.5)
    assert contexts_in(tmp_path / "b.parquet", "text") == (2, 2, 3.0)
    assert contexts_in(tmp_path / "c.txt", "text")[1] == 0
    lines.write_text(r'{"text": "a\ud800", "teacher_context": "\udc00b"}', encoding="utf-8")
    assert contexts_in(lines, "text") == (1, 1, 2.0)
    rows = [row for _, row in read_samples(tmp_path / "b.parquet", ("text", "other"))]
    assert rows == [{"text": "ab", "teacher_context": True}] * 2  # other columns are ignored


def test_a_context_follows_the_bos_of_a_text(digits: Tokenizer, byte_level: Tokenizer) -> None:
    [bos] = byte_level.table.roles["bos"]
    text = byte_level.table.control_names[bos] + TEXT
    collator = DistillationCollator(digits, byte_level)
    [side] = collator([{"text": text, "teacher_context": CONTEXT}])["teachers"]
    [usual] = DistillationCollator(digits, byte_level)(
        [{"text": TEXT, "teacher_context": CONTEXT}]
    )["teachers"]
    assert side["input_ids"].tolist() == usual["input_ids"].tolist()
