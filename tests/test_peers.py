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
    """One line of its table names what its code raised, and the exit code is 3."""
    words = ["--only-checkouts"]
    for commit in ("0f17ee0", "a84de17"):
        module = tmp_path / commit / "trl" / "__init__.py"
        module.parent.mkdir(parents=True)
        module.write_text(f"raise RuntimeError('{commit} has moved on')\n", encoding="utf-8")
        words += ["--trl", f"{tmp_path / commit}@{commit}"]
    done = run(*words)
    assert done.returncode == 3
    for commit in ("0f17ee0", "a84de17"):
        assert f"commit {commit} (as stated; no git checkout)" in done.stdout
        assert f"RuntimeError: {commit} has moved on" in done.stdout
