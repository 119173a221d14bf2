"""Many maps at once, those that need a look first, for the index page of `xtok report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xtok import __version__
from xtok.errors import XtokError
from xtok.inspection.page import MapFacts, examine
from xtok.inspection.verdict import Finding
from xtok.stages.build import Pair


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """A map of a list.

    Attributes:
        line: of the list.
        student: the model, as the list has it.
        teacher: likewise.
        output: the map's file, as the list names it.
        problem: why it cannot be examined; None if it can.
        student_share: of the student's tokens with bytes, those that the teacher has.
        findings: as on the map's own page.
        facts: the map; None if it cannot be examined.
    """

    line: int
    student: str
    teacher: str
    output: str
    problem: str | None = None
    student_share: float = 0.0
    findings: tuple[Finding, ...] = ()
    facts: MapFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Index:
    """The maps of a list: missing and damaged ones first, then by their worst findings."""

    name: str
    entries: tuple[IndexEntry, ...]
    version: str


def examine_listed(name: str, pairs: Sequence[Pair], output_dir: Path) -> Index:
    """Examine the maps of a list of pairs; one that cannot be loaded has its error as an entry.

    Args:
        name: of the list.
        pairs: as `read_pairs` returns them.
        output_dir: the folder that the maps' names are relative to.
    """
    entries = [_entry(pair, output_dir) for pair in pairs]
    entries.sort(key=_badness)
    return Index(name=name, entries=tuple(entries), version=__version__)


def _entry(pair: Pair, output_dir: Path) -> IndexEntry:
    is_within = pair.output.is_relative_to(output_dir)
    output = str(pair.output.relative_to(output_dir) if is_within else pair.output)
    try:
        page = examine(pair.output, names=[pair.output.name]).page
    except XtokError as error:
        return IndexEntry(
            line=pair.line,
            student=pair.student,
            teacher=pair.teacher,
            output=output,
            problem=error.message,
        )
    vocabulary = page.vocabulary
    return IndexEntry(
        line=pair.line,
        student=page.student,
        teacher=page.teacher,
        output=output,
        student_share=vocabulary.both / max(1, vocabulary.student),
        findings=page.findings,
        facts=page.maps[0],
    )


def _badness(entry: IndexEntry) -> tuple[object, ...]:
    """Return what entries are sorted by: problems, levels of findings, what both sides share."""
    levels = [finding.level for finding in entry.findings]
    return (
        entry.problem is None,
        -levels.count("bad"),
        -levels.count("care"),
        entry.student_share,
        entry.line,
    )
