"""Check a map file against its invariants and its models."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import fails, printed_json
from conftest import Cli
from make_maps import Change, changed_file
from make_tokenizers import byte_ranks

import xtok
from xtok.config import BuildConfig
from xtok.errors import MapFileError
from xtok.inspection.verify import Verification, verify
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer

Sides = tuple[Tokenizer, Tokenizer]


@pytest.fixture(scope="module")
def numbers_pair(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    folder = tmp_path_factory.mktemp("pair")
    student = byte_ranks(folder / "student.tiktoken", "201", "ab")
    return student, byte_ranks(folder / "teacher.tiktoken", "ab", width=260, digits=1)


@pytest.fixture(scope="module")
def projection(numbers_pair: Sides) -> ProjectionMap:
    return xtok.build(*numbers_pair)


@pytest.fixture
def path(projection: ProjectionMap, tmp_path: Path) -> Path:
    projection.save(tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def messages(verification: Verification) -> dict[str, str]:
    return {check.name: check.message for check in verification.checks}


def edited(path: Path, edit: Change) -> Verification:
    """Change a file and verify it."""
    path.write_bytes(changed_file(path.read_bytes(), edit))
    return verify(path)


def test_a_whole_map(path: Path, numbers_pair: Sides, digits: Tokenizer) -> None:
    whole = verify(path, xtok.load_pair(*numbers_pair))
    assert {check.level for check in whole.checks} == {"ok"}
    assert [check.name for check in whole.checks] == [
        "format", "tensors", "student tokens", "teacher tokens", "shapes", "ids", "weights",
        "row kinds", "order", "sums", "as written", "scale slot", "exact rows", "student roles",
        "teacher roles", "student model", "student definition", "student width", "teacher model",
        "teacher definition", "teacher width",
    ]  # fmt: skip
    assert messages(whole)["scale slot"] == "1 row, on teacher id 257"
    assert messages(whole)["exact rows"] == "257 rows of equal bytes"
    assert messages(verify(xtok.build(digits, digits)))["student roles"] == (
        "5 tokens with a role: turn_start, turn_end, eos, …"
    )


def set_item(name: str, index: int, value: float) -> Change:
    return lambda tensors, _: tensors[name].__setitem__(index, value)


@pytest.mark.parametrize(
    ("edit", "failed", "message"),
    [
        (set_item("weights", 0, 0.5), "sums", "the weights of row 0 sum to 0.5, expected 1"),
        (set_item("weights", 0, np.nan), "weights", "some weights are not finite"),
        (set_item("weights", 0, -1), "weights", "some weights are not above 0"),
        (set_item("teacher_ids", 0, 260), "ids", "teacher_ids contains values outside 0..259"),
        (set_item("student_ids", 0, -1), "ids", "student_ids contains values outside 0..257"),
        (set_item("student_ids", 0, 5), "row kinds",
         "row_kind and the entries disagree"),
        (set_item("row_kind", 0, 99), "row kinds", "row_kind contains values outside 0..7"),
        (set_item("teacher_ids", 7, 8), "exact rows",
         "bytes differ in the rows of 1 id: 7 '\\x07'"),
        (set_item("row_kind", 256, 1), "exact rows", "row 256 has 4 entries"),
        (lambda t, _: t["teacher_ids"].__setitem__(t["teacher_ids"] == 257, 256), "scale slot",
         "slots are on 1 id: 256 'ab', which are text tokens"),
        (set_item("student_token_bytes", 256, 51), "student tokens", "table_sha256 is "),
        (lambda _, m: m["teacher"]["roles"].update(eos=[259]), "teacher roles",
         "some roles are on unused ids: 259"),
        (lambda _, m: m["student"]["roles"].update({"\x1b[31m": [1]}), "student roles",
         "unknown roles"),
        (lambda _, m: m.pop("history"), "format", "it lacks 'history'"),
        (lambda _, m: m.update(format_version=2), "format", "its format version is 2"),
        (lambda t, _: t.pop("row_kind"), "format", "it lacks 'row_kind'"),
    ],
)  # fmt: skip
def test_failed_checks_name_the_damage(path: Path, edit: Change, failed: str, message: str) -> None:
    verification = edited(path, edit)
    assert verification.failed == (failed,)
    assert messages(verification)[failed].startswith(message)


def test_a_file_of_an_earlier_version_has_no_digest(path: Path) -> None:
    verification = edited(path, lambda tensors, metadata: None)
    assert verification.failed == ()
    assert messages(verification)["tensors"] == "written by an earlier version, without a digest"
    assert ProjectionMap.load(path).recipe is not None


@pytest.mark.parametrize("name", ["student_ids", "teacher_ids", "weights", "row_kind"])
def test_a_changed_byte_is_found(path: Path, name: str) -> None:
    """A changed teacher id may belong to another token, so no other check finds it."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:start])[name]["data_offsets"]
    for offset in (first, last - 1):
        data[start + offset] ^= 1
        path.write_bytes(data)
        assert "tensors" in verify(path).failed
        with pytest.raises(MapFileError, match=r"changed|not all"):
            ProjectionMap.load(path)
        data[start + offset] ^= 1


def test_a_changed_byte_of_a_pt_is_found(projection: ProjectionMap, tmp_path: Path) -> None:
    """A .pt file is a zip archive with checksums, which PyTorch does not check."""
    path = tmp_path / "m.pt"
    projection.save(path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        starts = [data.index(archive.read(m)) for m in archive.infolist() if m.file_size > 99]
    assert len(starts) > 5
    for start in starts:
        data[start + 8] ^= 1
        path.write_bytes(data)
        with pytest.raises(MapFileError):
            verify(path)
        data[start + 8] ^= 1


def test_a_pt_that_another_program_changed(projection: ProjectionMap, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    projection.save(path)
    assert ProjectionMap.load(path).recipe == projection.recipe
    content = torch.load(path, weights_only=True)
    content["indices"][7, 0] = 8
    torch.save(content, path)
    loaded = ProjectionMap.load(path)
    assert (loaded.recipe, loaded.stages[-1]) == (None, "import")
    checked = verify(path)
    assert checked.failed == ("as written", "exact rows")
    assert messages(checked)["as written"] == "1 files changed by another program"


def test_verify_names_ids_that_differ_from_the_model(
    path: Path, numbers_pair: Sides, tmp_path: Path
) -> None:
    other = byte_ranks(tmp_path / "other.tiktoken", "202", "ab")
    pair = xtok.load_pair(other, numbers_pair[1])
    with pytest.raises(TypeError, match="pass two models"):
        verify(path, pair, other)
    verification = verify(path, pair)
    assert verification.failed == ("student model",)
    differ = "1 ids differ from other.tiktoken: 256 '201' and '202'"
    assert messages(verification)["student model"] == differ


def test_the_width_of_a_config(byte_level: Tokenizer, ranks: Tokenizer, small: Path) -> None:
    folder = str(small / "small-byte-level")
    narrow = xtok.load_tokenizer(folder, vocab_size=len(byte_level.table) - 1)
    verification = verify(xtok.build(narrow, ranks), xtok.load_pair(byte_level, ranks))
    assert verification.failed == ("student width",)
    assert messages(verification)["student width"] == "1,279 in the file, but 1,280 from the config"


def test_a_given_width_beside_the_width_of_a_pair(byte_level: Tokenizer, ranks: Tokenizer) -> None:
    """The pair keeps its width, so the map must have both widths."""
    folder, narrow = str(byte_level.location), len(byte_level.table) - 1
    made = xtok.build(xtok.load_tokenizer(folder, vocab_size=narrow), ranks)
    verification = verify(made, xtok.load_pair(byte_level, ranks), student_vocab_size=narrow)
    widths = [(c.level, c.message) for c in verification.checks if c.name == "student width"]
    assert widths == [
        ("failed", "1,279 in the file, but 1,280 from the config"),
        ("ok", "1,279, from the option"),
    ]


@pytest.mark.parametrize("with_models", [False, True])
def test_widths_that_differ_from_the_options_fail(
    path: Path, numbers_pair: Sides, with_models: bool, cli: Cli
) -> None:
    models = (xtok.load_pair(*numbers_pair),) if with_models else ()
    assert verify(path, *models, student_vocab_size=258, teacher_vocab_size=260).failed == ()
    verification = verify(path, *models, student_vocab_size=999)
    assert verification.failed == ("student width",)
    assert messages(verification)["student width"] == "258 in the file, but 999 from the option"
    line = ["verify", path, *(["bytes", "bytes"] if with_models else [])]
    result = cli(*line, "--teacher-vocab-size", "998")
    assert result.returncode == 3
    assert "260 in the file, but 998 from the option" in result.stdout


def test_verify_detects_edited_weights_in_a_pt(projection: ProjectionMap, tmp_path: Path) -> None:
    projection.save(tmp_path / "m.pt")
    assert verify(tmp_path / "m.pt").failed == ()
    data = torch.load(tmp_path / "m.pt", weights_only=True)
    data["likelihoods"][256, 0] = 0.9
    torch.save(data, tmp_path / "edited.pt")
    assert verify(tmp_path / "edited.pt").failed == ("as written",)
    ids, weights = torch.tensor([[1, -1], [1, 2]]), torch.tensor([[1.0, 0.0], [0.99, 0.0]])
    torch.save({"indices": ids, "likelihoods": weights.bfloat16()}, tmp_path / "foreign.pt")
    verification = verify(tmp_path / "foreign.pt", teacher_vocab_size=3)
    assert verification.failed == ()
    [note] = [check for check in verification.checks if check.level == "note"]
    assert (note.name, note.message) == ("as written", "1 zero weights dropped, 1 rows normalized")
    assert [check.name for check in verification.checks if check.level == "skipped"] == [
        "student tokens", "teacher tokens", "scale slot", "exact rows", "student roles",
        "teacher roles",
    ]  # fmt: skip


@pytest.mark.parametrize("form", [[], {}, None])
def test_verify_accepts_any_value_in_the_history(path: Path, form: Any) -> None:
    def edit(tensors: Any, fields: Any) -> None:
        fields["history"][0]["options"]["token_form"] = form

    assert not edited(path, edit).failed


def test_equal_by_token_form(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "student.tiktoken", "\ufffd")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "ab")
    config = BuildConfig(token_form="text", scale_trick=False)
    verification = verify(xtok.build(student, teacher, config))
    assert verification.failed == ()
    # 127 bytes match the teacher's first token with the text U+FFFD, and so does U+FFFD itself.
    assert messages(verification)["exact rows"] == (
        "257 rows of equal bytes, 128 of them equal only in another token form"
    )


@pytest.mark.parametrize("data", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"not a map", b"PK\x03\x04"])
def test_files_that_are_not_maps_are_errors(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(MapFileError):
        verify(tmp_path / "m.safetensors")


def test_verify_on_the_command_line(cli: Cli, path: Path) -> None:
    result = cli("verify", path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "ok      format          258 × 260, 261 entries"
    assert lines[-1] == f"{path}: all checks passed"
    assert printed_json(cli("verify", path, "--json"))["checks"][0]["level"] == "ok"
    other = cli("verify", path, "--teacher-model", "bytes")
    assert other.returncode == 3
    assert other.stdout.splitlines()[-1] == f"{path}: failed: teacher model"
    edited(path, lambda _, m: m["student"]["roles"].update({"\x1b[31m\u202e": [1]}))
    hostile = cli("verify", path)
    assert hostile.returncode == 3
    assert not {"\u202e", "\x1b"} & {*hostile.stdout}
    fails(cli("verify", "nowhere.safetensors"), "nowhere.safetensors")
