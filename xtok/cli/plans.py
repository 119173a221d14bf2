"""What `build` and `build-pairs` would do, and the pairs of a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from xtok.cli.command import hint
from xtok.cli.options import load_tokenizer
from xtok.config import BuildConfig, Loss
from xtok.errors import XtokError

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


def build_listed(
    path: Path,
    output_dir: Path,
    options: BuildConfig,
    *,
    loss: Loss | None,
    skip_existing: bool,
    dry_run: bool,
    strict: bool,
    safety: dict[str, Any],
    stderr: TextIO,
) -> None:
    """Build the pairs of a list, or say what would be built; print the path of each map.

    What goes wrong with a pair is told on `stderr` at once.

    Raises:
        XtokError: at the end, if a pair failed.
    """
    from xtok import report
    from xtok.maps import file as mapfile
    from xtok.stages import build as pair_list

    listed = pair_list.read_pairs(path, output_dir, options, loss)
    failed: list[int] = []
    if dry_run:
        kept: dict[str, Any] = {}
        for pair in listed:
            with _reported(pair.line, failed, stderr):
                mapfile.check_output(pair.output)
                for model in (pair.student, pair.teacher):
                    if model not in kept:
                        kept[model] = load_tokenizer(model, **safety)
                sides = kept[pair.student], kept[pair.teacher]
                is_done(*sides, pair.output, options, keep=skip_existing, dry_run=True)
        _raise_failed(path, failed, len(listed))
        return
    for result in pair_list.build_pairs(
        listed,
        options,
        skip_existing=skip_existing,
        strict=strict,
        load=lambda model: load_tokenizer(model, **safety),
        progress=report.progress_bar,
    ):
        pair = result.pair
        if result.error is not None:
            with _reported(pair.line, failed, stderr):
                raise result.error
            continue
        if result.projection is None or result.replaced is not None:
            note = _kept_or_replaced(pair.output, result.replaced)
            report.print_notes([f"line {pair.line}: {note}"])
        if result.projection is not None:
            report.print_reports(result.projection.reports)
        print(pair.output, flush=True)  # noqa: T201
    _raise_failed(path, failed, len(listed))


@contextmanager
def _reported(line: int, failed: list[int], stderr: TextIO) -> Iterator[None]:
    """Print an error with the number of its line, note the line, and go on."""
    from xtok import report

    try:
        yield
    except XtokError as error:
        failed.append(line)
        report.print_error(f"line {line}: {error.message}", hint(error), stderr)


def _raise_failed(path: Path, failed: list[int], total: int) -> None:
    if failed:
        lines = ", ".join(map(str, failed[:20])) + (", …" if len(failed) > 20 else "")
        raise XtokError(
            f"{len(failed)} of {total} pairs of {path} failed: "
            f"line{'s' if len(failed) > 1 else ''} {lines}",
            hint="fix these lines, then run the list again with --skip-existing",
        )


def _kept_or_replaced(path: Path, replaced: str | None) -> str:
    """Say what becomes of an output that exists, by how it differs from the map to be built."""
    if replaced is None:
        return f"{path} exists, and is kept"
    return f"{path} exists, and is replaced: {replaced}"


def is_done(
    student: Tokenizer,
    teacher: Tokenizer,
    path: Path,
    options: BuildConfig,
    texts: Sequence[str] = (),
    *,
    keep: bool,
    dry_run: bool,
) -> bool:
    """Tell whether nothing is to be built, and print why.

    Args:
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        path: where the map goes.
        options: how it is built.
        texts: what it is counted on.
        keep: whether an output that is the same map already is kept.
        dry_run: only show what would be written.
    """
    from xtok import report
    from xtok.stages import plans

    exists = keep and path.exists()
    replaced = plans.difference(path, student, teacher, options, texts) if exists else None
    if dry_run:
        _show_plan(student, teacher, path, options, keep, replaced)
        return True
    if exists:
        report.print_notes([_kept_or_replaced(path, replaced)])
        if replaced is None:
            print(path)  # noqa: T201
    return exists and replaced is None


def _show_plan(
    student: Tokenizer,
    teacher: Tokenizer,
    path: Path,
    options: BuildConfig,
    keep: bool,
    replaced: str | None,
) -> None:
    """Print what `build` would write, and where, on a line."""
    from xtok.stages import plans

    kept = keep and replaced is None
    there = "exists, would be kept" if kept else "exists, would be replaced"
    if replaced is not None:
        there += f": {replaced}"
    p = plans.plan(student, teacher, options)
    print(  # noqa: T201
        f"{path} ({there if path.exists() else 'new'}): {p.rows:,} × {p.columns:,}, "
        f"{p.single_entry:,} rows of one entry, at most {p.max_entries:,} entries and "
        f"{_size(p.max_bytes)}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
