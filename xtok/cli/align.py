"""`xtok align`."""

import json as json_format
import sys
from pathlib import Path
from typing import Any

import typer

import xtok
from xtok.cli.command import command, show
from xtok.cli.options import JSON, Models
from xtok.config import MODELS, option
from xtok.errors import XtokError
from xtok.report.alignment import print_alignment


@command
def align(
    *,
    text: str | None = option(
        None, "The text itself, or - to read it from stdin.", argument="[TEXT|-]"
    ),
    models: Models,
    file: Path | None = option(None, "Read the text from this file."),
    chat: Path | None = option(
        None,
        "Align a conversation instead: a JSON file with a list of messages, rendered by each "
        "side's chat template.",
    ),
    student_chat_template: str | None = option(
        None,
        "Chat template of the student, if not its own: a Jinja file, or the name of a format.",
        metavar="FILE|NAME",
        goes_with=("chat",),
        panel=MODELS,
    ),
    teacher_chat_template: str | None = option(
        None,
        "Chat template of the teacher, likewise.",
        metavar="FILE|NAME",
        goes_with=("chat",),
        panel=MODELS,
    ),
    max_comb_len: int = option(
        4, "Tokens that may match as one where the two sides differ.", min=1
    ),
    json: bool = JSON,
) -> None:
    """Show two tokenizations of a text over one another, and the chunks that they share."""
    if [text, file, chat].count(None) != 2:
        raise typer.BadParameter("give a text (or - for stdin), or --file, or --chat: one of them")
    models.both()
    if chat is None:
        data = _text(text, file)
        student, teacher = models.pair()
        alignment = xtok.align(student, teacher, data, max_comb_len=max_comb_len)
    else:
        conversation = _conversation(chat)
        student, teacher = models.pair()
        aligner = xtok.TokenAligner(student, teacher, max_comb_len=max_comb_len)
        aligned = xtok.chats.align_chat(
            aligner,
            student,
            teacher,
            **conversation,
            student_template=student_chat_template,
            teacher_template=teacher_chat_template,
        )
        alignment = xtok.chats.describe_chat(aligner, student, teacher, aligned)
    show(alignment, print_alignment, json=json)


def _text(text: str | None, file: Path | None) -> bytes:
    """Return the bytes of a text given as an argument, as a file, or on stdin (`-`)."""
    if file is not None:
        return file.read_bytes()
    if text != "-":
        return str(text).encode("utf-8", "surrogateescape")
    if sys.stdin is None:
        raise XtokError("stdin is closed", hint="pipe the text in, or give a file with --file")
    return sys.stdin.buffer.read()


def _conversation(file: Path) -> dict[str, Any]:
    """Return `messages` and `tools` of a JSON file: a list of messages, or an object of both."""
    try:
        content = json_format.loads(file.read_bytes())
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
