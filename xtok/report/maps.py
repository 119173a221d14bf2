"""`inspect`, `explain` and `verify` as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from xtok.report._tables import STYLES, cell, header, new_table, printing
from xtok.vocab.display import plural, quoted, shortened

if TYPE_CHECKING:
    from xtok.inspection.explain import Explanation, SpelledPiece
    from xtok.inspection.inspect import Coverage, MapDescription, RowListing, SideDescription
    from xtok.inspection.verify import Verification
    from xtok.maps.projection_map import Row, RowEntry


def print_description(description: MapDescription, *, classes: bool = False) -> None:
    """Print a map's description as tables that fit 80 columns; by class of token on request."""
    with printing() as console:
        for table in (
            _overview(description),
            _rows(description),
            _columns(description),
            *([_classes(description.coverage)] if classes and description.coverage else []),
            *([_examples(description.examples)] if description.examples else []),
        ):
            console.print(table)
        if classes and description.coverage:
            console.print(cell(description.coverage.advice.sentence))


def print_listing(listing: RowListing) -> None:
    """Print rows of a map, the worst first, and how many there are."""
    with printing() as console:
        table = _examples(listing.rows)
        table.caption = (
            f"{len(listing.rows):,} of {plural(listing.found, 'row')}; first those with the least "
            "weight on their heaviest entry"
        )
        console.print(table)


def _overview(d: MapDescription) -> Table:
    table = new_table("map", "student (rows)", "teacher (columns)")
    for label, show in _SIDE_ROWS.items():
        table.add_row(label, cell(show(d.student)), cell(show(d.teacher)))
    table.add_section()
    for step in d.history:
        options = ", ".join(f"{k}={v}" for k, v in sorted(step["options"].items()))
        table.add_row("made by", cell(str(step["stage"])), cell(options))
    table.add_row("entries", f"{d.nnz:,}", f"at most {d.top_k} per row")
    return table


_SIDE_ROWS: Mapping[str, Callable[[SideDescription], str]] = {
    "model": lambda s: s.model_id + (f" @ {s.revision}" if s.revision else ""),
    "read as": lambda s: s.backend or "unknown",
    "width": lambda s: f"{_width(s)} (from the {s.width_source})",
    "tokens": lambda s: (
        ", ".join(f"{n:,} {kind}" for kind, n in s.token_types.items()) or "unknown"
    ),
}


def _width(side: SideDescription) -> str:
    return f"at least {side.vocab_size:,}" if side.width_source == "ids" else f"{side.vocab_size:,}"


def _rows(d: MapDescription) -> Table:
    total = sum(d.rows_by_kind.values())
    table = new_table(
        "rows by kind", "rows", "share", "rows by entries", "rows", "share", right=(1, 2, 4, 5)
    )
    kinds = [(kind, n) for kind, n in d.rows_by_kind.items()]
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


def _columns(d: MapDescription) -> Table:
    share = d.columns_used / d.teacher.vocab_size
    table = new_table("largest columns", "id", "rows", "weight", right=(1, 2, 3))
    for c in d.largest_columns:
        table.add_row(
            cell(quoted(c.token, c.teacher_id)),
            str(c.teacher_id),
            f"{c.rows:,}",
            f"{c.weight:,.2f}",
        )
    table.caption = f"{d.columns_used:,} of {_width(d.teacher)} columns in use ({share:.1%})"
    if d.enable_scale_trick:
        table.caption += f"; {d.slot_share:.2%} of all weight is on scale slots"
    return table


def _examples(rows: Iterable[Row]) -> Table:
    table = new_table("student token", "id", "kind", "teacher tokens", right=(1,))
    for row in rows:
        table.add_row(
            cell(quoted(row.token, row.student_id)),
            str(row.student_id),
            row.kind,
            cell("\n".join(_entry(e) for e in row.entries) or "(nothing)"),
        )
    return table


def _entry(e: RowEntry) -> str:
    slot = " (slot)" if e.is_slot else ""
    return f"{e.weight:.4f} {quoted(e.token, e.teacher_id)}{slot}"


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


def print_explanations(rows: Iterable[Explanation]) -> None:
    """Print why rows are as they are, as tables that fit 80 columns."""
    with printing() as console:
        for row in rows:
            console.print(_about(row))
            if row.entries:
                console.print(_explained(row))


def _about(row: Explanation) -> Table:
    table = new_table(f"student id {row.student_id}", header(quoted(row.token)))
    table.add_row("bytes", shortened(row.bytes) or "none")
    is_text = [row.token_class] if row.bytes else []
    table.add_row("type", "; ".join([row.type.replace("_", " "), *is_text]))
    if row.roles:
        table.add_row("roles", cell(", ".join(row.roles)))
    table.add_row(row.kind, row.why)
    if row.forward is not None:
        table.add_row("forward", cell(_pieces(row.forward) or "the teacher cannot spell it"))
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


def _explained(row: Explanation) -> Table:
    table = new_table("weight", "id", "teacher token", "what it is to the student's", right=(1,))
    for e in row.entries:
        token = cell(quoted(e.token))
        table.add_row(f"{e.weight:.4f}", str(e.teacher_id), token, e.relation)
    return table
