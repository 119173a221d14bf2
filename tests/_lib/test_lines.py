"""Lines of files, plain and compressed, and the values of JSON lines with their locations."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from checks import error_of
from conftest import SetNumber

from xtok._lib import shards as of_files
from xtok._lib.lines import FileRow, json_lines, lines
from xtok._lib.opening import decompressed
from xtok._lib.shards import Shard, shards

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def content(path: Path) -> bytes:
    with path.open("rb") as raw:
        data: bytes = decompressed(raw, path).read()
    return data


def values(path: Path, *, strict: bool = False) -> list[FileRow]:
    return [
        line
        for shard in shards(path, "jsonl")
        for line in json_lines(shard, hint="fix it", strict=strict)
    ]


def test_compression_is_detected_from_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "misnamed.txt"
    path.write_bytes(b"one")
    assert content(path) == b"one"
    for compress in COMPRESSIONS.values():
        path.write_bytes(compress(b"one") + compress(b" two"))  # two compressed members, one text
        assert content(path) == b"one two"


def test_skippable_frames_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    whole = COMPRESSIONS[".zst"](b"one")
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00" + len(whole).to_bytes(4, "little")
    # the last case is the output of pzstd
    for data in (skipped + whole, whole + skipped, (skipped + whole) * 2):
        path.write_bytes(data)
        assert content(path) == b"one" * data.count(whole)


def test_stray_continuation_bytes_do_not_lengthen_a_part(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\x80" * 20)
    with path.open("rb") as raw:
        assert [len(line) for _, line in lines(Shard(path, "text"), raw, 4)] == [7, 7, 6]


@pytest.mark.parametrize("shard_bytes", [1, 7, 1000])
def test_values_have_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(of_files, "SHARD_BYTES", shard_bytes)
    path = tmp_path / "a.txt"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n [2]\r\n \n\xef\xbb\xbfnull\n"\xe6\xb0\xb4"')
    parsed = values(path)
    assert [line.value for line in parsed] == [{"a": 1}, [2], None, "水"]
    assert [str(line.location) for line in parsed] == [f"{path}, line {n}" for n in (1, 3, 5, 6)]
    assert parsed[-1].read == path.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_lines_of_a_compressed_file_have_numbers(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](b"\n" * 300_000 + b"3"))
    [line] = values(path)
    assert (line.value, str(line.location)) == (3, f"{path}, line 300001")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "at column 2"),
        (b"1 2", "more than one"),
        (b"1" * 41, "JSON value is larger than 0 MiB"),
        (b'{"5": 1, "5": 2}', "the key '5' occurs twice"),
        (b'"\\uD800"', "'\\ud800'"),
        (b"[" * 20, "at column 21"),
    ],
)
def test_error_names_the_line_that_is_not_json(
    tmp_path: Path, line: bytes, problem: str, set_row_limit: SetNumber
) -> None:
    set_row_limit(40)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"0\n" + line + b"\n")
    message = error_of(lambda: values(path, strict=True))
    assert message.startswith(f"{path}, line 2: ")
    assert problem in message


def test_half_a_surrogate_pair_is_kept_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"\\ud83d"\n')
    assert [line.value for line in values(path)] == ["\ud83d"]
    path.write_bytes(b'"\\ud83d\\ude00"\n')
    assert [line.value for line in values(path, strict=True)] == ["😀"]


def test_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"one"\n"\xf6"\n')
    assert "byte 0xf6 at offset 7, in line 2" in error_of(lambda: values(path))
