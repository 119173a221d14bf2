"""Near-equivalents: tokens with equal relaxed forms."""

from __future__ import annotations

import pytest
from conftest import Load

from xtok.tokenizers.relaxed import match_relaxed, relaxed_form
from xtok.tokenizers.table import Decoded, TokenEntry, TokenTable, TokenType


def table(*tokens: bytes) -> TokenTable:
    entries = [TokenEntry(i, TokenType.NORMAL, token) for i, token in enumerate(tokens)]
    return Decoded(entries).table(len(tokens))


@pytest.mark.parametrize(
    ("token", "form"),
    [
        (b" ,", b","),
        (b" \xe2\x80\x9c", b"\xe2\x80\x9c"),  # an opening quotation mark
        (b" \n", b"\n"),
        (b"\r\n\r\n", b"\n\n"),
        (b"\xc2\x85", b"\n"),
        (b"\xe2\x80\xa8", b"\n"),
        (b"  ,", b"  ,"),  # two spaces are indentation
        (b" the", b" the"),
        (b"_x", b"_x"),
        (b"\t", b"\t"),
        (b" ", b" "),
        (b" ,\xe4", b" ,\xe4"),  # not UTF-8
    ],
)
def test_a_relaxed_form_is_its_own_relaxed_form(token: bytes, form: bytes) -> None:
    assert relaxed_form(token) == form
    assert relaxed_form(form) == form


def test_relaxed_pairs_are_for_tokens_without_an_exact_counterpart() -> None:
    student = table(b",", b" ,", b"\r\n", b"\n\n", b":::", b" ;", b"x")
    teacher = table(b",", b"\n", b"\r\r", b" :::", b";", b" ;")
    # "," and " ;" have exact counterparts; "\n\n" is not taken for the rarer "\r\r".
    assert match_relaxed(student, teacher) == {1: 0, 2: 1, 4: 3}


@pytest.mark.real
def test_relaxed_pairs_of_real_vocabularies(load_real: Load) -> None:
    llama, qwen, mistral, claude = (
        load_real(name).table
        for name in ("llama3.tiktoken", "qwen.tiktoken", "mistral-v3.model", "claude-2")
    )
    assert len(match_relaxed(llama, qwen)) == 71
    assert len(match_relaxed(llama, mistral)) == 310
    assert len(match_relaxed(claude, mistral)) == 190
