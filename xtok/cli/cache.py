"""`xtok cache`, and the options of commands that use the cache."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from xtok.cli.command import command, show
from xtok.cli.options import JSON
from xtok.config import OUTPUT, Config, option

_FOLDER = "By default $XTOK_CACHE_DIR, or xtok in the user's cache folder."


@dataclass(frozen=True, kw_only=True)
class Caching(Config):
    """Whether a map is taken from the cache, and how long to wait for whoever builds it."""

    panel = OUTPUT
    cache: bool = option(
        False,
        "Take the map from the cache; if it is not there, build it, once for all processes that "
        "ask. Without --output, print its path there.",
        flag=True,
    )
    cache_dir: Path | None = option(
        None, f"The cache. {_FOLDER}", metavar="FOLDER", goes_with=("cache",)
    )
    cache_timeout: float = option(
        600.0,
        "Seconds to wait for another process that builds the map.",
        min=0,
        goes_with=("cache",),
    )


@command
def cache(
    *,
    action: Literal["list", "clear"] = option(
        "list", "Show what the cache holds, or remove it.", argument="[list|clear]"
    ),
    cache_dir: Path | None = option(None, f"The cache. {_FOLDER}", metavar="FOLDER"),
    json: bool = JSON,
) -> None:
    """Show or remove what is kept: maps of build --cache, and embeddings of generate."""
    from xtok.inspection import cache as kept
    from xtok.report.cache import print_cache

    contents = kept.list_cache(cache_dir) if action == "list" else kept.clear_cache(cache_dir)
    show(contents, partial(print_cache, removed=action == "clear"), json=json)
