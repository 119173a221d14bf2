"""`inspect` and `verify` as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from xtok.report._tables import STYLES, cell, header, new_table, printing, weight
from xtok.vocab.display import plural, quoted, shortened

if TYPE_CHECKING:
    from xtok.inspection.compare import Comparison
    from xtok.inspection.inspect import Coverage, Inspection, SideDescription
    from xtok.inspection.rows import InspectedEntry, InspectedRow, SpelledPiece
    from xtok.inspection.verify import Verification


def print_inspection(inspection: Inspection, *, overview: bool = True) -> None:
    """Print a map or an event map; without its overview, the rows or the comparison in full."""
    with printing() as console:
        for part in (_overview if overview else _details)(inspection):
            console.print(part)


def _overview(i: Inspection) -> Iterator[RenderableType]:
    yield _sides(i)
    steps = i.history[:_MOST_STEPS]
    yield from (_measures(step["measures"]) for step in steps if "measures" in step)
    yield _kinds(i)
    if i.largest_columns:
        yield _columns(i)
    if i.coverage is not None:
        yield _classes(i.coverage)
    if i.rows:
        yield _rows(i)


def _details(i: Inspection) -> Iterator[RenderableType]:
    if i.comparison is not None:
        yield from _comparison(i.comparison)
        return
    if i.rows_matching is None:
        yield from map(_about, i.rows)
    yield _rows(i)


_MOST_STEPS = 10


def _sides(i: Inspection) -> Table:
    rows = [(label, show(i.student), show(i.teacher)) for label, show in _SIDE_ROWS.items()]
    table = new_table("map", "student (rows)", "teacher (columns)", rows=rows)
    table.add_section()
    for step in i.history[:_MOST_STEPS]:
        options = shortened(", ".join(f"{k}={v}" for k, v in sorted(step["options"].items())))
        table.add_row("made by", cell(shortened(str(step["stage"]))), cell(options))
    if len(i.history) > _MOST_STEPS:
        table.add_row("", f"and {plural(len(i.history) - _MOST_STEPS, 'stage')} more")
    if i.top_k is None:
        events = sum(i.rows_by_kind.values())
        table.add_row("events", f"{events:,}", f"of {i.nnz:,} tokens")
    else:
        table.add_row("entries", f"{i.nnz:,}", f"at most {i.top_k} per row")
    return table


_SIDE_ROWS: Mapping[str, Callable[[SideDescription], str]] = {
    "model": lambda s: s.model_id + (f" @ {s.revision}" if s.revision else ""),
    "read as": lambda s: s.backend or "unknown",
    "width": lambda s: f"{s.vocab_size:,} (from the {s.width_source})",
    "tokens": lambda s: (
        ", ".join(f"{n:,} {kind}" for kind, n in s.token_types.items()) or "unknown"
    ),
}

_STEPS = ("shared vocabulary", "bytes alone", "these events")


def _measures(points: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for name, point in zip(_STEPS, points, strict=False):
        bits = f"{point['student_bits']:.2f}, {point['teacher_bits']:.2f}"
        rows.append((name, f"{point['num_events']:,}", f"{point['leak']:.2%}", bits))
    caption = (
        "leak: how often the two tokens at a shared boundary are in different events; bits: the "
        "entropy of the student's and of the teacher's events"
    )
    heads = "on the counted text", "events", "leak", "bits"
    return new_table(*heads, rows=rows, right=(1, 2, 3), caption=caption)


_EVENT_KINDS = {
    "one_to_one": "1 token each",
    "one_student": "1 student token",
    "one_teacher": "1 teacher token",
    "several": "several each",
    "rest": "unlinked tokens",
}


def _kinds(i: Inspection) -> Columns:
    what, of, by = ("events", "of", "tokens") if i.top_k is None else ("rows", "by kind", "entries")
    kinds = {_EVENT_KINDS.get(kind, kind): n for kind, n in i.rows_by_kind.items()}
    if i.enable_scale_trick:
        kinds["with a scale slot"] = i.rows_with_slot
    sizes = {str(size): n for size, n in i.rows_by_entries.items()}
    if len(sizes) > 8:
        first, rest = list(sizes.items())[:7], list(sizes.items())[7:]
        sizes = {**dict(first), f"{rest[0][0]} or more": sum(n for _, n in rest)}
    total = sum(i.rows_by_kind.values())
    tables = []
    for heading, counts in ((f"{what} {of}", kinds), (f"{what} by {by}", sizes)):
        rows = [(label, f"{n:,}", f"{n / total:.2%}") for label, n in counts.items()]
        tables.append(new_table(heading, what, "share", rows=rows, right=(1, 2)))
    return Columns(tables)


def _classes(coverage: Coverage) -> Table:
    rows = []
    for c in coverage.classes:
        of_rows = f"{c.exact / max(1, c.rows):.1%}", f"{c.mean_entries:.2f}", f"{c.slot_share:.1%}"
        unused = f"{c.teacher_unreached:,}" if c.teacher_ids else "-"
        shown = of_rows if c.rows else "-" * 3
        rows.append((c.label, f"{c.rows:,}", *shown, f"{c.teacher_ids:,}", unused))
    heads = "class", "rows", "exact", "entries", "slot", "teacher", "unused"
    caption = (
        "entries: per row with any, without its slot; slot: weight on slots; unused: teacher "
        "tokens that no row leads to"
    )
    return new_table(*heads, rows=rows, right=range(1, 7), caption=caption)


def _columns(i: Inspection) -> Table:
    used, width = i.columns_used or 0, i.teacher.vocab_size
    caption = f"{used:,} of {width:,} columns in use ({used / width:.1%})"
    if i.enable_scale_trick:
        caption += f"; {i.slot_share:.2%} of all weight is on scale slots"
    rows = [
        (quoted(c.token, c.teacher_id), str(c.teacher_id), f"{c.rows:,}", f"{c.weight:,.2f}")
        for c in i.largest_columns
    ]
    heads = "largest columns", "id", "rows", "weight"
    return new_table(*heads, rows=rows, right=(1, 2, 3), caption=caption)


def _rows(i: Inspection) -> Table:
    rows = []
    for row in i.rows:
        entries = [_entry(e) for e in row.entries]
        if row.num_entries > len(entries):
            entries.append(f"… and {row.num_entries - len(entries):,} more")
        token, lines = quoted(row.token, row.token_id), "\n".join(entries) or "(nothing)"
        rows.append((token, str(row.token_id), row.kind, lines))
    caption = None
    if i.rows_matching is not None:
        caption = (
            f"{len(i.rows):,} of {plural(i.rows_matching, 'row')}; first those with the least "
            "weight on their heaviest entry"
        )
    return new_table("token", "id", "kind", "entries", rows=rows, right=(1,), caption=caption)


def _entry(e: InspectedEntry) -> str:
    before = e.side if e.weight is None else weight(e.weight)
    relation = f" ({e.relation})" if e.relation else ""
    return f"{before} {quoted(e.token, e.token_id)}{relation}"


def _about(row: InspectedRow) -> Table:
    is_text = [row.token_class] if row.bytes else []
    rows = [
        ("bytes", shortened(row.bytes) or "none"),
        ("type", "; ".join([row.type.replace("_", " "), *is_text]) or "unknown"),
        *([("roles", ", ".join(row.roles))] if row.roles else []),
        (row.kind, row.why),
    ]
    if row.forward is not None:
        other = "student" if row.side == "teacher" else "teacher"
        rows.append(("forward", _pieces(row.forward) or f"the {other} cannot spell it"))
    if row.reverse is not None:
        more = f" and {row.reverse_count or 0:,} in all" if (row.reverse_count or 0) > 10 else ""
        rows.append(("reverse", (_pieces(row.reverse) or "no teacher token") + more))
    for stage in row.stages:
        name, _, what = stage.partition(": ")
        rows.append((name, what))
    token = header(quoted(row.token, row.token_id))
    return new_table(f"{row.side} id {row.token_id}", token, rows=rows)


def _pieces(pieces: Sequence[SpelledPiece]) -> str:
    shown = [f"{quoted(p.token)} {weight(p.weight) if p.weight else '-'}" for p in pieces[:10]]
    return "  ".join(shown) + (f" … ({len(pieces)} in all)" if len(pieces) > 10 else "")


def _comparison(c: Comparison) -> Iterator[Table]:
    """Show how many rows differ, and examples."""
    weighed = ", weighted by the text" if c.weighted_by_text else ""
    counts = {
        "rows that differ": c.rows_that_differ,
        "rows whose heaviest entry is another": c.rows_of_other_top,
    }
    shares = [(label, f"{n:,} ({n / max(1, c.rows):.1%})") for label, n in counts.items()]
    distance = f"mean total variation distance{weighed}", f"{c.mean_distance:.4f}"
    rows = [("rows", f"{c.rows:,}"), *shares, distance]
    yield new_table(header(f"{c.student} → {c.teacher}"), "", rows=rows, right=(1,))
    if c.examples:
        examples = [
            (
                f"{quoted(row.token)} #{row.student_id}",
                f"{row.distance:.3f}",
                *([f"{row.share:.3%}"] if c.weighted_by_text else []),
                _weights(row.first),
                _weights(row.second),
            )
            for row in c.examples
        ]
        share = ["share of text"] if c.weighted_by_text else []
        heads = "row", "distance", *share, "first map", "second map"
        yield new_table(*heads, rows=examples, right=(1,))


def _weights(entries: Sequence[tuple[str, float]]) -> str:
    return "\n".join(f"{weight(w)} {quoted(token)}" for token, w in entries[:4]) or "(nothing)"


def print_verification(verification: Verification) -> None:
    """Print a line per check, and a summary."""
    widest = max(len(check.name) for check in verification.checks)
    failed = f"failed: {', '.join(verification.failed)}"
    with printing() as console:
        for check in verification.checks:
            line = Text()
            line.append(check.level.ljust(8), style=STYLES.get(check.level, "dim"))
            line.append(check.name.ljust(widest + 2))
            line.append_text(cell(check.message))
            console.print(line, soft_wrap=True)
        summary = failed if verification.failed else "every check holds"
        console.print(cell(f"{verification.path}: {summary}"), soft_wrap=True)
