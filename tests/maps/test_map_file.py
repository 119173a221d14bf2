"""Map files: contents, digests and layouts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import full_disk, not_none
from forked import Forks
from hypothesis import given, settings
from hypothesis import strategies as st
from make_maps import FOREIGN, TINY, built, equal_maps, load_bytes, read_pt
from safetensors.numpy import load as load_tensors

import xtok
from xtok.config import BuildConfig
from xtok.errors import MapFileError, OutputError
from xtok.maps import file as mapfile
from xtok.maps import names
from xtok.maps.file import to_nemo
from xtok.maps.map_arguments import read_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.pairs import Pair

each_suffix = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])

# The safetensors format


def test_the_file_has_the_layout_of_the_guide() -> None:
    data = mapfile.to_safetensors(TINY)
    tensors = load_tensors(data)
    assert {name: (t.dtype.name, t.tolist()) for name, t in tensors.items()} == {
        "student_ids": ("int32", [0, 1, 2, 2, 3, 3, 3]),
        "teacher_ids": ("int32", [0, 1, 2, 3, 1, 2, 3]),
        "weights": ("float32", [1, 1, 0.75, 0.25, 0.625, 0.125, 0.25]),
        "row_kind": ("uint8", [3, 1, 2, 2, 0, 0]),
        "scale_slot": ("uint8", [0, 0, 1, 1, 0, 0]),
        "student_token_bytes": ("uint8", [97, 255, 254, 97, 98]),
        "student_token_offsets": ("int64", [0, 0, 1, 3, 5, 5, 5]),
        "student_token_types": ("uint8", [3, 1, 1, 1, 5, 5]),
        "teacher_token_bytes": ("uint8", [97, 98]),
        "teacher_token_offsets": ("int64", [0, 0, 1, 2, 2]),
        "teacher_token_types": ("uint8", [3, 1, 1, 5]),
    }
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    [(name, text)] = header["__metadata__"].items()
    metadata = json.loads(text)
    assert (name, text) == ("xtok", json.dumps(metadata, sort_keys=True, ensure_ascii=False))
    assert metadata.pop("student") == {
        "model_id": "org/student", "revision": "main", "backend": "hf", "vocab_size": 6,
        "width_source": "option", "tokenizer_vocab_size": 4,
        "table_sha256": not_none(TINY.student.table).sha256(), "control_names": {"0": "<s>"},
        "roles": {"bos": [0]}, "preferred_ids": [],
    }  # fmt: skip
    del metadata["teacher"]
    own = "row_kind", "scale_slot", "student_ids", "teacher_ids", "weights"
    parts = [f"{name} {len(tensors[name])}\n".encode() + tensors[name].tobytes() for name in own]
    assert metadata == {
        "tensors_sha256": hashlib.sha256(b"".join(parts)).hexdigest(),
        "format_version": 1,
        "method": "multitoken",
        "top_k": 4,
        "enable_scale_trick": True,
        "history": [{"stage": "multitoken", "options": {"top_k": 4}, "xtok_version": "0.1.0"}],
    }


def test_golden_digest_of_a_tiny_map() -> None:
    # The format is frozen. If older readers would misread a change of these bytes, it needs a new
    # FORMAT_VERSION. A new metadata key does not need a new version, because readers ignore it.
    golden = "161cf9dc43a0e3e91c68ebe7f1fb5ad3942364696d1ecc6a0e820836394e29f4"
    assert mapfile.sha256(TINY) == golden


@each_suffix
def test_maps_are_read_back_without_loss_under_any_name(
    tmp_path: Path, to_pieces: Pair, suffix: str
) -> None:
    as_far_off_as_a_sum_may_be = np.array([0, 0, 9e-5, 0, 0, 0, -9e-5], np.float32)
    about_1 = TINY.weights + as_far_off_as_a_sum_may_be
    path = tmp_path / f"map{suffix}"
    elsewhere = tmp_path / "folder" / f"a much longer name{suffix}"
    others = replace(TINY, history=(), top_k=9, weights=about_1), built(*to_pieces.tokenizers)
    for projection in (TINY, *others):
        projection.save(path)
        projection.save(elsewhere)
        assert elsewhere.read_bytes() == path.read_bytes()
        loaded = ProjectionMap.load(path)
        loaded.check()
        assert equal_maps(loaded, projection)
        assert loaded.reports == ()


def test_writing_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path, plain = tmp_path / "map.safetensors", tmp_path / "plain"
    path.write_bytes(b"old")
    TINY.save(path)
    assert equal_maps(ProjectionMap.load(path), TINY)
    assert os.listdir(tmp_path) == ["map.safetensors"]
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(("suffix", "other"), [(".pt", ".safetensors"), (".safetensors", ".pt")])
def test_the_contents_of_a_file_decide_its_format(tmp_path: Path, suffix: str, other: str) -> None:
    TINY.save(tmp_path / f"a{suffix}")
    renamed = (tmp_path / f"a{suffix}").rename(tmp_path / f"a{other}")
    assert equal_maps(ProjectionMap.load(renamed), TINY)


def test_folders_of_a_failed_write_are_removed(tmp_path: Path) -> None:
    with full_disk(100), pytest.raises(OutputError, match="File too large"):
        TINY.save(tmp_path / "new" / "maps" / "map.safetensors")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"), ("日本 v1.model", "日本-v1"),
        ("हिन्दी", "हिन्दी"), ("--force", "force"), ("a/../b c$", "b-c-"), ("---", "student"),
        (".hidden", "hidden"), ("日" * 80, "日" * 26),
    ],
)  # fmt: skip
def test_a_model_in_a_file_name(model: str, part: str) -> None:
    assert names.default_name(model, "b", "top4") == f"{part}_to_b_top4.safetensors"


def test_a_name_stays_short_enough_and_different() -> None:
    first, other = (names.default_name("a", "b", "x" * 100, "y" * 120, last) for last in "cd")
    assert first != other
    assert len(first) == 210 + 9 + len(".safetensors")


def test_an_invalid_map_is_not_written(tmp_path: Path) -> None:
    flags = np.array([0, 1, 1, 1, 0, 0], np.uint8)
    for slot, message in ((None, "row 3 is not sorted"), (flags, "only its scale slot")):
        with pytest.raises(ValueError, match=message):
            replace(TINY, scale_slot=slot).save(tmp_path / "map.safetensors")
    assert not os.listdir(tmp_path)


# NeMo-RL's layout


def nemo(projection: ProjectionMap) -> dict[str, Any]:
    loaded = torch.load(io.BytesIO(to_nemo(projection)), weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def test_rows_changed_by_another_tool_override_the_metadata(tmp_path: Path) -> None:
    """NeMo-RL's tools copy xtok's key, so the file contains the kinds of the earlier rows."""
    content = nemo(TINY)
    emptied, filled = 2, 5
    content["indices"][[emptied, filled]], content["likelihoods"][[emptied, filled]] = -1, 0.0
    content["indices"][filled, 0], content["likelihoods"][filled, 0] = 1, 1.0
    read = read_pt(tmp_path, content)
    assert read.row_kind[emptied] == RowKind.EMPTY
    assert read.row_kind[filled] != RowKind.EMPTY
    assert read.row(filled)[0].tolist() == [1]
    assert read.scale_slot is None or read.scale_slot[emptied] == 0


def test_the_layout_of_a_map_with_slots() -> None:
    content = nemo(TINY)
    assert content["indices"].dtype == torch.int64
    assert content["likelihoods"].dtype == torch.float32
    rows = zip(content["indices"].tolist(), content["likelihoods"].tolist(), strict=True)
    assert list(rows) == [
        ([0, -1, -1, -1], [1, 0, 0, 0]),  # exact by role
        ([1, -1, -1, -1], [1, 0, 0, 0]),  # exact
        ([2, -1, -1, 3], [0.75, 0, 0, 0.25]),  # the slot is in the last column
        ([1, 2, -1, 3], [0.625, 0.125, 0, 0.25]),
        ([-1, -1, -1, -1], [0, 0, 0, 0]),
        ([0, -1, -1, -1], [0, 0, 0, 0]),  # the last row is empty: one id with weight 0
    ]
    assert " ".join(content) == (
        "indices likelihoods student_model_id teacher_model_id enable_scale_trick xtok"
    )
    assert (content["student_model_id"], content["teacher_model_id"]) == (
        "org/student",
        "org/teacher",
    )
    assert content["enable_scale_trick"] is True


@pytest.mark.parametrize("has_slot", [True, False])
def test_the_slot_column_contains_only_slots(has_slot: bool, tmp_path: Path) -> None:
    """This includes rows without a slot and with `top_k` entries, as with the teacher `bytes`."""
    slot = np.array([0, 0, int(has_slot), 0, 0, 0], np.uint8)
    full = TINY.edges._replace(weights=np.array([1, 1, 0.75, 0.25, 0.625, 0.25, 0.125], np.float32))
    projection = replace(TINY, **full._asdict(), scale_slot=slot, top_k=3)
    projection.check()
    content = nemo(projection)
    assert content["enable_scale_trick"] is has_slot
    rows = [[2, -1, -1, 3], [1, 2, 3, -1]] if has_slot else [[2, 3, -1], [1, 2, 3]]
    assert content["indices"][2:4].tolist() == rows
    assert equal_maps(load_bytes(to_nemo(projection), tmp_path), projection)
    del content["xtok"]
    again = read_pt(tmp_path, content, teacher_vocab_size=4)
    assert again.student_ids[again.is_slot].tolist() == ([2] if has_slot else [])


def test_a_single_entry_of_an_inexact_row_has_a_weight_below_1(tmp_path: Path) -> None:
    single = replace(
        TINY,
        student_ids=np.array([0, 1, 2, 3], np.int32),
        teacher_ids=np.array([0, 1, 2, 1], np.int32),
        weights=np.ones(4, np.float32),
        row_kind=np.array([3, 1, 2, RowKind.RELAXED, 0, 0], np.uint8),
        scale_slot=None,
        top_k=1,
    )
    single.check()
    content, below = nemo(single), 1 - 2**-24
    assert content["indices"].tolist() == [[0, -1], [1, -1], [2, -1], [1, -1], [-1, -1], [0, -1]]
    weights = [[1, 0], [1, 0], [below, 0], [below, 0], [0, 0], [0, 0]]
    assert content["likelihoods"].tolist() == weights
    # `build --for p-kl` counts such rows: none is an exact pair, and all are restored.
    counted = replace(single, row_kind=np.array([3, 5, 5, 5, 0, 0], np.uint8))
    assert nemo(counted)["likelihoods"][:, 0].tolist() == [below, below, below, below, 0, 0]
    for projection in (single, counted):
        assert equal_maps(load_bytes(to_nemo(projection), tmp_path), projection)


def test_a_weight_that_rounds_to_1_in_a_larger_row_is_restored(tmp_path: Path) -> None:
    """Counts and cosines give such rows: 1 − 10⁻⁹ is 1 in float32."""
    below = 1 - 2**-24
    rounded = replace(
        TINY,
        student_ids=np.array([0, 0, 1, 1], np.int32),
        teacher_ids=np.array([3, 1, 2, 0], np.int32),
        weights=np.array([1, 1e-9, below, 1e-9], np.float32),
        row_kind=np.array([4, 4, 0, 0, 0, 0], np.uint8),
        scale_slot=None,
    )
    content = nemo(rounded)
    assert content["likelihoods"][:2, 0].tolist() == [below, below]
    assert content["xtok"]["tensors"]["lowered_rows"].tolist() == [0]
    assert equal_maps(load_bytes(to_nemo(rounded), tmp_path), rounded)
    del content["xtok"]["tensors"]["lowered_rows"]  # in the format of an earlier version
    counts = read_pt(tmp_path, content).reports[-1].counts
    assert counts == {"files changed by another program": 1}


def test_a_foreign_map_is_sorted_and_reported(tmp_path: Path) -> None:
    projection = read_pt(tmp_path, FOREIGN, teacher_vocab_size=4)
    projection.check()
    assert projection.student.model_id == "a/student"
    assert projection.teacher.model_id == "b/teacher"
    assert (projection.shape, projection.top_k, projection.method) == ((5, 4), 3, "imported")
    assert projection.student_ids.tolist() == [0, 1, 1, 1, 2, 2, 3, 3]
    assert projection.teacher_ids.tolist() == [2, 1, 0, 3, 1, 2, 0, 3]
    assert projection.weights.tolist() == pytest.approx(
        [1, 0.5, 0.25, 0.25, 0.5, 0.5, 2 / 3, 1 / 3]
    )
    assert projection.row_kind.tolist() == [RowKind.EXACT, *[RowKind.MIXED] * 3, RowKind.EMPTY]
    assert projection.scale_slot is None
    assert projection.reports[0].counts == {
        "zero weights dropped": 1, "rows reordered": 1, "duplicate entries added up": 1,
        "rows normalized": 1,
    }  # fmt: skip
    assert [step["stage"] for step in projection.history] == ["import"]


@pytest.mark.parametrize("has_slots", [True, None])
def test_slots_of_a_foreign_map_are_in_the_last_column(
    tmp_path: Path, has_slots: bool | None
) -> None:
    declared = {} if has_slots is None else {"enable_scale_trick": has_slots}
    slots = True if has_slots is None else None
    projection = read_pt(
        tmp_path, {**FOREIGN, **declared}, preserve_last=slots, teacher_vocab_size=4
    )
    assert not_none(projection.scale_slot).tolist() == [0, 1, 1, 1, 0]
    ids, weights = projection.row(2)
    assert (ids.tolist(), weights.tolist()) == ([1, 2], [0.5, 0.5])
    # Arguments take precedence over the metadata of the file.
    no = {**FOREIGN, "enable_scale_trick": False}
    assert read_pt(tmp_path, no).scale_slot is None
    assert equal_maps(read_pt(tmp_path, no, preserve_last=True, teacher_vocab_size=4), projection)


def test_a_slot_with_the_id_of_another_entry_is_merged(tmp_path: Path) -> None:
    value = {
        "indices": torch.tensor([[2, 3, 3], [1, -1, 1]]),
        "likelihoods": torch.tensor([[0.5, 0.2, 0.3], [0.8, 0, 0.2]]),
        "enable_scale_trick": True,
    }
    projection = read_pt(tmp_path, value, teacher_vocab_size=4)
    assert projection.student_ids.tolist() == [0, 0, 1]
    assert not_none(projection.scale_slot).tolist() == [
        1,
        0,
    ]  # a row never consists of a slot alone
    assert projection.reports[0].counts["slots merged into an entry with the same id"] == 2


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.safetensors", tmp_path / "link.safetensors"
    real.touch()
    link.symlink_to(real.name)
    TINY.save(link)
    assert link.is_symlink()
    assert equal_maps(ProjectionMap.load(real, student_vocab_size=6), TINY)


def test_a_link_writes_the_format_of_its_target(tmp_path: Path) -> None:
    real, link = tmp_path / "real.safetensors", tmp_path / "link.pt"
    link.symlink_to(real.name)
    spellings = xtok.spellings("bytes", "bytes")
    spellings.save(link)
    assert sorted(tmp_path.iterdir()) == [link, real]
    assert equal_maps(SpellingMap.load(real), spellings)


@each_suffix
def test_unknown_width_is_at_least_the_largest_id(tmp_path: Path, suffix: str) -> None:
    projection = read_pt(tmp_path, FOREIGN)
    projection.check()
    assert (projection.shape, projection.teacher.width_source) == ((5, 4), "ids")
    assert "teacher" in projection.reports[0].notes[0]
    assert repr(projection) == "ProjectionMap(a/student → b/teacher, 5 × 4, nnz=8)"
    path = tmp_path / f"again{suffix}"
    projection.save(path)
    assert equal_maps(ProjectionMap.load(path), projection)
    assert ProjectionMap.load(path, teacher_vocab_size=9).shape == (5, 9)


@each_suffix
def test_preserve_last_decides_about_slots(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"map{suffix}"
    TINY.save(path)
    assert equal_maps(ProjectionMap.load(path, preserve_last=True), TINY)
    projection = ProjectionMap.load(path, preserve_last=False)
    projection.check()
    assert projection.scale_slot is None
    assert projection.teacher_ids.tolist() == [
        0,
        1,
        2,
        3,
        1,
        3,
        2,
    ]  # the slot of row 3 has this position
    assert projection.reports[-1].counts == {"scale slots turned into entries": 2}
    assert projection.reports[-1].notes == (
        "the scale slots are now ordinary entries, which cutting may drop",
    )
    assert [step["options"] for step in projection.history[1:]] == [{"preserve_last": False}]
    replace(projection, top_k=3, history=()).save(path)
    slotted = ProjectionMap.load(path, preserve_last=True)
    slotted.check()
    has_a_last_column = np.flatnonzero(not_none(slotted.scale_slot)).tolist()
    assert has_a_last_column == [3]
    assert slotted.reports[-1].counts == {"rows with a scale slot in the last column": 1}


MATRIX = torch.tensor([[0, 3.0, 1], [0, 0, 0], [5, 0, 0]])


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_compressed_matrix_is_read_in_silence(tmp_path: Path, forks: Forks) -> None:
    path = tmp_path / "csr.pt"
    torch.save(MATRIX.to_sparse_csr(), path)
    code = "import sys; import xtok; print(xtok.ProjectionMap.load(sys.argv[1]))"
    result = forks.run(["-c", code, path], tmp_path, program="python")
    assert result.stdout == "ProjectionMap(unknown → unknown, 3 × 3, nnz=3)\n"
    assert result.stderr == ""


@pytest.mark.parametrize(
    "value",
    [
        {(0, 1): 3, (0, 2): 1, (2, 0): 5},
        MATRIX,
        torch.nn.Parameter(MATRIX),  # weights after training
        MATRIX.to_sparse(),
    ],
)
def test_counts_and_matrices_are_read(tmp_path: Path, value: Any) -> None:
    projection = read_pt(tmp_path, value, student_vocab_size=3, teacher_vocab_size=3)
    assert projection.to_torch().to_dense().tolist() == [[0, 0.75, 0.25], [0, 0, 0], [1, 0, 0]]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_matrix_of_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MapFileError, match="sparse_bsr"):
        read_pt(tmp_path, torch.eye(4).to_sparse_bsr((2, 2)))


@settings(max_examples=200)
@given(
    counts=st.dictionaries(
        st.tuples(st.integers(0, 2**18), st.integers(0, 2**18)),
        st.integers(1, 2**60) | st.floats(2**-10, 2**40),
        min_size=1,
        max_size=20,
    ),
    kind=st.sampled_from([dict, Counter]),
)
def test_any_counts_are_read(
    tmp_path: Path, counts: dict[tuple[int, int], float], kind: type[dict[Any, Any]]
) -> None:
    width = 2**18 + 1
    projection = read_pt(tmp_path, kind(counts), student_vocab_size=width, teacher_vocab_size=width)
    totals: Counter[int] = Counter()
    for (s, _), count in counts.items():
        totals[s] += count  # type: ignore[assignment]
    edges = zip(*(array.tolist() for array in projection.edges), strict=True)
    weights = {(s, t): weight for s, t, weight in edges}
    assert weights == pytest.approx({(s, t): n / totals[s] for (s, t), n in counts.items()})


@pytest.mark.parametrize("layout", ["dense", "sparse", "counts", "padded"])
def test_ties_that_normalizing_makes_are_ordered_by_id(tmp_path: Path, layout: str) -> None:
    """Two adjacent float32 weights become equal when they are divided by the sum of the row."""
    a, b = 1.75, 1.75 + 2**-23
    assert np.float32(a / (a + b + 3.5)) == np.float32(b / (a + b + 3.5))
    matrix = torch.tensor([[a, b, 3.5]])
    value: Any = {
        "dense": matrix,
        "sparse": matrix.to_sparse(),
        "counts": {(0, 0): a, (0, 1): b, (0, 2): 3.5},
        "padded": {"indices": torch.tensor([[0, 1, 2]]), "likelihoods": matrix},
    }[layout]
    projection = read_pt(tmp_path, value, student_vocab_size=1, teacher_vocab_size=3)
    assert projection.teacher_ids.tolist() == [2, 0, 1]


@pytest.mark.parametrize("write", [mapfile.to_safetensors, to_nemo])
def test_a_map_is_read_from_a_pipe(tmp_path: Path, write: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(write(TINY),))
    writer.start()
    projection = ProjectionMap.load(pipe)
    writer.join()
    assert equal_maps(projection, TINY)


def test_an_edited_map_of_xtok_is_sorted_and_normalized(tmp_path: Path) -> None:
    content = nemo(TINY)
    content["likelihoods"][3] = torch.tensor([0.25, 1.5, 0, 0.25])
    again = read_pt(tmp_path, content)
    again.check()
    ids, weights = again.row(3)
    assert (ids.tolist(), weights.tolist()) == ([2, 1, 3], [0.75, 0.125, 0.125])
    assert again.student.table is not None
    counts = again.reports[0].counts
    assert (counts["rows normalized"], counts["rows reordered"]) == (1, 1)
    assert [step["stage"] for step in again.history] == ["multitoken", "import"]


def test_maps_without_the_scale_trick_have_no_slots(to_pieces: Pair) -> None:
    plain = xtok.build(*to_pieces.tokenizers, BuildConfig(scale_trick=False))
    assert "scale_slot" not in load_tensors(mapfile.to_safetensors(plain))
    assert nemo(plain)["enable_scale_trick"] is False


@pytest.mark.parametrize("kind", ["EventMap", "SpellingMap", "ProjectionMap"])
def test_a_file_of_another_kind_is_named_in_a_new_process(kind: str, tmp_path: Path) -> None:
    """The class that the file names is not imported."""
    xtok.build("bytes", "bytes").save(tmp_path / "ProjectionMap.safetensors")
    xtok.events("bytes", "bytes").save(tmp_path / "EventMap.safetensors")
    xtok.spellings("bytes", "bytes").save(tmp_path / "SpellingMap.safetensors")
    for path in sorted(tmp_path.iterdir()):
        code = f"import xtok\nprint(type(xtok.{kind}.load({str(path)!r})).__name__)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if path.stem == kind:
            assert result.stdout.strip() == kind
        else:
            assert "xtok.errors.MapFileError: " in result.stderr
            assert f"{path} is " in result.stderr


def test_a_subclass_of_a_map_loads_as_itself(tmp_path: Path) -> None:
    class Mine(xtok.EventMap):
        """Stands for a class of a user."""

    path = tmp_path / "m.safetensors"
    xtok.events("bytes", "bytes").save(path)
    assert type(Mine.load(path)) is Mine
    assert type(xtok.EventMap.load(path)) is xtok.EventMap
    assert type(read_map(path)) is xtok.EventMap
    xtok.build("bytes", "bytes").save(path)
    with pytest.raises(MapFileError, match="not an event map"):
        Mine.load(path)
