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
    for name in _PACKAGES:
        yield f"{name} {installed_version(name) or 'is not installed'}"


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
