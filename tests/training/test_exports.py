"""Users' loops import from `xtok`, `xtok.losses` and `xtok.training` only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

PUBLIC = {"xtok", "xtok.training", "xtok.conversation"}
EXAMPLES = ("distill.py", "hf_trainer.py", "trl_gold.py")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def imported(source: str) -> set[str]:
    """Return the modules of xtok that a source imports from."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if (node.module or "").split(".")[0] == "xtok"}  # type: ignore[misc]


def test_guides_import_public_names() -> None:
    blocks = [
        (path.name, block)
        for path in DOCUMENTS
        for block in re.findall(r"^```py(?:thon)?\n(.*?)^```$", path.read_text(), re.M | re.S)
    ]
    loops = [(name, imported(block.replace(", …)", ")"))) for name, block in blocks]
    assert [(name, modules) for name, modules in loops if modules - PUBLIC] == []
    assert ("training.md", {"xtok.training"}) in loops


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_import_public_names(name: str) -> None:
    source = (ROOT / "scripts" / "examples" / name).read_text(encoding="utf-8")
    assert imported(source) == {"xtok", "xtok.training"}


def test_the_package_imports_a_trainer_at_its_first_use() -> None:
    program = """import sys
sys.modules["trl"] = None
import xtok.training
assert not {"torch", "transformers"} & {*sys.modules}
assert xtok.training.XTokTrainer and xtok.training.audit.audit
try:
    xtok.training.XTokGOLDTrainer
except xtok.XtokError as error:
    print(error.message)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "TRL is not installed\n"
