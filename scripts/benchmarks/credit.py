"""Error of a token's share of the teacher's log-probability, for each kind of credit.

The teacher is an n-gram model over a real tokenizer's tokens. The probability of any bytes is the
sum over all spellings in its tokens, which gives the true share of each student token. The error is
the mean absolute difference of a share, in nats. Tokens alone in their chunk have no error.
`student` uses a student that was trained on a tenth of the teacher's text.
"""

from __future__ import annotations

from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import xtok
from benchmarks.harness import Pair, Row, chosen, documents, tokenizer
from benchmarks.ngrams import KINDS, ORDER, NGrams
from xtok.teachers.logprobs import Credit
from xtok.tokenizers import Tokenizer

PAIRS: tuple[Pair, ...] = (
    ("mistral-v3", "llama3"), ("llama3", "mistral-v3"), ("qwen", "llama3"), ("llama3", "o200k"),
)  # fmt: skip
CANDIDATES = (20, 64, 256)
CHUNKS = 300
LONGEST = 16  # bytes of a chunk: the ways to spell it double with each
UNREAD = 1e-6  # the student's probability of a token that it has never read
AFTER = b"\xff" * 64  # behind all that begins with a prefix


class Marginals:
    """How likely an n-gram model goes on with bytes, spelled in any way."""

    def __init__(self, model: NGrams, side: Tokenizer) -> None:
        self.model, self.tokens, self._known = (
            model,
            side.table.tokens(),
            side.table.canonical_ids(),
        )
        ids, p = model.prediction([])
        order = sorted(range(len(ids)), key=lambda k: self.tokens[ids[k]])
        self._sorted = [self.tokens[ids[k]] for k in order]
        self._up_to = np.concatenate([[0.0], np.cumsum(p[order])])
        self._single = dict(zip(ids.tolist(), p.tolist(), strict=True))
        self._kept: dict[tuple[tuple[int, ...], bytes], float] = {}

    def of_token(self, context: Sequence[int], token_id: int) -> float:
        """Return the probability of one token."""
        *parts, (weight, _) = self.model.levels(context[-ORDER + 1 :])
        p = weight * self._single.get(token_id, 0.0)
        return float(p + sum(w * shares[ids == token_id].sum() for w, (ids, shares) in parts))

    def of_bytes(self, context: Sequence[int], text: bytes) -> float:
        """Return the probability that the continuation starts with a text."""
        key = tuple(context[-ORDER + 1 :]), text
        if key not in self._kept:
            p = self._begins(context, text)
            for size in range(1, len(text)):
                first = self._known.get(text[:size])
                q = 0.0 if first is None else self.of_token(context, first)
                if q and first is not None:
                    p += q * self.of_bytes([*context, first], text[size:])
            self._kept[key] = p
        return self._kept[key]

    def _begins(self, context: Sequence[int], text: bytes) -> float:
        """Return the probability of all tokens that begin with a text."""
        *parts, (weight, _) = self.model.levels(context[-ORDER + 1 :])
        low, high = (bisect_left(self._sorted, end) for end in (text, text + AFTER))
        p = weight * float(self._up_to[high] - self._up_to[low])
        for w, (ids, shares) in parts:
            fits = [self.tokens[i].startswith(text) for i in ids.tolist()]
            p += w * float(shares[fits].sum())
        return p


def credit(options: Namespace) -> Iterator[Row]:
    """Yield the error of each credit, for pairs and kinds of text."""
    train, valid = documents(options), documents(options, "valid")
    for label, (student, teacher) in chosen(PAIRS, options):
        pair = xtok.load_pair(tokenizer(student), tokenizer(teacher))
        for kind, languages in KINDS.items():
            texts = [[x for name in languages for x in c.get(name, ())] for c in (train, valid)]
            if all(texts):
                row = errors(pair, texts[0], texts[1], max(10, int(CHUNKS * options.size)))
                yield {"student ← teacher": label, "text": kind, **row}


def errors(pair: xtok.Pair, train: list[str], valid: list[str], most: int) -> Row:
    """Return the mean error of a token in chunks of several student tokens."""
    student, teacher = (
        Marginals(NGrams(side.library_arrays(read)), side)
        for side, read in zip(pair.tokenizers, (train[::10], train), strict=True)
    )
    aligner = xtok.TokenAligner(pair)
    names = ["uniform", "student", *(f"prefix, K = {k}" for k in CANDIDATES)]
    distances: dict[str, list[NDArray[np.float64]]] = {name: [] for name in names}
    several = tokens = 0
    candidates = []
    sides = [side.library_arrays(valid) for side in pair.tokenizers]
    for n, (s, t) in enumerate(zip(*sides, strict=True)):
        tokens += len(s)
        for chunk in aligner.pairs(s, t):
            size = chunk.teacher_bytes[1] - chunk.teacher_bytes[0]
            if chunk.is_correct and len(chunk.student_ids) > 1:
                several += len(chunk.student_ids)
                if chunk.teacher_tokens[0] and size <= LONGEST:
                    candidates.append((n, chunk))
    for index in np.random.default_rng(0).permutation(len(candidates)).tolist():
        n, chunk = candidates[index]
        ours, theirs = list(chunk.student_ids), list(chunk.teacher_ids)
        spans = chunk.student_tokens, chunk.teacher_tokens
        before = [side[n][: span[0]].tolist() for side, span in zip(sides, spans, strict=True)]
        truth = true_logprobs(teacher, before[1], [student.tokens[i] for i in ours])
        scored, surprise = (
            [side.of_token([*context, *ids[:i]], x) for i, x in enumerate(ids)]
            for side, context, ids in ((teacher, before[1], theirs), (student, before[0], ours))
        )
        if truth is None or not all(scored):
            continue  # a token that the teacher has never read
        contexts = [[*before[1], *theirs[:i]][-ORDER + 1 :] for i in range(len(theirs))]
        given = [teacher.model.prediction(context, max(CANDIDATES)) for context in contexts]
        most_ids = max(len(ids) for ids, _ in given)
        ids, p = (
            np.array([np.pad(x[i], (0, most_ids - len(x[i]))) for x in given]) for i in (0, 1)
        )
        with np.errstate(divide="ignore"):
            topk = ids, np.log(p)
        for name in names:
            credits: dict[str, Credit] = {
                "uniform": "uniform",
                "student": xtok.StudentCredit(np.log(np.maximum(UNREAD, surprise))),
                **{
                    f"prefix, K = {k}": xtok.PrefixCredit(*(x[:, :k] for x in topk))
                    for k in CANDIDATES
                },
            }
            shares = xtok.project_logprobs(
                aligner, ours, theirs, np.log(scored), credit=credits[name]
            ).logprobs
            distances[name].append(np.abs(shares - truth))
        if len(distances["uniform"]) == most:
            break
    found = {name: float(np.concatenate(of_all).mean()) for name, of_all in distances.items()}
    return {"tokens that share, %": 100 * several / tokens, **found}


def true_logprobs(
    teacher: Marginals, context: list[int], pieces: list[bytes]
) -> NDArray[np.float64] | None:
    """Return log C(s_1…s_j) / C(s_1…s_(j-1)) for each token; None if the model has no count."""
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    text = b"".join(pieces)
    reached = [1.0, *(teacher.of_bytes(context, text[:end]) for end in ends)]
    return np.array([np.log(b / a) for a, b in pairwise(reached)]) if all(reached) else None
