"""Texts of unusual pieces, and the comparison of their ids with a library."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from xtok.tokenizers import Encoding, Tokenizer
from xtok.tokenizers.table import TokenType

Library = Callable[[str], list[int]]
PIECES = [
    "the", " words", " don't", "2024", "  ", "\n\n", "\t", " ", "<", "|", "think", "中文",
    " 日本語", "café", "cafe\u0301", "\u212b", "ﬁ", "①", "ｶﾞ", "\u0344", "o\u0323\u0302", "नमस्ते",
    "가\u1100\u1161", "👨\u200d👩", "\u00a0", "▁", "\u200b", "\x00", "Ω\u2126", "\u1e9b\u0323",
]  # fmt: skip


def pieces_for(tokenizer: Tokenizer, names: bool = True) -> list[str]:
    """Return pieces of text, including the names of control tokens and user-defined tokens."""
    table = tokenizer.table
    added = [table[i].decode() for i in table.ids_of_type(TokenType.USER_DEFINED).tolist()][:40]
    control = [table.control_names[i] for i in table.ids_of_type(TokenType.CONTROL).tolist()][:40]
    return [*PIECES * 2, *filter(None, added), *(control if names else [])]


def texts(tokenizer: Tokenizer, names: bool = True, num_texts: int = 60) -> Iterator[str]:
    """Generate texts of random pieces; the texts are the same on every call."""
    rng, pieces = random.Random(0), pieces_for(tokenizer, names)
    for _ in range(num_texts):
        yield "".join(rng.choices(pieces, k=rng.randint(0, 12)))


def check_encoding(tokenizer: Tokenizer, library: Library, text: str) -> Encoding:
    """Check that the ids equal a library's ids, and that the text in their bounds fits."""
    encoding, data = tokenizer.encode(text), text.encode()
    assert encoding.ids.tolist() == library(text)
    assert tokenizer.encode_batch([text, text]) == [library(text)] * 2
    bounds = encoding.bounds
    assert len(bounds) == len(encoding.ids) + 1
    assert np.all(np.diff(bounds) >= 0)
    assert bounds[-1] == len(data)
    if len(encoding.ids):
        assert bounds[0] == 0
    table, names = tokenizer.table, tokenizer.table.control_names
    added = set(table.ids_of_type(TokenType.CONTROL, TokenType.USER_DEFINED).tolist())
    parts = [names[i].encode() if i in names else table[i] for i in encoding.ids.tolist()]
    for i, part, start, end in zip(encoding.ids, parts, bounds[:-1], bounds[1:], strict=True):
        if int(i) in added or not encoding.num_changed:
            assert data[start:end].strip() == part.strip()
    return encoding
