"""A pass over text: its counts do not depend on how the text is read."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
import pytest
import small_tokenizers
from checks import not_none, one_core
from command_lines import write_documents
from make_tokenizers import token
from pyarrow import parquet

import xtok
from xtok.alignment.aligner import TokenAligner
from xtok.building.counting import counts as counting
from xtok.building.counting.pair_text import CountPlan, PairText, TextTotals
from xtok.config import Target
from xtok.conversation import texts
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair


def figures(text: PairText) -> dict[str, Any]:
    """Return all counts of a text; the order of chunks does not matter."""
    parts = {
        part: [array.tolist() for array in getattr(text, part).pairs()]
        for part in ("counts", "held_out")
    }
    tokens = [array.tolist() for array in text.tokens]
    return {
        **parts,
        "tokens": tokens,
        "totals": asdict(text.totals),
        "sources": [*map(asdict, text.sources)],
    }


def source(path: Path) -> dict[str, object]:
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    return {"name": path.name, "size": len(content), "sha256": sha256}


# Counts


def test_a_tiny_text_is_counted_pair_by_pair(pair: Pair, tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["201", "20"])
    # byte-level has a token for each digit: 2 0 1 and 2 0; the other side groups up to three.
    student, teacher = pair.tokenizers
    two, zero, one = (token(student, digit) for digit in (b"2", b"0", b"1"))
    whole, twenty = token(teacher, b"201"), token(teacher, b"20")
    starts = {(two, whole): 1, (two, twenty): 1}
    chunks = dict.fromkeys([(two, whole), (zero, whole), (one, whole)], counting.UNIT // 3)
    chunks |= dict.fromkeys([(two, twenty), (zero, twenty)], counting.UNIT // 2)
    both = chunks | {pair: chunks[pair] + counting.UNIT for pair in starts}
    for target, expected in zip(get_args(Target), (starts, chunks, both), strict=True):
        text = PairText.read(pair, path, CountPlan(target=target))
        counts = dict(zip(*(array.tolist() for array in text.counts.pairs()), strict=True))
        assert counts == {s << 32 | t: n for (s, t), n in expected.items()}
        assert text.totals == TextTotals(
            documents=2, num_bytes=5, student_tokens=5, teacher_tokens=2, starts=2
        )
        assert [int(side_tokens.sum()) for side_tokens in text.tokens] == [5, 2]
        assert text.tokens[0][zero] == 2
        assert [*map(asdict, text.sources)] == [source(path)]


def test_a_single_tokenizer_counts_its_tokens(pair: Pair, tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["the cat", ""])
    [counts] = PairText.read(Pair(pair.student, pair.teacher, pair.student_tokenizer), path).tokens
    ids = pair.tokenizers[0].library_ids(["the cat"])[0]
    assert counts.tolist() == np.bincount(ids, minlength=len(counts)).tolist()


def test_a_difference_excludes_only_its_own_chunk(
    byte_level: Tokenizer, composing: Tokenizer, tmp_path: Path
) -> None:
    texts = ["1２34, and 201 steps down to the sea", "1,2", "from the light: ４"]
    path = write_documents(tmp_path / "a.jsonl", texts)
    both = xtok.load_pair(composing, byte_level)
    text = PairText.read(both, path, CountPlan(per_document=True))
    # `２` and `４` have 3 bytes each; the side with NFKC has a single byte for each.
    ids = [side.library_ids(texts) for side in both.tokenizers]
    aligner = TokenAligner(both)
    chunks = [[c for c in aligner.pairs(s, t) if c.is_correct] for s, t in zip(*ids, strict=True)]
    assert not_none(text.per_document).num_chunks.tolist() == [
        len(side_tokens) for side_tokens in chunks
    ]
    tokens = [sum(map(len, side)) for side in ids]
    assert text.totals == TextTotals(
        documents=3, differing=2, num_bytes=59, lost_bytes=6, student_tokens=tokens[0],
        teacher_tokens=tokens[1], starts=sum(map(len, chunks)),
    )  # fmt: skip
    first = Counter(
        c.student_ids[0] << 32 | c.teacher_ids[0]
        for document_chunks in chunks
        for c in document_chunks
    )
    assert dict(zip(*(array.tolist() for array in text.pairs), strict=True)) == first
    sentence = (
        "6 bytes of text left out (10.17%, in 2 documents) because the two sides differ, first in "
        "a.jsonl: '12' for the student, '1２' for the teacher"
    )
    assert not_none(text.left_out).sentence == sentence
    config = xtok.BuildConfig(exact_match=False)
    counted = xtok.build(*both.tokenizers, config, texts=[path], initial=xtok.multitoken(both))
    assert sentence in counted.reports[-1].notes
    assert sentence in xtok.evaluate(both, counted, [path]).notes
    [check] = [c for c in xtok.doctor(*both.tokenizers, [path]).pair_checks if c.name == "text"]
    assert (check.level, check.message) == ("warning", sentence)


def test_a_space_marker_in_a_text_excludes_only_its_own_chunk(
    byte_level: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    """SentencePiece reads U+2581 as a space, as Gemma's tokenizer does."""
    text = small_tokenizers.ENGLISH
    path = write_documents(tmp_path / "a.jsonl", [text.replace(" the ", " the\u2581", 1), text])
    both = xtok.load_pair(sentencepiece, byte_level)
    marked = PairText.read(both, path)
    assert (marked.totals.differing, marked.totals.lost_bytes) == (1, 4)
    whole = PairText.read(both, write_documents(tmp_path / "b.jsonl", [text, text]))
    assert whole.left_out is None
    assert (whole.totals.starts, marked.totals.starts) == (1532, 1531)


def test_an_unknown_token_excludes_only_its_own_text(tmp_path: Path) -> None:
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
    text = PairText.read(xtok.load_pair(words, words), path)
    assert [array.tolist() for array in text.pairs] == [[1 << 32 | 1, 2 << 32 | 2], [2, 1]]
    assert (text.totals.differing, text.totals.lost_bytes) == (2, 10)


def test_text_without_tokens_is_refused_and_empty_documents_count(
    pair: Pair, tmp_path: Path
) -> None:
    for documents in ([], ["", ""]):
        path = write_documents(tmp_path / "a.jsonl", documents)
        with pytest.raises(XtokError, match=f"{len(documents)} documents"):
            PairText.read(pair, path)
    path = write_documents(tmp_path / "a.jsonl", ["", "2", ""])
    assert PairText.read(pair, path).totals == TextTotals(
        documents=3, num_bytes=1, student_tokens=1, teacher_tokens=1, starts=1
    )


def test_a_long_run_of_the_same_character_needs_little_memory(pair: Pair, tmp_path: Path) -> None:
    """For each document, only its distinct chunks are kept, not its tokens."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"\1" * 3_000_000))
    text = not_none(PairText.read(pair, path, CountPlan(per_document=True)).per_document)
    assert len(text.groups) == 46
    assert len(text.documents) < 300
    assert text.num_chunks.sum() > 100_000


# Counts do not depend on how the text is read


@pytest.mark.parametrize("target", get_args(Target))
def test_counts_do_not_depend_on_batches_threads_or_compression(
    pair: Pair, corpus: Path, tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = CountPlan(target=target, hold_out=True)
    before = set(threading.enumerate())
    with one_core():
        once = PairText.read(pair, corpus, wanted)
    assert once.totals.documents == 120
    assert once.totals.held_out > 0
    assert figures(PairText.read(pair, corpus, wanted)) == figures(once)
    assert set(threading.enumerate()) <= before
    packed, in_groups = tmp_path / "a.jsonl.gz", tmp_path / "a.parquet"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    documents = [json.loads(line) for line in corpus.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(documents), in_groups, row_group_size=20)
    monkeypatch.setattr(texts, "BATCH_CHARACTERS", 100)
    for path in (packed, in_groups):
        read = figures(PairText.read(pair, path, wanted))
        assert read == {**figures(once), "sources": [source(path)]}


def test_progress_counts_every_byte_on_disk(
    pair: Pair, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"  # Parquet is read by row groups, not by bytes
    lines = ["the cat sat on the mat", "201"] * 2
    parquet.write_table(pyarrow.table({"text": lines}), path, row_group_size=2)
    steps: list[tuple[int, int]] = []
    size = path.stat().st_size + corpus.stat().st_size

    @contextmanager
    def watching(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
        assert (label, total) == ("counting", size)
        yield lambda size, tokens: steps.append((size, tokens))

    monkeypatch.setattr(texts, "BATCH_CHARACTERS", 1000)
    text = PairText.read(pair, [path, corpus], progress=watching)
    assert sum(size for size, _ in steps) == size
    assert sum(tokens for _, tokens in steps) == text.totals.student_tokens
    assert len(steps) > 4
