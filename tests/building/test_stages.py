"""The stages of a projection map: multitoken, reapply-exact and sort-cut."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import naive
import numpy as np
import pytest
import torch
from checks import identity, not_none, related_by_bytes
from conftest import KINDS, Tokenizers
from make_maps import NO_SLOT, built, read_pt, row
from make_tokenizers import byte_ranks, table_of

import xtok
from xtok.building.exact import reapply_exact
from xtok.building.multitoken import multitoken
from xtok.building.sort_cut import sort_cut
from xtok.config import BuildConfig, MultitokenConfig, SortCutConfig
from xtok.maps.file import sha256
from xtok.maps.map_arguments import bind_map
from xtok.maps.records import RowKind
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES

each_pair = pytest.mark.parametrize("sides", [(a, b) for a in KINDS for b in KINDS])


@pytest.fixture
def tiny(student: Tokenizer, teacher: Tokenizer) -> Pair:
    return xtok.load_pair(student, teacher)


@pytest.fixture
def student(tmp_path: Path) -> Tokenizer:
    return byte_ranks(tmp_path / "student.tiktoken", "th", "the", " the", "20", "201", "ab")


@pytest.fixture
def teacher(tmp_path: Path) -> Tokenizer:
    tokens = ("th", "the", " t", " th", " the", "ab", "abc")
    return byte_ranks(tmp_path / "teacher.tiktoken", *tokens, width=265, digits=1)


# multitoken


def test_an_exact_row_of_another_program_gets_a_slot_and_is_mixed(tmp_path: Path) -> None:
    """NeMo-RL's map may have an entry for an id without a row in multitoken."""
    wide = load_tokenizer("bytes", vocab_size=258)
    ids, weights = torch.full((258, 2), -1), torch.zeros(258, 2)
    ids[256, 0], weights[256, 0] = 256, 1
    foreign = read_pt(tmp_path, {"indices": ids, "likelihoods": weights}, teacher_vocab_size=258)
    assert foreign[256].kind == "exact"
    extended = multitoken(xtok.load_pair(wide, wide), initial=foreign)
    assert row(extended, 256) == [(256, 0.833333), (257, 0.166667)]
    assert extended[256].kind == "mixed"
    assert xtok.verify(extended).failed == ()


def test_weights_of_the_forward_pass(tiny: Pair) -> None:
    forward = multitoken(tiny, replace(NO_SLOT, reverse_pass=False))
    forward.check()
    assert row(forward, 260) == [(0x32, 0.900901), (0x30, 0.09009), (0x31, 0.009009)]  # 201
    assert row(forward, 259) == [(0x32, 0.909091), (0x30, 0.090909)]  # 20
    assert row(forward, 258) == [(260, 1.0)]  # " the"
    assert row(forward, 0x41) == [(0x41, 1.0)]
    assert forward.nnz == 256 + 6 + 3
    assert forward.scale_slot is None
    projection = multitoken(tiny, replace(NO_SLOT, max_pieces=1, reverse_pass=False))
    assert row(projection, 260) == [(0x32, 1.0)]


def test_the_reverse_pass_adds_tokens_that_start_with_the_token(tiny: Pair) -> None:
    both = multitoken(tiny, NO_SLOT)
    both.check()
    # "ab": twice itself, and the first of two pieces of "abc"; "c": the second piece of "abc".
    total = 2 + 0.9 / 0.99
    assert row(both, 261) == [(261, round(2 / total, 6)), (262, round(0.9 / 0.99 / total, 6))]
    total = 2 + 0.09 / 0.99
    assert row(both, 0x63) == [(0x63, round(2 / total, 6)), (262, round(0.09 / 0.99 / total, 6))]


def test_every_row_has_a_slot_until_exact_rows_are_reapplied(tiny: Pair) -> None:
    slots = multitoken(tiny)
    slots.check()
    assert not_none(slots.scale_slot).tolist() == [1] * 262
    slot = 263  # the teacher's first unused id
    assert row(slots, 260) == [
        (0x32, 0.750751), (0x30, 0.075075), (0x31, 0.007508), (slot, 0.166667)
    ]  # fmt: skip
    assert row(slots, 0x41) == [(0x41, 0.833333), (slot, 0.166667)]
    reapplied = reapply_exact(slots)
    reapplied.check()
    assert row(reapplied, 0x41) == [(0x41, 1.0)]
    assert row(reapplied, 260) == row(slots, 260)
    assert np.flatnonzero(not_none(reapplied.scale_slot)).tolist() == [259, 260]


def test_the_slot_counts_toward_top_k(tiny: Pair) -> None:
    two = multitoken(tiny, MultitokenConfig(top_k=2))
    two.check()
    assert row(two, 260) == [(0x32, 0.833333), (263, 0.166667)]
    assert two.entries_per_row.max() == 2


def test_no_slot_without_an_unused_id(student: Tokenizer, tmp_path: Path) -> None:
    full = byte_ranks(tmp_path / "full.tiktoken", "th", digits=1)
    none = multitoken(xtok.load_pair(student, full))
    none.check()
    assert none.enable_scale_trick
    assert not none.is_slot.any()
    assert "262 rows without a scale slot" in none.reports[0].notes[2]


def test_a_row_never_has_its_slot_twice(small: Path, byte_level: Tokenizer) -> None:
    # The single padding id is the slot of all other rows; the row of that id maps to itself.
    width = byte_level.vocabulary.tokenizer_vocab_size
    narrow = load_tokenizer(small / "small-byte-level", vocab_size=width)
    projection = multitoken(xtok.load_pair(byte_level, narrow))
    projection.check()
    [pad] = table_of(narrow).roles["pad"]
    is_other_slot = projection.is_slot & (projection.student_ids != pad)
    assert set(projection.teacher_ids[is_other_slot].tolist()) == {pad}
    assert projection.row(pad)[0][0] == pad
    assert projection.row(pad)[0][1] not in (pad, -1)


@each_pair
def test_maps_agree_with_the_plain_recipe(tokenizers: Tokenizers, sides: tuple[str, str]) -> None:
    student, teacher = (tokenizers[name] for name in sides)
    config = MultitokenConfig(top_k=5, max_pieces=3, scale_trick=False, special_tokens="off")
    projection = multitoken(xtok.load_pair(student, teacher), config)
    projection.check()
    expected = naive.multitoken(student, teacher, top_k=5, max_pieces=3)
    rows = naive.map_rows(projection)
    assert rows.keys() == expected.keys()
    for s, entries in rows.items():
        assert dict(entries) == pytest.approx(expected[s], rel=1e-5)


@each_pair
def test_every_entry_of_a_text_row_is_related_by_bytes(
    tokenizers: Tokenizers, sides: tuple[str, str]
) -> None:
    config = BuildConfig(top_k=32, scale_trick=False)
    student, teacher = (tokenizers[name] for name in sides)
    related_by_bytes(xtok.build(student, teacher, config))


@pytest.mark.parametrize("name", KINDS)
def test_a_tokenizer_onto_itself_is_the_identity_up_to_equal_bytes(
    tokenizers: Tokenizers, name: str
) -> None:
    identity(built(tokenizers[name], tokenizers[name]))


def test_special_tokens_by_role_or_not_at_all(to_pieces: Pair) -> None:
    rows, columns = to_pieces.tables
    roles = multitoken(to_pieces, NO_SLOT)
    bos, eos = rows.roles["bos"][0], rows.roles["eos"][0]
    assert row(roles, bos) == [(columns.roles["bos"][0], 1.0)]
    assert row(roles, eos) == [(columns.roles["eos"][0], 1.0)]
    assert roles.row_kind[bos] == RowKind.ROLE
    off = multitoken(to_pieces, replace(NO_SLOT, special_tokens="off"))
    assert not off.entries_per_row[list(rows.control_names)].any()
    # The later stage uses the canonicalization that the map records, unless it is overridden.
    assert not reapply_exact(off).entries_per_row[list(rows.control_names)].any()
    assert row(reapply_exact(off, special_tokens="roles"), bos) == row(roles, bos)


def test_omitted_tokens_are_reported(byte_level: Tokenizer, ranks: Tokenizer) -> None:
    [report] = multitoken(xtok.load_pair(byte_level, ranks)).reports
    assert report.stage == "multitoken"
    special = len(table_of(byte_level).control_names)
    assert report.counts["rows empty"] == special + 80  # unused ids of the width
    assert any(note.startswith(f"no counterpart for {special} special") for note in report.notes)
    assert report.notes[:2] == (
        "student small-byte-level: vocabulary width 1,280 (from the config)",
        f"teacher small.tiktoken: vocabulary width {len(table_of(ranks)):,} (from the tokenizer)",
    )


def test_progress_is_reported_for_both_passes(tiny: Pair) -> None:
    seen: list[tuple[str, int]] = []
    steps: list[int] = []

    @contextmanager
    def progress(label: str, total: int):  # type: ignore[no-untyped-def]
        seen.append((label, total))
        yield steps.append

    multitoken(tiny, progress=progress)
    assert seen == [
        ("spelling tokens in teacher.tiktoken", 262),
        ("spelling tokens in student.tiktoken", 263),
    ]
    assert sum(steps) == 262 + 263


# Extending a map


def test_a_map_is_extended_without_its_slots(tiny: Pair) -> None:
    first = multitoken(tiny, MultitokenConfig(reverse_pass=False))
    more = multitoken(tiny, replace(NO_SLOT, reverse_pass=False), initial=first)
    more.check()
    assert row(more, 260) == [(0x32, 0.900901), (0x30, 0.09009), (0x31, 0.009009)]
    assert [step["stage"] for step in more.history] == ["multitoken", "multitoken"]
    assert more.history[1]["initial_sha256"] == sha256(first)
    assert "initial_sha256" not in more.history[0]


def test_a_row_of_two_kinds_is_mixed(tiny: Pair) -> None:
    first = reapply_exact(multitoken(tiny, NO_SLOT))
    more = multitoken(tiny, NO_SLOT, initial=first)
    assert more.row_kind[0x41] == RowKind.MIXED
    assert more.row_kind[260] == RowKind.PIECES


# reapply_exact and sort_cut


def test_equal_weights_are_ordered_by_id(tiny: Pair) -> None:
    projection = multitoken(tiny, NO_SLOT)
    # b" ": itself, and " t" and " th" with equal weights, as b" " is the first of their two pieces.
    ids, weights = projection.row(0x20)
    assert ids.tolist() == [0x20, 258, 259]
    assert weights[1] == weights[2]
    cut = sort_cut(projection, SortCutConfig(top_k=2))
    assert cut.row(0x20)[0].tolist() == [0x20, 258]


def test_only_cut_rows_are_normalized(tiny: Pair) -> None:
    projection = multitoken(tiny, NO_SLOT)
    cut = sort_cut(projection, SortCutConfig(top_k=2))
    cut.check()
    assert row(cut, 260) == [(0x32, 0.909091), (0x30, 0.090909)]
    untouched = projection.entries_per_row <= 2
    for i in np.flatnonzero(untouched).tolist():
        assert projection.row(i)[1].tobytes() == cut.row(i)[1].tobytes()
    counts = cut.reports[-1].counts
    assert counts["rows cut"] == int((~untouched).sum())
    mass = sum(projection.row(i)[1][2:].sum() for i in range(262))
    assert counts["mean mass cut per row"] == pytest.approx(mass / 262, rel=1e-3)
    sort_cut(projection, SortCutConfig(top_k=1)).check()


def test_the_slot_stays_last_when_a_row_is_cut(student: Tokenizer, teacher: Tokenizer) -> None:
    projection = xtok.build(student, teacher, BuildConfig(top_k=3))
    projection.check()
    expected = np.array([0.750751, 0.075075, 0.166667])
    ids, weights = projection.row(260)
    assert ids.tolist() == [0x32, 0x30, 263]
    assert weights == pytest.approx(expected / expected.sum(), abs=2e-6)
    assert projection.is_slot.sum() == 2


def test_build_reports_the_finished_map(student: Tokenizer, teacher: Tokenizer) -> None:
    """`build` returns a single report with the rows and slots of the finished map."""
    built = xtok.build(student, teacher)
    [report] = built.reports
    assert report.stage == "build"
    assert report.counts["rows exact"] == (built.row_kind == RowKind.EXACT).sum() > 200
    assert report.counts["rows from pieces"] == (built.row_kind == RowKind.PIECES).sum() < 10
    [slots] = [note for note in report.notes if "slot" in note]
    on_slots = set(built.teacher_ids[built.is_slot].tolist())
    assert all(f" {i} '" in slots for i in on_slots)
    assert f"scale slots use {len(on_slots)} teacher id" in slots


def test_a_map_without_tokens_accepts_the_given_tokenizers(tiny: Pair) -> None:
    full = multitoken(tiny)
    sides = {name: replace(getattr(full, name), table=None) for name in SIDES}
    bare = replace(full, **sides)
    for projection in (reapply_exact(bind_map(bare, tiny)[0]), reapply_exact(bare, tiny)):
        assert sha256(projection) == sha256(reapply_exact(full))


def test_other_kinds_of_arguments_are_refused(tiny: Pair) -> None:
    """A number or a configuration of another function is an error."""
    with pytest.raises(TypeError, match="config is 0"):
        sort_cut(multitoken(tiny), 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="BuildConfig"):
        xtok.build("bytes", "bytes", SortCutConfig())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="special_tokens is 'some'"):
        reapply_exact(multitoken(tiny), special_tokens="some")  # type: ignore[arg-type]


def test_a_map_that_names_other_models_is_noted(tmp_path: Path) -> None:
    """NeMo-RL only warns here; a map without tokens can be compared by width only."""
    content = {
        "indices": torch.tensor([[0, -1]] * 256),
        "likelihoods": torch.tensor([[1.0, 0.0]] * 256),
        "student_model_id": "org/bytes",
        "teacher_model_id": "org/other",
    }
    foreign = read_pt(tmp_path, content, teacher_vocab_size=256)
    pair = xtok.load_pair("bytes", "bytes")
    for projection in (multitoken(pair, initial=foreign), reapply_exact(foreign, pair)):
        notes = [note for report in projection.reports for note in report.notes]
        assert [note for note in notes if "org/other" in note and "teacher" in note]
        assert not [note for note in notes if "org/bytes" in note]
        assert projection.reports[0].stage == "import"
