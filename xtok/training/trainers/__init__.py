"""xtok inside other libraries' trainers: one module per library, imported when it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["nemo_rl", "transformers", "trl"]


def __getattr__(name: str) -> ModuleType:
    """Import a library's module on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
