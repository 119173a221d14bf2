"""The benchmarks run with tiny inputs. Their results are not tested."""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import benchmark
import pytest
from benchmarks import commands, hidden, projecting, storing
from conftest import ROOT, Real
from tiny_models import save_model

from xtok import load_tokenizer


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert benchmark.main([*arguments, "--repeat=1", "--json"]) == 0
    *results, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert last["case"] == arguments[0]
    assert last["peak MiB of the process"] > 10
    return results


def test_the_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--list"], []):
        assert benchmark.main(arguments) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in printed] == list(benchmark.CASES)


def test_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["bild"])
    assert "error: unknown: bild (choose from commands, align, project," in capsys.readouterr().err


def test_each_case_runs_in_its_own_process(capfd: pytest.CaptureFixture[str]) -> None:
    """A failing case (`chunks` needs a corpus) does not stop the other cases."""
    assert benchmark.main(["chunks", "p-kl", "--size=0.002", "--repeat=1", "--json"]) == 1
    results = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["case"] for row in results if "case" in row] == ["p-kl"]


def test_commands_on_a_map(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = rows(capsys, "commands", "--size=0.001", "--only=sort-cut")
    assert list(result) == [
        "command", "beside", "xtok s", "peer s", "ratio", "turns", "limit", "MiB",
        "above the peer's",
    ]  # fmt: skip
    assert result["command"] == "xtok sort-cut map:wide"
    assert result["beside"] == "bare read map:wide copy.safetensors"
    assert result["ratio"] == result["xtok s"] / result["peer s"]


def test_every_line_names_files_that_can_be_written() -> None:
    lines = [line for ours, beside, _ in commands.COMMANDS for line in (ours, beside)]
    kinds = set(re.findall(r"\b([a-z]+):", " ".join(lines)))
    assert kinds == {"file", "model", "pattern", *commands.MAKERS}
    assert {line.split()[0] for line in lines} == commands.STARTS.keys()


def test_the_p_kl_case_reports_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = rows(capsys, "p-kl", "--size=0.002")
    assert result["map"].startswith("synthetic, ")
    assert result["k"] == 16
    # a peak of memory: already allocated memory may be sufficient
    assert result["× gradient and map"] >= 0
    assert result["ratio"] > 0


def test_steps_of_two_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    for number, name in enumerate(("smollm2", "gemma3")):
        source = small / ("small-byte-level", "small-hf")[number]
        save_model(tmp_path / name, load_tokenizer(str(source)), source, seed=number, sharp=0.5)
    monkeypatch.setattr(hidden, "path_of", lambda name: tmp_path / name)
    results = rows(capsys, "steps", "--size=0.1")
    assert [row["tokens"].split(" and ")[0] for row in results] == ["4 × 25", "8 × 51"]
    assert all(row["ratio"] > 0 for row in results)


@pytest.mark.real
@pytest.mark.parametrize(
    ("case", "only", "expected"),
    [
        ("align", "claude-2", {"pair": "claude-2 → mistral-v3", "text": "own text"}),
        ("project", "mistral", {"pair": "mistral-v3 → qwen", "text": "own text"}),
        ("estimate", "deepseek", {"pair": "deepseek-v3 → qwen", "tokens": 8508}),
        ("options", "claude-2", {"option": "(none)", "exact": 25368, "of other bytes": 0}),
    ],
)
def test_cases_on_real_tokenizers(
    real: Real, capsys: pytest.CaptureFixture[str], case: str, only: str, expected: dict[str, Any]
) -> None:
    for name in ("claude-2", "mistral-v3.model", "deepseek-v3", "qwen.tiktoken"):
        real(name)
    first = rows(capsys, case, "--size=0.02", f"--only={only}")[0]
    assert expected.items() <= first.items()


@pytest.mark.real
@pytest.mark.usefixtures("few_synthetic_texts")
def test_the_cost_of_projecting(
    real: Real, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real("qwen.tiktoken")
    constants = {"PAIRS": (("mistral-v3", "qwen"),), "CANDIDATES": (16, 64), "CHARACTERS": 300}
    for name, value in constants.items():
        monkeypatch.setattr(storing, name, value)
    results = rows(capsys, "projecting-cost", "--size=0.02")
    assert [row["K"] for row in results] == [16, 64]
    for less, more in pairwise(results):
        for size in ("neutral, GB", "distillkit, GB", "vllm, GB"):
            assert 0 < less[size] < more[size]
    assert {"unseen, core-hours", "seen, core-hours"} <= results[0].keys()


@pytest.mark.real
@pytest.mark.usefixtures("few_synthetic_texts")
def test_projecting_compared_with_a_model(
    real: Real, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, small: Path,
) -> None:  # fmt: skip
    real("qwen.tiktoken")
    source = small / "small-byte-level"
    save_model(tmp_path / "teacher", load_tokenizer(str(source)), source, seed=0, sharp=0.5)
    line = json.dumps({"text": (ROOT / "tests/small_corpus/german.txt").read_text("utf-8")})
    (tmp_path / "de.valid.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    constants = {"STUDENTS": ("qwen",), "BOUNDARIES": {"shared": 2, "inside": 1}, "FEWEST": 16,
                 "SAMPLES": 64, "NEW_TOKENS": 12, "CANDIDATES": (16, 1024)}  # fmt: skip
    for name, value in constants.items():
        monkeypatch.setattr(projecting, name, value)
    arguments = ["projecting", f"--corpus={tmp_path}", f"--work={tmp_path / 'work'}"]
    arguments += [f"--teacher={tmp_path / 'teacher'}"]
    results = rows(capsys, *arguments)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()}
    assert len(kept) == 3
    assert [(row["K"], row["text"]) for row in results if row["where"] == "shared"] == [
        (16, "all"), (16, "de"), (1024, "all"), (1024, "de"),
    ]  # fmt: skip
    for row in results:
        assert row["path"] > row["limit"] > 0
        assert 0 <= row["top, path"] <= row["top, limit"] <= 1
    assert results[2]["path"] < results[0]["path"]  # more candidates
    assert rows(capsys, *arguments) == results
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
