"""The cases of benchmark.py, a module for each area."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # small tokenizers and texts
