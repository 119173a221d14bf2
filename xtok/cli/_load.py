"""How commands load tokenizers and maps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtok.cli._run import keep
from xtok.config import Normalize

if TYPE_CHECKING:
    from xtok.projection import ProjectionMap
    from xtok.tokenizers import Tokenizer
    from xtok.tokens import Vocabulary


def load_tokenizer(model: str, **options: Any) -> Tokenizer:
    """Load a tokenizer, and say aloud what is to be known of how it was loaded."""
    from xtok import report, tokenizers

    tokenizer = keep(tokenizers.load_tokenizer(model, **options))
    report.print_notes(tokenizer.notes)
    return tokenizer


def load(
    model: str, revision: str | None, vocab_size: int | None, pattern: str | None, **safety: bool
) -> Tokenizer:
    """Load a tokenizer by what the options of one side say."""
    return load_tokenizer(
        model, revision=revision, vocab_size=vocab_size, pattern=pattern, **safety
    )


def load_like(
    like: Vocabulary,
    model: str,
    revision: str | None,
    vocab_size: int | None,
    pattern: str | None,
    **safety: bool,
) -> Tokenizer:
    """Load a tokenizer with the width of a map's side, if it is that side's tokenizer."""
    if vocab_size is None and like.table is None:
        vocab_size = like.vocab_size
    tokenizer = load(model, revision, vocab_size, pattern, **safety)
    differs = vocab_size is None and tokenizer.vocabulary.vocab_size != like.vocab_size
    if differs and like.table is not None and tokenizer.table.sha256() == like.table.sha256():
        return load(model, revision, like.vocab_size, pattern, **safety)
    return tokenizer


def load_map(
    path: Path,
    student_vocab_size: int | None,
    teacher_vocab_size: int | None,
    preserve_last: bool | None = None,
    normalize: Normalize | None = None,
) -> ProjectionMap:
    """Load a map; what its file does not tell is taken from the options."""
    from xtok import mapfile

    return mapfile.load(
        path,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
        preserve_last=preserve_last,
        normalize=normalize,
    )
