"""Errors of alignments: causes, messages and hints."""

from __future__ import annotations

import gzip
from pathlib import Path

from checks import fails
from command_lines import two_files
from conftest import Cli
from error_causes import Errors, bytes_pair, messages_test

import xtok

ERRORS: Errors = {
    "score the student's text, or set partial=True to skip chunks that differ": [
        (
            lambda: xtok.project_logprobs(
                xtok.TokenAligner(bytes_pair()), [*b"12"], [*b"7"], [-1.0]
            ),
            'the texts differ at byte 0, after "": the student has "12", the teacher has "7"',
        ),
    ],
    "use a teacher with byte tokens or a byte-level tokenizer": [
        (
            lambda: xtok.Retokenizer(xtok.load_pair("bytes", "null:5"))([[*b"The keeper"]]),
            "null:5 cannot spell 'The keeper', which is in the student's text",
        ),
    ],
}

test_alignment_errors = messages_test(ERRORS)


def test_files_that_cannot_be_aligned(cli: Cli, small: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b" the text" * 9)[:-9])
    (tmp_path / "large.gz").write_bytes(gzip.compress(bytes((64 << 20) + 1), 1))
    (tmp_path / "a.zip").write_bytes(b"PK\3\4")
    check = "check the path and its permissions"
    for name, message, hint in [
        ("cut.gz", "the text cut.gz cannot be read: Compressed file ended", check),
        ("none", "the text none cannot be read: No such file or directory", check),
        ("large.gz", "the text large.gz is larger than 64 MiB", "give another file"),
        ("a.zip", "a.zip is a zip archive", "unpack the file (unzip)"),
    ]:
        fails(cli("align", *two_files(small), "--file", name), message, hint)
