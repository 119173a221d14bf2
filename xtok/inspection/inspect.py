"""`inspect`: describe, explain or compare maps of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from xtok.config import MAP_NAMES, InspectConfig
from xtok.errors import XtokError
from xtok.inspection.compare import Comparison, compare
from xtok.inspection.describe import Description, describe
from xtok.inspection.events import (
    EventDescription,
    SpellingDescription,
    describe_events,
    describe_spellings,
    spelled_token,
    token_event,
)
from xtok.inspection.explain import Explanation, explain
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import AnyMap, AnyMapLike, MapLike, bind_map, read_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import Token, token_list

if TYPE_CHECKING:
    from xtok._lib.shards import Paths

Shown: TypeAlias = (
    Description | EventDescription | SpellingDescription | Comparison | Explanation[Any]
)


def inspect(
    any_map: AnyMapLike,
    tokens: Token | Sequence[Token] = (),
    config: InspectConfig | None = None,
    *,
    pair: Pair | None = None,
    against: MapLike | None = None,
    texts: Paths = (),
    field: str = "text",
    names: Sequence[str] = (),
) -> Shown:
    """Show an overview of a map, rows of it, or its differences from another map.

    >>> xtok.inspect(xtok.build("bytes", "bytes"), "a").rows[0].kind
    'exact'

    Args:
        any_map: a map of any kind, or the path of its file.
        tokens: student tokens to explain: text, bytes or ids, as `Vocabulary.ids_of` takes them.
        config: the part of the map to show.
        pair: the map's pair; its tokenizers add each token's pieces on the other side.
        against: a second map of the pair, to compare row by row.
        texts: with `against` and the student's tokenizer, text to weight rows by.
        field: the field or column that holds the text.
        names: with `against`, names of the two maps in errors.

    Raises:
        XtokError: if a token does not exist, two parts are asked for at once, or the map has no
            such part.
        ValueError: for an argument of a comparison without a second map.
    """
    config = InspectConfig.or_default(config)
    m, tokens, most = read_map(any_map), token_list(tokens), config.num_examples
    _check(m, config, bool(tokens), against is not None)
    if against is None and (texts or names or field != "text"):
        raise ValueError("texts, field and names need a second map: against")
    if not isinstance(m, ProjectionMap):
        bound, _ = bind_map(m, pair)
        return _other_kind(bound, bound.student.all_ids_of(tokens), 5 if most is None else most)
    if against is not None:
        most = 10 if most is None else most
        return compare(m, against, texts, pair=pair, num_examples=most, names=names, field=field)
    if tokens or config.is_list:
        worst, token_class, kind = config.worst, config.token_class, config.kind
        return explain(m, tokens, pair=pair, worst=worst, token_class=token_class, kind=kind)
    if most is None:
        most = 0 if config.classes else 5
    return describe(m, num_examples=most, classes=config.classes, pair=pair)


def _check(m: AnyMap, config: InspectConfig, has_tokens: bool, has_other: bool) -> None:
    if [has_tokens, config.is_list, config.classes, has_other].count(True) > 1:
        problem = "one call shows one of: tokens, a list of rows, classes, a comparison"
        raise XtokError(problem, hint="ask for one of them at a time")
    if config.num_examples is not None and (has_tokens or config.is_list):
        raise XtokError(
            "only an overview and a comparison have examples",
            hint="leave out {option}",
            parameter="num_examples",
        )
    if not isinstance(m, ProjectionMap) and (config.is_list or config.classes or has_other):
        raise XtokError(
            f"{MAP_NAMES[m.KIND]} has no rows: lists, classes and comparisons are for projection "
            "maps",
            hint="leave them out, for an overview, or give tokens",
        )


def _other_kind(m: EventMap | SpellingMap, ids: Sequence[int], most: int) -> Shown:
    if not ids:
        if isinstance(m, EventMap):
            return describe_events(m, num_examples=most)
        return describe_spellings(m, num_examples=most)
    rows: list[Any] = [
        token_event(m, i) if isinstance(m, EventMap) else spelled_token(m, "student", i)
        for i in dict.fromkeys(ids)
    ]
    return Explanation(student=m.student.model_id, teacher=m.teacher.model_id, rows=tuple(rows))
