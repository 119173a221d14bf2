"""Notes about a pair's tokenizers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xtok.tokenizers.display import listed, plural
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES, TokenTable


def tokenizer_notes(pair: Pair) -> list[str]:
    """Return notes about the widths of both vocabularies, and about changes to text."""
    notes = []
    for side, tokenizer in zip(SIDES, pair.tokenizers, strict=True):
        vocabulary = tokenizer.vocabulary
        notes.append(
            f"{side} {vocabulary.model_id}: vocabulary width {vocabulary.vocab_size:,} "
            f"(from the {vocabulary.width_source})"
        )
        notes += [
            f"{vocabulary.model_id} changes text: {normalizer}: {changes}"
            for normalizer, changes in tokenizer.text_changes
        ]
    return [*notes, *case_notes(pair)]


def case_notes(pair: Pair) -> list[str]:
    """Return a note if only one vocabulary has upper-case letters."""
    results = ("their rows in a map are empty", "no row of a map contains them")
    notes = []
    for sides, result in zip((pair, pair.reversed), results, strict=True):
        if count := len(sides.upper_case):
            notes.append(
                f"{count:,} of {len(sides.tables[0].text_ids):,} tokens of "
                f"{sides.student.model_id} have upper-case letters, but {sides.teacher.model_id} "
                f"is lower-case only: {result}"
            )
    return notes


def undecodable_tokens(
    pair: Pair, ignored: tuple[Collection[int], Collection[int]] = ((), ())
) -> list[str]:
    """Return a sentence for each tokenizer that has text ids without bytes."""
    failures = []
    for side, tokenizer, left_out in zip(SIDES, pair.tokenizers, ignored, strict=True):
        undecodable = [i for i in tokenizer.undecodable if i not in left_out]
        if undecodable:
            ids = examples_of(undecodable, tokenizer.table, "id")
            failures.append(f"the {side} {tokenizer.vocabulary.model_id} has no bytes for {ids}")
    return failures


def unspelled_note(pair: Pair, ids: Collection[int]) -> list[str]:
    """Return a note about the student tokens that the teacher cannot spell."""
    examples = examples_of(sorted(ids), pair.tables[0]) if ids else ""
    return [f"{pair.teacher.model_id} cannot spell {examples}"] if ids else []


def examples_of(ids: Sequence[int], table: TokenTable | None, noun: str = "token") -> str:
    """Format the number of ids, and the first ids as examples."""
    names = (str(i) if table is None else f"{i} {table.quoted(i)}" for i in ids)
    return f"{plural(len(ids), noun)}: {listed(names)}"
