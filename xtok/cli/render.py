"""`xtok render`."""

from pathlib import Path

import typer

from xtok._lib.fields import OUTPUT, option
from xtok._lib.progress import silent
from xtok.cli import console, options
from xtok.cli.command import command
from xtok.cli.stdout import print_path, result_stream
from xtok.conversation.files import read_conversations
from xtok.conversation.writing import check_render_output, render_file


@command
def render(
    *,
    file: Path = option(
        ...,
        "File with conversations: .json, .jsonl or .parquet (also .gz or .zst). A conversation is "
        "a list of messages, or an object with messages and optional system, tools, documents and "
        "chat_template_kwargs.",
        argument="FILE",
    ),
    model_argument: str | None = option(
        None, f"Model with the tokenizer: {options.MODEL}", argument="MODEL"
    ),
    chat_template: str | None = options.CHAT_TEMPLATE,
    add_generation_prompt: bool = option(
        False, "End each conversation with the template's generation prompt.", flag=True
    ),
    output: Path | None = option(
        None, "Output: .jsonl or .parquet. Default: JSON lines on stdout.", short="-o", panel=OUTPUT
    ),
    loading: options.Loading,
) -> None:
    """Tokenize conversations with a model's chat template, with masks of the assistant's tokens.

    Each row has the fields text, input_ids, assistant_masks, labels (-100 outside the assistant's
    tokens) and message_spans.

    Example: xtok render chats.jsonl Qwen/Qwen3-8B -o rows.parquet
    """
    if model_argument is None:
        raise typer.BadParameter("name a model: FILE MODEL")
    target = None if output is None else check_render_output(output, file)
    chats = read_conversations(file)  # check early
    tokenizer = loading.tokenizer(model_argument)
    result = render_file(
        tokenizer, chats, target or result_stream().buffer, template=chat_template,
        add_generation_prompt=add_generation_prompt,
        progress=silent if target is None else console.progress_bar,  # lines show the progress
    )  # fmt: skip
    console.print_note(
        f"conversations: {result.conversations:,}; tokens: {result.tokens:,}; tokens of the "
        f"assistant: {result.targets:,}"
    )
    if result.teacher_differs:
        console.print_note(
            f"the output contains no teacher_messages ({result.teacher_differs:,} conversations, "
            f"{result.extra_tokens:,} additional tokens)"
        )
    console.print_notes(f"{note} (conversations: {n:,})" for note, n in result.notes.items())
    if target is not None:
        print_path(target)
