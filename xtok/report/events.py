"""Event maps as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from xtok.report._tables import cell, new_table, printing

if TYPE_CHECKING:
    from xtok.inspection.events import EventExplanation, EventsDescription, EventsEvaluation

_STEPS = ("shared vocabulary", "bytes alone", "these events")


def print_events(description: EventsDescription) -> None:
    """Print an event map: its sides, its events by kind, its measures, its largest events."""
    with printing() as console:
        for side in ("student", "teacher"):
            about = getattr(description, side)
            console.print(
                cell(f"{side} {about.model_id}: {about.vocab_size:,} tokens"), soft_wrap=True
            )
        table = new_table("events", "", right=(1,))
        for label, count in (
            ("all", description.num_events),
            ("one token on each side", description.one_to_one),
            ("one student token, several teacher tokens", description.one_student),
            ("one teacher token, several student tokens", description.one_teacher),
            ("several tokens on both sides", description.several),
        ):
            table.add_row(label, f"{count:,}")
        table.caption = (
            f"{description.rest[0]:,} student and {description.rest[1]:,} teacher tokens go with "
            "nothing: special tokens without a partner, and unused ids. They are one event."
        )
        console.print(table)
        if description.measures:
            table = new_table("on the counted text", "events", "leak", "bits", right=(1, 2, 3))
            for name, point in zip(_STEPS, description.measures, strict=False):
                bits = f"{point['student_bits']:.2f}, {point['teacher_bits']:.2f}"
                table.add_row(name, f"{point['num_events']:,}", f"{point['leak']:.2%}", bits)
            table.caption = (
                "leak: how often the two tokens at a shared boundary are in different events; "
                "bits: the entropy of the student's and of the teacher's events"
            )
            console.print(table)
        listed = description.heaviest or description.largest
        table = new_table("event", "student", "teacher", "such as", right=(0, 1, 2))
        for event in listed:
            table.add_row(
                f"{event.event}",
                f"{event.num_student:,}",
                f"{event.num_teacher:,}",
                cell("  ".join(event.examples)),
            )
        table.caption = (
            "the events with the most mass on the counted text, and their tokens"
            if description.heaviest
            else "the events with the most tokens"
        )
        console.print(table)


def print_event_explanations(explanations: Sequence[EventExplanation]) -> None:
    """Print the tokens of each event, and why they are in it."""
    with printing() as console:
        for explained in explanations:
            members = len(explained.members)
            total = explained.num_student + explained.num_teacher
            title = (
                f"event {explained.event}: {explained.num_student:,} student and "
                f"{explained.num_teacher:,} teacher tokens"
            )
            table = new_table("side", "id", "token", "why", right=(1,))
            for member in explained.members:
                table.add_row(
                    member.side, f"{member.token_id}", cell(member.token), cell(member.why)
                )
            notes = [f"{total - members:,} more"] if total > members else []
            if explained.is_rest:
                notes.append("the event of the tokens that nothing goes with")
            elif explained.by_text > 1:
                notes.append(f"the text merged {explained.by_text} events into this one")
            table.caption = "; ".join(notes)
            console.print(title)
            console.print(table)


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
