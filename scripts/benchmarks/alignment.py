"""The alignment kernel on one core beside a plain Python walk; batches; odd texts; projection."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import (
    Row,
    Run,
    chosen,
    documents,
    memory_status,
    race,
    seconds,
    tokenizer,
)  # fmt: skip
from xtok.alignment import kernels
from xtok.alignment.aligner import TokenAligner
from xtok.alignment.logprobs import project_logprobs
from xtok.conversation.batching import pad
from xtok.tokenizers import Tokenizer

PAIRS = (
    ("llama3", "qwen"), ("llama3", "mistral-v3"), ("qwen", "llama3"), ("claude-2", "mistral-v3"),
)  # fmt: skip
ON_POLICY = (("qwen", "llama3"), ("mistral-v3", "qwen"))
PIECE = 4_000  # bytes of a row of a batch, about a thousand tokens
Flat = tuple[NDArray[np.int32], NDArray[np.int64]]


def align(options: Namespace) -> Iterator[Row]:
    """Every pair on every language, then batches, lengths and odd texts of one pair."""
    corpus = documents(options)
    for label, pair in chosen(PAIRS, options):
        sides = student, teacher = tokenizer(pair[0]), tokenizer(pair[1])
        aligner = TokenAligner(student, teacher)
        for language, texts in corpus.items():
            s, t = (encode(side, [text.encode() for text in texts]) for side in sides)
            times = race(kernel(aligner, s, t), plain_walk(aligner, s, t), options.repeat)
            yield {
                "pair": label,
                "text": language,
                "student tokens": len(s[0]),
                "million/s": len(s[0]) / median(times.ours) / 1e6,
                "× plain walk": median(times.peer) / median(times.ours),
                "in correct chunks": f"{in_correct_chunks(aligner, s, t):.4%}",
            }
    if list(chosen(PAIRS[:1], options)):
        ordinary = "\n".join(text for texts in corpus.values() for text in texts[:60])
        student, teacher = (tokenizer(name) for name in PAIRS[0])
        yield batches(student, teacher, ordinary, options)
        yield from shapes(student, teacher, ordinary, options)


def encode(side: Tokenizer, texts: list[bytes]) -> Flat:
    """Return the ids of all texts and the documents' offsets."""
    rows = [np.array(row, np.int32) for row in side.segment_batch(texts) if row is not None]
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def kernel(aligner: TokenAligner, s: Flat, t: Flat) -> Callable[[], object]:
    """Return a call of the bare kernel, on one core."""
    num_documents = len(s[1]) - 1
    chunks = kernels.Chunks(
        student=np.full(len(s[0]), -1, np.int32),
        teacher=np.full(len(t[0]), -1, np.int32),
        correct=np.zeros(len(s[0]), np.bool_),
        total=np.zeros(num_documents, np.int64),
        differs=np.empty((num_documents, 2), np.int64),
    )
    sides = [
        kernels.Side(*flat, table.symbols, table.offsets)
        for flat, table in ((s, aligner.student), (t, aligner.teacher))
    ]
    return lambda: kernels.align_documents(*sides, aligner._exact, chunks)


def plain_walk(aligner: TokenAligner, s: Flat, t: Flat) -> Callable[[], object]:
    """Return a walk over both sides' byte ends in plain Python, as in TRL 1.16."""
    ends = []
    for side, (ids, offsets) in zip((aligner.student, aligner.teacher), (s, t), strict=True):
        pieces = np.split(side.table.lengths[ids], offsets[1:-1])
        ends.append([np.cumsum(piece).tolist() for piece in pieces])
    return lambda: [walk(a, b) for a, b in zip(*ends, strict=True)]


def walk(s_ends: list[int], t_ends: list[int]) -> list[tuple[int, int, int, int]]:
    """Return the chunks of one document."""
    groups = []
    i = j = s_from = t_from = 0
    while i < len(s_ends) and j < len(t_ends):
        if s_ends[i] == t_ends[j]:
            i, j = i + 1, j + 1
            groups.append((s_from, i, t_from, j))
            s_from, t_from = i, j
        elif s_ends[i] < t_ends[j]:
            i += 1
        else:
            j += 1
    return groups


def in_correct_chunks(aligner: TokenAligner, s: Flat, t: Flat) -> float:
    """Return the share of the student's tokens in correct chunks."""
    aligned = aligner.align_ids(*s, *t)
    first = np.repeat(np.cumsum(aligned.num_chunks) - aligned.num_chunks, np.diff(s[1]))
    inside = aligned.student_chunk_id >= 0
    correct = aligned.is_correct[(first + aligned.student_chunk_id)[inside]]
    return float(np.count_nonzero(correct) / len(s[0]))


def batches(student: Tokenizer, teacher: Tokenizer, text: str, options: Namespace) -> Row:
    """Measure `align` on [16, 4096], and how memory grows over 10,000 smaller batches."""
    import torch

    aligner = TokenAligner(student, teacher)
    ids = (np.array(side.segment(text.encode()), np.int64) for side in (student, teacher))
    rows = [torch.from_numpy(np.tile(np.resize(i, 4096), (16, 1))) for i in ids]
    small = [row[:4, :512].contiguous() for row in rows]
    aligner.align(*rows)
    taken = seconds(lambda: aligner.align(*rows), 4 * options.repeat)
    seconds(lambda: aligner.align(*small), 1000)
    before = memory_status("VmRSS")
    seconds(lambda: aligner.align(*small), max(1, int(10_000 * options.size)))
    growth = (memory_status("VmRSS") - before) / 2**20
    return {"batch": "[16, 4096]", "million/s": 16 * 4096 / taken / 1e6, "MiB grown": growth}


def shapes(
    student: Tokenizer, teacher: Tokenizer, ordinary: str, options: Namespace
) -> Iterator[Row]:
    """Measure how time grows with length and with differences, and what odd texts cost."""
    data = ordinary.encode() * 3
    texts = {f"{n:,} bytes": (data[:n], data[:n]) for n in (4_000_000, 400_000, 40_000, 4_000)}
    for edits in (10, 100, 1000):
        step = len(ordinary) // (edits + 1) + 1
        parts = [ordinary[i : i + step] for i in range(0, len(ordinary), step)]
        texts[f"{edits} differences"] = ordinary.encode(), " EDIT ".join(parts).encode()
    length = 1 + int(1_000_000 * min(1, options.size))
    for name, odd in {
        "one letter": b"a" * length,
        "emoji sequences": "👨\u200d👩\u200d👧\u200d👦🏳️\u200d🌈".encode() * (length // 40 + 1),
        "random bytes": np.random.default_rng(0).integers(0, 256, length, np.uint8).tobytes(),
    }.items():
        texts[name] = odd, odd
    aligner, plain = TokenAligner(student, teacher), 0.0
    for name, sides in texts.items():
        pieces = ([text[i : i + 100_000] for i in range(0, len(text), 100_000)] for text in sides)
        ids = [encode(*pair)[0] for pair in zip((student, teacher), pieces, strict=True)]
        s, t = ((i, np.array([0, len(i)])) for i in ids)
        call = kernel(aligner, s, t)
        call()
        ns = seconds(call, options.repeat) / len(s[0]) * 1e9
        plain = plain or ns
        row = {"text": name, "student tokens": len(s[0]), "ns per token": ns}
        yield {**row, "× ordinary text": ns / plain}


def project(options: Namespace) -> Iterator[Row]:
    """Every pair on every language, as padded batches of rows of `PIECE` bytes."""
    corpus = documents(options)
    for _, pair in chosen(ON_POLICY, options):
        sides = student, teacher = tokenizer(pair[0]), tokenizer(pair[1])
        aligner = TokenAligner(student, teacher)
        for language, texts in corpus.items():
            data = "\n".join(texts).encode()
            pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)]
            s, t = (encode(side, pieces) for side in sides)
            draw = np.random.default_rng(0)
            logprobs = -draw.standard_exponential(len(t[0]), np.float32)
            rows = [np.split(array, side[1][1:-1]) for array, side in
                    ((s[0], s), (t[0], t), (logprobs, t))]  # fmt: skip
            batch = [pad(row, 0, padding_side="right") for row in rows]
            masks = [pad([np.ones(len(r)) for r in row], 0, padding_side="right") for row in rows]

            ours = partial(
                project_logprobs, aligner, *batch,
                student_attention_mask=masks[0], teacher_attention_mask=masks[1],
            )  # fmt: skip
            plain = plain_projection(aligner, s, t, logprobs)
            times = race(partial(on_cpu, ours), partial(on_cpu, plain), options.repeat)
            found = ours()
            kept = masks[0] > 0
            wrong = wrong_sums(aligner, s, t, logprobs, found.logprobs[kept])
            yield {
                "pair": " ← ".join(pair),
                "text": language,
                "student tokens": len(s[0]),
                "million/s": len(s[0]) / median(times.ours) / 1e6,
                "× plain walk": median(times.peer) / median(times.ours),
                "valid": f"{found.valid[kept].mean():.4%}",
                "wrong sums": wrong,
            }


def on_cpu(call: Callable[[], object]) -> Run:
    """Run a call of one thread; the time is that of the core, whatever else runs beside it."""
    start = time.process_time()
    call()
    return Run(time.process_time() - start)


def plain_projection(
    aligner: TokenAligner, s: Flat, t: Flat, logprobs: NDArray[np.float32]
) -> Callable[[], object]:
    """Return the walk of `plain_walk`, which also shares the sums of the chunks equally."""
    ends = []
    for side, (ids, offsets) in zip((aligner.student, aligner.teacher), (s, t), strict=True):
        pieces = np.split(side.table.lengths[ids], offsets[1:-1])
        ends.append([np.cumsum(piece).tolist() for piece in pieces])
    values = [piece.tolist() for piece in np.split(logprobs, t[1][1:-1])]

    def shares(s_ends: list[int], t_ends: list[int], row: list[float]) -> list[float]:
        result = [0.0] * len(s_ends)
        for s_from, s_to, t_from, t_to in walk(s_ends, t_ends):
            share = sum(row[t_from:t_to]) / (s_to - s_from)
            for i in range(s_from, s_to):
                result[i] = share
        return result

    return lambda: [shares(*row) for row in zip(*ends, values, strict=True)]


def wrong_sums(
    aligner: TokenAligner, s: Flat, t: Flat, logprobs: NDArray[np.float32], shares: NDArray[Any]
) -> int:
    """Count the chunks whose shares do not sum to the teacher's sum, rounded to float32."""
    aligned = aligner.align_ids(*s, *t)
    first = np.cumsum(aligned.num_chunks) - aligned.num_chunks
    sums = []
    for (_, offsets), chunk, values in (
        (s, aligned.student_chunk_id, shares), (t, aligned.teacher_chunk_id, logprobs)
    ):  # fmt: skip
        number = np.repeat(first, np.diff(offsets)) + chunk
        inside = chunk >= 0
        sums.append(np.bincount(number[inside], values[inside], len(aligned.is_correct)))
    return int(np.count_nonzero(sums[0] != sums[1].astype(np.float32)))
