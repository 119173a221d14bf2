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
    names = list(dict.fromkeys(m.name for m in evaluation.measures))
    numbers = {name: f"{n}" for n, name in enumerate(names, start=1)}
    with printing() as console:
        console.print(_measures(evaluation, numbers, wraps=console.width < 78))
        for name, number in numbers.items():
            console.print(cell(f"map {number}: {name}"))
        console.print(_classes(evaluation, names, numbers))
        if evaluation.worst_rows:
            console.print(_worst(evaluation, numbers))
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
        "this text; closed: the share of the way between them. "
        f"{evaluation.num_bytes:,} bytes of text"
    )
    if evaluation.differing:
        share = evaluation.lost_bytes / max(1, evaluation.num_bytes)
        table.caption += f"; {share:.1%} skipped where the two sides spell text differently"
    if any(slots.values()):
        weights = ", ".join(f"map {numbers[n]} {w:.1%}" for n, w in slots.items() if w)
        table.caption += f"; weight on slots: {weights}"
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
    shown = names[:4]
    heads = [f"map {numbers[name]}" if len(names) > 1 else "cross-entropy" for name in shown]
    table = new_table("student token", "starts", "floor", *heads, right=range(1, 3 + len(heads)))
    by_name = {(c.name, c.token_class): c for c in evaluation.classes}
    for c in (c for c in evaluation.classes if c.name == names[0]):
        cells = [f"{by_name[name, c.token_class].cross_entropy:.3f}" for name in shown]
        table.add_row(c.token_class, f"{c.starts:,}", f"{c.floor:.3f}", *cells)
    return table


def _worst(evaluation: Evaluation, numbers: dict[str, str]) -> Table:
    table = new_table(
        "worst rows", "map", "excess", "wanted, its share, and the map's weight", right=(1, 2)
    )
    for row in evaluation.worst_rows:
        wanted = "\n".join(
            f"{quoted(t)} {share:.1%}, {weight:.4f}" for t, share, weight in row.wanted
        )
        token = cell(f"{quoted(row.token)} #{row.student_id}")
        table.add_row(token, numbers[row.name], f"{row.excess:.4f}", cell(wanted))
    table.caption = "excess: what the row adds to the cross-entropy above the floor"
    return table
