"""Spelling maps: which tokens are shared, spelled and left out, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import error_of, known
from conftest import KINDS, Load, Tokenizers
from make import byte_ranks
from safetensors import safe_open
from safetensors.numpy import save_file

import xtok
from xtok.errors import MapFileError
from xtok.maps.events import EventMap
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.stages.spellings import spellings_of_pair
from xtok.tokenizers import Tokenizer


def rows(m: SpellingMap, side: str) -> list[list[int]]:
    """The spelling of each token of a side."""
    counts, pieces = getattr(m, f"{side}_counts"), getattr(m, f"{side}_pieces")
    return [part.tolist() for part in np.split(pieces, np.cumsum(counts)[:-1])]


def test_exact_spellings(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", "abc", "cd", width=260)
    teacher = byte_ranks(tmp_path / "t.tiktoken", "cd", "bc", "abcd")
    m = spellings_of_pair(xtok.pair(student, teacher))
    each = [[i] for i in range(256)]
    assert rows(m, "student") == [*each, [97, 98], [97, 257], [256], []]
    assert rows(m, "teacher") == [*each, [258], [98, 99], [257, 100]]
    assert [ids[-2:].tolist() for ids in m.shared] == [[255, 258], [255, 256]]
    assert repr(m) == "SpellingMap(s.tiktoken → t.tiktoken, 260 and 259 tokens, 257 shared)"
    for name in ("student", "teacher"):
        assert getattr(m, f"{name}_pieces").dtype == getattr(m, f"{name}_counts").dtype == np.int32
    [report] = m.reports
    assert report.counts == {
        "shared tokens": 257,
        "student tokens spelled": 2,
        "student tokens left out": 0,
        "teacher tokens spelled": 2,
        "teacher tokens left out": 0,
    }
    left_out = {why: ids.tolist() for why, ids in m.left_out("student").items()}
    assert left_out == {
        "another id has the same bytes": [],
        "cannot be spelled": [],
        "special, without a partner": [],
        "unused": [259],
    }


def test_what_cannot_be_spelled_is_told(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab")
    m = spellings_of_pair(xtok.pair(student, "null:5"))
    assert len(m.shared[0]) == 0
    assert m.left_out("student")["cannot be spelled"].tolist() == list(range(257))
    assert m.reports[0].notes[-2:] == (
        "student, cannot be spelled: 257 tokens: 0 '\\x00', 1 '\\x01', 2 '\\x02', …",
        "teacher, special, without a partner: 5 tokens: 0 '0', 1 '1', 2 '2', …",
    )


def test_of_several_ids_the_one_that_a_text_has_is_shared(sentencepiece: Tokenizer) -> None:
    """The lowest id would be the byte token, which no text has."""
    byte, letter = (i for i, token in enumerate(sentencepiece.table.tokens()) if token == b"a")
    assert sentencepiece.segment(b"a") == [letter]
    m = spellings_of_pair(xtok.pair(sentencepiece, "bytes"))
    assert (rows(m, "student")[byte], rows(m, "student")[letter]) == ([], [97])
    assert rows(m, "teacher")[97] == [letter]
    assert byte in m.left_out("student")["another id has the same bytes"].tolist()


def test_special_tokens_of_one_role_are_shared(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    m = spellings_of_pair(xtok.pair(byte_level, sentencepiece))
    shared = dict(zip(*(ids.tolist() for ids in m.shared), strict=True))
    special = {
        byte_level.table.name(s): sentencepiece.table.name(t)
        for s, t in shared.items()
        if not byte_level.table[s]
    }
    assert special == {"<|begin_of_text|>": "<s>", "<|end_of_text|>": "</s>"}
    without = m.left_out("student")["special, without a partner"].tolist()
    assert [byte_level.table.name(i) for i in without] == ["<|im_start|>", "<|im_end|>", "<|pad|>"]


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("to", KINDS)
def test_every_token_is_spelled_or_left_out(tokenizers: Tokenizers, of: str, to: str) -> None:
    student, teacher = tokenizers[of], tokenizers[to]
    m = spellings_of_pair(xtok.pair(student, teacher))
    for side, ours, theirs in (("student", student, teacher), ("teacher", teacher, student)):
        tokens, others = ours.table.tokens(), theirs.table.tokens()
        canonical = ours.table.canonical_ids()
        for token_id, pieces in enumerate(rows(m, side)):
            token = tokens[token_id]
            if len(pieces) > 1:
                assert pieces == theirs.segment(token)
            if token and pieces:
                assert b"".join(others[i] for i in pieces) == token
                assert canonical[token] == token_id
        left_out = m.left_out(side)
        assert len(left_out["cannot be spelled"]) == 0
        told = sorted(i for ids in left_out.values() for i in ids.tolist())
        assert told == [i for i, pieces in enumerate(rows(m, side)) if not pieces]
    spelled = [[tuple(pieces) for pieces in rows(m, side) if pieces] for side in xtok.pairs.SIDES]
    assert all(len({*each}) == len(each) for each in spelled)


def test_the_file_comes_back(tmp_path: Path, byte_level: Tokenizer, digits: Tokenizer) -> None:
    m = spellings_of_pair(xtok.pair(byte_level, digits))
    for name in ("a", "b"):
        m.save(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    loaded = SpellingMap.load(tmp_path / "a.safetensors")
    for name in ("student_pieces", "student_counts", "teacher_pieces", "teacher_counts"):
        assert (getattr(loaded, name) == getattr(m, name)).all()
    assert known(loaded.student.table).sha256() == byte_level.table.sha256()
    assert (loaded.history, loaded.reports) == (m.history, ())
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        metadata = json.loads(file.metadata()["xtok"])
    assert (metadata["kind"], metadata["format_version"]) == ("spellings", 1)


def test_another_kind_of_map_is_refused(
    tmp_path: Path, byte_level: Tokenizer, digits: Tokenizer
) -> None:
    pair = xtok.pair(byte_level, digits)
    path = tmp_path / "m.safetensors"
    spellings_of_pair(pair).save(path)
    assert "is not an event map" in error_of(lambda: EventMap.load(path))
    assert "is a spelling map, not a projection map" in error_of(lambda: ProjectionMap.load(path))
    xtok.events(byte_level, digits).save(path)
    assert "is not a spelling map" in error_of(lambda: SpellingMap.load(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["student_counts"].__setitem__(0, -1), "student_counts is below 0 at 0"),
        (lambda t: t.update(student_counts=t["student_counts"][1:]), "is not of shape"),
        (lambda t: t.update(teacher_pieces=t["teacher_pieces"][1:]), "teacher_pieces has"),
        (lambda t: t["student_pieces"].__setitem__(0, 10**6), "student_pieces is not all in 0.."),
        (lambda t: t["student_pieces"].__setitem__(5, 6), "student id 5 is not shared on both"),
        (lambda t: t["student_pieces"].__setitem__(-1, 0), "is not spelled by its bytes: 258"),
        (lambda t: t["student_pieces"].__setitem__(-1, 256), "is not spelled by its bytes: 258"),
        (lambda t: t.update(student_counts=t["student_counts"].astype(np.int64)), "of int32"),
        (lambda t: t.pop("teacher_pieces"), "it lacks 'teacher_pieces'"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, change: Any, message: str) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", "abc", "cd")
    teacher = byte_ranks(tmp_path / "t.tiktoken", "ab")
    path = tmp_path / "m.safetensors"
    spellings_of_pair(xtok.pair(student, teacher)).save(path)
    _change(path, change)
    with pytest.raises(MapFileError, match=message):
        SpellingMap.load(path)


def _change(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata)


@pytest.mark.real
@pytest.mark.parametrize(
    ("names", "counts"),
    [
        (("llama3.tiktoken", "qwen.tiktoken"), [109_570, 18_434, 252, 42_088, 11]),
        (("mistral-v3.model", "qwen.tiktoken"), [29_242, 2_658, 868, 122_415, 12]),
    ],
)
def test_real_models(load_real: Load, names: tuple[str, str], counts: list[int]) -> None:
    m = spellings_of_pair(xtok.pair(*map(load_real, names)))
    assert [*m.reports[0].counts.values()] == counts
