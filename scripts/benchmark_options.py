"""Measure what the options of `multitoken` and `convert --transpose` change on real tokenizers.

    python scripts/benchmark_options.py

Prints, for each pair and option: the rows by kind, the processor seconds of a whole build, which
rows differ from those of the default, and what that does on text, the source of Python's standard
library. At the places there where a student's and a teacher's token both begin: the share that is
in rows that differ, and the mean weight that these rows give the teacher's token, by default → with
the option.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xtok import load_tokenizer
from xtok.config import BuildConfig
from xtok.pipeline import build
from xtok.projection import ProjectionMap, RowKind, transpose
from xtok.tokenizers import Tokenizer

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
PAIRS = (
    ("llama3.tiktoken", "qwen.tiktoken"),
    ("llama3.tiktoken", "mistral-v3.model"),
    ("claude-2", "mistral-v3.model"),
)
OPTIONS = {
    "--for p-kl": BuildConfig.for_loss("p-kl"),
    "--canonicalization relaxed": BuildConfig(canonicalization="relaxed"),
    "--special-tokens fuzzy": BuildConfig(special_tokens="fuzzy"),
    "  with NeMo-RL's 0.3 and 32": BuildConfig(
        special_tokens="fuzzy", fuzzy_threshold=0.3, fuzzy_top_k=32
    ),
    "--token-form text": BuildConfig(token_form="text"),
    "--token-form raw": BuildConfig(token_form="raw"),
}


def main() -> None:
    """Print the table."""
    loaded: dict[str, Tokenizer] = {}
    text = standard_library()
    for names in PAIRS:
        for name in names:
            loaded.setdefault(name, load_tokenizer(TOKENIZERS / name))
        student, teacher = (loaded[name] for name in names)
        starts = common_starts(student, teacher, text)
        plain, seconds = timed(student, teacher, BuildConfig())
        print(f"{names[0]} → {names[1]}: {counts(plain)}, {seconds:.1f} s of CPU")
        for option, config in OPTIONS.items():
            made, seconds = timed(student, teacher, config)
            print(f"  {option:<28} {counts(made)}, {seconds:.1f} s of CPU")
            print(f"  {'':<28} {difference(plain, made, starts)}")
        start = time.perf_counter()
        back = transpose(plain)
        seconds = time.perf_counter() - start
        entries = back.entries_per_row
        print(
            f"  {'--transpose':<28} {np.count_nonzero(entries):,} of {len(entries):,} rows, "
            f"at most {entries.max():,} entries in one, {seconds:.2f} s"
        )


def difference(plain: ProjectionMap, made: ProjectionMap, starts: NDArray[np.int64]) -> str:
    """Say which rows differ, how often they occur, and what weight they give the right token."""
    changed = rows_that_differ(plain, made)
    here = starts[:, np.isin(starts[0], changed)]
    share = here.shape[1] / starts.shape[1]
    before, after = (mean_weight(m, here) for m in (plain, made))
    return f"{len(changed):,} rows differ, {share:.3%} of the text: {before:.2f} → {after:.2f}"


def common_starts(student: Tokenizer, teacher: Tokenizer, text: bytes) -> NDArray[np.int64]:
    """Return the student's and the teacher's token wherever both begin at one byte, `[2, n]`."""
    ids = [np.array(tokenizer.segment(text)) for tokenizer in (student, teacher)]
    lengths = [t.table.lengths[i] for t, i in zip((student, teacher), ids, strict=True)]
    starts = [np.cumsum(n) - n for n in lengths]
    _, ours, theirs = np.intersect1d(*starts, return_indices=True)
    return np.stack([ids[0][ours], ids[1][theirs]])


def mean_weight(m: ProjectionMap, starts: NDArray[np.int64]) -> float:
    """Return the mean weight that a map's rows give the teacher's tokens."""
    width = m.shape[1]
    keys = m.student_ids.astype(np.int64) * width + m.teacher_ids
    order = np.argsort(keys)
    wanted = starts[0] * width + starts[1]
    place = np.searchsorted(keys[order], wanted).clip(max=len(keys) - 1)
    weights = np.where(keys[order][place] == wanted, m.weights[order][place], 0)
    return float(weights.mean()) if len(weights) else 0.0


def standard_library() -> bytes:
    """Return the first 4 MB of Python's own modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    return b"".join(sources)[:4_000_000].decode("utf-8", "ignore").encode()


def timed(
    student: Tokenizer, teacher: Tokenizer, config: BuildConfig
) -> tuple[ProjectionMap, float]:
    """Build a map, and return the processor time that it took, of all threads."""
    start = time.process_time()
    return build(student, teacher, config), time.process_time() - start


def rows_that_differ(one: ProjectionMap, other: ProjectionMap) -> NDArray[np.int64]:
    """Return the student ids whose rows are not the same, weights rounded to 1e-5."""
    parts = [
        np.stack([m.student_ids, m.teacher_ids, (m.weights * 1e5).round().astype(np.int64)])
        for m in (one, other)
    ]
    entries, number = np.unique(np.concatenate(parts, axis=1), axis=1, return_counts=True)
    return np.unique(entries[0, number == 1])


def counts(m: ProjectionMap) -> str:
    """Return how many rows are exact, how many of these have other bytes, and the special ones."""
    rows, columns = m.student.table, m.teacher.table
    if rows is None or columns is None:
        raise ValueError("a map that was built has tokens")
    exact = np.flatnonzero(m.row_kind == RowKind.EXACT)
    partner = dict(zip(m.student_ids.tolist(), m.teacher_ids.tolist(), strict=True))
    ours, theirs = rows.tokens(), columns.tokens()
    wrong = sum(ours[s] != theirs[partner[s]] for s in exact.tolist())
    role = np.flatnonzero(m.row_kind == RowKind.ROLE)
    relaxed = int(np.count_nonzero(m.row_kind == RowKind.RELAXED))
    return (
        f"{len(exact):,} exact ({wrong:,} of other bytes), {relaxed:,} relaxed, "
        f"{len(role):,} special"
    )


if __name__ == "__main__":
    main()
