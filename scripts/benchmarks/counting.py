"""Counting on text: how fast, and in how much memory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import chain

from benchmarks.harness import Row, chosen, documents, seconds, tokenizer
from xtok.counting.encode import EncodedBatch, TextEncoder
from xtok.counting.pair_text import TextCounter, Wanted
from xtok.threads import available_cores

PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v3"), ("deepseek-v3", "qwen"))


def estimate(options: Namespace) -> Iterator[Row]:
    """Encode and count a corpus."""
    texts = list(chain.from_iterable(documents(options).values()))
    for label, pair in chosen(PAIRS, options):
        with TextEncoder(*map(tokenizer, pair)) as encoder:
            totals = count(encoder, texts).totals
            taken = seconds(partial(count, encoder, texts), options.repeat) * available_cores()
        yield {
            "pair": label, "tokens": totals.student_tokens,
            "tokens per s and core": totals.student_tokens / taken,
            "MB per s and core": totals.num_bytes / taken / 1e6,
        }  # fmt: skip


def memory(options: Namespace) -> Iterator[Row]:
    """Count up to 100 million tokens; the last line has the process's peak memory."""
    texts = list(chain.from_iterable(documents(options).values()))
    with TextEncoder(*map(tokenizer, PAIRS[0])) as encoder:
        tokens = count(encoder, texts).totals.student_tokens
        counter = count(encoder, texts, int(100_000_000 * options.size / tokens) + 1)
    pairs = sum(len(tally.counts().keys) for tally in counter.tallies.values())
    tokens = counter.totals.student_tokens
    yield {"pair": " → ".join(PAIRS[0]), "tokens": tokens, "different pairs": pairs}


def count(encoder: TextEncoder, texts: list[str], passes: int = 1) -> TextCounter:
    """Count a text, several times over."""
    counter = TextCounter(encoder.tokenizers, Wanted(hold_out=True))
    for _ in range(passes):
        for start in range(0, len(texts), 1000):
            part = texts[start : start + 1000]
            batch = EncodedBatch(part, [""] * len(part), 0, encoder.encode(part))
            counter.add(encoder, batch)
    return counter
