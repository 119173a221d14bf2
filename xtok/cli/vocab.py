"""`xtok vocab`."""

import csv
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from itertools import chain
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
import typer

import xtok
from xtok._lib.io import atomic_output, check_output, write
from xtok._lib.opening import need
from xtok._lib.ragged import offsets_of
from xtok.cli import console
from xtok.cli.command import command, show
from xtok.cli.options import JSON, KINDS, Loading
from xtok.cli.stdout import print_path, safe_json
from xtok.cli.tables.tokenizers import print_vocab
from xtok.config import MAIN, option
from xtok.inspection.vocab import VocabTable, VocabToken
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.table import TokenTable

SUFFIXES = ".parquet", ".jsonl", ".csv", ".npz"


@command
def vocab(
    *,
    model: str = option(..., f"The model: {KINDS}", argument="MODEL"),
    tokens: list[str] = option(
        [],
        "Tokens to show, spaces included: ' the'. By default those with a role; with --json, all.",
        argument="[TOKEN]...",
    ),
    token_id: list[int] = option(
        [], "Show the token of this id. Repeatable.", name="id", metavar="ID", panel=MAIN
    ),
    teacher_model: str | None = option(
        None,
        "A second model: also show the id of the same bytes or role there, and the spelling in "
        "its tokens.",
        metavar="MODEL",
        short="-t",
        panel=MAIN,
    ),
    output: Path | None = option(
        None,
        "Write the whole vocabulary to this file: .parquet, .jsonl, .csv or .npz.",
        short="-o",
        panel=MAIN,
    ),
    json: bool = JSON,
    loading: Loading,
) -> None:
    """Show a model's tokens: bytes, types, roles; or write them all.

    A second model is always --teacher-model: further arguments are tokens.
    """
    asked = [*tokens, *token_id]
    if output is not None:
        if asked or json:
            raise typer.BadParameter(
                "--output writes the whole vocabulary: leave out tokens, --id and --json"
            )
        output = check_output(output, SUFFIXES)
        if output.suffix == ".parquet":
            need("pyarrow", output)
    tokenizer = loading.tokenizer(model)
    _check_tokens(tokens, tokenizer)
    teacher = None if teacher_model is None else loading.tokenizer(teacher_model)
    shown: list[Any] | None = asked or None
    if not asked and not json and output is None:
        roles = tokenizer.table.roles_by_id
        shown = [i for i in sorted(roles) if roles[i] != ("reserved",)]
    table = xtok.vocab(tokenizer, shown, teacher=teacher, progress=console.progress_bar)
    if output is not None:
        _write(output, table, tokenizer.table)
        print_path(output)
    else:
        names = None if teacher is None else teacher.table.quoted
        show(table, partial(print_vocab, names=names), json=json)


def _check_tokens(tokens: Iterable[str], tokenizer: Tokenizer) -> None:
    """Say where a second model goes, if the path of one is given as a token."""
    for token in tokens:
        if os.path.exists(token) and not tokenizer.table.ids_of(token):
            raise typer.BadParameter(f"{token} is not a token; a second model is -t {token}")


def _write(path: Path, table: VocabTable, tokens: TokenTable) -> None:
    """Write a whole vocabulary, in the format that the suffix names."""
    if path.suffix == ".parquet":
        _write_parquet(path, table)
    elif path.suffix == ".npz":
        with atomic_output(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **_arrays(table, tokens))
    else:
        write(path, _csv(table) if path.suffix == ".csv" else _json_lines(table))


def _write_parquet(path: Path, table: VocabTable) -> None:
    arrow, parquet = need("pyarrow", path), need("pyarrow.parquet", path)
    text, number = arrow.string(), arrow.int32()
    types = {"id": number, "bytes": text, "length": number, "type": text, "name": text}
    types |= {"roles": arrow.list_(text), "teacher_id": number, "spelling": arrow.list_(number)}
    columns = _columns(table)
    schema = arrow.schema({name: types[name] for name in columns})
    with atomic_output(path) as temporary, temporary.open("wb") as file:
        parquet.write_table(arrow.table(columns, schema), file, compression="zstd")


def _columns(table: VocabTable) -> dict[str, list[Any]]:
    """Return the table's columns; without a teacher, not those of the teacher."""
    names = [field.name for field in fields(VocabToken)]
    if table.teacher is None:
        names = [name for name in names if name not in ("teacher_id", "spelling")]
    return {name: [getattr(token, name) for token in table.tokens] for name in names}


def _json_lines(table: VocabTable) -> Iterator[bytes]:
    columns = _columns(table)
    for row in zip(*columns.values(), strict=True):
        line = dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False)
        yield safe_json(line).encode() + b"\n"


def _csv(table: VocabTable) -> Iterator[bytes]:
    """Yield lines with all text in quotes, since tokens begin with spaces; lists by spaces."""
    columns, line = _columns(table), io.StringIO()
    writer = csv.writer(line, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    for row in chain([columns], zip(*columns.values(), strict=True)):
        writer.writerow(" ".join(map(str, x)) if isinstance(x, tuple) else x for x in row)
        yield line.getvalue().encode()
        line.seek(0)
        line.truncate()


def _arrays(table: VocabTable, tokens: TokenTable) -> dict[str, Any]:
    """Return the table as arrays: uint8 `[total]`, int64 `[V + 1]`, uint8 `[V]`, and the teacher's.

    `teacher_ids` is int64 `[V]`, −1 for none; the spelling of token i is
    `spellings[spelling_offsets[i]:spelling_offsets[i + 1]]`, int32.
    """
    arrays: dict[str, Any] = {
        "bytes": tokens.data,
        "offsets": tokens.offsets,
        "types": tokens.types,
    }
    if table.teacher is not None:
        ids = [-1 if token.teacher_id is None else token.teacher_id for token in table.tokens]
        spellings = [token.spelling or () for token in table.tokens]
        arrays["teacher_ids"] = np.array(ids, np.int64)
        arrays["spellings"] = np.fromiter(chain.from_iterable(spellings), np.int32)
        arrays["spelling_offsets"] = offsets_of([*map(len, spellings)])
    return arrays
