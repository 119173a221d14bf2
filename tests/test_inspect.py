"""What a map covers by class of token, and what that says of the choice of a loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Cli
from test_stages import byte_ranks

import xtok
from xtok.config import BuildConfig
from xtok.inspection.inspect import ClassCoverage, cover, inspect
from xtok.maps.projection_map import ProjectionMap


@pytest.fixture
def projection(tmp_path: Path) -> ProjectionMap:
    student = byte_ranks(tmp_path / "student.tiktoken", "20", "201", "ab", "Ж")
    teacher = byte_ranks(tmp_path / "teacher.tiktoken", "ab", "abc", "Ж", "Я", width=262, digits=1)
    return xtok.build(student, teacher, BuildConfig(top_k=4))


def test_classes_of_a_map(projection: ProjectionMap) -> None:
    found = cover(projection)
    assert found is not None
    by_name = {one.token_class: one for one in found.classes}
    assert by_name["digits_1"] == ClassCoverage(
        token_class="digits_1", label="1 digit", rows=10, exact=10, empty=0, mean_entries=1.0,
        slot_share=0.0, teacher_ids=10, teacher_unreached=0,
    )  # fmt: skip
    three = by_name["digits_3"]
    assert (three.label, three.rows, three.exact, three.mean_entries) == ("3 digits", 1, 0, 3.0)
    assert three.slot_share == pytest.approx(1 / 6)
    # "abc" is in no row: "ab" and "c" are pinned.
    assert (by_name["latin"].teacher_ids, by_name["latin"].teacher_unreached) == (54, 1)
    assert (by_name["cyrillic"].rows, by_name["cyrillic"].exact) == (1, 1)
    assert by_name["cyrillic"].teacher_unreached == 1
    assert (by_name["unused"].rows, by_name["unused"].teacher_ids) == (0, 2)
    assert by_name["unused"].teacher_unreached == 2  # slots do not count
    assert sum(one.rows for one in found.classes) == projection.shape[0]
    assert sum(one.teacher_ids for one in found.classes) == projection.shape[1]


def test_a_map_without_tokens_has_no_classes(projection: ProjectionMap, tmp_path: Path) -> None:
    import torch

    pt = {"indices": torch.tensor([[1, -1]]), "likelihoods": torch.tensor([[1.0, 0.0]])}
    torch.save(pt, tmp_path / "foreign.pt")
    foreign = ProjectionMap.load(tmp_path / "foreign.pt", teacher_vocab_size=3)
    assert cover(foreign) is None
    assert inspect(foreign).coverage is None


def test_inspect_shows_classes_on_request(
    cli: Cli, projection: ProjectionMap, tmp_path: Path
) -> None:
    projection.save(tmp_path / "m.safetensors")
    plain = cli("inspect", "m.safetensors").stdout
    shown = cli("inspect", "m.safetensors", "--classes").stdout
    assert "3 digits" not in plain
    row = next(line for line in shown.splitlines() if "3 digits" in line)
    assert row.replace("│", "").split()[2:] == ["1", "0.0%", "3.00", "16.7%", "0", "-"]
    assert "event KL suits, or P-KL" in shown
    assert max(map(len, shown.splitlines())) <= 80
    classes = json.loads(cli("inspect", "m.safetensors", "--json").stdout)["coverage"]["classes"]
    assert [one["token_class"] for one in classes][:3] == ["digits_1", "digits_2", "digits_3"]
