"""`library_differences`: a line for each role and id that differs from AutoTokenizer."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

from xtok.tokenizers import Tokenizer, library_differences, load_tokenizer

TEXT = "The ship"
BOS, EOS, PAD = 1194, 1195, 1198
THE, SH, IP = 354, 652, 79


def test_no_differences_if_both_give_the_same_ids(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    texts = [TEXT, "", "<think>x\n</think> ", "<|begin_of_text|>x<|end_of_text|>"]
    assert library_differences(byte_level, texts) == []
    assert library_differences(load_tokenizer(byte_level.library), texts) == []
    assert sentencepiece.library is None
    assert library_differences(sentencepiece, texts) == []


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ((BOS, THE, SH, IP), ""),
        ((BOS, THE, SH, IP, EOS), ""),  # set as the collator's `eos` requires
        ((BOS, THE), ""),  # cut
        ((THE, SH, IP), f"[{THE}, {SH}, {IP}]"),
        ((PAD, THE, SH, IP), f"[{PAD}, {THE}, {SH}, {IP}]"),
        ((BOS, BOS, THE, SH, IP), f"[{BOS}, {BOS}, {THE}, {SH}, {IP}]"),
        ((BOS, THE, SH, IP, PAD), f"[{IP}, {PAD}] from token 3"),
        ((BOS, THE, 0), f"[{THE}, 0] from token 1"),
    ],
)
def test_rows_of_a_batch(byte_level: Tokenizer, ids: Sequence[int], shown: str) -> None:
    differences = library_differences(byte_level, [TEXT], [ids])
    assert len(differences) == bool(shown)
    assert not shown or f"is {shown}, expected AutoTokenizer's [" in differences[0]


def test_a_text_that_starts_with_bos_gets_no_second_bos(byte_level: Tokenizer) -> None:
    text = f"<|begin_of_text|>{TEXT}"
    assert library_differences(byte_level, [text], [[BOS, THE, SH, IP]]) == []


def test_roles_that_differ_from_the_library_are_listed(byte_level: Tokenizer) -> None:
    changed = copy.copy(byte_level)
    changed.declared = {**changed.declared, "bos": {PAD: "a test"}, "pad": {}}
    assert library_differences(changed, []) == [
        f"bos is id {PAD}, expected AutoTokenizer's id {BOS}",
        f"pad is none, expected AutoTokenizer's id {PAD}",
    ]  # fmt: skip


def test_number_of_rows_must_match_the_texts(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="0 rows, expected 1"):
        library_differences(byte_level, [TEXT], [])
