"""Slow reference implementations of functions on flat arrays, for comparisons."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np

from xtok.building.multitoken import FIRST_PIECE_WEIGHT, PIECE_DECAY
from xtok.maps.edges import SLOT_WEIGHT
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer

Row = dict[int, float]


def map_rows(projection: ProjectionMap) -> dict[int, list[tuple[int, float]]]:
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
    """Return the recipe's map, row by row: text tokens, both passes, cut, one fixed slot."""
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
    """Return the chunks of two spellings of the same bytes as positions of tokens."""
    ends: list[dict[int, int]] = []
    for tokens in (student, teacher):
        total, next_position = 0, {}
        for position, token in enumerate(tokens):
            total += len(token)
            if token:
                next_position[total] = position + 1
        ends.append(next_position)
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


def chunk_pairs(
    chunks: list[tuple[list[int], list[int]]],
    unit: int,
    longest: int,
    weights: dict[tuple[int, int], float] | None = None,
) -> tuple[list[tuple[int, int, int]], int]:
    """Return (student id, teacher id, amount) of every pair within a chunk, and the omitted chunks.

    With weights of pairs, the share of each teacher token is divided in proportion to them.
    """
    pairs, skipped = [], 0
    for student, teacher in chunks:
        n, m = len(student), len(teacher)
        if max(n, m) > longest:
            skipped += 1
            continue
        for t in teacher:
            known = [weights.get((s, t), 0.0) if weights else 0.0 for s in student]
            if n > 1 and sum(known) > 0:
                shares = [math.floor(unit // m * (w / sum(known)) + 0.5) for w in known]
            else:
                shares = [unit // (n * m)] * n
            pairs += [(s, t, share) for s, share in zip(student, shares, strict=True)]
    return pairs, skipped


def projected_logprobs(
    chunks: list[tuple[list[int], list[int]]],
    size: int,
    teacher_logprobs: list[float],
    student_logprobs: list[float] | None = None,
) -> tuple[list[float], list[bool]]:
    """Divide each chunk's float32 sum among its student tokens.

    Each share is a multiple of the last bit of the sum. Also return a mask of tokens in chunks.
    """
    shares, valid = [0.0] * size, [False] * size
    for student, teacher in chunks:
        total = float(np.float32(sum(teacher_logprobs[j] for j in teacher)))
        weights = [1.0] * len(student)
        if student_logprobs is not None and any(student_logprobs[i] for i in student):
            weights = [-student_logprobs[i] for i in student]
        unit = 2.0 ** max(math.frexp(total)[1] - 24, -149)
        result, ends = 0.0, []
        for weight in weights:
            result += weight
            ends.append(result)
        before = 0
        for i, end in zip(student, ends, strict=True):
            now = round(total / unit * (end / ends[-1]))
            shares[i], valid[i], before = (now - before) * unit, True, now
    return shares, valid


def ngrams(token: bytes) -> Counter[tuple[object, int]]:
    """Return the n-grams of a token, each with the number of its earlier occurrences."""
    symbols = ["^", *token, "$"]
    grams: list[object] = [("whole", token), *token]
    for n in (2, 3, 4):
        grams += [tuple(symbols[i : i + n]) for i in range(len(symbols) - n + 1)]
    return Counter((g, number) for g, n in Counter(grams).items() for number in range(n))


def spelling_cosines(rows: list[bytes], columns: list[bytes], most_columns: int) -> list[Row]:
    """Return the positive cosine similarities between the n-grams of each row and each column."""
    row_grams, column_grams = list(map(ngrams, rows)), list(map(ngrams, columns))
    counts = sum([*row_grams, *column_grams], Counter())
    in_columns = sum(column_grams, Counter())
    total = len(rows) + len(columns)

    def cosines(row: Counter[tuple[object, int]], limit: int) -> Row:
        def square(grams: Counter[tuple[object, int]]) -> int:
            kept = [g for g in grams if in_columns[g] <= limit]
            return sum(round(16 * math.log2((total + 1) / counts[g]) + 1) ** 2 for g in kept)

        products = {i: square(row & column) for i, column in enumerate(column_grams)}
        return {
            i: product / math.sqrt(square(row)) / math.sqrt(square(column_grams[i]))
            for i, product in products.items()
            if product
        }

    return [cosines(row, most_columns) or cosines(row, len(columns)) for row in row_grams]


def prefix_credit(
    student: list[bytes],
    teacher: list[bytes],
    rows: list[dict[bytes, float]],
    own: list[float],
    vocabulary: list[bytes],
) -> list[float]:
    """Return the shares of a chunk's student tokens in the teacher's value, by byte prefixes.

    `rows` are the candidates' probabilities at each of the teacher's tokens, `own` are the tokens'
    log-probabilities.
    """
    text, total = b"".join(teacher), float(np.float32(sum(own)))

    def goes_on(size: int) -> float:
        share, path, begin = 0.0, 1.0, 0
        for token, row, logprob in zip(teacher, rows, own, strict=True):
            if begin >= size:
                break
            prefix, candidates = text[begin:size], row | {token: math.exp(logprob)}
            share += path * sum(p for c, p in candidates.items() if c.startswith(prefix))
            rest = max(0.0, 1 - sum(candidates.values()))
            others = [c for c in vocabulary if c not in candidates]
            if others:
                fits = sum(c.startswith(prefix) for c in others)
                share += path * rest * fits / len(others)
            path *= math.exp(logprob)
            begin += len(token)
        return share

    logs, size = [0.0], 0
    for token in student[:-1]:
        size += len(token)
        logs.append(min(logs[-1], max(math.log(goes_on(size)), total)))
    return [b - a for a, b in pairwise([*logs, total])]
