"""`xtok align`."""

import codecs
import os
import sys
from pathlib import Path

import typer

import xtok
from xtok._lib.fields import option
from xtok._lib.lines import read_small
from xtok.cli import console, options
from xtok.cli.command import command, show
from xtok.cli.tables.alignment import print_alignment
from xtok.config import MAX_COMB_LEN, ChatTemplates
from xtok.errors import XtokError


@command
def align(
    *,
    models: options.Models,
    text: str | None = option(
        None,
        "The text, or - to read it from stdin. Put -- before a text that begins with a dash.",
        argument="[TEXT|-]",
    ),
    file: Path | None = option(None, "File to read the text from."),
    chat: Path | None = option(
        None,
        "File with one conversation to align, in a format of xtok render. Each model's chat "
        "template renders the conversation.",
    ),
    templates: ChatTemplates,
    max_comb_len: int = option(
        4,
        "Maximum number of tokens on each side of a chunk with different bytes.",
        min=1,
        max=MAX_COMB_LEN,
    ),
    json: bool = options.json_option(
        "student, teacher, student_ids, teacher_ids, student_tokens, teacher_tokens, pairs, "
        "num_correct, num_one_to_one, student_unaligned, teacher_unaligned"
    ),
) -> None:
    """Show how two tokenizers split a text, and which tokens cover the same bytes.

    Example: xtok align meta-llama/Llama-3.2-1B Qwen/Qwen3-8B 'In 2012, 201 of them'
    """
    models.both()
    if [text, file, chat].count(None) != 2:
        raise typer.BadParameter("pass a text (- reads stdin), or --file, or --chat")
    if text and os.path.isfile(text):
        console.print_note(f"{text} is aligned as text; to read the file, use --file {text}")
    data = None if chat else _text(text, file)
    alignment = xtok.align(
        models.pair(), text=data, chat=chat, templates=templates if chat else None,
        max_comb_len=max_comb_len, note=console.print_note,
    )  # fmt: skip
    show(alignment, print_alignment, json=json)


def _text(text: str | None, file: Path | None) -> bytes:
    if file is not None:
        data = file.read_bytes() if file.is_fifo() else read_small(file, "the text")
        return data.removeprefix(codecs.BOM_UTF8)
    if text != "-":
        return str(text).encode("utf-8", "surrogateescape")
    if sys.stdin is None:
        raise XtokError("stdin is closed", hint="pipe the text in, or give a file with --file")
    return sys.stdin.buffer.read().removeprefix(codecs.BOM_UTF8)
