"""Rows of conversations are rendered with both templates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import stored_teachers as teachers
from chat_families import CHAT
from make_maps import built
from projected_caches import (
    BOTH_PLAIN,
    Project,
    predicted,
    text_of,
)
from stored_teachers import Row

import xtok
from xtok.config import BACK_MAP, CacheFormat, ProjectConfig
from xtok.tokenizers import Tokenizer

TAGGED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"


def test_conversations_are_rendered_on_both_sides(
    byte_level: Tokenizer, digits: Tokenizer, project: Project
) -> None:
    """Contents of these roles are targets; text of the template is not."""
    templates = {
        "teacher_template": "plain",
        "student_template": TAGGED.replace("<|im_end|>", "\n"),
    }
    teacher = xtok.render(byte_level, CHAT, template="plain")
    student = xtok.render(digits, CHAT, template=templates["student_template"])
    row = predicted(byte_level, teacher.ids.tolist())
    chats = [{"id": "a", "messages": CHAT, **row}, {"id": "b", "messages": None, **row}]
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
        "messages": CHAT,
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
    row = predicted(byte_level, xtok.render(byte_level, CHAT, template="plain").ids.tolist())
    chat = {"id": "chat", "messages": CHAT, "text": None, **row}
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
    row = predicted(byte_level, xtok.render(byte_level, CHAT, template="chatml").ids.tolist())
    cut = {name: row[name][:-6] for name in teachers.NAMES}
    other = {name: row[name][1:] for name in teachers.NAMES}  # without its first control token
    other["topk_ids"][0], other["topk_logprobs"][0] = [], []
    unknown = [{"id": "a", "messages": None, **predictions} for predictions in (row, cut, other)]
    _, [with_messages, without, short, spelled] = project(
        [{"id": "a", "messages": CHAT, **row}, *unknown],
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
    teacher = xtok.render(byte_level, [*CHAT, *later], template="chatml")
    turn = teacher.message_spans[3].whole
    assert turn is not None
    last = teacher.assistant_mask & (teacher.bounds[:-1] >= turn.bytes[0])
    row = {**predicted(byte_level, teacher.ids.tolist()), "loss_mask": last.tolist()}
    row["messages"] = [*CHAT, *later] if has_messages else None
    templates = {"teacher_template": "chatml", "student_template": TAGGED}
    for template in (TAGGED, TAGGED.replace("<|im_end|>", ".\n")):
        templates["student_template"] = template
        student = xtok.render(digits, [*CHAT, *later], template=template)
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
    row = predicted(byte_level, xtok.render(byte_level, CHAT, template="chatml").ids.tolist())
    words = b"There are 201 steps."
    _, [whole] = project([{"id": "a", **row}], teacher_template="chatml", student_template=TAGGED)
    assert text_of(digits, whole) == b"<user>How many steps?<assistant>" + words
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
    chat = xtok.render(byte_level, CHAT, template=THOUGHTLESS)
    row = predicted(byte_level, chat.ids.tolist()[: len(chat.ids) - num_missing])
    templates = {"teacher_template": THOUGHTLESS, "student_template": TAGGED}
    report, [student_row] = project([{"id": "a", **row}], **templates)
    expected = xtok.render(digits, CHAT, template=TAGGED)
    whole = text_of(digits, {"input_ids": expected.ids.tolist()})
    assert whole.startswith(text_of(digits, student_row))
    first = int(expected.assistant_mask.argmax())
    assert student_row["loss_mask"].index(True) == first
    assert student_row["input_ids"][:first] == expected.ids.tolist()[:first]
    if not num_missing:
        assert student_row["input_ids"] == expected.ids.tolist()
    assert report.notes == ()
