"""Equal rows give equal texts, for any container of the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from checks import error_of

import xtok
from xtok.conversation import render
from xtok.conversation.files import ChatRecord, read_conversations, read_row
from xtok.conversation.texts import read_samples
from xtok.errors import XtokError
from xtok.tokenizers import load_tokenizer

Read = Callable[[Path, Sequence[Any]], list[Any]]
BYTES = load_tokenizer("bytes")


def conversations(path: Path) -> list[Any]:
    return fields_of(read_conversations(path))


def fields_of(records: Iterable[Any]) -> list[Any]:
    return [(r.messages, r.tools, r.variables, r.teacher_messages) for r in records]


def array(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "a.json"
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


def one_line(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "b.json"
    path.write_text("\ufeff" + json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


def lines(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(folder: Path, rows: Sequence[Any], strings: Any = None) -> Path:
    path = folder / "a.parquet"
    objects = [row if isinstance(row, dict) else {"messages": row} for row in rows]
    names = dict.fromkeys(name for row in objects for name in row)
    columns = {name: [row.get(name) for row in objects] for name in names}
    table = pyarrow.table(columns)
    if strings is not None:
        fields = [f.with_type(strings) if f.type == pyarrow.string() else f for f in table.schema]
        table = table.cast(pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, path)
    return path


def from_python(_: Path, rows: Sequence[Any]) -> list[Any]:
    records = [read_row(row, f"row {n}") for n, row in enumerate(rows)]
    assert all(isinstance(record, ChatRecord) for record in records)
    return fields_of(records)


def from_datasets(folder: Path, rows: Sequence[Any]) -> list[Any]:
    """Return rows from `datasets`, which fills missing fields with null."""
    from datasets import Dataset

    table = pyarrow.parquet.read_table(parquet(folder, rows))
    return from_python(folder, [drop(row) for row in Dataset(table)])


def drop(value: Any) -> Any:
    """Return a value without null fields, which are also omitted from Parquet files."""
    if isinstance(value, dict):
        return {k: drop(v) for k, v in value.items() if v is not None}
    return [drop(v) for v in value] if isinstance(value, list) else value


CONTAINERS: dict[str, Read] = {
    "JSON array": lambda folder, rows: conversations(array(folder, rows)),
    "JSON array in a line": lambda folder, rows: conversations(one_line(folder, rows)),
    "JSON lines": lambda folder, rows: conversations(lines(folder, rows)),
    "Parquet": lambda folder, rows: conversations(parquet(folder, rows)),
    "datasets": from_datasets,
    "Python": from_python,
}

ASK, SEVEN = {"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 3}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "add", "content": "7", "tool_call_id": "c1"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT_ROW = {"messages": [ASK, SEVEN]}
TEXTS = ["a", " a\n", "é", "🌊", "a\u2028b", "\ufeffa", "{}", "null", "a\0b", "\r\n", "x" * 5000]

ROWS: list[Any] = [
    *({"messages": [ASK, {"role": "assistant", "content": text}]} for text in TEXTS),
    *({"messages": [{"role": role, "content": "x"}]} for role in ("system", "user", "a b")),
    [ASK], [ASK, SEVEN], [ASK, SEVEN, ASK],
    {"messages": json.dumps([ASK, SEVEN])},
    {"messages": [ASK, CALLING, RESULT, SEVEN]},
    {"messages": [ASK, {**CALLING, "content": "."}]},
    {"messages": [ASK, {**SEVEN, "weight": 0}]},
    {"messages": [ASK, {**SEVEN, "reasoning_content": "3 and 4"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {**CHAT_ROW, "tools": [TOOL]}, {**CHAT_ROW, "tools": json.dumps([TOOL])},
    {**CHAT_ROW, "tools": None},
    {**CHAT_ROW, "system": "Be brief."}, {**CHAT_ROW, "system": " "}, {**CHAT_ROW, "system": None},
    {**CHAT_ROW, "documents": [{"title": "t", "text": "d"}]},
    {**CHAT_ROW, "chat_template_kwargs": {"enable_thinking": True}},
    {**CHAT_ROW, "chat_template_kwargs": '{"date": "x"}'},
    {**CHAT_ROW, "teacher_messages": [SEVEN]}, {**CHAT_ROW, "teacher_messages": "[]"},
    {**CHAT_ROW, "text": None}, {**CHAT_ROW, "id": 7, "source": "x"}, {**CHAT_ROW, "mood": [1, 2]},
    {**CHAT_ROW, "score": 1.5}, {**CHAT_ROW, "ok": True}, {**CHAT_ROW, "role": "x"},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_equal_rows_are_equal_in_every_container(number: int, tmp_path: Path) -> None:
    """Two rows share a file, so Parquet and `datasets` add nulls for missing fields."""
    rows = [ROWS[number], ROWS[(number + 7) % len(ROWS)]]
    if (
        isinstance(rows[0], dict) != isinstance(rows[1], dict)
        or len({type(row["messages"] if isinstance(row, dict) else row) for row in rows}) > 1
    ):
        rows = rows[:1]
    by_container = {}
    for name, read in CONTAINERS.items():
        try:
            by_container[name] = read(tmp_path, rows)
        except pyarrow.ArrowInvalid:  # columns have one type
            by_container[name] = read(tmp_path, rows[:1])
    expected = by_container["Python"]
    assert len(expected) == len(rows)
    for name, values in by_container.items():
        assert values == expected[: len(values)], name


SHAREGPT = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
WRONG: list[tuple[Any, str]] = [
    ({"conversations": SHAREGPT}, "only: conversations"),
    ({"messages": []}, "the list of messages is empty"),
    ({"messages": 3}, "the value of 'messages' is not a list"),
    ({"messages": "x"}, "the value of 'messages': not JSON"),
    ({**CHAT_ROW, "tools": 3}, "the value of 'tools' is not a list"),
    ({**CHAT_ROW, "system": ["x"]}, "the value of 'system' is not a text"),
]


@pytest.mark.parametrize(("row", "problem"), WRONG)
def test_an_error_names_the_row_in_every_container(
    row: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    for name, read in CONTAINERS.items():
        message = error_of(lambda read=read: read(tmp_path, [row]))  # type: ignore[misc]
        assert problem in message, name
        where = "line 1" if name == "JSON lines" else "row 0"
        assert where in message, name


@pytest.mark.filterwarnings("ignore:bytes")
def test_texts_and_conversations_in_the_same_file(tmp_path: Path) -> None:
    """`datasets` and pyarrow return both fields for each row; one of them is null."""
    rows: list[dict[str, Any]] = [{"text": "Two boats."}, CHAT_ROW]
    collator = xtok.DistillationCollator(
        "bytes", "bytes", student_template="plain", teacher_templates=["plain"]
    )
    expected = collator(rows)["labels"].tolist()
    for write in (array, lines, parquet):
        samples = [sample for _, sample in read_samples(write(tmp_path, rows))]
        assert collator(samples)["labels"].tolist() == expected
    assert (
        collator([{"messages": None, **rows[0]}, {"text": None, **CHAT_ROW}])["labels"].tolist()
        == expected
    )


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.string_view()])
def test_strings_of_every_type(kind: Any, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "bc"}, {"text": None}]
    expected = [row for _, row in read_samples(lines(tmp_path, rows))]
    assert [row for _, row in read_samples(parquet(tmp_path, rows, kind))] == expected


def test_arguments_of_a_map(tmp_path: Path) -> None:
    """A Parquet map is read as an object; a map that contains a key twice is an error."""
    arguments = pyarrow.map_(pyarrow.string(), pyarrow.string())
    function = pyarrow.struct({"name": pyarrow.string(), "arguments": arguments})
    call = pyarrow.struct({"function": function})
    message = pyarrow.struct({"role": pyarrow.string(), "tool_calls": pyarrow.list_(call)})
    for keys in (("a", "b"), ("a", "a")):
        pairs = [(key, "x") for key in keys]
        calls = [{"function": {"name": "add", "arguments": pairs}}]
        column = pyarrow.array(
            [[{"role": "assistant", "tool_calls": calls}]], pyarrow.list_(message)
        )
        pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
        if keys == ("a", "b"):
            [record] = read_conversations(tmp_path / "a.parquet")
            assert record.messages[0]["tool_calls"] == [
                {"function": {"name": "add", "arguments": {"a": "x", "b": "x"}}}
            ]
        else:
            assert "row 0: a Parquet map contains a key twice" in error_of(
                lambda: list(read_conversations(tmp_path / "a.parquet"))
            )


def test_null_in_the_arguments_of_a_call(tmp_path: Path) -> None:
    """JSON and maps keep null. A struct has all fields, so its nulls are missing fields."""

    def arguments_of(path: Path) -> list[Any]:
        messages = [record.messages[0] for record in read_conversations(path)]
        return [message["tool_calls"][0]["function"]["arguments"] for message in messages]

    def rows(pack: Callable[[dict[str, Any]], Any]) -> list[Any]:
        calls = [{"function": {"name": "add", "arguments": pack(a)}} for a in (first, second)]
        return [[{"role": "assistant", "tool_calls": [call]}] for call in calls]

    first, second = {"a": "x", "b": None}, {"a": "y"}
    for write in (array, one_line, lines):
        assert arguments_of(write(tmp_path, rows(dict))) == [{"a": "x", "b": None}, {"a": "y"}]
    assert arguments_of(parquet(tmp_path, rows(json.dumps))) == [
        '{"a": "x", "b": null}',
        '{"a": "y"}',
    ]
    assert arguments_of(parquet(tmp_path, rows(dict))) == [{"a": "x"}, {"a": "y"}]
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    function = pyarrow.struct({"name": pyarrow.string(), "arguments": kind})
    call = pyarrow.struct({"function": function})
    message = pyarrow.struct({"role": pyarrow.string(), "tool_calls": pyarrow.list_(call)})
    column = pyarrow.array(rows(lambda a: [*a.items()]), pyarrow.list_(message))
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
    assert arguments_of(tmp_path / "a.parquet") == [{"a": "x", "b": None}, {"a": "y"}]


# Templates

JINJA = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMED = [{"name": "tool_use", "template": "x{{ 1 }}"}, {"name": "default", "template": JINJA}]


@pytest.mark.parametrize(
    "content",
    [
        JINJA, "\ufeff" + JINJA, JINJA.replace("{%", "\r\n{%"), "[INST] " + JINJA,
        json.dumps({"chat_template": JINJA}), json.dumps({"a": 1, "chat_template": NAMED}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.jinja", "{a}.json"])
def test_templates_of_files(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode())
    for source in (path, str(path)):
        text = render(BYTES, [ASK, SEVEN], template=source).text
        assert text.replace("\n", "").removeprefix("[INST] ") == "3 + 4?7"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"chat_template": null}', "its chat_template contains no template"),
        ('{"vocab": {"{{": 1}}', "its chat_template contains no template"),
        ('[{"role": "user", "content": "{{ x }}"}]', "its chat_template contains no template"),
        ('{"chat_template": "{{ 1 }}", "chat_template": "{{ 2 }}"}', "occurs twice"),
        ('{\n  "chat_template": "{{ 1 }}', "not JSON"),
        ("chat_template: x\n", "no Jinja expression"),
        ("", "no Jinja expression"),
        (JINJA.encode("utf-16"), "is not UTF-8"),
    ],
)
def test_files_that_are_no_template(content: str | bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert problem in error_of(lambda: render(BYTES, [ASK], template=path))
    if isinstance(content, str) and "{" in content:
        assert problem in error_of(lambda: render(BYTES, [ASK], template=content))
    with pytest.raises(XtokError, match="is not a file"):
        render(BYTES, [ASK], template=tmp_path / "none{}")
