"""Options on the command lines of `build` and `multitoken`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from checks import fails, works
from conftest import Cli

from xtok.maps.projection_map import ProjectionMap


def test_options_on_the_command_line(cli: Cli, small: Path, tmp_path: Path) -> None:
    options = (
        "--special-tokens fuzzy --fuzzy-threshold 0.4 --canonicalization relaxed "
        "--token-form text --ignore-student-ids 7,5 --ignore-teacher-ids 9 -o m.safetensors"
    )
    works(cli("build", small / "small-byte-level", small / "small.model", *options.split()))
    projection = ProjectionMap.load(tmp_path / "m.safetensors")
    assert projection.history[0]["options"] == {
        "top_k": 32, "max_pieces": 4, "reverse_pass": True, "scale_trick": True,
        "special_tokens": "fuzzy", "fuzzy_threshold": 0.4,
        "canonicalization": "relaxed", "token_form": "text",
        "ignore_student_ids": [5, 7], "ignore_teacher_ids": [9],
    }  # fmt: skip


def test_options_without_effect_are_noted(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the text")
    result = works(cli("build", "bytes", "bytes", "--weights", "synthetic", "--max-pieces", "2"))
    assert result.stderr.startswith("note: --max-pieces has no effect with --weights synthetic\n")
    line = "build bytes bytes --text a.txt --scale-trick --weights decay"
    assert works(cli(*line.split())).stderr.startswith(
        "note: --scale-trick has no effect with --text\nnote: --weights has no effect with --text\n"
    )


def test_extend_a_map_on_the_command_line(cli: Cli, small: Path, tmp_path: Path) -> None:
    models = small / "small-byte-level", small / "small.model"
    works(cli("build", *models, "--output", "first.safetensors", "-q"))
    extended = ["--initial-projection-path", "first.safetensors", "--no-scale-trick"]
    works(cli("multitoken", *models, *extended, "--output", "m.safetensors", "-q"))
    projection = ProjectionMap.load(tmp_path / "m.safetensors")
    digest = hashlib.sha256((tmp_path / "first.safetensors").read_bytes()).hexdigest()
    assert projection.history[-1]["initial_sha256"] == digest
    fails(cli("multitoken", *reversed(models), *extended, "-o", "x.safetensors"), "swapped")
