"""A student learns on policy with TRL from a teacher behind `xtok serve`, and is measured."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import live_trl
import pytest
from teacher_server import ModelAnswers, serving
from tiny_models import save_model

import xtok

TEXTS = Path(__file__).with_name("small_corpus")


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.filterwarnings("ignore")  # what TRL and Transformers say of one another
def test_both_credits_are_trained_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small: Path
) -> None:
    for name in ("german", "french"):
        text = (TEXTS / f"{name}.txt").read_text(encoding="utf-8")
        lines = json.dumps({"text": text}).encode() + b"\n"
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
    student, teacher = (
        save_model(
            tmp_path / name, xtok.load_tokenizer(str(small / name)), small / name, seed=0, sharp=0.1
        )
        for name in ("small-byte-level", "small-digits")
    )
    arguments = [
        "live_trl.py", f"--texts={tmp_path / 'german.jsonl.gz'}", f"--work={tmp_path / 'work'}",
        f"--held-out={tmp_path / 'french.jsonl.gz'}", f"--student={student}",
        f"--teacher={teacher}", "--steps=2", "--batch-size=2", "--learning-rate=0.01",
    ]  # fmt: skip
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr("sys.argv", arguments)
    live_trl.main()
    with serving(ModelAnswers(Path(teacher))) as url:
        monkeypatch.setattr("sys.argv", [*arguments, "--credit=equal", f"--teacher-url={url}"])
        live_trl.main()
    out = capsys.readouterr().out
    assert out.count("student tokens, ") == 2
    table = out[out.rindex("| credit |") :].splitlines()
    assert [row.split(" | ")[:3] for row in table[2:]] == [
        ["| prefix", "1", "0, 1, 2"],
        ["| equal", "1", "0, 1, 2"],
    ]
    lines_of = (tmp_path / "work" / "results.jsonl").read_text().splitlines()
    before, _, after, equal_before, _, equal_after = map(json.loads, lines_of)
    assert before["bits"] == equal_before["bits"]
    assert before["bits"] != after["bits"] != equal_after["bits"]
    assert sum(before["kl_bytes"]) > 0
