"""The history of a map: a step for each stage that made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xtok import __version__


def history_step(stage: str, options: Mapping[str, Any], **details: Any) -> dict[str, Any]:
    """Return what the history says of a stage: its name, its options, this version, and more."""
    return {"stage": stage, "options": options, **details, "xtok_version": __version__}
