"""The study of transplants runs to its end with tiny models, and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transplant_study
from tiny_models import save_model
from transformers import AutoModelForCausalLM

import xtok


@pytest.mark.usefixtures("few_synthetic_texts")
def test_all_ways_to_heal(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = small / "small-digits"
    tokenizer = xtok.load_tokenizer(source)
    model = save_model(tmp_path / "model", tokenizer, source, seed=0, sharp=0.1)
    xtok.transplant(model, small / "small-byte-level", tmp_path / "new")
    texts, healed = tmp_path / "held.jsonl", tmp_path / "healed.jsonl"
    line = {"text": "In 2012 there were 201 of them."}
    texts.write_text((json.dumps(line) + "\n") * 9)
    arguments = [
        "heal", model, str(tmp_path / "new"), f"--texts={texts}", f"--train={texts}",
        "--batch-size=2", "--learning-rate=0.01", f"--output={healed}",
    ]  # fmt: skip
    few = ["--arms=text alone", "--arms=event KL and text"]
    for options in (["--steps=3"], ["--steps=3"], ["--steps=3", "--seed=1", *few]):
        transplant_study.main([*arguments, *options])
    runs = transplant_study.lines(healed)
    names = [*transplant_study.ARMS]
    assert [run["arm"] for run in runs] == [*names, "text alone", "event KL and text"]
    assert all(run["bits"][0] > run["bits"][-1] and len(run["bits"]) == 3 for run in runs)
    assert len({run["bits"][-1] for run in runs[:6]}) == 6
    assert [run["arm"] for run in runs if run["teacher_seconds"]] == ["stored path-64 and text"]
    capsys.readouterr()
    transplant_study.main(["table", str(healed)])
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "held.jsonl"
    assert [row.split(" | ")[0] for row in output[3:]] == [f"| {name}" for name in names]
    assert output[4].count("±") == 4
    assert output[4].endswith("| 2 |")


@pytest.mark.usefixtures("few_synthetic_texts")
def test_all_kinds_of_rows(tmp_path: Path, small: Path) -> None:
    source, new = small / "small-digits", str(small / "small-byte-level")
    model = save_model(tmp_path / "model", xtok.load_tokenizer(source), source, seed=0, sharp=0.1)
    tied: Any = AutoModelForCausalLM.from_pretrained(model)
    tied.config.tie_word_embeddings = True
    tied.set_output_embeddings(tied.get_input_embeddings())
    tied.save_pretrained(model)
    xtok.transplant(model, new, tmp_path / "new", pad_to_multiple_of=128)
    texts, rows = tmp_path / "held.jsonl", tmp_path / "rows.jsonl"
    texts.write_text(json.dumps({"text": "In 2012 there were 201 of them."}) + "\n")
    arguments = ["rows", model, new, f"--texts={texts}", f"--also={tmp_path / 'new'}"]
    for _ in range(2):
        transplant_study.main([*arguments, f"--output={rows}"])
    measured = {run["kind"]: run for run in transplant_study.lines(rows)}
    assert len(measured) == len(transplant_study.lines(rows)) > 40
    assert measured["original"]["bits"] < measured["first piece"]["bits"]
    assert measured[str(tmp_path / "new")]["bits"] == measured["20% mean row"]["bits"]
    predicted = [measured["mean of the pieces"][f"predicted {n}"] for n in ("exact", "composed")]
    assert sum(predicted) <= 1.001
