"""`Pair`: what follows from two vocabularies, and whether a map is of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make import byte_ranks

import xtok
from xtok import XtokError
from xtok.inspection.report import examine
from xtok.maps.admit import admit, at_widths_of, is_swapped, pair_of_maps
from xtok.report.page.search import pack
from xtok.tokenizers import Tokenizer
from xtok.vocab import pair as module


def test_each_fact_is_computed_once(
    byte_level: Tokenizer, digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is built of a pair: one matching of bytes and roles each way."""
    calls: list[str] = []
    for name in ("match_bytes", "match_roles"):
        real = getattr(module, name)

        def counted(*tables: object, name: str = name, real: object = real) -> object:
            calls.append(name)
            return real(*tables)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    pair = xtok.pair(byte_level, digits)
    m = xtok.build(pair)
    xtok.events(pair)
    xtok.reapply_exact(m, pair)
    assert sorted(calls) == ["match_bytes"] * 2 + ["match_roles"] * 2
    assert xtok.pair(pair) is pair


def test_functions_take_a_pair_for_two_models(byte_level: Tokenizer, digits: Tokenizer) -> None:
    pair = xtok.pair(byte_level, digits)
    ours, theirs = xtok.build(pair), xtok.build(byte_level, digits)
    assert (ours.weights == theirs.weights).all()
    assert (ours.teacher_ids == theirs.teacher_ids).all()


def test_one_model_alone_or_beside_a_pair(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no teacher model"):
        xtok.pair(byte_level)
    with pytest.raises(ValueError, match="has both models"):
        xtok.pair(xtok.pair(byte_level, byte_level), byte_level)


def test_a_pair_is_as_wide_as_its_map(small: Path, digits: Tokenizer) -> None:
    wide = xtok.load_tokenizer(small / "small-byte-level", vocab_size=3000)
    m = xtok.build(wide, digits)
    own = xtok.load_tokenizer(small / "small-byte-level")
    own.vocabulary = replace(own.vocabulary, width_source="tokenizer")
    pair = at_widths_of(xtok.pair(own, digits), m)
    assert pair.shape == (3000, len(digits.table))
    assert pair.tables[0].sha256() == own.table.sha256() == wide.table.sha256()
    assert (pair.tables[0].types == wide.table.types).all()
    assert pair.tokenizers[0].segment(b"hello") == own.segment(b"hello")
    assert admit(pair, m) is m
    with pytest.raises(XtokError) as caught:
        admit(xtok.pair(own, digits), m)
    assert caught.value.parameter == "student_vocab_size"


@pytest.mark.parametrize(("width", "given"), [(700, 896), (1000, 1000)])
def test_the_width_that_a_side_without_tokens_needs(
    byte_level: Tokenizer, digits: Tokenizer, width: int, given: int
) -> None:
    """`digits` is 896 wide and has 800 tokens: a narrower matrix can be made wider."""
    m = xtok.build(byte_level, "bytes")
    teacher = replace(m.teacher, table=None, vocab_size=width, width_source="map")
    with pytest.raises(XtokError) as caught:
        admit(xtok.pair(byte_level, digits), replace(m, teacher=teacher))
    assert caught.value.parameter == "teacher_vocab_size"
    assert f"the width {given} with" in caught.value.hint


def test_swapped_sides_are_called_swapped(byte_level: Tokenizer, digits: Tokenizer) -> None:
    m = xtok.build(byte_level, digits)
    swapped = xtok.pair(digits, byte_level)
    with pytest.raises(XtokError, match="the sides are swapped"):
        admit(swapped, m)
    with pytest.raises(XtokError, match="the sides are swapped"):
        xtok.explain(m, pair=xtok.pair(digits, byte_level))
    checks = xtok.verify(m, xtok.pair(digits, byte_level)).checks
    assert [check.name for check in checks if check.level == "failed"] == ["sides"]
    same = xtok.build(digits, digits)
    assert not is_swapped(pair_of_maps(m), same)
    with pytest.raises(XtokError, match="other tokens"):
        admit(pair_of_maps(m), same)


def test_maps_without_tokens_take_those_of_another(
    byte_level: Tokenizer, digits: Tokenizer
) -> None:
    m = xtok.build(byte_level, digits)
    bare = replace(m, teacher=replace(m.teacher, table=None))
    pair = pair_of_maps(bare, m)
    assert pair.teacher is m.teacher
    assert admit(pair, bare).teacher.table is m.teacher.table


def test_pieces_are_those_of_the_tokens_asked_for_in_their_order(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "ab", "abc", "cd")
    pair = xtok.pair(student, byte_ranks(tmp_path / "teacher.tiktoken", "ab"))
    nothing = xtok.pair(student, "null:5")
    for asked, ids, expected in (
        (pair, [258, 257], ([99, 100, 256, 99], [2, 2])),
        (pair, [256, 258], ([256, 99, 100], [1, 2])),
        (pair.reversed, [256], ([256], [1])),
        (nothing, [256, 97], ([], [0, 0])),
    ):
        pieces, counts = asked.pieces(np.array(ids))
        assert (pieces.tolist(), counts.tolist()) == expected


def test_each_token_is_spelled_once(
    byte_level: Tokenizer, sentencepiece: Tokenizer, monkeypatch: pytest.MonkeyPatch,
    short_prior: None,
) -> None:  # fmt: skip
    """By whatever needs it: maps of pieces, synthetic text, events, the search of a page."""
    spelled: Counter[tuple[str, bytes]] = Counter()
    real = Tokenizer.segment_batch

    def counted(self: Tokenizer, pieces: Sequence[bytes]) -> list[list[int] | None]:
        spelled.update((self.vocabulary.model_id, piece) for piece in pieces)
        return real(self, pieces)

    monkeypatch.setattr(Tokenizer, "segment_batch", counted)
    pair = xtok.pair(byte_level, sentencepiece)
    m = xtok.build(pair)
    xtok.multitoken(pair)
    xtok.events(pair)
    xtok.build(pair, config=xtok.BuildConfig.for_loss("h-kl"))
    pack(examine([m], pair=pair))
    tables = {side.vocabulary.model_id: side.table for side in pair.tokenizers}
    assert spelled.keys() >= {
        ("small.model", token) for token in byte_level.table.tokens() if token
    }
    for (speller, token), times in spelled.items():
        [other] = (table for name, table in tables.items() if name != speller)
        assert times == other.tokens().count(token), (speller, token)
    assert pair.in_form("text") is pair.in_form("text")
