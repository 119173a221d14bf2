"""Measure the alignment: speed against a plain Python walk in the same run, and correctness.

Text: `--corpus`, a folder of `*.jsonl.gz` with one document under `text` per line; without it,
the multilingual text of small_tokenizers.py, repeated. Prints a table, or `--json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import small_tokenizers
from numpy.typing import NDArray

from xtok import kernels
from xtok.aligner import TokenAligner
from xtok.tokenizers import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1]
TOKENIZERS = ROOT / "data" / "tokenizers"
PAIRS = (
    ("llama3.tiktoken", "qwen.tiktoken"),
    ("llama3.tiktoken", "mistral-v3.model"),
    ("qwen.tiktoken", "llama3.tiktoken"),
    ("claude-2", "mistral-v3.model"),
)
Flat = tuple[NDArray[np.int32], NDArray[np.int64]]


def best_of(run: Callable[[], object], times: int = 5) -> float:
    """Return the least wall time of several runs, in seconds."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def plain_walk(s_ends: list[int], t_ends: list[int]) -> list[tuple[int, int, int, int]]:
    """Walk two lists of byte ends in plain Python, as TRL 1.16 does it, into groups of tokens."""
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


def read_corpus(folder: Path | None) -> dict[str, list[str]]:
    """Return documents by language."""
    files = sorted(folder.glob("*.train.jsonl.gz")) if folder else []
    if not files:
        return {"own text": ["\n".join(small_tokenizers.CORPUS)] * 200}
    texts = {}
    for path in files:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            texts[path.name.split(".")[0]] = [json.loads(line)["text"] for line in lines]
    return texts


def encode(tokenizer: Tokenizer, texts: list[str]) -> Flat:
    """Return the ids of all texts, as the library encodes them, and the documents' offsets."""
    rows = tokenizer.segment_batch([text.encode() for text in texts])
    kept = [np.array(row, np.int32) for row in rows if row is not None]
    offsets = np.cumsum([0, *map(len, kept)])
    return np.concatenate(kept), offsets


def kernel_time(aligner: TokenAligner, s: Flat, t: Flat) -> float:
    """Return the time of the bare kernel call on one core, in seconds."""
    chunks = [np.full(len(side[0]), -1, np.int32) for side in (s, t)]
    masks = [np.zeros(len(side[0]), np.bool_) for side in (s, t, s)]
    num_chunks = np.zeros(len(s[1]) - 1, np.int64)
    sides = (aligner.student, aligner.teacher)
    return best_of(
        lambda: kernels.align_documents(
            *s, sides[0].symbols, sides[0].offsets, *t, sides[1].symbols, sides[1].offsets,
            aligner._exact, aligner.max_comb_len, *chunks, *masks, num_chunks,
        )
    )  # fmt: skip


def walk_time(aligner: TokenAligner, s: Flat, t: Flat) -> float:
    """Return the time of the plain walk over the same documents, in seconds."""
    ends = []
    for side, (ids, offsets) in zip((aligner.student, aligner.teacher), (s, t), strict=True):
        lengths = side.table.lengths[ids]
        pieces = np.split(lengths, offsets[1:-1])
        ends.append([np.cumsum(piece).tolist() for piece in pieces])
    return best_of(lambda: [plain_walk(a, b) for a, b in zip(*ends, strict=True)], 1)


def languages(tokenizers: dict[str, Tokenizer], corpus: dict[str, list[str]]) -> list[Any]:
    """Measure every pair on every language."""
    rows = []
    for student, teacher in PAIRS:
        aligner = TokenAligner(tokenizers[student], tokenizers[teacher])
        for language, texts in corpus.items():
            s, t = (encode(tokenizers[name], texts) for name in (student, teacher))
            found = aligner.align_ids(*s, *t)
            correct = np.zeros(len(s[0]), np.bool_)
            first = np.repeat(np.cumsum(found.num_chunks) - found.num_chunks, np.diff(s[1]))
            inside = found.student_chunk_id >= 0
            correct[inside] = found.is_correct[(first + found.student_chunk_id)[inside]]
            n = len(s[0])
            kernel, walk = kernel_time(aligner, s, t), walk_time(aligner, s, t)
            rows.append(
                {
                    "pair": f"{student} → {teacher}",
                    "language": language,
                    "student_tokens": n,
                    "million_per_s": n / kernel / 1e6,
                    "plain_walk_million_per_s": n / walk / 1e6,
                    "ratio": walk / kernel,
                    "in_correct_chunks": float(correct.mean()),
                }
            )
    return rows


def batches(tokenizers: dict[str, Tokenizer], corpus: dict[str, list[str]]) -> dict[str, Any]:
    """Measure `align` on [16, 4096], and the memory that 10,000 smaller batches leave behind."""
    import torch

    names = PAIRS[0]
    aligner = TokenAligner(tokenizers[names[0]], tokenizers[names[1]])
    text = "\n".join(texts[0][:200_000] for texts in corpus.values()) * 20
    rows = []
    for name in names:
        ids = np.array(tokenizers[name].segment(text.encode()), np.int64)
        repeated = np.resize(ids[:4096], 4096)
        rows.append(torch.from_numpy(np.tile(repeated, (16, 1))))
    aligner.align(*rows)
    seconds = best_of(lambda: aligner.align(*rows), 20)
    small = [row[:4, :512].contiguous() for row in rows]
    for _ in range(1000):
        aligner.align(*small)
    before = current_memory()
    for _ in range(10_000):
        aligner.align(*small)
    return {
        "align_16x4096_million_per_s": 16 * 4096 / seconds / 1e6,
        "growth_over_10000_batches_mib": (current_memory() - before) / 2**20,
    }


def current_memory() -> int:
    """Return the resident memory of this process in bytes."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shapes(tokenizers: dict[str, Tokenizer], corpus: dict[str, list[str]]) -> dict[str, Any]:
    """Measure how time grows with length, and what odd texts cost against ordinary ones."""
    student, teacher = (tokenizers[name] for name in PAIRS[0])
    aligner = TokenAligner(student, teacher)
    ordinary = "\n".join(text for texts in corpus.values() for text in texts[:60])
    rng = np.random.default_rng(0)

    def rate(data: bytes, length: int | None = None) -> tuple[int, float]:
        sides = []
        for tokenizer in (student, teacher):
            pieces = [data[i : i + 100_000] for i in range(0, len(data), 100_000)]
            found = tokenizer.segment_batch(pieces)
            ids = np.concatenate([np.array(row, np.int32) for row in found if row is not None])
            sides.append(ids)
        if length is not None:
            whole = aligner.align_ids(
                sides[0], np.array([0, len(sides[0])]), sides[1], np.array([0, len(sides[1])])
            )
            end = int(whole.student_chunk_id[min(length, len(sides[0])) - 1])
            sides = [
                sides[0][whole.student_chunk_id <= end],
                sides[1][whole.teacher_chunk_id <= end],
            ]
        s, t = ((ids, np.array([0, len(ids)])) for ids in sides)
        return len(sides[0]), kernel_time(aligner, s, t) / len(sides[0])

    per_token = {}
    for length in (1_000, 10_000, 100_000, 1_000_000):
        n, seconds = rate((ordinary * 3).encode(), length)
        per_token[n] = seconds * 1e9
    odd = {
        "one million a": b"a" * 1_000_000,
        "emoji sequences": "👨\u200d👩\u200d👧\u200d👦🏳️\u200d🌈".encode() * 25_000,
        "random bytes": rng.integers(0, 256, 1_000_000, np.uint8).tobytes(),
    }
    plain = rate(ordinary.encode()[:4_000_000])[1]
    s = np.array(student.segment(ordinary.encode()), np.int32)
    bounds = np.array([0, len(s)])
    per_token_by_edits = {}
    for edits in (0, 10, 100, 1000):
        step = len(ordinary) // (edits + 1) + 1
        parts = [ordinary[i : i + step] for i in range(0, len(ordinary), step)]
        t = np.array(teacher.segment(" EDIT ".join(parts).encode()), np.int32)
        seconds = kernel_time(aligner, (s, bounds), (t, np.array([0, len(t)])))
        per_token_by_edits[edits] = seconds / len(s) * 1e9
    return {
        "ns_per_token_by_length": per_token,
        "ns_per_token_by_edits": per_token_by_edits,
        "odd_texts_against_ordinary": {name: rate(data)[1] / plain for name, data in odd.items()},
    }


def main() -> int:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="folder of *.train.jsonl.gz")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    missing = [name for pair in PAIRS for name in pair if not (TOKENIZERS / name).exists()]
    if missing:
        print(f"error: {missing[0]} is not in {TOKENIZERS}", file=sys.stderr)
        print("hint: python scripts/fetch_tokenizers.py", file=sys.stderr)
        return 1
    tokenizers = {
        name: load_tokenizer(str(TOKENIZERS / name)) for name in dict.fromkeys(sum(PAIRS, ()))
    }
    corpus = read_corpus(args.corpus)
    result = {
        "languages": languages(tokenizers, corpus),
        **batches(tokenizers, corpus),
        **shapes(tokenizers, corpus),
    }
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return 0
    print("| pair | text | student tokens | million/s | × plain walk | in correct chunks |")
    print("|---|---|---|---|---|---|")
    for row in result["languages"]:
        print(
            f"| {row['pair']} | {row['language']} | {row['student_tokens']:,} "
            f"| {row['million_per_s']:.0f} | {row['ratio']:.0f} | {row['in_correct_chunks']:.4%} |"
        )
    for name, value in result.items():
        if name != "languages":
            print(f"\n{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
