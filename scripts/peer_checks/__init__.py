"""Checks of xtok's files and losses in the code of others: one module for each peer."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # small tokenizers and texts
