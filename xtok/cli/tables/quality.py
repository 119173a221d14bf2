"""Tables of `evaluate`, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from xtok.cli.tables._tables import cell, new_table, printing
from xtok.inspection.bootstrap import format_interval
from xtok.tokenizers.classes import class_label
from xtok.tokenizers.display import format_weight, percent, quoted

if TYPE_CHECKING:
    from xtok.inspection.evaluate import Evaluation
    from xtok.inspection.measures import EventMapMeasures, MapMeasures


def print_evaluation(evaluation: Evaluation) -> None:
    """Print measures by text and token class, the worst rows, and verdicts."""
    map_numbers = {verdict.name: str(n) for n, verdict in enumerate(evaluation.verdicts, start=1)}
    with printing() as console:
        console.print(_measures(evaluation, map_numbers, wraps=console.width < 78))
        for name, map_number in map_numbers.items():
            console.print(cell(f"map {map_number}: {name}"))
        console.print(_classes(evaluation, map_numbers))
        if evaluation.worst_rows:
            console.print(_worst(evaluation, map_numbers))
        for note in evaluation.notes:
            console.print(cell(f"note: {note}"))
        for verdict in evaluation.verdicts:
            console.print(cell(str(verdict)))
        if evaluation.ranking is not None:
            console.print(cell(evaluation.ranking.sentence), soft_wrap=True)


_MAPS = (
    "cross-entropy in nats, ± half of its 95 % interval; at starts (shared token boundaries) for "
    "gold and H-KL, over chunks for P-KL. recipe: X-Token's map without slots. floor: the best map "
    "for this text. closed: position between recipe (0 %) and floor (100 %)."
)

_EVENTS = (
    "leak: share of the shared boundaries where the tokens are in different events. student, "
    "teacher: entropy of the tokens and of the events there, in bits. kept: the smaller event "
    "entropy, divided by the smaller token entropy."
)


def _measures(evaluation: Evaluation, map_numbers: Mapping[str, str], *, wraps: bool) -> Table:
    ranking, is_events = evaluation.ranking, bool(evaluation.event_measures)
    heads, legend = ["leak", "student", "teacher", "kept"], _EVENTS
    if not is_events:
        first, second = ["at starts", "closed"], ["over chunks", "closed"]
        heads = [*(second + first if evaluation.by_chunk else first + second), "coverage", "top-1"]
        legend = _MAPS
    caption = f"{legend} {evaluation.num_bytes:,} bytes of text"
    table = new_table("text, map", *heads, right=range(1, 1 + len(heads)), caption=caption)
    table.columns[0].min_width = 8
    for column in table.columns[1:]:
        column.no_wrap = not wraps
    measured = (*evaluation.measures, *evaluation.event_measures)
    for group, grouped in groupby(measured, key=attrgetter("group")):
        measures: list[Any] = list(grouped)
        if ranking is not None:
            measures.sort(key=lambda m: m.losses(ranking.loss).cross_entropy.value)
        table.add_section()
        table.add_row(cell(group))
        rows = _event_rows if is_events else partial(_map_rows, by_chunk=evaluation.by_chunk)
        for row in rows(measures, map_numbers):
            table.add_row(*row)
    return table


def _map_rows(
    measures: Sequence[MapMeasures], map_numbers: Mapping[str, str], *, by_chunk: bool
) -> Iterator[Sequence[str]]:
    losses = {}
    for m in measures:
        views = m.at_starts, m.over_chunks
        losses[map_numbers[m.name]] = views[::-1] if by_chunk else views
    for label in ("recipe", "floor"):
        numbers_by_cells: dict[tuple[str, ...], list[str]] = {}  # values depend on `top_k`
        for map_number, views in losses.items():
            values = tuple(f"{getattr(view, label):.3f}" for view in views)
            numbers_by_cells.setdefault(values, []).append(map_number)
        for (first, second), maps in numbers_by_cells.items():
            which = f" of {', '.join(maps)}" if len(numbers_by_cells) > 1 else ""
            yield f"  {label}{which}", first, "", second
    for m, (map_number, views) in zip(measures, losses.items(), strict=True):
        cells = []
        for view in views:
            cells.append(format_interval(view.cross_entropy))
            cells.append("–" if view.closed is None else f"{view.closed:.2f}")
        yield f"  map {map_number}", *cells, percent(m.coverage, 2), percent(m.top_1)


def _event_rows(
    measures: Sequence[EventMapMeasures], map_numbers: Mapping[str, str]
) -> Iterator[Sequence[str]]:
    first = measures[0]
    yield "  tokens", "", f"{first.student_token_bits:.2f}", f"{first.teacher_token_bits:.2f}"
    yield "  shared vocabulary", percent(first.shared_leak, 2)
    for m in measures:
        bits = f"{m.student_bits:.2f}", f"{m.teacher_bits:.2f}"
        yield f"  map {map_numbers[m.name]}", percent(m.leak, 2), *bits, percent(m.kept)


def _measured_place(evaluation: Evaluation) -> str:
    return "over chunks" if evaluation.by_chunk else "at starts"


def _classes(evaluation: Evaluation, map_numbers: Mapping[str, str]) -> Table:
    """Return a table with a row per token class and a column per map (at most four)."""
    if evaluation.event_measures:
        show: Callable[[float], str] = partial(percent, digits=2)
        measure, reference = "leak", "shared"
        caption = "leak by class of the student's token; shared: leak of a shared vocabulary"
    else:
        show = "{:.3f}".format
        measure, reference = "cross-entropy", "floor"
        caption = f"cross-entropy {_measured_place(evaluation)}, by class of the student's token"
    names = list(map_numbers)[:4]
    by_map = [[c for c in evaluation.classes if c.name == n] for n in names]
    references = {tuple(c.reference for c in classes) for classes in by_map}
    if len(references) > 1:  # the maps have different `top_k`
        reference += f" of {map_numbers[names[0]]}"
    rows = []
    for group in zip(*by_map, strict=True):
        first, values = group[0], (group[0].reference, *(c.loss for c in group))
        rows.append((class_label(first.token_class), f"{first.starts:,}", *map(show, values)))
    heads = [f"map {map_numbers[name]}" for name in names] if names[1:] else [measure]
    return new_table(
        "student token", "starts", reference, *heads, rows=rows, right=range(1, 3 + len(heads)),
        caption=caption,
    )  # fmt: skip


def _worst(evaluation: Evaluation, map_numbers: Mapping[str, str]) -> Table:
    is_events = bool(evaluation.event_measures)
    heads = "worst rows", "map", "excess", "teacher tokens: share in the text, weight"
    caption = "excess: the row's part of the cross-entropy above the floor, "
    caption += _measured_place(evaluation)
    if is_events:
        heads = "worst tokens", "map", "leak", "teacher tokens: share in the text"
        caption = "leak: at this token, as a share of all boundaries"
    rows = []
    for row in evaluation.worst_rows:
        lines = []
        for token, share, in_map in row.wanted:
            suffix = " leaks" * (in_map == 0) if is_events else f", {format_weight(in_map)}"
            lines.append(f"{quoted(token)} {percent(share)}{suffix}")
        name = f"{quoted(row.token)} #{row.student_id}"
        excess = percent(row.excess, 2) if is_events else format_weight(row.excess)
        rows.append((name, map_numbers[row.name], excess, "\n".join(lines)))
    return new_table(*heads, rows=rows, right=(1, 2), caption=caption)
