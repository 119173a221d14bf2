"""What people see: dataclasses as tables, JSON or lines, and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xtok.coverage import Coverage
from xtok.describe import EntryDescription, MapDescription, RowDescription, SideDescription
from xtok.projection import StageReport
from xtok.tokens import printable, shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from xtok.diagnosis import Diagnosis, PairDiagnosis, TokenizerDiagnosis
    from xtok.explanation import Explanation, SpelledPiece
    from xtok.sharing import Overlap
    from xtok.verification import Verification


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr, on a terminal only."""
    from tqdm import tqdm

    with tqdm(
        total=total, desc=label, unit="tok", unit_scale=True, disable=None, leave=False
    ) as bar:
        yield bar.update


@contextmanager
def text_progress_bar(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
    """Show a bar of the bytes of text with tokens per second on stderr, on a terminal only."""
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        done = 0

        def advance(size: int, tokens: int) -> None:
            nonlocal done
            done += tokens
            elapsed = bar.format_dict["elapsed"]
            if not bar.disable and elapsed:
                bar.set_postfix_str(f"{done / elapsed:,.0f} student tok/s", refresh=False)
            bar.update(size)

        yield advance


def to_json(result: DataclassInstance | Sequence[DataclassInstance]) -> str:
    """Return a dataclass as one JSON object, or several as a list; tokens are escaped."""
    shown = [asdict(r) for r in result] if isinstance(result, Sequence) else asdict(result)
    return json.dumps(shown, ensure_ascii=False, indent=2)


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


def print_description(
    description: MapDescription, console: Console | None = None, *, classes: bool = False
) -> None:
    """Print a map's description as tables that fit 80 columns; by class of token on request."""
    console = console or _console()
    with console.capture() as captured:  # Rich has an exit of its own for a closed pipe
        for table in (
            _overview(description),
            _rows(description),
            _columns(description),
            *([_classes(description.coverage)] if classes and description.coverage else []),
            *([_examples(description.examples)] if description.examples else []),
        ):
            console.print(table)
        if classes and description.coverage:
            console.print(_text(loss_note(description.coverage)))
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


def print_verification(found: Verification, console: Console | None = None) -> None:
    """Print one line per check, and a last one that sums them up."""
    console = console or _console()
    from rich.text import Text

    widest = max(len(check.name) for check in found.checks)
    for check in found.checks:
        line = Text()
        line.append(check.level.ljust(8), style=_STYLES.get(check.level, "dim"))
        line.append(check.name.ljust(widest + 2))
        line.append_text(_text(check.message))
        console.print(line, soft_wrap=True)
    failed = f"failed: {', '.join(found.failed)}" if found.failed else "every check holds"
    console.print(_text(f"{found.path}: {failed}"), soft_wrap=True)


def print_explanations(rows: Iterable[Explanation], console: Console | None = None) -> None:
    """Print why rows are as they are, as tables that fit 80 columns."""
    console = console or _console()
    with console.capture() as captured:
        for row in rows:
            console.print(_about(row))
            if row.entries:
                console.print(_explained(row))
    print(captured.get(), end="")  # noqa: T201


def _about(row: Explanation) -> Table:
    table = _table(f"student id {row.student_id}", _plain(f"'{_short(row.token)}'"))
    table.add_row("bytes", _short(row.bytes) or "none")
    is_text = [row.token_class] if row.bytes else []
    table.add_row("type", "; ".join([row.type.replace("_", " "), *is_text]))
    if row.roles:
        table.add_row("roles", _text(", ".join(row.roles)))
    table.add_row(row.kind, row.why)
    if row.forward is not None:
        table.add_row("forward", _text(_pieces(row.forward) or "the teacher cannot spell it"))
    if row.reverse is not None:
        more = f" and {row.reverse_count or 0:,} in all" if (row.reverse_count or 0) > 10 else ""
        table.add_row("reverse", _text((_pieces(row.reverse) or "no teacher token") + more))
    for stage in row.stages:
        name, _, what = stage.partition(": ")
        table.add_row(_text(name), _text(what))
    return table


def _pieces(pieces: Sequence[SpelledPiece]) -> str:
    shown = [f"'{_short(p.token)}' {f'{p.weight:.4f}' if p.weight else '-'}" for p in pieces[:10]]
    return "  ".join(shown) + (f" … ({len(pieces)} in all)" if len(pieces) > 10 else "")


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"


def _explained(row: Explanation) -> Table:
    table = _table("weight", "id", "teacher token", "what it is to the student's")
    table.columns[1].justify = "right"
    for e in row.entries:
        token = _text(f"'{_short(e.token)}'")
        table.add_row(f"{e.weight:.4f}", str(e.teacher_id), token, e.relation)
    return table


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


def _classes(found: Coverage) -> Table:
    table = _table("class", "rows", "exact", "entries", "slot", "teacher", "unused")
    for column in table.columns[1:]:
        column.justify = "right"
    for c in found.classes:
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


def loss_note(found: Coverage) -> str:
    """Return what a map's classes say of the choice of a loss, as a sentence."""
    note = f"{found.loss} suits: {found.why}"
    if found.numerals and "numerals" not in note:
        note += f"; {found.numerals_exact:,} of {found.numerals:,} numerals have one"
    return note


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
