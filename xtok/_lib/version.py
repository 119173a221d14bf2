"""Versions for bug reports (`xtok --version`). The packages are not imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xtok import __version__
from xtok._lib.threads import available_cores

_PACKAGES = (
    *("filelock", "huggingface-hub", "numba", "numpy", "protobuf", "safetensors", "sentencepiece"),
    *("tiktoken", "tokenizers", "torch", "transformers", "typer"),
    *("pyarrow", "ray", "trl"),  # optional
)


def version_lines() -> Iterator[str]:
    """Yield one line for each of xtok, Python, the machine and the dependencies."""
    yield f"xtok {__version__} ({Path(__file__).parents[1]})"
    yield f"Python {platform.python_version()} ({sys.executable})"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = available_cores()
    yield f"{platform.platform()}, {cores} core{'s' * (cores != 1)}, {memory:.1f} GB"
    yield from (f"{name} {_installed(name)}" for name in _PACKAGES)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"
