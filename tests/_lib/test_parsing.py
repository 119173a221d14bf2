"""JSON that `json.loads` would change silently is an error, wherever xtok reads JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checks import error_of

import xtok
from xtok._lib.lines import read_text
from xtok._lib.parsing import parse_json
from xtok.conversation import render
from xtok.conversation.files import read_conversations
from xtok.tokenizers import load_tokenizer

TWICE = '{"a": 1, "b": {"a": 1, "a": 2}}'
MESSAGES = [{"role": "user", "content": "x"}]
RESULT = {"role": "assistant", "content": "y"}


@pytest.mark.parametrize("text", ["3", '{"a": [null, "é"]}', b'\xef\xbb\xbf{"a": 1}', "1e400"])
def test_json_is_parsed_as_json_does(text: str | bytes) -> None:
    expected = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    assert parse_json(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TWICE, "'a' occurs twice"),
        ("[NaN]", "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ("[" * 200_000, "nested too deeply"),
        ('\ufeff{"a": 1}', "BOM"),
        ('{\ufeff"a": 1}', "property name"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        ("1" * 5_000, "4300"),
    ],
)
def test_json_that_is_rejected(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


def test_nan_is_read_where_python_writes_it() -> None:
    assert parse_json("[Infinity, -Infinity]", allow_nan=True) == [float("inf"), -float("inf")]


def chat_file(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    list(read_conversations(folder / name))


def model_file(folder: Path, byte_level: Path, name: str, text: str) -> None:
    shutil.copytree(byte_level, folder / "model")
    (folder / "model" / name).write_text(text, encoding="utf-8")
    load_tokenizer(folder / "model")


ANSWER = '{"role": "assistant", "content": "Two.", "content": "Three."}'
READERS: dict[str, Callable[[Path, Path], Any]] = {
    "array": lambda folder, _: chat_file(folder, "a.json", f"[{ANSWER}]"),
    "object": lambda folder, _: chat_file(folder, "a.json", '{"content": [], "content": []}'),
    "lines": lambda folder, _: chat_file(folder, "a.jsonl", f"[{ANSWER}]\n"),
    "messages": lambda folder, _: chat_file(folder, "a.json", json.dumps({"messages": ANSWER})),
    "tools": lambda folder, _: chat_file(
        folder, "a.json", json.dumps({"messages": MESSAGES, "tools": f"[{ANSWER}]"})
    ),
    "tools of a call": lambda *_: render(load_tokenizer("bytes"), MESSAGES, tools=f"[{ANSWER}]"),
    "teacher_messages": lambda *_: xtok.DistillationCollator(
        "bytes", "bytes", student_template="plain", teacher_templates=["plain"]
    )([{"messages": [*MESSAGES, RESULT], "teacher_messages": f"[{ANSWER}]"}]),
    "config": lambda folder, model: model_file(folder, model, "config.json", ANSWER),
    "tokenizer_config": lambda folder, model: model_file(
        folder, model, "tokenizer_config.json", ANSWER
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_rejects_duplicate_keys(reader: str, small: Path, tmp_path: Path) -> None:
    make = READERS[reader]
    assert "the key 'content' occurs twice in one object" in error_of(
        lambda: make(tmp_path, small / "small-byte-level")
    )


def test_read_text_checks_encoding_size_and_existence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read_text(path, "the text") == "one\r\ntwo\n"
    path.write_bytes("one".encode("utf-16"))
    assert "is not UTF-8" in error_of(lambda: read_text(path, "the text"))
    path.write_bytes(b"a" * 9)
    monkeypatch.setattr("xtok._lib.lines.MAX_TEXT_BYTES", 8)
    assert "larger than 0 MiB" in error_of(lambda: read_text(path, "the text"))
    assert f"the text {tmp_path / 'b'} cannot be read: No such file or directory" == error_of(
        lambda: read_text(tmp_path / "b", "the text")
    )
