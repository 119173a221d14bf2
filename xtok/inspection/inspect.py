"""`inspect`: describe, explain or compare maps of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from xtok._lib.shards import Paths
from xtok.config import InspectConfig
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
from xtok.loss_names import MAP_NAMES
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import AnyMap, AnyMapLike, MapLike, bind_map, read_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import Token, token_list

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
    """Return an overview of a map, some of its rows, or its differences from another map.

    >>> xtok.inspect(xtok.build("bytes", "bytes"), "a").rows[0].kind
    'exact'

    Args:
        any_map: a map of any kind, or the path of its file.
        tokens: student tokens to explain, as text, bytes or ids (see `Vocabulary.ids_of`).
        config: the part of the map to show.
        pair: the map's pair. If the pair has tokenizers, the result includes each token's pieces in
            the other vocabulary.
        against: a second map of the pair, to compare row by row.
        texts: paths and globs of text; each row is weighted by its token's count. Requires
            `against` and the student's tokenizer.
        field: the field or column with the text.
        names: names of the two maps in errors; requires `against`.

    Raises:
        XtokError: if a token does not exist, if several parts are requested at once, or if the map
            has no such part.
        ValueError: if an argument requires a second map, but `against` is missing.
    """
    config = InspectConfig.or_default(config)
    m, tokens, most = read_map(any_map), token_list(tokens), config.num_examples
    _check(m, config, bool(tokens), against is not None)
    if against is None and (texts or names or field != "text"):
        raise ValueError("'texts', 'field' and 'names' require a second map; pass it as 'against'")
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
        problem = "tokens, a list of rows, classes and a comparison cannot be combined"
        raise XtokError(problem, hint="request one of the four parts at a time")
    if config.num_examples is not None and (has_tokens or config.is_list):
        raise XtokError(
            "examples are only available for an overview or a comparison",
            hint="omit {option}",
            parameter="num_examples",
        )
    if not isinstance(m, ProjectionMap) and (config.is_list or config.classes or has_other):
        raise XtokError(
            f"{MAP_NAMES[m.KIND]} has no rows to list, count or compare",
            hint="request an overview, or pass tokens",
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
