"""The study runs to its end with tiny models, and resumes."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import study
import study_data
from tiny_models import save_model

import xtok

TEXTS = Path(__file__).with_name("small_corpus")
KINDS = {"de": "german", "held": "french", "en": "english"}


@pytest.mark.usefixtures("short_prior")
def test_every_student_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small: Path
) -> None:
    for name, language in KINDS.items():
        text = (TEXTS / f"{language}.txt").read_text(encoding="utf-8")
        lines = json.dumps({"text": text}).encode() + b"\n"
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
    models = [
        save_model(
            tmp_path / name, xtok.load_tokenizer(str(small / name)), small / name, seed=0, sharp=0.1
        )
        for name in ("small-digits", "small-byte-level")
    ]
    work = tmp_path / "study"
    arguments = ["study.py", "--student", models[0], "--teacher", models[1], f"--work={work}"]
    for option, name in zip(("texts", "held-out", "forgotten"), KINDS, strict=True):
        arguments.append(f"--{option}={tmp_path / name}.jsonl.gz")
    arguments += [
        "--seeds=1",
        "--steps=4",
        "--batch-size=1",
        "--passes=2",
        "--settings=scarce",
        "--rates",
        "5e-5",
        "2e-5",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    study.main()
    table = capsys.readouterr().out
    found = study.results(work)
    runs = list(study.plan(["scarce"], 1, (5e-5, 2e-5)))
    assert sorted(run for run, _ in found) == sorted([study.ITSELF, *runs])
    assert len(runs) == 6 + 1 + 5 + 3
    assert table.count("\n| topk-kl | path-64 | 1 | 1 |") == 1
    assert table.count("\n| topk-kl | path-64 | 0.3 | 1 |") == 1
    assert table.count("\n| gold | for-gold | 1 | 1 |") == 1
    study.report(found, "topk-kl", "map-64")
    against = capsys.readouterr().out
    assert "| topk-kl | map-64 | 1 | 1 | " in against
    assert "| 0.000 | 0.000 to 0.000 |" in against
    alone = dict(found)[runs[0]]
    assert alone["steps"] == [0, 1, 2, 3, 4]
    [held] = study_data.texts_of(tmp_path / "held.jsonl.gz", 0, 20, one_each=True)
    assert alone["bytes"][0] == [len(held.encode())]
    teacher = dict(found)[study.ITSELF]
    assert teacher["bits"][0][0] == [pytest.approx(bits_alone(models[1], held), rel=1e-4)]
    assert f"the teacher itself: {teacher['bits'][0][0][0] / len(held.encode()):.3f}, " in table
    lines_before = (work / "results.jsonl").read_bytes()
    (work / "results.jsonl").write_bytes(lines_before[: lines_before.rindex(b"\n", 0, -1) + 1])
    study.main()
    assert dict(study.results(work)).keys() == dict(found).keys()


def bits_alone(folder: str, text: str) -> float:
    """Return the bits of a text after its first token, the model asked directly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = begin + tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    logprobs = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    return float(-logprobs[len(begin) :].sum()) / math.log(2)


def test_the_candidates_of_a_batch_are_those_of_its_texts() -> None:
    import torch

    rows = [
        {"top_ids": torch.tensor([[0, 0], [3, 4]]), "top_logprobs": torch.zeros(2, 2),
         "rest_logprob": torch.tensor([0.0, -1.0])},
        {"top_ids": torch.tensor([[0], [5], [6]]), "top_logprobs": torch.ones(3, 1),
         "rest_logprob": torch.tensor([0.0, -2.0, -3.0])},
    ]  # fmt: skip
    valid = torch.tensor([[True, True, False], [True, True, True]])
    made = study_data.padded(rows, valid)
    assert made.top_ids.tolist() == [[[0, 0], [3, 4], [0, 0]], [[0, 0], [5, 0], [6, 0]]]
    assert made.top_logprobs[1].tolist() == [[1, -torch.inf]] * 3
    assert made.rest_logprob.tolist() == [[0, -1, -torch.inf], [0, -2, -3]]
