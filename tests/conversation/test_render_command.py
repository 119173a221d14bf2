"""`xtok render`: files of conversations in, rows of training data out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from checks import error_of, fails, works
from conftest import Cli, SetNumber
from forked import Forks

from xtok.conversation import render_file
from xtok.conversation.files import ChatRecord, read_conversations
from xtok.errors import OutputError, XtokError

CHAT = [{"role": "user", "content": "Wie hoch? 🌊"}, {"role": "assistant", "content": "201"}]
PLAIN = ["--model", "bytes", "--chat-template", "plain"]
ROW = {
    "text": "User\nHi\n\nAssistant\nYo\n\n",
    "input_ids": list(b"User\nHi\n\nAssistant\nYo\n\n"),
    "assistant_masks": [0] * 19 + [1] * 4,
    "labels": [-100] * 19 + [ord("Y"), ord("o"), 10, 10],
    "message_spans": [
        {
            "role": "user",
            "whole": {"chars": [0, 9], "bytes": [0, 9], "tokens": [0, 9]},
            "content": {"chars": [5, 7], "bytes": [5, 7], "tokens": [5, 7]},
            "source": [0, 2],
            "verbatim": True,
        },
        {
            "role": "assistant",
            "whole": {"chars": [9, 23], "bytes": [9, 23], "tokens": [9, 23]},
            "content": {"chars": [19, 21], "bytes": [19, 21], "tokens": [19, 21]},
            "source": [0, 2],
            "verbatim": True,
        },
    ],
}
SHORT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


def read(path: Path, content: str | bytes) -> list[ChatRecord]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_conversations(path))


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_the_model_is_an_argument_or_an_option(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(json.dumps(SHORT))
    options = ("--chat-template", "plain", "-q")
    result = [
        cli("render", "chat.json", *model, *options)
        for model in (["bytes"], ["--model", "bytes"], [], ["bytes", "-m", "bytes"])
    ]
    assert [command.returncode for command in result] == [0, 0, 2, 2]
    assert json.loads(result[0].stdout) == json.loads(result[1].stdout) == ROW
    assert "name a model: FILE MODEL" in result[2].stderr
    assert "name the model only once (argument or --model)" in result[3].stderr


# Reading


def test_json_contains_a_conversation_or_a_list_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    [record] = read(path, json.dumps(CHAT, indent=2))
    assert (record.location, record.messages, record.tools, record.variables) == (
        str(path),
        CHAT,
        [],
        {},
    )
    fields = {"messages": CHAT, "tools": [{"name": "add"}], "chat_template_kwargs": {"a": 1}}
    [record] = read(path, json.dumps(fields))
    assert (record.messages, record.tools, record.variables) == (CHAT, [{"name": "add"}], {"a": 1})
    several = read(path, json.dumps([CHAT, fields]))
    assert [r.messages for r in several] == [CHAT, CHAT]
    assert [r.location for r in several] == [f"{path}, row 0", f"{path}, row 1"]
    [record] = read(path, json.dumps({"messages": CHAT, "tools": '[{"name": "add"}]'}))
    assert record.tools == [{"name": "add"}]
    [record] = read(path, json.dumps({"messages": CHAT, "tools": "null"}))
    assert record.tools == []


@pytest.mark.parametrize("name", ["chats.json", "chats.jsonl", "chats.jsonl.gz", "chats.NDJSON"])
def test_lines_of_json(tmp_path: Path, name: str) -> None:
    data = b"\xef\xbb\xbf" + (lines(CHAT) + "\n" + lines({"messages": CHAT[:1]})).encode()
    records = read(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    assert [r.messages for r in records] == [CHAT, CHAT[:1]]
    assert [str(r.location) for r in records] == [f"{tmp_path / name}, line {n}" for n in (1, 3)]


def test_messages_from_parquet_have_no_null_fields(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    other = {"function": {"name": "neg", "arguments": {"b": 3}}}
    chats = [
        [CHAT[0], {"role": "assistant", "tool_calls": [call, other]}],
        [CHAT[0], {"role": "tool", "name": "add", "content": "4"}],
    ]
    table = {"messages": chats, "tools": [None, '[{"name": "add"}]'], "reward": [1.0, 2.0]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "chats.parquet")
    first, second = read_conversations(tmp_path / "chats.parquet")
    assert [first.messages, second.messages] == chats
    assert (first.tools, second.tools) == ([], [{"name": "add"}])
    assert second.location == f"{tmp_path / 'chats.parquet'}, row 1"


@pytest.mark.parametrize(
    ("name", "content", "location"),
    [
        ("a.jsonl", lines(CHAT) + "[1,\n[]", ", line 2: "),
        ("a.jsonl", lines(CHAT, CHAT[0]), ", line 2: "),
        ("a.jsonl", lines(CHAT, []), ", line 2: "),
        ("a.jsonl", lines(CHAT, 3), ", line 2: "),
        ("a.json", "[\n{},\n{x}]", ", line 3: "),
        ("a.json", "[[], []]", ", row 0: "),
        ("a.json", lines(CHAT) + "x", ", line 2: "),
        ("a.json", "[" * 100_000, ", line 1: "),
        ("a.json", b'[\n{"role": "\xff"}]', " "),
        ("a.json", '{"messages": [{}], "tools": "x"}', ": "),
        ("a.json", '{"messages": [{}], "chat_template_kwargs": []}', ": "),
        ("a.json", gzip.compress(b"[]" * 999, mtime=0)[:-9], " "),
        ("a.parquet", "PAR1", " "),
        ("b.json", None, " "),
    ],
)  # fmt: skip
def test_errors_name_the_location(tmp_path: Path, name: str, content: Any, location: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = error_of(lambda: list(read_conversations(tmp_path / name)))
    assert f"{tmp_path / name}{location}" in message


# Writing


def test_lines_on_stdout_and_in_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(lines(SHORT, CHAT[:1]))
    result = cli("render", "chats.jsonl", *PLAIN)
    assert result.returncode == 0
    first, second = map(json.loads, result.stdout.splitlines())
    assert first == ROW
    assert second["text"] == "User\nWie hoch? 🌊\n\n"
    assert second["message_spans"][0]["content"] == {
        "chars": [5, 16], "bytes": [5, 19], "tokens": [5, 19],
    }  # fmt: skip
    notes = result.stderr.splitlines()
    assert notes[:1] == [
        "note: conversations: 2; tokens: 44; tokens of the assistant: 4",
    ]
    assert "the targets contain no end-of-turn token" in notes[1]
    assert "has no targets" in notes[2]
    assert all(note.endswith("(conversations: 1)") for note in notes[1:])
    assert len(notes) == 3
    written = cli("render", "chats.jsonl", *PLAIN, "--output", "rows.jsonl", "--quiet")
    assert (written.stdout, written.stderr) == ("rows.jsonl\n", "")
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") == result.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A folder with rows in both output formats."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "chats.json").write_text(json.dumps([SHORT, CHAT]))
    for name in ("rows.jsonl", "rows.parquet"):
        result = works(forks.run(["render", "chats.json", *PLAIN, "-o", name], folder))
        assert result.stdout == f"{name}\n"
    return folder


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_python_and_the_command_write_the_same_file(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "chats.jsonl").write_text(lines(SHORT, CHAT))
    works(cli("render", "chats.jsonl", *PLAIN, "-o", f"ours/{name}"))
    result = render_file("bytes", tmp_path / "chats.jsonl", tmp_path / name, template="plain")
    assert (tmp_path / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    assert (result.conversations, result.targets) == (2, 9)
    with pytest.raises(OutputError, match="is also the input"):
        render_file("bytes", tmp_path / "chats.jsonl", tmp_path / "chats.jsonl")


def test_parquet_has_the_same_rows(written: Path) -> None:
    table = pyarrow.parquet.read_table(written / "rows.parquet")
    rows = map(json.loads, (written / "rows.jsonl").read_text(encoding="utf-8").splitlines())
    assert table.to_pylist() == list(rows)
    assert table.to_pylist()[0] == ROW
    assert table.schema.field("input_ids").type == pyarrow.list_(pyarrow.int32())


@pytest.mark.parametrize(("name", "location"), [("a.json.gz", ""), ("a.jsonl.gz", ", line 1")])
def test_a_compressed_file_does_not_fill_the_memory(
    name: str, location: str, tmp_path: Path, set_row_limit: SetNumber
) -> None:
    set_row_limit(1 << 20)
    (tmp_path / name).write_bytes(gzip.compress(b" " * (1 << 24)))
    with pytest.raises(XtokError, match=rf"{name}{location}: .* 1 MiB"):
        list(read_conversations(tmp_path / name))


def test_the_template_gets_tools_variables_and_the_prompt(cli: Cli, tmp_path: Path) -> None:
    chat = {
        "messages": CHAT[:1],
        "tools": [{"name": "add"}],
        "chat_template_kwargs": {"style": "kurz"},
    }
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    template = (
        "{{ tools[0].name + ' ' + style }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
        "{{ day if day is defined else strftime_now('') }}"
    )
    (tmp_path / "own.jinja").write_text(template)
    args = ["render", "chat.json", "-m", "bytes", "--chat-template", "own.jinja"]
    result = cli(*args, "--add-generation-prompt")
    assert json.loads(result.stdout)["text"] == "add kurzWie hoch? 🌊A:"
    [note] = [line for line in result.stderr.splitlines() if "writes today's date" in line]
    assert "variable day " in note


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        ("chats.jsonl -o rows.txt", "the output rows.txt", ""),
        ("chats.jsonl -o chats.jsonl", "the output chats.jsonl", ""),
        ("chats.jsonl -o made/rows.jsonl", "chats.jsonl, line 2: message 0", ""),
        ("chats.jsonl -o made/rows.parquet", "chats.jsonl, line 2: message 0", ""),
        ("deep.json -o rows.jsonl", "deep.json: message 0", ""),
        ("chats.jsonl --chat-template default", "bytes has no chat", "--chat-template"),
        ("chats.jsonl --chat-template {{no.no}}", "chats.jsonl, line 1: the", "--chat-template"),
    ],
)
def test_errors_leave_no_output(cli: Cli, tmp_path: Path, args: str, error: str, hint: str) -> None:
    (tmp_path / "chats.jsonl").write_text(lines(SHORT, [{"role": "judge", "content": "x"}]))
    nested = "[" * 900 + "]" * 900
    (tmp_path / "deep.json").write_text(f'[{{"role": "user", "content": {nested}}}]')
    result = cli("render", *PLAIN, *args.split())
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ")
    assert hint in second
    assert {path.name for path in tmp_path.iterdir()} == {"chats.jsonl", "deep.json"}


def test_parquet_without_pyarrow(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(json.dumps(SHORT))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "pyarrow.py").write_text("raise ImportError('none')")
    env = {"PYTHONPATH": f"{tmp_path / 'hidden'}:{Path(__file__).parents[2]}"}
    result = cli("render", "chat.json", "no-such-model", "-o", "rows.parquet", env=env)
    fails(result, "requires the package pyarrow")


# Readers of the rows


def test_rows_load_as_a_dataset(written: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for name, kind in (("rows.jsonl", "json"), ("rows.parquet", "parquet")):
        rows = datasets.load_dataset(
            kind, data_files=str(written / name), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert rows[0] == ROW


@pytest.mark.filterwarnings("ignore")  # comes from TRL's import
def test_labels_equal_those_that_trl_makes_of_the_masks(written: Path) -> None:
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [json.loads(line) for line in (written / "rows.jsonl").open(encoding="utf-8")]
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
    for row, ids, labels in zip(rows, batch["input_ids"], batch["labels"], strict=True):
        assert ids[: len(row["labels"])].tolist() == row["input_ids"]
        assert labels[: len(row["labels"])].tolist() == row["labels"]
