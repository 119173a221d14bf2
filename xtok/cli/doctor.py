"""`xtok doctor`."""

import typer

import xtok
from xtok._lib.fields import MAIN, MODELS, option
from xtok.cli import console, options
from xtok.cli.command import command, show
from xtok.cli.tables.tokenizers import print_diagnosis, print_server
from xtok.config import ChatTemplates
from xtok.inspection.first_rows import first_rows
from xtok.teachers.serving import check_server


@command
def doctor(
    *,
    student: str | None = option(
        None, f"The model to check, or the student: {options.MODEL}", argument="STUDENT"
    ),
    teacher: str | None = option(None, "The teacher, to check the pair.", argument="[TEACHER]"),
    text: list[str] = options.text_option(
        "Measure the pair on this text or these conversations, and check that the models' own "
        "libraries give the same ids for the first rows (requires two models): ",
        needs={"teacher": True},
    ),
    field: str = options.TEXT_FIELD,
    templates: ChatTemplates,
    teacher_url: str | None = option(
        None,
        "Also check the teacher's vLLM or SGLang server at this address, for use with xtok serve.",
        metavar="URL",
        needs={"teacher": True},
        panel=MAIN,
    ),
    tools: bool = option(
        False,
        "Report an error instead of a warning if the chat template rewrites earlier turns after a "
        "tool result. Training on tool calls requires unchanged turns.",
        flag=True,
    ),
    json: bool = options.json_option("tokenizers, pair, advice, pair_checks, server"),
    vocab_size: int | None = option(None, "Width of the models' logits.", min=1, panel=MODELS),
    loading: options.Loading,
) -> None:
    """Check one model's tokenizer, or a pair, and recommend a loss and the next command.

    Run this command first. The exit code is 3 if a check fails.

    Example: xtok doctor meta-llama/Llama-3.2-1B Qwen/Qwen3-8B
    """
    if student is None:
        raise typer.BadParameter("name one or two models: STUDENT [TEACHER]")
    if text:
        first_rows(text, field)  # check early
    names = (student,) if teacher is None else (student, teacher)
    loaded = {name: loading.tokenizer(name, vocab_size) for name in names}
    server = check_server(teacher_url, loaded[names[-1]]) if teacher_url else None
    diagnosis = xtok.doctor(
        loaded[student], loaded.get(teacher or ""), text, templates=templates,
        tools=tools, field=field, progress=console.progress_bar,
    )  # fmt: skip
    show({**vars(diagnosis), "server": server}, lambda _: print_diagnosis(diagnosis), json=json)
    if server and not json:
        print_server(server)
    if diagnosis.failed or (server and server.failed):
        raise typer.Exit(3)
