"""The alignment kernel and `project_logprobs` on one core, compared with a plain Python loop."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import xtok
from benchmarks.harness import Race, Row, Run, chosen, documents, race, seconds, tokenizer
from xtok.alignment import kernels
from xtok.alignment.aligner import TokenAligner
from xtok.teachers.logprobs import project_logprobs
from xtok.tokenizers import Tokenizer
from xtok.training.rows import stack

PAIRS = (
    ("llama3", "qwen"), ("llama3", "mistral-v3"), ("qwen", "llama3"), ("claude-2", "mistral-v3"),
)  # fmt: skip
ON_POLICY = (("qwen", "llama3"), ("mistral-v3", "qwen"))
PIECE = 4_000  # bytes of a row of a batch, about a thousand tokens
Flat = tuple[NDArray[np.int32], NDArray[np.int64]]  # the ids of all documents, and their offsets
Chunks = list[tuple[int, int, int, int]]  # a student's span and a teacher's


def align(options: Namespace) -> Iterator[Row]:
    """Align every pair on every language; then rows of 4,096 tokens of the last."""
    for label, pair in chosen(PAIRS, options):
        sides = tokenizer(pair[0]), tokenizer(pair[1])
        aligner = TokenAligner(xtok.load_pair(*sides))
        for language, texts in documents(options).items():
            s, t = (encode(side, [text.encode() for text in texts]) for side in sides)
            plain = walks(aligner, s, t)
            times = race(kernel(aligner, s, t), lambda: list(plain()), options.repeat)  # noqa: B023
            yield {"pair": label, "text": language, **rates(s, times)}
        rows = [torch.from_numpy(np.tile(np.resize(x, 4096), (16, 1))).long() for x in (s[0], t[0])]
        aligner.align(*rows)
        taken = seconds(partial(aligner.align, *rows), options.repeat)
        yield {"pair": label, "batch": "[16, 4096]", "million/s": 16 * 4096 / taken / 1e6}


def project(options: Namespace) -> Iterator[Row]:
    """Project random log-probabilities on every language, in padded batches of rows."""
    for label, pair in chosen(ON_POLICY, options):
        sides = tokenizer(pair[0]), tokenizer(pair[1])
        aligner = TokenAligner(xtok.load_pair(*sides))
        for language, texts in documents(options).items():
            data = "\n".join(texts).encode()
            pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)]
            s, t = (encode(side, pieces) for side in sides)
            logprobs = -np.random.default_rng(0).standard_exponential(len(t[0]), np.float32)
            rows = [split(s[0], s), split(t[0], t), split(logprobs, t)]
            batch = [stack(row, 0).numpy() for row in rows]
            masks = [stack([np.ones(len(r)) for r in row], 0).numpy() for row in rows]
            ours = partial(
                project_logprobs, aligner, *batch,
                attention_masks=(masks[0], masks[1]),
            )  # fmt: skip
            plain, values = walks(aligner, s, t), [row.tolist() for row in rows[2]]

            def shared() -> object:
                """Share the sum of each chunk equally."""
                return [
                    [sum(row[c:d]) / (b - a) for a, b, c, d in chunks for _ in range(a, b)]
                    for chunks, row in zip(plain(), values, strict=True)  # noqa: B023
                ]

            times = race(partial(on_cpu, ours), partial(on_cpu, shared), options.repeat)
            yield {"pair": label, "text": language, **rates(s, times)}


def rates(s: Flat, times: Race) -> Row:
    """Return tokens per second, and their ratio to the plain Python loop."""
    ours, peer = median(times.ours), median(times.peer)
    rate = len(s[0]) / ours / 1e6
    return {"student tokens": len(s[0]), "million/s": rate, "× plain walk": peer / ours}


def on_cpu(call: Callable[[], object]) -> Run:
    """Time a single-threaded call in processor seconds."""
    start = time.process_time()
    call()
    return Run(time.process_time() - start)


def encode(side: Tokenizer, texts: list[bytes]) -> Flat:
    """Return the ids of all texts and the documents' offsets."""
    rows = [np.array(row, np.int32) for row in side.segment_batch(texts) if row is not None]
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def split(values: NDArray[Any], side: Flat) -> list[NDArray[Any]]:
    """Return the values of each document."""
    return np.split(values, side[1][1:-1])


def kernel(aligner: TokenAligner, s: Flat, t: Flat) -> Callable[[], object]:
    """Return a call of the bare kernel, on one core."""
    num_documents = len(s[1]) - 1
    chunks = kernels.Walk(
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


def walks(aligner: TokenAligner, s: Flat, t: Flat) -> Callable[[], Iterator[Chunks]]:
    """Return a walk over both sides' byte ends in plain Python, as in TRL 1.16."""
    sides = ((aligner.student, s), (aligner.teacher, t))
    ends = [
        [np.cumsum(row).tolist() for row in split(side.table.lengths[flat[0]], flat)]
        for side, flat in sides
    ]
    return lambda: map(walk, *ends)


def walk(s_ends: list[int], t_ends: list[int]) -> Chunks:
    """Return the chunks of one document."""
    chunks = []
    i = j = s_from = t_from = 0
    while i < len(s_ends) and j < len(t_ends):
        if s_ends[i] == t_ends[j]:
            i, j = i + 1, j + 1
            chunks.append((s_from, i, t_from, j))
            s_from, t_from = i, j
        elif s_ends[i] < t_ends[j]:
            i += 1
        else:
            j += 1
    return chunks
