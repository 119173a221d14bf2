"""Tables of `inspect` and `verify`, at most 80 columns wide."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from xtok.cli.tables._tables import STYLES, cell, new_table, printing
from xtok.tokenizers.classes import class_label
from xtok.tokenizers.display import format_weight, listed, percent, plural, quoted, shorten

if TYPE_CHECKING:
    from xtok.inspection.compare import Comparison
    from xtok.inspection.describe import ClassCoverage, Description, SideDescription
    from xtok.inspection.explain import ExplainedEntry, ExplainedRow, Explanation
    from xtok.inspection.verify import Verification


def description(d: Description) -> Iterator[RenderableType]:
    """Return tables of a map: sides, rows, columns, and examples."""
    yield from (_sides(d), _kinds(d), _columns(d))
    if d.coverage is not None:
        yield _classes(d.coverage)
    if d.examples:
        yield _rows(d.examples)


def explanation(explanation: Explanation[ExplainedRow]) -> Iterator[Table]:
    """Return the details of one row, or a table of several rows."""
    rows, matching = explanation.rows, explanation.rows_matching
    if len(rows) == 1 and matching is None:
        yield _row_details(rows[0])
    else:
        yield _rows(rows, matching)


def print_examples(rows: Sequence[ExplainedRow]) -> None:
    """Print rows on stderr, because stdout contains the map's path."""
    with suppress(OSError), printing(sys.stderr.write) as console:
        console.print(_rows(rows))


_MOST_STEPS = 10
_MOST_ENTRIES = 4  # maximum lines per row, so that five rows fit one screen


def _sides(d: Description) -> Table:
    rows = [(label, show(d.student), show(d.teacher)) for label, show in SIDE_ROWS.items()]
    table = new_table("map", "student (rows)", "teacher (columns)", rows=rows)
    table.add_section()
    for step in d.history[:_MOST_STEPS]:
        options = (shorten(f"{k}={v}") for k, v in sorted(step["options"].items()))
        table.add_row("made by", cell(shorten(str(step["stage"]))), cell(listed(options, 20)))
    if len(d.history) > _MOST_STEPS:
        table.add_row("", f"and {plural(len(d.history) - _MOST_STEPS, 'stage')} more")
    table.add_row("entries", f"{d.nnz:,}", f"at most {d.top_k} per row")
    return table


SIDE_ROWS: Mapping[str, Callable[[SideDescription], str]] = {
    "model": lambda s: s.model_id + (f" @ {s.revision}" if s.revision else ""),
    "read as": lambda s: s.backend or "unknown",
    "width": lambda s: f"{s.vocab_size:,} (from the {s.width_source})",
    "tokens": lambda s: (
        ", ".join(f"{n:,} {kind}" for kind, n in s.token_types.items()) or "unknown"
    ),
}


def _kinds(d: Description) -> Table:
    kinds, total = dict(d.rows_by_kind), sum(d.rows_by_kind.values())
    if d.enable_scale_trick:
        kinds["with a scale slot"] = d.rows_with_slot
    rows = [(label, f"{n:,}", percent(n / total, 2)) for label, n in kinds.items()]
    return new_table("rows by kind", "rows", "share", rows=rows, right=(1, 2))


def _classes(coverage: Sequence[ClassCoverage]) -> Table:
    rows = []
    for c in coverage:
        values = percent(c.exact / max(1, c.rows)), f"{c.mean_entries:.2f}", percent(c.slot_share)
        unused = f"{c.teacher_unreached:,}" if c.teacher_ids else "-"
        cells = f"{c.rows:,}", *(values if c.rows else "-" * 3), f"{c.teacher_ids:,}", unused
        rows.append((class_label(c.token_class), *cells))
    heads = "class", "rows", "exact", "entries", "slot", "teacher", "unused"
    caption = (
        "entries: mean per non-empty row, without slots. slot: share of the weight on slots. "
        "unused: teacher tokens that occur in no row."
    )
    return new_table(*heads, rows=rows, right=range(1, 7), caption=caption)


def _columns(d: Description) -> Table:
    num_used, width = d.columns_used, d.teacher.vocab_size
    caption = f"{num_used:,} of {width:,} columns in use ({percent(num_used / width)})"
    if d.enable_scale_trick:
        caption += f"; {percent(d.slot_share, 2)} of all weight is on scale slots"
    rows = [
        (quoted(c.token, c.teacher_id), str(c.teacher_id), f"{c.rows:,}", f"{c.weight:,.2f}")
        for c in d.largest_columns
    ]
    heads = "largest columns", "id", "rows", "weight"
    return new_table(*heads, rows=rows, right=(1, 2, 3), caption=caption)


def _rows(explained: Sequence[ExplainedRow], matching: int | None = None) -> Table:
    rows = []
    for row in explained:
        entries = row.entries if len(row.entries) <= _MOST_ENTRIES else row.entries[:3]
        lines = [*map(_entry, entries)] or ["(nothing)"]
        if len(entries) < len(row.entries):
            lines.append(f"and {len(row.entries) - len(entries)} more")
        if row.pieces and len(row.pieces) > 1:
            lines.append(f"pieces {_pieces(row.pieces)}")
        token = quoted(row.token, row.student_id)
        rows.append((token, str(row.student_id), row.kind, "\n".join(lines)))
    caption = None
    if matching is not None:
        caption = (
            f"{len(rows):,} of {plural(matching, 'row')}, sorted by the weight of the heaviest "
            "entry (lowest first)"
        )
    return new_table("token", "id", "kind", "entries", rows=rows, right=(1,), caption=caption)


def _entry(entry: ExplainedEntry) -> str:
    relation = f" ({entry.relation})" if entry.relation else ""
    return f"{format_weight(entry.weight)} {quoted(entry.token, entry.teacher_id)}{relation}"


def _row_details(row: ExplainedRow) -> Table:
    is_text = [class_label(row.token_class)] if row.bytes else []
    rows = [
        ("bytes", shorten(row.bytes) or "none"),
        ("type", "; ".join([row.type.replace("_", " "), *is_text]) or "unknown"),
        *([("roles", ", ".join(row.roles))] if row.roles else []),
        (row.kind, row.why),
    ]
    rows.append(("entries", "\n".join(map(_entry, row.entries)) or "(nothing)"))
    if row.pieces is not None:
        rows.append(("pieces", _pieces(row.pieces) or "the teacher cannot spell it"))
    heads = f"student id {row.student_id}", quoted(row.token, row.student_id)
    return new_table(*heads, rows=rows)


def _pieces(pieces: Sequence[str]) -> str:
    more = f" … ({len(pieces)} in all)" if len(pieces) > 10 else ""
    return "  ".join(map(quoted, pieces[:10])) + more


def comparison(c: Comparison) -> Iterator[Table]:
    """Return tables with the number of rows that differ, and examples."""
    weighed = ", weighted by the text" if c.weighted_by_text else ""
    counts = {
        "rows that differ": c.rows_that_differ,
        "rows with a different heaviest entry": c.rows_of_other_top,
    }
    shares = [(label, f"{n:,} ({percent(n / max(1, c.rows))})") for label, n in counts.items()]
    mean = f"mean total variation distance{weighed}", f"{c.mean_distance:.4f}"
    rows = [("rows", f"{c.rows:,}"), *shares, mean]
    yield new_table(f"{c.student} → {c.teacher}", "", rows=rows, right=(1,))
    if c.examples:
        examples: list[Sequence[str]] = []
        for row in c.examples:
            token, distance = f"{quoted(row.token)} #{row.student_id}", f"{row.distance:.3f}"
            text_share = [percent(row.share, 3)] if c.weighted_by_text else []
            examples.append((token, distance, *text_share, *map(_weights, (row.first, row.second))))
        share = ["share of text"] if c.weighted_by_text else []
        heads = "row", "distance", *share, "first map", "second map"
        yield new_table(*heads, rows=examples, right=(1,))


def _weights(entries: Sequence[tuple[str, float]]) -> str:
    lines = [f"{format_weight(weight)} {quoted(token)}" for token, weight in entries[:4]]
    return "\n".join(lines) or "(nothing)"


def print_verification(verification: Verification) -> None:
    """Print one line per check, and a summary."""
    widest = max(len(check.name) for check in verification.checks)
    failed = f"failed: {', '.join(verification.failed)}"
    with printing() as console:
        for check in verification.checks:
            level = check.level.ljust(8), STYLES.get(check.level, "dim")
            line = Text.assemble(level, check.name.ljust(widest + 2), cell(check.message))
            console.print(line, soft_wrap=True)
        summary = failed if verification.failed else "all checks passed"
        console.print(cell(f"{verification.path}: {summary}"), soft_wrap=True)
