"""Projected predictions: how good they are beside what a teacher itself writes, and how fast.

The teacher is an n-gram model over a real tokenizer's tokens; it writes on from places of held-out
text. A prediction's bits are −log2 of the student's next token on what it wrote, a proper score: no
prediction has fewer than the truth; `text` is the same of the token that the text itself has, which
a path knows more of. `sampled` is the truth by samples, each scored by the others: a
bound of it from above; `of K` is the same for who knows K candidates of the teacher's next token. A
token that is no candidate has its part of the rest: `rest / V_student`.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyarrow import parquet
from scipy.sparse import csr_array

import xtok
from benchmarks.harness import Pair, Row, chosen, documents, tokenizer
from xtok.projecting.back_map import BACK_MAP
from xtok.projecting.caches import neutral_table
from xtok.projecting.project import Projector
from xtok.projecting.stored import StoredRows, TopK, chosen_rows
from xtok.tokenizers import Tokenizer

PAIRS: tuple[Pair, ...] = (
    ("llama3", "qwen"), ("qwen", "llama3"), ("mistral-v3", "qwen"), ("qwen", "mistral-v3"),
    ("llama3", "o200k"), ("o200k", "llama3"), ("llama3", "mistral-v3"), ("mistral-v3", "llama3"),
)  # fmt: skip
KINDS = {"en, Python": ("en", "python"), "zh": ("zh",), "own text": ("own text",)}
ORDER = 4
DISCOUNT = 0.4  # a peaked teacher: its truth can be sampled
PLACES, SAMPLES = 100, 128
ENOUGH = 40  # bytes of a continuation
FEWEST = 16  # continuations that a place needs
UNCUT = 8192  # more candidates than a student's row has here
AHEAD = 4  # teacher rows that a path may take
Sparse = tuple[NDArray[np.int64], NDArray[np.float64]]


class NGrams:
    """Absolute discounting, each order backing off to the one below, down to single tokens.

    (Ney, Essen and Kneser, Computer Speech and Language 8, 1994, section 2.)
    """

    def __init__(self, rows: Sequence[NDArray[np.int32]], seed: int = 0) -> None:
        counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for row in rows:
            ids = row.tolist()
            for i, token in enumerate(ids):
                for n in range(min(i + 1, ORDER)):
                    counts[tuple(ids[i - n : i])][token] += 1
        self._followers: dict[tuple[int, ...], Sparse] = {
            context: (np.array(list(c)), np.array(list(c.values()), np.float64))
            for context, c in counts.items()
        }
        ids, count = self._followers[()]
        order = np.argsort(-count, kind="stable")
        self._followers[()] = ids[order], count[order]
        self._singles = np.zeros(ids.max() + 1)
        self._singles[ids] = count / count.sum()
        self.random = np.random.default_rng(seed)

    def levels(self, context: Sequence[int]) -> Iterator[tuple[float, Sparse]]:
        """Yield mixture weights, with the tokens of each order and their shares."""
        weight = 1.0
        for n in range(ORDER - 1, -1, -1):
            followers = self._followers.get(tuple(context[max(0, len(context) - n) :]))
            if n <= len(context) and followers is not None:
                ids, count = followers
                taken = DISCOUNT * len(ids) / count.sum() if n else 0.0
                shares = count - (DISCOUNT if n else 0.0)
                yield weight * (1 - taken), (ids, shares / shares.sum())
                weight *= taken

    def prediction(self, context: Sequence[int], top_k: int | None = None) -> Sparse:
        """Return the best candidates, the best first, and their probabilities."""
        parts = list(self.levels(context))
        weight, (singles, _) = parts.pop()
        p = np.zeros_like(self._singles)
        ids = [singles if top_k is None else singles[:top_k]]  # they are sorted
        for of_level, (followers, part) in parts:
            p[followers] += of_level * part
            ids.append(followers)
        found = np.unique(np.concatenate(ids))
        p = p[found] + weight * self._singles[found]
        order = np.lexsort((found, -p))[:top_k]
        return found[order], p[order]

    def draw(self, context: Sequence[int]) -> int:
        """Return a token as the model would write it."""
        u = self.random.random()
        found = 0
        for weight, (ids, shares) in self.levels(context):
            place = int(np.searchsorted(np.cumsum(shares), u / weight))
            found = int(ids[min(len(ids) - 1, place)])
            if u < weight:
                break
            u -= weight
        return found


def quality(options: Namespace) -> Iterator[Row]:
    """Measure pairs and kinds of text: where both sides begin a token, and inside tokens."""
    train, valid = documents(options), documents(options, "valid")
    for label, (student, teacher) in chosen([(s, t) for s, t in PAIRS], options):
        sides = tokenizer(student), tokenizer(teacher)
        maps = Maps(*sides)
        for kind, languages in KINDS.items():
            texts = [[x for name in languages for x in c.get(name, ())] for c in (train, valid)]
            if all(texts):
                for row in measure(*sides, maps, texts[0], texts[1], options):
                    yield {"student ← teacher": label, "text": kind, **row}


class Maps:
    """Maps from the teacher to the student, and projectors that use them."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        start = xtok.build(teacher, student, BACK_MAP)
        recipe = xtok.build(teacher, student, xtok.BuildConfig(scale_trick=False, top_k=32))
        p_kl = xtok.build(teacher, student, for_loss="p-kl")
        self.projector = Projector(xtok.pair(student, teacher), start)
        self.context_free = {
            "through the map": matrix(start),
            "recipe": matrix(recipe),
            "--for p-kl": matrix(p_kl),
            "longest prefix": longest_prefix(student, teacher),
        }


def matrix(m: xtok.ProjectionMap) -> csr_array:
    """Return a map as a sparse matrix."""
    return csr_array((m.weights, (m.student_ids, m.teacher_ids)), shape=m.shape)


def longest_prefix(student: Tokenizer, teacher: Tokenizer) -> csr_array:
    """Return the rule of byte-prefix matching: the longest student token that begins a teacher's.

    (arXiv 2607.22334.)
    """
    known = student.table.canonical_ids()
    pairs = []
    for t, token in enumerate(teacher.table.tokens()):
        prefixes = (token[:n] for n in range(len(token), 0, -1))
        s = next((known[x] for x in prefixes if x in known), None)
        if s is not None:
            pairs.append((t, s))
    shape = len(teacher.table), len(student.table)
    return csr_array((np.ones(len(pairs)), np.array(pairs).T), shape=shape)


class Place(NamedTuple):
    """A place of a text where a student's token begins, and what the teacher writes there."""

    row: int  # the student's token
    at: int  # the teacher's
    context: list[int]
    drawn: NDArray[np.int64]  # the student's next token, one of each continuation
    firsts: NDArray[np.int64]  # the teacher's next token of each
    bits: float  # of the teacher's own next token


class Sides(NamedTuple):
    """Texts as tokens of both sides, one after another."""

    s_ids: NDArray[np.int32]
    s_bounds: NDArray[np.int64]
    t_ids: NDArray[np.int32]
    t_bounds: NDArray[np.int64]


def measure(
    student: Tokenizer, teacher: Tokenizer, maps: Maps, train: list[str], valid: list[str],
    options: Namespace,
) -> Iterator[Row]:  # fmt: skip
    """Yield a row for each number of candidates, at common beginnings and inside tokens."""
    model = NGrams(teacher.library_arrays(train))
    sides = Sides(*flat(student.library_arrays(valid)), *flat(teacher.library_arrays(valid)))
    at, inside = beginnings(sides, student, teacher)
    for where, rows in (("common", inside == 0), ("inside", inside > 0)):
        places: list[Place] = []
        for i in np.random.default_rng(1).permutation(np.flatnonzero(rows)).tolist():
            place = write_on(i, int(at[i]), int(inside[i]), sides, model, student, teacher)
            if place is not None:
                places.append(place)
            if len(places) >= PLACES * options.size:
                break
        if len(places) < FEWEST:
            continue
        ahead = {j for place in places for j in range(place.at, place.at + 1 + AHEAD)}
        known = predictions(sides, model, (j for j in ahead if j < len(sides.t_ids)), None)
        for k in (16, 64, 256, None):
            given = stored(sides, known, k)
            row = scores(places, sides, given, maps, k, common=where == "common")
            yield {"where": where, "places": len(places), "K": k or "all", **row}


def flat(rows: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return documents one after another."""
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def beginnings(
    sides: Sides, student: Tokenizer, teacher: Tokenizer
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the teacher's token at each first byte of the student's, and the bytes before it.

    The bytes are −1 in documents that the two sides do not spell alike.
    """
    at, inside = np.full((2, len(sides.s_ids)), -1)
    for (a, b), (c, d) in zip(pairwise(sides.s_bounds), pairwise(sides.t_bounds), strict=True):
        ours, theirs = (
            np.cumsum([0, *side.table.lengths[ids]])
            for side, ids in ((student, sides.s_ids[a:b]), (teacher, sides.t_ids[c:d]))
        )
        if ours[-1] == theirs[-1]:
            place = np.searchsorted(theirs, ours[:-1], side="right") - 1
            at[a:b], inside[a:b] = c + place, ours[:-1] - theirs[place]
    return at, inside


def write_on(
    row: int, at: int, inside: int, sides: Sides, model: NGrams, student: Tokenizer,
    teacher: Tokenizer,
) -> Place | None:  # fmt: skip
    """Let the teacher write on from a place, given the text before it, its student's tokens too."""
    tokens, ours = teacher.table.tokens(), student.table.tokens()
    begin = sides.t_bounds[np.searchsorted(sides.t_bounds, at, side="right") - 1]
    context = sides.t_ids[max(begin, at - ORDER + 1) : at].tolist()
    prefix = tokens[sides.t_ids[at]][:inside]
    ids, p = model.prediction(context)
    kept = np.array([tokens[i].startswith(prefix) for i in ids.tolist()])
    if p[kept].sum() == 0:
        return None
    firsts = model.random.choice(ids[kept], SAMPLES, p=p[kept] / p[kept].sum()).tolist()
    before = sides.s_ids[max(0, row - 3) : row].tolist()
    left = b"".join(ours[i] for i in before)
    written = []
    for first in firsts:
        all_ids, text = [*context, first], tokens[first][inside:]
        while len(text) < ENOUGH:
            all_ids.append(model.draw(all_ids[-ORDER + 1 :]))
            text += tokens[all_ids[-1]]
        last = max(i for i, byte in enumerate(text) if byte & 0xC0 != 0x80)
        written.append(left + text[:last])  # the last character may be cut
    spelled = student.segment_batch(written)
    drawn, their = np.array([
        (x[len(before)], first) for first, x in zip(firsts, spelled, strict=True)
        if x and x[: len(before)] == before
    ]).reshape(-1, 2).T  # fmt: skip
    p_of = dict(zip(ids.tolist(), (p / p[kept].sum()).tolist(), strict=True))
    bits = fmean(-np.log2(p_of[first]) for first in firsts)
    return Place(row, at, context, drawn, their, bits) if len(drawn) >= FEWEST else None


def predictions(
    sides: Sides, model: NGrams, rows: Iterable[int], top_k: int | None
) -> dict[int, Sparse]:
    """Return what the teacher predicts for some of its tokens."""
    found = {}
    for j in rows:
        begin = sides.t_bounds[np.searchsorted(sides.t_bounds, j, side="right") - 1]
        context = sides.t_ids[max(begin, j - ORDER + 1) : j].tolist()
        found[j] = model.prediction(context, top_k)
    return found


def stored(sides: Sides, rows: dict[int, Sparse], top_k: int | None) -> TopK:
    """Return predictions as a cache has them; nothing for the other tokens."""
    counts = np.zeros(len(sides.t_ids), np.int64)
    rest, realized = np.full((2, len(sides.t_ids)), np.nan, np.float32)
    ids, logprobs = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for j, (candidates, p) in sorted(rows.items()):
        own = p[candidates == sides.t_ids[j]]
        ids.append(candidates[:top_k].astype(np.int32))
        logprobs.append(np.log(p[:top_k]).astype(np.float32))
        counts[j] = len(ids[-1])
        with np.errstate(divide="ignore"):
            rest[j] = np.log(max(0.0, 1 - p[:top_k].sum())) if top_k else -np.inf
        realized[j] = np.log(own[0]) if len(own) else np.nan
    return TopK(
        sides.t_ids, sides.t_bounds, np.cumsum([0, *counts]), np.concatenate(ids),
        np.concatenate(logprobs), rest, realized,
    )  # fmt: skip


def scores(
    places: list[Place], sides: Sides, given: TopK, maps: Maps, top_k: int | None, *, common: bool
) -> Row:
    """Return the mean bits of each prediction: of what was drawn, and of the text's own token."""
    projector = maps.projector
    width = len(projector.student.table)
    row: Row = {"own next token": fmean(place.bits for place in places)}
    row["sampled"] = fmean(sampled(place.drawn, width) for place in places)
    row["text, sampled"] = fmean(
        bits(own(place, sides), *frequencies(place.drawn), width) for place in places
    )
    if top_k is not None:
        row["sampled, of K"] = fmean(of_known(place, given, width) for place in places)
    for name, most in (("along the path", UNCUT), ("cut to K", top_k)):
        if most is not None:
            out = projector.project(given, sides.s_ids, sides.s_bounds, most)
            row[name] = fmean(bits(place.drawn, *row_of(out, place.row), width) for place in places)
            row[f"text, {name}"] = fmean(
                bits(own(place, sides), *row_of(out, place.row), width) for place in places
            )
    for name, m in maps.context_free.items() if common else ():
        found = []
        for place in places:
            ids, p, _ = row_of(given, place.at)
            q = csr_array((p, (np.zeros(len(p), np.int64), ids)), shape=(1, m.shape[0])) @ m
            given_all = q.indices, q.data, max(0.0, 1 - q.sum()), width
            found.append([bits(x, *given_all) for x in (place.drawn, own(place, sides))])
        row[name], row[f"text, {name}"] = np.mean(found, axis=0).tolist()
    return row


def row_of(given: TopK, row: int) -> tuple[NDArray[np.int32], NDArray[np.float64], float]:
    """Return a row's candidates, their probabilities, and the rest."""
    kept = slice(given.starts[row], given.starts[row + 1])
    p = np.exp(given.logprobs[kept].astype(np.float64))
    rest = given.rest_logprob[row]
    return given.ids[kept], p, 1.0 if np.isnan(rest) else float(np.exp(rest))


def bits(
    drawn: NDArray[np.int64], ids: NDArray[Any], p: NDArray[np.float64], rest: float, width: int
) -> float:
    """Return the mean bits of tokens under a prediction."""
    q = dict(zip(ids.tolist(), p.tolist(), strict=True))
    return fmean(-np.log2(q.get(s, 0.0) + max(rest, 1e-9) / width) for s in drawn.tolist())


def own(place: Place, sides: Sides) -> NDArray[np.int64]:
    """Return the student's token that the text has."""
    return sides.s_ids[[place.row]].astype(np.int64)


def frequencies(drawn: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
    """Return the prediction that samples give, and what it leaves to others, as `sampled`."""
    ids, counts = np.unique(drawn, return_counts=True)
    new = max(1, int((counts == 1).sum())) / (len(drawn) + 1)
    return ids, (1 - new) * counts / len(drawn), new


def of_known(place: Place, given: TopK, width: int) -> float:
    """Return the mean bits of the truth by samples for who knows the candidates alone.

    What the teacher begins with another token has the rest.
    """
    ids, _, rest = row_of(given, place.at)
    is_known = np.isin(place.firsts, ids)
    other = -np.log2(max(rest, 1e-9) / width)
    known = place.drawn[is_known]
    inside = sampled(known, width) - np.log2(1 - rest) if len(known) > 1 else other
    return float(is_known.mean() * min(inside, other) + (~is_known).mean() * other)


def sampled(drawn: NDArray[np.int64], width: int) -> float:
    """Return the mean bits of each token under the frequencies of the others.

    What they lack has the share of tokens that were seen once (Good, Biometrika 40, 1953).
    """
    counts = Counter(drawn.tolist())
    once = sum(n == 1 for n in counts.values())
    found = []
    for s in drawn.tolist():
        others = len(drawn) - 1
        new = max(1, once - (counts[s] == 1)) / (others + 1)
        found.append(-np.log2((1 - new) * (counts[s] - 1) / others + new / width))
    return fmean(found)


def speed(options: Namespace) -> Iterator[Row]:
    """Measure positions per second of one core, beside reading and writing the same Parquet.

    `again` has seen all byte strings before; `at last` is the last tenth of the first time.
    """
    texts = [text[i : i + 3000] for c in documents(options).values() for text in c
             for i in range(0, len(text), 3000)]  # fmt: skip
    texts = np.random.default_rng(0).permutation(np.array(texts, object)).tolist()
    for label, pair in chosen(PAIRS, options):
        student, teacher = (tokenizer(name) for name in pair)
        model = NGrams(teacher.library_arrays(texts[len(texts) // 4 :]))
        some = texts[: max(10, int(40 * options.size))]
        sides = Sides(*flat(student.library_arrays(some)), *flat(teacher.library_arrays(some)))
        given = stored(sides, predictions(sides, model, range(len(sides.t_ids)), 64), 64)
        back_map = xtok.build(teacher, student, BACK_MAP)
        both = xtok.pair(student, teacher)
        along, alone = (
            Projector(both, back_map, along_path=along_path) for along_path in (True, False)
        )
        cut = len(some) * 9 // 10

        def project(first: int, last: int, projector: Projector = along) -> float:
            a, b = given.bounds[[first, last]]  # noqa: B023
            of_part = given.bounds[first : last + 1] - a  # noqa: B023
            part = chosen_rows(given, np.arange(a, b), given.token_ids[a:b], of_part)  # noqa: B023
            a, b = sides.s_bounds[[first, last]]  # noqa: B023
            bounds = sides.s_bounds[first : last + 1] - a  # noqa: B023
            start = time.process_time()
            projector.project(part, sides.s_ids[a:b], bounds, 64)  # noqa: B023
            return float(b - a) / (time.process_time() - start)

        project(0, 1)  # compiles
        row: Row = {"student ← teacher": label, "positions": len(sides.s_ids)}
        row |= {"first time /s": project(0, cut), "at last": project(cut, len(some))}
        row["again"] = project(0, len(some))
        project(0, len(some), alone)
        row["through the map"] = project(0, len(some), alone)
        row["Parquet"] = len(sides.t_ids) / parquet_seconds(given)
        yield row


def parquet_seconds(given: TopK) -> float:
    """Return the seconds that pyarrow takes to read predictions and to write them again."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "in.parquet", Path(folder) / "out.parquet"
        parquet.write_table(neutral_table(StoredRows(given, {}, [])), paths[0])
        start = time.process_time()
        parquet.write_table(parquet.read_table(paths[0]), paths[1])
        return time.process_time() - start
