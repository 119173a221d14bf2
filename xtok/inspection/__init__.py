"""Looking at maps and tokenizers: what a map holds, whether it is right, how good it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One thing that was checked, and what was found.

    Only `failed` makes a command exit with 3. `skipped` are checks that a map file has nothing for.
    """

    name: str
    level: Level
    message: str
