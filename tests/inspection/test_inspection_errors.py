"""Errors of the commands that inspect maps: causes, messages and hints."""

from __future__ import annotations

from error_causes import (
    Errors,
    bytes_map,
    bytes_pair,
    bytes_to_pieces,
    file,
    messages_test,
    spellings,
)
from make_maps import GOOD, TINY

import xtok

ERRORS: Errors = {
    "give both models with pair=": [
        (
            lambda: xtok.explain(GOOD, token_class="digits"),
            "the map has no token table for m: xtok did not create the map",
        ),
    ],
    "the classes are: …": [
        (lambda: xtok.explain(TINY, token_class="digit"), "unknown class of tokens 'digit'"),
    ],
    "give one of: empty, exact, pieces, role, similar, counted, mixed, relaxed": [
        (lambda: xtok.explain(TINY, kind="none"), "unknown kind of row 'none'"),
    ],
    "give models and maps of the same pair, with the student first; xtok inspect shows the pair "
    "of a map": [
        (
            lambda: xtok.explain(bytes_map(), 1, pair=bytes_to_pieces()),
            "the teacher of the map (bytes) has other tokens than small.model",
        ),
    ],
    "give the map's student first, or build the map in the other direction": [
        (
            lambda: xtok.explain(
                xtok.build(*bytes_to_pieces().tokenizers), 1, pair=bytes_to_pieces().reversed
            ),
            "the sides are swapped: in the map, the student is bytes "
            "and the teacher is small.model",
        ),
    ],
    "evaluate the event maps separately, without a loss": [
        (
            lambda: xtok.evaluate(
                bytes_pair(),
                [bytes_map(), xtok.events("bytes", "bytes")],
                file("a.txt", "x"),
            ),
            "event maps cannot be compared with projection maps, or ranked for a loss",
        ),
    ],
    "evaluate projection maps or event maps; xtok verify checks a spelling map": [
        (
            lambda: xtok.evaluate(bytes_pair(), spellings(), file("a.txt", "x")),
            "spelling maps cannot be measured on text",
        ),
    ],
}

test_inspection_errors = messages_test(ERRORS)
