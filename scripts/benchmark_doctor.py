"""Measure `doctor` against loading and encoding a vocabulary, and `overlap` against loading.

    python scripts/benchmark_doctor.py

Both figures are ratios of times of one run, the median of several; needs the real tokenizers that
scripts/fetch_tokenizers.py fetches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from xtok.diagnosis import doctor
from xtok.sharing import overlap
from xtok.tokenizers import Tokenizer, load_tokenizer

DATA = Path(__file__).resolve().parents[1] / "data" / "tokenizers"
ONE = "llama3.tiktoken"
EIGHT = (
    *("llama3.tiktoken", "llama4.tiktoken", "qwen.tiktoken", "cl100k.tiktoken", "o200k.tiktoken"),
    *("mistral-v1.model", "mistral-v3.model", "tekken.json"),
)
T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that a call takes, and its value."""
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def encode_vocabulary(tokenizer: Tokenizer) -> object:
    """Encode every token alone, in one batch call."""
    texts = [token.decode("utf-8", "replace") for token in tokenizer.table.tokens()]
    return tokenizer.library_ids(texts)


def doctor_ratio() -> tuple[float, float]:
    """Return seconds to load and encode once, and those to load and diagnose."""
    load, tokenizer = timed(lambda: load_tokenizer(str(DATA / ONE)))
    encode, _ = timed(lambda: encode_vocabulary(tokenizer))
    diagnose, _ = timed(lambda: doctor([tokenizer], template="llama3"))
    return load + encode, load + diagnose


def overlap_ratio() -> tuple[float, float]:
    """Return seconds to load eight tokenizers, and those to load them and compare."""
    load, tokenizers = timed(lambda: [load_tokenizer(str(DATA / name)) for name in EIGHT])
    compare, _ = timed(lambda: overlap(tokenizers))
    return load, load + compare


def main() -> int:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=5, help="default: %(default)s")
    repeat = parser.parse_args().repeat
    missing = [name for name in EIGHT if not (DATA / name).exists()]
    if missing:
        print(f"error: {', '.join(missing)} not there", file=sys.stderr)
        print("hint: python scripts/fetch_tokenizers.py", file=sys.stderr)
        return 1
    doctor_ratio()  # imports and caches
    for what, measure, target in (
        (f"doctor, {ONE}: of loading and encoding once", doctor_ratio, 1.5),
        (f"overlap of {len(EIGHT)}: of loading them", overlap_ratio, 1.3),
    ):
        times = [measure() for _ in range(repeat)]
        base, full = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        print(f"{what}: {ratio:.2f} × ({full:.2f} s of {base:.2f} s; at most {target} ×)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
