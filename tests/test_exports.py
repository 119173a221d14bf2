"""Exports, read back as their readers do it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli
from test_projection_map import GOOD, make

import xtok
from xtok import ProjectionMap, XtokError
from xtok.tokenizers import Tokenizer
from xtok.training.exports import byte_prefixes, export, shared_vocabulary, subtokens
from xtok.vocab.table import TokenTable, TokenType, match_bytes


@pytest.fixture(scope="module")
def built(byte_level: Tokenizer, digits: Tokenizer) -> ProjectionMap:
    return xtok.build(byte_level, digits)


def words(*tokens: bytes, control: dict[int, str] | None = None) -> TokenTable:
    types = [TokenType.NORMAL] * len(tokens)
    for i in control or {}:
        types[i] = TokenType.CONTROL
    roles = {"eos": tuple(control or {})} if control else {}
    return TokenTable(
        np.frombuffer(b"".join(tokens), np.uint8),
        np.cumsum([0, *map(len, tokens)]),
        np.array(types, np.uint8),
        control_names=control or {},
        roles=roles,
    )


# nemo-subtokens: torch.load gives a dict of `subtoks` and `lengths`


def test_nemo_subtokens(
    byte_level: Tokenizer, digits: Tokenizer, built: ProjectionMap, tmp_path: Path
) -> None:
    target = tmp_path / "pair.pt"
    paths = export(built, target, "nemo-subtokens", student_model=byte_level, teacher_model=digits)
    assert [path.name for path in paths] == ["pair.pt", "pair.reverse.pt"]
    for path, of, into in ((paths[0], byte_level, digits), (paths[1], digits, byte_level)):
        found = torch.load(path, weights_only=True)
        subtoks, lengths = found["subtoks"], found["lengths"]
        assert set(found) == {"subtoks", "lengths"}
        assert subtoks.dtype == lengths.dtype == torch.int64
        assert subtoks.shape == (len(of.table), int(lengths.max()))
        assert torch.equal((subtoks >= 0).sum(1), lengths)
        for token_id, row in enumerate(subtoks.tolist()):
            ids = row[: int(lengths[token_id])]
            if of.table[token_id]:
                assert b"".join(into.table[i] for i in ids) == of.table[token_id]
        # What counts as common there are the rows of length 1: equal bytes, and roles.
        common = (lengths == 1).nonzero().flatten().tolist()
        equal = match_bytes(of.table, into.table)
        assert {i: int(subtoks[i, 0]) for i in common if of.table[i]} == equal
        assert len(common) > len(equal) > 256
    [eos] = byte_level.table.roles["eos"][:1]
    assert subtokens(byte_level, digits).subtoks[eos, 0] == digits.table.roles["eos"][0]


def test_subtokens_are_the_same_bytes_whatever_the_name(
    byte_level: Tokenizer, digits: Tokenizer, built: ProjectionMap, tmp_path: Path
) -> None:
    files = [
        export(
            built, tmp_path / name, "nemo-subtokens", student_model=byte_level, teacher_model=digits
        )
        for name in ("a.pt", "another.pt")
    ]
    assert files[0][0].read_bytes() == files[1][0].read_bytes()


def test_subtokens_need_the_tokenizers_of_the_map(
    byte_level: Tokenizer, digits: Tokenizer, built: ProjectionMap, tmp_path: Path
) -> None:
    with pytest.raises(XtokError, match="takes both tokenizers"):
        export(built, tmp_path / "pair.pt", "nemo-subtokens", student_model=byte_level)
    with pytest.raises(
        XtokError, match=r"student of the map \(.*\) has other tokens than small-dig"
    ):
        export(
            built,
            tmp_path / "p.pt",
            "nemo-subtokens",
            student_model=digits,
            teacher_model=byte_level,
        )
    assert list(tmp_path.iterdir()) == []


# byte-prefix-map: one student id for each teacher id


def test_byte_prefixes() -> None:
    student = words(b"a", b"ab", b"abc", b"x", b"ab", b"", control={5: "<eos>"})
    teacher = words(b"abd", b"abc", b"a", b"q", b"xabc", b"", b"aa", control={5: "</s>"})
    assert byte_prefixes(student, teacher).tolist() == [1, 2, 0, -1, 3, 5, 0]


def test_byte_prefix_map(built: ProjectionMap, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    [path] = export(built, tmp_path / "prefix.safetensors", "byte-prefix-map")
    found = load_file(path)
    ids, exact = found["student_ids"], found["exact"]
    student, teacher = built.student.table, built.teacher.table
    assert student is not None
    assert teacher is not None
    assert ids.shape == exact.shape == (len(teacher),)
    text = teacher.text_ids
    assert all(teacher[t].startswith(student[ids[t]]) for t in text.tolist())
    assert np.flatnonzero(exact).tolist() == sorted(match_bytes(teacher, student))
    # As its reader does it: the teacher's probabilities, summed up by student token.
    probs = torch.softmax(torch.arange(len(ids)) / 100.0, 0)
    inside = torch.from_numpy(ids) >= 0
    target = torch.zeros(len(student)).index_add(0, torch.from_numpy(ids)[inside], probs[inside])
    residual = probs[~inside].sum()
    assert float(target.sum() + residual) == pytest.approx(1.0, abs=1e-5)


# shared-vocab: JSON pairs


def test_shared_vocabulary() -> None:
    student = words(b"a", b"b", b"a", b"c", b"", control={4: "<eos>"})
    teacher = words(b"c", b"a", b"a", b"", b"d", control={3: "</s>"})
    shared = shared_vocabulary(student, teacher)
    assert shared.pairs == [(0, 1), (3, 0)]
    assert shared.special_pairs == [(4, 3)]


def test_shared_vocab_file(built: ProjectionMap, tmp_path: Path) -> None:
    [path] = export(built, tmp_path / "shared.json", "shared-vocab")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["student"] == {"model_id": "small-byte-level", "vocab_size": 1280}
    pairs = found["pairs"] + found["special_pairs"]
    for side in (0, 1):
        ids = [pair[side] for pair in pairs]
        assert len(set(ids)) == len(ids) > 256
    student, teacher = built.student.table, built.teacher.table
    assert student is not None
    assert teacher is not None
    assert all(student[s] == teacher[t] != b"" for s, t in found["pairs"])
    assert all(student[s] == teacher[t] == b"" for s, t in found["special_pairs"])


# scipy-npz and parquet: the matrix


def test_scipy_npz(tmp_path: Path) -> None:
    from scipy import sparse

    m = make({0: [(3, 0.75), (1, 0.25)], 2: [(5, 1.0)], 3: [(0, 0.5), (4, 0.5)]})
    [path] = export(m, tmp_path / "map.npz", "scipy-npz")
    matrix = sparse.load_npz(path)
    assert (matrix.format, matrix.dtype, matrix.shape) == ("csr", np.float32, (4, 6))
    assert matrix.has_canonical_format
    assert matrix.toarray().tolist() == [
        [0, 0.25, 0, 0.75, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
        [0.5, 0, 0, 0, 0.5, 0],
    ]
    first = path.read_bytes()
    export(m, path, "scipy-npz")
    assert path.read_bytes() == first


def test_parquet(built: ProjectionMap, tmp_path: Path) -> None:
    from pyarrow import parquet

    [path] = export(built, tmp_path / "map.parquet", "parquet")
    found = parquet.read_table(path)
    types = {field.name: str(field.type) for field in found.schema}
    assert types == {
        "student_id": "int32",
        "teacher_id": "int32",
        "weight": "float",
        "is_slot": "bool",
        "student_token": "binary",
        "teacher_token": "binary",
    }
    columns: dict[str, Any] = found.to_pydict()
    assert columns["student_id"] == built.student_ids.tolist()
    assert columns["weight"] == built.weights.tolist()
    assert columns["is_slot"] == built.is_slot.tolist()
    student = built.student.table
    assert student is not None
    assert columns["student_token"][:9] == [student[i] for i in built.student_ids[:9].tolist()]
    assert json.loads(found.schema.metadata[b"xtok"])["teacher"]["vocab_size"] == 896
    [plain] = export(GOOD, tmp_path / "plain.parquet", "parquet")
    assert parquet.read_table(plain).column_names == [
        "student_id", "teacher_id", "weight", "is_slot"
    ]  # fmt: skip


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(XtokError, match="parquet needs pyarrow") as caught:
        export(GOOD, tmp_path / "map.parquet", "parquet")
    assert caught.value.hint == "pip install pyarrow"


# What is wrong


def test_bad_exports(tmp_path: Path) -> None:
    with pytest.raises(
        XtokError, match=r"the scipy-npz file .*map\.pt does not end in \.npz"
    ) as caught:
        export(GOOD, tmp_path / "map.pt", "scipy-npz")
    assert caught.value.hint == f"name it {tmp_path / 'map.npz'}"
    (tmp_path / "file").touch()
    with pytest.raises(XtokError, match=r"the folder of the scipy-npz file, .*file, is a file"):
        export(GOOD, tmp_path / "file" / "map.npz", "scipy-npz")
    assert export(GOOD, tmp_path / "new" / "map.npz", "scipy-npz") == [tmp_path / "new/map.npz"]
    with pytest.raises(XtokError, match="the map carries no tokens"):
        export(GOOD, tmp_path / "map.json", "shared-vocab")
    with pytest.raises(ValueError, match="format is 'csv'"):
        export(GOOD, tmp_path / "map.csv", "csv")  # type: ignore[arg-type]


def test_the_command(cli: Cli, small: Path, built: ProjectionMap, tmp_path: Path) -> None:
    built.save(tmp_path / "map.safetensors")
    done = cli("export", "map.safetensors", "--format", "shared-vocab", "--output", "shared.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "shared.json\n", "")
    done = cli(
        "export", "map.safetensors", "--format", "nemo-subtokens", "--output", "pair.pt",
        "--student-model", small / "small-byte-level", "--teacher-model", small / "small-digits",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "pair.pt\npair.reverse.pt\n")
    done = cli("export", "map.safetensors", "--format", "nemo-subtokens", "--output", "pair.pt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(
        "hint: give both models that the map was made with, the student's with --student-model\n"
    )
    done = cli("export", "map.safetensors", "--format", "csv", "--output", "map.csv")
    assert done.returncode == 2


def test_offline_asks_no_hub(cli: Cli, built: ProjectionMap, tmp_path: Path) -> None:
    built.save(tmp_path / "a.safetensors")
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://[::1]:9", "HF_HOME": str(tmp_path / "hf")}
    args = ["--format", "nemo-subtokens", "--output", "b.pt", "--offline", "--trust-remote-code"]
    done = cli("export", "a.safetensors", *args, "--student-model", "org/model", env=env)
    assert done.returncode == 1
    assert "error: org/model is no file or folder here and not in the local cache" in done.stderr
    assert "thrown while requesting" not in done.stderr
