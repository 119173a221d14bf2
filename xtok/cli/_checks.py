"""The commands that explain the rows of a map, and check a map file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtok.cli import _options as opt
from xtok.cli._load import load, load_map, load_side
from xtok.cli._run import command

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

_SpellingStudent = Annotated[
    str | None,
    typer.Option(
        help="The model of the rows, to spell the teacher's tokens in its own.",
        metavar="MODEL",
        rich_help_panel="Models",
    ),
]
_SpellingTeacher = Annotated[
    str | None,
    typer.Option(
        help="The model of the columns, to spell the row's token in its own.",
        metavar="MODEL",
        rich_help_panel="Models",
    ),
]


def explain(
    map_path: opt.MapPath,
    token: Annotated[
        str | None,
        typer.Argument(metavar="[TOKEN]", help="A student token, spaces included: ' the'."),
    ] = None,
    *,
    token_id: Annotated[
        list[int] | None,
        typer.Option("--id", help="Explain the row of this student id. Repeatable.", metavar="ID"),
    ] = None,
    student_model: _SpellingStudent = None,
    teacher_model: _SpellingTeacher = None,
    json: opt.Json = False,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Explain why a row is as it is: its bytes, its pieces both ways, what each stage did."""
    if token is None and not token_id:
        raise typer.BadParameter("give a token, or --id")
    with command(quiet):
        from xtok import report
        from xtok.inspection import explain as explanation

        projection = load_map(map_path, student_vocab_size, teacher_vocab_size, preserve_last)
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        student: Tokenizer | None = None
        teacher: Tokenizer | None = None
        if student_model is not None:
            given = (student_model, student_revision, None, student_pattern)
            projection, student = load_side(projection, "student", *given, **safety)
        if teacher_model is not None:
            given = (teacher_model, teacher_revision, None, teacher_pattern)
            projection, teacher = load_side(projection, "teacher", *given, **safety)
        tokens: list[str | int] = [*([] if token is None else [token]), *(token_id or [])]
        rows = explanation.explain(projection, tokens, student_model=student, teacher_model=teacher)
        if json:
            print(report.to_json(rows))  # noqa: T201
        else:
            from xtok.report.maps import print_explanations

            print_explanations(rows)


def verify(
    map_path: opt.MapPath,
    *,
    student_model: opt.CheckedStudentModel = None,
    teacher_model: opt.CheckedTeacherModel = None,
    json: opt.Json = False,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check a map file, and that it is of these models; exit with 3 if a check fails."""
    with command(quiet):
        from xtok import report
        from xtok.inspection import verify as verification

        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = teacher = None
        if student_model is not None:
            student = load(student_model, student_revision, None, student_pattern, **safety)
        if teacher_model is not None:
            teacher = load(teacher_model, teacher_revision, None, teacher_pattern, **safety)
        found = verification.verify(
            map_path,
            student_model=student,
            teacher_model=teacher,
            student_vocab_size=student_vocab_size,
            teacher_vocab_size=teacher_vocab_size,
        )
        if json:
            print(report.to_json(found))  # noqa: T201
        else:
            from xtok.report.maps import print_verification

            print_verification(found)
    if found.failed:
        raise typer.Exit(3)
