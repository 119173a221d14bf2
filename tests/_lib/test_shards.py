"""Finding files, their formats, their recorded identity, and their shards."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtok._lib import shards as of_files
from xtok._lib.shards import Shard, SourceFile, find_files, format_of, shards, source_of
from xtok.conversation import texts
from xtok.conversation.texts import read_batches
from xtok.errors import XtokError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "text"), ("a", "text"), ("a.py.gz", "text"), ("a.JSONL.GZ", "jsonl"),
        ("a.ndjson.zst", "jsonl"), ("a.json", "json"), ("v1.parquet", "parquet"),
    ],
)  # fmt: skip
def test_the_suffix_decides_the_format(name: str, expected: str) -> None:
    assert format_of(Path(name)) == expected


def test_a_file_is_recorded_by_its_bytes_on_disk(tmp_path: Path) -> None:
    packed, empty = tmp_path / "a.txt.gz", tmp_path / "b.txt"
    packed.write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(40_000))))
    empty.touch()
    content = packed.read_bytes()
    assert source_of(packed) == SourceFile(
        name="a.txt.gz", size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    assert source_of(empty) == SourceFile(name="b.txt", size=0, sha256=hashlib.sha256().hexdigest())
    without_utf8 = empty.rename(tmp_path / os.fsdecode(b"\xff.txt"))
    assert source_of(without_utf8).name == "\\xff.txt"


def test_globs_name_files_once_in_order(tmp_path: Path) -> None:
    """Two asterisks match folders at any depth."""
    names = ["a.txt", "b.txt", "c/d.txt", "c/e/f.txt", "odd[1].txt"]
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "c" / "e").mkdir(parents=True)
    for name in names:
        (tmp_path / name).touch()
    a, b, *_, odd = every = [tmp_path / name for name in names]
    assert find_files([b, f"{tmp_path}/*.txt", odd], "") == [b, a, odd]
    assert find_files([f"{tmp_path}/**/*.txt"], "") == every


def test_a_compressed_file_is_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_files, "SHARD_BYTES", 4)
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt"
    plain.write_bytes(b"123456789")
    packed.write_bytes(gzip.compress(b"123456789", mtime=0))
    assert shards(plain) == [
        Shard(plain, "text", 0, 4, 4),
        Shard(plain, "text", 4, 8, 4),
        Shard(plain, "text", 8, None, 1),
    ]
    assert shards(packed, "jsonl") == [Shard(packed, "jsonl", 0, None, 29)]


def test_globs_in_a_folder_with_brackets_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "run[1]" / "b"
    folder.mkdir(parents=True)
    paths = [folder / "a.txt", folder / "b.txt"]
    for path in paths:
        path.touch()
    assert find_files(folder / "*.txt", "") == paths
    assert find_files(tmp_path / "run[1]" / "**" / "[ab].txt", "") == paths
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "c.txt").touch()
    assert find_files(tmp_path / "run?" / "*.txt", "") == [tmp_path / "run1" / "c.txt"]


@pytest.mark.parametrize(
    ("content", "formats"),
    [(b' \n[{"text": "a"}]', ["json"]), (b'{"text": "a"}\n' * 9, ["jsonl"] * 2), (b"", ["jsonl"])],
)
def test_an_array_of_json_is_one_shard(
    content: bytes, formats: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_files, "SHARD_BYTES", 100)
    for name, data in (("a.json", content), ("b.json", b"\xef\xbb\xbf" + content)):
        (tmp_path / name).write_bytes(data)
        assert [shard.format for shard in shards(tmp_path / name)] == formats
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(content))
    assert [shard.format for shard in shards(tmp_path / "c.json.gz")] == formats[:1]


def documents_of(shard: Shard) -> list[str]:
    return [text for batch in read_batches([shard]) for text in batch.texts]


@given(
    documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=12),
    shard_bytes=st.integers(1, 90),
)
def test_all_json_shards_contain_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], shard_bytes: int
) -> None:
    lines = "".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents)
    path = tmp_path_factory.mktemp("shards") / "a.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_files, "SHARD_BYTES", shard_bytes)
        parts = shards(path)
        assert [d for s in parts for d in documents_of(s)] == documents
    assert len(parts) == max(1, -(-path.stat().st_size // shard_bytes))
    assert sum(s.size for s in parts) == path.stat().st_size


@given(
    text=st.text(st.sampled_from("a é\n\r水😀"), max_size=120),
    shard_bytes=st.integers(1, 60),
    document_bytes=st.integers(1, 30),
)
def test_all_text_shards_contain_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, shard_bytes: int, document_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("shards") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_files, "SHARD_BYTES", shard_bytes)
        patch.setattr(texts, "DOCUMENT_BYTES", document_bytes)
        documents_by_shard = [documents_of(s) for s in shards(path)]
    documents = [d for part in documents_by_shard for d in part]
    assert "".join(documents) == text
    assert all(documents)
    # A document grows by a line (or a part of one) at a time, and a part by at most 3 bytes.
    assert all(len(d.encode()) < 2 * document_bytes + 3 for d in documents)
    parts = ["".join(part) for part in documents_by_shard if part]
    assert all(part.endswith("\n") for part in parts[:-1])  # a shard ends at the end of a line


def test_batches_report_the_bytes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "BATCH_CHARACTERS", 100_000)
    monkeypatch.setattr(of_files, "SHARD_BYTES", 350_000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": c * 60_000}) + "\n" for c in "abcdefghij"))
    batches = list(read_batches(shards(path)))
    consumed = [batch.consumed for batch in batches]
    assert consumed == sorted(consumed)
    assert consumed[-1] == path.stat().st_size
    assert [len(batch.texts) for batch in batches] == [2] * 5


def test_line_numbers_in_a_shard_are_counted_from_the_start_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_files, "SHARD_BYTES", 12)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one two\n" * 5 + b"x\xff\n")
    with pytest.raises(XtokError, match="0xff at offset 41, in line 6"):
        list(read_batches(shards(path)))
