"""scripts/peers.py: the part that needs installed packages only, and a checkout that is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parents[1] / "scripts" / "peers.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(PEERS), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.real
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
def test_installed_peers_agree() -> None:
    """Every tokenizer's ids beside AutoTokenizer's, and TRL's own trainer with xtok's loss."""
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("`AutoTokenizer`") >= 4
    assert "`GOLDTrainer` with xtok's P-KL" in done.stdout
    assert "**no**" not in done.stdout


def test_a_peer_that_breaks_is_reported(tmp_path: Path) -> None:
    """One line of the table names what its code raised, and the exit code is 3."""
    module = tmp_path / "vllm" / "v1" / "spec_decode" / "vocab_mapping.py"
    module.parent.mkdir(parents=True)
    module.write_text("raise RuntimeError('has moved on')\n", encoding="utf-8")
    done = run("--vllm", f"{tmp_path}@0f17ee0", "--only-checkouts")
    assert done.returncode == 3
    assert "RuntimeError: has moved on" in done.stdout
    assert "commit 0f17ee0 (as stated; no git checkout)" in done.stdout
