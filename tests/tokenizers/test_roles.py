"""Roles of special tokens, and the pairs that they form."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest

from xtok.tokenizers.roles import find_roles, match_names, match_roles, slot_candidates
from xtok.tokenizers.table import Decoded, TokenEntry, TokenTable, TokenType, match_bytes


def table_of(
    *names: str, text: tuple[str, ...] = (), unused: int = 0, **roles: list[int]
) -> TokenTable:
    entries = [TokenEntry(i, TokenType.CONTROL, name.encode()) for i, name in enumerate(names)]
    entries += [
        TokenEntry(len(names) + i, TokenType.USER_DEFINED, t.encode()) for i, t in enumerate(text)
    ]
    table = Decoded(entries).table(len(entries) + unused)
    return replace(table, roles=find_roles(table, roles))


LLAMA = table_of(
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
    *("<|eom_id|>", "<|eot_id|>"),
)
QWEN = table_of("<|endoftext|>", "<|im_start|>", "<|im_end|>", eos=[2, 0], pad=[0], bos=[])
MISTRAL = table_of("<s>", "</s>", "[INST]", "[control_8]", "[control_9]")


def test_roles_come_from_the_declaration_and_from_known_names() -> None:
    assert LLAMA.roles == {"turn_end": (4,), "bos": (0,), "eos": (1,), "reserved": (2,)}
    assert QWEN.roles == {"turn_start": (1,), "turn_end": (2,), "eos": (2, 0), "pad": (0,)}


def test_declared_roles_replace_known_names() -> None:
    """A name of another family has no role; a role that is declared as null has no token."""
    yi = table_of("<s>", "<|startoftext|>", "<|endoftext|>", "<|im_end|>", bos=[1], eos=[3])
    assert yi.roles == {"turn_end": (3,), "eos": (3,), "bos": (1,)}
    smollm3 = table_of("<|begin_of_text|>", "<|im_end|>", bos=[], eos=[1], pad=[1])
    assert smollm3.roles == {"turn_end": (1,), "eos": (1,), "pad": (1,)}
    assert find_roles(yi, {"bos": []}) == {"turn_end": (3,), "eos": (2,)}


def test_text_has_no_role() -> None:
    gemma = table_of("<eos>", "<bos>", text=("<s>", "</s>", "<think>"), bos=[1], eos=[0, 3])
    assert gemma.roles == {"eos": (0,), "bos": (1,)}


def test_unknown_tokens_are_unk_if_no_unk_is_declared() -> None:
    assert table_of("<|endoftext|>", unk=[0]).roles["unk"] == (0,)
    unknown = Decoded([TokenEntry(0, TokenType.UNKNOWN, b"oov")]).table(1)
    assert find_roles(unknown, {}) == {"unk": (0,)}
    assert find_roles(unknown, {"unk": []}) == {}


def test_declared_ids_without_a_control_token_are_ignored() -> None:
    assert table_of("<s>", eos=[7]).roles == {"bos": (0,)}


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        # The end of a turn matches first; without it, the end of text takes its role.
        (LLAMA, QWEN, {1: 0, 4: 2}),
        (QWEN, LLAMA, {0: 1, 2: 4}),
        (LLAMA, MISTRAL, {0: 0, 1: 1, 2: 3, 4: 1}),
        (MISTRAL, LLAMA, {0: 0, 1: 1, 3: 2}),
        # Tokens of a role pair by name, then by id; several eos may share a partner.
        (table_of("[control_1]", "[control_9]", "[control_2]", "[control_3]"), MISTRAL,
         {0: 3, 1: 4}),
        (table_of("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", eos=[0, 1, 2]), MISTRAL,
         {0: 1, 1: 1, 2: 1}),
        # Tokens without a role pair by name.
        (table_of("<|a|>", "<|b|>"), table_of("<|x|>", "<|b|>"), {1: 1}),
        # A token without a role pairs with the role that its name is known for, if that is free.
        (table_of("<SOS>", eos=[]), MISTRAL, {0: 0}),
        (table_of("<s>", "<|startoftext|>", bos=[1]), MISTRAL, {1: 0}),
        # A role that is declared as null has no counterpart; names do not matter.
        (MISTRAL, table_of("<s>", "</s>", bos=[], eos=[1]), {1: 1}),
        # Mistral and Gemma: Gemma's tags <s> and </s> are text.
        (table_of("<s>", "</s>"), table_of("<eos>", "<bos>", text=("<s>", "</s>")), {0: 1, 1: 0}),
        (table_of("<eos>", "<bos>", text=("<s>", "</s>")), table_of("<s>", "</s>"), {0: 1, 1: 0}),
        # A token with the roles bos and eos, such as GPT-2's, matches as eos.
        (table_of("<|endoftext|>", bos=[0], eos=[0], unk=[0]), MISTRAL, {0: 1}),
        (MISTRAL, table_of("<|endoftext|>", bos=[0], eos=[0], unk=[0]), {0: 0, 1: 0}),
        # A control token never pairs with text.
        (table_of("<think>"), table_of(text=("<think>",)), {}),
        (table_of(text=("<think>",)), table_of("<think>"), {}),
    ],
)  # fmt: skip
def test_tokens_of_the_same_role_pair(
    student: TokenTable, teacher: TokenTable, expected: dict[int, int]
) -> None:
    assert match_roles(student, teacher) == expected


def test_every_table_maps_onto_itself() -> None:
    for table in (LLAMA, QWEN, MISTRAL):
        assert match_roles(table, table) == {i: i for i in table.control_names}


def test_many_tokens_match() -> None:
    """In 0.1 s; a search of all pairs for each token takes 9 s."""
    n = 20_000
    named, reserved = [f"<{i}>" for i in range(n)], [f"<|extra_{i}|>" for i in range(n)]
    student, teacher = table_of(*reserved, *named), table_of(*named, *reserved[::-1])
    pairs = match_roles(student, teacher)
    assert pairs == {i: 2 * n - 1 - i for i in range(n)} | {n + i: i for i in range(n)}


def test_similar_names_of_many_tokens_need_little_memory() -> None:
    n = 4000
    table = table_of(*(f"<{i}>" for i in range(n)))
    first: dict[frozenset[tuple[str, str]], int] = {}
    expected = {i: first.setdefault(frozenset(pairwise(f"^{i}$")), i) for i in range(n)}
    tracemalloc.start()
    try:
        assert match_names(table, table, threshold=0.99) == expected
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n * n * 4 / 2  # half of all similarities in float32


def test_equal_bytes_match() -> None:
    student = table_of(text=("a", "b", "c"))
    teacher = table_of("<s>", text=("c", "a", "x"))
    assert match_bytes(student, teacher).tolist()[:3] == [2, -1, 1]


def test_slots_use_unused_ids_first() -> None:
    assert slot_candidates(table_of("<s>", "<pad>", unused=3))[:2] == [2, 3]
    assert slot_candidates(table_of("<pad>", "<s>", "[control_1]"))[0] == 0
    assert slot_candidates(MISTRAL)[0] == 4
    assert slot_candidates(table_of("<s>", "</s>", "[INST]"))[0] == 2
    # Qwen pads with its end of text, and ends turns with another: both have a meaning.
    assert slot_candidates(QWEN) == [1, 2, 0]
    # An unknown id that is also the eos has a partner, too.
    entries = [
        TokenEntry(0, TokenType.UNKNOWN, b"<|endoftext|>"),
        TokenEntry(1, TokenType.CONTROL, b"<|x|>"),
    ]
    unknown = Decoded(entries).table(2)
    assert slot_candidates(replace(unknown, roles=find_roles(unknown, {})))[0] == 1
    assert slot_candidates(table_of(text=("a",))) == []


def test_similarity_of_names() -> None:
    student = table_of("<|end_of_text|>", "<|begin_of_text|>", "<pad>", "</s>", text=("x",))
    teacher = table_of("<|endoftext|>", "[PAD]", "<s>", "<|pad|>", text=("pad",))
    # ^b be eg gi in no of ft te ex xt t$ and ^e en nd do of ft te ex xt t$ share 6: 0.5455
    assert match_names(student, teacher, threshold=0.5) == {0: 0, 1: 0, 2: 1}
    assert match_names(student, teacher, threshold=0.6) == {0: 0, 2: 1}
    assert match_names(table_of(text=("x",)), teacher, threshold=0.1) == {}
    assert match_names(student, table_of(text=("x",)), threshold=0.1) == {}
