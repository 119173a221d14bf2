"""`Pair`: facts of two vocabularies, each computed once; maps of other pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from make_tokenizers import byte_ranks

import xtok
from xtok.building.build import build
from xtok.inspection.page.search import pack_columns
from xtok.inspection.report import examine
from xtok.tokenizers import Tokenizer
from xtok.tokenizers import pairs as module


def test_each_fact_is_computed_once(
    byte_level: Tokenizer, digits: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("match_bytes", "match_roles"):
        real = getattr(module, name)

        def counted(*tables: object, name: str = name, real: object = real) -> object:
            calls.append(name)
            return real(*tables)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    pair = xtok.load_pair(byte_level, digits)
    m = build(pair)
    xtok.events(pair)
    xtok.reapply_exact(m, pair)
    assert sorted(calls) == ["match_bytes"] * 2 + ["match_roles"] * 2


def test_a_map_of_a_pair_equals_that_of_its_models(
    byte_level: Tokenizer, digits: Tokenizer
) -> None:
    pair = xtok.load_pair(byte_level, digits)
    ours, theirs = build(pair), xtok.build(byte_level, digits)
    assert (ours.weights == theirs.weights).all()
    assert (ours.teacher_ids == theirs.teacher_ids).all()


def test_load_pair_returns_a_pair_and_rejects_a_single_model(digits: Tokenizer) -> None:
    pair = xtok.load_pair(digits, "bytes")
    assert xtok.load_pair(pair) is pair
    for wrong in ((digits,), (pair, digits)):
        for function in (xtok.load_pair, xtok.build, xtok.events):
            with pytest.raises(TypeError, match="pass two models"):
                function(*wrong)
    with pytest.raises(ValueError, match="event-kl"):
        xtok.build(pair, for_loss="event-kl")  # type: ignore[arg-type]


def test_pieces_keep_the_order_of_the_requested_tokens(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "ab", "abc", "cd")
    pair = xtok.load_pair(student, byte_ranks(tmp_path / "teacher.tiktoken", "ab"))
    nothing = xtok.load_pair(student, "null:5")
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
    few_synthetic_texts: None,
) -> None:  # fmt: skip
    spelled: Counter[tuple[str, bytes]] = Counter()
    real = Tokenizer.segment_batch

    def counted(self: Tokenizer, pieces: Sequence[bytes]) -> list[list[int] | None]:
        spelled.update((self.vocabulary.model_id, piece) for piece in pieces)
        return real(self, pieces)

    monkeypatch.setattr(Tokenizer, "segment_batch", counted)
    pair = xtok.load_pair(byte_level, sentencepiece)
    m = build(pair)
    xtok.multitoken(pair)
    xtok.events(pair)
    build(pair, config=xtok.BuildConfig.for_loss("h-kl"))
    pack_columns(examine([m], pair=pair))
    tables = {side.vocabulary.model_id: side.table for side in pair.tokenizers}
    assert spelled.keys() >= {
        ("small.model", token) for token in byte_level.table.tokens() if token
    }
    for (speller, token), times in spelled.items():
        [other] = (table for name, table in tables.items() if name != speller)
        assert times == other.tokens().count(token), (speller, token)
    assert pair.in_form("text") is pair.in_form("text")
