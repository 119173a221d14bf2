"""Finding files, their formats, what is recorded of them, and how they are cut."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from xtok._lib import shards as of_files
from xtok._lib.shards import Shard, SourceFile, find_files, format_of, shards, source_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "text"), ("a", "text"), ("a.py.gz", "text"), ("a.JSONL.GZ", "jsonl"),
        ("a.ndjson.zst", "jsonl"), ("a.json", "json"), ("v1.parquet", "parquet"),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_suffix(name: str, expected: str) -> None:
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


def test_globs_name_files_once_in_order(tmp_path: Path) -> None:
    """Two stars are folders of any depth."""
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
