"""A student learns on policy with TRL from a teacher behind `xtok serve`, and is measured."""

from __future__ import annotations

import gzip
import importlib.util
import json
import socket
from pathlib import Path

import httpx
import live_trl
import pyarrow.parquet
import pytest
import teacher_server
from forked import Forks
from teacher_server import ModelResponses, serving
from tiny_models import save_model

import xtok
from xtok.config import BACK_MAP

TEXTS = Path(__file__).with_name("small_corpus")


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.filterwarnings("ignore")  # warnings of TRL and Transformers
def test_both_credits_are_trained_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    small: Path, forks: Forks,
) -> None:  # fmt: skip
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
        f"--texts={tmp_path / 'german.jsonl.gz'}", f"--work={tmp_path / 'work'}",
        f"--held-out={tmp_path / 'french.jsonl.gz'}", f"--student={student}",
        f"--teacher={teacher}", "--steps=2", "--batch-size=2", "--learning-rate=0.01",
    ]  # fmt: skip
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr("sys.executable", str(forks.folder / "python"))  # of the servers
    monkeypatch.setattr(live_trl, "NEW_TOKENS", 12)
    live_trl.main(arguments)
    with serving(ModelResponses(Path(teacher))) as url:
        for more in (
            ["--credit=equal"],
            ["--writer=text", "--beta=0"],
            ["--text-weight=1"],
            ["--weight=0", "--text-weight=1", "--writer=text"],
        ):
            live_trl.main([*arguments, *more, f"--teacher-url={url}"])
    out = capsys.readouterr().out
    assert out.count("student tokens, ") == 5
    table = out[out.rindex("| credit |") :].splitlines()
    assert [row.split(" | ")[:7] for row in table[2:7]] == [
        ["| prefix", "student", "1", "1", "0", "0.01", "0, 1, 2"],
        ["| equal", "student", "1", "1", "0", "0.01", "0, 1, 2"],
        ["| prefix", "text", "0", "1", "0", "0.01", "0, 1, 2"],
        ["| prefix", "student", "1", "1", "1", "0.01", "0, 1, 2"],
        ["| prefix", "text", "1", "0", "1", "0.01", "0, 1, 2"],
    ]
    lines_of = (tmp_path / "work" / "results.jsonl").read_text().splitlines()
    measured = [*map(json.loads, lines_of)]
    assert all(line["bits"] == measured[0]["bits"] for line in measured[::3])  # before training
    # after training
    assert len({str(line["bits"]) for line in [measured[0], *measured[2::3]]}) == 6
    assert sum(measured[0]["kl_bytes"]) > 0
    assert all(len(line["greedy"]) == len(line["repeated"]) > 0 for line in measured)


def test_a_stored_teacher_without_vllm(tmp_path: Path, small: Path) -> None:
    """`project` reads the responses of `teacher_server.py` with `return_token_ids`."""
    teacher = xtok.load_tokenizer(str(small / "small-digits"))
    folder = save_model(tmp_path / "teacher", teacher, small / "small-digits", seed=0, sharp=0.1)
    ids = [teacher.segment(text) for text in ("There were 201 of them.", "Fog, 42.")]
    asked = {"prompt": ids, "prompt_logprobs": 20, "return_token_ids": True}
    with serving(ModelResponses(Path(folder))) as url:
        response = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
        wrong = httpx.post(f"{url}/v1/completions", json={"prompt": "text"})
    assert wrong.status_code == 400
    assert [choice["prompt_token_ids"] for choice in response.json()["choices"]] == ids
    (tmp_path / "teacher.jsonl").write_text(response.text + "\n")
    pair = xtok.load_pair(str(small / "small-byte-level"), teacher)
    back_map = xtok.build(pair.reversed, config=BACK_MAP)
    stored, output = tmp_path / "teacher.jsonl", tmp_path / "student.parquet"
    result = xtok.project(stored, pair, output, back_map=back_map)
    assert (result.documents, result.first_tokens) == (2, 2)
    assert result.targets > 0
    assert pyarrow.parquet.read_metadata(result.paths[0]).num_rows == 2


def test_errors_at_startup_of_the_teachers_server(tmp_path: Path) -> None:
    """The error is one line."""
    (tmp_path / "a.jsonl").write_text("{}\n")
    what = "is not what xtok project --to vllm has written, or a model's folder: "
    for path in (tmp_path, tmp_path / "none", tmp_path / "a.jsonl"):
        with pytest.raises(SystemExit) as ended:
            teacher_server.main([str(path)])
        assert str(ended.value.code).startswith(f"error: {path} {what}")
        assert "\n" not in str(ended.value.code)
    lines = '{"model": "x", "choices": [{"prompt_token_ids": [1], "prompt_logprobs": [null]}]}'
    (tmp_path / "a.jsonl").write_text(lines)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            teacher_server.main([str(tmp_path / "a.jsonl"), f"--port={port}"])
    expected = f"error: port {port}: Address already in use; give another with --port"
    assert ended.value.code == expected
