"""What people see: dataclasses as tables, JSON or lines, and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xtok.describe import EntryDescription, MapDescription, RowDescription, SideDescription
from xtok.projection import StageReport
from xtok.tokens import printable, shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from xtok.diagnosis import Diagnosis, PairDiagnosis, TokenizerDiagnosis
    from xtok.sharing import Overlap


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr, on a terminal only."""
    from tqdm import tqdm

    with tqdm(
        total=total, desc=label, unit="tok", unit_scale=True, disable=None, leave=False
    ) as bar:
        yield bar.update


def to_json(result: DataclassInstance) -> str:
    """Return a dataclass as one JSON object; tokens are escaped as `tokens.escape` does it."""
    return json.dumps(asdict(result), ensure_ascii=False, indent=2)


def print_reports(reports: Iterable[StageReport]) -> None:
    """Print what the stages did and left out on stderr, a line each."""
    for report in reports:
        counts = ", ".join(f"{_number(n)} {what}" for what, n in report.counts.items() if n)
        print(f"{report.stage}: {counts or 'nothing to do'}", file=sys.stderr)  # noqa: T201
        print_notes((*report.failures, *report.notes))


def print_notes(notes: Iterable[str]) -> None:
    """Print what is to be known on stderr, a line each."""
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)  # noqa: T201


def print_error(message: str, hint: str) -> None:
    """Print what went wrong with one of several things on stderr, as the command line does."""
    print(f"error: {printable(message)}\nhint: {printable(hint)}", file=sys.stderr)  # noqa: T201


def print_examples(rows: Iterable[RowDescription]) -> None:
    """Print rows of a map on stderr, a line each."""
    for row in rows:
        entries = "  ".join(f"{_quoted(e.token, e.teacher_id)} {e.weight:.4f}" for e in row.entries)
        token = _quoted(row.token, row.student_id)
        print(f"{row.kind:>8}  {token} → {entries or '(nothing)'}", file=sys.stderr)  # noqa: T201


def print_description(description: MapDescription, console: Console | None = None) -> None:
    """Print a map's description as tables that fit 80 columns."""
    console = console or _console()
    with console.capture() as captured:  # Rich has an exit of its own for a closed pipe
        for table in (
            _overview(description),
            _rows(description),
            _columns(description),
            *([_examples(description.examples)] if description.examples else []),
        ):
            console.print(table)
    print(captured.get(), end="")  # noqa: T201


def print_diagnosis(found: Diagnosis, console: Console | None = None) -> None:
    """Print a page per tokenizer, and what a map between two will meet, in 80 columns."""
    console = console or _console()
    for one in found.tokenizers:
        console.print(_page(one))
    if found.pair is not None:
        console.print(_pair(found.pair))
    if found.failed:
        console.print(_text(f"failed: {'; '.join(found.failed)}"))


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}


def _page(one: TokenizerDiagnosis) -> Table:
    from rich.text import Text

    table = _table(_plain(one.model_id), "", "finding")
    name = ""
    for check in one.checks:
        repeated = "" if check.name == name else check.name
        name = check.name
        level = Text(check.level, _STYLES[check.level])
        table.add_row(_text(repeated), level, _text(check.message))
    return table


def _pair(pair: PairDiagnosis) -> Table:
    table = _table("a map between them", _plain(pair.student), _plain(pair.teacher))
    share = f"{pair.shared:,} by bytes, {pair.student_share:.1%} of the student's"
    table.add_row("role in the map", "student (rows)", "teacher (columns)")
    table.add_row("shared tokens", share, "")
    table.add_row("digits in a token", f"at most {pair.digits[0]}", f"at most {pair.digits[1]}")
    numerals = f"{pair.numerals:,} of several digits"
    table.add_row("numerals", numerals, f"has {pair.numerals_shared:,} of these")
    table.add_row("spaces in a token", f"at most {pair.spaces[0]}", f"at most {pair.spaces[1]}")
    lonely = ", ".join(pair.roles_without_counterpart) or "none"
    table.add_row("roles alone", lonely, "")
    table.add_row("loss that suits", pair.loss, _text(pair.why))
    return table


def print_overlap(found: Overlap, console: Console | None = None) -> None:
    """Print the matrix in blocks of columns that fit: shares above the diagonal, counts below."""
    console = console or _console()
    places = range(len(found.model_ids))
    for start in range(0, len(places), _COLUMNS):
        block = places[start : start + _COLUMNS]
        table = _table("tokenizer", *(str(j + 1) for j in block))
        for column in table.columns[1:]:
            column.justify = "right"
            column.no_wrap = True
        for i in places:
            cells = (
                f"{found.shares[i][j]:.1%}" if j > i else f"{found.counts[i][j]:,}" for j in block
            )
            table.add_row(_text(f"{i + 1} {found.model_ids[i]}"), *cells)
        if block[-1] == places[-1]:
            table.caption = (
                "on the diagonal: different byte strings; below it: those that both have; above "
                "it: as a share of the smaller vocabulary"
            )
        console.print(table)


_COLUMNS = 6


def _overview(d: MapDescription) -> Table:
    table = _table("map", "student (rows)", "teacher (columns)")
    for label, show in _SIDE_ROWS.items():
        table.add_row(label, _text(show(d.student)), _text(show(d.teacher)))
    table.add_section()
    for step in d.history:
        options = ", ".join(f"{k}={v}" for k, v in sorted(step["options"].items()))
        table.add_row("made by", _text(str(step["stage"])), _text(options))
    table.add_row("entries", f"{d.nnz:,}", f"at most {d.top_k} per row")
    return table


_SIDE_ROWS: Mapping[str, Callable[[SideDescription], str]] = {
    "model": lambda s: s.model_id + (f" @ {s.revision}" if s.revision else ""),
    "read as": lambda s: s.backend or "unknown",
    "width": lambda s: f"{s.vocab_size:,} (from the {s.width_source})",
    "tokens": lambda s: (
        ", ".join(f"{n:,} {kind}" for kind, n in s.token_types.items()) or "unknown"
    ),
}


def _rows(d: MapDescription) -> Table:
    total = sum(d.rows_by_kind.values())
    table = _table("rows by kind", "rows", "share", "rows by entries", "rows", "share")
    for column in (1, 2, 4, 5):
        table.columns[column].justify = "right"
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


def _columns(d: MapDescription) -> Table:
    share = d.columns_used / d.teacher.vocab_size
    table = _table("largest columns", "id", "rows", "weight")
    for column in (1, 2, 3):
        table.columns[column].justify = "right"
    for c in d.largest_columns:
        table.add_row(
            _text(_quoted(c.token, c.teacher_id)),
            str(c.teacher_id),
            f"{c.rows:,}",
            f"{c.weight:,.2f}",
        )
    table.caption = f"{d.columns_used:,} of {d.teacher.vocab_size:,} columns in use ({share:.1%})"
    if d.enable_scale_trick:
        table.caption += f"; {d.slot_share:.2%} of all weight is on scale slots"
    return table


def _examples(rows: Iterable[RowDescription]) -> Table:
    table = _table("student token", "id", "kind", "teacher tokens")
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(
            _text(_quoted(row.token, row.student_id)),
            str(row.student_id),
            row.kind,
            _text("\n".join(_entry(e) for e in row.entries) or "(nothing)"),
        )
    return table


def _entry(e: EntryDescription) -> str:
    slot = " (slot)" if e.is_slot else ""
    return f"{e.weight:.4f} {_quoted(e.token, e.teacher_id)}{slot}"


def _console() -> Console:
    from rich.console import Console  # a tenth of a second that most commands can do without

    return Console(highlight=False)


def _table(*headers: str) -> Table:
    from rich.table import Table

    table = Table(title_justify="left", caption_justify="left", header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _text(value: str) -> Text:
    """Return a cell's text as it stands: no markup, nothing that a terminal would obey."""
    from rich.text import Text

    lines = value.split("\n")
    return Text("\n".join(map(printable, lines)))


def _plain(value: str) -> str:
    """Return text for a header, where markup is obeyed."""
    return _text(value).plain.replace("[", "\\[")


def _quoted(token: str | None, token_id: int) -> str:
    """Return a token in quotes, so that its spaces are seen; without tokens, its id."""
    return f"#{token_id}" if token is None else f"'{shortened(token)}'"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2g}"
