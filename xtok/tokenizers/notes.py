"""Notes on a pair's tokenizers, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from xtok.tokenizers.display import listed, plural
from xtok.tokenizers.sides import SIDES

if TYPE_CHECKING:
    from xtok.tokenizers.pairs import Pair
    from xtok.tokenizers.table import TokenTable


def tokenizer_notes(pair: Pair) -> list[str]:
    """Return a note on each side's width and where it comes from, and on what changes text."""
    notes = []
    for side, tokenizer in zip(SIDES, pair.tokenizers, strict=True):
        vocabulary = tokenizer.vocabulary
        notes.append(
            f"{side} {vocabulary.model_id}: {vocabulary.vocab_size:,} ids wide "
            f"(from the {vocabulary.width_source})"
        )
        notes += [
            f"{vocabulary.model_id} changes text: {normalizer}: {changes}"
            for normalizer, changes in tokenizer.text_changes
        ]
    return [*notes, *case_notes(pair)]


def case_notes(pair: Pair) -> list[str]:
    """Return a note for each side whose vocabulary has no upper case, where the other's has."""
    ends = ("in a map, their rows are empty", "in a map, no row leads to them")
    notes = []
    for one, end in zip((pair, pair.reversed), ends, strict=True):
        if count := len(one.upper_case):
            notes.append(
                f"{count:,} of {len(one.tables[0].text_ids):,} tokens of {one.student.model_id} "
                f"have upper-case letters, and {one.teacher.model_id} has none: {end}"
            )
    return notes


def undecodable_tokens(
    pair: Pair, ignored: tuple[Collection[int], Collection[int]] = ((), ())
) -> list[str]:
    """Return a sentence for each side that has ids that should stand for text and do not."""
    failures = []
    for side, tokenizer, left_out in zip(SIDES, pair.tokenizers, ignored, strict=True):
        undecodable = [i for i in tokenizer.undecodable if i not in left_out]
        if undecodable:
            what = examples_of(undecodable, tokenizer.table, "id")
            failures.append(f"{side} {tokenizer.vocabulary.model_id}: no bytes behind {what}")
    return failures


def unspelled_note(pair: Pair, ids: Collection[int]) -> list[str]:
    """Name the student tokens that the teacher cannot spell; nothing if there are none."""
    examples = examples_of(sorted(ids), pair.tables[0]) if ids else ""
    return [f"{pair.teacher.model_id} cannot spell {examples}"] if ids else []


def examples_of(ids: Sequence[int], table: TokenTable | None, what: str = "token") -> str:
    """Count ids in words, with the first few as examples."""
    names = (str(i) if table is None else f"{i} {table.quoted(i)}" for i in ids)
    return f"{plural(len(ids), what)}: {listed(names)}"
