"""`evaluate` as tables that fit 80 columns."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from rich.table import Table

from xtok.report._tables import cell, new_table, printing
from xtok.vocab.display import quoted

if TYPE_CHECKING:
    from xtok.inspection.bootstrap import Interval
    from xtok.inspection.evaluate import Evaluation, MapMeasures


def print_evaluation(evaluation: Evaluation) -> None:
    """Print the maps side by side for each group of text, then classes and worst rows."""
    measured = (*evaluation.measures, *evaluation.event_measures)
    names = list(dict.fromkeys(m.name for m in measured))
    numbers = {name: f"{n}" for n, name in enumerate(names, start=1)}
    with printing() as console:
        if evaluation.measures:
            console.print(_measures(evaluation, numbers, wraps=console.width < 78))
        else:
            console.print(_event_measures(evaluation, numbers))
        for name, number in numbers.items():
            console.print(cell(f"map {number}: {name}"))
        console.print(_classes(evaluation, names, numbers))
        if evaluation.worst_rows:
            console.print(_worst(evaluation, numbers))
        for note in evaluation.notes:
            console.print(cell(f"note: {note}"))
        if evaluation.advice is not None:
            console.print(cell(f"{evaluation.advice.sentence}."), soft_wrap=True)
        if evaluation.ranking is not None:
            console.print(cell(evaluation.ranking.verdict), soft_wrap=True)


# Two columns each: the measures at shared token boundaries, and those over chunks.
_STARTS = (("at starts", "cross_entropy"), ("closed", "closed"))
_CHUNKS = (("over chunks", "chunk_cross_entropy"), ("closed", "chunk_closed"))


def _measures(evaluation: Evaluation, numbers: dict[str, str], *, wraps: bool) -> Table:
    """Return the table of measures; with a ranking, what decides comes first, best map first."""
    is_p_kl = evaluation.ranking is not None and evaluation.ranking.loss == "p-kl"
    columns = (*_CHUNKS, *_STARTS) if is_p_kl else (*_STARTS, *_CHUNKS)
    heads = *(head for head, _ in columns), "coverage", "top-1"
    table = new_table("text, map", *heads, right=range(1, 1 + len(heads)))
    table.columns[0].min_width = 8
    for column in table.columns[1:]:
        column.no_wrap = not wraps
    for group, grouped in groupby(evaluation.measures, key=lambda m: m.group):
        measures = list(grouped)
        if evaluation.ranking is not None:
            of_loss = attrgetter(evaluation.ranking.measure)
            measures.sort(key=lambda m: of_loss(m).value)
        table.add_section()
        table.add_row(cell(group))
        for label in ("recipe", "floor"):
            table.add_row(f"  {label}", *(_reference(measures, label, name) for _, name in columns))
        for m in measures:
            table.add_row(
                f"  map {numbers[m.name]}",
                *(_interval(getattr(m, name), name) for _, name in columns),
                f"{m.coverage.value:.2%}",
                f"{m.top_1.value:.1%}",
            )
    slots = {m.name: m.slot_weight for m in evaluation.measures}
    table.caption = (
        "cross-entropy in nats, ± half of its 95 % interval. At starts (shared token boundaries): "
        "for gold and H-KL. Over chunks: for P-KL. Recipe: X-Token's; floor: a map counted on "
        f"this text; closed: the share of the way between them. {_text(evaluation)}"
    )
    if any(slots.values()):
        weights = ", ".join(f"map {numbers[n]} {w:.1%}" for n, w in slots.items() if w)
        table.caption += f"; weight on slots: {weights}"
    return table


def _text(evaluation: Evaluation) -> str:
    text = f"{evaluation.num_bytes:,} bytes of text"
    if evaluation.differing:
        share = evaluation.lost_bytes / max(1, evaluation.num_bytes)
        text += f"; {share:.1%} skipped where the two sides spell text differently"
    return text


def _event_measures(evaluation: Evaluation, numbers: dict[str, str]) -> Table:
    table = new_table("text, map", "leak", "student", "teacher", "kept", right=range(1, 5))
    for group, grouped in groupby(evaluation.event_measures, key=lambda m: m.group):
        measures = list(grouped)
        first = measures[0]
        bits = f"{first.student_token_bits:.2f}", f"{first.teacher_token_bits:.2f}"
        table.add_section()
        table.add_row(cell(group), "", *bits, "")
        table.add_row("  shared vocabulary", f"{first.shared_leak:.2%}", "", "", "")
        for m in measures:
            bits = f"{m.student_bits:.2f}", f"{m.teacher_bits:.2f}"
            table.add_row(f"  map {numbers[m.name]}", f"{m.leak:.2%}", *bits, f"{m.kept:.1%}")
    table.caption = (
        "leak: how often the two tokens at a shared boundary are in different events. Bits: "
        "entropy of the tokens there, then of the events. Kept: the smaller entropy of events, "
        f"as a share of the smaller one of tokens. {_text(evaluation)}"
    )
    return table


def _reference(measures: list[MapMeasures], label: str, column: str) -> str:
    """Return the recipe's or floor's values under a column; several where the cuts differ."""
    if column.endswith("closed"):
        return ""
    field = f"chunk_{label}" if column.startswith("chunk") else label
    return " / ".join(dict.fromkeys(f"{getattr(m, field):.3f}" for m in measures))


def _interval(value: Interval | None, column: str) -> str:
    if value is None:
        return "–"
    if column.endswith("closed"):
        return f"{value.value:.2f}"
    return _with_spread(value, 3)


def _with_spread(interval: Interval, digits: int) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f}±{(interval.high - interval.low) / 2:.{digits}f}"


def _classes(evaluation: Evaluation, names: list[str], numbers: dict[str, str]) -> Table:
    """One row per class; a column per map, at most four of them."""
    shown, of_events = names[:4], bool(evaluation.event_measures)
    measure, reference = ("leak", "shared") if of_events else ("cross-entropy", "floor")
    heads = [f"map {numbers[name]}" if len(names) > 1 else measure for name in shown]
    table = new_table("student token", "starts", reference, *heads, right=range(1, 3 + len(heads)))
    by_name = {(c.name, c.token_class): c for c in evaluation.classes}
    digits = ".2%" if of_events else ".3f"
    for c in (c for c in evaluation.classes if c.name == names[0]):
        cells = [f"{by_name[name, c.token_class].loss:{digits}}" for name in shown]
        table.add_row(c.token_class, f"{c.starts:,}", f"{c.reference:{digits}}", *cells)
    if of_events:
        table.caption = "leak by class of the student's token; shared: of a shared vocabulary"
    return table


def _worst(evaluation: Evaluation, numbers: dict[str, str]) -> Table:
    of_events = bool(evaluation.event_measures)
    table = new_table(
        "worst tokens" if of_events else "worst rows",
        "map",
        "leak" if of_events else "excess",
        "teacher tokens there, their share"
        if of_events
        else "wanted, its share, and the map's weight",
        right=(1, 2),
    )
    for row in evaluation.worst_rows:
        wanted = [f"{quoted(t)} {share:.1%}" for t, share, _ in row.wanted]
        weights = [weight for *_, weight in row.wanted]
        if of_events:
            apart = [" leaks" if weight == 0 else "" for weight in weights]
        else:
            apart = [f", {weight:.4f}" for weight in weights]
        table.add_row(
            cell(f"{quoted(row.token)} #{row.student_id}"),
            numbers[row.name],
            f"{row.excess:.2%}" if of_events else f"{row.excess:.4f}",
            cell("\n".join(a + b for a, b in zip(wanted, apart, strict=True))),
        )
    table.caption = (
        "leak: at this token, as a share of all boundaries; leaks: in another event"
        if of_events
        else "excess: what the row adds to the cross-entropy above the floor"
    )
    return table
