"""`doctor` and `overlap` as tables that fit 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from xtok.report._tables import STYLES, cell, header, new_table, printing

if TYPE_CHECKING:
    from xtok.inspection.doctor import Diagnosis, PairDiagnosis, TokenizerDiagnosis
    from xtok.inspection.overlap import Overlap
    from xtok.inspection.text_facts import EventFacts, TextFacts


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the verdict, a table per tokenizer and, of two, what to expect of a map."""
    with printing() as console:
        console.print(cell(diagnosis.verdict))
        for one in diagnosis.tokenizers:
            console.print(_page(one))
        if diagnosis.pair is not None:
            console.print(_pair(diagnosis.pair))
            if diagnosis.pair.text is not None and diagnosis.pair.events is not None:
                console.print(_on_text(diagnosis.pair.text, diagnosis.pair.events))
        if diagnosis.failed:
            console.print(cell(f"failed: {'; '.join(diagnosis.failed)}"))


def _page(one: TokenizerDiagnosis) -> Table:
    table = new_table(header(one.model_id), "", "finding")
    name = ""
    for check in one.checks:
        repeated = "" if check.name == name else check.name
        name = check.name
        level = Text(check.level, STYLES[check.level])
        table.add_row(cell(repeated), level, cell(check.message))
    return table


def _pair(pair: PairDiagnosis) -> Table:
    table = new_table("a map between them", header(pair.student), header(pair.teacher))
    share = f"{pair.shared:,} by bytes, {pair.student_share:.1%} of the student's"
    table.add_row("role in the map", "student (rows)", "teacher (columns)")
    table.add_row("shared tokens", share, "")
    table.add_row("digits in a token", f"at most {pair.digits[0]}", f"at most {pair.digits[1]}")
    numerals = f"{pair.numerals:,} of several digits"
    table.add_row("numerals", numerals, f"has {pair.numerals_shared:,} of these")
    table.add_row("spaces in a token", f"at most {pair.spaces[0]}", f"at most {pair.spaces[1]}")
    lonely = ", ".join(pair.roles_without_counterpart) or "none"
    table.add_row("roles alone", lonely, "")
    why = f"{pair.why}; by the vocabularies alone: --text FILE measures"
    table.add_row("loss that suits", pair.loss, cell("" if pair.text is not None else why))
    return table


def _on_text(text: TextFacts, events: EventFacts) -> Table:
    """Show what text says of a pair: what either direction of a map leaves open, and the events."""
    table = new_table("on the text", "", "")
    table.caption = (
        "Left open: what a token of one side leaves open of the other's where both begin, in bits: "
        "no map in that direction can tell. Leak: how often the two tokens are in different events."
    )
    table.add_row("shared boundaries", f"{text.boundaries:,}", "")
    for way, bits in zip(("student → teacher", "teacher → student"), text.open_bits, strict=True):
        table.add_row(way, f"{bits:.2f} bits left open", "")
    table.add_row("shared tokens, a rest", f"leak {text.leak:.1%}", f"{min(text.bits):.2f} bits")
    table.add_row("events of bytes", f"leak {events.leak:.1%}", f"{events.kept:.1%} of the bits")
    return table


def print_overlap(overlap: Overlap) -> None:
    """Print the matrix in blocks of columns that fit: sizes on the diagonal, else shares.

    With a text, a second matrix follows, of its tokens.
    """
    matrices = [
        (
            overlap.sizes,
            overlap.shares,
            "Diagonal: distinct tokens. Elsewhere: the share of the row's tokens that the column "
            "has.",
        )
    ]
    if overlap.text is not None:
        on_text = (
            f"On the text, {overlap.text.num_bytes:,} bytes. Diagonal: its tokens. Elsewhere: the "
            "share of the row's that the column has, each as often as it occurs."
        )
        matrices.append((overlap.text.num_tokens, overlap.text.shares, on_text))
    places = range(len(overlap.model_ids))
    with printing() as console:
        fit = max(1, (console.width - _NAME_WIDTH) // _COUNT_WIDTH)
        for diagonal, shares, caption in matrices:
            for start in range(0, len(places), fit):
                block = places[start : start + fit]
                numbers = range(1, 1 + len(block))
                table = new_table("tokenizer", *(str(j + 1) for j in block), right=numbers)
                for column in table.columns[1:]:
                    column.no_wrap = True
                for i in places:
                    cells = (f"{diagonal[i]:,}" if i == j else f"{shares[i][j]:.1%}" for j in block)
                    table.add_row(cell(f"{i + 1} {overlap.model_ids[i]}"), *cells)
                if block[-1] == places[-1]:
                    table.caption = caption
                console.print(table)


_NAME_WIDTH, _COUNT_WIDTH = 22, 10
"""Characters of a row's name that are shown on one line, and of a column, borders included."""
