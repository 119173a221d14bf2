"""The command line: each command parses, calls one function of the library, and reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xtok._version import __version__
from xtok.cli import _options as opt
from xtok.cli import _tokenizers
from xtok.cli._run import check_output, config, load_tokenizer, quiet_stderr, run, write
from xtok.config import BuildConfig, MultitokenConfig, SortCutConfig

if TYPE_CHECKING:
    from xtok.projection import ProjectionMap
    from xtok.tokenizers import Tokenizer

app = typer.Typer(
    name="xtok",
    help="Build cross-tokenizer projection maps: for each token of a student model, the tokens of "
    "a teacher model that it corresponds to, right byte for byte.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line."""
    run(app)


def _version(show: bool) -> None:
    if show:
        print(f"xtok {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def build(
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    output: opt.Output = None,
    top_k: opt.TopK = BuildConfig.top_k,
    max_pieces: opt.MaxPieces = BuildConfig.max_pieces,
    scale_trick: opt.ScaleTrick = BuildConfig.scale_trick,
    reverse_pass: opt.ReversePass = BuildConfig.reverse_pass,
    exact_match: opt.ExactMatch = BuildConfig.exact_match,
    special_tokens: opt.SpecialTokensChoice = BuildConfig.special_tokens,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Build a map in one go: multitoken, reapply-exact, sort-cut."""
    options = config(
        BuildConfig,
        top_k=top_k,
        max_pieces=max_pieces,
        scale_trick=scale_trick,
        reverse_pass=reverse_pass,
        exact_match=exact_match,
        special_tokens=special_tokens,
    )
    check_output(output)
    with quiet_stderr(quiet):
        from xtok import pipeline, report

        safety = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = _load(
            student_model, student_revision, student_vocab_size, student_pattern, **safety
        )
        teacher = _load(
            teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern, **safety
        )
        projection = pipeline.build(student, teacher, options, progress=report.progress_bar)
        write(projection, output, num_examples=num_examples)


@app.command()
def multitoken(
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    initial_projection_path: opt.ExtendedProjectionPath = None,
    output: opt.Output = None,
    top_k: opt.TopK = MultitokenConfig.top_k,
    max_pieces: opt.MaxPieces = MultitokenConfig.max_pieces,
    scale_trick: opt.ScaleTrick = MultitokenConfig.scale_trick,
    reverse_pass: opt.ReversePass = MultitokenConfig.reverse_pass,
    exact_match: opt.ExactMatch = False,
    special_tokens: opt.SpecialTokensChoice = MultitokenConfig.special_tokens,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Map each student token to the teacher tokens that spell it, and the other way round."""
    options = config(
        MultitokenConfig,
        top_k=top_k,
        max_pieces=max_pieces,
        scale_trick=scale_trick,
        reverse_pass=reverse_pass,
        special_tokens=special_tokens,
    )
    check_output(output)
    with quiet_stderr(quiet):
        from xtok import mapfile, report, stages

        initial = None
        if initial_projection_path is not None:
            initial = mapfile.load(initial_projection_path)
            student_vocab_size = student_vocab_size or initial.student.vocab_size
            teacher_vocab_size = teacher_vocab_size or initial.teacher.vocab_size
        safety = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = _load(
            student_model, student_revision, student_vocab_size, student_pattern, **safety
        )
        teacher = _load(
            teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern, **safety
        )
        projection = stages.multitoken(
            student, teacher, options, initial=initial, progress=report.progress_bar
        )
        if exact_match:
            projection = stages.reapply_exact(projection)
        write(projection, output, stage="multitoken", num_examples=num_examples)


@app.command()
def reapply_exact(
    *,
    initial_projection_path: opt.InitialProjectionPath,
    student_model: opt.CheckedStudentModel = None,
    teacher_model: opt.CheckedTeacherModel = None,
    output: opt.Output = None,
    special_tokens: opt.SpecialTokensOfMap = None,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Pin the tokens of a map that both sides have to each other, with weight 1."""
    check_output(output)
    with quiet_stderr(quiet):
        from xtok import stages

        projection = _load_map(
            initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
        )
        safety = {"offline": offline, "trust_remote_code": trust_remote_code}
        if student_model is not None:
            width = None if projection.student.table else projection.student.vocab_size
            student = _load(student_model, student_revision, width, student_pattern, **safety)
            projection = stages.with_vocabularies(projection, student=student.vocabulary)
        if teacher_model is not None:
            width = None if projection.teacher.table else projection.teacher.vocab_size
            teacher = _load(teacher_model, teacher_revision, width, teacher_pattern, **safety)
            projection = stages.with_vocabularies(projection, teacher=teacher.vocabulary)
        projection = stages.reapply_exact(projection, special_tokens=special_tokens)
        write(projection, output, stage="reapply-exact", num_examples=num_examples)


@app.command()
def sort_cut(
    *,
    initial_projection_path: opt.InitialProjectionPath,
    top_k: opt.TopK = SortCutConfig.top_k,
    output: opt.Output = None,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Cut each row of a map to its heaviest entries and normalize it; a scale slot stays last."""
    options = config(SortCutConfig, top_k=top_k)
    check_output(output)
    with quiet_stderr(quiet):
        from xtok import stages

        projection = _load_map(
            initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
        )
        projection = stages.sort_cut(projection, options)
        write(projection, output, stage="sort-cut", num_examples=num_examples)


@app.command()
def inspect(
    map_path: opt.MapPath,
    *,
    token: Annotated[
        list[str] | None,
        typer.Option(
            help="Show the row of this student token, spaces included: ' the'. Repeatable.",
            metavar="TEXT",
        ),
    ] = None,
    token_id: Annotated[
        list[int] | None,
        typer.Option("--id", help="Show the row of this student id. Repeatable.", metavar="ID"),
    ] = None,
    num_examples: Annotated[
        int | None,
        typer.Option(help="Show this many rows, evenly spread; 5 if none are asked for.", min=0),
    ] = None,
    json: opt.Json = False,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    quiet: opt.Quiet = False,
) -> None:
    """Show what a map holds: who maps to whom, how it was made, and rows of it."""
    with quiet_stderr(quiet):
        from xtok import describe, report

        projection = _load_map(map_path, student_vocab_size, teacher_vocab_size)
        if num_examples is None:
            num_examples = 0 if token or token_id else 5
        description = describe.inspect(
            projection, tokens=token or [], ids=token_id or [], num_examples=num_examples
        )
        report.print_reports(projection.reports)
        if json:
            print(report.to_json(description))  # noqa: T201
        else:
            report.print_description(description)


@app.command()
def convert(
    map_path: opt.MapPath,
    *,
    output: Annotated[
        Path,
        typer.Option(
            help="Where to write: .safetensors, or .pt in NeMo-RL's layout.", metavar="FILE"
        ),
    ],
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    quiet: opt.Quiet = False,
) -> None:
    """Convert a map between xtok's .safetensors and NeMo-RL's .pt, both ways."""
    check_output(output)
    with quiet_stderr(quiet):
        projection = _load_map(map_path, student_vocab_size, teacher_vocab_size, preserve_last)
        write(projection, output)


app.command()(_tokenizers.doctor)
app.command()(_tokenizers.overlap)


def _load(
    model: str, revision: str | None, vocab_size: int | None, pattern: str | None, **safety: bool
) -> Tokenizer:
    return load_tokenizer(
        model, revision=revision, vocab_size=vocab_size, pattern=pattern, **safety
    )


def _load_map(
    path: Path,
    student_vocab_size: int | None,
    teacher_vocab_size: int | None,
    preserve_last: bool | None = None,
) -> ProjectionMap:
    from xtok import mapfile

    return mapfile.load(
        path,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
        preserve_last=preserve_last,
    )
