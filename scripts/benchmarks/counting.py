"""Counting on text beside the tokenizers' own batch encoding; `doctor` beside loading."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from benchmarks.harness import Row, chosen, documents, path_of, race, tokenizer
from xtok import doctor, load_tokenizer
from xtok.counting.encode import EncodedBatch, TextEncoder
from xtok.counting.pair_text import TextCounter, Wanted
from xtok.counting.texts import Place
from xtok.threads import available_cores
from xtok.tokenizers import Tokenizer

EIGHT = (
    "llama3", "llama4", "qwen", "cl100k", "o200k", "mistral-v1", "mistral-v3", "tekken",
)  # fmt: skip
PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v3"), ("deepseek-v3", "qwen"))


def library_encoding(side: Tokenizer, threads: int) -> Callable[[list[str]], object]:
    """Return the tokenizer library's own batch call, with as many threads as xtok uses."""
    backend: Any = side._backend
    if backend.name == "tiktoken":
        return lambda texts: backend._encoding.encode_ordinary_batch(texts, num_threads=threads)
    if backend.name == "sentencepiece":
        return lambda texts: backend._processor.encode(texts, num_threads=threads)
    encode = backend._rust.encode_batch_fast
    return lambda texts: [e.ids for e in encode(texts, add_special_tokens=False)]


def count(encoder: TextEncoder, texts: list[str], passes: int = 1) -> TextCounter:
    """Count a text, several times over."""
    counter = TextCounter(encoder.tokenizers, Wanted(hold_out=True))
    for _ in range(passes):
        for start in range(0, len(texts), 1000):
            part = texts[start : start + 1000]
            batch = EncodedBatch(part, [""] * len(part), Place(), encoder.encode(part))
            counter.add(encoder, batch)
    return counter


def described(label: str, counter: TextCounter) -> Row:
    """Return what was counted."""
    pairs = sum(len(tally.counts().keys) for tally in counter.tallies.values())
    return {"pair": label, "tokens": counter.totals.student_tokens, "different pairs": pairs}


def counting(options: Namespace) -> Iterator[Row]:
    """Encode and count with xtok, beside encoding both sides with the libraries in turn."""
    texts = list(chain.from_iterable(documents(options).values()))
    cores = available_cores()
    for label, pair in chosen(PAIRS, options):
        student, teacher = (tokenizer(name) for name in pair)
        libraries = [library_encoding(side, cores) for side in (student, teacher)]
        with TextEncoder(student, teacher) as encoder:
            counter = count(encoder, texts)
            times = race(
                partial(count, encoder, texts),
                lambda: [encode(texts) for encode in libraries],  # noqa: B023
                options.repeat,
            )
        rate = 1 / median(times.ours) / cores
        yield {
            **described(label, counter),
            **times.row(),
            "tokens per s and core": counter.totals.student_tokens * rate,
            "MB per s and core": counter.totals.num_bytes * rate / 1e6,
        }


def memory(options: Namespace) -> Iterator[Row]:
    """Count a text up to 100 million tokens; the last line has the process's peak memory."""
    texts = list(chain.from_iterable(documents(options).values()))
    label, pair = " → ".join(PAIRS[0]), PAIRS[0]
    with TextEncoder(tokenizer(pair[0]), tokenizer(pair[1])) as encoder:
        tokens = count(encoder, texts).totals.student_tokens
        passes = int(100_000_000 * options.size / tokens) + 1
        yield described(label, count(encoder, texts, passes))


def doctoring(options: Namespace) -> Iterator[Row]:
    """`doctor` beside loading and encoding once."""

    def load(*names: str) -> list[Tokenizer]:
        return [load_tokenizer(str(path_of(name))) for name in names]

    def encode_vocabulary() -> None:
        (llama,) = load("llama3")
        llama.library_ids([token.decode("utf-8", "replace") for token in llama.table.tokens()])

    doctored = race(
        lambda: doctor(load("llama3"), template="llama3"), encode_vocabulary, options.repeat
    )
    yield {"command": "doctor llama3", **doctored.row(1.5)}
