"""Coverage and correctness of CSD's events, by kind of chunk.

`mass` is the teacher's probability of events other than the rest, from its logits on held-out text.
`same` is measured on continuations by the teacher: the share of events by the teacher's tokens that
are the same event by the student's tokens of these bytes. `first` is the same for event KL, at the
first token of a chunk.
"""

from __future__ import annotations

from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import xtok
from benchmarks import harness
from benchmarks.harness import Row, documents, tokenizer
from benchmarks.projecting import CHARACTERS, LANGUAGES, Boundary, Side, Writer, spelled
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.training.losses import spelling_index
from xtok.training.losses.chunks import tokens_in

PAIRS = [("smollm2", "gemma3"), ("llama3", "qwen"), ("mistral-v1", "qwen")]
KINDS = ("1:1", "1:N", "M:1", "M:N", "left out")
TEXTS, BOUNDARIES = 24, 4  # of a language; boundaries of each kind
LIKELY = 1e-4  # completions by bytes below this are not tried


Rules = dict[str, dict[int, int]]
"""Completions by the name of a rule: the teacher's last token, and the student's."""


class Chunk(NamedTuple):
    """A chunk of a text: its kind, where it begins, its tokens, and its completions."""

    kind: str
    language: str
    text: int
    at: tuple[int, int]
    ours: list[int]
    theirs: list[int]
    events: dict[int, int]  # the teacher's last token: the student's


def held(options: Namespace) -> Iterator[Row]:
    """Measure chunks of held-out text; with `--teacher`, one of the pairs' own, their events."""
    if options.corpus is None:
        raise SystemExit("error: this case needs --corpus")
    valid = documents(options, "valid")
    count = max(1, int(TEXTS * options.size))
    texts = [(x, text[:CHARACTERS]) for x in LANGUAGES for text in valid.get(x, ())[:count]]
    for label, names in harness.chosen(PAIRS, options):
        pair = xtok.load_pair(*map(tokenizer, names))
        sides = [spelled(side, texts) for side in pair.tokenizers]
        chunks = chunks_of(pair, texts, sides)
        for language in LANGUAGES:
            kinds = [chunk.kind for chunk in chunks if chunk.language == language]
            shares = {kind: kinds.count(kind) / max(1, len(kinds)) for kind in KINDS}
            yield {"pair": label, "text": language, "chunks": len(kinds)} | shares
        if options.teacher is not None and options.teacher.name.startswith(names[1]):
            writer = Writer(options.teacher, pair.tokenizers[1], sides[1], options.work)
            yield from judged(label, pair, sides, chunks, writer, options.size)


def chunks_of(pair: Pair, texts: list[tuple[str, str]], sides: list[Side]) -> list[Chunk]:
    """Return the chunks of texts that both sides spell alike, with the paper's completions."""
    index, aligner = spelling_index(xtok.spellings(pair)), xtok.TokenAligner(pair)
    ids, partners = np.unique(index.teacher_partner.numpy(), return_index=True)
    shared = dict(zip(partners[ids >= 0].tolist(), ids[ids >= 0].tolist(), strict=True))
    found = []
    for number, (language, text) in enumerate(texts):
        own, other = (side.ids[number] for side in sides)
        if {int(side.ends[number][-1]) for side in sides} != {len(text.encode())}:
            continue
        aligned = aligner.align_document(own, other)
        total = int(aligned.num_chunks[0])
        tokens = []
        for number_of, row in ((aligned.student_chunk_id, own), (aligned.teacher_chunk_id, other)):
            of_token, of_row = (
                torch.from_numpy(x.astype(np.int64))[None] for x in (number_of, row)
            )
            size = torch.bincount(of_token[of_token >= 0], minlength=total)
            of_token = of_token.where(of_token >= 0, total)
            tokens.append(tokens_in("text", of_token, size, int(size.sum()), of_row, 1 << 40))
        events = index.events(*tokens)
        of: list[dict[int, int]] = [{} for _ in range(total)]
        chunks = events.groups[events.chunk]
        cells = (chunks.tolist(), events.student.tolist(), events.teacher.tolist())
        for c, s, t in zip(*cells, strict=True):
            of[c][t] = s
        is_counted = np.zeros(total, np.bool_)
        is_counted[torch.cat([events.singles, events.groups]).numpy()] = True
        starts, sizes = ([getattr(x, n).tolist() for x in tokens] for n in ("starts", "sizes"))
        for c, counted in enumerate(is_counted):
            (i, m), (j, n) = ((starts[side][c], sizes[side][c]) for side in (0, 1))
            kind = f"{'M' if m > 1 else 1}:{'N' if n > 1 else 1}" if counted else "left out"
            completions = shared if kind == "1:1" else of[c]
            mine, theirs = own[i : i + m].tolist(), other[j : j + n].tolist()
            found.append(Chunk(kind, language, number, (i, j), mine, theirs, completions))
    return found


def judged(
    label: str,
    pair: Pair,
    sides: list[Side],
    chunks: list[Chunk],
    writer: Writer,
    size: float,
) -> Iterator[Row]:
    """Measure the events of each kind of chunk, by the paper's rule, by bytes, and event KL's."""
    by_bytes = ByBytes(pair, sides)
    masses: dict[tuple[str, str], list[float]] = {}
    drawn: list[tuple[Chunk, Rules]] = []
    for number in sorted({chunk.text for chunk in chunks}):
        log_p = logprobs(writer, number)
        for chunk in [c for c in chunks if c.text == number]:
            path = float(sum(log_p[chunk.at[1] + k, t] for k, t in enumerate(chunk.theirs[:-1])))
            p = (log_p[chunk.at[1] + len(chunk.theirs) - 1] + path).exp()
            rules = {} if chunk.kind == "left out" else {"CSD": chunk.events}
            if chunk.kind in ("M:N", "left out"):
                rules["bytes"] = by_bytes(chunk, p)
            for rule, completions in rules.items():
                of = torch.tensor(list(completions), dtype=torch.int64)
                masses.setdefault((chunk.kind, rule), []).append(float(p[of].sum()))
            drawn.append((chunk, rules))
    same = agreement(pair, sides, some_of(drawn, size), writer)
    for (kind, rule), rows in sorted(same.items()):
        mass = masses.get((kind, rule), [1.0])
        inside = [is_same for is_event, is_same in rows if is_event]
        yield {
            "pair": label, "kind": kind, "rule": rule, "mass": fmean(mass),
            "continuations": len(rows), "of events": len(inside),
            "same": fmean(inside) if inside else float("nan"),
        }  # fmt: skip


def some_of(drawn: list[tuple[Chunk, Rules]], size: float) -> list[tuple[Chunk, Rules]]:
    """Draw chunks of each kind and language."""
    random, count = np.random.default_rng(3), max(1, int(BOUNDARIES * size))
    groups = [
        [n for n, (c, _) in enumerate(drawn) if (c.kind, c.language) == (kind, language)]
        for language in LANGUAGES
        for kind in KINDS
    ]
    return [
        drawn[i] for group in groups for i in random.permutation(group)[:count].astype(int).tolist()
    ]


def agreement(
    pair: Pair, sides: list[Side], chosen: list[tuple[Chunk, Rules]], writer: Writer
) -> dict[tuple[str, str], list[tuple[bool, bool]]]:
    """Return for each continuation whether it is an event, and whether both sides agree."""
    events = xtok.events(pair)
    lengths = pair.tables[1].lengths
    boundaries = [
        Boundary(
            c.language,
            c.text,
            int(sides[1].ends[c.text][c.at[1]] - lengths[c.theirs[0]]),
            c.at[1],
            0,
        )
        for c, _ in chosen
    ]
    written, _ = writer.write(boundaries)
    found: dict[tuple[str, str], list[tuple[bool, bool]]] = {}
    for (chunk, rules), boundary in zip(chosen, boundaries, strict=True):
        for ours, theirs in continuations(pair, sides[0], chunk, written[boundary]):
            for rule, completions in rules.items():
                told = completions.get(after(theirs, chunk.theirs), -1)
                seen = told >= 0, told == after(ours, chunk.ours)
                found.setdefault((chunk.kind, rule), []).append(seen)
            equal = events.student_event[ours[0]] == events.teacher_event[theirs[0]]
            found.setdefault((chunk.kind, "first"), []).append((True, bool(equal)))
    return found


def after(tokens: list[int], chunk: list[int]) -> int:
    """Return the token that replaces the last token of a chunk; −2 after another prefix."""
    n = len(chunk)
    return tokens[n - 1] if len(tokens) >= n and tokens[: n - 1] == chunk[:-1] else -2


def continuations(
    pair: Pair, ours: Side, chunk: Chunk, written: NDArray[np.int32]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the teacher's continuations in the student's and the teacher's tokens."""
    student, teacher = pair.tokenizers
    before = ours.ids[chunk.text][max(0, chunk.at[0] - 3) : chunk.at[0]].tolist()
    left = b"".join(student.table[i] for i in before)
    rows = written.tolist()
    spelled = student.segment_batch([left + b"".join(teacher.table[i] for i in r) for r in rows])
    n = len(before)
    for ids, row in zip(spelled, rows, strict=True):
        if ids is not None and len(ids) > n and ids[:n] == before:
            yield ids[n:], row


@torch.no_grad()
def logprobs(writer: Writer, number: int) -> torch.Tensor:
    """Return the teacher's log-probabilities for each token of a text, `[T, V]`."""
    ids = [*writer.begin, *writer.theirs.ids[number].tolist()]
    rows = writer.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    first = len(writer.begin)
    return torch.cat([rows[:1], rows])[first : first + len(ids) - first]


class ByBytes:
    """Completions of a chunk by bytes, if both tokenizers produce them.

    If one side's prefix is longer by the bytes d, the other side's completion is d + x, for a token
    x of the longer side.
    """

    def __init__(self, pair: Pair, sides: list[Side]) -> None:
        self.sides, self.tokenizers = sides, pair.tokenizers
        tables = [side.table for side in pair.tokenizers]
        self.ids = [table.canonical_ids() for table in tables]
        self.sorted = [sorted(ids) for ids in self.ids]

    def __call__(self, chunk: Chunk, p: torch.Tensor) -> dict[int, int]:
        """Return the teacher's tokens with their probability above `LIKELY`, and the student's."""
        prefixes = [
            b"".join(side.table[i] for i in row[:-1])
            for side, row in zip(self.tokenizers, (chunk.ours, chunk.theirs), strict=True)
        ]
        longer = 0 if len(prefixes[0]) > len(prefixes[1]) else 1
        d = prefixes[longer][len(prefixes[1 - longer]) :]
        words = self.sorted[1 - longer]
        pairs = {}
        for word in words[bisect_left(words, d) : bisect_left(words, d + b"\xff" * 8)]:
            x = self.ids[longer].get(word[len(d) :])
            if word.startswith(d) and x is not None:
                other = self.ids[1 - longer][word]
                t, s = (other, x) if longer == 0 else (x, other)
                if float(p[t]) > LIKELY:
                    pairs[t] = s
        return {t: s for t, s in pairs.items() if self._writes(chunk, s, t)}

    def _writes(self, chunk: Chunk, student_id: int, teacher_id: int) -> bool:
        rows = ([*chunk.ours[:-1], student_id], [*chunk.theirs[:-1], teacher_id])
        return all(
            self._is_own(side, of, chunk.text, at, row)
            for side, of, at, row in zip(self.tokenizers, self.sides, chunk.at, rows, strict=True)
        )

    def _is_own(self, side: Tokenizer, of: Side, text: int, at: int, row: list[int]) -> bool:
        before = of.ids[text][max(0, at - 3) : at].tolist()
        whole = [*before, *row]
        [ids] = side.segment_batch([b"".join(side.table[i] for i in whole)])
        return ids == whole
