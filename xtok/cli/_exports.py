"""The command that writes other artefacts than maps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli import _options as opt
from xtok.cli._load import load_map, load_side
from xtok.cli._run import command
from xtok.config import ExportFormat


def export(
    map_path: opt.MapPath,
    *,
    kind: Annotated[
        ExportFormat,
        typer.Option("--format", help="What to write; the training guide says who reads it."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Where to write; nemo-subtokens puts the teacher's side beside it, as "
            "NAME.reverse.pt.",
            metavar="FILE",
            parser=opt.output_path,
        ),
    ],
    student_model: Annotated[
        str | None,
        typer.Option(help="Model of the rows, for nemo-subtokens.", metavar="MODEL"),
    ] = None,
    teacher_model: Annotated[
        str | None,
        typer.Option(help="Model of the columns, for nemo-subtokens.", metavar="MODEL"),
    ] = None,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Export a map's tables for trainers that want something else than a map."""
    with command(quiet):
        from xtok import report
        from xtok.training import exports

        exports.check_export(output, kind)
        projection = load_map(map_path, student_vocab_size, teacher_vocab_size, preserve_last)
        report.print_reports(projection.reports)
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = teacher = None
        if student_model is not None:
            given = (student_model, student_revision, None, student_pattern)
            projection, student = load_side(projection, "student", *given, **safety)
        if teacher_model is not None:
            given = (teacher_model, teacher_revision, None, teacher_pattern)
            projection, teacher = load_side(projection, "teacher", *given, **safety)
        for path in exports.export(
            projection, output, kind, student_model=student, teacher_model=teacher
        ):
            print(path)  # noqa: T201
