"""`xtok vocab`."""

from functools import partial
from pathlib import Path
from typing import Any

import typer

import xtok
from xtok._lib.fields import MAIN, option
from xtok._lib.io import check_output
from xtok.cli import console, options
from xtok.cli.command import command, show
from xtok.cli.stdout import print_path
from xtok.cli.tables.tokenizers import print_vocab
from xtok.inspection.vocab import VOCAB_SUFFIXES


@command
def vocab(
    *,
    model: str = option(..., f"The model: {options.MODEL}", argument="MODEL"),
    tokens: list[str] = option(
        [],
        "Tokens to show, including spaces: ' the'. Put -- before a token that begins with a dash. "
        "Default: tokens with a role; with --json, all tokens.",
        argument="[TOKEN]...",
    ),
    token_id: list[int] = option(
        [], "Show the token with this id. Repeatable.", name="id", metavar="ID", panel=MAIN
    ),
    teacher_model: str | None = option(
        None,
        "A second model. For each token, the output then includes the second model's id with the "
        "same bytes or role, and the spelling in the second model's tokens.",
        metavar="MODEL",
        short="-t",
        panel=MAIN,
    ),
    output: Path | None = option(
        None, "Write the whole vocabulary to this file: .jsonl or .npz.", short="-o", panel=MAIN
    ),
    json: bool = options.json_option("model, teacher, vocab_size, types, tokens"),
    loading: options.Loading,
) -> None:
    """Show the bytes, types and roles of a model's tokens, or write all tokens to a file.

    The arguments after the model are tokens. Pass a second model with --teacher-model.

    Example: xtok vocab meta-llama/Llama-3.2-1B 201 '<|eot_id|>'
    """
    if output is not None:
        if tokens or token_id or json:
            raise typer.BadParameter(
                "--output writes the whole vocabulary; omit tokens, --id and --json"
            )
        check_output(output, VOCAB_SUFFIXES)
    tokenizer = loading.tokenizer(model)
    options.check_tokens(tokens, "use -t {0} for a second model", tokenizer.table)
    teacher = None if teacher_model is None else loading.tokenizer(teacher_model)
    items: list[Any] | None = [*tokens, *token_id]
    if not items:
        roles = tokenizer.table.roles_by_id
        items = None if json or output else [i for i in sorted(roles) if roles[i] != ("reserved",)]
    table = xtok.vocab(tokenizer, items, teacher_model=teacher, progress=console.progress_bar)
    if output is not None:
        table.save(output)
        print_path(output)
    else:
        names = None if teacher is None else teacher.table.quoted
        show(table, partial(print_vocab, names=names), json=json)
