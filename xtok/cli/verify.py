"""`xtok verify`."""

from pathlib import Path

import typer

import xtok
from xtok.cli.command import command, show
from xtok.cli.options import MAP, ModelsBeside, Widths, json_option
from xtok.cli.tables.maps import print_verification
from xtok.tokenizers.sides import SIDES
from xtok.tokenizers.table import Vocabulary

_UNKNOWN = Vocabulary(
    model_id="unknown", revision=None, backend=None, vocab_size=0, width_source="ids",
    tokenizer_vocab_size=None, table=None,
)  # fmt: skip
"""A side whose model is not given."""


@command
def verify(
    *,
    map_path: Path = MAP,
    models: ModelsBeside,
    json: bool = json_option("path, failed (names of checks; none for a good map), checks"),
    widths: Widths,
) -> None:
    """Check a map file, and its models if they are given.

    Exits with 3 if a check fails.

    Example: xtok verify map.safetensors
    """
    tokenizers = models.tokenizers()
    student, teacher = map(tokenizers.get, SIDES)
    ours, theirs = (_UNKNOWN if one is None else one.vocabulary for one in (student, teacher))
    pair = xtok.Pair(ours, theirs, student, teacher)
    verification = xtok.verify(map_path, pair, **vars(widths))
    show(verification, print_verification, json=json)
    if verification.failed:
        raise typer.Exit(3)
