"""Event maps as tables that fit 80 columns."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from xtok.report._tables import cell, new_table, printing

if TYPE_CHECKING:
    from xtok.inspection.events import EventsEvaluation


def print_events_evaluation(evaluation: EventsEvaluation) -> None:
    """Print leak and bits of each group of text, leak by class, and the pairs that leak most."""
    names = list(dict.fromkeys(m.name for m in evaluation.measures))
    numbers = {name: f"{n}" for n, name in enumerate(names, start=1)}
    with printing() as console:
        table = new_table("text, map", "leak", "student", "teacher", "kept", right=range(1, 5))
        for group, grouped in groupby(evaluation.measures, key=lambda m: m.group):
            measures = list(grouped)
            first = measures[0]
            table.add_section()
            table.add_row(
                cell(group), "", *(_bits(first.student_token_bits, first.teacher_token_bits)), ""
            )
            table.add_row("  shared vocabulary", f"{first.shared_leak:.2%}", "", "", "")
            for m in measures:
                bits = _bits(m.student_bits, m.teacher_bits)
                table.add_row(f"  map {numbers[m.name]}", f"{m.leak:.2%}", *bits, f"{m.kept:.1%}")
        table.caption = (
            "leak: how often the two tokens at a shared boundary are in different events. Bits: "
            "entropy of the tokens there, then of the events. Kept: the smaller entropy of events, "
            f"as a share of the smaller one of tokens. {evaluation.num_bytes:,} bytes of text"
        )
        if evaluation.differing:
            share = evaluation.lost_bytes / max(1, evaluation.num_bytes)
            table.caption += f"; {share:.1%} skipped where the two sides spell text differently"
        console.print(table)
        for name, number in numbers.items():
            console.print(cell(f"map {number}: {name}"))
        maps = [f"map {number}" for number in numbers.values()]
        table = new_table(
            "class of token", "boundaries", "shared", *maps, right=range(1, 3 + len(maps))
        )
        for label, grouped_classes in groupby(
            sorted(evaluation.classes, key=lambda c: -c.starts), key=lambda c: c.token_class
        ):
            of_class = list(grouped_classes)
            table.add_row(
                label,
                f"{of_class[0].starts:,}",
                f"{of_class[0].shared_leak:.2%}",
                *(f"{c.leak:.2%}" for c in of_class),
            )
        table.caption = "leak by the class of the student's token; shared: of a shared vocabulary"
        console.print(table)
        if evaluation.worst:
            table = new_table("map", "student token", "teacher token", "share", right=(3,))
            for leak in evaluation.worst:
                table.add_row(
                    numbers[leak.name],
                    cell(leak.student_token),
                    cell(leak.teacher_token),
                    f"{leak.share:.3%}",
                )
            table.caption = "what leaks most: pairs in different events, as a share of boundaries"
            console.print(table)


def _bits(student: float, teacher: float) -> tuple[str, str]:
    return f"{student:.2f}", f"{teacher:.2f}"
