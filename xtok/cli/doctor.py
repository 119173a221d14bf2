"""`xtok doctor`."""

import typer

import xtok
from xtok.cli import console
from xtok.cli.command import command, show
from xtok.cli.options import CHAT_TEMPLATE, KINDS, TEXT_FIELD, Loading, json_option, text_option
from xtok.cli.tables.tokenizers import print_diagnosis
from xtok.config import MODELS, option
from xtok.inspection.first_rows import first_rows


@command
def doctor(
    *,
    student: str = option(..., f"The model to check, or the student: {KINDS}", argument="STUDENT"),
    teacher: str | None = option(None, "The teacher, to check the pair.", argument="[TEACHER]"),
    text: list[str] = text_option(
        "Compare its first rows, texts or conversations, with what the libraries make of them; and "
        "measure what the two share, both directions of a map, and the events on this text: "
    ),
    field: str = TEXT_FIELD,
    chat_template: str | None = CHAT_TEMPLATE,
    tools: bool = option(
        False,
        "Fail, instead of warn, if the chat template changes earlier turns when a tool answers. "
        "Training on tool calls needs turns that stay the same.",
        flag=True,
    ),
    json: bool = json_option("tokenizers, pair, advice, pair_checks"),
    vocab_size: int | None = option(None, "Width of the models' logits.", min=1, panel=MODELS),
    loading: Loading,
) -> None:
    """Check tokenizers, and recommend a loss for a pair.

    Exits with 3 if a check fails. For two models it also shows what they share, and the next
    command.

    Example: xtok doctor meta-llama/Llama-3.2-1B Qwen/Qwen3-8B
    """
    if text and teacher is None:
        raise typer.BadParameter("--text needs two models")
    if text:
        first_rows(text, field)  # before longer work
    models = {name: loading.tokenizer(name, vocab_size) for name in (student, teacher) if name}
    diagnosis = xtok.doctor(
        models[student],
        None if teacher is None else models[teacher],
        text,
        names=None if teacher is None else (student, teacher),
        template=chat_template,
        tools=tools,
        field=field,
        progress=console.progress_bar,
    )
    show(diagnosis, print_diagnosis, json=json)
    if diagnosis.failed:
        raise typer.Exit(3)
