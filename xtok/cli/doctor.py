"""`xtok doctor`."""

import typer

import xtok
from xtok import report
from xtok.cli.command import command, show
from xtok.cli.options import CHAT_TEMPLATE, JSON, KINDS, TEXT_FIELD, Loading, text_option
from xtok.config import MODELS, option
from xtok.counting.texts import check_texts
from xtok.report.tokenizers import print_diagnosis


@command
def doctor(
    *,
    models: list[str] = option(..., f"One or more models, each {KINDS}", argument="MODEL"),
    text: list[str] = text_option(
        "Measure on this text what they share, both directions and the events: "
    ),
    field: str = TEXT_FIELD,
    chat_template: str | None = CHAT_TEMPLATE,
    tools: bool = option(
        False,
        "Fail if the chat template changes earlier turns when a tool answers, as loops of tool "
        "calls need; by default a warning.",
        flag=True,
    ),
    json: bool = JSON,
    vocab_size: int | None = option(None, "Width of the models' logits.", min=1, panel=MODELS),
    loading: Loading,
) -> None:
    """Check tokenizers for what makes training go wrong; exit with 3 if a check fails.

    For several models, it shows what share of each one's tokens the others have. With exactly two,
    the first is the student: it says which loss suits, through what, and the next command.
    """
    if text and len(models) == 1:
        raise typer.BadParameter("--text goes with two models or more")
    check_texts(text, field)
    diagnosis = xtok.doctor(
        [loading.tokenizer(model, vocab_size) for model in models],
        text,
        names=models,
        template=chat_template,
        tools=tools,
        field=field,
        progress=report.progress_bar,
        text_progress=report.text_progress_bar,
    )
    show(diagnosis, print_diagnosis, json=json)
    if diagnosis.failed:
        raise typer.Exit(3)
