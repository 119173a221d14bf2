"""`xtok align` and `xtok.align`: two tokenizations of a text in chunks."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from checks import works
from command_lines import two_files
from conftest import Cli
from rich.cells import cell_len

from xtok.alignment.aligner import TextAlignment, TokenAligner, describe_alignment
from xtok.alignment.text import align
from xtok.cli.tables.alignment import print_alignment
from xtok.config import ChatTemplates
from xtok.tokenizers import Tokenizer, load_pair, load_tokenizer
from xtok.tokenizers.pairs import Pair


def lines_of(alignment: TextAlignment, *, width: int = 80, colour: bool = False) -> list[str]:
    env = {"COLUMNS": str(width), "TERM": "xterm", **({"FORCE_COLOR": "1"} if colour else {})}
    with redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        print_alignment(alignment)
    return printed.getvalue().splitlines()


def test_both_sides_are_printed_in_aligned_lines(byte_level: Tokenizer, digits: Tokenizer) -> None:
    alignment = align(byte_level, digits, " the 2014")
    assert alignment == align(byte_level, digits, b" the 2014")
    assert alignment == align(load_pair(byte_level, digits), text=" the 2014")
    with pytest.raises(ValueError, match="either"):
        align(byte_level, digits)
    with pytest.raises(ValueError, match="templates"):
        align(byte_level, digits, " the 2014", templates=ChatTemplates())
    with pytest.raises(TypeError, match="all other arguments"):
        align(load_pair(byte_level, digits), " the 2014")
    spans = [(p.student_tokens, p.teacher_tokens) for p in alignment.pairs]
    assert spans == [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 5), (2, 3)), ((5, 6), (3, 4))]
    assert lines_of(alignment) == [
        "student │␣the│␣│2¦0¦1│4│",
        "teacher │␣the│␣│201  │4│",
        "",
        "6 student tokens (small-byte-level), 4 teacher tokens (small-digits)",
        "4 chunks, 4 of them correct, 3 with one token on each side",
        "100.00% of the student tokens are in correct chunks; 0 student tokens and 0 teacher "
        "tokens are in no chunk",
    ]


def test_incorrect_chunks_are_marked(pair: Pair) -> None:
    student, teacher_side = pair.tokenizers
    bos = teacher_side.table.roles["bos"][0]
    t = [bos, *teacher_side.segment(b" y the")]
    described = describe_alignment(TokenAligner(pair), pair, student.segment(b" x the"), t)
    _, teacher, marks, *_ = lines_of(described)
    assert "≠" in marks
    assert marks.index("-") == teacher.index("<")
    assert not described.pairs[0].is_correct
    assert described.pairs[0].teacher_tokens[0] == 1
    assert described.teacher_unaligned == 1


@pytest.mark.parametrize("width", [40, 80])
def test_wide_and_right_to_left_scripts_keep_their_columns(to_pieces: Pair, width: int) -> None:
    text = "東京都に行きました。 שלום עולם مرحبا\r\n\x1b[31m e\u0301\u0301 한국어 👨\u200d👩 end"
    alignment = align(*to_pieces.tokenizers, text.encode())
    lines = lines_of(alignment, width=width)
    rows = [line for line in lines if line.startswith(("student", "teacher"))]
    assert len(rows) > 2
    assert "\x1b" not in "".join(lines)
    ends = [[cell_len(line[: m.start()]) for m in re.finditer("│", line)] for line in rows]
    assert ends[::2] == ends[1::2]
    for line, bars in zip(rows, ends, strict=True):
        assert max(bars) < width or len(bars) == 2  # a single block may be wider than the line
        assert line.count("\u2068") == line.count("\u2069")


def test_combining_marks_do_not_join_the_preceding_text() -> None:
    bytewise = load_tokenizer("bytes")
    # of each Unicode category: Mn, Mc, Me, Lo
    marks = "\u0301 \u0e31 \u0941 \u0903 \ufe0f \u20dd \u1161"
    alignment = align(bytewise, bytewise, b"")
    for mark in marks.split():
        single = replace(alignment, student_ids=(0,), student_tokens=(mark,))
        assert lines_of(single)[0] == f"student │◌{mark}│"


def test_chunks_are_coloured_on_a_terminal(byte_level: Tokenizer, digits: Tokenizer) -> None:
    alignment = align(byte_level, digits, b" the 2014")
    coloured = "\n".join(lines_of(alignment, colour=True))
    assert "\x1b[36m␣the" in coloured
    assert "\x1b[32m␣" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines() == lines_of(alignment)


def test_text_comes_as_an_argument_a_file_or_stdin(cli: Cli, small: Path, tmp_path: Path) -> None:
    text, pair, model = " the text,\n東京", two_files(small), small / "small.model"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    printed = works(cli("align", *pair, text))
    assert printed.stdout.startswith("student │")
    assert cli("align", *pair, "--file", "text.txt").stdout == printed.stdout
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    assert cli("align", *pair, "--file", "text.gz").stdout == printed.stdout
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_bytes, args=[text.encode()])
    writer.start()
    assert cli("align", *pair, "--file", "pipe").stdout == printed.stdout
    writer.join()
    assert cli("align", model, model, text).stdout == printed.stdout
    forgotten = works(cli("align", *pair, "text.txt"))
    assert "to read the file, use --file text.txt" in forgotten.stderr
    assert cli("align", *pair, "--quiet", text).stderr == ""


def test_json_has_the_pairs_and_the_counts(cli: Cli, small: Path) -> None:
    data = json.loads(cli("align", *two_files(small), " the text", "--json").stdout)
    n = len(data["student_tokens"])
    assert data["num_correct"] == data["num_one_to_one"] == n == len(data["pairs"])
    assert data["pairs"][0]["student_bytes"][0] == 0
    # The library of the SentencePiece model puts a space before a text.
    assert data["pairs"][-1]["teacher_bytes"][1] == len("  the text")


def test_bytes_that_are_not_utf8(cli: Cli, small: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe a\x00")
    result = works(cli("align", *two_files(small), "--file", "bytes"))
    assert r"\xff│\xfe" in result.stdout


def test_align_needs_either_text_or_a_file(cli: Cli, small: Path) -> None:
    pair = two_files(small)
    for words in (["text", "--file", "x"], []):  # both inputs, or no input
        assert cli("align", *pair, *words).returncode == 2
    works(cli("align", *pair, ""))
