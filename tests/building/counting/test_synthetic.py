"""Vocabularies as a corpus: deterministic through a seed, and rows are probabilities."""

from __future__ import annotations

import base64
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import naive
import numpy as np
import pytest
from conftest import Load
from hypothesis import given
from hypothesis import strategies as st

import xtok
from xtok.alignment.sequences import FlatIds
from xtok.building.counted import synthetic_map
from xtok.building.counting import synthetic
from xtok.building.counting.encode import TextEncoder
from xtok.building.counting.synthetic import TextKind, synthetic_edges, text_kind
from xtok.building.exact import find_matches
from xtok.config import BuildConfig, Target
from xtok.maps.edges import Edges
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair


def rows(edges: Edges) -> dict[int, dict[int, float]]:
    by_student: dict[int, dict[int, float]] = {}
    for s, t, w in zip(*(array.tolist() for array in edges), strict=True):
        row = by_student.setdefault(s, {})
        row[t] = row.get(t, 0.0) + w
    return by_student


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (b" the", TextKind.WORD),
        ("größe".encode(), TextKind.CONTINUATION),
        (b" 12", TextKind.NUMBER),
        (b"7", TextKind.NUMBER),
        (b"\n\n", TextKind.SPACE),
        (b" ", TextKind.SPACE),
        (b"();", TextKind.SYMBOL),
        (b" x1", TextKind.SYMBOL),
        ("灯台".encode(), TextKind.UNSPACED),
        (" の".encode(), TextKind.UNSPACED),
        ("маяк".encode(), TextKind.CONTINUATION),
        (b"\xe7\x81", None),
        (b"", None),
    ],
)
def test_text_kind_of_a_token(token: bytes, kind: TextKind | None) -> None:
    assert text_kind(token) == kind


def test_the_same_texts_are_drawn_each_time(pair: Pair) -> None:
    first, again, other = (synthetic_edges(pair, num_texts=n)[0] for n in (300, 300, 299))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert rows(first) != rows(other)


def test_a_tokenizer_with_itself_is_mostly_the_identity(byte_level: Tokenizer) -> None:
    by_student = rows(
        synthetic_edges(xtok.load_pair(byte_level, byte_level), num_texts=2000)[0].normalized()
    )
    text_ids = byte_level.table.text_ids.tolist()
    assert sorted(by_student) == text_ids
    assert max(abs(sum(row.values()) - 1) for row in by_student.values()) < 1e-9
    largest = [max(row, key=row.__getitem__) == s for s, row in by_student.items()]
    assert np.mean(largest) > 0.97
    assert np.mean([by_student[s].get(s, 0.0) for s in text_ids]) > 0.75


vocabularies = st.lists(st.text("ab", min_size=1, max_size=9), unique=True, min_size=1).map(
    lambda tokens: {token.encode(): index for index, token in enumerate(tokens)}
)


@given(student=vocabularies, teacher=vocabularies, most=st.sampled_from([2, 32]))
def test_prefixes_equal_those_of_plain_loops(
    student: dict[bytes, int], teacher: dict[bytes, int], most: int
) -> None:
    expected: dict[tuple[int, int], float] = {}
    for token, s in student.items():
        shorter = [(len(t), i) for t, i in teacher.items() if token.startswith(t)]
        longer = [i for t, i in teacher.items() if t.startswith(token) and t != token]
        row = ([i for _, i in sorted(shorter)] + longer)[:most]
        total = sum(1 / (t + 1000) for t in row)
        expected |= {(s, t): synthetic.FALLBACK / (t + 1000) / total for t in row}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "PREFIXES_PER_ROW", most)
        s_ids, t_ids, weights = (array.tolist() for array in synthetic.prefixes(student, teacher))
    by_pair = dict(zip(zip(s_ids, t_ids, strict=True), weights, strict=True))
    assert by_pair == pytest.approx(expected)


def test_a_changed_text_does_not_exclude_other_texts(
    byte_level: Tokenizer, composing: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several texts are encoded at a time; counting continues after a difference."""
    drawn = ["Q", "Q", "２Q", *["Q"] * 27]
    monkeypatch.setattr(synthetic.SyntheticSource, "texts", lambda self, n: drawn[:n])
    advanced: list[int] = []

    @contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
        yield advanced.append

    pair = xtok.load_pair(byte_level, composing)
    edges, _ = synthetic_edges(pair, num_texts=len(drawn), progress=progress)
    q_ids = [side.table.canonical_ids()[b"Q"] for side in pair.tokenizers]
    assert sum(advanced) == 30
    # Q is counted 30 times as a whole token, and as the first piece of other tokens.
    assert rows(edges)[q_ids[0]][q_ids[1]] == pytest.approx(30 + 1 / 3, abs=0.03)


def test_each_text_is_encoded_once_even_if_a_side_changes_all(
    byte_level: Tokenizer, composing: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic.SyntheticSource, "texts", lambda self, n: ["２Q"] * n)
    encoded: list[str] = []
    start_encoding = TextEncoder.start_encoding

    def recorded(self: TextEncoder, texts: Sequence[str]) -> Callable[[], list[FlatIds]]:
        encoded.extend(texts)
        return start_encoding(self, texts)

    monkeypatch.setattr(TextEncoder, "start_encoding", recorded)
    synthetic_edges(xtok.load_pair(byte_level, composing), num_texts=100)
    assert sum(text.count("Q") for text in encoded) == 100


def test_a_long_token_needs_memory_for_its_bytes_only(tmp_path: Path) -> None:
    """Texts by rank would contain the token at every tenth position; its prefixes are not keys."""
    words = [f" {a}{b}".encode() for a in "abcdefghijkl" for b in "aeiou"]
    sides = []
    for name, first in (("long", [b" " + b"ab" * 150_000]), ("short", [])):
        tokens = [*(bytes([b]) for b in range(256)), *first, *words]
        lines = (f"{base64.b64encode(t).decode()} {rank}" for rank, t in enumerate(tokens))
        (tmp_path / f"{name}.tiktoken").write_text("\n".join(lines) + "\n")
        sides.append(load_tokenizer(f"{tmp_path}/{name}.tiktoken@ ?\\w+|\\s+|[^\\s\\w]+"))
    tracemalloc.start()
    try:
        edges, unspelled = synthetic_edges(
            xtok.load_pair(sides[0], sides[1]), "both", num_texts=300
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not unspelled
    assert peak < 100_000_000
    by_student = rows(edges)
    # the long token is spelled nevertheless
    assert by_student[256][sides[1].table.canonical_ids()[b" "]] > 0


def test_rows_of_the_stage_are_probabilities(to_pieces: Pair) -> None:
    config = BuildConfig(weights="synthetic", scale_trick=False)
    projection, _ = synthetic_map(to_pieces, config, find_matches(to_pieces, config))
    by_row, (byte_level, sentencepiece) = naive.map_rows(projection), to_pieces.tokenizers
    assert all(sum(w for _, w in row) == pytest.approx(1, abs=1e-5) for row in by_row.values())
    assert set(byte_level.table.text_ids.tolist()) <= set(by_row)
    assert [(step["stage"], step["options"]) for step in projection.history] == [
        ("count", {"text": "synthetic", "target": "start", "top_k": 32, "special_tokens": "roles"})
    ]
    # Where both sides split words alike, a space starts a word more often than it stands alone.
    [the] = byte_level.segment(b" the")
    best, weight = by_row[the][0]
    assert sentencepiece.table.tokens()[best] in (b" the", b" th", b" t")
    assert weight < 1


def test_chunks_keep_all_the_pieces_of_a_token(to_pieces: Pair) -> None:
    """The target "start" counts only the first piece of a token; P-KL averages over the chunk."""
    byte_level, sentencepiece = to_pieces.tokenizers
    starts, chunks, both = (
        rows(synthetic_edges(to_pieces, target, num_texts=2000)[0].normalized())
        for target in get_args(Target)
    )
    pieces = sentencepiece.segment_batch(byte_level.table.tokens())
    several = [s for s, ids in enumerate(pieces) if ids and len(set(ids)) > 1]
    least = [
        [min(weights[s].get(t, 0.0) for t in pieces[s] or ()) for s in several]
        for weights in (starts, chunks, both)
    ]
    assert np.mean(least[0]) < 0.05 < 0.15 < np.mean(least[2]) < np.mean(least[1])
    assert min(least[1]) > 0
    [the] = byte_level.segment(b" the")
    assert sum(both[the].values()) == pytest.approx(1)


@pytest.mark.real
def test_word_starts_of_real_vocabularies_match(load_real: Load) -> None:
    llama, qwen = load_real("llama3.tiktoken"), load_real("qwen.tiktoken")
    by_student = rows(
        synthetic_edges(xtok.load_pair(llama, qwen), num_texts=20_000)[0].normalized()
    )
    assert max(abs(sum(row.values()) - 1) for row in by_student.values()) < 1e-9
    for word in (b" the", b" and", " größ".encode(), "です".encode()):
        [s], [t] = llama.segment(word)[:1], qwen.segment(word)[:1]
        assert max(by_student[s], key=by_student[s].__getitem__) == t
