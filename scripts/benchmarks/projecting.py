"""Quality of projected predictions, measured on a teacher's continuations.

The teacher is a language model that continues held-out text. The bits of a prediction are −log2 of
the student's next token on these continuations, a proper score. `limit` scores each sample by the
frequencies of the others, combined with the projection from the largest number of candidates: the
best possible value is at or below it. A token outside the candidates gets `rest / V_student`.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import xtok
from benchmarks.harness import Row, documents, tokenizer
from benchmarks.ngrams import Sparse, flat, stored
from xtok.building.build import build
from xtok.config import BACK_MAP
from xtok.maps.creating import map_from_edges
from xtok.maps.edges import Edges
from xtok.predictions.topk import TopK
from xtok.teachers.projector import Projector
from xtok.tokenizers import Tokenizer

STUDENTS = ("smollm2", "llama3", "qwen")
LANGUAGES = ("de", "en", "ja", "zh", "python")
CHARACTERS = 1200  # of a text
BOUNDARIES = {"shared": 20, "inside": 4}  # of a language
SAMPLES, NEW_TOKENS = 128, 5  # continuations of a boundary, and the teacher's tokens in each
FEWEST = 64  # continuations that the student spells as it does the text before them
CANDIDATES = (16, 64, 256, 1024)
AHEAD = 4  # teacher rows that a path may take


class Boundary(NamedTuple):
    """A byte of a text where all students begin a token."""

    language: str
    text: int  # among all texts
    byte: int
    at: int  # the teacher's token there, among those of the text
    inside: int  # its bytes before the boundary


class Side(NamedTuple):
    """The texts as one side's tokens: of each text the ids, and the bytes where they end."""

    ids: list[NDArray[np.int32]]
    ends: list[NDArray[np.int64]]


def quality(options: Namespace) -> Iterator[Row]:
    """Measure students, numbers of candidates and languages, at shared boundaries and inside."""
    if options.teacher is None or options.corpus is None:
        raise SystemExit("error: this case needs --teacher and --corpus")
    valid = documents(options, "valid")
    texts = [(x, text[:CHARACTERS]) for x in LANGUAGES for text in valid.get(x, ())]
    teacher = xtok.load_tokenizer(str(options.teacher))
    students = {x: tokenizer(x) for x in STUDENTS}
    theirs = spelled(teacher, texts)
    ours = {name: spelled(student, texts) for name, student in students.items()}
    boundaries = choose(texts, theirs, list(ours.values()), options.size)
    written, known = Writer(options.teacher, teacher, theirs, options.work).write(boundaries)
    for name in [x for x in STUDENTS if options.only in x]:
        student = students[name]
        judge = Judge(student, teacher, ours[name], theirs, known)
        drawn = judge.drawn(boundaries, written)
        for where in BOUNDARIES:
            own = [p for p in drawn if (p.inside > 0) == (where == "inside")]
            for k in CANDIDATES if own else ():
                scores = judge.scores({p: drawn[p] for p in own}, k)
                for language in ("all", *LANGUAGES):
                    rows = [scores[p] for p in own if language in ("all", p.language)]
                    if rows:
                        first: Row = {"student": name, "where": where, "text": language}
                        first |= {"boundaries": len(rows), "K": k}
                        yield first | {x: fmean(row[x] for row in rows) for x in rows[0]}


def spelled(side: Tokenizer, texts: Sequence[tuple[str, str]]) -> Side:
    """Return the texts as a side's library has them."""
    ids = side.library_arrays([text for _, text in texts])
    return Side(ids, [np.cumsum(side.table.lengths[row], dtype=np.int64) for row in ids])


def choose(
    texts: Sequence[tuple[str, str]], theirs: Side, ours: Sequence[Side], size: float
) -> list[Boundary]:
    """Draw boundaries where all students begin a token, in texts that all sides spell alike."""
    random = np.random.default_rng(1)
    drawn: list[Boundary] = []
    for language in LANGUAGES:
        found: dict[str, list[Boundary]] = {where: [] for where in BOUNDARIES}
        for number, (of, text) in enumerate(texts):
            length = len(text.encode())
            sides = [side.ends[number] for side in (theirs, *ours)]
            if of != language or any(ends[-1] != length for ends in sides):
                continue
            for byte in sorted(set.intersection(*(set(ends[:-1].tolist()) for ends in sides[1:]))):
                at = int(np.searchsorted(sides[0], byte, side="right"))
                begin = int(sides[0][at - 1]) if at else 0
                boundary = Boundary(language, number, byte, at, byte - begin)
                if byte >= length // 4:
                    found["inside" if boundary.inside else "shared"].append(boundary)
        for where, count in BOUNDARIES.items():
            order = random.permutation(len(found[where]))[: max(1, int(count * size))]
            drawn += [found[where][i] for i in order.tolist()]
    return drawn


class Writer:
    """Generates the teacher's continuations, and stores them in a folder."""

    def __init__(self, folder: Path, teacher: Tokenizer, theirs: Side, work: Path | None) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.teacher, self.theirs, self.work = teacher, theirs, work
        self.begin = list(teacher.table.roles.get("bos", ())[:1])

    @torch.no_grad()
    def write(
        self, boundaries: Sequence[Boundary]
    ) -> tuple[dict[Boundary, NDArray[np.int32]], dict[tuple[int, int], Sparse]]:
        """Return the generated tokens at each position, and the predictions for the texts."""
        written, known = {}, {}
        for boundary in boundaries:
            ids = self.theirs.ids[boundary.text].tolist()
            last = min(len(ids), boundary.at + 1 + AHEAD)
            given = torch.tensor([[*self.begin, *ids[:last]]])
            states = self.model.model(input_ids=given).last_hidden_state
            hidden = states[0, -1 - last + boundary.at :]
            log_p = self.model.get_output_embeddings()(hidden).double().log_softmax(-1)
            for j, row in zip(range(boundary.at, last), log_p, strict=False):
                best = row.topk(max(CANDIDATES)).indices
                best = torch.cat([best, torch.tensor([ids[j]])])  # the text's own token comes last
                known[boundary.text, j] = best.numpy(), row[best].exp().numpy()
            written[boundary] = self._kept(boundary, ids[: boundary.at])
        return written, known

    def _kept(self, boundary: Boundary, before: list[int]) -> NDArray[np.int32]:
        token = self.teacher.table.tokens()[self.theirs.ids[boundary.text][boundary.at]]
        prefix = token[: boundary.inside]
        if self.work is None:
            return self._sample(before, prefix)
        name = hashlib.sha256(f"{self.begin + before} {prefix!r} {SAMPLES} {NEW_TOKENS}".encode())
        path: Path = self.work / f"{name.hexdigest()[:24]}.npy"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, self._sample(before, prefix))
        kept: NDArray[np.int32] = np.load(path)
        return kept

    def _sample(self, before: list[int], prefix: bytes) -> NDArray[np.int32]:
        """Return `[SAMPLES, NEW_TOKENS]` ids, the first of them beginning with the prefix."""
        random = torch.Generator().manual_seed(len(before))
        given = torch.tensor([[*self.begin, *before]])
        out = self.model(input_ids=given, use_cache=True, logits_to_keep=1)
        p = out.logits[0, -1].double().softmax(-1)
        if prefix:
            tokens = self.teacher.table.tokens()
            p[[not token.startswith(prefix) for token in tokens]] = 0
        drawn = [p.multinomial(SAMPLES, replacement=True, generator=random)]
        past = out.past_key_values
        name = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"
        past.batch_repeat_interleave(SAMPLES)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(NEW_TOKENS - 1):
                out = self.model(input_ids=drawn[-1][:, None], use_cache=True, **{name: past})
                sums = out.logits[:, -1].float().softmax(-1).cumsum(-1)
                u = torch.rand(SAMPLES, 1, generator=random) * sums[:, -1:]
                drawn.append(torch.searchsorted(sums, u)[:, 0])
        return torch.stack(drawn, 1).int().numpy()


class Judge:
    """Scores predictions in one student's tokens on the teacher's continuations."""

    def __init__(
        self, student: Tokenizer, teacher: Tokenizer, ours: Side, theirs: Side,
        known: dict[tuple[int, int], Sparse],
    ) -> None:  # fmt: skip
        pair = xtok.load_pair(student, teacher)
        back_map = build(pair.reversed, config=BACK_MAP)
        self.student, self.teacher, self.ours = student, teacher, ours
        self.s_flat, self.t_flat = flat(ours.ids), flat(theirs.ids)
        bounds = self.t_flat[1].tolist()
        self.known = {bounds[text] + j: row for (text, j), row in known.items()}
        self.projectors = {
            "path": Projector(pair, back_map),
            "map": Projector(pair, back_map, along_path=False),
            "longest prefix": Projector(pair, longest_prefix(back_map, pair), along_path=False),
        }

    def drawn(
        self, boundaries: Sequence[Boundary], written: dict[Boundary, NDArray[np.int32]]
    ) -> dict[Boundary, NDArray[np.int64]]:
        """Return the student's next token of each continuation, at boundaries with enough."""
        tokens, ours = self.teacher.table.tokens(), self.student.table.tokens()
        found = {}
        for boundary in boundaries:
            row = self._row(boundary)
            before = self.ours.ids[boundary.text][max(0, row - 3) : row].tolist()
            left = b"".join(ours[i] for i in before)
            texts = [b"".join(tokens[i] for i in ids) for ids in written[boundary].tolist()]
            spelled = self.student.segment_batch([left + text[boundary.inside :] for text in texts])
            n = len(before)
            own = [x[n] for x in spelled if x is not None and len(x) > n and x[:n] == before]
            if len(own) >= FEWEST:
                found[boundary] = np.array(own, np.int64)
        return found

    def _row(self, boundary: Boundary) -> int:
        return int(np.searchsorted(self.ours.ends[boundary.text], boundary.byte, side="right"))

    def scores(
        self, drawn: dict[Boundary, NDArray[np.int64]], top_k: int
    ) -> dict[Boundary, dict[str, float]]:
        """Return each boundary's bits, and how often the most probable token is written."""
        given = stored(*self.t_flat, self.known, top_k)
        out = {
            name: projector.project(given, *self.s_flat, top_k)
            for name, projector in self.projectors.items()
            if name != "longest prefix" or not any(boundary.inside for boundary in drawn)
        }
        given = stored(*self.t_flat, self.known, max(CANDIDATES))
        best = self.projectors["path"].project(given, *self.s_flat, max(CANDIDATES))
        width, found = len(self.student.table), {}
        for boundary, tokens in drawn.items():
            row = int(self.s_flat[1][boundary.text]) + self._row(boundary)
            counts = Counter(tokens.tolist())
            found[boundary] = {"limit": limit(counts, prediction(best, row, width))}
            found[boundary]["top, limit"] = counts.most_common(1)[0][1] / len(tokens)
            for name, made in out.items():
                q, ids = prediction(made, row, width), made.ids[made.starts[row] :][:1]
                found[boundary][name] = fmean(-np.log2(q[tokens]))
                told = made.starts[row + 1] > made.starts[row]
                found[boundary][f"top, {name}"] = fmean(tokens == ids[0]) if told else 0.0
        return found


def longest_prefix(back_map: xtok.ProjectionMap, pair: xtok.Pair) -> xtok.ProjectionMap:
    """Return the rule of byte-prefix matching: the longest student token that begins a teacher's.

    (arXiv 2607.22334.)
    """
    student, teacher = pair.tables
    known = student.canonical_ids()
    rows, columns = [], []
    for t, token in enumerate(teacher.tokens()):
        prefixes = (token[:n] for n in range(len(token), 0, -1))
        s = next((known[x] for x in prefixes if x in known), None)
        if s is not None:
            rows.append(t)
            columns.append(s)
    edges = Edges(np.array(rows), np.array(columns), np.ones(len(rows)))
    return map_from_edges(edges, scale_slot=None, before=back_map)


def prediction(out: TopK, row: int, width: int) -> NDArray[np.float64]:
    """Return a row as the probabilities of all tokens; its rest is shared evenly."""
    kept = slice(out.starts[row], out.starts[row + 1])
    rest = out.rest_logprob[row]
    q = np.full(width, max(1e-9, 1.0 if np.isnan(rest) else float(np.exp(rest))) / width)
    q[out.ids[kept]] += np.exp(out.logprobs[kept].astype(np.float64))
    return q


def limit(counts: Counter[int], q: NDArray[np.float64]) -> float:
    """Return the mean bits of each sample by the frequencies of the others.

    Unseen tokens get the share of tokens that were seen once (Good, Biometrika 40, 1953), divided
    by the projected prediction.
    """
    others = counts.total() - 1
    once = sum(n == 1 for n in counts.values())
    bits = 0.0
    for token, n in counts.items():
        new = max(1, once - (n == 1)) / (others + 1)
        bits -= n * np.log2((1 - new) * (n - 1) / others + new * q[token])
    return float(bits / counts.total())
