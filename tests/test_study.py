"""The study, with steps and texts enough to see that it runs to its end, and again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import map_study
import pytest

TEXTS = Path(__file__).with_name("small_corpus")
NAMES = {"en": "english", "de": "german", "zh": "chinese", "fr": "french", "ja": "japanese"}


@pytest.mark.usefixtures("short_prior")
def test_every_student_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for language, name in NAMES.items():
        text = (TEXTS / f"{name}.txt").read_text(encoding="utf-8")
        for split in ("train", "valid"):
            line = json.dumps({"text": text}).encode() + b"\n"
            (tmp_path / f"{language}.{split}.jsonl.gz").write_bytes(gzip.compress(line))
    work = tmp_path / "study"
    arguments = ["map_study.py", f"--corpus={tmp_path}", f"--work={work}", "--steps=2"]
    monkeypatch.setattr("sys.argv", [*arguments, "--teacher-steps=2", "--seeds=2", "--processes=1"])
    kinds = (("p-kl", "for-p-kl"), ("teacher-to-student-kl", "back-text"), ("gold", "recipe"))
    monkeypatch.setattr(map_study, "KINDS", kinds)
    monkeypatch.setattr(map_study, "VOCAB", {"long": 500, "short": 400})
    monkeypatch.setattr(map_study, "SIZES", {"student": (32, 1), "teacher": (32, 1)})
    map_study.main()
    report = capsys.readouterr().out
    assert report.count("\ngold + ce") == 2
    assert report.count("\nteacher-to-student-kl ") == 4  # alone and beside, of two students
    assert report.count(" nats over chunks\n") == 6
    assert report.count(" nats at starts\n") == 4
    assert (work / "bits-per-byte.png").stat().st_size > 10_000
    logs = {path: path.stat().st_mtime_ns for path in work.rglob("log.jsonl")}
    assert len(logs) == 2 + 2 * 2 * 6
    map_study.main()
    assert {path: path.stat().st_mtime_ns for path in work.rglob("log.jsonl")} == logs
