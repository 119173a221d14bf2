"""Rank files are parsed line by line; a line that is not `base64 rank` is named."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtok.errors import TokenizerError
from xtok.tokenizers._tiktoken import parse_ranks

SINGLE = {bytes([byte]): 1000 + byte for byte in range(256)}
TWO = {b"ab": 0, b"\xff\x00": 1}


def rank_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(t), i) for t, i in ranks.items())


@pytest.mark.parametrize("data", [
    b"YWI= 0\n/wA= 1\n", b"YWI= 0\n/wA= 1", b"YWI= 0\r\n/wA= 1\r\n", b"YWI= 0\n\n/wA= 1\n",
    b"YWI=\t0\n/wA= 1\n",
])  # fmt: skip
def test_a_good_rank_file(data: bytes) -> None:
    assert parse_ranks(rank_file(SINGLE) + data, "x") == SINGLE | TWO


@pytest.mark.parametrize("data", [
    b"YWI=\n0 /wA= 1\n", b"YWI= 0 /wA=\n1\n", b"YWI= 0\n/wA=\n", b"YWI= 0\nYWI= 1\n",
    b"YWI= 0\n/wA= 0\n", b"Y=W= 0\n/wA= 1\n", b"YWI=YWI= 0\n/wA= 1\n", b"YWI 0\n/wA= 1\n",
    b"Y!I= 0\n/wA= 1\n", b"YWI= +0\n/wA= 1\n", b"YWI= 0\n/wA= 99999999999\n",
    b"YWI= 0\n/wA= 99999999\n", b"==== 0\n/wA= 1\n",
])  # fmt: skip
def test_a_rank_file_with_a_bad_line(data: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"^line 25[78] of x "):
        parse_ranks(rank_file(SINGLE) + data, "x")


def test_a_rank_file_without_the_single_bytes() -> None:
    with pytest.raises(TokenizerError, match="x lacks 256 of the 256 single bytes"):
        parse_ranks(rank_file(TWO), "x")


@given(st.dictionaries(st.binary(min_size=2, max_size=9), st.integers(0, 2**23), min_size=1))
def test_parsing_undoes_writing(ranks: dict[bytes, int]) -> None:
    single = {token: 2**23 + rank for token, rank in SINGLE.items()}
    data = rank_file(single | ranks)
    if len(set(ranks.values())) == len(ranks):
        assert parse_ranks(data, "x") == single | ranks
    else:
        with pytest.raises(TokenizerError, match="repeats a token or a rank"):
            parse_ranks(data, "x")
