"""`xtok transplant`."""

from itertools import islice
from pathlib import Path

import xtok
from xtok._lib.fields import MAIN, option
from xtok.cli import console, options
from xtok.cli.command import command, show
from xtok.cli.tables.tokenizers import print_transplant
from xtok.config import DEFAULT_SHRINK
from xtok.conversation.texts import read_batches, text_shards

DOCUMENTS, CHARACTERS = 64, 1000  # limits of the text for measuring both models


@command
def transplant(
    *,
    model: str = option(..., "The model: a repo or folder with weights.", argument="MODEL"),
    tokenizer: str = option(
        ...,
        "The new tokenizer: a repo or folder that Transformers can load (xtok help models).",
        argument="TOKENIZER",
    ),
    output: Path = option(
        ..., "Folder for the new model.", metavar="FOLDER", short="-o", panel=MAIN
    ),
    init: str = option(
        "pieces",
        "New rows for tokens that the model lacks: pieces (the mean of the rows of the token's "
        "pieces), mean (the mean of all rows), or a map from the new to the old tokenizer.",
        metavar="pieces|mean|MAP",
        panel=MAIN,
    ),
    shrink: float = option(
        DEFAULT_SHRINK,
        "Share of the mean of all rows in each row that --init computes. If the head is separate "
        "from the input embeddings, only the head is changed.",
        min=0,
        max=1,
        panel=MAIN,
    ),
    text: list[str] = options.text_option(
        "Text for measuring both models in bits per byte (the first 1,000 characters of up to 64 "
        "documents): "
    ),
    field: str = options.TEXT_FIELD,
    pad_to_multiple_of: int = option(
        1, "Round the number of rows up to a multiple of this number.", min=1, panel=MAIN
    ),
    json: bool = options.json_option(
        "folder, model, tokenizer, old_vocab_size, vocab_size, copied, roles, composed, empty, "
        "padding, bits_before, bits_after, notes"
    ),
) -> None:
    """Give a model another tokenizer.

    The new embeddings are computed from the model's old embeddings. Train the new model afterwards,
    with the original model as the teacher.

    Example: xtok transplant HuggingFaceTB/SmolLM2-135M Qwen/Qwen3-8B -o smollm2-qwen
    """
    batches = read_batches(text_shards(text) if text else (), field)
    texts = (text[:CHARACTERS] for batch in batches for text in batch.texts if text.strip())
    result = xtok.transplant(
        model, tokenizer, output, init=init, shrink=shrink, documents=[*islice(texts, DOCUMENTS)],
        pad_to_multiple_of=pad_to_multiple_of, progress=console.progress_bar,
    )  # fmt: skip
    console.print_notes(result.notes)
    show(result, print_transplant, json=json)
