"""How commands load tokenizers and maps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xtok.cli._run import keep
from xtok.config import Normalize

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap
    from xtok.tokenizers import Tokenizer

Side = Literal["student", "teacher"]


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


def load_side(
    projection: ProjectionMap,
    side: Side,
    model: str,
    revision: str | None,
    vocab_size: int | None,
    pattern: str | None,
    *,
    name: str = "the map",
    **safety: bool,
) -> tuple[ProjectionMap, Tokenizer]:
    """Load the tokenizer of a map's side, both as wide as each other.

    Returns:
        the map, with the tokenizer's tokens if it had none, and the tokenizer.
    """
    from xtok.maps import pair as sides

    tokenizer = load(model, revision, vocab_size, pattern, **safety)
    width = sides.shared_width(getattr(projection, side), tokenizer.vocabulary)
    if vocab_size is None and width != tokenizer.vocabulary.vocab_size:
        tokenizer = load(model, revision, width, pattern, **safety)
    given: dict[str, Any] = {side: tokenizer.vocabulary}
    return sides.with_vocabularies(projection, **given, name=name), tokenizer


def load_map(
    path: Path,
    student_vocab_size: int | None,
    teacher_vocab_size: int | None,
    preserve_last: bool | None = None,
    normalize: Normalize | None = None,
) -> ProjectionMap:
    """Load a map; options win over what its file says of slots."""
    from xtok.maps import file as mapfile

    return mapfile.load(
        path,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
        preserve_last=preserve_last,
        normalize=normalize,
    )
