"""`xtok render`."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import typer

import xtok
from xtok._lib.io import atomic_output, check_output, write
from xtok._lib.opening import need, parquet_writer
from xtok.cli import console
from xtok.cli.command import command
from xtok.cli.options import CHAT_TEMPLATE, KINDS, Loading
from xtok.cli.stdout import print_path, result_stream
from xtok.config import MODELS, OUTPUT, option
from xtok.conversation.files import read_conversations
from xtok.errors import OutputError, XtokError
from xtok.tokenizers.display import safe_json


@command
def render(
    *,
    file: Path = option(
        ...,
        "Conversations: .json, .jsonl or .parquet, also as .gz or .zst. Each is a list of "
        "messages, or an object with messages, tools and chat_template_kwargs.",
        argument="FILE",
    ),
    model_argument: str | None = option(None, f"Model to write ids for: {KINDS}", argument="MODEL"),
    model: str | None = option(
        None, "The same as MODEL, as an option.", metavar="MODEL", short="-m", panel=MODELS
    ),
    chat_template: str | None = CHAT_TEMPLATE,
    add_generation_prompt: bool = option(
        False, "End each conversation with the template's prompt for an answer.", flag=True
    ),
    output: Path | None = option(
        None,
        "Output: .jsonl or .parquet. Default: JSON lines on stdout.",
        short="-o",
        panel=OUTPUT,
    ),
    loading: Loading,
) -> None:
    """Write conversations as ids, with the assistant's masks.

    Fields: text, input_ids, assistant_masks, labels (-100 but for the assistant's) and
    message_spans.

    Example: xtok render chats.jsonl Qwen/Qwen3-8B -o rows.parquet
    """
    if (model_argument is None) == (model is None):
        raise typer.BadParameter("give one model: MODEL, or --model")
    if output is not None:
        output = _output_path(output, file)
    chats = read_conversations(file)
    first = next(chats)
    tokenizer = loading.tokenizer(model_argument or model or "")
    xtok.conversation.find_template(tokenizer, chat_template)
    counts, noted = Counter[str](), Counter[str]()

    def rows(advance: Callable[[int], object]) -> Iterator[dict[str, Any]]:
        for chat in chain([first], chats):
            with _naming(chat.place):
                rendered = chat.render(
                    tokenizer, chat_template, add_generation_prompt=add_generation_prompt
                )
            num_targets = int(rendered.assistant_mask.sum())
            counts.update(conversations=1, tokens=len(rendered.ids), targets=num_targets)
            noted.update(rendered.notes)
            advance(len(rendered.ids))
            yield rendered.record()

    silent = nullcontext(lambda size: None)  # lines on a terminal are progress enough
    with silent if output is None else console.progress_bar("render", 0) as advance:
        if output is not None and output.suffix == ".parquet":
            _write_parquet(output, rows(advance))
        else:
            lines = (_line(row) for row in rows(advance))
            write(output, lines) if output is not None else result_stream().buffer.writelines(lines)
    note = "conversations: {conversations:,}; tokens: {tokens:,}, the assistant's: {targets:,}"
    console.print_notes([note.format_map(counts)])
    console.print_notes(f"{note} (conversations: {count:,})" for note, count in noted.items())
    if output is not None:
        print_path(output)


def _line(row: dict[str, Any]) -> bytes:
    return safe_json(json.dumps(row, ensure_ascii=False)).encode() + b"\n"


def _output_path(output: Path, file: Path) -> Path:
    """Return the path to write to, before any work."""
    target = check_output(output, (".jsonl", ".parquet"))
    if target.exists() and file.exists() and target.samefile(file):
        raise OutputError(f"the output {target} is the input", hint="give another path")
    if target.suffix == ".parquet":
        need("pyarrow", target)
    return target


@contextmanager
def _naming(place: object) -> Iterator[None]:
    """Put a conversation's place before the errors that it raises."""
    try:
        yield
    except XtokError as error:
        error.at(place)
        raise


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows in groups of a thousand."""
    arrow = need("pyarrow", path)
    text, ids = arrow.string(), arrow.list_(arrow.int32())
    mask, flag = arrow.list_(arrow.int8()), arrow.bool_()
    span = arrow.struct(dict.fromkeys(("chars", "bytes", "tokens"), ids))
    spans = {"role": text, "whole": span, "content": span, "source": ids, "verbatim": flag}
    columns = {"text": text, "input_ids": ids, "assistant_masks": mask, "labels": ids}
    columns["message_spans"] = arrow.list_(arrow.struct(spans))
    schema = arrow.schema(columns)
    with atomic_output(path) as temporary, parquet_writer(temporary, schema) as writer:
        while group := list(islice(rows, 1000)):
            writer.write_table(arrow.Table.from_pylist(group, schema))
