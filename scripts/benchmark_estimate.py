"""Measure `estimate`: its speed beside the tokenizers' own batch encoding, and its memory.

Text: `--text`, JSON lines with one document under `text` per line, or plain text; without it, the
multilingual text of small_tokenizers.py, repeated. Prints a table, or `--json`.

    python scripts/benchmark_estimate.py --text 'corpus/*.train.jsonl.gz'
    python scripts/benchmark_estimate.py --text 'corpus/*.train.jsonl.gz' --tokens 100000000

The own batch encoding is tiktoken's `encode_ordinary_batch`, with as many threads as xtok has,
`encode_batch_fast` of Hugging Face tokenizers, and SentencePiece's `encode` of a list. Both sides
are encoded one after the other, then encoded and counted by xtok; this many times in turn, and the
medians are compared. With `--tokens`, the text is counted again and again in a process of its own
until so many student tokens are counted, and the most memory that it had is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_tokenizers

from xtok.cooccurrence import PairEncoder, available_cores, batches
from xtok.counting import TextCounter
from xtok.texts import ShardReader, find_texts, shards
from xtok.tokenizers import Tokenizer, load_tokenizer

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
PAIRS = (
    ("llama3.tiktoken", "qwen.tiktoken"),
    ("llama3.tiktoken", "mistral-v3.model"),
    ("deepseek-v3", "qwen.tiktoken"),
)


def read(patterns: list[str]) -> list[str]:
    """Return all documents."""
    if not patterns:
        return ["\n".join(small_tokenizers.CORPUS)] * 200
    found = [shard for path in find_texts(patterns) for shard in shards(path)]
    return [document for shard in found for document in ShardReader(shard)]


def own_encoding(tokenizer: Tokenizer, threads: int) -> Callable[[list[str]], object]:
    """Return the library's own batch call."""
    backend: Any = tokenizer._backend
    if backend.name == "tiktoken":
        encode = backend._encoding.encode_ordinary_batch
        return lambda texts: encode(texts, num_threads=threads)
    if backend.name == "sentencepiece":
        return lambda texts: backend._processor.encode(texts, num_threads=threads)
    return lambda texts: [
        e.ids for e in backend._rust.encode_batch_fast(texts, add_special_tokens=False)
    ]


def compare(names: tuple[str, str], texts: list[str], times: int) -> dict[str, Any]:
    """Measure one pair."""
    student, teacher = (load_tokenizer(str(TOKENIZERS / name)) for name in names)
    cores = available_cores()
    own = [own_encoding(tokenizer, cores) for tokenizer in (student, teacher)]
    seconds: dict[str, list[float]] = {"own": [], "xtok": []}
    with PairEncoder(student, teacher) as encoder:
        TextCounter(encoder, "start", True).add(texts[:32])  # compile
        for _ in range(times):
            start = time.perf_counter()
            for encode in own:
                encode(texts)
            seconds["own"].append(time.perf_counter() - start)
            start = time.perf_counter()
            counter = TextCounter(encoder, "start", True)
            for batch in batches(texts):
                counter.add(batch)
            seconds["xtok"].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = counter.totals.student_tokens
    return {
        "pair": " → ".join(names),
        "tokens": tokens,
        "pairs": len(counter.counted),
        "own_s": medians["own"],
        "xtok_s": medians["xtok"],
        "ratio": medians["xtok"] / medians["own"],
        "best_ratio": min(seconds["xtok"]) / min(seconds["own"]),
        "tokens_per_s_core": tokens / medians["xtok"] / cores,
        "mb_per_s_core": counter.totals.num_bytes / medians["xtok"] / cores / 1e6,
    }


def count_many(names: tuple[str, str], texts: list[str], goal: int) -> dict[str, Any]:
    """Count the text over and over, and return what memory this process took."""
    student, teacher = (load_tokenizer(str(TOKENIZERS / name)) for name in names)
    start = time.perf_counter()
    with PairEncoder(student, teacher) as encoder:
        counter = TextCounter(encoder, "start", True)
        while counter.totals.student_tokens < goal:
            for batch in batches(texts):
                counter.add(batch)
                if counter.totals.student_tokens >= goal:
                    break
    return {
        "pair": " → ".join(names),
        "tokens": counter.totals.student_tokens,
        "pairs": len(counter.counted),
        "seconds": time.perf_counter() - start,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--tokens", type=int, help="measure memory over so many tokens instead")
    parser.add_argument("--here", action="store_true", help="in this process, for --tokens")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pairs = [pair for pair in PAIRS if all((TOKENIZERS / name).exists() for name in pair)]
    if not pairs:
        sys.exit("no tokenizers: run scripts/fetch_tokenizers.py")
    if args.tokens and not args.here:
        command = [sys.executable, __file__, *sys.argv[1:], "--here"]
        sys.exit(subprocess.run(command, check=False).returncode)
    texts = read(args.text)
    if args.tokens:
        rows = [count_many(pairs[0], texts, args.tokens)]
    else:
        rows = [compare(pair, texts, args.times) for pair in pairs]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:,.2f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
