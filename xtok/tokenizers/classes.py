"""Classify tokens: digits, punctuation, whitespace, scripts, partial characters."""

from __future__ import annotations

import functools
import unicodedata
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from xtok.errors import XtokError
from xtok.tokenizers.table import TokenTable, utf8_text


class TokenClass(IntEnum):
    """Classes of tokens, in the order in which reports list them.

    Spaces around a token are ignored. Letters take precedence over punctuation and emoji, so
    `.append` is Latin. Digits are decimal digits of any script. `x2` and `1.` are DIGITS_MIXED. A
    token with Han characters and kana is KANA. A PARTIAL_UTF8 token contains part of a character,
    so the token is not valid UTF-8.
    """

    DIGITS_1 = "1 digit"
    DIGITS_2 = "2 digits"
    DIGITS_3 = "3 digits"
    DIGITS_MORE = "4 digits or more"
    DIGITS_MIXED = "digits with others"
    PUNCTUATION = "punctuation, symbols"
    SPACES = "spaces, tabs"
    LINE_BREAKS = "line breaks"
    LATIN = "Latin"
    GREEK = "Greek"
    CYRILLIC = "Cyrillic"
    HEBREW = "Hebrew"
    ARABIC = "Arabic"
    DEVANAGARI = "Devanagari"
    THAI = "Thai"
    HAN = "Han"
    KANA = "Kana, or with Han"
    HANGUL = "Hangul"
    OTHER_SCRIPT = "other script"
    SEVERAL_SCRIPTS = "several scripts"
    EMOJI = "emoji"
    PARTIAL_UTF8 = "partial UTF-8"
    OTHER = "other characters"
    CONTROL = "control tokens"
    UNUSED = "unused ids"

    label: str  # name of the class in reports

    def __new__(cls, label: str) -> TokenClass:
        """Number the classes from 0 in the order of definition."""
        member = int.__new__(cls, len(cls.__members__))
        member._value_, member.label = len(cls.__members__), label
        return member


def class_label(name: str) -> str:
    """Convert the name of a class, in lower case, to its label in reports."""
    return TokenClass[name.upper()].label


def classes_named(name: str) -> tuple[TokenClass, ...]:
    """Return the class with a name or label. The name `digits` returns all classes of digits.

    Upper and lower case are equivalent. Raises an `XtokError` for an unknown class.

    >>> [member.name for member in classes_named("han")], len(classes_named("digits"))
    (['HAN'], 5)
    """
    member = name.upper().replace("-", "_")
    members = tuple(m for m in TokenClass if m.name == member or m.label.upper() == name.upper())
    members = members or tuple(m for m in TokenClass if m.name.startswith(f"{member}_"))
    if not members:
        names = ", ".join(["digits", *(m.name.lower() for m in TokenClass)])
        raise XtokError(f"unknown class of tokens {name!r}", hint=f"the classes are: {names}")
    return members


# Each class of characters is a bit. A token combines the bits of its characters.
_BIT = {member: 1 << member for member in TokenClass}
_DIGIT = _BIT[TokenClass.DIGITS_1]
_JOINER = _BIT[TokenClass.CONTROL]  # marks, joiners and selectors
_AROUND = _BIT[TokenClass.SPACES] | _BIT[TokenClass.LINE_BREAKS] | _JOINER

_OF_SCRIPTS = tuple(TokenClass)[TokenClass.LATIN : TokenClass.SEVERAL_SCRIPTS]
_NO_SCRIPTS = TokenClass.EMOJI, TokenClass.PUNCTUATION, TokenClass.OTHER
_BY_CHARACTER = (*_OF_SCRIPTS, *_NO_SCRIPTS, TokenClass.LINE_BREAKS, TokenClass.SPACES)
_SCRIPTS = sum(_BIT[member] for member in _OF_SCRIPTS)
_OF_NAMED_SCRIPT = {member.name: member for member in _OF_SCRIPTS}
_SCRIPT_OF_WORD = {
    **dict.fromkeys(("FEMININE", "MASCULINE"), "LATIN"),  # ordinal indicators
    **dict.fromkeys(("CJK", "IDEOGRAPHIC"), "HAN"),
    **dict.fromkeys(("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"), "KANA"),
}


@functools.lru_cache(maxsize=1 << 14)
def script_of(letter: str) -> str:
    """Return the script of a letter or mark: the first word of its Unicode name.

    >>> script_of("e"), script_of("食"), script_of("べ"), script_of("ქ")
    ('LATIN', 'HAN', 'KANA', 'GEORGIAN')
    """
    words = unicodedata.name(letter, "").split()
    if words and words[0] in ("FULLWIDTH", "HALFWIDTH"):
        del words[0]
    return _SCRIPT_OF_WORD.get(words[0], words[0]) if words else ""


@functools.lru_cache(maxsize=4)
def token_classes(table: TokenTable) -> NDArray[np.uint8]:
    """Return the `TokenClass` of each id, `[V]`, uint8. Do not modify the cached array."""
    classes = np.full(len(table), TokenClass.UNUSED, np.uint8)
    classes[table.is_control] = TokenClass.CONTROL
    classes[table.text_ids] = TokenClass.PARTIAL_UTF8
    decoded = enumerate(map(utf8_text, table.tokens()))
    texts = {token_id: text for token_id, text in decoded if text}
    if texts:
        classes[list(texts)] = _text_classes(list(texts.values()))
    return classes


def _text_classes(texts: list[str]) -> NDArray[np.uint8]:
    points = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4")
    point_bits = np.zeros(int(points.max()) + 1, np.uint32)
    point_bits[points] = 1
    different = np.flatnonzero(point_bits)  # look up each character once
    point_bits[different] = [_bit(chr(point)) for point in different.tolist()]
    bits = point_bits[points]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    starts = np.cumsum(lengths) - lengths
    in_text = np.bitwise_or.reduceat(bits, starts)
    digits = np.add.reduceat((bits == _DIGIT).astype(np.int64), starts)
    scripts, core = in_text & _SCRIPTS, in_text & ~np.uint32(_AROUND)
    one_script = (scripts & (scripts - 1)) == 0
    kana = scripts == _BIT[TokenClass.KANA] | _BIT[TokenClass.HAN]
    has_digit = (in_text & _DIGIT) != 0

    # The first rule that matches a token determines its class. Each of the last rules matches
    # tokens with at least one character of a class.
    rules: list[tuple[NDArray[np.bool_], TokenClass | NDArray[np.uint8]]] = [
        (has_digit & (core != _DIGIT), TokenClass.DIGITS_MIXED),
        (has_digit, np.clip(digits - 1, 0, TokenClass.DIGITS_MORE).astype(np.uint8)),
        (kana, TokenClass.KANA),
        ((scripts != 0) & ~one_script, TokenClass.SEVERAL_SCRIPTS),
        *(((in_text & _BIT[member]) != 0, member) for member in _BY_CHARACTER),
    ]
    conditions, values = zip(*rules, strict=True)
    classes: NDArray[np.uint8] = np.select(conditions, values, default=TokenClass.OTHER)
    return classes.astype(np.uint8)


def _bit(char: str) -> int:
    """Return the bit of a character's class."""
    category = unicodedata.category(char)
    if category == "Nd":
        return _DIGIT
    if char in "\n\r\v\f\x85\u2028\u2029":
        return _BIT[TokenClass.LINE_BREAKS]
    if char.isspace():
        return _BIT[TokenClass.SPACES]
    if category[0] in "LM":
        script = script_of(char)
        if category[0] == "M" and script in ("COMBINING", "VARIATION"):
            return _JOINER
        return _BIT[_OF_NAMED_SCRIPT.get(script, TokenClass.OTHER_SCRIPT)]
    if char in "\u200c\u200d" or "\U000e0020" <= char <= "\U000e007f":  # joiners, and tags in flags
        return _JOINER
    if category in ("So", "Sk") and ("\u2600" <= char <= "\u27bf" or char >= "\U0001f000"):
        return _BIT[TokenClass.EMOJI]
    return _BIT[TokenClass.PUNCTUATION if category[0] in "PSN" else TokenClass.OTHER]


def num_digits(table: TokenTable) -> NDArray[np.int64]:
    """Return the number of digits in each token that is a number, `[V]`, int64.

    A number consists of ASCII digits, optionally with spaces around the digits. Other tokens get 0.
    """
    stripped = (token.strip(b" ") for token in table.tokens())
    digits = (len(number) if number.isdigit() else 0 for number in stripped)
    return np.fromiter(digits, np.int64, len(table))
