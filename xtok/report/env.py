"""The environment, as lines to paste into a bug report."""

from __future__ import annotations

from xtok.inspection.env import Environment
from xtok.report.stdout import print_result
from xtok.vocab.display import printable


def print_env(found: Environment) -> None:
    """Print a line for each setting, package and variable."""
    hub = f"{found.hub_cache}, {'offline' if found.hub_offline else 'online'}"
    lines = {
        "xtok": f"{found.xtok}, {found.location}",
        "Python": f"{found.python}, {found.executable}",
        "platform": found.platform,
        "CPU": f"{found.cores} cores, {found.threads} threads of PyTorch",
        "memory": f"{found.memory_bytes / 1e9:.1f} GB",
        "CUDA": "; ".join(found.devices) or "none",
        "cache": found.cache_folder,
        "hub": hub,
        **{name: version or "not installed" for name, version in found.packages.items()},
        **found.variables,
    }
    if found.notes:
        lines["broken"] = "; ".join(found.notes)
    width = max(map(len, lines))
    for name, value in lines.items():
        print_result(f"{name:{width}}  {printable(value)}")
