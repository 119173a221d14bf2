"""Print an alignment: both rows of tokens above each other, chunk by chunk."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from xtok.alignment.aligner import TextAlignment, chunks
from xtok.cli.tables._tables import printing
from xtok.tokenizers.display import percent, plural, visible
from xtok.tokenizers.table import SIDES

_COLOURS = ("cyan", "green", "magenta", "blue")
_BETWEEN = "¦"  # separator between the tokens of one chunk
_AROUND = "│"  # separator between chunks
_WIDTH = 1 + max(map(len, SIDES))


_KINDS = {"different": ("≠", "bold red"), "alone": ("-", "dim")}
"""Mark and style of incorrect chunks."""


class _ChunkBlock(NamedTuple):
    lines: tuple[str, str, str]  # student's text, teacher's text, and mark
    style: str

    @property
    def width(self) -> int:
        return max(map(cell_len, self.lines))


def print_alignment(alignment: TextAlignment) -> None:
    """Print the student's and the teacher's tokens in two rows, then the statistics.

    A third row marks incorrect chunks: `≠` if the sides differ, `-` if a token has no counterpart.
    `¦` separates the tokens of a chunk, and `␣` is a space.
    """
    with printing() as console:
        for row in _wrap(_blocks(alignment), console.width - _WIDTH):
            marked = any(block.lines[2] for block in row)
            for line, label in enumerate((*SIDES, "")[: 2 + marked]):
                text = Text.assemble((label.ljust(_WIDTH), "dim"))
                for block in row:
                    content = set_cell_size(block.lines[line], block.width)
                    text.append(_AROUND, "dim").append(content, block.style)
                console.print(text.append(_AROUND, "dim"), soft_wrap=True)
            console.print()
        for sentence in _statistics(alignment):
            console.print(Text(sentence), soft_wrap=True)


def _statistics(alignment: TextAlignment) -> list[str]:
    total, chunks = len(alignment.student_tokens), len(alignment.pairs)
    correct = sum(len(p.student_ids) for p in alignment.pairs if p.is_correct)
    return [
        f"{plural(total, 'student token')} ({alignment.student}), "
        f"{plural(len(alignment.teacher_tokens), 'teacher token')} ({alignment.teacher})",
        f"{plural(chunks, 'chunk')}, {alignment.num_correct:,} of them correct, "
        f"{alignment.num_one_to_one:,} with one token on each side",
        f"{percent(correct / max(1, total), 2)} of the student tokens are in correct chunks; "
        f"{plural(alignment.student_unaligned, 'student token')} and "
        f"{plural(alignment.teacher_unaligned, 'teacher token')} are in no chunk",
    ]


def _blocks(alignment: TextAlignment) -> Iterator[_ChunkBlock]:
    index = 0
    for kind, student, teacher in chunks(alignment):
        mark, style = _KINDS.get(kind, ("", _COLOURS[index % len(_COLOURS)]))
        index += kind != "alone"
        upper, lower = (_BETWEEN.join(_isolate(t) for _, t in part) for part in (student, teacher))
        yield _ChunkBlock((upper, lower, mark), style)


def _wrap(blocks: Iterable[_ChunkBlock], width: int) -> Iterator[list[_ChunkBlock]]:
    row: list[_ChunkBlock] = []
    row_width = 1
    for block in blocks:
        if row and row_width + block.width + 1 > width:
            yield row
            row, row_width = [], 1
        row.append(block)
        row_width += block.width + 1
    if row:
        yield row


def _isolate(token: str) -> str:
    """Escape a token, and isolate right-to-left text so that the text stays in its cell."""
    token = visible(token)
    if any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in token):
        return f"\u2068{token}\u2069"
    return token
