"""A file of conversations rendered: a row of ids, masks and labels for each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from xtok._lib.io import atomic_output, check_output, write
from xtok._lib.opening import need
from xtok._lib.parquet import parquet_writer
from xtok._lib.progress import Progress, silent
from xtok.conversation.files import ChatRecord, read_conversations
from xtok.conversation.rendering import find_template
from xtok.conversation.teacher_side import teachers_chats
from xtok.errors import OutputError, XtokError
from xtok.tokenizers import ModelLike, load_tokenizer
from xtok.tokenizers.display import safe_json


@dataclass(frozen=True, kw_only=True)
class RenderedFile:
    """What `render_file` wrote."""

    conversations: int
    tokens: int
    targets: int  # of them, the assistant's
    apart: int  # conversations that teachers read otherwise, by `teacher_messages`
    more: int  # tokens of what the first teacher reads of these, beyond those written
    notes: dict[str, int]  # each with the number of conversations that it is about


def check_rendered(output: str | Path, file: str | Path) -> Path:
    """Return the path to write the rendered conversations of a file to, before any work.

    Raises:
        OutputError: if it is the input, or cannot be written.
        XtokError: for Parquet without pyarrow.
    """
    target, source = check_output(output, (".jsonl", ".parquet")), Path(file)
    if target.exists() and source.exists() and target.samefile(source):
        raise OutputError(f"the output {target} is the input", hint="give another path")
    if target.suffix == ".parquet":
        need("pyarrow", target)
    return target


def render_file(
    model: ModelLike,
    chats: str | Path | Iterable[ChatRecord],
    output: str | Path | BinaryIO,
    *,
    template: str | Path | None = None,
    add_generation_prompt: bool = False,
    progress: Progress = silent,
) -> RenderedFile:
    """Render the conversations of a file one by one, and write a row for each.

    A row is what `Conversation.record` gives: `text`, `input_ids`, `assistant_masks`, `labels` and
    `message_spans`.

    Args:
        model: the model to write ids for, as `load_tokenizer` takes it.
        chats: a file, or what `read_conversations` gives of one.
        output: a path, `.jsonl` or `.parquet`; or a binary stream for JSON lines.
        template: instead of the model's own: a Jinja file, or the name of a format.
        add_generation_prompt: end each conversation with the template's prompt for an answer.
        progress: called with the number of tokens written.

    Raises:
        OutputError: if the output cannot be written.
        XtokError: naming the file and the line or row that cannot be read or rendered.
    """
    if isinstance(chats, str | Path):
        file, chats = Path(chats), read_conversations(Path(chats))
        output = check_rendered(output, file) if isinstance(output, str | Path) else output
    tokenizer = load_tokenizer(model)
    find_template(tokenizer, template)
    counts = Counter(conversations=0, tokens=0, targets=0, apart=0, more=0)
    notes = Counter[str]()

    def rows() -> Iterator[dict[str, Any]]:
        for chat in chats:
            try:
                rendered = chat.render(
                    tokenizer, template, add_generation_prompt=add_generation_prompt
                )
                sides = [s for s in teachers_chats(chat, None) if s.answers is not None][:1]
                read = [side.render(tokenizer, template) for side in sides]
            except XtokError as error:
                error.at(chat.place)
                raise
            num_targets = int(rendered.assistant_mask.sum())
            counts.update(conversations=1, tokens=len(rendered.ids), targets=num_targets)
            counts.update(apart=len(read), more=sum(len(r.ids) - len(rendered.ids) for r in read))
            notes.update(rendered.notes)
            advance(len(rendered.ids))
            yield rendered.record()

    with progress("render", 0) as advance:
        lines = (safe_json(json.dumps(r, ensure_ascii=False)).encode() + b"\n" for r in rows())
        if not isinstance(output, str | Path):
            output.writelines(lines)
        elif Path(output).suffix == ".parquet":
            _write_parquet(Path(output), rows())
        else:
            write(Path(output), lines)
    return RenderedFile(**counts, notes=dict(notes))


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
