"""Compare a tokenizer's roles and ids with the results of AutoTokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xtok._lib.ragged import num_common
from xtok.tokenizers._backend import GENERATION_CONFIG, MODEL, SPECIAL_NAMES
from xtok.tokenizers.display import escape, listed, quoted

if TYPE_CHECKING:
    from xtok.tokenizers._tokenizer import Tokenizer

_SHOWN = 6  # number of ids to print, starting one id before the first difference


def library_differences(
    tokenizer: Tokenizer, texts: Sequence[str], rows: Sequence[Sequence[int]] | None = None
) -> list[str]:
    """Compare with AutoTokenizer, and return one line for each role or text that differs.

    The result is empty if Transformers cannot load the tokenizer. A declared bos at the start of a
    row and a declared eos at its end are not differences. If a text starts with a bos, the row may
    lack the bos that the library adds.

    >>> xtok.tokenizers.library_differences(xtok.load_tokenizer("bytes"), ["two boats"])
    []

    Args:
        tokenizer: a loaded tokenizer.
        texts: whole texts.
        rows: the ids of each text, which can be truncated. The default is the ids from `encode`,
            with the ids that the library adds before and after a text.

    Raises:
        ValueError: if the number of rows differs from the number of texts.
    """
    if rows is not None and len(rows) != len(texts):
        raise ValueError(f"{len(rows)} rows, expected {len(texts)} (the number of texts)")
    library = tokenizer.library
    if library is None:
        return []
    return [*_roles(tokenizer), *_ids(tokenizer, texts, rows)]


def _roles(tokenizer: Tokenizer) -> Iterator[str]:
    for role in SPECIAL_NAMES:
        library_id = getattr(tokenizer.library, f"{role}_token_id", None)
        declared = tokenizer.declared.get(role, {}).items()
        own_id = next((i for i, who in declared if who not in (GENERATION_CONFIG, MODEL)), None)
        if library_id != own_id:
            yield f"{role} is {_or_none(own_id)}, expected AutoTokenizer's {_or_none(library_id)}"


def _or_none(token_id: int | None) -> str:
    return "none" if token_id is None else f"id {token_id}"


def _ids(
    tokenizer: Tokenizer, texts: Sequence[str], rows: Sequence[Sequence[int]] | None
) -> Iterator[str]:
    """Yield a line for each text that AutoTokenizer encodes differently."""
    library = tokenizer.library
    bos, eos = ([*tokenizer.declared.get(role, ())] for role in ("bos", "eos"))
    for index, (text, inner) in enumerate(zip(texts, tokenizer.encode_batch(texts), strict=True)):
        bare = library(text, add_special_tokens=False, verbose=False)["input_ids"]
        whole = library(text, verbose=False)["input_ids"]
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        before, behind = whole[:start], whole[start + len(bare) :]
        own_ids = [*before, *inner, *behind] if rows is None else [*rows[index]]
        ends = [behind, [], *([i] for i in eos)]
        accepted = [[*b, *bare, *e] for b in _beginnings(before, bare, bos[:1]) for e in ends]
        if not any(own_ids == (ids[: len(own_ids)] if rows else ids) for ids in accepted):
            yield f"{quoted(escape(text.encode()))} is {ids_apart(own_ids, whole)}"


def _beginnings(before: list[int], bare: list[int], bos: list[int]) -> list[list[int]]:
    """Return the lists of ids that can precede the ids of the text in a row."""
    if not before:
        return [[], bos]
    return [before, []] if bare[: len(before)] == before else [before]


def ids_apart(own_ids: Sequence[int], library_ids: Sequence[int]) -> str:
    """Format two rows of ids around their first difference."""
    first = max(0, num_common(own_ids, library_ids) - 1)
    excerpts = (f"[{listed(ids[first:], _SHOWN)}]" for ids in (own_ids, library_ids))
    place = f" from token {first}" if first else ""
    return f"{next(excerpts)}{place}, expected AutoTokenizer's {next(excerpts)}"
