"""The library as a notebook uses it: models and maps by name, by path, or loaded."""

from __future__ import annotations

import ast
import doctest
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from make_maps import equal_maps
from make_tokenizers import byte_ranks

import xtok
from xtok.building.build import build
from xtok.cli import COMMANDS
from xtok.maps.projection_map import ProjectionMap, Row, RowEntry

PACKAGE = Path(xtok.__file__).parent


@pytest.fixture
def projection(tmp_path: Path) -> ProjectionMap:
    student = byte_ranks(tmp_path / "student.tiktoken", "20", "201", "ab", " ,")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "ab", "abc", width=260, digits=1)
    return xtok.build(student, teacher)


@pytest.fixture
def path(projection: ProjectionMap, tmp_path: Path) -> str:
    projection.save(tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


# Models by name, by file, or as a loaded tokenizer


def test_doctor_accepts_a_model_or_a_pair(small: Path) -> None:
    model = small / "small.model"
    assert [side.model_id for side in xtok.doctor("bytes").tokenizers] == ["bytes"]
    assert xtok.doctor(model).tokenizers[0].model_id == "small.model"
    assert xtok.doctor(xtok.load_tokenizer("bytes")) == xtok.doctor("bytes")
    pair_diagnosis = xtok.doctor("bytes", model)
    assert [side.model_id for side in pair_diagnosis.tokenizers] == ["bytes", "small.model"]
    assert pair_diagnosis.advice is not None
    assert pair_diagnosis.advice.commands[0] == ("xtok", "events", "bytes", str(model))


# Maps by path, or as a loaded map


def test_stages_accept_the_path_of_a_map(projection: ProjectionMap, path: str) -> None:
    for source in (path, Path(path)):
        assert equal_maps(xtok.reapply_exact(source), xtok.reapply_exact(projection))
        assert equal_maps(xtok.sort_cut(source), xtok.sort_cut(projection))
    pair = xtok.load_pair("bytes", "bytes")
    extended = xtok.multitoken(pair, initial=build(pair))
    xtok.build("bytes", "bytes").save(path)
    assert equal_maps(xtok.multitoken(pair, initial=path), extended)


def test_explain_accepts_a_map_or_a_path_and_tokens(projection: ProjectionMap, path: str) -> None:
    explanation = xtok.explain(path, "201")
    assert [(row.student_id, row.token) for row in explanation.rows] == [(257, "201")]
    for token in (["201"], [257], b"201"):
        assert xtok.explain(projection, token) == explanation
    rows = xtok.explain(path, ["201", 0, b"ab"]).rows
    assert [row.student_id for row in rows] == [257, 0, 258]
    for tokens in ("201", b"201", 257, 0, np.int64(257)):
        assert xtok.inspect(path, tokens) == xtok.explain(path, tokens)  # type: ignore[arg-type]
    worst = xtok.explain(projection, kind="pieces", worst=1)
    assert (worst.rows, worst.rows_matching) == (explanation.rows, 3)
    assert [row.token for row in xtok.describe(path, num_examples=1).examples] == ["20"]


def test_convert_accepts_a_map_or_a_path(
    projection: ProjectionMap, path: str, tmp_path: Path
) -> None:
    for source in (path, Path(path), projection):
        assert xtok.convert(source, tmp_path / "out.pt") == tmp_path / "out.pt"
        assert equal_maps(ProjectionMap.load(tmp_path / "out.pt"), projection)
    with pytest.raises(TypeError, match="preserve_last"):
        xtok.convert(projection, tmp_path / "out.pt", preserve_last=True)


def test_two_maps_may_be_paths(path: str, projection: ProjectionMap, tmp_path: Path) -> None:
    assert xtok.compare(path, projection).rows_that_differ == 0
    bytes_path, text = str(tmp_path / "bytes.safetensors"), tmp_path / "a.txt"
    text.write_text("201 ab, 20", encoding="utf-8")
    bytes_map, pair = xtok.build("bytes", "bytes"), xtok.load_pair("bytes", "bytes")
    bytes_map.save(bytes_path)
    evaluation = xtok.evaluate(pair, bytes_path, [text])
    assert [m.name for m in evaluation.measures] == [bytes_path]
    two = xtok.evaluate(pair, [bytes_path, bytes_map], [text])
    assert [m.name for m in two.measures] == [bytes_path, "map 2"]
    assert {m.coverage for m in two.measures} == {1.0}


# Rows and entries


def test_a_row_by_text_bytes_or_id(projection: ProjectionMap) -> None:
    row = projection["ab"]
    entry = RowEntry(teacher_id=256, token="ab", weight=1.0, is_slot=False)
    assert row == Row(student_id=258, token="ab", kind="exact", entries=(entry,))
    assert projection[b"ab"] == projection[258] == projection[np.int64(258)] == row  # type: ignore[index]
    assert projection["\\xe4"].student_id == projection[b"\xe4"].student_id
    assert [e.is_slot for e in projection["201"].entries] == [False, False, False, True]


def test_ids_and_weights_of_a_row_by_its_token(projection: ProjectionMap) -> None:
    by_id = projection.row(projection["201"].student_id)
    for token in ("201", b"201"):
        for array, expected in zip(projection.row(token), by_id, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_a_single_path_is_a_list_of_texts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc")
    maps = [xtok.build("bytes", "bytes", texts=texts) for texts in (str(text), text, [text])]
    assert equal_maps(maps[0], maps[1])
    assert equal_maps(maps[0], maps[2])


def test_token_bytes_find_the_canonical_id(sentencepiece: xtok.Tokenizer) -> None:
    projection = xtok.build(sentencepiece, "bytes")
    ids = projection.student.ids_of("a")
    assert len(ids) == 2  # the character, and its byte token
    assert [projection["a"].student_id] == list(sentencepiece.segment(b"a"))


def test_to_scipy_returns_the_same_matrix_as_to_torch(projection: ProjectionMap) -> None:
    matrix = projection.to_scipy()
    assert (matrix.format, matrix.dtype, matrix.shape) == ("csr", np.float32, projection.shape)
    assert matrix.has_sorted_indices
    np.testing.assert_array_equal(matrix.toarray(), projection.to_torch().to_dense().numpy())


def test_a_missing_package_is_named(
    projection: ProjectionMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        projection.to_scipy()


def test_a_map_without_tokens_has_rows_by_id(tmp_path: Path) -> None:
    import torch

    torch.save({(0, 1): 3, (0, 2): 1}, tmp_path / "counts.pt")
    counts = ProjectionMap.load(tmp_path / "counts.pt")
    assert [(e.teacher_id, e.token) for e in counts[0].entries] == [(1, None), (2, None)]


# The examples in docstrings

WITH_EXAMPLES = sorted(
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some examples write files
    module = importlib.import_module(name.removesuffix(".__init__"))
    results = doctest.testmod(module, extraglobs={"xtok": xtok, "np": np})
    assert results.failed == 0


def test_each_command_is_a_function_with_the_same_name() -> None:
    assert {name.replace("-", "_") for name in COMMANDS} <= set(xtok.__all__)


def test_lazy_names_match_the_stub() -> None:
    source = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    seen = {x.asname: f"xtok.{node.module or x.name}" for node in imports for x in node.names}
    for name, module in seen.items():
        imported = importlib.import_module(module)
        assert getattr(xtok, str(name)) in (imported, getattr(imported, str(name), imported))
    assert set(xtok.__all__) == seen.keys()
    for name, words in (("load_map", r"ProjectionMap\.load"), ("nonsense", "nonsense")):
        with pytest.raises(AttributeError, match=words):
            getattr(xtok, name)
