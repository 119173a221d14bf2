"""The benchmarks start, in a tiny size. What they measure is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import benchmark
import pytest
from conftest import REAL, ROOT


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert benchmark.main([*arguments, "--repeat=1", "--json"]) == 0
    *found, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert last["case"] == arguments[0]
    assert last["peak MiB of the process"] > 10
    return found


def test_the_list_names_every_case() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py")]
    for arguments in (["--list"], []):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        assert [line.split()[0] for line in done.stdout.splitlines()] == list(benchmark.CASES)


def test_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["bild"])
    assert "error: unknown: bild (choose from build, maps, help," in capsys.readouterr().err


def test_several_cases_are_processes_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["p-kl", "generate", "--size=0.002", "--repeat=1", "--json"]
    assert benchmark.main(arguments) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["case"] for row in found if "case" in row] == ["p-kl", "generate"]
    assert benchmark.main(["quality", "quality"]) == 1  # needs a corpus


def test_commands_on_a_map(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = rows(capsys, "maps", "--size=0.001", "--only=sort-cut")
    assert list(found) == [
        "command", "xtok s", "peer s", "ratio", "turns", "limit", "MiB", "above the peer's",
    ]  # fmt: skip
    assert found["command"] == "sort-cut"
    assert found["ratio"] == found["xtok s"] / found["peer s"]


def test_p_kl(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = rows(capsys, "p-kl", "--size=0.002")
    assert found["map"].startswith("synthetic, ")
    assert (found["positions"], found["k"]) == (16, 16)
    assert found["× gradient and map"] > 0
    assert found["ratio"] > 0


def test_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = rows(capsys, "generate", "--size=0.002")
    assert found["search"] == "256 × 303 × 384, cpu float32"


@pytest.mark.real
@pytest.mark.parametrize(
    ("case", "only", "expected"),
    [
        ("align", "claude-2", {"pair": "claude-2 → mistral-v3", "in correct chunks": "100.0000%"}),
        (
            "project",
            "mistral",
            {"pair": "mistral-v3 ← qwen", "valid": "100.0000%", "wrong sums": 0},
        ),
        ("estimate", "deepseek", {"pair": "deepseek-v3 → qwen", "tokens": 8508}),
        ("options", "claude-2", {"option": "(none)", "exact": 25368, "rows differ": 0}),
    ],
)
def test_cases_on_real_tokenizers(
    capsys: pytest.CaptureFixture[str], case: str, only: str, expected: dict[str, Any]
) -> None:
    for name in ("claude-2", "mistral-v3.model", "deepseek-v3", "qwen.tiktoken"):
        if not (REAL / name).exists():
            pytest.skip(f"{name} is not there: run scripts/fetch_tokenizers.py")
    first = rows(capsys, case, "--size=0.02", f"--only={only}")[0]
    assert expected.items() <= first.items()
