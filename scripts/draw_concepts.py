"""Draw the pictures of docs/guides/concepts.md, from the Llama 3, Qwen and Mistral v3 tokenizers.

    python scripts/draw_concepts.py

The same tokenizers give the same bytes. Pictures follow the reader's light or dark scheme.
"""

from __future__ import annotations

import unicodedata
from html import escape as escape_xml
from itertools import pairwise
from pathlib import Path

import numpy as np

import xtok
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer
from xtok.vocab.display import escape

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "guides" / "images"

WIDTH, MARGIN = 700, 22
INNER = WIDTH - 2 * MARGIN
STYLE = """
:root{--card:#fafbfc;--edge:#d0d7de;--ink:#1f2328;--soft:#57606a;--accent:#b3261e;
--plain:#eaeef2;--blue:#cfe3ff;--orange:#ffe0b8;--green:#cdeed5;--purple:#ecd7fb}
@media (prefers-color-scheme:dark){:root{--card:#161b22;--edge:#3d444d;--ink:#f0f3f6;--soft:#a8b2bd;
--accent:#ff8a80;--plain:#2d343d;--blue:#1b4475;--orange:#6b4208;--green:#1d5430;--purple:#52307a}}
rect{stroke:var(--edge)} .card{fill:var(--card)} .plain{fill:var(--plain)} .blue{fill:var(--blue)}
.orange{fill:var(--orange)} .green{fill:var(--green)} .purple{fill:var(--purple)}
text{fill:var(--ink);font-family:system-ui,-apple-system,"Segoe UI","Noto Sans",sans-serif}
.token{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.soft{fill:var(--soft)} .strong{font-weight:600} .middle{text-anchor:middle} .end{text-anchor:end}
.dashed{stroke:var(--soft);stroke-dasharray:3 3} .solid{stroke:var(--accent);stroke-width:2.5}
"""


class Picture:
    """An SVG `WIDTH` pixels wide; y grows downwards. A style names classes of `STYLE`."""

    def __init__(self, title: str, description: str) -> None:
        self.title, self.description = title, description
        self.parts: list[str] = []

    def add(self, tag: str, style: str, words: str = "", **where: float) -> None:
        """Append an element; `where` is its place and size."""
        at = " ".join(f'{name.replace("_", "-")}="{value:g}"' for name, value in where.items())
        self.parts.append(f'<{tag} class="{style}" {at}>{escape_xml(words)}</{tag}>')

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Write words, with their baseline at y."""
        self.add("text", style, words, x=x, y=y)

    def token(self, x: float, y: float, width: float, token: str, style: str = "plain") -> None:
        """Draw a box 28 high around a token, in letters that fit."""
        self.add("rect", style, x=x + 1, y=y, width=width - 2, height=28, rx=4)
        cells = sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in token)
        size = min(14, round((width - 6) / (0.61 * cells), 1))
        self.add("text", "token middle", token, x=x + width / 2, y=y + 19, font_size=size)

    def strip(self, x: float, y: float, unit: float, tokens: list[tuple[bytes, str]]) -> list[int]:
        """Draw tokens with their styles, `unit` wide per byte; return the boundaries."""
        bounds = [0]
        for token, style in tokens:
            self.token(x + bounds[-1] * unit, y, len(token) * unit, spaces_shown(token), style)
            bounds.append(bounds[-1] + len(token))
        return bounds

    def svg(self, height: int) -> str:
        """Return the picture as SVG."""
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-size="13"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d">',
            f'<title id="t">{escape_xml(self.title)}</title>',
            f'<desc id="d">{escape_xml(self.description)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        ]
        return "\n".join([*lines, *self.parts, "</svg>\n"])


def spaces_shown(token: bytes) -> str:
    """Return a token as `xtok align` shows it."""
    return escape(token).replace(" ", "␣")


# The pictures: real tokens and real weights


def row(projection: ProjectionMap, teacher: Tokenizer, token_id: int) -> dict[str, float]:
    """Return the tokens and weights of a row of the map."""
    ids, weights = projection.row(token_id)
    control, table = teacher.table.control_names, teacher.table
    names = [control.get(i) or spaces_shown(table[i]) for i in ids.tolist()]
    return dict(zip(names, weights.tolist(), strict=True))


def draw_map(projection: ProjectionMap, student: Tokenizer, teacher: Tokenizer) -> str:
    """Draw four rows of W: exact, pieces twice, and empty."""
    tokens = (" the", "201", "東京", "<|begin_of_text|>")
    rows = {t: row(projection, teacher, int(student.encode(t).ids[0])) for t in tokens}
    slot = list(rows["201"])[-1]
    columns = [*dict.fromkeys(t for entries in rows.values() for t in entries if t != slot), slot]
    said = "the is exact; 201 and 東京 have pieces and the slot; begin_of_text is an empty row."
    p = Picture("A projection map: four rows of Llama 3 → Qwen", said)
    left, cell = 182, 71
    p.text(MARGIN, 55, "student = rows", "strong")
    p.text(MARGIN, 74, f"Llama 3, {projection.student.vocab_size:,}", "soft")
    p.text(left + 2, 32, "teacher = columns", "strong")
    p.text(WIDTH - MARGIN, 32, f"Qwen, {projection.teacher.vocab_size:,}", "soft end")
    for x, column in enumerate(columns):
        name, style = ("slot", "orange") if column == slot else (column, "plain")
        p.token(left + x * cell, 46, cell, name, style)
    for y, (token, entries) in enumerate(rows.items()):
        p.token(MARGIN, 88 + y * 38, left - MARGIN - 8, spaces_shown(token.encode()))
        for x, column in enumerate(columns):
            if weight := entries.get(column):
                style = "green" if weight == 1 else "orange" if column == slot else "blue"
                p.token(left + x * cell, 88 + y * 38, cell, f"{weight:.4f}", style)
            else:
                p.text(left + (x + 0.5) * cell, 106 + y * 38, "·", "soft middle")
    p.text(MARGIN, 264, f"Green: exact. Blue: pieces. Orange: the slot, here {slot}.", "soft")
    p.text(MARGIN, 284, "Each row sums to 1 or is empty. Zeros (dots) are not stored.", "soft")
    return p.svg(302)


def draw_exact(llama: Tokenizer, qwen: Tokenizer, mistral: Tokenizer) -> str:
    """Draw a token of all three vocabularies, and one of only one."""
    said = "All three have a token of the bytes 20 74 68 65; of two, only Llama 3 has 32 30 31."
    p = Picture("Exact: equal bytes", said)
    for x, words in ((MARGIN, "tokenizer"), (140, "token"), (240, "id"), (320, "bytes")):
        p.text(x, 32, words, "soft")
    sides = [("Llama 3", llama), ("Qwen", qwen), ("Mistral v3", mistral)]
    for k, (name, side) in enumerate([*sides, *sides[:2]]):
        data, y = (b" the", 44 + k * 36) if k < len(sides) else (b"201", 66 + k * 36)
        p.text(MARGIN, y + 19, name, "strong")
        if (token_id := side.table.canonical_ids().get(data)) is None:
            p.text(140, y + 19, "no token has these bytes", "soft")
            continue
        p.token(140, y, 70, spaces_shown(data))
        p.text(240, y + 19, str(token_id))
        for x, byte in enumerate(data):
            p.token(320 + x * 44, y, 44, f"{byte:02x}", "green" if data == b" the" else "plain")
    p.text(524, 99, "equal bytes: exact", "strong")
    p.text(524, 193, "none equal: pieces", "strong")
    return p.svg(254)


def draw_pieces(projection: ProjectionMap, student: Tokenizer, teacher: Tokenizer) -> str:
    """Draw two tokens over the pieces that spell them, as wide as their bytes."""
    said = "201 is spelled 2, 0, 1. Tokyo is three pieces, two of which are parts of a character."
    p = Picture("Pieces: Llama 3 tokens in Qwen's spelling", said)
    for y, words in enumerate(["student: Llama 3", "bytes", "teacher: Qwen", "weight"]):
        p.text(MARGIN, 41 + y * 38, words, "soft")
    for data, left, unit in ((b"201", 146, 56), (" 東京".encode(), 339, 48.4)):
        p.token(left, 22, len(data) * unit, spaces_shown(data))
        for x, byte in enumerate(data):
            p.token(left + x * unit, 60, unit, f"{byte:02x}")
        pieces = [teacher.table[i] for i in teacher.segment(data)]
        bounds = p.strip(left, 98, unit, [(piece, "blue") for piece in pieces])
        weights = row(projection, teacher, student.segment(data)[0])
        for (start, end), weight in zip(pairwise(bounds), weights.values(), strict=True):
            p.text(left + (start + end) / 2 * unit, 155, f"{weight:.4f}", "middle")
    p.text(MARGIN, 187, "Each piece weighs a tenth of the one before; weights sum to 1.", "soft")
    return p.svg(204)


def draw_slot(without: dict[str, float], with_slot: dict[str, float]) -> str:
    """Draw the row of 201 as a bar, without and with the slot."""
    said = "A slot takes a sixth of the row; the pieces keep their proportions."
    p = Picture("The scale slot in the row of 201", said)
    for top, words, entries in ((22, "without", without), (126, "with", with_slot)):
        p.text(MARGIN, top + 12, f"row of 201, {words} the slot", "strong")
        bar = legend = float(MARGIN)
        for token, weight in entries.items():
            style, size = "blue" if token in without else "orange", 8.6 * len(token) + 14
            p.add("rect", style, x=bar, y=top + 22, width=INNER * weight - 1, height=26, rx=4)
            p.token(legend, top + 56, size, token, style)
            p.text(legend + size + 4, top + 75, f"{weight:.4f}")
            bar, legend = bar + INNER * weight, legend + size + 76
    p.text(WIDTH - MARGIN, 201, "← slot: no meaning", "soft end")
    return p.svg(228)


def draw_boundaries(student: Tokenizer, teacher: Tokenizer) -> str:
    """Draw both sides' token boundaries; mark two pairs that begin at shared ones."""
    text = b"the Wayback Machine of 2014"
    said = "Way and Wayback begin at the same byte, 2 and 201 too. Only Qwen begins back, 0 and 1."
    p = Picture(f"Shared token boundaries of {text.decode()}", said)
    unit, bounds = INNER / len(text), []
    marked = {b" Way": "blue", b" Wayback": "blue", b"2": "purple", b"201": "purple"}
    for side, y in ((student, 42), (teacher, 116)):
        tokens = [side.table[i] for i in side.segment(text)]
        bounds.append(p.strip(MARGIN, y, unit, [(t, marked.get(t, "plain")) for t in tokens]))
    for at in sorted({*bounds[0], *bounds[1]}):
        x, style = MARGIN + at * unit, "solid" if all(at in b for b in bounds) else "dashed"
        p.add("line", style, x1=x, x2=x, y1=72, y2=114)
    p.text(MARGIN, 32, "student: Qwen", "soft")
    p.text(MARGIN, 163, "teacher: Llama 3", "soft")
    p.text(MARGIN + 5 * unit, 163, "␣Way meets ␣Wayback", "strong")
    p.text(WIDTH - MARGIN, 163, "2 meets 201", "strong end")
    p.text(MARGIN, 187, "Solid line: shared boundary. Dashed line: a boundary on one side.", "soft")
    return p.svg(204)


def draw_chunks(student: Tokenizer, teacher: Tokenizer) -> str:
    """Draw a text's chunks in alternating colours, with their ids."""
    text = "In 2014 in 東京 too.".encode()
    aligner = xtok.TokenAligner(student, teacher)
    batch = aligner.align(*(np.array([side.segment(text)]) for side in (student, teacher)))
    said = f"{text.decode()} has {batch.num_chunks[0]} chunks. 201 and 2, 0, 1 are one chunk."
    p = Picture("Chunks of Llama 3 and Qwen", said)
    unit, turning = INNER / len(text), ["blue", "orange", "green", "purple"]
    chunks = batch.student_chunk_id[0].tolist(), batch.teacher_chunk_id[0].tolist()
    for side, chunk_ids, y in ((teacher, chunks[1], 110), (student, chunks[0], 42)):
        tokens = [side.table[i] for i in side.segment(text)]
        styled = zip(tokens, [turning[chunk % 4] for chunk in chunk_ids], strict=True)
        bounds = p.strip(MARGIN, y, unit, list(styled))
    for (start, end), chunk in zip(pairwise(bounds), chunks[0], strict=True):
        p.text(MARGIN + (start + end) / 2 * unit, 95, str(chunk), "soft middle")
    p.text(MARGIN, 32, "student: Llama 3", "soft")
    p.text(MARGIN, 157, "teacher: Qwen", "soft")
    p.text(WIDTH - MARGIN, 157, "same number and colour: same chunk", "soft end")
    return p.svg(175)


def draw_all() -> dict[str, str]:
    """Return every picture by its file name."""
    files = ("llama3.tiktoken", "qwen.tiktoken", "mistral-v3.model")
    llama, qwen, mistral = (xtok.load_tokenizer(ROOT / "data/tokenizers" / file) for file in files)
    with_slot = xtok.build(llama, qwen)
    without_slot = xtok.build(llama, qwen, xtok.BuildConfig(scale_trick=False))
    rows = [row(m, qwen, llama.segment(b"201")[0]) for m in (without_slot, with_slot)]
    return {
        "concept-map.svg": draw_map(with_slot, llama, qwen),
        "concept-exact.svg": draw_exact(llama, qwen, mistral),
        "concept-pieces.svg": draw_pieces(without_slot, llama, qwen),
        "concept-slot.svg": draw_slot(*rows),
        "concept-boundary.svg": draw_boundaries(qwen, llama),
        "concept-chunk.svg": draw_chunks(llama, qwen),
    }


if __name__ == "__main__":
    for name, svg in draw_all().items():
        (IMAGES / name).write_text(svg, encoding="utf-8", newline="\n")
