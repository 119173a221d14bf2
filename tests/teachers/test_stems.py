"""Stems have the student tokens of their spelling, also if they are not spelled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from naive_projecting import small

import xtok
from xtok.teachers.stem_kernels import ID_BITS, ROOT
from xtok.teachers.stems import StemCache, crossable_boundaries
from xtok.tokenizers import Tokenizer


def test_roots_and_children_of_a_small_vocabulary() -> None:
    """The teacher's tokens `20` and `20` without `2` are roots; `201` is a child."""
    digits = [b"0", b"1", b"2"]
    student, teacher = small([*digits, b"01", b"201"]), small([*digits, b"20"])
    zero, one, two, twenty = 1, 2, 3, 4
    is_mapped = np.zeros(5, np.bool_)
    is_mapped[[zero, one]] = True
    cache = StemCache(xtok.load_pair(student, teacher), is_mapped)
    cache.add(np.array([1 << ROOT | twenty, 1 << ROOT | 1 << ID_BITS | twenty]))
    cache.add(np.array([1 << ID_BITS | one, 1 << ID_BITS | two, 2 << ID_BITS | one]))
    stems = [array[: cache.size].tolist() for array in cache.table[2:]]
    first_token, token_or_row, is_prefix, is_boundary, num_same_start = stems
    # 20, 0 (after 2), 201, 202, 01 (after 2)
    assert first_token == [3, 1, 5, 3, 4]
    assert token_or_row == [3, -2 - zero, 5, 3, 4]
    assert is_prefix == [True, True, False, False, False]
    assert is_boundary == [True, True, True, True, False]
    assert num_same_start == [4, 2, 0, 0, 0]


@pytest.mark.real
@pytest.mark.parametrize(
    "names", [("llama3.tiktoken", "qwen.tiktoken"), ("mistral-v3.model", "llama3.tiktoken")]
)
def test_spellings_are_independent_at_a_boundary_that_no_token_crosses(
    names: tuple[str, str], load_real: Callable[[str], Tokenizer]
) -> None:
    """No student token contains the bytes on both sides of the boundary in sequence."""
    student, teacher = map(load_real, names)
    tokens = teacher.table.tokens()
    ends_in_space, may_join = crossable_boundaries(xtok.load_pair(student, teacher))
    rng = np.random.default_rng(0)
    pairs = rng.choice(teacher.table.text_ids, (30_000, 2)).tolist()
    pairs = [
        (a, b)
        for a, b in pairs
        if not ends_in_space[a] and not may_join[tokens[a][-1], tokens[b][0]]
    ]
    first_ids = student.segment_batch([tokens[a] for a, _ in pairs])
    both = student.segment_batch([tokens[a] + tokens[b] for a, b in pairs])
    assert len(pairs) > 8_000
    assert [ids and ids[0] for ids in first_ids] == [ids and ids[0] for ids in both]


@pytest.mark.real
@pytest.mark.parametrize(
    "names",
    [
        ("o200k.tiktoken", "claude-2"),  # these two also split at capitals and apostrophes
        ("claude-2", "qwen.tiktoken"),
        ("mistral-v3.model", "llama3.tiktoken"),
    ],
)
def test_the_shortcut_equals_spelling(
    names: tuple[str, str], load_real: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = map(load_real, names)
    tokens, ids = teacher.table.tokens(), teacher.table.text_ids
    cache = StemCache(xtok.load_pair(student, teacher), np.zeros(len(teacher.table), np.bool_))
    rng = np.random.default_rng(0)
    stems = np.unique(rng.choice(ids[teacher.table.lengths[ids] <= 6], 1500))
    cache.add(1 << ROOT | stems)
    keys = (np.arange(len(stems)).repeat(10) + 1) << ID_BITS | rng.choice(ids, 10 * len(stems))
    keys = np.unique(keys)
    spelled: list[bytes] = []
    spell = student.segment_batch

    def counting(texts: Sequence[bytes]) -> Any:
        spelled.extend(texts)
        return spell(texts)

    monkeypatch.setattr(student, "segment_batch", counting)
    cache.add(keys)
    texts = [
        tokens[stems[(key >> ID_BITS) - 1]] + tokens[key & (1 << ID_BITS) - 1]
        for key in keys.tolist()
    ]
    added = slice(len(stems), len(stems) + len(keys))
    assert len(spelled) < 0.6 * len(keys)
    expected = [ids[0] if ids else -1 for ids in spell(texts)]
    assert cache.table.first_token[added].tolist() == expected
    longer = sorted(student.table.canonical_ids())
    following = [longer[bisect_right(longer, text) :][:1] for text in texts]
    grows = [
        any(token.startswith(text) for token in b) for b, text in zip(following, texts, strict=True)
    ]
    assert cache.table.is_prefix[added].tolist() == grows
