"""Counting on text: how fast, and in how much memory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import chain

import xtok
from benchmarks.harness import Row, chosen, documents, seconds, tokenizer
from xtok._lib.threads import available_cores
from xtok.building.counting.encode import TextEncoder
from xtok.building.counting.pair_text import CountPlan, TextCounter
from xtok.conversation.texts import TextBatch
from xtok.tokenizers.pairs import Pair

PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v3"), ("deepseek-v3", "qwen"))


def estimate(options: Namespace) -> Iterator[Row]:
    """Encode and count a corpus."""
    texts = list(chain.from_iterable(documents(options).values()))
    for label, pair in chosen(PAIRS, options):
        both = xtok.load_pair(*map(tokenizer, pair))
        with TextEncoder(*both.tokenizers) as encoder:
            totals = count(both, encoder, texts).totals
            taken = seconds(partial(count, both, encoder, texts), options.repeat)
            taken *= available_cores()
        yield {
            "pair": label, "tokens": totals.student_tokens,
            "tokens per s and core": totals.student_tokens / taken,
            "MB per s and core": totals.num_bytes / taken / 1e6,
        }  # fmt: skip


def memory(options: Namespace) -> Iterator[Row]:
    """Count up to 100 million tokens; the last line has the process's peak memory."""
    texts = list(chain.from_iterable(documents(options).values()))
    both = xtok.load_pair(*map(tokenizer, PAIRS[0]))
    with TextEncoder(*both.tokenizers) as encoder:
        tokens = count(both, encoder, texts).totals.student_tokens
        counter = count(both, encoder, texts, int(100_000_000 * options.size / tokens) + 1)
    pairs = sum(len(tally.counts().keys) for tally in (counter.counts, counter.held_out))
    tokens = counter.totals.student_tokens
    yield {"pair": " → ".join(PAIRS[0]), "tokens": tokens, "different pairs": pairs}


def count(pair: Pair, encoder: TextEncoder, texts: list[str], passes: int = 1) -> TextCounter:
    """Count a text, several times over."""
    counter = TextCounter(pair, CountPlan(hold_out=True))
    for _ in range(passes):
        for start in range(0, len(texts), 1000):
            part = texts[start : start + 1000]
            counter.add(TextBatch(part, "", 0), encoder.start_encoding(part)())
    return counter
