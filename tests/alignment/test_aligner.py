"""`TokenAligner`: chunks, masks and formats of alignments."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from conftest import KINDS, Aligners, Tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from make_maps import built
from numpy.typing import NDArray

import xtok
from xtok.alignment.aligner import AlignmentBatch, TokenAligner, shift_to_predictions
from xtok.errors import XtokError
from xtok.maps.map_arguments import bind_map
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenType
from xtok.training.trainers import nemo_rl

TEXT = (
    "The quick brown fox, 2024 of them;  das Größte — 東京都 👨\u200d👩 def f(x):\n\treturn x\r\n"
)


def chunks_of(aligner: TokenAligner, s: list[int], t: list[int]) -> list[tuple[Any, ...]]:
    """The positions of a chunk on both sides, and whether the chunk is correct."""
    alignment = aligner.align(np.array([s]), np.array([t]))
    sides = [alignment.student_chunk_id[0].tolist(), alignment.teacher_chunk_id[0].tolist()]
    correct = np.asarray(alignment.pair_is_correct)[0, : int(alignment.num_chunks[0])].tolist()
    return [
        (*([i for i, c in enumerate(side) if c == k] for side in sides), is_correct)
        for k, is_correct in enumerate(correct)
    ]


def same_bytes(aligner: TokenAligner, s: list[int], t: list[int]) -> None:
    """Check that chunks of the same bytes end at every boundary that both sides have."""
    rows, columns = aligner.student.table, aligner.teacher.table
    expected = naive.common_boundaries([rows[i] for i in s], [columns[i] for i in t])
    assert chunks_of(aligner, s, t) == [(*chunk, True) for chunk in expected]


@pytest.fixture(scope="module")
def aligner(aligners: Aligners) -> TokenAligner:
    return aligners["byte_level", "sentencepiece"]


Spell = Callable[..., list[int]]


def parts_ids(tokenizer: Tokenizer, *parts: str) -> list[int]:
    """Segment text; parts that are names of control tokens become these tokens."""
    names = {n: i for i, n in tokenizer.table.control_names.items()}
    ids: list[int] = []
    for part in parts:
        ids += [names[part]] if part in names else tokenizer.segment(part.encode())
    return ids


@pytest.fixture(scope="module")
def spell_student(byte_level: Tokenizer) -> Spell:
    """Spell text with the student's tokens."""
    return partial(parts_ids, byte_level)


@pytest.fixture(scope="module")
def spell_teacher(sentencepiece: Tokenizer) -> Spell:
    """Spell text with the teacher's tokens."""
    return partial(parts_ids, sentencepiece)


# Exact chunks have equal bytes


@pytest.mark.parametrize("pair", [*itertools.product(KINDS, KINDS)])
def test_chunks_end_at_every_common_boundary(
    aligners: Aligners, tokenizers: Tokenizers, pair: tuple[str, str]
) -> None:
    for text in (TEXT, TEXT * 3, "a", "", " ", "\xff\x00\x80" * 9, "ababab" * 99):
        same_bytes(aligners[pair], *(tokenizers[name].segment(text.encode()) for name in pair))


@given(data=st.data())
@settings(max_examples=150)
def test_random_tokens_of_the_same_bytes(aligners: Aligners, data: st.DataObject) -> None:
    aligner = data.draw(st.sampled_from(list(aligners.values())))
    rows = aligner.student.table
    s = data.draw(st.lists(st.sampled_from(rows.text_ids.tolist()), max_size=30))
    # Any spelling of the same bytes, partial UTF-8 included; not only the tokenizer's own.
    rest = b"".join(rows[i] for i in s)
    ids_by_bytes = aligner.teacher.table.canonical_ids()
    t = []
    while rest:
        n = data.draw(st.sampled_from([n for n in range(1, 12) if rest[:n] in ids_by_bytes]))
        t.append(ids_by_bytes[rest[:n]])
        rest = rest[n:]
    same_bytes(aligner, s, t)


@given(data=st.data())
@settings(max_examples=150)
def test_any_two_rows_give_a_consistent_alignment(aligners: Aligners, data: st.DataObject) -> None:
    aligner = data.draw(st.sampled_from(list(aligners.values())))
    sides = aligner.student.table, aligner.teacher.table
    ids = [st.sampled_from([*s.text_ids.tolist()[:400:3], *s.control_names]) for s in sides]
    check_consistent(aligner, *(data.draw(st.lists(i, max_size=40)) for i in ids))


def check_consistent(shared: TokenAligner, s: list[int], t: list[int]) -> None:
    aligner = copy(shared)
    rows, columns = aligner.student.table, aligner.teacher.table
    arrays = [np.array([ids], np.int64).reshape(1, -1) for ids in (s, t)]
    ones = (np.ones_like(ids) for ids in arrays)  # here, a pad token counts like any other token
    mask = dict(zip(("student_attention_mask", "teacher_attention_mask"), ones, strict=True))
    aligner.python_tokens_left = 10**9  # runs the Python implementation
    alignment = aligner.align(*arrays, **mask)
    aligner.python_tokens_left = 0  # runs the compiled kernel
    assert_same(aligner.align(*arrays, **mask), alignment)
    chunks = aligner.pairs(s, t)
    assert alignment.num_chunks.tolist() == [len(chunks)]
    for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id):
        used = [c for c in np.asarray(ids)[0].tolist() if c >= 0]
        assert used == sorted(used)
        assert set(used) == set(range(len(chunks)))
    for chunk in chunks:
        student_bytes = b"".join(rows[i] for i in chunk.student_ids)
        teacher_bytes = b"".join(columns[i] for i in chunk.teacher_ids)
        controls = [i for i in chunk.student_ids if i in rows.control_names]
        if chunk.is_correct and not controls:
            assert student_bytes == teacher_bytes
        elif chunk.is_correct and len(chunk.student_ids) == 1:
            assert len(chunk.teacher_ids) == 1
            assert chunk.teacher_ids[0] in columns.control_names
        elif not chunk.is_correct:
            assert max(len(chunk.student_ids), len(chunk.teacher_ids)) <= aligner.max_comb_len


# Sides with different bytes


def readable(aligner: TokenAligner, s: list[int], t: list[int]) -> list[tuple[str, str, bool]]:
    names = aligner.student.table.name, aligner.teacher.table.name
    return [
        (
            "|".join(map(names[0], p.student_ids)),
            "|".join(map(names[1], p.teacher_ids)),
            p.is_correct,
        )
        for p in aligner.pairs(s, t)
    ]


def test_special_tokens_of_the_same_role_are_a_chunk(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    s, t = (
        spell_student("<|begin_of_text|>", " a", "<|end_of_text|>"),
        spell_teacher("<s>", " a", "</s>"),
    )
    assert readable(aligner, s, t) == [
        ("<|begin_of_text|>", "<s>", True),
        (" a", " a", True),
        ("<|end_of_text|>", "</s>", True),
    ]
    alignment = aligner.align(np.array([s]), np.array([t]))
    assert alignment.student_exact_partition_mask.tolist() == [[True, True, True]]


def test_a_bos_without_a_counterpart_changes_no_chunk(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    s, t = spell_student(TEXT), spell_teacher(TEXT)
    plain = readable(aligner, s, t)
    assert all(correct for _, _, correct in plain)
    assert readable(aligner, spell_student("<|begin_of_text|>") + s, t) == plain
    assert readable(aligner, s, spell_teacher("<s>") + t) == plain


def test_special_tokens_without_a_counterpart_are_skipped(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    s = spell_student("<|im_start|>", " a", "<|im_end|>", " b")
    t = spell_teacher("[INST]", " a", "[/INST]", " b")
    assert readable(aligner, s, t) == [(" a", " a", True), (" b", " b", True)]
    # The same in the middle of a chunk.
    assert readable(aligner, spell_student("1", "<|im_start|>", "2"), spell_teacher("12"))


@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFD"])
def test_a_normalizer_excludes_only_the_text_that_it_changes(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell, form: Any
) -> None:
    tail = " of the 2024 and the text of the end"
    text = f" of cafe\u0301 and the ﬁnal text,\uff0c{tail}"
    s, t = spell_student(text), spell_teacher(unicodedata.normalize(form, text))
    chunks = readable(aligner, s, t)
    assert chunks[0] == (" of", " of", True)
    correct = "".join(s for s, _, c in chunks if c).replace("|", "")
    assert correct.endswith(tail)
    assert len(correct) > 0.7 * len(text)
    check_consistent(aligner, s, t)


def test_truncation_leaves_a_tail_unaligned(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    s, t = spell_student(TEXT * 4), spell_teacher(TEXT * 4)
    whole = chunks_of(aligner, s, t)
    for cut in (1, 5, len(t) // 2, len(t) - 1):
        prefix_chunks = chunks_of(aligner, s, t[:cut])
        assert prefix_chunks == whole[: len(prefix_chunks)]
        assert whole[len(prefix_chunks)][1][-1] >= cut  # the next chunk ends after the cut


def test_a_passage_missing_from_a_side_excludes_only_itself(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    first, second = TEXT, " and of the end of the text,\n again" * 3
    extra = "something that is only here, " * 40
    chunks = aligner.pairs(spell_student(first, extra, second), spell_teacher(first, second))
    assert sum(not p.is_correct for p in chunks) <= 2
    covered = sum(p.teacher_bytes[1] - p.teacher_bytes[0] for p in chunks if p.is_correct)
    assert covered > 0.9 * len((first + second).encode())
    assert chunks[-1].is_correct


def test_groups_of_tokens_match_within_a_stretch_that_differs(
    pair: Pair, spell_student: Spell, digits: Tokenizer
) -> None:
    s, t = spell_student("x", "201", "y"), parts_ids(digits, "z", "201", "w")
    three, two = (readable(TokenAligner(pair, max_comb_len=n), s, t) for n in (3, 2))
    assert three == [("x", "z", False), ("2|0|1", "201", True), ("y", "w", False)]
    # Groups of at most two tokens do not match, and the rest is too long for one chunk.
    assert ("2|0|1", "201", True) not in two


def test_chunks_are_the_same_before_and_after_the_first_600_tokens(
    to_pieces: Pair, spell_student: Spell, spell_teacher: Spell
) -> None:
    """Up to this number of tokens, an aligner does not wait for compiled code."""
    aligner = TokenAligner(to_pieces)
    in_python = copy(aligner)
    in_python.python_tokens_left = 10**9
    s, t = (
        spell_student("cafe\u0301" + " of the end" * 20),
        spell_teacher("caf\u00e9" + " of the end" * 20),
    )
    expected = readable(in_python, s, t)
    assert [correct for _, _, correct in expected[-60:]] == [True] * 60
    num_left = []
    for _ in range(5):
        assert readable(aligner, s, t) == expected
        num_left.append(aligner.python_tokens_left)
    assert num_left == [600 - 168 * n for n in range(1, 6)]


def test_groups_may_be_longer_than_the_text(
    pair: Pair, spell_student: Spell, digits: Tokenizer
) -> None:
    s, t = spell_student("x", "201", "y"), parts_ids(digits, "z", "201", "w")
    some, most = (readable(TokenAligner(pair, max_comb_len=n), s, t) for n in (len(s + t), 64))
    assert some == most


def test_different_texts_have_no_correct_chunk(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    s, t = spell_student("中文" * 1000), spell_teacher("abc " * 1000)
    assert not any(correct for _, _, correct in readable(aligner, s, t))
    assert aligner.pairs([], t) == aligner.pairs(s, []) == []


# Batches


def batch(
    rows: list[list[int]], pad: int = 0, *, left: bool = False, more: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Pad rows to the longest row and `more` tokens; also return their mask."""
    width = max(map(len, rows)) + more
    ids = np.full((len(rows), width), pad, np.int64)
    mask = np.zeros((len(rows), width), np.bool_)
    for i, row in enumerate(rows):
        span = slice(width - len(row), None) if left else slice(len(row))
        ids[i, span] = row
        mask[i, span] = True
    return ids, mask


Texts = tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def texts(spell_student: Spell, spell_teacher: Spell) -> Texts:
    parts = [TEXT, TEXT[:20], "a", TEXT * 2]
    return [spell_student("<|begin_of_text|>", p) for p in parts], [
        spell_teacher("<s>", p, "</s>") for p in parts
    ]


@pytest.mark.parametrize("left", [False, True])
def test_padding_never_forms_a_chunk(aligner: TokenAligner, texts: Texts, left: bool) -> None:
    pad = aligner.student.table.roles["pad"][0]
    eos = aligner.teacher.table.roles["eos"][0]
    s, s_mask = batch(texts[0], pad, left=left)
    t, t_mask = batch(texts[1], eos, left=left)
    alignment = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask)
    assert (alignment.student_chunk_id[~s_mask] == -1).all()
    assert (alignment.teacher_chunk_id[~t_mask] == -1).all()
    for i, (row, column) in enumerate(zip(*texts, strict=True)):
        single = aligner.align(np.array([row]), np.array([column]))
        student_chunk, teacher_chunk = alignment.student_chunk_id[i], alignment.teacher_chunk_id[i]
        assert student_chunk[s_mask[i]].tolist() == single.student_chunk_id[0].tolist()
        assert teacher_chunk[t_mask[i]].tolist() == single.teacher_chunk_id[0].tolist()
        assert alignment.num_chunks[i] == alignment.pair_valid[i].sum() == single.num_chunks[0]
        assert not alignment.pair_is_correct[i][~alignment.pair_valid[i]].any()
    # Without a mask, tokens with the role pad are padding.
    assert_same(aligner.align(s, t, teacher_attention_mask=t_mask), alignment)


def assert_same(a: AlignmentBatch[Any], b: AlignmentBatch[Any]) -> None:
    for name, value in vars(a).items():
        assert np.asarray(value).tolist() == np.asarray(getattr(b, name)).tolist(), name


def test_an_end_of_text_that_pads_as_well(byte_level: Tokenizer, spell_student: Spell) -> None:
    eos = byte_level.table.roles["eos"][0]
    both = replace(byte_level.table, roles={"eos": (eos,), "pad": (eos,)})
    side = replace(byte_level.vocabulary, table=both)
    ended = [*spell_student(" a b"), eos]
    n = len(ended)
    padded = np.array([[*ended, eos, eos], [eos, eos, *ended]])
    alignment = TokenAligner(Pair(side, side)).align(padded, np.array([ended, ended]))
    assert alignment.num_chunks.tolist() == [n, n]
    assert alignment.student_chunk_id.tolist() == [[*range(n), -1, -1], [-1, -1, *range(n)]]


def test_the_fields_and_their_types(aligner: TokenAligner, texts: Texts) -> None:
    (s, s_mask), (t, t_mask) = map(batch, texts)
    masks = {"student_attention_mask": s_mask, "teacher_attention_mask": t_mask}
    alignment = aligner.align(s, t, **masks)
    pairs = int(alignment.num_chunks.max())
    assert {name: (value.dtype.name, value.shape) for name, value in vars(alignment).items()} == {
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
    for name, value in vars(as_torch).items():
        assert value.numpy().dtype == getattr(alignment, name).dtype
    assert_same(alignment, as_torch)


def test_exact_partition_masks_mark_chunks_with_a_token_on_each_side(
    aligner: TokenAligner, texts: Texts
) -> None:
    (s, s_mask), (t, t_mask) = map(batch, texts)
    alignment = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask)
    for i, sides in enumerate(zip(*texts, strict=True)):
        chunks = [p for p in aligner.pairs(*sides) if p.is_correct]
        single = [p for p in chunks if len(p.student_ids) == len(p.teacher_ids) == 1]
        for mask, positions in (
            (alignment.student_exact_partition_mask, [p.student_tokens[0] for p in single]),
            (alignment.teacher_exact_partition_mask, [p.teacher_tokens[0] for p in single]),
        ):
            assert np.flatnonzero(mask[i]).tolist() == positions


def test_shift_to_predictions(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    s, t = np.array([spell_student("<|begin_of_text|>", " a b")]), np.array([spell_teacher(" a b")])
    alignment = aligner.align(s, t)
    shifted = shift_to_predictions(alignment)
    assert alignment.student_chunk_id[0].tolist() == [-1, *range(s.shape[1] - 1)]
    assert shifted.student_chunk_id[0].tolist() == [*range(s.shape[1] - 1), -1]
    # The teacher has no BOS, so no position predicts its first token.
    assert shifted.teacher_chunk_id[0].tolist() == [*range(1, t.shape[1]), -1]
    assert shifted.pair_valid[0].tolist() == [False] + [True] * (t.shape[1] - 1)
    assert shifted.student_exact_partition_mask[0].tolist()[-1] is False
    tensors = aligner.align(torch.from_numpy(s), torch.from_numpy(t))
    assert_same(shift_to_predictions(tensors), shifted)
    assert tensors.pair_valid.all()  # the batch itself is not changed
    with pytest.raises(ValueError, match="already shifted"):
        shift_to_predictions(shifted)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_padding_has_no_prediction_on_either_side(
    aligner: TokenAligner,
    spell_student: Spell,
    spell_teacher: Spell,
    has_mask: bool,
    as_tensor: bool,
) -> None:
    texts = [" a", " a b", "qzx a b", "\xff\xfe a", "a b c d e f g"]
    sides = {
        "student": ([*map(spell_student, texts)], aligner.student.table.roles["pad"][0]),
        "teacher": ([*map(spell_teacher, texts)], 0),
    }
    fields = []
    for left in (False, True):
        inputs = {name: batch(*side, left=left, more=2) for name, side in sides.items()}
        masks = {f"{name}_attention_mask": mask for name, (_, mask) in inputs.items()}
        if not has_mask:
            del masks["student_attention_mask"]
        ids: Any = (torch.from_numpy(ids) if as_tensor else ids for ids, _ in inputs.values())
        shifted = shift_to_predictions(aligner.align(*ids, **masks))
        for name, (_, mask) in inputs.items():
            chunk = np.asarray(getattr(shifted, f"{name}_chunk_id"))
            assert (chunk[~mask] == -1).all()
            fields.append([[c for c in row if c >= 0] for row in chunk.tolist()])
        fields.append(np.asarray(shifted.pair_valid).tolist())
        fields.append(np.asarray(shifted.has_start).tolist())
    assert fields[:4] == fields[4:]
    assert not np.asarray(shifted.has_start)[:, 0].any()


def test_pairs_have_equal_byte_spans_that_cover_the_text(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    s, t, data = spell_student(TEXT), spell_teacher(TEXT), TEXT.encode()
    offset = 0
    for p in aligner.pairs(s, t):
        assert p.student_bytes == p.teacher_bytes == (offset, p.student_bytes[1])
        written = b"".join(aligner.student.table[i] for i in p.student_ids)
        assert written == data[slice(*p.student_bytes)]
        assert p.student_ids == tuple(s[slice(*p.student_tokens)])
        assert p.teacher_ids == tuple(t[slice(*p.teacher_tokens)])
        offset = p.student_bytes[1]
    assert offset == len(data)


# Whole data sets


def test_flat_arrays_give_the_chunks_of_each_document(
    aligner: TokenAligner, spell_student: Spell, spell_teacher: Spell
) -> None:
    documents = [TEXT * (i % 5) + str(i) for i in range(50)]
    s, t = [*map(spell_student, documents)], [*map(spell_teacher, documents)]
    s_bounds, t_bounds = (np.cumsum([0, *map(len, side)]) for side in (s, t))
    flat = [np.array([i for row in side for i in row], np.int32) for side in (s, t)]
    together = aligner.align_ids(flat[0], s_bounds, flat[1], t_bounds)
    index = 0
    for d, (row, column) in enumerate(zip(s, t, strict=True)):
        single = aligner.align(np.array([row]), np.array([column]))
        n = int(single.num_chunks[0])
        assert together.num_chunks[d] == n
        for chunk_id, bounds, expected in (
            (together.student_chunk_id, s_bounds, single.student_chunk_id),
            (together.teacher_chunk_id, t_bounds, single.teacher_chunk_id),
        ):
            assert chunk_id[bounds[d] : bounds[d + 1]].tolist() == expected[0].tolist()
        assert together.is_correct[index : index + n].tolist() == single.pair_is_correct[0].tolist()
        index += n
    assert index == len(together.is_correct)


def test_an_empty_side_gives_no_chunks(aligner: TokenAligner) -> None:
    none = np.zeros(0, np.int64)
    alignment = aligner.align_ids(none, np.zeros(1, np.int64), none, np.zeros(1, np.int64))
    assert len(alignment.num_chunks) == len(alignment.is_correct) == 0
    empty = aligner.align(np.zeros((2, 0), np.int64), np.zeros((2, 3), np.int64) + 300)
    assert empty.num_chunks.tolist() == [0, 0]
    assert empty.pair_valid.tolist() == empty.pair_is_correct.tolist() == [[False], [False]]
    assert shift_to_predictions(empty).pair_valid.tolist() == [[False], [False]]


# Callers of the aligner


def test_models_maps_and_paths_as_arguments_give_the_same_chunks(
    small: Path, tmp_path: Path, to_pieces: Pair, aligner: TokenAligner,
    spell_student: Spell, spell_teacher: Spell,
) -> None:  # fmt: skip
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(small / "small-byte-level"))
    before = hf.backend_tokenizer.to_str()
    student, teacher = to_pieces.tokenizers
    path = tmp_path / "map.safetensors"
    built(student, teacher).save(path)
    s, t = spell_student(TEXT), spell_teacher(TEXT)
    expected = chunks_of(aligner, s, t)
    types = teacher.table.types  # Transformers may treat the unknown token as a control token
    other = np.where(types == TokenType.UNKNOWN, np.uint8(TokenType.CONTROL), types)
    assert (types != other).any()
    likewise = replace(teacher.vocabulary, table=replace(teacher.table, types=other))
    for alignment in (
        TokenAligner(Pair(student.vocabulary, likewise)),
        TokenAligner(xtok.load_pair(hf, teacher)),
        TokenAligner(bind_map(xtok.ProjectionMap.load(path))[1], 2),
        nemo_rl.NemoTokenAligner(hf, teacher),
        nemo_rl.NemoTokenAligner(hf, teacher, path, 4),
        nemo_rl.NemoTokenAligner(student, teacher, projection_matrix_path=str(path)),
    ):
        assert chunks_of(alignment, s, t) == expected
    assert hf.backend_tokenizer.to_str() == before
    with pytest.raises(XtokError, match="swapped"):
        nemo_rl.NemoTokenAligner(teacher, student, path)
    for n in (0, 65):
        with pytest.raises(ValueError, match=f"max_comb_len is {n}"):
            TokenAligner(to_pieces, max_comb_len=n)


# Bad input


@pytest.mark.parametrize(
    ("s", "t", "masks", "message"),
    [
        ([[5000]], [[300]], {}, r"id 5000 at \[0, 0\] .*1279"),
        ([[300], [300]], [[300], [-2]], {}, r"teacher id -2 at \[1, 0\]"),
        ([[2**32 + 300]], [[300]], {}, r"4294967596 at \[0, 0\]"),
        ([[300, 1250]], [[300]], {}, r"student id 1250 at \[0, 1\]"),
        ([300], [[300]], {}, "student_ids"),
        ([[0.5]], [[300]], {}, "student_ids .*float64"),
        ([[300], [300]], [[300]], {}, "2 student sequences"),
        ([[300]], [[300]], {"student_attention_mask": [[1, 1]]}, r"mask .*\[1, 2\]"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(
    aligner: TokenAligner, s: Any, t: Any, masks: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        aligner.align(np.array(s), np.array(t), **{k: np.array(v) for k, v in masks.items()})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 3], "student_offsets"), ([1, 2], "student_offsets"),
     ([0, 2, 1, 2], "student_offsets"), ([], "student_offsets"),
     ([0, 1, 2], "2 student sequences")],
)  # fmt: skip
def test_offsets_that_do_not_fit(aligner: TokenAligner, offsets: list[int], message: str) -> None:
    ids = np.array([300, 301])
    with pytest.raises(ValueError, match=message):
        aligner.align_ids(ids, np.array(offsets, np.int64), ids, np.array([0, 2]))


def test_a_document_is_one_list_of_ids(aligner: TokenAligner) -> None:
    with pytest.raises(ValueError, match="teacher_ids"):
        aligner.align_document([300], [[300]])  # type: ignore[list-item]
