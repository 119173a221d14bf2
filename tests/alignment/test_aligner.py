from __future__ import annotations

import itertools
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from conftest import KINDS, Aligners, Tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import xtok
from xtok.alignment import kernels
from xtok.alignment.aligner import AlignmentBatch, TokenAligner, shift_to_predictions
from xtok.errors import XtokError
from xtok.maps.binding import pair_of_maps
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenType
from xtok.training.trainers import nemo_rl

TEXT = (
    "The quick brown fox, 2024 of them;  das Größte — 東京都 👨\u200d👩 def f(x):\n\treturn x\r\n"
)


def chunks_of(aligner: TokenAligner, s: list[int], t: list[int]) -> list[tuple[Any, ...]]:
    """Positions on both sides, and whether the chunk is correct."""
    found = aligner.align(np.array([s]), np.array([t]))
    sides = [found.student_chunk_id[0].tolist(), found.teacher_chunk_id[0].tolist()]
    correct = np.asarray(found.pair_is_correct)[0, : int(found.num_chunks[0])].tolist()
    return [
        (*([i for i, c in enumerate(side) if c == k] for side in sides), is_correct)
        for k, is_correct in enumerate(correct)
    ]


@pytest.fixture(scope="module")
def aligner(aligners: Aligners) -> TokenAligner:
    return aligners["byte_level", "sentencepiece"]


# Exact by bytes


@pytest.mark.parametrize("pair", [*itertools.product(KINDS, KINDS)])
def test_chunks_end_at_every_common_boundary(
    aligners: Aligners, tokenizers: Tokenizers, pair: tuple[str, str]
) -> None:
    for text in (TEXT, TEXT * 3, "a", "", " ", "\xff\x00\x80" * 9, "ababab" * 99):
        data = text.encode()
        s, t = (tokenizers[name].segment(data) for name in pair)
        rows, columns = (tokenizers[name].table for name in pair)
        expected = naive.common_boundaries([rows[i] for i in s], [columns[i] for i in t])
        assert chunks_of(aligners[pair], s, t) == [(*chunk, True) for chunk in expected]


@given(data=st.data())
@settings(max_examples=150)
def test_random_tokens_of_the_same_bytes(
    aligners: Aligners, tokenizers: Tokenizers, data: st.DataObject
) -> None:
    pair = data.draw(st.sampled_from(list(aligners)))
    rows, columns = (tokenizers[name].table for name in pair)
    ids = st.lists(st.sampled_from(rows.text_ids.tolist()), max_size=30)
    s = data.draw(ids)
    # Any spelling of the same bytes, partial UTF-8 included; not only the tokenizer's own.
    spelled = b"".join(rows[i] for i in s)
    of_bytes = columns.canonical_ids()
    t = []
    while spelled:
        longest = max(n for n in range(1, 12) if spelled[:n] in of_bytes)
        choices = [n for n in range(1, longest + 1) if spelled[:n] in of_bytes]
        n = data.draw(st.sampled_from(choices))
        t.append(of_bytes[spelled[:n]])
        spelled = spelled[n:]
    expected = naive.common_boundaries([rows[i] for i in s], [columns[i] for i in t])
    assert chunks_of(aligners[pair], s, t) == [(*chunk, True) for chunk in expected]


@given(data=st.data())
@settings(max_examples=150)
def test_any_two_rows_give_a_consistent_alignment(
    aligners: Aligners, tokenizers: Tokenizers, data: st.DataObject
) -> None:
    pair = data.draw(st.sampled_from(list(aligners)))
    sides = [tokenizers[name].table for name in pair]
    ids = [st.sampled_from([*s.text_ids.tolist()[:400:3], *s.control_names]) for s in sides]
    check_consistent(aligners[pair], *(data.draw(st.lists(i, max_size=40)) for i in ids))


def check_consistent(shared: TokenAligner, s: list[int], t: list[int]) -> None:
    aligner = copy(shared)
    rows, columns = aligner.student.table, aligner.teacher.table
    arrays = [np.array([ids], np.int64).reshape(1, -1) for ids in (s, t)]
    masks = [np.ones_like(ids) for ids in arrays]  # a pad token counts like any other here
    mask = {"student_attention_mask": masks[0], "teacher_attention_mask": masks[1]}
    aligner._few_tokens = 10**9  # in Python
    found = aligner.align(*arrays, **mask)
    aligner._few_tokens = 0  # compiled
    assert_same(aligner.align(*arrays, **mask), found)
    chunks = aligner.pairs(s, t)
    assert found.num_chunks.tolist() == [len(chunks)]
    for ids in (found.student_chunk_id, found.teacher_chunk_id):
        used = [c for c in np.asarray(ids)[0].tolist() if c >= 0]
        assert used == sorted(used)
        assert set(used) == set(range(len(chunks)))
    for chunk in chunks:
        ours = b"".join(rows[i] for i in chunk.student_ids)
        theirs = b"".join(columns[i] for i in chunk.teacher_ids)
        controls = [i for i in chunk.student_ids if i in rows.control_names]
        if chunk.is_correct and not controls:
            assert ours == theirs
        elif chunk.is_correct and len(chunk.student_ids) == 1:
            assert len(chunk.teacher_ids) == 1
            assert chunk.teacher_ids[0] in columns.control_names
        elif not chunk.is_correct:
            assert max(len(chunk.student_ids), len(chunk.teacher_ids)) <= aligner.max_comb_len


# Where the sides do not spell the same bytes


def spell(tokenizers: Tokenizers, name: str, *parts: str) -> list[int]:
    """Segment text; a part that names a control token is that token."""
    names = {n: i for i, n in tokenizers[name].table.control_names.items()}
    ids: list[int] = []
    for part in parts:
        ids += [names[part]] if part in names else tokenizers[name].segment(part.encode())
    return ids


def readable(aligner: TokenAligner, s: list[int], t: list[int]) -> list[tuple[str, str, bool]]:
    rows, columns = aligner.student.table, aligner.teacher.table
    return [
        (
            "|".join(map(rows.name, p.student_ids)),
            "|".join(map(columns.name, p.teacher_ids)),
            p.is_correct,
        )
        for p in aligner.pairs(s, t)
    ]


def test_special_tokens_of_one_role_are_a_chunk(
    aligner: TokenAligner, tokenizers: Tokenizers
) -> None:
    s = spell(tokenizers, "byte_level", "<|begin_of_text|>", " a", "<|end_of_text|>")
    t = spell(tokenizers, "sentencepiece", "<s>", " a", "</s>")
    assert readable(aligner, s, t) == [
        ("<|begin_of_text|>", "<s>", True),
        (" a", " a", True),
        ("<|end_of_text|>", "</s>", True),
    ]
    found = aligner.align(np.array([s]), np.array([t]))
    assert found.student_exact_partition_mask.tolist() == [[True, True, True]]


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_bos_on_one_side_only(aligner: TokenAligner, tokenizers: Tokenizers, side: str) -> None:
    s = spell(tokenizers, "byte_level", TEXT)
    t = spell(tokenizers, "sentencepiece", TEXT)
    plain = readable(aligner, s, t)
    if side == "student":
        s = spell(tokenizers, "byte_level", "<|begin_of_text|>") + s
    else:
        t = spell(tokenizers, "sentencepiece", "<s>") + t
    assert readable(aligner, s, t) == plain
    assert all(correct for _, _, correct in plain)


def test_special_tokens_without_a_counterpart_are_passed_over(
    aligner: TokenAligner, tokenizers: Tokenizers
) -> None:
    s = spell(tokenizers, "byte_level", "<|im_start|>", " a", "<|im_end|>", " b")
    t = spell(tokenizers, "sentencepiece", "[INST]", " a", "[/INST]", " b")
    assert readable(aligner, s, t) == [(" a", " a", True), (" b", " b", True)]
    # In the middle of a chunk as well.
    s = spell(tokenizers, "byte_level", "1", "<|im_start|>", "2")
    assert [c for _, _, c in readable(aligner, s, spell(tokenizers, "sentencepiece", "12"))]


@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFD"])
def test_a_normalizer_on_one_side_costs_what_it_changes(
    aligner: TokenAligner, tokenizers: Tokenizers, form: Any
) -> None:
    import unicodedata

    text = " of cafe\u0301 and the ﬁnal text,\uff0c of the 2024 and the text of the end"
    s = spell(tokenizers, "byte_level", text)
    t = spell(tokenizers, "sentencepiece", unicodedata.normalize(form, text))
    found = readable(aligner, s, t)
    tail = " of the 2024 and the text of the end"
    assert found[0] == (" of", " of", True)
    correct = "".join(s for s, _, c in found if c).replace("|", "")
    assert correct.endswith(tail)
    assert len(correct) > 0.7 * len(text)
    check_consistent(aligner, s, t)


def test_truncation_leaves_a_tail_unaligned(aligner: TokenAligner, tokenizers: Tokenizers) -> None:
    s, t = (spell(tokenizers, name, TEXT * 4) for name in ("byte_level", "sentencepiece"))
    whole = chunks_of(aligner, s, t)
    for cut in (1, 5, len(t) // 2, len(t) - 1):
        found = chunks_of(aligner, s, t[:cut])
        assert found == whole[: len(found)]
        after = whole[len(found)]
        assert after[1][-1] >= cut  # the next chunk reaches behind the cut


def test_a_passage_that_one_side_lacks(aligner: TokenAligner, tokenizers: Tokenizers) -> None:
    first, second = TEXT, " and of the end of the text,\n again" * 3
    extra = "something that is only here, " * 40
    s = spell(tokenizers, "byte_level", first, extra, second)
    t = spell(tokenizers, "sentencepiece", first, second)
    found = readable(aligner, s, t)
    assert sum(not correct for _, _, correct in found) <= 2
    covered = sum(
        p.teacher_bytes[1] - p.teacher_bytes[0] for p in aligner.pairs(s, t) if p.is_correct
    )
    assert covered > 0.9 * len((first + second).encode())
    assert found[-1][2]


def test_groups_of_tokens_match_within_a_stretch_that_differs(
    tokenizers: Tokenizers,
) -> None:
    s = spell(tokenizers, "byte_level", "x", "201", "y")
    t = spell(tokenizers, "digits", "z", "201", "w")
    made = {
        n: TokenAligner(xtok.pair(tokenizers["byte_level"], tokenizers["digits"]), max_comb_len=n)
        for n in (1, 2, 3)
    }
    assert readable(made[3], s, t) == [
        ("x", "z", False), ("2|0|1", "201", True), ("y", "w", False)
    ]  # fmt: skip
    # With groups of at most two there is no match, and what is left is too much for one chunk.
    assert ("2|0|1", "201", True) not in readable(made[2], s, t)


def test_few_tokens_that_differ_are_not_worth_compiling_for(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    aligner = TokenAligner(xtok.pair(tokenizers["byte_level"], tokenizers["sentencepiece"]))
    runs: list[str] = []
    kernel = kernels.align_rest

    def align_rest(*args: Any) -> None:
        runs.append("compiled")
        kernel(*args)

    align_rest.py_func = kernel.py_func  # type: ignore[attr-defined]
    monkeypatch.setattr("xtok.alignment.aligner.align_rest", align_rest)
    s = spell(tokenizers, "byte_level", "cafe\u0301" + " of the end" * 20)
    t = spell(tokenizers, "sentencepiece", "caf\u00e9" + " of the end" * 20)
    for number in range(1, 6):  # 168 tokens each
        runs.append(f"call {number}")
        found = readable(aligner, s, t)
        assert [correct for _, _, correct in found[-60:]] == [True] * 60
    assert runs == ["call 1", "call 2", "call 3", "call 4", "compiled", "call 5", "compiled"]


def test_groups_of_any_length(tokenizers: Tokenizers) -> None:
    s = spell(tokenizers, "byte_level", "x", "201 the text" * 3, "y")
    t = spell(tokenizers, "digits", "z", "201 the text" * 3, "w")
    sides = (tokenizers["byte_level"], tokenizers["digits"])
    long = readable(TokenAligner(xtok.pair(*sides), max_comb_len=len(s) + len(t)), s, t)
    for max_comb_len in (2**16, 2**31, 10**30):
        assert readable(TokenAligner(xtok.pair(*sides), max_comb_len=max_comb_len), s, t) == long


def test_texts_with_nothing_in_common(aligner: TokenAligner, tokenizers: Tokenizers) -> None:
    s = spell(tokenizers, "byte_level", "中文" * 1000)
    t = spell(tokenizers, "sentencepiece", "abc " * 1000)
    assert not any(correct for _, _, correct in readable(aligner, s, t))
    assert aligner.pairs([], t) == aligner.pairs(s, []) == []


# Batches


def batch(rows: list[list[int]], pad: int, *, left: bool = False) -> tuple[Any, Any]:
    width = max(map(len, rows))
    ids = np.full((len(rows), width), pad, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(len(row))
        ids[i, place] = row
        mask[i, place] = 1
    return ids, mask


@pytest.fixture(scope="module")
def texts(tokenizers: Tokenizers) -> tuple[list[list[int]], list[list[int]]]:
    parts = [TEXT, TEXT[:20], "a", TEXT * 2]
    s = [spell(tokenizers, "byte_level", "<|begin_of_text|>", p) for p in parts]
    t = [spell(tokenizers, "sentencepiece", "<s>", p, "</s>") for p in parts]
    return s, t


@pytest.mark.parametrize("left", [False, True])
def test_padding_never_forms_a_chunk(
    aligner: TokenAligner, texts: tuple[list[list[int]], list[list[int]]], left: bool
) -> None:
    pad = aligner.student.table.roles["pad"][0]
    eos = aligner.teacher.table.roles["eos"][0]
    s, s_mask = batch(texts[0], pad, left=left)
    t, t_mask = batch(texts[1], eos, left=left)
    found = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask)
    assert (found.student_chunk_id[s_mask == 0] == -1).all()
    assert (found.teacher_chunk_id[t_mask == 0] == -1).all()
    for i, (row, column) in enumerate(zip(*texts, strict=True)):
        alone = aligner.align(np.array([row]), np.array([column]))
        ours, theirs = found.student_chunk_id[i], found.teacher_chunk_id[i]
        assert ours[s_mask[i] == 1].tolist() == alone.student_chunk_id[0].tolist()
        assert theirs[t_mask[i] == 1].tolist() == alone.teacher_chunk_id[0].tolist()
        assert found.num_chunks[i] == alone.num_chunks[0]
        assert found.pair_valid[i].sum() == alone.num_chunks[0]
        assert not found.pair_is_correct[i][~found.pair_valid[i]].any()
    # Without a mask, the pad role tells.
    assert_same(aligner.align(s, t, teacher_attention_mask=t_mask), found)


def assert_same(a: AlignmentBatch, b: AlignmentBatch) -> None:
    for name, value in vars(a).items():
        assert np.asarray(value).tolist() == np.asarray(getattr(b, name)).tolist(), name


def test_an_end_of_text_that_pads_as_well(tokenizers: Tokenizers) -> None:
    table = tokenizers["byte_level"].table
    eos = table.roles["eos"][0]
    both = replace(table, roles={"eos": (eos,), "pad": (eos,)})
    side = replace(tokenizers["byte_level"].vocabulary, table=both)
    aligner = TokenAligner(Pair(side, side))
    text = spell(tokenizers, "byte_level", " a b")
    n = len(text)
    ended = [*text, eos]
    found = aligner.align(
        np.array([[*ended, eos, eos], [eos, eos, *ended]]), np.array([ended, ended])
    )
    assert found.num_chunks.tolist() == [n + 1, n + 1]
    assert found.student_chunk_id.tolist() == [
        [*range(n + 1), -1, -1], [-1, -1, *range(n + 1)]
    ]  # fmt: skip


def test_the_fields_and_their_types(
    aligner: TokenAligner, texts: tuple[list[list[int]], list[list[int]]]
) -> None:
    s, s_mask = batch(texts[0], 0)
    t, t_mask = batch(texts[1], 0)
    masks = {"student_attention_mask": s_mask, "teacher_attention_mask": t_mask}
    found = aligner.align(s, t, **masks)
    pairs = int(found.num_chunks.max())
    assert {name: (value.dtype.name, value.shape) for name, value in vars(found).items()} == {
        "pair_valid": ("bool", (4, pairs)),
        "pair_is_correct": ("bool", (4, pairs)),
        "student_exact_partition_mask": ("bool", s.shape),
        "teacher_exact_partition_mask": ("bool", t.shape),
        "student_chunk_id": ("int64", s.shape),
        "teacher_chunk_id": ("int64", t.shape),
        "num_chunks": ("int64", (4,)),
        "student_kept": ("bool", s.shape),
        "teacher_kept": ("bool", t.shape),
    }
    tensors = {name: torch.from_numpy(mask) for name, mask in masks.items()}
    as_torch = aligner.align(torch.from_numpy(s), torch.from_numpy(t), **tensors)
    assert all(isinstance(value, torch.Tensor) for value in vars(as_torch).values())
    assert_same(found, as_torch)
    assert as_torch.student_chunk_id.dtype == torch.int64
    assert as_torch.pair_valid.dtype == torch.bool


def test_exact_partition_is_correct_chunks_of_one_token_each(
    aligner: TokenAligner, texts: tuple[list[list[int]], list[list[int]]]
) -> None:
    s, s_mask = batch(texts[0], 0)
    t, t_mask = batch(texts[1], 0)
    found = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask)
    for i in range(4):
        s_ids, t_ids = found.student_chunk_id[i], found.teacher_chunk_id[i]
        s_size, t_size = (
            np.bincount(ids[ids >= 0], minlength=int(found.num_chunks[i])) for ids in (s_ids, t_ids)
        )
        one = (s_size == 1) & (t_size == 1) & np.asarray(found.pair_is_correct)[i][: len(s_size)]
        for ids, mask in (
            (s_ids, found.student_exact_partition_mask[i]),
            (t_ids, found.teacher_exact_partition_mask[i]),
        ):
            assert mask.tolist() == [bool(c >= 0 and one[c]) for c in ids.tolist()]


def test_shift_to_predictions(tokenizers: Tokenizers, aligner: TokenAligner) -> None:
    s = np.array([spell(tokenizers, "byte_level", "<|begin_of_text|>", " a b")])
    t = np.array([spell(tokenizers, "sentencepiece", " a b")])
    found = aligner.align(s, t)
    shifted = shift_to_predictions(found)
    assert found.student_chunk_id[0].tolist() == [-1, *range(s.shape[1] - 1)]
    assert shifted.student_chunk_id[0].tolist() == [*range(s.shape[1] - 1), -1]
    # The teacher has no BOS: its first token is predicted by nothing.
    assert shifted.teacher_chunk_id[0].tolist() == [*range(1, t.shape[1]), -1]
    assert shifted.pair_valid[0].tolist() == [False] + [True] * (t.shape[1] - 1)
    assert shifted.student_exact_partition_mask[0].tolist()[-1] is False
    tensors = aligner.align(torch.from_numpy(s), torch.from_numpy(t))
    assert_same(shift_to_predictions(tensors), shifted)
    assert tensors.pair_valid.all()  # the batch itself is not changed
    with pytest.raises(ValueError, match="shifted already"):
        shift_to_predictions(shifted)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_padding_predicts_nothing_on_either_side(
    tokenizers: Tokenizers, aligner: TokenAligner, has_mask: bool, as_tensor: bool
) -> None:
    """The first chunk has no position, or one that predicts its middle, whatever the padding."""
    names = ("byte_level", "sentencepiece")
    texts = [" a", " a b", "qzx a b", "\xff\xfe a", "a b c d e f g"]
    rows = [[spell(tokenizers, name, text) for text in texts] for name in names]
    pads = [tokenizers["byte_level"].table.roles["pad"][0], 0]
    found = []
    for left in (False, True):
        ids, masks = [], []
        for side, pad in zip(rows, pads, strict=True):
            width = 2 + max(map(len, side))
            padded = np.full((len(side), width), pad)
            for row, own in zip(padded, side, strict=True):
                row[width - len(own) if left else 0 :][: len(own)] = own
            mask = np.array([[True] * len(own) + [False] * (width - len(own)) for own in side])
            ids.append(padded)
            masks.append(mask[:, ::-1].copy() if left else mask)
        given = dict(zip(("student_attention_mask", "teacher_attention_mask"), masks, strict=True))
        if not has_mask:
            del given["student_attention_mask"]
        made: Any = (torch.from_numpy(x) if as_tensor else x for x in ids)
        shifted = shift_to_predictions(aligner.align(*made, **given))
        for side_name, mask in zip(("student", "teacher"), masks, strict=True):
            chunk = np.asarray(getattr(shifted, f"{side_name}_chunk_id"))
            assert (chunk[~mask] == -1).all()
            found.append([[c for c in row if c >= 0] for row in chunk.tolist()])
        found.append(np.asarray(shifted.pair_valid).tolist())
        found.append(np.asarray(shifted.has_start).tolist())
    assert found[:4] == found[4:]
    assert not np.asarray(shifted.has_start)[:, 0].any()


def test_byte_spans(aligner: TokenAligner, tokenizers: Tokenizers) -> None:
    s, t = (spell(tokenizers, name, TEXT) for name in ("byte_level", "sentencepiece"))
    data = TEXT.encode()
    place = 0
    for p in aligner.pairs(s, t):
        assert p.student_bytes == p.teacher_bytes == (place, p.student_bytes[1])
        assert (
            b"".join(aligner.student.table[i] for i in p.student_ids)
            == data[slice(*p.student_bytes)]
        )
        assert p.student_ids == tuple(s[slice(*p.student_tokens)])
        assert p.teacher_ids == tuple(t[slice(*p.teacher_tokens)])
        place = p.student_bytes[1]
    assert place == len(data)


# Whole data sets


def test_flat_arrays_are_the_documents_one_by_one(
    aligner: TokenAligner, tokenizers: Tokenizers
) -> None:
    documents = [TEXT * (i % 5) + str(i) for i in range(50)]
    s, t = ([spell(tokenizers, n, d) for d in documents] for n in ("byte_level", "sentencepiece"))
    s_bounds, t_bounds = (np.cumsum([0, *map(len, side)]) for side in (s, t))
    flat = [np.array([i for row in side for i in row], np.int32) for side in (s, t)]
    found = aligner.align_ids(flat[0], s_bounds, flat[1], t_bounds)
    place = 0
    for d, (row, column) in enumerate(zip(s, t, strict=True)):
        alone = aligner.align(np.array([row]), np.array([column]))
        n = int(alone.num_chunks[0])
        assert found.num_chunks[d] == n
        ours = found.student_chunk_id[s_bounds[d] : s_bounds[d + 1]]
        theirs = found.teacher_chunk_id[t_bounds[d] : t_bounds[d + 1]]
        assert ours.tolist() == alone.student_chunk_id[0].tolist()
        assert theirs.tolist() == alone.teacher_chunk_id[0].tolist()
        assert found.is_correct[place : place + n].tolist() == alone.pair_is_correct[0].tolist()
        place += n
    assert place == len(found.is_correct)


def test_no_documents(aligner: TokenAligner) -> None:
    none = np.zeros(0, np.int64)
    found = aligner.align_ids(none, np.zeros(1, np.int64), none, np.zeros(1, np.int64))
    assert len(found.num_chunks) == len(found.is_correct) == 0
    empty = aligner.align(np.zeros((2, 0), np.int64), np.zeros((2, 3), np.int64) + 300)
    assert empty.num_chunks.tolist() == [0, 0]
    assert empty.pair_valid.tolist() == empty.pair_is_correct.tolist() == [[False], [False]]
    assert shift_to_predictions(empty).pair_valid.tolist() == [[False], [False]]


# Where it is used


def student_chunks(aligner: TokenAligner, s: list[int], t: list[int]) -> list[int]:
    chunks: list[int] = aligner.align(np.array([s]), np.array([t])).student_chunk_id[0].tolist()
    return chunks


def test_what_it_takes(
    small: Path, tmp_path: Path, tokenizers: Tokenizers, aligner: TokenAligner
) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(small / "small-byte-level"))
    before = hf.backend_tokenizer.to_str()
    student, teacher = tokenizers["byte_level"], tokenizers["sentencepiece"]
    path = tmp_path / "map.safetensors"
    xtok.build(student, teacher).save(path)
    s, t = spell(tokenizers, "byte_level", TEXT), spell(tokenizers, "sentencepiece", TEXT)
    expected = student_chunks(aligner, s, t)
    types = teacher.table.types  # transformers may take the unknown token for a control token
    other = np.where(types == TokenType.UNKNOWN, np.uint8(TokenType.CONTROL), types)
    assert (types != other).any()
    likewise = replace(teacher.vocabulary, table=replace(teacher.table, types=other))
    for made in (
        TokenAligner(Pair(student.vocabulary, likewise)),
        TokenAligner(xtok.pair(hf, teacher)),
        TokenAligner(pair_of_maps(xtok.ProjectionMap.load(path)), 2),
        nemo_rl.NemoTokenAligner(hf, teacher),
        nemo_rl.NemoTokenAligner(hf, teacher, path, 4),
        nemo_rl.NemoTokenAligner(student, teacher, projection_matrix_path=str(path)),
    ):
        assert student_chunks(made, s, t) == expected
    assert hf.backend_tokenizer.to_str() == before
    with pytest.raises(XtokError, match="swapped"):
        nemo_rl.NemoTokenAligner(teacher, student, path)
    with pytest.raises(ValueError, match="max_comb_len is 0"):
        TokenAligner(xtok.pair(student, teacher), max_comb_len=0)


# Bad input


@pytest.mark.parametrize(
    ("s", "t", "masks", "message"),
    [
        ([[5000]], [[300]], {}, r"student id 5000 at \[0, 0\] is not in 0\.\.1279"),
        ([[300], [300]], [[300], [-2]], {}, r"teacher id -2 at \[1, 0\] is not in"),
        ([[2**32 + 300]], [[300]], {}, r"student id 4294967596 at \[0, 0\]"),
        ([[300, 1250]], [[300]], {}, r"student id 1250 at \[0, 1\] stands for nothing"),
        ([300], [[300]], {}, r"student_ids are not a padded batch"),
        ([[0.5]], [[300]], {}, r"student_ids are float64"),
        ([[300], [300]], [[300]], {}, "2 student sequences, 1 of the teacher"),
        (
            [[300]],
            [[300]],
            {"student_attention_mask": [[1, 1]]},
            r"student_attention_mask is of shape \[1, 2\], student_ids of \[1, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    aligner: TokenAligner, s: Any, t: Any, masks: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        aligner.align(np.array(s), np.array(t), **{k: np.array(v) for k, v in masks.items()})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 3], "student_offsets do not rise"), ([1, 2], "not rise"), ([0, 2, 1, 2], "not rise"),
     ([], "do not rise"), ([0, 1, 2], "2 student sequences, 1 of")],
)  # fmt: skip
def test_offsets_that_do_not_fit(aligner: TokenAligner, offsets: list[int], message: str) -> None:
    ids = np.array([300, 301])
    with pytest.raises(ValueError, match=message):
        aligner.align_ids(ids, np.array(offsets, np.int64), ids, np.array([0, 2]))


def test_a_document_is_one_list_of_ids(aligner: TokenAligner) -> None:
    with pytest.raises(ValueError, match="teacher_ids are not a flat array"):
        aligner.align_document([300], [[300]])  # type: ignore[list-item]
