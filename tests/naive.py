"""Slow, plain twins of what the package does on flat arrays, to compare it with."""

from __future__ import annotations

from collections import defaultdict

from xtok.config import FIRST_PIECE_WEIGHT, PIECE_DECAY, SLOT_WEIGHT
from xtok.projection import ProjectionMap
from xtok.tokenizers import Tokenizer

Row = dict[int, float]


def rows_of(projection: ProjectionMap) -> dict[int, list[tuple[int, float]]]:
    """Return the non-empty rows as lists of (teacher id, weight) in the map's order."""
    rows: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for s, t, w in zip(*(array.tolist() for array in projection.edges), strict=True):
        rows[s].append((t, w))
    return dict(rows)


def normalized(row: Row) -> Row:
    total = sum(row.values())
    return {t: w / total for t, w in row.items()}


def heaviest(row: Row, top_k: int) -> Row:
    return normalized(dict(sorted(row.items(), key=lambda item: (-item[1], item[0]))[:top_k]))


def multitoken(
    student: Tokenizer, teacher: Tokenizer, *, top_k: int, max_pieces: int, slot: int | None = None
) -> dict[int, Row]:
    """The recipe, row by row: text tokens only, both passes, cut, and one fixed slot."""
    rows: dict[int, Row] = defaultdict(lambda: defaultdict(float))
    for source, target, flip in ((student, teacher, False), (teacher, student, True)):
        table = source.vocabulary.table
        assert table is not None
        for i, token in enumerate(table.tokens()):
            if not token:
                continue
            pieces = target.segment(token)[:max_pieces]
            weights = [FIRST_PIECE_WEIGHT * PIECE_DECAY**n for n in range(len(pieces))]
            for piece, weight in zip(pieces, weights, strict=True):
                s, t = (piece, i) if flip else (i, piece)
                rows[s][t] += weight / sum(weights)
    result = {}
    for s, row in rows.items():
        cut = heaviest(normalized(row), top_k - (slot is not None))
        result[s] = cut if slot is None else normalized({**cut, slot: SLOT_WEIGHT})
    return result


def common_boundaries(
    student: list[bytes], teacher: list[bytes]
) -> list[tuple[list[int], list[int]]]:
    """The chunks of two spellings of the same bytes: positions of the tokens between two ends."""
    ends: list[dict[int, int]] = []
    for tokens in (student, teacher):
        total, found = 0, {}
        for position, token in enumerate(tokens):
            total += len(token)
            if token:
                found[total] = position + 1
        ends.append(found)
    chunks = []
    s_from = t_from = 0
    for boundary in sorted(ends[0].keys() & ends[1].keys()):
        s_to, t_to = ends[0][boundary], ends[1][boundary]
        chunks.append(
            (
                [i for i in range(s_from, s_to) if student[i]],
                [j for j in range(t_from, t_to) if teacher[j]],
            )
        )
        s_from, t_from = s_to, t_to
    return chunks
