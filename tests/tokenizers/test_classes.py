"""Classes of tokens: digits by length, scripts, whitespace, part of a character."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Load
from hypothesis import given
from hypothesis import strategies as st

from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.classes import TokenClass, num_digits, token_classes
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType

C = TokenClass


TEXTS = {
    C.DIGITS_1: ["7"],
    C.DIGITS_2: [" 42", "１０", "۱۵"],
    C.DIGITS_3: ["201"],
    C.DIGITS_MORE: ["2024", "123456789012345678901234567890"],
    C.DIGITS_MIXED: ["1.", "x2"],
    C.PUNCTUATION: ["²", " (", "€"],
    C.SPACES: ["    ", "\t", "\u3000"],
    C.LINE_BREAKS: ["\n\n", "  \r\n"],
    C.LATIN: [" the", ".append", "é", "e\u0301", "Ａ", "nº"],
    C.GREEK: ["ευ"],
    C.CYRILLIC: [" тип"],
    C.HEBREW: ["של"],
    C.ARABIC: ["کس"],
    C.DEVANAGARI: ["ुक"],
    C.THAI: ["ถึง"],
    C.HAN: ["灯塔", "々"],
    C.KANA: ["ー", "ｶ", "食べる"],
    C.HANGUL: ["등대"],
    C.OTHER_SCRIPT: ["ქარ"],
    C.SEVERAL_SCRIPTS: [" ΔE"],
    C.EMOJI: [" 🙂\n", "👩\u200d🔧", "❤\ufe0f"],
    C.OTHER: ["\x00", "\u202e", "\u0301"],
}


def classes_of(texts: list[str]) -> list[int]:
    entries = [TokenEntry(i, TokenType.NORMAL, text.encode()) for i, text in enumerate(texts)]
    classes: list[int] = token_classes(Decoded(entries).table(len(texts))).tolist()
    return classes


def test_class_of_a_text() -> None:
    for expected, texts in TEXTS.items():
        for text in texts:
            assert classes_of([text]) == [expected], text


def test_classes_of_a_table() -> None:
    entries = [
        TokenEntry(0, TokenType.CONTROL, b"<s>"),
        TokenEntry(1, TokenType.UNKNOWN, b"<unk>"),
        TokenEntry(2, TokenType.BYTE, b"7"),
        TokenEntry(3, TokenType.BYTE, b"\xe4"),
        TokenEntry(4, TokenType.NORMAL, b"\xe4\xb8"),
        TokenEntry(5, TokenType.NORMAL, b"\xad\xe6\x96\x87"),
        TokenEntry(6, TokenType.USER_DEFINED, b"<think>"),
        TokenEntry(7, TokenType.NORMAL, b""),
    ]
    table = Decoded(entries).table(9)
    classes = token_classes(table)
    assert classes.dtype == np.uint8
    expected = [C.CONTROL] * 2 + [C.DIGITS_1] + [C.PARTIAL_UTF8] * 3 + [C.LATIN] + [C.UNUSED] * 2
    assert classes.tolist() == expected


def test_classes_of_a_table_are_computed_once() -> None:
    table = load_tokenizer("bytes").table
    assert token_classes(table) is token_classes(table)


def test_an_empty_table() -> None:
    table = Decoded([]).table(2)
    assert token_classes(table).tolist() == [C.UNUSED, C.UNUSED]


def test_labels_are_different_and_short() -> None:
    labels = [member.label for member in C]
    assert len(set(labels)) == len(C)
    assert max(map(len, labels)) == 20


@given(st.lists(st.text(min_size=1), min_size=1, max_size=8))
def test_the_class_of_a_token_does_not_depend_on_its_neighbours(texts: list[str]) -> None:
    assert classes_of(texts) == [classes_of([text])[0] for text in texts]


def test_numbers_are_ascii_digits_with_spaces_around() -> None:
    tokens = ["7", " 42", "201 ", "１０", "1.", "x2", " ", "20 24"]
    entries = [TokenEntry(i, TokenType.NORMAL, text.encode()) for i, text in enumerate(tokens)]
    table = Decoded(entries).table(9)
    assert num_digits(table).tolist() == [1, 2, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "by_class", "numbers"),
    [
        ("llama3.tiktoken", [132, 1012, 0], 1100),
        ("qwen.tiktoken", [2, 0, 0], 0),
        ("mistral-v3.model", [0, 0, 0], 0),
    ],
)
def test_numbers_of_real_vocabularies(
    load_real: Load, name: str, by_class: list[int], numbers: int
) -> None:
    table = load_real(name).table
    counts = np.bincount(token_classes(table), minlength=len(C))
    assert counts[[C.DIGITS_2, C.DIGITS_3, C.DIGITS_MORE]].tolist() == by_class
    assert (num_digits(table) > 1).sum() == numbers
