"""`inspect` and `verify` as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from xtok.report._tables import STYLES, cell, header, new_table, printing
from xtok.vocab.display import plural, quoted, shortened

if TYPE_CHECKING:
    from xtok.inspection.compare import Comparison
    from xtok.inspection.inspect import Coverage, Inspection, SideDescription
    from xtok.inspection.rows import InspectedEntry, InspectedRow, SpelledPiece
    from xtok.inspection.verify import Verification


def print_inspection(inspection: Inspection, *, overview: bool = True) -> None:
    """Print a map or an event map; without its overview, the rows or the comparison in full."""
    with printing() as console:
        if overview:
            for table in _description(inspection):
                console.print(table)
            if inspection.coverage is not None:
                console.print(cell(inspection.coverage.advice.sentence))
        elif inspection.comparison is not None:
            for table in _comparison(inspection.comparison):
                console.print(table)
        elif inspection.rows_matching is not None:
            listing = _rows(inspection.rows)
            listing.caption = (
                f"{len(inspection.rows):,} of {plural(inspection.rows_matching, 'row')}; first "
                "those with the least weight on their heaviest entry"
            )
            console.print(listing)
        else:
            for row in inspection.rows:
                console.print(_about(row))
            console.print(_rows(inspection.rows))


def _description(i: Inspection) -> Iterator[Table]:
    yield _overview(i)
    yield from map(_measures, (s["measures"] for s in i.history if "measures" in s))
    yield _kinds(i)
    if i.largest_columns:
        yield _columns(i)
    if i.coverage is not None:
        yield _classes(i.coverage)
    if i.rows:
        yield _rows(i.rows)


def _overview(d: Inspection) -> Table:
    table = new_table("map", "student (rows)", "teacher (columns)")
    for label, show in _SIDE_ROWS.items():
        table.add_row(label, cell(show(d.student)), cell(show(d.teacher)))
    table.add_section()
    for step in d.history:
        options = ", ".join(f"{k}={v}" for k, v in sorted(step["options"].items()))
        table.add_row("made by", cell(str(step["stage"])), cell(options))
    if d.top_k is None:
        events = sum(d.rows_by_kind.values())
        table.add_row("events", f"{events:,}", f"of {d.nnz:,} tokens")
    else:
        table.add_row("entries", f"{d.nnz:,}", f"at most {d.top_k} per row")
    return table


_STEPS = ("shared vocabulary", "bytes alone", "these events")


def _measures(points: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("on the counted text", "events", "leak", "bits", right=(1, 2, 3))
    for name, point in zip(_STEPS, points, strict=False):
        bits = f"{point['student_bits']:.2f}, {point['teacher_bits']:.2f}"
        table.add_row(name, f"{point['num_events']:,}", f"{point['leak']:.2%}", bits)
    table.caption = (
        "leak: how often the two tokens at a shared boundary are in different events; bits: the "
        "entropy of the student's and of the teacher's events"
    )
    return table


_SIDE_ROWS: Mapping[str, Callable[[SideDescription], str]] = {
    "model": lambda s: s.model_id + (f" @ {s.revision}" if s.revision else ""),
    "read as": lambda s: s.backend or "unknown",
    "width": lambda s: f"{s.vocab_size:,} (from the {s.width_source})",
    "tokens": lambda s: (
        ", ".join(f"{n:,} {kind}" for kind, n in s.token_types.items()) or "unknown"
    ),
}


_EVENT_KINDS = {
    "one_to_one": "1 token each",
    "one_student": "1 student token",
    "one_teacher": "1 teacher token",
    "several": "several each",
    "rest": "unlinked tokens",
}


def _kinds(d: Inspection) -> Table:
    total = sum(d.rows_by_kind.values())
    heads = ("rows by kind", "rows", "share", "rows by entries", "rows", "share")
    if d.top_k is None:
        heads = ("events of", "events", "share", "events by tokens", "events", "share")
    table = new_table(*heads, right=(1, 2, 4, 5))
    kinds = [(_EVENT_KINDS.get(kind, kind), n) for kind, n in d.rows_by_kind.items()]
    if d.enable_scale_trick:
        kinds.append(("with a scale slot", d.rows_with_slot))
    sizes = [(str(size), n) for size, n in d.rows_by_entries.items()]
    if len(sizes) > 8:
        tail = sum(n for _, n in sizes[7:])
        sizes = [*sizes[:7], (f"{sizes[7][0]} or more", tail)]
    for i in range(max(len(kinds), len(sizes))):
        cells: list[str] = []
        for part in (kinds, sizes):
            label, n = part[i] if i < len(part) else ("", -1)
            cells += [label, f"{n:,}", f"{n / total:.2%}"] if n >= 0 else ["", "", ""]
        table.add_row(*cells)
    return table


def _classes(coverage: Coverage) -> Table:
    table = new_table(
        "class", "rows", "exact", "entries", "slot", "teacher", "unused", right=range(1, 7)
    )
    for c in coverage.classes:
        rows = [f"{c.rows:,}"] + ["-"] * 3
        if c.rows:
            of_rows = (f"{c.exact / c.rows:.1%}", f"{c.mean_entries:.2f}", f"{c.slot_share:.1%}")
            rows[1:] = of_rows
        unused = f"{c.teacher_unreached:,}" if c.teacher_ids else "-"
        table.add_row(c.label, *rows, f"{c.teacher_ids:,}", unused)
    table.caption = (
        "entries: per row with any, without its slot; slot: weight on slots; unused: teacher "
        "tokens that no row leads to"
    )
    return table


def _columns(d: Inspection) -> Table:
    used = d.columns_used or 0
    share = used / d.teacher.vocab_size
    table = new_table("largest columns", "id", "rows", "weight", right=(1, 2, 3))
    for c in d.largest_columns:
        table.add_row(
            cell(quoted(c.token, c.teacher_id)),
            str(c.teacher_id),
            f"{c.rows:,}",
            f"{c.weight:,.2f}",
        )
    table.caption = f"{used:,} of {d.teacher.vocab_size:,} columns in use ({share:.1%})"
    if d.enable_scale_trick:
        table.caption += f"; {d.slot_share:.2%} of all weight is on scale slots"
    return table


def _rows(rows: Iterable[InspectedRow]) -> Table:
    table = new_table("token", "id", "kind", "entries", right=(1,))
    for row in rows:
        entries = [_entry(e) for e in row.entries]
        if row.num_entries > len(entries):
            entries.append(f"… and {row.num_entries - len(entries):,} more")
        table.add_row(
            cell(quoted(row.token, row.token_id)),
            str(row.token_id),
            row.kind,
            cell("\n".join(entries) or "(nothing)"),
        )
    return table


def _entry(e: InspectedEntry) -> str:
    before = e.side if e.weight is None else f"{e.weight:.4f}"
    relation = f" ({e.relation})" if e.relation else ""
    return f"{before} {quoted(e.token, e.token_id)}{relation}"


def print_verification(verification: Verification) -> None:
    """Print a line per check, and a summary."""
    widest = max(len(check.name) for check in verification.checks)
    with printing() as console:
        for check in verification.checks:
            line = Text()
            line.append(check.level.ljust(8), style=STYLES.get(check.level, "dim"))
            line.append(check.name.ljust(widest + 2))
            line.append_text(cell(check.message))
            console.print(line, soft_wrap=True)
        failed = (
            f"failed: {', '.join(verification.failed)}"
            if verification.failed
            else "every check holds"
        )
        console.print(cell(f"{verification.path}: {failed}"), soft_wrap=True)


def _about(row: InspectedRow) -> Table:
    table = new_table(f"{row.side} id {row.token_id}", header(quoted(row.token, row.token_id)))
    table.add_row("bytes", shortened(row.bytes) or "none")
    is_text = [row.token_class] if row.bytes else []
    table.add_row("type", "; ".join([row.type.replace("_", " "), *is_text]) or "unknown")
    if row.roles:
        table.add_row("roles", cell(", ".join(row.roles)))
    table.add_row(row.kind, cell(row.why))
    if row.forward is not None:
        other = "student" if row.side == "teacher" else "teacher"
        table.add_row("forward", cell(_pieces(row.forward) or f"the {other} cannot spell it"))
    if row.reverse is not None:
        more = f" and {row.reverse_count or 0:,} in all" if (row.reverse_count or 0) > 10 else ""
        table.add_row("reverse", cell((_pieces(row.reverse) or "no teacher token") + more))
    for stage in row.stages:
        name, _, what = stage.partition(": ")
        table.add_row(cell(name), cell(what))
    return table


def _pieces(pieces: Sequence[SpelledPiece]) -> str:
    shown = [f"{quoted(p.token)} {f'{p.weight:.4f}' if p.weight else '-'}" for p in pieces[:10]]
    return "  ".join(shown) + (f" … ({len(pieces)} in all)" if len(pieces) > 10 else "")


def _comparison(comparison: Comparison) -> Iterator[Table]:
    """Show how many rows differ, by class, and examples."""
    yield _distance(comparison)
    if comparison.classes:
        yield _class_differences(comparison)
    if comparison.examples:
        yield _differences(comparison)


def _distance(comparison: Comparison) -> Table:
    table = new_table(header(f"{comparison.student} → {comparison.teacher}"), "", right=(1,))
    table.add_row("rows", f"{comparison.rows:,}")
    total = max(1, comparison.rows)
    for label, number in (
        ("rows that differ", comparison.rows_that_differ),
        ("rows whose heaviest entry is another", comparison.rows_of_other_top),
    ):
        table.add_row(label, f"{number:,} ({number / total:.1%})")
    weighed = ", weighted by the text" if comparison.weighted_by_text else ""
    table.add_row(f"mean total variation distance{weighed}", f"{comparison.mean_distance:.4f}")
    return table


def _class_differences(comparison: Comparison) -> Table:
    table = new_table("student token", "rows", "that differ", "mean distance", right=range(1, 4))
    for c in comparison.classes:
        table.add_row(
            c.token_class, f"{c.rows:,}", f"{c.rows_that_differ:,}", f"{c.mean_distance:.4f}"
        )
    return table


def _differences(comparison: Comparison) -> Table:
    share = ["share of text"] if comparison.weighted_by_text else []
    table = new_table("row", "distance", *share, "first map", "second map", right=(1,))
    for row in comparison.examples:
        table.add_row(
            cell(f"{quoted(row.token)} #{row.student_id}"),
            f"{row.distance:.3f}",
            *([f"{row.share:.3%}"] if share else []),
            *(
                cell("\n".join(f"{w:.4f} {quoted(t)}" for t, w in entries[:4]) or "(nothing)")
                for entries in (row.first, row.second)
            ),
        )
    return table
