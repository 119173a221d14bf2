"""Opening text files: supported compressions; archives and pipes are errors."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import threading
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from checks import error_of

from xtok._lib.opening import reading
from xtok._lib.parquet import ParquetTable, parquet_writer
from xtok.conversation.files import read_conversations
from xtok.conversation.texts import check_texts
from xtok.errors import XtokError

TEXT = b'{"text": "one line of text"}\n'


def archive(kind: str) -> bytes:
    """Return an archive with the text as a file in it."""
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as zip_file:
            zip_file.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=file, mode="w") as tar_file:
            about = tarfile.TarInfo("a.txt")
            about.size = len(TEXT)
            tar_file.addfile(about, io.BytesIO(TEXT))
    return file.getvalue()


def lz4() -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(TEXT)
    return bytes(sink.getvalue())


REFUSED = {
    "bzip2": bz2.compress(TEXT),
    "bzip2, empty": bz2.compress(b""),
    "xz": lzma.compress(TEXT),
    "lzma": lzma.compress(TEXT, lzma.FORMAT_ALONE),
    "lz4": lz4(),
    "lz4, old": b"\x02\x21\x4c\x18" + TEXT,
    "compress": b"\x1f\x9d\x90" + TEXT,
    "lzip": b"LZIP\x01" + TEXT,
    "lzop": b"\x89LZO\0\r\n\x1a\n" + TEXT,
    "snappy": b"\xff\x06\0\0sNaPpY" + TEXT,
    "zip": archive("zip"),
    "7-Zip": b"7z\xbc\xaf\x27\x1c\0\4" + TEXT,
    "RAR": b"Rar!\x1a\x07\x01\0" + TEXT,
    "tar": archive("tar"),
    "tar, in gzip": gzip.compress(archive("tar")),
    "xz, in gzip": gzip.compress(lzma.compress(TEXT)),
    "compressed twice": gzip.compress(gzip.compress(TEXT)),
}


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("kind", REFUSED)
def test_error_names_an_unsupported_file_kind(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(REFUSED[kind])
    with pytest.raises(XtokError) as caught:
        check_texts(path, "text")
    assert str(path) in caught.value.message
    assert kind.partition(",")[0] in caught.value.message
    assert ".gz and .zst are supported" in caught.value.hint


@pytest.mark.parametrize("kind", ["gzip", "bzip2"])
def test_compressed_parquet_is_named(kind: str, tmp_path: Path) -> None:
    """pyarrow would report a damaged file."""
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), sink)
    path = tmp_path / "a.parquet.gz"
    path.write_bytes({"gzip": gzip, "bzip2": bz2}[kind].compress(sink.getvalue()))
    assert kind in error_of(lambda: check_texts(path, "text"))


def test_pipes_are_refused(tmp_path: Path) -> None:
    """xtok reads each file more than once, so no reader accepts a pipe."""
    path = tmp_path / "a.json"
    os.mkfifo(path)
    for read in (lambda: check_texts(path, "text"), lambda: [*read_conversations(path)]):
        assert f"{path} is a pipe" in error_of(read)
    ours, theirs = os.pipe()
    writer = threading.Thread(target=os.write, args=(theirs, TEXT))
    writer.start()
    assert "is a pipe" in error_of(lambda: check_texts(f"/dev/fd/{ours}", "text"))
    writer.join()
    os.close(ours)
    os.close(theirs)


def test_parquet_pages_have_checksums(tmp_path: Path) -> None:
    """A flipped bit of a page is an error, and does not change a value."""
    path, table = (
        tmp_path / "a.parquet",
        pyarrow.table({"a": [*range(1000)], "b": ["x" * 9] * 1000}),
    )
    with path.open("wb") as file, parquet_writer(file, table.schema, use_dictionary=False) as out:
        out.write_table(table)
    content, taken = path.read_bytes(), 0
    about = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0)
    end = about.data_page_offset + about.total_compressed_size
    for offset in range(about.data_page_offset + 60, end, 97):  # behind the page's header
        flipped = bytearray(content)
        flipped[offset] ^= 4
        path.write_bytes(flipped)
        try:
            with reading(path):
                read = pyarrow.Table.from_batches(b for _, b in ParquetTable(path).batches([0]))
                taken += read.equals(table) is False
        except XtokError:
            continue
    assert taken == 0
