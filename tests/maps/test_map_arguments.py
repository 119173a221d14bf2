"""Maps as arguments: tokens and widths of the pair, swapped sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import error_of
from make_maps import built

import xtok
from xtok import XtokError
from xtok.maps.map_arguments import bind_map, bind_maps, is_swapped
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair


def test_a_pair_is_as_wide_as_its_map(small: Path, digits: Tokenizer) -> None:
    wide = xtok.load_tokenizer(small / "small-byte-level", vocab_size=3000)
    m = xtok.build(wide, digits)
    own = xtok.load_tokenizer(small / "small-byte-level")
    own.vocabulary = replace(own.vocabulary, width_source="tokenizer")
    bound, pair = bind_map(m, xtok.load_pair(own, digits))
    assert bound is m
    assert pair.shape == (3000, len(digits.table))
    assert pair.tables[0].sha256() == own.table.sha256() == wide.table.sha256()
    assert (pair.tables[0].types == wide.table.types).all()
    assert pair.tokenizers[0].segment(b"hello") == own.segment(b"hello")
    narrow = xtok.load_tokenizer(small / "small-byte-level", vocab_size=2000)
    with pytest.raises(XtokError) as caught:
        bind_map(m, xtok.load_pair(narrow, digits))
    assert caught.value.parameter == "student_vocab_size"


@pytest.mark.parametrize(("width", "given"), [(700, 896), (1000, 1000)])
def test_the_width_that_a_side_without_tokens_needs(
    byte_level: Tokenizer, digits: Tokenizer, width: int, given: int
) -> None:
    """`digits` is 896 wide and has 800 tokens: a narrower matrix can be made wider."""
    m = xtok.build(byte_level, "bytes")
    teacher = replace(m.teacher, table=None, vocab_size=width, width_source="map")
    fixed = digits.at_width(896)
    with pytest.raises(XtokError) as caught:
        bind_map(replace(m, teacher=teacher), xtok.load_pair(byte_level, fixed))
    assert caught.value.parameter == "teacher_vocab_size"
    assert f"the width to {given} with" in caught.value.hint


def test_error_for_swapped_sides(
    map_to_digits: xtok.ProjectionMap, pair: Pair, digits: Tokenizer
) -> None:
    m, swapped = map_to_digits, pair.reversed
    for refusing in (lambda: bind_map(m, swapped), lambda: xtok.explain(m, pair=swapped)):
        assert "swapped" in error_of(refusing)
    checks = xtok.verify(m, swapped).checks
    assert [check.name for check in checks if check.level == "failed"] == ["sides"]
    same = built(digits, digits)
    _, own_pair = bind_map(m)
    assert not is_swapped(own_pair, same)
    with pytest.raises(XtokError, match="other tokens"):
        bind_map(same, own_pair)


def test_maps_without_tokens_accept_those_of_another_map(map_to_digits: xtok.ProjectionMap) -> None:
    m = map_to_digits
    bare = replace(m, teacher=replace(m.teacher, table=None))
    maps, pair, names = bind_maps([bare, m], xtok.ProjectionMap.of)
    assert (pair.teacher, names) == (m.teacher, ["map 1", "map 2"])
    assert maps[0].teacher.table is m.teacher.table


@pytest.mark.parametrize("order", [1, -1])
def test_maps_without_widths_get_the_width_of_the_largest_id(tmp_path: Path, order: int) -> None:
    files = {"a.pt": {(0, 1): 1.0, (1, 2): 1.0}, "b.pt": {(0, 1): 1.0, (4, 3): 1.0}}
    for name, counts in files.items():
        torch.save(counts, tmp_path / name)
    paths = [tmp_path / name for name in files][::order]
    maps, pair, _ = bind_maps(paths, xtok.ProjectionMap.of)
    assert pair.shape[0] == 5
    assert [len(m.row_kind) for m in maps] == [5, 5]
    compared = xtok.compare(*paths)
    assert (compared.rows, compared.rows_that_differ) == (3, 2)
