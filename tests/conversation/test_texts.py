"""Text files as documents: every format and compression, shards, and files without text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from conftest import SetNumber

from xtok.conversation import texts
from xtok.conversation.texts import read_batches, text_shards
from xtok.errors import XtokError

DOCUMENTS = ["First: naïve café\n", "", "第二の文書です。\nwith two lines", "4th 😀"]

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(path: Path, field: str = "text") -> list[str]:
    return [text for batch in read_batches(text_shards(path), field) for text in batch.texts]


def write_parquet(path: Path, columns: dict[str, object], *, group_size: int | None = None) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=group_size)
    return path


def json_lines(documents: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({field: d, "n": 1}).encode() + b"\n" for d in documents)


def read_error(path: Path, field: str = "text") -> XtokError:
    with pytest.raises(XtokError) as error:
        read(path, field)
    return error.value


each_suffix = pytest.mark.parametrize("suffix", COMPRESSIONS)


def write(folder: Path, name: str, data: bytes | str) -> Path:
    """Write a file, compressed according to its suffix."""
    path = folder / name
    compress = COMPRESSIONS.get(path.suffix, bytes)
    path.write_bytes(compress(data if isinstance(data, bytes) else data.encode()))
    return path


@each_suffix
def test_json_lines_are_documents(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"a.jsonl{suffix}", json_lines(DOCUMENTS, "body"))
    assert read(path, "body") == DOCUMENTS


@each_suffix
def test_plain_text_is_cut_at_line_ends(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "DOCUMENT_BYTES", 8)
    path = write(tmp_path, f"a.txt{suffix}", "Grüße\nan\nalle\r\n\n\nund\nEnde")
    assert read(path) == ["Grüße\n", "an\nalle\r\n", "\n\nund\nEnde"]
    monkeypatch.setattr(texts, "DOCUMENT_BYTES", 4)  # a long line is split between characters
    assert read(write(tmp_path, "b.txt", "水水水x\nyz")) == ["水水", "水x", "\nyz"]


def test_parquet_shards_are_row_groups(tmp_path: Path) -> None:
    columns = {"id": [1, 2, 3, 4, 5], "text": [*DOCUMENTS, None]}
    path = write_parquet(tmp_path / "a.parquet", columns, group_size=2)
    parts = text_shards(path)
    assert [(s.start, s.stop) for s in parts] == [(0, 1), (1, 2), (2, None)]
    batches = [[*read_batches([shard])] for shard in parts]
    assert [[b.texts for b in part] for part in batches] == [[DOCUMENTS[:2]], [DOCUMENTS[2:]], []]
    assert sum(s.size for s in parts) == path.stat().st_size


def test_parquet_of_other_string_types(tmp_path: Path) -> None:
    column = pyarrow.array(["a", "b", "a"])
    for kind in (column.cast(pyarrow.large_string()), column.dictionary_encode()):
        assert read(write_parquet(tmp_path / "a.parquet", {"text": kind})) == ["a", "b", "a"]
    empty = write_parquet(tmp_path / "b.parquet", {"text": pyarrow.array([], pyarrow.string())})
    assert read(empty) == []


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    lines = r'{"text": "a\ud800b"}' + "\n" + r'{"text": "\ud83d\ude00"}' + "\n\n"
    assert read(write(tmp_path, "a.jsonl", lines)) == ["a\ufffdb", "😀"]


def test_long_lines_are_cut_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_row_limit: SetNumber
) -> None:
    monkeypatch.setattr(texts, "MAX_CHARACTERS", 4)
    set_row_limit(60)
    path = write(tmp_path, "a.jsonl", json_lines(["abcdefghi", "水水水水"]))
    assert read(path) == ["abcd", "efgh", "i", "水水水水"]
    assert read(write_parquet(tmp_path / "a.parquet", {"text": ["abcde"]})) == ["abcd", "e"]
    write(tmp_path, "a.jsonl", json_lines(["a", "a" * 60]))
    assert f"{path}, line 2: JSON value is larger than" in read_error(path).message


@each_suffix
def test_another_encoding_is_named_with_its_line_in_the_file(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "DOCUMENT_BYTES", 4)
    path = write(tmp_path, f"a.txt{suffix}", b"one two\n" * 5 + b"x\xff\n")
    assert "byte 0xff at offset 41, in line 6" in read_error(path).message


@pytest.mark.parametrize(("encoding", "byte"), [("utf-16-le", "0xff"), ("utf-16-be", "0xfe")])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf16_is_named(tmp_path: Path, encoding: str, byte: str, name: str) -> None:
    error = read_error(write(tmp_path, name, '\ufeff{"text": "one"}\n'.encode(encoding)))
    assert f"byte {byte} at offset 0, in line 1" in error.message
    assert f"-f {encoding.upper().replace('UTF-16-', 'UTF-16')}" in error.hint


@each_suffix
def test_text_with_many_zero_bytes_is_refused(tmp_path: Path, suffix: str) -> None:
    """The error covers UTF-16 without a byte order mark, and megabytes of zeros."""
    name = f"a.txt{suffix}"
    for encoding in ("UTF-16LE", "UTF-16BE"):
        error = read_error(write(tmp_path, name, "the text".encode(encoding)))
        assert "8 of 16 bytes" in error.message
        assert encoding in error.hint
    zeros = write(tmp_path, name, b"\0" * 1_000_000)
    assert "65,536 of 65,536 bytes" in read_error(zeros).message
    assert read(write(tmp_path, name, b"one\0")) == ["one\0"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_compression_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    whole = COMPRESSIONS[suffix](("水" * 90).encode() + bytes(range(97, 123)))
    for data in (whole[:4] + b"\xff" * 30, whole + b"and no frame", whole[:-10]):
        path.write_bytes(data)
        assert "cannot be read" in read_error(path).message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"n": 1}', "no field 'text'"),
        (b'{"text": "x"', "at column 13"),
        (b'{"text": "x', "at column 10"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    path = write(tmp_path, "a.jsonl", b'{"text": "x"}\n' + line)
    error = read_error(path)
    assert error.message.startswith(f"{path}, line 2: ")
    assert problem in error.message
    assert error.parameter == "field"


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_damaged_parquet_is_refused(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a", "b", "a", "c"] * 4})
    pyarrow.parquet.write_table(table, path, compression=compression)
    content = path.read_bytes()
    outcomes: set[int | str] = set()
    for offset in range(len(content)):
        for change in (0x01, 0x80, 0xFF):
            path.write_bytes(
                content[:offset] + bytes([content[offset] ^ change]) + content[offset + 1 :]
            )
            try:
                outcomes.add(len(read(path)))
            except XtokError as error:
                outcomes.add("named" if str(path) in error.message else error.message)
    assert 16 in outcomes
    assert {outcome for outcome in outcomes if isinstance(outcome, str)} == {"named"}


def test_a_conversation_is_the_text_of_its_messages(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "two"}, {"type": "image"}]
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": parts}]
    rows = [{"messages": chat}, {"messages": chat, "text": None}, {"text": "x", "messages": chat}]
    path = write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    [batch] = read_batches(text_shards(path))
    assert batch.texts == ["one\ntwo", "one\ntwo", "x"]
    plain = [{"role": "user", "content": "one"}]
    path = write_parquet(tmp_path / "a.parquet", {"messages": [plain, plain]})
    [batch] = read_batches(text_shards(path))
    assert batch.texts == ["one", "one"]
    assert batch.group == "a.parquet"


def test_an_empty_file_has_no_documents(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        path = write(tmp_path, name, b"")
        assert len(text_shards(path)) == 1
        assert read(path) == []


def test_rows_of_every_format_are_equal(tmp_path: Path) -> None:
    """In every format, a null text is skipped."""
    rows = [{"text": "a"}, {"text": None}, {"text": ""}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for path in (
        write(tmp_path, "a.json", json.dumps(rows, indent=1)),
        write(tmp_path, "b.json", lines),
        write(tmp_path, "a.jsonl", lines),
        write_parquet(tmp_path / "a.parquet", {"text": ["a", None, ""]}),
    ):
        assert read(path) == ["a", ""]
