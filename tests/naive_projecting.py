"""Reference implementation of `xtok.teachers`, and small teachers with enumerable texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from xtok.maps.creating import map_from_edges
from xtok.maps.edges import Edges
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.predictions.topk import TopK
from xtok.teachers.projector_kernels import RESPLIT_RATE
from xtok.tokenizers import Backend, Tokenizer
from xtok.tokenizers.table import TokenEntry, TokenType

Row = Mapping[int, float]
Rows = Mapping[int, Row]
END = 0  # the id of the end of text, in every small vocabulary


class Small(Backend):
    """A tokenizer of a few tokens and an end of text.

    It spells a text with the longest tokens, or with merges in ascending order of ids.
    """

    name = "small"

    def __init__(self, tokens: Sequence[bytes], merges: bool) -> None:
        self.tokens, self.merges = tokens, merges

    def entries(self) -> Iterable[TokenEntry]:
        texts = [TokenEntry(n + 1, TokenType.NORMAL, token) for n, token in enumerate(self.tokens)]
        return [TokenEntry(END, TokenType.CONTROL, b"<eos>"), *texts]

    def declared_roles(self) -> Mapping[str, Mapping[int, str]]:
        return {"eos": {END: "the file"}}

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.spell(text.encode()) for text in texts]

    def spell(self, data: bytes) -> list[int]:
        parts = [data[i : i + 1] for i in range(len(data))] if self.merges else []
        while self.merges:
            pairs = [(a + b, i) for i, (a, b) in enumerate(pairwise(parts))]
            known = [(self.tokens.index(x), i) for x, i in pairs if x in self.tokens]
            if not known:
                break
            _, i = min(known)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        while not self.merges and data:
            parts.append(max((x for x in self.tokens if data.startswith(x)), key=len))
            data = data[len(parts[-1]) :]
        return [self.tokens.index(part) + 1 for part in parts]


def small(tokens: Sequence[bytes], *, merges: bool = False) -> Tokenizer:
    return Tokenizer(Small(tokens, merges), model_id="small")


def map_of(rows: Rows, teacher: Tokenizer, student: Tokenizer) -> ProjectionMap:
    """Return a map from the teacher to the student with these rows."""
    pairs = [(t, s, w) for t, row in rows.items() for s, w in row.items()]
    t, s, w = np.array(pairs, np.float64).reshape(-1, 3).T
    sides: dict[str, Any] = {"student": teacher.vocabulary, "teacher": student.vocabulary}
    kind = np.zeros(len(teacher.table), np.uint8)
    kind[t.astype(np.int64)] = RowKind.MIXED
    edges = Edges(t.astype(np.int32), s.astype(np.int32), w)
    return map_from_edges(
        edges, **sides, row_kind=kind, scale_slot=None, method="multitoken",
        top_k=len(student.table), history=(),
    )  # fmt: skip


def best_first(row: Row) -> list[tuple[int, float]]:
    return sorted(row.items(), key=lambda item: (-item[1], item[0]))


def top_k(documents: Sequence[Sequence[int]], rows: Sequence[Row], k: int | None) -> TopK:
    """Return a `TopK` with the best k candidates of each row and the exact rest."""
    ids = [x for document in documents for x in document]
    kept = [best_first(row)[:k] for row in rows]
    with np.errstate(divide="ignore"):
        rest = np.log([max(0.0, 1 - sum(p for _, p in row)) if row else np.nan for row in kept])
        own = np.log([row.get(i, 0.0) if row else np.nan for i, row in zip(ids, rows, strict=True)])
        logprobs = np.log([p for row in kept for _, p in row])
    return TopK(
        np.array(ids, np.int32), np.cumsum([0, *map(len, documents)]),
        np.cumsum([0, *map(len, kept)]), np.array([i for row in kept for i, _ in row], np.int32),
        logprobs.astype(np.float32), rest.astype(np.float32), own.astype(np.float32),
    )  # fmt: skip


def topk_rows(predictions: TopK) -> list[dict[int, float]]:
    """Return the candidates of each row with their probabilities."""
    rows = []
    for a, b in pairwise(predictions.starts):
        p = np.exp(predictions.logprobs[a:b].astype(np.float64))
        rows.append(dict(zip(predictions.ids[a:b].tolist(), p.tolist(), strict=True)))
    return rows


class Projection:
    """The projection rule for one document; lost probability is added to the rest.

    `rows` contains the known predictions: candidates and the realized token.
    """

    def __init__(
        self, ids: Sequence[int], rows: Sequence[Row], tokens: Sequence[bytes], back: Rows,
        student: Tokenizer, *, along_path: bool,
    ) -> None:  # fmt: skip
        self.ids, self.rows, self.tokens, self.back, self.student = ids, rows, tokens, back, student
        self.along_path = along_path

    def expected_rows(self, spelling: Sequence[int]) -> list[dict[int, float]]:
        """Return the row of each student token of the document; a row without a value is empty."""
        ends = np.cumsum([0, *(len(self.tokens[i]) for i in self.ids)])
        lengths = [len(self.student.table[s]) for s in spelling]
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        rows = []
        for start in starts:
            position = min(int(np.searchsorted(ends, start, side="right")), len(self.ids)) - 1
            is_aligned = int(ends[position]) in starts
            rows.append(self.at(position, start - int(ends[position]), is_aligned=is_aligned) or {})
        return rows

    def at(self, position: int, inside: int, *, is_aligned: bool) -> dict[int, float] | None:
        """Return the distribution of the student's token `inside` bytes into the teacher's token.

        `is_aligned`: a student token begins at the start of the teacher's token.
        """
        realized, row = self.ids[position], self.rows[position]
        so_far = self.before = self.tokens[realized][:inside]
        self.is_aligned = is_aligned
        fits = {c: p for c, p in row.items() if self.tokens[c].startswith(so_far)}
        if not sum(fits.values()):
            return None
        # None: the probability of unknown tokens
        self.mass: dict[int | None, float] = defaultdict(float)
        for c, p in fits.items():
            left = self.tokens[c][inside:]
            if c == realized and self.tokens[c]:
                self.along(left, position, p, c if left == self.tokens[c] else self.token_of(left))
            elif not inside:
                self.spread(c, p)
            elif left:
                self.settle(left, p, self.token_of(left))
            else:
                self.mass[None] += p
        # The other tokens of the teacher share the unknown probability evenly.
        others = {c for c, token in enumerate(self.tokens) if token} - {*row}
        alike = sum(self.tokens[c].startswith(so_far) for c in others)
        share = alike / max(1, len(others)) if inside else 1.0
        total = sum(self.mass.values()) + share * (1 - sum(row.values())) if inside else 1.0
        return {s: p / total for s, p in self.mass.items() if p and s is not None}

    def along(self, text: bytes, position: int, p: float, token: int | None = None) -> None:
        """Extend the text by the prediction at the next position while a token may grow."""
        may_grow = any(x.startswith(text) and x != text for x in self.student.table.tokens())
        following = self.rows[position + 1] if position + 1 < len(self.rows) else {}
        if not self.along_path or not may_grow or not following:
            self.settle(text, p, token)
            return
        for c, q in following.items():
            if c == self.ids[position + 1] and self.tokens[c]:
                self.along(text + self.tokens[c], position + 1, p * q)
            else:  # the end of text ends a token
                self.settle(text + self.tokens[c], p * q)
        self.settle(text, p * (1 - sum(following.values())), token)

    def settle(self, text: bytes, p: float, token: int | None = None) -> None:
        """Add the probability of a text without a known continuation."""
        first, splits = self.first(text)
        if self.is_aligned and not splits:
            p *= RESPLIT_RATE
        if token is not None and self.back.get(token):
            self.spread(token, p)
        else:
            self.mass[first] += p

    def first(self, text: bytes) -> tuple[int, bool]:
        """Return the student's first token of a text, given the preceding bytes of its token.

        Also return whether a token begins there; if not, the token is the first token of the text
        alone.
        """
        begin = 0
        for s in self.student.segment(self.before + text):
            if begin == len(self.before):
                return s, True
            begin += len(self.student.table[s])
        return self.student.segment(text)[0], False

    def token_of(self, text: bytes) -> int | None:
        return self.tokens.index(text) if text in self.tokens else None

    def spread(self, token: int, p: float) -> None:
        row = self.back.get(token, {})
        for s, w in row.items():
            self.mass[s] += p * w
        self.mass[None] += p * (1 - sum(row.values()))


class Bigrams:
    """A bigram teacher: `rows[last]` predicts the next token. All its texts end."""

    def __init__(self, rows: Rows, tokens: Sequence[bytes]) -> None:
        self.rows, self.tokens = rows, tokens

    def begins(
        self, last: int, spell: Callable[[bytes], list[int]], longest: int, text: bytes = b""
    ) -> dict[int, float]:
        """Return the distribution of the first token of a text and all continuations of `last`."""
        shares: dict[int, float] = defaultdict(float)
        if len(text) >= longest:
            return {spell(text)[0]: 1.0}
        for c, p in self.rows[last].items():
            after = {spell(text)[0] if text else END: 1.0}
            if c != END:
                after = self.begins(c, spell, longest, text + self.tokens[c])
            for s, q in after.items():
                shares[s] += p * q
        return shares


def ids_and_bounds(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows of ids; return the ids and the bounds of the rows."""
    ids = np.array([i for row in rows for i in row], np.int32)
    return ids, np.cumsum([0, *map(len, rows)])
