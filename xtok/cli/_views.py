"""The commands that show maps and alignments, and convert maps."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli import _options as opt
from xtok.cli._load import load, load_map
from xtok.cli._run import (
    check_output,
    command,
    default_name,
    named,
    read_chat,
    read_text,
    write,
)
from xtok.config import (
    Normalize,
)


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
        typer.Option(
            help="Show this many rows, evenly spread; 5 if none are asked for.", min=0, metavar="N"
        ),
    ] = None,
    classes: Annotated[
        bool,
        typer.Option(
            "--classes",
            help="Show rows and teacher tokens by class (digits, punctuation, scripts …), and what "
            "they say of the choice of a loss. JSON has them always.",
        ),
    ] = False,
    token_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="List the rows of this class of tokens instead, worst first: digits, han, "
            "punctuation, …",
            metavar="CLASS",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="List the rows of this kind instead, worst first: pieces, exact, empty, …",
            metavar="KIND",
        ),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option(
            help="List so many rows, those with the least weight on their heaviest entry first; "
            "20 with --class or --kind.",
            min=1,
            metavar="N",
        ),
    ] = None,
    json: opt.Json = False,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    quiet: opt.Quiet = False,
) -> None:
    """Show what a map holds: who maps to whom, how it was made, and rows of it."""
    is_listing = bool(token_class or kind or worst)
    if is_listing and (token or token_id or num_examples is not None or classes):
        raise typer.BadParameter(
            "--class, --kind and --worst list rows; give none of --token, --id, --num-examples, "
            "--classes with them"
        )
    with command(quiet):
        from xtok import report
        from xtok.inspection import inspect as describe

        projection = load_map(map_path, student_vocab_size, teacher_vocab_size, preserve_last)
        if is_listing:
            listing = describe.worst_rows(
                projection, token_class=token_class, kind=kind, count=worst or 20
            )
            if json:
                print(report.to_json(listing))  # noqa: T201
            else:
                from xtok.report.maps import print_listing

                print_listing(listing)
            return
        if num_examples is None:
            num_examples = 0 if token or token_id or classes else 5
        description = describe.inspect(
            projection,
            tokens=token or [],
            ids=token_id or [],
            num_examples=num_examples,
            classes=classes or json,
        )
        report.print_reports(projection.reports)
        if json:
            print(report.to_json(description))  # noqa: T201
        else:
            from xtok.report.maps import print_description

            print_description(description, classes=classes)
            if classes and description.coverage is None:
                report.print_notes(["the map carries no tokens, so no classes"])


def convert(
    map_path: opt.MapPath,
    *,
    output: Annotated[
        str,
        typer.Option(
            help="Where to write: .safetensors, or .pt in NeMo-RL's layout; or a folder.",
            metavar="FILE",
            parser=opt.output_text,
        ),
    ],
    normalize: Annotated[
        Normalize | None,
        typer.Option(
            help="Make rows of learned weights sum to 1: divide by the sum, or take the softmax.",
        ),
    ] = None,
    transpose: Annotated[
        bool,
        typer.Option(
            "--transpose", help="Swap the roles: a map from the teacher's tokens to the student's."
        ),
    ] = False,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    quiet: opt.Quiet = False,
) -> None:
    """Convert a map between xtok's .safetensors and NeMo-RL's .pt, both ways."""
    with command(quiet):
        check_output(output)
        projection = load_map(
            map_path, student_vocab_size, teacher_vocab_size, preserve_last, normalize
        )
        if transpose:
            from xtok.maps import convert as maps

            projection = maps.transpose(projection)
        write(projection, named(output, default_name(projection)))


def align(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT|-]", help="The text itself, or - to read it from stdin."),
    ] = None,
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    file: Annotated[
        Path | None, typer.Option(help="Read the text from this file.", metavar="FILE")
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(
            help="Align a conversation instead: a JSON file with a list of messages, rendered by "
            "each side's chat template.",
            metavar="FILE",
        ),
    ] = None,
    student_chat_template: opt.StudentChatTemplate = None,
    teacher_chat_template: opt.TeacherChatTemplate = None,
    max_comb_len: Annotated[
        int,
        typer.Option(
            help="Tokens that may match as one where the two sides differ.", min=1, metavar="N"
        ),
    ] = 4,
    json: opt.Json = False,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show two tokenizations of a text over one another, and the chunks that they share."""
    if [text, file, chat].count(None) != 2:
        raise typer.BadParameter("give a text (or - for stdin), or --file, or --chat: one of them")
    if chat is None and (student_chat_template or teacher_chat_template):
        raise typer.BadParameter("a chat template goes with --chat")
    data = read_text(text, file) if chat is None else b""
    conversation = {} if chat is None else read_chat(chat)
    with command(quiet):
        from xtok import report
        from xtok.alignment import aligner, chats

        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = load(student_model, student_revision, None, student_pattern, **safety)
        teacher = load(teacher_model, teacher_revision, None, teacher_pattern, **safety)
        if chat is None:
            alignment = aligner.align(student, teacher, data, max_comb_len=max_comb_len)
        else:
            pair = aligner.TokenAligner(student, teacher, max_comb_len=max_comb_len)
            found = chats.align_chat(
                pair,
                student,
                teacher,
                **conversation,
                student_template=student_chat_template,
                teacher_template=teacher_chat_template,
            )
            alignment = chats.describe_chat(pair, student, teacher, found)
        if json:
            print(report.to_json(alignment))  # noqa: T201
        else:
            from xtok.report.alignment import print_alignment

            print_alignment(alignment)
