"""`build` of many pairs, and what `build` would do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from xtok.cli._load import load_tokenizer
from xtok.cli._run import hint, named
from xtok.config import BuildConfig
from xtok.errors import XtokError


def build_listed(
    path: Path,
    output_dir: Path,
    options: BuildConfig,
    *,
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
    from xtok import pair_list, report

    listed = pair_list.read_pairs(path, output_dir, options)
    failed: list[int] = []
    if dry_run:
        kept: dict[str, Any] = {}
        for pair in listed:
            with _reported(pair.line, failed, stderr):
                for model in (pair.student, pair.teacher):
                    if model not in kept:
                        kept[model] = load_tokenizer(model, **safety)
                sides = kept[pair.student], kept[pair.teacher]
                show_plan(*sides, pair.output, options, skip_existing)
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
        elif result.projection is None:
            report.print_notes([f"line {pair.line}: {pair.output} is there, and is kept"])
        else:
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
            hint="mend these lines, and go through the list again with --skip-existing",
        )


def planned_output(
    student_model: str, teacher_model: str, output: Path | None, options: BuildConfig
) -> Path:
    """Return where `build` puts its map, before anything is loaded."""
    from xtok import pair_list
    from xtok.tokenizers import model_id

    ids = model_id(student_model), model_id(teacher_model)
    return named(output, pair_list.name_of_map(*ids, options))


def show_plan(
    student: Any, teacher: Any, path: Path, options: BuildConfig, skip_existing: bool
) -> None:
    """Print what `build` would write, and where, on a line."""
    from xtok import pair_list

    there = "is there, would be kept" if skip_existing else "is there, would be replaced"
    p = pair_list.plan(student, teacher, options)
    print(  # noqa: T201
        f"{path} ({there if path.exists() else 'new'}): {p.rows:,} × {p.columns:,}, "
        f"{p.pinned:,} rows of one entry, at most {p.max_entries:,} entries and "
        f"{_size(p.max_bytes)}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
