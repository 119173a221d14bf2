"""Render a file of conversations to rows with ids, masks and labels."""

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
from xtok.conversation.teacher_side import teacher_chats
from xtok.errors import OutputError, at_location
from xtok.tokenizers import ModelLike, load_tokenizer
from xtok.tokenizers.display import safe_json


@dataclass(frozen=True, kw_only=True)
class RenderedFile:
    """Numbers of rows and tokens that `render_file` wrote."""

    conversations: int
    tokens: int
    targets: int  # tokens of the assistant's answers
    teacher_differs: int  # number of conversations with `teacher_messages`
    extra_tokens: int  # additional tokens of the first teacher's messages, in total
    notes: dict[str, int]  # note → number of conversations


def check_render_output(output: str | Path, file: str | Path) -> Path:
    """Check the output path of `render_file`, which must not be the input."""
    target, source = check_output(output, (".jsonl", ".parquet")), Path(file)
    if target.exists() and source.exists() and target.samefile(source):
        raise OutputError(f"the output {target} is also the input", hint="give another path")
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
    """Render conversations one by one, and write each `Conversation.record` as a row.

    Args:
        model: the model; see `load_tokenizer`.
        chats: a file, or the result of `read_conversations`.
        output: a `.jsonl` or `.parquet` path, or a binary stream for JSON Lines.
        template: a Jinja file or the name of a format. The default is the model's own template.
        add_generation_prompt: append the template's generation prompt.
        progress: called with the number of tokens of each row.

    Raises:
        OutputError: if the output cannot be written.
        XtokError: if a row cannot be read or rendered. The error names the file and the row.
    """
    if isinstance(chats, str | Path):
        file, chats = Path(chats), read_conversations(Path(chats))
        output = check_render_output(output, file) if isinstance(output, str | Path) else output
    tokenizer = load_tokenizer(model)
    find_template(tokenizer, template)
    counts = Counter(conversations=0, tokens=0, targets=0, teacher_differs=0, extra_tokens=0)
    notes = Counter[str]()

    def rows() -> Iterator[dict[str, Any]]:
        for chat in chats:
            with at_location(chat.location):
                conversation = chat.render(
                    tokenizer, template, add_generation_prompt=add_generation_prompt
                )
                sides = [s for s in teacher_chats(chat, None) if s.answers is not None][:1]
                teacher_sides = [side_chat.render(tokenizer, template) for side_chat in sides]
            num_targets = int(conversation.assistant_mask.sum())
            counts.update(conversations=1, tokens=len(conversation.ids), targets=num_targets)
            extra_tokens = sum(len(r.ids) - len(conversation.ids) for r in teacher_sides)
            counts.update(teacher_differs=len(teacher_sides), extra_tokens=extra_tokens)
            notes.update(conversation.notes)
            advance(len(conversation.ids))
            yield conversation.record()

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
