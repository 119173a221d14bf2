"""`xtok align`."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli.command import command, show
from xtok.cli.options import MODELS, Json, Models, read_path
from xtok.errors import XtokError


@command
def align(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT|-]", help="The text itself, or - to read it from stdin."),
    ] = None,
    *,
    models: Models,
    file: Annotated[
        Path | None,
        typer.Option(help="Read the text from this file.", metavar="FILE", parser=read_path),
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(
            help="Align a conversation instead: a JSON file with a list of messages, rendered by "
            "each side's chat template.",
            metavar="FILE",
            parser=read_path,
        ),
    ] = None,
    student_chat_template: Annotated[
        str | None,
        typer.Option(
            help="Chat template of the student, if not its own: a Jinja file, or the name of a "
            "format.",
            metavar="FILE|NAME",
            rich_help_panel=MODELS,
        ),
    ] = None,
    teacher_chat_template: Annotated[
        str | None,
        typer.Option(
            help="Chat template of the teacher, likewise.",
            metavar="FILE|NAME",
            rich_help_panel=MODELS,
        ),
    ] = None,
    max_comb_len: Annotated[
        int,
        typer.Option(
            help="Tokens that may match as one where the two sides differ.", min=1, metavar="N"
        ),
    ] = 4,
    json: Json = False,
) -> None:
    """Show two tokenizations of a text over one another, and the chunks that they share."""
    if [text, file, chat].count(None) != 2:
        raise typer.BadParameter("give a text (or - for stdin), or --file, or --chat: one of them")
    if chat is None and (student_chat_template or teacher_chat_template):
        raise typer.BadParameter("a chat template goes with --chat")
    models.both()
    data = _text(text, file) if chat is None else b""
    conversation = {} if chat is None else _chat(chat)
    from xtok.alignment import aligner, chats
    from xtok.report.alignment import print_alignment

    student, teacher = models.pair()
    if chat is None:
        alignment = aligner.align(student, teacher, data, max_comb_len=max_comb_len)
    else:
        pair = aligner.TokenAligner(student, teacher, max_comb_len=max_comb_len)
        aligned = chats.align_chat(
            pair,
            student,
            teacher,
            **conversation,
            student_template=student_chat_template,
            teacher_template=teacher_chat_template,
        )
        alignment = chats.describe_chat(pair, student, teacher, aligned)
    show(alignment, print_alignment, json=json)


def _text(text: str | None, file: Path | None) -> bytes:
    """Return the bytes of a text given as an argument, as a file, or on stdin (`-`)."""
    if file is not None:
        return _read(file, "text", "--file")
    if text != "-":
        return str(text).encode("utf-8", "surrogateescape")
    if sys.stdin is None:
        raise XtokError("stdin is closed", hint="pipe the text in, or give a file with --file")
    return sys.stdin.buffer.read()


def _chat(file: Path) -> dict[str, Any]:
    """Return `messages` and `tools` of a JSON file: a list of messages, or an object of both."""
    try:
        content = json_format.loads(_read(file, "conversation", "--chat"))
        chat = content if isinstance(content, dict) else {"messages": content}
        if isinstance(chat["messages"], list):
            return {"messages": chat["messages"], "tools": chat.get("tools")}
        problem = "its messages are no list"
    except (ValueError, KeyError, RecursionError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    raise XtokError(
        f"the conversation {file} is not one: {problem}",
        hint='write it as [{"role": "user", "content": "…"}, …], '
        'or {"messages": […], "tools": […]}',
    )


def _read(file: Path, what: str, option: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise XtokError(
            f"the {what} {file} cannot be read: {error.strerror or error}",
            hint=f"give the path of a file with {option}",
        ) from error
