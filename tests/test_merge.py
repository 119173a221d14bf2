from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from conftest import Cli
from safetensors.torch import save_file
from test_map_file import tiny_vocabulary

import xtok
from xtok.config import MergeConfig
from xtok.errors import MapFileError, XtokError
from xtok.maps import file as mapfile
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.stages.merge import merge
from xtok.stages.sort_cut import sort_cut
from xtok.tokenizers import Tokenizer

STUDENT = tiny_vocabulary("student", b"a", b"b", b"c", b"d", width=5)
TEACHER = tiny_vocabulary("teacher", b"a", b"x", b"y", b"z", width=6)
E, X, P, M, N = RowKind.EMPTY, RowKind.EXACT, RowKind.PIECES, RowKind.MIXED, RowKind.EMBEDDING


def a_map(
    rows: dict[int, dict[int, float]], kinds: Sequence[RowKind], slots: Sequence[int] | None = None
) -> ProjectionMap:
    entries = [(s, t, w) for s, row in sorted(rows.items()) for t, w in row.items()]
    s, t, w = zip(*entries, strict=True)
    found = ProjectionMap(
        student=STUDENT,
        teacher=TEACHER,
        student_ids=np.array(s, np.int32),
        teacher_ids=np.array(t, np.int32),
        weights=np.array(w, np.float32),
        row_kind=np.array(kinds, np.uint8),
        scale_slot=None if slots is None else np.array(slots, np.uint8),
        method="multitoken",
        top_k=3,
    )
    found.check()
    return found


@pytest.fixture
def first() -> ProjectionMap:
    return a_map({1: {1: 1.0}, 2: {2: 0.75, 3: 0.25}}, [E, X, P, E, E])


@pytest.fixture
def second() -> ProjectionMap:
    return a_map({1: {2: 1.0}, 2: {4: 1.0}, 3: {3: 0.5, 4: 0.5}}, [E, N, N, N, E])


def rows(projection: ProjectionMap) -> dict[int, list[tuple[int, float]]]:
    projection.check()
    found = naive.rows_of(projection)
    return {s: [(t, round(w, 6)) for t, w in row] for s, row in found.items()}


def test_a_weighted_sum_of_rows(first: ProjectionMap, second: ProjectionMap) -> None:
    found = merge([first, second], MergeConfig(map_weights=(3, 1)))
    assert rows(found) == {
        1: [(1, 0.75), (2, 0.25)],
        2: [(2, 0.5625), (4, 0.25), (3, 0.1875)],
        3: [(3, 0.5), (4, 0.5)],
    }
    assert found.row_kind.tolist() == [E, M, M, N, E]
    assert found.reports[-1].counts["rows that were empty"] == 1
    assert merge([first, second]).row(1)[1].tolist() == [0.5, 0.5]


def test_pins_to_different_tokens_are_no_pin() -> None:
    one, other = (
        a_map({1: {1: 1.0}, 2: {2: 1.0}}, [E, X, X, E, E]),
        a_map({1: {1: 1.0}, 2: {3: 1.0}}, [E, X, X, E, E]),
    )
    found = merge([one, other])
    assert rows(found) == {1: [(1, 1.0)], 2: [(2, 0.5), (3, 0.5)]}
    assert found.row_kind.tolist() == [E, X, RowKind.MIXED, E, E]
    filled = merge([one, other], MergeConfig(fill=True))
    assert rows(filled) == {1: [(1, 1.0)], 2: [(2, 1.0)]}
    assert filled.row_kind.tolist() == [E, X, X, E, E]


def test_fill_leaves_exact_rows_alone(first: ProjectionMap, second: ProjectionMap) -> None:
    found = merge([first, second], MergeConfig(fill=True, top_k=2))
    assert rows(found) == {
        1: [(1, 1.0)],
        2: [(4, round(4 / 7, 6)), (2, round(3 / 7, 6))],
        3: [(3, 0.5), (4, 0.5)],
    }
    assert found.row_kind.tolist() == [E, X, M, N, E]
    assert found.top_k == 2


def test_the_history_names_what_was_merged(first: ProjectionMap, second: ProjectionMap) -> None:
    [step] = merge([first, second], MergeConfig(map_weights=(2, 1), fill=True)).history
    assert step["options"] == {"weights": [2, 1], "fill": True, "top_k": 3}
    assert step["initial_sha256"] == mapfile.sha256(first)
    assert step["merged_sha256"] == [mapfile.sha256(second)]


def test_slots_are_left_out_of_the_sum_and_made_anew() -> None:
    w = 1 / 1.2
    slots = a_map({1: {1: 1.0}, 2: {2: w, 5: 0.2 / 1.2}}, [E, X, P, E, E], [0, 0, 1, 0, 0])
    other = a_map({1: {1: 1.0}, 2: {3: 1.0}, 3: {4: 1.0}}, [E, X, N, N, E])
    found = merge([slots, other])
    half, slot = round(w / 2, 6), round(0.2 / 1.2, 6)
    assert rows(found) == {
        1: [(1, 1.0)],
        2: [(2, half), (3, half), (5, slot)],
        3: [(4, round(w, 6)), (5, slot)],
    }
    assert found.scale_slot is not None
    assert found.scale_slot.tolist() == [0, 0, 1, 1, 0]
    plain = merge([other, slots])
    assert plain.scale_slot is None
    assert rows(plain)[2] == [(2, 0.5), (3, 0.5)]
    with pytest.raises(XtokError, match=r"no room for one .*top_k= of 2"):
        merge([slots, other], MergeConfig(top_k=1))


def test_a_map_without_tokens_takes_those_of_the_other(
    first: ProjectionMap, second: ProjectionMap
) -> None:
    bare = replace(
        first, student=replace(STUDENT, table=None), teacher=replace(TEACHER, table=None)
    )
    assert merge([bare, second]).student.table is not None
    assert merge([second, bare]).teacher.table is not None
    assert merge([bare, bare]).student.table is None


def test_maps_and_weights_that_do_not_go_together(
    first: ProjectionMap, second: ProjectionMap
) -> None:
    with pytest.raises(XtokError, match="only one map"):
        merge([first])
    with pytest.raises(XtokError, match=r"2 maps and 3 weights .*with map_weights="):
        merge([first, second], MergeConfig(map_weights=(1, 1, 1)))
    wide = replace(second, teacher=tiny_vocabulary("teacher", b"a", b"x", b"y", b"z", width=7))
    with pytest.raises(XtokError, match=r"the teacher of map 2 .* is 7 wide, teacher is 6"):
        merge([first, wide])
    other = replace(second, teacher=tiny_vocabulary("teacher", b"a", b"x", b"y", b"?", width=6))
    with pytest.raises(XtokError, match=r"the teacher of map 2 .* has other tokens than teacher"):
        merge([first, other])
    for weights in ((1.0, 0.0), (1.0, -1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="weights, number"):
            MergeConfig(map_weights=weights)


def test_the_command(cli: Cli, small: Path, tmp_path: Path) -> None:
    pair = ["--student-model", str(small / "small.model")]
    pair += ["--teacher-model", str(small / "small.model")]
    assert cli("build", *pair, "--output", "a.safetensors").returncode == 0
    args = ["multitoken", *pair, "--no-scale-trick", "--output", "b.safetensors"]
    assert cli(*args).returncode == 0
    done = cli("merge", "a.safetensors", "b.safetensors", "--map-weights", "0.7,0.3", "--fill")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "small_to_small_merge_top32_weights-908ddf_fill.safetensors\n"
    first = (tmp_path / done.stdout.strip()).read_bytes()
    again = ["a.safetensors", "b.safetensors", "--map-weights=0.7,0.3", "--fill"]
    again += ["--output", "x.pt"]
    assert cli("merge", *again).returncode == 0
    assert cli("convert", "x.pt", "--output", "y.safetensors").returncode == 0
    assert (tmp_path / "y.safetensors").read_bytes() == first
    history = json.loads(cli("inspect", "y.safetensors", "--json").stdout)["history"]
    assert [step["stage"] for step in history][-1] == "merge"
    for weights in ("a,b", "0,1", ""):
        done = cli("merge", "a.safetensors", "b.safetensors", "--map-weights", weights)
        assert done.returncode == 2
    done = cli("merge", "a.safetensors", "b.safetensors", "--map-weights", "1")
    assert done.returncode == 1
    assert "hint: give one weight per map with --map-weights" in done.stderr


def test_an_embedding_map_is_extended_by_multitoken(
    sentencepiece: Tokenizer, first: ProjectionMap
) -> None:
    plain = xtok.multitoken(sentencepiece, sentencepiece)
    rows = np.flatnonzero(plain.row_kind == RowKind.EMPTY)[:1]
    kind = np.zeros(plain.shape[0], np.uint8)
    kind[rows] = RowKind.EMBEDDING
    initial = replace(
        plain,
        student_ids=rows.astype(np.int32),
        teacher_ids=np.full(len(rows), 300, np.int32),
        weights=np.ones(len(rows), np.float32),
        row_kind=kind,
        scale_slot=None,
    )
    if len(rows):
        found = xtok.multitoken(sentencepiece, sentencepiece, initial=initial)
        assert found.row_kind[rows].tolist() == [RowKind.EMBEDDING]


# Learned weights


LEARNED: dict[str, Any] = {
    "indices": torch.tensor([[1, -1, -1], [2, 1, 5], [3, 4, -1], [-1, -1, -1], [4, 3, 2]]),
    "likelihoods": torch.tensor(
        [[1.3, 0, 0], [0.2, 1.1, 0.3], [0.9, 0.9, 0.4], [0, 0, 0], [0.5, 0.3, 0.2]]
    ),
    "student_model_id": "student",
    "teacher_model_id": "teacher",
    "enable_scale_trick": True,
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_learned_matrix_with_a_scale_column(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"learned{suffix}"
    if suffix == ".pt":
        torch.save(LEARNED, path)
    else:
        tensors = {key: LEARNED[key] for key in ("indices", "likelihoods")}
        says = {key: str(v) for key, v in LEARNED.items() if key not in tensors}
        save_file(tensors, path, says)
    found = mapfile.load(path, teacher_vocab_size=6, normalize="sum")
    assert rows(found) == {
        0: [(1, 1.0)],
        1: [(1, 0.6875), (2, 0.125), (5, 0.1875)],
        2: [(3, 0.5), (4, 0.5)],
        4: [(4, 0.5), (3, 0.3), (2, 0.2)],
    }
    assert found.scale_slot is not None
    assert found.scale_slot.tolist() == [0, 1, 0, 0, 1]
    counts = found.reports[0].counts
    assert counts["rows normalized"] == 3
    assert counts["weights without a teacher id dropped"] == 1
    assert found.history[0]["options"] == {"normalize": "sum"}
    assert found.student.model_id == "student"
    cut = sort_cut(found, xtok.SortCutConfig(top_k=2))
    assert rows(cut)[1] == [(1, round(0.6875 / 0.875, 6)), (5, round(0.1875 / 0.875, 6))]
    assert [step["stage"] for step in cut.history] == ["import", "sort-cut"]


def test_logits_are_taken_on_request(tmp_path: Path) -> None:
    logits = {
        "indices": torch.tensor([[1, 2], [0, -1], [3, 1]]),
        "likelihoods": torch.tensor([[-1.0, 1.0], [-5.0, 0.0], [0.0, 0.0]]),
    }
    torch.save(logits, tmp_path / "logits.pt")
    with pytest.raises(MapFileError, match=r"negative or not finite .*normalize="):
        mapfile.load(tmp_path / "logits.pt", teacher_vocab_size=4)
    found = mapfile.load(tmp_path / "logits.pt", teacher_vocab_size=4, normalize="softmax")
    high = round(1 / (1 + np.exp(-2)), 6)
    assert rows(found) == {
        0: [(2, high), (1, round(1 - high, 6))],
        1: [(0, 1.0)],
        2: [(1, 0.5), (3, 0.5)],
    }


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_map_by_xtok_whose_weights_were_trained(tmp_path: Path, suffix: str) -> None:
    w, slot = 1 / 1.2, 0.2 / 1.2
    before = a_map(
        {1: {1: 1.0}, 2: {2: w * 0.75, 3: w * 0.25, 5: slot}}, [E, X, P, E, E], [0, 0, 1, 0, 0]
    )
    path = tmp_path / f"trained{suffix}"
    if suffix == ".safetensors":
        from safetensors.numpy import save_file as save

        tensors, metadata = mapfile.pack(before)
        tensors["weights"] = np.array([0.9, 0.2, 0.6, 0.4], np.float32)
        save(tensors, path, {"xtok": metadata})
        with pytest.raises(MapFileError, match=r"(sums to|not sorted).*") as error:
            mapfile.load(path)
        assert "normalize=" in error.value.hint
    else:
        before.save(path)
        loaded = torch.load(path, weights_only=True)
        loaded["likelihoods"][1, 0] = 0.9
        loaded["likelihoods"][2] = torch.tensor([0.2, 0.6, 0.4])
        torch.save(loaded, path)
    found = mapfile.load(path, normalize="sum")
    assert rows(found) == {
        1: [(1, 1.0)], 2: [(3, 0.5), (2, round(1 / 6, 6)), (5, round(1 / 3, 6))]
    }  # fmt: skip
    assert found.history[-1]["options"] == {"normalize": "sum"}
    assert found.reports[0].counts["rows normalized"] == 2
    softmax = mapfile.load(path, normalize="softmax")
    softmax.check()
    assert softmax.row_kind.tolist() == before.row_kind.tolist()


def test_convert_normalizes(cli: Cli, tmp_path: Path) -> None:
    torch.save(LEARNED, tmp_path / "learned.pt")
    args = ["convert", "learned.pt", "--teacher-vocab-size", "6", "--output", "x.safetensors"]
    assert cli(*args, "--normalize", "softmax").stdout == "x.safetensors\n"
    found = json.loads(cli("inspect", "x.safetensors", "--json").stdout)
    assert found["history"][0]["options"] == {"normalize": "softmax"}
    assert cli(*args, "--normalize", "maybe").returncode == 2


def test_a_weight_that_is_not_finite_is_refused() -> None:
    message = "map_weights, number 2, is inf, and must be above 0 and finite"
    with pytest.raises(ValueError, match=message):
        MergeConfig(map_weights=(1.0, float("inf")))
