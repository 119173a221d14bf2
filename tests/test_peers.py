"""scripts/peers.py: the part that needs only installed packages, and a broken checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import peers
import pytest
from forked import Forks
from peer_checks import report

PEERS = Path(__file__).resolve().parents[1] / "scripts" / "peers.py"


@pytest.mark.real
@pytest.mark.usefixtures("few_synthetic_texts")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
def test_installed_peers_agree(
    real: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's client and loss work on the output of `xtok project --to vllm`."""
    pytest.importorskip("trl")
    for file in ("mistral-v1.model", "mistral-v3.model"):
        real(file)
    monkeypatch.setattr(report, "PAIRS", {"Gemma → Llama 2": ("gemma3", "llama2")})
    monkeypatch.setattr(peers, "get_context", lambda _: SimpleNamespace(Pool=ThreadPool))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert peers.main([]) == 0
    printed = capsys.readouterr().out
    assert "`ServerDistillationTrainer`, one tokenizer: equal logits " in printed
    assert "`ServerDistillationTrainer`, Gemma → Llama 2: " in printed
    assert "**no**" not in printed


def test_a_peer_that_breaks_is_reported(tmp_path: Path, forks: Forks) -> None:
    """One line of the table names the exception, and the exit code is 3."""
    words = ["--only-checkouts"]
    for commit in ("0f17ee0", "a84de17"):
        module = tmp_path / commit / "distillkit" / "__init__.py"
        module.parent.mkdir(parents=True)
        module.write_text(f"raise RuntimeError('{commit} has moved on')\n", encoding="utf-8")
        words += ["--distillkit", f"{tmp_path / commit}@{commit}"]
    result = forks.run([PEERS, *words], tmp_path, program="python")
    assert result.returncode == 3
    for commit in ("0f17ee0", "a84de17"):
        assert f"commit {commit} (as stated; no git checkout)" in result.stdout
        assert f"RuntimeError: {commit} has moved on" in result.stdout


def test_a_note_of_several_tables_is_printed_once() -> None:
    first: dict[str, str] = {}
    assert peers.without_repeat("", "TRL", first) == ""
    assert peers.without_repeat("No GPU.", "slime, commit 1 (as stated)", first) == "No GPU."
    assert peers.without_repeat("No GPU.", "miles, commit 2", first) == "Run like slime, commit 1."


def test_pairs_are_columns_of_a_table() -> None:
    """A single pair keeps its name in the line; differences are marked."""
    first, second = report.PAIRS
    checks = [
        report.Check(f"KL, float32, {first}", "1e-07", holds=True),
        report.Check(f"KL, float32, {second}", "2 | 3", holds=False),
        report.Check("a file", "read", holds=True),
    ]
    assert peers.table("A", "No GPU.", checks).split("\n") == [
        "### A", "", "2 of 3 agree. No GPU.", "",
        f"| what | {first} | {second} |", "|---|---|---|",
        "| KL, float32 | 1e-07 | **no**: 2 \\| 3 |", "",
        "- a file: read", "",
    ]  # fmt: skip
    assert f"- KL, float32, {first}: 1e-07\n" in peers.table("A", "", checks[:1])
