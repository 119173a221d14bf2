"""What a bug report needs: versions, the machine, settings."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xtok import __version__
from xtok.io import cache_folder

_PACKAGES = (
    *("jinja2", "markupsafe", "numba", "numpy", "platformdirs", "protobuf", "rich", "safetensors"),
    *("sentencepiece", "tiktoken", "torch", "tqdm", "transformers", "typer"),
    *("huggingface-hub", "tokenizers"),  # of Transformers
    *("accelerate", "datasets", "gguf", "matplotlib", "pyarrow", "ray", "scipy"),  # optional
    *("sentence-transformers", "trl", "zstandard"),
)

# Variables whose values are shown. Of others with these beginnings only the names: it may be a
# token.
_SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("TRANSFORMERS_OFFLINE", "XTOK_CACHE_DIR", "XTOK_DEBUG"),
)
_NAMED = ("HF_", "XTOK_")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What xtok runs on.

    Attributes:
        xtok: its version.
        location: the folder of the package.
        python: the version of Python.
        executable: Python's program.
        platform: the operating system.
        cores: CPU cores that this process may use.
        threads: threads that PyTorch computes with; 0 if it cannot be imported.
        memory_bytes: the machine's memory.
        devices: CUDA devices that PyTorch finds, each with its name and memory.
        cache_folder: where xtok keeps maps and embeddings.
        hub_cache: where the Hugging Face hub's files are kept.
        hub_offline: whether nothing is asked of the hub.
        packages: versions of dependencies, optional ones too; None if one is not installed.
        variables: environment variables that matter; `(set)` if the value may be secret.
        notes: what is broken.
    """

    xtok: str
    location: str
    python: str
    executable: str
    platform: str
    cores: int
    threads: int
    memory_bytes: int
    devices: tuple[str, ...]
    cache_folder: str
    hub_cache: str
    hub_offline: bool
    packages: dict[str, str | None]
    variables: dict[str, str]
    notes: tuple[str, ...]


def env() -> Environment:
    """Return what a bug report needs, without secrets; it imports PyTorch, to ask for devices."""
    from huggingface_hub import constants

    from xtok.counting.encode import available_cores

    threads, devices, notes = _torch()
    return Environment(
        xtok=__version__,
        location=str(Path(__file__).parents[1]),
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        cores=available_cores(),
        threads=threads,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        devices=devices,
        cache_folder=str(cache_folder()),
        hub_cache=constants.HF_HUB_CACHE,
        hub_offline=constants.HF_HUB_OFFLINE,
        packages=versions(_PACKAGES),
        variables=_variables(),
        notes=notes,
    )


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of packages, None if one is not installed; nothing is imported."""

    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: found(name) for name in names}


def _torch() -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Return PyTorch's threads and devices, and why it cannot be imported, if so."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return 0, (), (f"torch cannot be imported: {error}",)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(number) for number in range(count)]
    devices = [
        f"cuda:{number} {one.name}, {one.total_memory / 1e9:.1f} GB"
        for number, one in enumerate(found)
    ]
    return torch.get_num_threads(), tuple(devices), ()


def _variables() -> dict[str, str]:
    names = sorted(name for name in os.environ if name in _SHOWN or name.startswith(_NAMED))
    return {
        name: re.sub(r"//[^/]*@", "//(set)@", os.environ[name]) if name in _SHOWN else "(set)"
        for name in names
    }
