"""`xtok cache`, and the options of commands that use the cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from xtok.cli.command import Given, command, show
from xtok.cli.options import OUTPUT, Json, read_path
from xtok.config import Config, option

_FOLDER = "By default $XTOK_CACHE_DIR, or xtok in the user's cache folder."


@dataclass(frozen=True, kw_only=True)
class Caching(Config):
    """Whether a map is taken from the cache, and how long to wait for whoever builds it."""

    cache: bool = option(
        False,
        "Take the map from the cache; if it is not there, build it, once for all processes that "
        "ask. Without --output, print its path there.",
        flag=True,
        panel=OUTPUT,
    )
    cache_dir: Path | None = option(
        None, f"The cache. {_FOLDER}", metavar="FOLDER", parser=read_path, panel=OUTPUT
    )
    cache_timeout: float = option(
        600.0, "Seconds to wait for another process that builds the map.", min=0, panel=OUTPUT
    )

    def check(self, given: Given, *, others: tuple[str, ...]) -> None:
        """Refuse options that do not go together; `others` are those that --cache replaces."""
        for name in ("cache_dir", "cache_timeout"):
            if name in given and not self.cache:
                raise typer.BadParameter(f"--{name.replace('_', '-')} goes with --cache")
        for name in others:
            if name in given and self.cache:
                raise typer.BadParameter(f"--{name.replace('_', '-')} does not go with --cache")


@command
def cache(
    action: Annotated[
        Literal["list", "clear"],
        typer.Argument(metavar="list|clear", help="Show what the cache holds, or remove it."),
    ] = "list",
    *,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help=f"The cache. {_FOLDER}", metavar="FOLDER", parser=read_path),
    ] = None,
    json: Json = False,
) -> None:
    """Show or remove what is kept: maps of build --cache, and embeddings of generate."""
    from xtok.inspection import cache as kept
    from xtok.report.cache import print_cache

    contents = kept.list_cache(cache_dir) if action == "list" else kept.clear_cache(cache_dir)
    show(contents, lambda result: print_cache(result, removed=action == "clear"), json=json)
