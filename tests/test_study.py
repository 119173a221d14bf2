"""The study, with steps and texts enough to see that it runs to its end, and again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import map_study
import pytest

TEXTS = Path(__file__).with_name("small_corpus")
NAMES = {"en": "english", "de": "german", "zh": "chinese", "fr": "french", "ja": "japanese"}


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
    arguments += ["--teacher-steps=2", "--seeds=2", "--artefacts", "recipe", "for-p-kl"]
    monkeypatch.setattr("sys.argv", [*arguments, "back-text", "path-16", "map-16"])
    map_study.main()
    report = capsys.readouterr().out
    assert report.count("\ngold + ce") == 2
    assert report.count("\nteacher-to-student-kl ") == 4  # alone and beside, of two students
    assert report.count("\ntopk-kl + ce") == 4
    assert report.count(" nats over chunks\n") == 10
    assert report.count(" nats at starts\n") == 4
    assert (work / "bits-per-byte.png").stat().st_size > 10_000
    results = {path: path.stat().st_mtime_ns for path in (work / "results").iterdir()}
    assert len(results) == 2 * 2
    lines = [json.loads(x) for p in results for x in p.read_text("utf-8").splitlines()]
    assert len(lines) == 2 * 2 * 10
    assert {kind for kind, artefact, _ in lines if artefact == "path-16"} == {"topk-kl + ce"}
    map_study.main()
    assert {path: path.stat().st_mtime_ns for path in results} == results
