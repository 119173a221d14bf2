"""The effect of each option of `build`, `multitoken` and `reapply_exact` on a map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import not_none
from make_maps import NO_SLOT, equal_maps, read_pt, row
from make_tokenizers import byte_ranks

import xtok
from xtok.building.counted import synthetic_map
from xtok.building.exact import find_matches, reapply_exact
from xtok.building.multitoken import multitoken, spelled_map
from xtok.building.sort_cut import sort_cut
from xtok.config import BuildConfig, MultitokenConfig, SortCutConfig, Weights
from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import make_recipe
from xtok.maps.records import RowKind
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.roles import match_names

# With any options, tokens of both sides are spelled only if the result depends on it


@pytest.mark.parametrize(
    "options",
    [
        {}, {"top_k": 2, "max_pieces": 1}, {"scale_trick": False, "reverse_pass": False},
        {"exact_match": False},
        {"special_tokens": "fuzzy", "fuzzy_threshold": 0.3},
        {"special_tokens": "off"}, {"canonicalization": "relaxed"}, {"token_form": "text"},
        {"token_form": "raw"}, {"ignore_student_ids": (5, 300)},
        {"ignore_teacher_ids": (7, 40, 300)},
        {"canonicalization": "relaxed", "token_form": "text", "ignore_teacher_ids": (7, 300)},
        {"weights": "synthetic", "scale_trick": False},
        {"prep_top_k": 3, "top_k": 2, "scale_trick": False},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("student_name", "teacher_name"), [("byte_level", "sentencepiece"), ("sentencepiece", "ranks")]
)
def test_build_is_its_stages_byte_for_byte(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    student_name: str,
    teacher_name: str,
    options: dict[str, Any],
) -> None:
    student, teacher = (request.getfixturevalue(name) for name in (student_name, teacher_name))
    config = BuildConfig(**options)
    pair = xtok.load_pair(student, teacher)
    if config.weights == "synthetic":
        first, _ = synthetic_map(pair, config, find_matches(pair, config))
        stage_config = replace(config, top_k=config.prep_top_k, exact_match=False)
        first = replace(first, recipe=make_recipe(stage_config))
    else:
        first = multitoken(pair, config.multitoken)
    built = xtok.build(student, teacher, config)
    assert built.nnz > len(student.table) // 2
    assert built.recipe == make_recipe(config)
    for path in (tmp_path / "map.safetensors", tmp_path / "map.pt"):
        first.save(path)
        if config.exact_match:
            reapply_exact(ProjectionMap.load(path), pair).save(path)
        sort_cut(ProjectionMap.load(path), SortCutConfig(top_k=config.top_k)).save(path)
        assert equal_maps(ProjectionMap.load(path), built)


def test_only_the_requested_rows_are_built(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "ab", "abc")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "abc")
    pair = xtok.load_pair(student, teacher)
    only = np.ones(len(student.table), np.bool_)
    only[[97, 257]] = False
    for options in ({}, {"canonicalization": "relaxed"}, {"weights": "synthetic"}):
        config = BuildConfig(**options)  # type: ignore[arg-type]
        matches = find_matches(pair, config)
        if config.weights == "synthetic":
            projection, _ = synthetic_map(pair, config, matches, only=only)
        else:
            projection, _ = spelled_map(pair, config.multitoken, matches, only=only)
        projection.check()
        assert np.flatnonzero(projection.row_kind == RowKind.EMPTY).tolist() == [97, 257]


@pytest.mark.parametrize("weights", ["decay", "synthetic"])
def test_tokens_that_cannot_be_spelled_are_failures(
    sentencepiece: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    spell = sentencepiece.segment_batch

    def all_but_two(pieces: Sequence[bytes]) -> list[list[int] | None]:
        lost = (b"qzx", b"qzy")
        return [None if p in lost else f for p, f in zip(pieces, spell(pieces), strict=True)]

    monkeypatch.setattr(sentencepiece, "segment_batch", all_but_two)
    student = byte_ranks(tmp_path / "student.tiktoken", "qzx", "qzy")
    pair = xtok.load_pair(student, sentencepiece)
    for ignored, failures in (
        ((), ("small.model cannot spell 2 tokens: 256 'qzx', 257 'qzy'",)),
        ((256, 257), ()),
    ):
        config = BuildConfig(weights=weights, reverse_pass=False, ignore_student_ids=ignored)
        [report] = xtok.build(*pair.tokenizers, config).reports
        assert report.failures == failures


def test_build_reports_the_finished_map_and_the_counted_text(tmp_path: Path) -> None:
    """The row of the former slot is exact and counted; the ignored row is empty by request."""
    student = byte_ranks(tmp_path / "student.tiktoken")
    projection = xtok.build(student, student, BuildConfig(ignore_student_ids=(254,)))
    [result] = projection.reports
    assert {what: n for what, n in result.counts.items() if n} == {
        "rows empty": 1,
        "rows exact": 255,
    }
    assert [note for note in result.notes if not note.startswith("student")] == [
        "teacher student.tiktoken: vocabulary width 256 (from the tokenizer)"
    ]
    for config in (
        BuildConfig.for_loss("p-kl"),
        BuildConfig(weights="synthetic", exact_match=False),
    ):
        [report] = xtok.build(student, student, config).reports
        assert report.counts["rows counted"] == 256
        assert sum(n for what, n in report.counts.items() if what.startswith("rows ")) == 256


def test_ignored_ids_are_not_reported_as_unmatched(
    sentencepiece: Tokenizer, byte_level: Tokenizer
) -> None:
    special = tuple(sentencepiece.table.control_names)
    assert len(special) >= 2
    config = BuildConfig(special_tokens="off", ignore_student_ids=special)
    for projection in (
        xtok.build(sentencepiece, byte_level, config),
        multitoken(xtok.load_pair(sentencepiece, byte_level), config.multitoken),
    ):
        notes = [note for report in projection.reports for note in report.notes]
        assert not [note for note in notes if "no counterpart" in note or "empty rows" in note]


# --canonicalization relaxed


@pytest.fixture
def commas(tmp_path: Path) -> tuple[Tokenizer, Tokenizer]:
    student = byte_ranks(tmp_path / "student.tiktoken", " ,", "\r\n")
    return student, byte_ranks(tmp_path / "teacher.tiktoken", "ab", width=260)


def test_relaxed_rows_have_an_entry_and_a_slot(commas: tuple[Tokenizer, Tokenizer]) -> None:
    comma, line_break, slot = 256, 257, 257  # the teacher's first unused id
    relaxed = xtok.build(*commas, BuildConfig(canonicalization="relaxed"))
    relaxed.check()
    assert row(relaxed, comma) == [(0x2C, 0.833333), (slot, 0.166667)]
    assert row(relaxed, line_break) == [(0x0A, 0.833333), (slot, 0.166667)]
    assert relaxed.row_kind[[comma, line_break]].tolist() == [RowKind.RELAXED] * 2
    exact = xtok.build(*commas, BuildConfig())
    assert row(exact, comma) == [(0x20, 0.757576), (0x2C, 0.075758), (slot, 0.166667)]
    assert exact.row_kind[comma] == RowKind.PIECES
    assert [i for i in range(256) if row(exact, i) != row(relaxed, i)] == []
    plain = xtok.build(*commas, BuildConfig(canonicalization="relaxed", scale_trick=False))
    assert row(plain, comma) == [(0x2C, 1.0)]


def test_a_near_equivalent_that_another_program_has_as_slot(
    commas: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """In NeMo-RL's maps, the last column is the slot for any id in it."""
    comma, line_break = 256, 257
    foreign = {
        "indices": torch.tensor([[7, 8, 0x2C]] * 258),
        "likelihoods": torch.tensor([[0.5, 0.25, 0.25]] * 258),
        "enable_scale_trick": True,
    }
    projection = read_pt(tmp_path, foreign, teacher_vocab_size=260)
    relaxed = reapply_exact(projection, xtok.load_pair(*commas), canonicalization="relaxed")
    relaxed.check()
    assert row(relaxed, comma) == [(0x2C, 1.0)]
    assert row(relaxed, line_break) == [(0x0A, 0.75), (0x2C, 0.25)]


def test_relaxed_pairs_are_added_to_the_other_sources(
    commas: tuple[Tokenizer, Tokenizer],
) -> None:
    soft = multitoken(
        xtok.load_pair(*commas), replace(NO_SLOT, canonicalization="relaxed", reverse_pass=False)
    )
    # The pieces have the weights 10/11 and 1/11, and the near-equivalent has 1 before the division.
    assert row(soft, 256) == [(0x2C, 0.545455), (0x20, 0.454545)]
    assert soft.row_kind[256] == RowKind.PIECES
    # The later stage uses the canonicalization that the map records, unless it is overridden.
    assert row(reapply_exact(soft), 256) == [(0x2C, 1.0)]
    assert row(reapply_exact(soft, canonicalization="exact"), 256) == row(soft, 256)


def test_a_near_equivalent_of_a_token_without_a_spelling(
    commas: tuple[Tokenizer, Tokenizer],
) -> None:
    pair, line_break = xtok.load_pair(*commas), 257
    config = replace(NO_SLOT, max_pieces=1, ignore_teacher_ids=(13,))
    soft = multitoken(pair, replace(config, canonicalization="relaxed"))
    soft.check()
    assert row(soft, line_break) == [(10, 1.0)]
    assert soft.row_kind[line_break] == RowKind.PIECES
    assert row(multitoken(pair, config), line_break) == []


# --special-tokens fuzzy


def test_fuzzy_special_tokens(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    config = replace(NO_SLOT, special_tokens="fuzzy", fuzzy_threshold=0.2)
    fuzzy = multitoken(xtok.load_pair(byte_level, sentencepiece), config)
    fuzzy.check()
    pairs = match_names(byte_level.table, sentencepiece.table, threshold=0.2)
    assert pairs
    names = byte_level.table.control_names
    expected = [[(pairs[s], 1.0)] if s in pairs else [] for s in names]
    assert [row(fuzzy, s) for s in names] == expected
    assert fuzzy.history[-1]["options"]["fuzzy_threshold"] == 0.2
    reapplied = reapply_exact(fuzzy)  # the threshold comes from the map
    assert [row(reapplied, s) for s in names] == expected
    assert reapplied.history[-1]["options"] == {"special_tokens": "fuzzy"}


def test_options_without_effect_are_not_in_the_history() -> None:
    assert MultitokenConfig().options == {
        "top_k": 32, "max_pieces": 4, "reverse_pass": True, "scale_trick": True,
        "special_tokens": "roles",
    }  # fmt: skip
    assert MultitokenConfig(fuzzy_threshold=0.9).options == MultitokenConfig().options
    ignored = MultitokenConfig(ignore_student_ids=(3, 4)).options
    assert ignored["ignore_student_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuzzy_threshold": 0.0}, "fuzzy_threshold is 0.0"),
        ({"top_k": 0, "scale_trick": False}, "top_k is 0"),
        ({"top_k": 1}, "top_k is 1, .*scale_trick"),
        ({"max_pieces": 10**9}, "max_pieces is 1000000000"),
        ({"max_pieces": 0}, "max_pieces is 0"),
        ({"max_pieces": 2.5}, "max_pieces is 2.5"),
        ({"max_pieces": True}, "max_pieces is True"),
        ({"top_k": None}, "top_k is None"),
        ({"scale_trick": "no"}, "scale_trick is 'no'"),
        ({"scale_trick": 1}, "scale_trick is 1"),
        ({"fuzzy_threshold": "x"}, "fuzzy_threshold is 'x'"),
        ({"ignore_student_ids": 3}, "ignore_student_ids is 3"),
        ({"token_form": "x"}, "token_form is 'x'"),
        ({"ignore_student_ids": (-1,)}, "ignore_student_ids, .*is -1"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BuildConfig(**options)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_options(tmp_path: Path) -> None:
    numbers: Any = {"top_k": np.int64(4), "fuzzy_threshold": np.float32(0.5)}
    ids: Any = {"ignore_student_ids": (*np.arange(2),)}
    config = BuildConfig(special_tokens="fuzzy", **numbers, **ids)
    wide: Any = np.int64(300)
    made = xtok.build(xtok.load_tokenizer("bytes", vocab_size=wide), "bytes", config)
    made.save(tmp_path / "m.safetensors")
    recipe = ProjectionMap.load(tmp_path / "m.safetensors").recipe
    assert recipe is not None
    used = {name: recipe["options"][name] for name in (*numbers, *ids)}
    assert used == {"top_k": 4, "fuzzy_threshold": 0.5, "ignore_student_ids": [0, 1]}
    assert xtok.get_map("bytes", "bytes", config).shape == (256, 256)


# --token-form


def test_text_form_reads_partial_utf8_as_replacement_characters(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "\ufffd", "é")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "é", "\ufffd")
    exact = xtok.build(student, teacher, BuildConfig(scale_trick=False))
    assert row(exact, 0xC3) == [(0xC3, 1.0)]
    assert row(exact, 256) == [(257, 1.0)]
    text = xtok.build(student, teacher, BuildConfig(scale_trick=False, token_form="text"))
    # The 128 bytes that are not UTF-8 alone have the text U+FFFD, as has the teacher's token 0x80:
    # the lowest id of equal tokens is used.
    assert row(text, 0xC3) == [(0x80, 1.0)]
    assert row(text, 257) == [(256, 1.0)]
    assert text.history[0]["options"]["token_form"] == "text"
    assert (
        not_none(text.student.table).sha256() == student.table.sha256()
    )  # the file stores the bytes
    in_steps = reapply_exact(
        multitoken(xtok.load_pair(student, teacher), replace(NO_SLOT, token_form="text"))
    )
    assert row(in_steps, 0xC3) == [(0x80, 1.0)]


def test_raw_form_compares_display_strings(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ranks: Tokenizer
) -> None:
    config = BuildConfig(scale_trick=False, token_form="raw")
    raw = xtok.build(byte_level, sentencepiece, config)
    raw.check()
    exact = xtok.build(byte_level, sentencepiece, BuildConfig(scale_trick=False))
    the = next(i for i, t in enumerate(byte_level.table.tokens()) if t == b" the")
    assert exact.row_kind[the] == RowKind.EXACT
    assert raw.row_kind[the] == RowKind.PIECES  # `Ġthe` differs from `▁the`
    first = multitoken(
        xtok.load_pair(byte_level, sentencepiece), replace(NO_SLOT, token_form="raw")
    )
    with pytest.raises(XtokError):
        reapply_exact(first)
    reapplied = reapply_exact(first, xtok.load_pair(byte_level, sentencepiece))
    assert row(reapplied, the) == row(first, the)
    assert ranks.table_as("raw").sha256() == ranks.table.sha256()  # without a token form, the bytes


# --ignore-student-ids, --ignore-teacher-ids


def test_ignored_ids_have_empty_rows_and_unused_columns(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "ab", "abc")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "ab", width=260)
    config = BuildConfig(ignore_student_ids=(256,), ignore_teacher_ids=(0x61, 257))
    projection = xtok.build(student, teacher, config)
    projection.check()
    assert row(projection, 256) == []
    assert row(projection, 0x61) == []  # its only counterpart is ignored
    assert not np.isin(projection.teacher_ids, [0x61, 257]).any()
    assert row(projection, 257) == [(256, 0.757576), (0x63, 0.075758), (258, 0.166667)]
    again = reapply_exact(projection)
    assert (row(again, 256), row(again, 0x61)) == ([], [])


def test_an_extended_map_has_the_options_of_its_last_stage(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "ab", " ,")
    pair = xtok.load_pair(student, byte_ranks(tmp_path / "teacher.tiktoken", "ab"))
    first = multitoken(
        pair,
        replace(NO_SLOT, canonicalization="relaxed", token_form="text", ignore_student_ids=(256,)),
    )
    extended = multitoken(pair, NO_SLOT, initial=first)
    assert row(reapply_exact(extended), 256) == [(256, 1.0)]
    assert row(reapply_exact(extended), 257) == row(extended, 257)
    exact = reapply_exact(first, canonicalization="exact")
    assert row(reapply_exact(exact), 257) == row(first, 257)
