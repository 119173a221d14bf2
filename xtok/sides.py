"""The two vocabularies of a map: whether they are those of given tokenizers, and what they lack."""

from __future__ import annotations

from dataclasses import replace

from xtok.errors import XtokError
from xtok.projection import ProjectionMap
from xtok.tokens import TokenTable, Vocabulary


def with_vocabularies(
    projection: ProjectionMap,
    *,
    student: Vocabulary | None = None,
    teacher: Vocabulary | None = None,
    widths: bool = False,
) -> ProjectionMap:
    """Check a map's sides against vocabularies; a side without tokens takes the one given.

    Args:
        projection: any map.
        student: what the rows should be of; not checked if None.
        teacher: what the columns should be of, likewise.
        widths: whether a width that differs is an error where the tokens are the same. Where the
            map has no tokens it always is.

    Raises:
        XtokError: naming the side whose tokens or width differ, and how.
    """
    for side, given in (("student", student), ("teacher", teacher)):
        if given is not None:
            ours: Vocabulary = getattr(projection, side)
            _require_same(side, ours, given, width=widths or ours.table is None)
            if ours.table is None:
                projection = replace(projection, **{side: given})  # type: ignore[arg-type]
    return projection


def require_same_pair(projection: ProjectionMap, student: Vocabulary, teacher: Vocabulary) -> None:
    """Check that a map is of these two vocabularies, at their widths, in this direction.

    Raises:
        XtokError: naming the side that differs, and how.
    """
    with_vocabularies(projection, student=student, teacher=teacher, widths=True)


def _require_same(side: str, ours: Vocabulary, given: Vocabulary, *, width: bool) -> None:
    both = ours.table is not None and given.table is not None
    if both and require_table(ours).sha256() != require_table(given).sha256():
        raise XtokError(
            f"the map's {side} is {ours.model_id}, whose tokens are not those of {given.model_id}",
            hint=f"give the --{side}-model, or the maps, of one pair, not swapped; xtok inspect "
            "shows the pair of a map",
        )
    if width and ours.vocab_size != given.vocab_size:
        raise XtokError(
            f"the map's {side} {ours.model_id} is {ours.vocab_size} wide, "
            f"{given.model_id} is {given.vocab_size}",
            hint=f"give --{side}-vocab-size {ours.vocab_size}, or the model that it is of",
        )


def require_table(vocabulary: Vocabulary) -> TokenTable:
    """Return a vocabulary's tokens.

    Raises:
        XtokError: if it has none.
    """
    if vocabulary.table is None:
        raise XtokError(
            f"the map carries no tokens of {vocabulary.model_id}: xtok did not write it",
            hint="give both tokenizers with --student-model and --teacher-model",
        )
    return vocabulary.table
