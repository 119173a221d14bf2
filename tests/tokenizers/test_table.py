"""`TokenTable`: bytes, types and ids of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtok.config import TokenForm
from xtok.tokenizers.display import escape, unescape
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType

ENTRIES = [
    TokenEntry(0, TokenType.UNKNOWN, b"<unk>"),
    TokenEntry(1, TokenType.CONTROL, b"<s>"),
    TokenEntry(2, TokenType.BYTE, b"a"),
    TokenEntry(3, TokenType.NORMAL, b" the"),
    TokenEntry(4, TokenType.NORMAL, b"a"),
    TokenEntry(5, TokenType.USER_DEFINED, b"<think>"),
    TokenEntry(6, TokenType.NORMAL, b"\xe4\xb8"),
]


def test_the_table_contains_the_bytes_of_every_id() -> None:
    decoded = Decoded(ENTRIES)
    table = decoded.table(9)
    assert table.tokens() == [b"", b"", b"a", b" the", b"a", b"<think>", b"\xe4\xb8", b"", b""]
    assert [table[i] for i in range(9)] == table.tokens()
    assert table.types.tolist() == [2, 3, 6, 1, 1, 4, 1, 5, 5]
    assert table.control_names == {0: "<unk>", 1: "<s>"}
    assert table.text_ids.tolist() == [2, 3, 4, 5, 6]
    assert decoded.undecodable == ()
    assert repr(table) == "TokenTable(9 ids, 15 bytes)"
    with pytest.raises(IndexError, match=r"token id -1 is outside 0\.\.8"):
        table[-1]


def test_forms_and_ignored_ids() -> None:
    rows = [
        TokenEntry(0, TokenType.CONTROL, b"<s>", b"?"),
        TokenEntry(3, TokenType.NORMAL, b" a", b"_a"),
        TokenEntry(1, TokenType.BYTE, b"\xe4", b"<0xE4>"),
        TokenEntry(2, TokenType.NORMAL, b"", b"x"),
        TokenEntry(9, TokenType.NORMAL, b"y"),
    ]
    forms: dict[TokenForm, list[bytes]] = {
        "bytes": [b"", b"\xe4", b"", b" a"],
        "text": [b"", "\ufffd".encode(), b"", b" a"],
        "raw": [b"", b"<0xE4>", b"x", b"_a"],
    }
    for form, expected in forms.items():
        decoded = Decoded(rows, form=form, ignore={9})
        table = decoded.table(4)
        assert table.tokens() == expected
        assert [table[i] for i in range(4)] == expected
        assert table.control_names == {0: "<s>"}
        assert decoded.undecodable == (2,)
    without = [entry._replace(display=b"") for entry in rows[:2]]
    assert Decoded(without, form="raw").table(4).tokens() == [b"", b"", b"", b" a"]


def test_the_longest_name_that_a_map_can_carry() -> None:
    longest = b"<" * 1024
    table = Decoded([TokenEntry(0, TokenType.CONTROL, longest)]).table(1)
    assert table.control_names == {0: longest.decode()}


def test_order_of_preference_for_canonical_ids() -> None:
    table = Decoded([*ENTRIES, TokenEntry(7, TokenType.NORMAL, b"a")]).table(8)
    assert table.canonical_ids()[b"a"] == 4
    assert replace(table, preferred_ids=(7,)).canonical_ids()[b"a"] == 7
    assert replace(table, preferred_ids=(2,)).canonical_ids()[b"a"] == 2


def test_names_distinguish_special_and_unused_ids() -> None:
    table = Decoded(ENTRIES).table(8)
    names = [table.name(i) for i in range(8)]
    assert names == ["<unk>", "<s>", "a", " the", "a", "<think>", r"\xe4\xb8", "(unused)"]


def test_sha256_matches_the_documented_bytes() -> None:
    table = Decoded(ENTRIES).table(7)
    offsets = np.array([0, 0, 0, 1, 5, 6, 13, 15], "<i8")
    expected = hashlib.sha256(
        bytes([2, 3, 6, 1, 1, 4, 1])
        + offsets.tobytes()
        + b"a thea<think>\xe4\xb8"
        + b'[[0, "<unk>"], [1, "<s>"]]'
    ).hexdigest()
    assert table.sha256() == expected


def test_sha256_does_not_depend_on_width_roles_or_order() -> None:
    table = Decoded(ENTRIES).table(7)
    wider = Decoded(reversed(ENTRIES)).table(20)
    assert wider.sha256() == table.sha256() == replace(table, roles={"bos": (1,)}).sha256()
    other = Decoded([*ENTRIES[:-1], TokenEntry(6, TokenType.NORMAL, b"x")]).table(7)
    assert other.sha256() != table.sha256()
    renamed = Decoded([TokenEntry(0, TokenType.UNKNOWN, b"?"), *ENTRIES[1:]]).table(7)
    assert renamed.sha256() != table.sha256()


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" the", " the"), (b"a\tb\nc\rd\\", r"a\tb\nc\rd\\"), (b"\x1b[31m", r"\x1b[31m"),
        ("\u202eevil".encode(), r"\xe2\x80\xaeevil"), ("\u00a0".encode(), r"\xc2\xa0"),
        (b"\xe4\xb8", r"\xe4\xb8"), ("中文 é".encode(), "中文 é"),
    ],
)  # fmt: skip
def test_escape_makes_control_bytes_visible(data: bytes, shown: str) -> None:
    assert escape(data) == shown


@given(st.binary())
def test_escape_is_printable_and_can_be_undone(data: bytes) -> None:
    assert escape(data).isprintable()
    assert unescape(escape(data)) == data


def test_unescape_accepts_typed_text() -> None:
    assert unescape(r"\x0a\n") == b"\n\n"
    assert unescape("C:\\dir") == b"C:\\dir"
    assert unescape("é ") == "é ".encode()
