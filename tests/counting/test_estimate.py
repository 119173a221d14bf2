"""Maps counted on text: the kernels beside plain twins, the formula, and going on after a kill."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import small_tokenizers
from conftest import Cli
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from xtok.config import BuildConfig, MultitokenConfig, Target
from xtok.counting import counts as count_module
from xtok.counting import encode, kernels, texts
from xtok.counting.counts import (
    CountedText,
    CountingPlan,
    TextTotals,
    count_text,
    merge_counts,
    plan_counting,
)
from xtok.counting.encode import (
    EncodedTexts,
    PairCounts,
    Rows,
    SharedBoundaries,
    Tally,
    TextEncoder,
)
from xtok.counting.prior import prior_edges
from xtok.counting.smoothing import ALPHAS, choose_alpha, smooth
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.edges import Edges
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.stages.build import build
from xtok.stages.counted import map_of_counts
from xtok.stages.multitoken import multitoken
from xtok.tokenizers import ModelLike, Tokenizer, load_tokenizer


@pytest.fixture(autouse=True)
def short_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw less synthetic text, so that the tests are quick."""
    monkeypatch.setattr(prior_edges, "__kwdefaults__", {**DEFAULTS, "num_texts": 500})


NUM_DOCUMENTS = 120
DEFAULTS = prior_edges.__kwdefaults__ or {}


def counting(**options: Any) -> BuildConfig:
    """The options of a map counted on text, without exact rows."""
    return BuildConfig(**{"top_k": 8, "exact_match": False, **options})


def estimate(
    student: ModelLike,
    teacher: ModelLike,
    documents: Sequence[Path],
    config: BuildConfig | None = None,
    *,
    base: ProjectionMap | None = None,
    checkpoint: Path | None = None,
) -> ProjectionMap:
    """Count a map on text; by default, without exact rows."""
    return build(
        student, teacher, config or counting(), texts=documents, initial=base, checkpoint=checkpoint
    )


def write_documents(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lines of the training text as documents, some of them twice, in JSON lines."""
    lines = [line for text in small_tokenizers.CORPUS for line in text.splitlines() if line]
    folder = tmp_path_factory.mktemp("corpus")
    return write_documents(folder / "a.jsonl", (lines * 2)[:NUM_DOCUMENTS])


@pytest.fixture(scope="module")
def base(byte_level: Tokenizer, digits: Tokenizer) -> ProjectionMap:
    return multitoken(byte_level, digits, MultitokenConfig(scale_trick=False))


def saved(projection: ProjectionMap, folder: Path) -> bytes:
    path = folder / "saved.safetensors"
    projection.save(path)
    return path.read_bytes()


def same(left: CountedText, right: CountedText) -> bool:
    pairs = [(*counts.counted.pairs(), *counts.held.pairs()) for counts in (left, right)]
    arrays = zip(*pairs, strict=True)
    return all(np.array_equal(a, b) for a, b in arrays) and left.totals == right.totals


def pairs_of(counts: CountedText) -> dict[int, int]:
    keys, amounts = counts.counted.pairs()
    return dict(zip(keys.tolist(), amounts.tolist(), strict=True))


# The kernels


def flat(documents: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    ids = np.array([i for d in documents for i in d], np.int32)
    return ids, np.cumsum([0, *map(len, documents)])


TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"c"]
ids_of_a_document = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)


@st.composite
def two_spellings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two ways to spell one string, or sometimes two strings."""
    student = draw(ids_of_a_document)
    if draw(st.booleans()):
        return student, draw(ids_of_a_document)
    rest, teacher = b"".join(TOKENS[i] for i in student), []
    while rest:
        fitting = [i for i, t in enumerate(TOKENS) if t and rest.startswith(t)]
        teacher.append(draw(st.sampled_from(fitting)))
        rest = rest[len(TOKENS[teacher[-1]]) :]
    return student, teacher


token_ids = st.integers(0, len(TOKENS) - 1)
eighths = st.integers(1, 24).map(lambda n: n / 8)


@given(
    documents=st.lists(two_spellings(), max_size=4),
    weights=st.none() | st.dictionaries(st.tuples(token_ids, token_ids), eighths),
)
def test_shared_boundaries_and_chunks_are_those_of_the_plain_walk(
    documents: list[tuple[list[int], list[int]]], weights: dict[tuple[int, int], float] | None
) -> None:
    data = np.frombuffer(b"".join(TOKENS), np.uint8)
    offsets = np.cumsum([0, *map(len, TOKENS)])
    student, teacher = flat([s for s, _ in documents]), flat([t for _, t in documents])
    places = np.empty((2, min(len(student[0]), len(teacher[0]))), np.int64)
    num_starts, same_bytes = np.zeros((2, len(documents)), np.int64)
    complete = np.zeros(len(documents), np.bool_)
    count = kernels.shared_boundaries(
        *student, data, offsets, *teacher, data, offsets, *places, num_starts, same_bytes, complete
    )
    assert count == num_starts.sum()
    skipped = at = 0
    expected: Counter[int] = Counter()
    for d, (s, t) in enumerate(documents):
        starts, num_same, agrees = naive.shared_boundaries(
            [TOKENS[i] for i in s], [TOKENS[j] for j in t]
        )
        own = places[:, at : at + num_starts[d]] - np.array([[student[1][d]], [teacher[1][d]]])
        assert list(zip(*own.tolist(), strict=True)) == starts
        assert (same_bytes[d], complete[d]) == (num_same, agrees)
        at += num_starts[d]
        listed, left_out = naive.chunk_pairs(
            s, t, starts, agrees, encode.UNIT, encode.LONGEST_CHUNK, weights
        )
        for student_id, teacher_id, amount in listed:
            expected[student_id << 32 | teacher_id] += amount
        skipped += left_out
    s_ids, t_ids = np.array(list(weights or {}), np.int64).reshape(-1, 2).T
    rows = Rows.of(Edges(s_ids, t_ids, np.array(list((weights or {}).values()))), len(TOKENS))
    tally = Tally("chunk")
    s_starts, t_starts = places[:, :count]
    boundaries = SharedBoundaries(s_starts, t_starts, num_starts, same_bytes, complete)
    sides = EncodedTexts(*student), EncodedTexts(*teacher)
    assert [tally.add(*sides, boundaries) for _ in range(2)] == [skipped] * 2
    merged = Tally("chunk")
    merged.add_counts(tally.counts())
    keys, amounts = merged.counts().pairs(rows if weights else None)
    assert dict(zip(keys.tolist(), amounts.tolist(), strict=True)) == {
        key: 2 * amount for key, amount in expected.items() if amount
    }


def test_chunks_grow_past_their_first_table() -> None:
    n = 20_000
    ids = np.arange(3 * n, dtype=np.int32)
    starts = 3 * np.arange(n)
    spans = np.stack([starts, starts + 2, starts + 2, starts + 3], 1)
    tally = Tally("chunk")
    for amounts in (np.ones(1, np.int64), np.arange(n)):
        tally._add_chunks(spans, amounts, ids, ids)
    found = tally.counts()
    assert np.array_equal(found.chunk_ids, ids)
    assert np.array_equal(found.chunk_counts, np.arange(n) + 1)


@given(parts=st.lists(st.lists(st.tuples(st.integers(0, 2**62), st.integers(1, 9)), max_size=60)))
def test_counts_are_those_of_a_counter(parts: list[list[tuple[int, int]]]) -> None:
    counts, expected = PairCounts(), Counter[int]()
    for part in parts:
        keys = np.array([k for k, _ in part], np.int64)
        counts.add(keys, np.array([n for _, n in part], np.int64))
        if len(part) == 1:
            expected[part[0][0]] += part[0][1]
            continue
        for key, amount in part:
            expected[key] += amount
    keys, found = counts.arrays()
    assert dict(zip(keys.tolist(), found.tolist(), strict=True)) == expected
    assert keys.tolist() == sorted(expected)
    assert len(counts) == len(expected)


def test_counts_grow_past_their_first_table() -> None:
    counts = PairCounts()
    keys = np.arange(50_000, dtype=np.int64) * (1 << 32 | 1)
    for _ in range(3):
        counts.add(keys, np.ones(1, np.int64))
    found, amounts = counts.arrays()
    assert np.array_equal(found, keys)
    assert set(amounts.tolist()) == {3}


# What is counted


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "ranks"])
def test_arrays_are_the_lists(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    documents = [*small_tokenizers.CORPUS, "", "<|endoftext|> <s>", "<think>"]
    found = tokenizer.library_arrays(documents)
    assert [row.tolist() for row in found] == tokenizer.library_ids(documents)
    assert {row.dtype for row in found} == {np.dtype(np.int32)}


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen.tiktoken", "llama3.tiktoken"])
def test_arrays_of_real_ranks_are_the_lists(
    name: str, load_real: Callable[[str], Tokenizer]
) -> None:
    tokenizer = load_real(name)
    documents = [
        *small_tokenizers.CORPUS, "", "<|endoftext|><think>x</think>", "<|begin_of_text|>a"
    ]  # fmt: skip
    found = [row.tolist() for row in tokenizer.library_arrays(documents)]
    assert found == tokenizer.library_ids(documents)


def token(tokenizer: Tokenizer, data: bytes) -> int:
    [found] = tokenizer.segment(data)
    return found


def test_a_tiny_text_is_counted_pair_by_pair(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["201", "20"])
    # byte-level cuts digits one by one: 2 0 1 and 2 0; the other one takes them in threes.
    two, zero, one = (token(byte_level, digit) for digit in (b"2", b"0", b"1"))
    whole, twenty = token(digits, b"201"), token(digits, b"20")
    starts = {(two, whole): 1, (two, twenty): 1}
    chunks = dict.fromkeys([(two, whole), (zero, whole), (one, whole)], encode.UNIT // 3)
    chunks |= dict.fromkeys([(two, twenty), (zero, twenty)], encode.UNIT // 2)
    both = chunks | {pair: chunks[pair] + encode.UNIT for pair in starts}
    targets: dict[Target, dict[tuple[int, int], int]]
    targets = {"start": starts, "chunk": chunks, "both": both}
    for target, expected in targets.items():
        plan = plan_counting(byte_level, digits, [path], counting(alpha=1, target=target))
        counts = count_text(plan, byte_level, digits)
        assert pairs_of(counts) == {s << 32 | t: n for (s, t), n in expected.items()}
        assert counts.totals == TextTotals(
            documents=2, num_bytes=5, student_tokens=5, teacher_tokens=2, starts=2
        )


@pytest.mark.parametrize("target", ["start", "chunk", "both"])
def test_an_occurrence_weighs_the_same_whatever_is_counted(
    byte_level: Tokenizer, digits: Tokenizer, base: ProjectionMap, tmp_path: Path, target: Target
) -> None:
    """Of a token that both sides have: once at its start, once as its chunk, or both."""
    path = write_documents(tmp_path / "a.jsonl", ["e"] * 3)
    config = counting(alpha=2, target=target)
    e_s, e_t = token(byte_level, b"e"), token(digits, b"e")
    before = dict(naive.rows_of(base)[e_s]).get(e_t, 0.0)
    found = estimate(byte_level, digits, [path], config, base=base)
    seen = 6 if target == "both" else 3
    expected = (seen + 2 * before) / (seen + 2)
    kept = dict(naive.rows_of(found)[e_s])[e_t]
    assert kept == pytest.approx(expected, rel=0.02)  # what is cut off is shared out
    assert found.history[-1]["options"]["target"] == target


def test_an_em_step_shares_a_chunk_as_the_map_predicts(
    byte_level: Tokenizer, digits: Tokenizer, base: ProjectionMap, tmp_path: Path
) -> None:
    """Of the chunk 20, `2` and `0` first have a half each; 0 alone is 0, which leaves it less."""
    path = write_documents(tmp_path / "a.jsonl", ["20", "0", "0", "0"])
    config = counting(target="chunk", alpha=1e-6)
    m = estimate(byte_level, digits, [path], config, base=base)
    zero, two = token(byte_level, b"0"), token(byte_level, b"2")
    of_twenty = [dict(naive.rows_of(m)[row])[token(digits, b"20")] for row in (two, zero)]
    # First W[2, 20] = 1, W[0, 20] = 0.5 / 3.5; so 2 takes 1 / (1 + 1 / 7) of the chunk.
    assert of_twenty == pytest.approx([1, (1 / 8) / (3 + 1 / 8)], rel=1e-4)


def test_smoothing_is_the_posterior_mean() -> None:
    base = Edges(np.array([0, 0, 1]), np.array([5, 6, 7]), np.array([0.75, 0.25, 1.0]))
    counted = Edges(np.array([0, 0, 2]), np.array([6, 8, 9]), np.array([3, 1, 4]))
    found = smooth(counted, base, 4.0)
    rows = zip(found.student_ids.tolist(), found.teacher_ids.tolist(), strict=True)
    weights = dict(zip(rows, found.weights.tolist(), strict=True))
    # (counts + 4 base) / (N + 4): row 0 has N = 4, row 1 no counts, row 2 no base.
    assert weights == {(0, 5): 3 / 8, (0, 6): 4 / 8, (0, 8): 1 / 8, (1, 7): 1.0, (2, 9): 1.0}


def test_alpha_is_small_where_counts_predict_and_large_where_the_base_does() -> None:
    base = Edges(np.array([0]), np.array([1]), np.array([1.0]))
    cases: tuple[tuple[int, list[int], float], ...]
    cases = ((3, [2, 2], 0.25), (3, [1, 1], 64.0), (1, [1, 2], 1.0), (3, [], 4.0))
    for counted, held, alpha in cases:
        pairs = np.array([2]), np.array([counted])
        of_held = np.array(held, np.int64), np.ones(len(held), np.int64)
        assert choose_alpha(pairs, of_held, base, 2, 10) == alpha


def test_the_whole_formula_in_a_file(
    byte_level: Tokenizer, digits: Tokenizer, base: ProjectionMap, tmp_path: Path
) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["201", "20", "20"])
    config = counting(alpha=2, top_k=3)
    found = estimate(byte_level, digits, [path], config, base=base)
    two = token(byte_level, b"2")
    row = dict(naive.rows_of(base)[two])
    weights: dict[int, float] = {t: 2 * w for t, w in row.items()}
    for name, count in ((b"201", 1), (b"20", 2)):
        t = token(digits, name)
        weights[t] = weights.get(t, 0.0) + count
    expected = naive.heaviest(naive.normalized(weights), 3)
    assert dict(naive.rows_of(found)[two]) == pytest.approx(expected, abs=1e-7)
    assert found.row_kind[two] == RowKind.COUNTED
    assert found.top_k == 3
    other = token(byte_level, b"e")
    assert found.row_kind[other] == base.row_kind[other]
    cut = naive.heaviest(dict(naive.rows_of(base)[other]), 3)
    assert dict(naive.rows_of(found)[other]) == pytest.approx(cut, abs=1e-7)
    last = found.history[-1]
    assert last["stage"] == "estimate"
    assert last["options"] == {"top_k": 3, "target": "start", "alpha": 2}
    assert last["initial_sha256"] == mapfile.sha256(base)


def test_pins_give_exact_tokens_one_entry(
    byte_level: Tokenizer, digits: Tokenizer, base: ProjectionMap, corpus: Path
) -> None:
    loose = estimate(byte_level, digits, [corpus], base=base)
    pinned = estimate(byte_level, digits, [corpus], counting(exact_match=True), base=base)
    two = token(byte_level, b"2")
    assert len(naive.rows_of(loose)[two]) > 1
    assert naive.rows_of(pinned)[two] == [(token(digits, b"2"), 1.0)]
    assert [step["stage"] for step in pinned.history] == ["multitoken", "estimate", "reapply-exact"]


def test_a_slot_of_the_initial_map_is_left_out(
    byte_level: Tokenizer, digits: Tokenizer, base: ProjectionMap, corpus: Path
) -> None:
    with_slot = multitoken(byte_level, digits, MultitokenConfig(scale_trick=True))
    assert with_slot.enable_scale_trick
    found = estimate(byte_level, digits, [corpus], counting(alpha=1), base=with_slot)
    assert not found.enable_scale_trick
    plain = estimate(byte_level, digits, [corpus], counting(alpha=1), base=base)
    assert found.edges.student_ids.tolist() == plain.edges.student_ids.tolist()


# The same, however it is counted


def test_batches_threads_and_compression_change_nothing(
    byte_level: Tokenizer,
    digits: Tokenizer,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_counting(byte_level, digits, [corpus])
    once = count_text(plan, byte_level, digits, num_threads=1)
    assert once.totals.documents == NUM_DOCUMENTS
    assert once.totals.held_out > 0
    assert same(count_text(plan, byte_level, digits, num_threads=3), once)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    assert same(count_text(plan_counting(byte_level, digits, [packed]), byte_level, digits), once)
    monkeypatch.setattr(texts, "BATCH_CHARACTERS", 100)
    assert same(count_text(plan, byte_level, digits), once)
    monkeypatch.setattr(texts, "SHARD_BYTES", 1500)
    many = plan_counting(byte_level, digits, [corpus])
    assert len(many.shards) > 10
    assert many.sha256 == plan.sha256
    assert same(count_text(many, byte_level, digits), once)


def test_merging_does_not_depend_on_order_or_grouping(
    byte_level: Tokenizer, digits: Tokenizer, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "SHARD_BYTES", 5000)
    plan = plan_counting(byte_level, digits, [corpus])
    encoder = TextEncoder(byte_level, digits)
    parts = [count_module.count_shard(shard, encoder, plan) for shard in plan.shards]
    assert len(parts) > 3
    whole = count_text(plan, byte_level, digits)
    assert same(merge_counts(parts), whole)
    assert same(merge_counts(reversed(parts)), whole)
    assert same(merge_counts([merge_counts(parts[1:]), parts[0]]), whole)


def test_no_thread_is_left_over(byte_level: Tokenizer, digits: Tokenizer, corpus: Path) -> None:
    before = set(threading.enumerate())
    count_text(plan_counting(byte_level, digits, [corpus]), byte_level, digits, num_threads=4)
    assert set(threading.enumerate()) <= before


# Interrupted and gone on


class Interrupted(BaseException):
    pass


@contextmanager
def interrupting(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
    """A progress that stops the count at its 4th step."""
    steps = 0

    def advance(size: int, tokens: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise Interrupted

    yield advance


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(texts, "SHARD_BYTES", 5000)


@pytest.mark.usefixtures("small_batches")
def test_counting_goes_on_from_a_checkpoint(
    byte_level: Tokenizer, digits: Tokenizer, corpus: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    plan = plan_counting(byte_level, digits, [corpus])
    with pytest.raises(Interrupted):
        count_text(
            plan, byte_level, digits,
            checkpoint=checkpoint, checkpoint_seconds=0, progress=interrupting,
        )  # fmt: skip
    assert checkpoint.exists()
    read: list[int] = []

    @contextmanager
    def watching(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
        yield lambda size, tokens: read.append(tokens)

    found = count_text(plan, byte_level, digits, checkpoint=checkpoint, progress=watching)
    assert read[0] > 0  # what was counted before
    assert sum(read) == found.totals.student_tokens
    assert same(found, count_text(plan, byte_level, digits))


KILLED = """
import sys, time
from pathlib import Path
from xtok.counting import counts, texts
from xtok.maps import file
from xtok.config import BuildConfig
from xtok.stages.build import build
texts.BATCH_CHARACTERS = 2000
texts.SHARD_BYTES = 5000
save = counts._save_checkpoint
def slow(*args):
    save(*args)
    time.sleep(0.2)  # long enough to be killed between two of them
counts._save_checkpoint = slow
count = counts.count_text
def often(*args, **options):
    return count(*args, **options, checkpoint_seconds=0)
counts.count_text = often
student, teacher, text, checkpoint, base, output, target = sys.argv[1:]
base = file.load(Path(base))
config = BuildConfig(target=target, top_k=8, exact_match=False)
found = build(student, teacher, config, texts=[text], initial=base, checkpoint=Path(checkpoint))
found.save(Path(output))
"""


@pytest.mark.parametrize("target", ["start", "chunk"])
def test_a_killed_process_is_gone_on_from_byte_for_byte(
    small: Path, corpus: Path, base: ProjectionMap, tmp_path: Path, target: Target
) -> None:
    student, teacher = str(small / "small-byte-level"), str(small / "small-digits")
    initial = tmp_path / "initial.safetensors"
    base.save(initial)
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "out.safetensors"
    command = [
        sys.executable, "-c", KILLED, student, teacher, corpus, checkpoint, initial, output, target,
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(list(map(str, command)), env=env)
    try:
        limit = time.monotonic() + 200
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert checkpoint.exists()
    assert not output.exists()
    config = counting(target=target)
    estimate(student, teacher, [corpus], config, base=base, checkpoint=checkpoint).save(output)
    assert not checkpoint.exists()
    expected = estimate(student, teacher, [corpus], config, base=base)
    assert output.read_bytes() == saved(expected, tmp_path)


INTERRUPTED = """
import os, signal, sys
from xtok.counting import counts, texts
texts.BATCH_CHARACTERS = 1000
stop = getattr(signal, sys.argv.pop())
add, calls = counts.TextCounter.add, []
def interrupted(self, batch):
    calls.append(batch)
    if len(calls) == 3:
        os.kill(os.getpid(), stop)
    add(self, batch)
counts.TextCounter.add = interrupted
from xtok.__main__ import program
program()
"""


@pytest.mark.parametrize(
    ("stop", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_counting_goes_on_after_a_signal(
    cli: Cli, small: Path, corpus: Path, tmp_path: Path, stop: str, code: int, word: str
) -> None:
    args = [
        "build", str(small / "small-byte-level"), str(small / "small-digits"),
        "--text", str(corpus), "--output", "map.safetensors",
    ]  # fmt: skip
    stopped = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *args, stop],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (stopped.returncode, stopped.stdout) == (code, "")
    assert stopped.stderr.splitlines()[-1].startswith(f"{word}: counts saved in map.safetensors.ch")
    assert "Traceback" not in stopped.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["map.safetensors.checkpoint"]
    if stop == "SIGTERM":
        return
    done = cli(*args)
    assert (done.returncode, done.stdout) == (0, "map.safetensors\n"), done.stderr
    written = (tmp_path / "map.safetensors").read_bytes()
    resumed = re.search(r"^note: resuming at (\d+)% of the text", done.stderr, re.MULTILINE)
    assert resumed is not None
    assert 0 < int(resumed[1]) <= 100
    assert [path.name for path in tmp_path.iterdir()] == ["map.safetensors"]
    again = cli(*args)
    assert "resuming" not in again.stderr
    assert (tmp_path / "map.safetensors").read_bytes() == written


@pytest.fixture
def checkpoint(
    byte_level: Tokenizer, digits: Tokenizer, corpus: Path, tmp_path: Path
) -> tuple[CountingPlan, Path]:
    path = tmp_path / "checkpoint"
    plan = plan_counting(byte_level, digits, [corpus])
    count_text(plan, byte_level, digits, checkpoint=path, checkpoint_seconds=-1)
    assert path.exists()
    return plan, path


@pytest.mark.parametrize("what", ["text", "teacher", "target", "alpha", "pattern"])
def test_a_checkpoint_of_another_run_is_refused(
    byte_level: Tokenizer,
    digits: Tokenizer,
    sentencepiece: Tokenizer,
    checkpoint: tuple[CountingPlan, Path],
    corpus: Path,
    small: Path,
    tmp_path: Path,
    what: str,
) -> None:
    text, teacher, config = corpus, digits, counting()
    if what == "text":
        text = write_documents(tmp_path / "a.jsonl", ["another one"])
    elif what == "teacher":
        teacher = sentencepiece
    elif what == "pattern":
        teacher = split_otherwise(small / "small-digits", tmp_path / "small-digits")
        assert teacher.table.sha256() == digits.table.sha256()
    else:
        config = counting(**{what: {"target": "chunk", "alpha": 1.0}[what]})
    path = checkpoint[1]
    with pytest.raises(XtokError, match=f"the checkpoint {path} is of another run") as error:
        estimate(byte_level, teacher, [text], config, checkpoint=path)
    assert error.value.hint.endswith(f"rm {path}")
    assert path.exists()


def split_otherwise(folder: Path, copy: Path) -> Tokenizer:
    """A tokenizer of the same tokens that takes digits one by one."""
    copy.mkdir()
    for file in folder.iterdir():
        content = file.read_text()
        if file.name == "tokenizer.json":
            content = content.replace(r"\\p{N}{1,3}", r"\\p{N}")
            assert content != file.read_text()
        (copy / file.name).write_text(content)
    return load_tokenizer(str(copy))


def test_a_damaged_checkpoint_is_refused(
    byte_level: Tokenizer, digits: Tokenizer, checkpoint: tuple[CountingPlan, Path]
) -> None:
    plan, path = checkpoint
    whole = path.read_bytes()
    places = [int(share * len(whole)) for share in (0.0, 0.1, 0.5, 0.95)]
    directory = whole.index(b"PK\x01\x02")  # of the zip file; its first entry's flags and method
    damaged = [
        *(whole[:place] for place in places),
        *(whole[:place] + b"\xff" * 40 + whole[place + 40 :] for place in places),
        whole[: directory + 8] + b"\x01\x00" + whole[directory + 10 :],  # encrypted
        whole[: directory + 10] + b"\x63\x00" + whole[directory + 12 :],  # an unknown method
    ]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(XtokError, match=f"the checkpoint {path} cannot be read: ") as error:
            count_text(plan, byte_level, digits, checkpoint=path)
        assert error.value.hint.endswith(f"rm {path}")


# Two sides that spell differently, and nothing to count


@pytest.fixture(scope="module")
def composing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that makes compatibility characters plain, as Claude 2's does."""
    folder = tmp_path_factory.mktemp("nfkc") / "nfkc"
    small_tokenizers.byte_level_bpe(folder, vocab_size=900, digits=1, normalizer="NFKC")
    return load_tokenizer(str(folder))


def test_documents_count_up_to_a_difference(
    byte_level: Tokenizer, composing: Tokenizer, tmp_path: Path
) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["1２34", "1,2", "４5"])
    plan = plan_counting(composing, byte_level, [path], counting(alpha=1))
    counts = count_text(plan, composing, byte_level)
    # "1２34" is 1 + 3 + 2 bytes, of which the NFKC side spells "1234": the first byte agrees.
    assert counts.totals == TextTotals(
        documents=3,
        differing=2,
        num_bytes=13,
        lost_bytes=9,
        student_tokens=4 + 3 + 2,
        teacher_tokens=counts.totals.teacher_tokens,
        starts=4,
    )
    names = [composing.table.tokens()[s] for s in (counts.counted.keys >> 32).tolist()]
    assert sorted(names) == [b",", b"1", b"2"]
    found = map_of_counts(counts, multitoken(composing, byte_level), plan, counting(alpha=1))
    assert any("2 documents" in note and "69.2%" in note for note in found.reports[-1].notes)


def test_an_unknown_token_ends_a_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from xtok.tokenizers import from_transformers

    rust = Rust(models.WordLevel({"[UNK]": 0, "▁one": 1, "▁two": 2}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rust.decoder = decoders.Metaspace(prepend_scheme="never")
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]")  # type: ignore[no-untyped-call]
    words = from_transformers(fast)
    path = write_documents(tmp_path / "a.jsonl", [" one two three one", " six"])
    plan = plan_counting(words, words, [path], counting(alpha=1))
    counts = count_text(plan, words, words)
    assert counts.counted.keys.tolist() == [1 << 32 | 1, 2 << 32 | 2]
    assert counts.counted.counts.tolist() == [1, 1]
    assert (counts.totals.differing, counts.totals.lost_bytes) == (2, 14)


def test_text_without_tokens_is_refused(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    for documents in ([], ["", ""]):
        path = write_documents(tmp_path / "a.jsonl", documents)
        with pytest.raises(XtokError, match=f"nothing can be counted: {len(documents)} documents"):
            estimate(byte_level, digits, [path])


def test_empty_documents_count_as_documents(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["", "2", ""])
    plan = plan_counting(byte_level, digits, [path], counting(alpha=1))
    totals = count_text(plan, byte_level, digits).totals
    assert totals == TextTotals(
        documents=3, num_bytes=1, student_tokens=1, teacher_tokens=1, starts=1
    )


def test_a_base_of_another_pair_is_refused(
    byte_level: Tokenizer, sentencepiece: Tokenizer, base: ProjectionMap, corpus: Path
) -> None:
    with pytest.raises(XtokError, match="teacher"):
        estimate(byte_level, sentencepiece, [corpus], base=base)


# build, and the commands


@pytest.mark.parametrize(("loss", "pinned"), [("p-kl", False), ("gold", True), ("h-kl", True)])
def test_build_for_a_loss(
    byte_level: Tokenizer, digits: Tokenizer, loss: str, pinned: bool
) -> None:
    config = BuildConfig.for_loss(loss)  # type: ignore[arg-type]
    assert (config.weights, config.top_k, config.scale_trick) == ("prior", 8, False)
    assert config.target == ("both" if loss == "p-kl" else "start")
    found = build(byte_level, digits, config)
    two, e = token(byte_level, b"2"), token(byte_level, b"e")
    exact = [naive.rows_of(found)[i] for i in (two, e)]
    pins = [[(token(digits, b"2"), 1.0)], [(token(digits, b"e"), 1.0)]]
    assert (exact == pins) == pinned
    assert max(len(row) for row in naive.rows_of(found).values()) <= 8
    assert not found.enable_scale_trick


def test_build_counts_on_text(
    byte_level: Tokenizer, digits: Tokenizer, corpus: Path, tmp_path: Path
) -> None:
    config = BuildConfig.for_loss("p-kl")
    found = build(byte_level, digits, config, texts=[corpus])
    assert [step["stage"] for step in found.history] == ["multitoken", "estimate"]
    alone = estimate(byte_level, digits, [corpus], counting(target="both"))
    assert saved(found, tmp_path) == saved(alone, tmp_path)


def test_what_is_counted_goes_with_counting() -> None:
    assert BuildConfig.for_loss("p-kl", target="chunk").target == "chunk"
    assert BuildConfig.for_loss("p-kl", weights="decay").target == "start"


def test_the_command_writes_what_it_read(
    cli: Cli, small: Path, corpus: Path, base: ProjectionMap, tmp_path: Path
) -> None:
    base.save(tmp_path / "base.safetensors")
    student, teacher = small / "small-byte-level", small / "small-digits"
    done = cli(
        "build", student, teacher,
        "--text", corpus, "--no-exact-match", "--output", "map.safetensors",
        "--initial-projection-path", "base.safetensors",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "map.safetensors\n"), done.stderr
    assert "120 documents" in done.stderr
    projection = mapfile.load(tmp_path / "map.safetensors")
    step = projection.history[-1]
    assert step["stage"] == "estimate"
    assert step["texts"] == [
        {
            "name": "a.jsonl",
            "size": corpus.stat().st_size,
            "sha256": texts.describe_text(corpus).sha256,
        }
    ]
    assert step["counted"]["documents"] == 120
    assert step["counted"]["student_tokens"] > step["counted"]["starts"] > 0
    assert step["options"]["alpha"] in ALPHAS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base.safetensors", "map.safetensors"]
    assert str(corpus.parent) not in json.dumps(projection.history)


def test_a_map_that_cannot_be_written_leaves_its_checkpoint(
    cli: Cli, small: Path, corpus: Path, base: ProjectionMap, tmp_path: Path
) -> None:
    base.save(tmp_path / "base.safetensors")
    models = [str(small / "small-byte-level"), str(small / "small-digits")]
    student, teacher = map(load_tokenizer, models)
    saved = tmp_path / "map.safetensors.checkpoint"
    plan = plan_counting(student, teacher, [corpus])
    count_text(plan, student, teacher, checkpoint=saved, checkpoint_seconds=-1)
    command = [
        sys.executable, "-m", "xtok", "build", "--student-model", models[0],
        "--teacher-model", models[1], "--text", str(corpus), "--output", "map.safetensors",
        "--initial-projection-path", "base.safetensors",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: map.safetensors cannot be written: File too large\n" in done.stderr
    assert saved.exists()
    again = cli(*command[3:])
    assert (again.returncode, again.stdout) == (0, "map.safetensors\n"), again.stderr
    assert not saved.exists()


def test_the_command_names_what_is_wrong(cli: Cli, small: Path, tmp_path: Path) -> None:
    pair = ("--student-model", small / "small-byte-level", "--teacher-model", small / "small.model")
    done = cli("build", *pair, "--text", "none-*.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no file none-*.txt\nhint: ")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    done = cli("build", *pair, "--text", "a.txt")
    assert done.returncode == 1
    assert "error: the text a.txt is not UTF-8: byte 0xe9 at offset 3, in line 1\n" in done.stderr
    assert cli("build", *pair, "--text", "a.txt", "--alpha", "0").returncode == 2
