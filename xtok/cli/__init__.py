"""The command line: each command parses, calls one function of the library, and reports."""

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from xtok import __version__
from xtok.cli.command import run
from xtok.cli.spellings import Command

_PARTS = {
    "Everyday": "build build-pairs inspect explain verify convert doctor cache",
    "Measure": "evaluate compare align overlap report",
    "Stages": "multitoken reapply-exact sort-cut generate estimate merge",
    "Train": "events export render",
}
COMMANDS = {name: part for part, names in _PARTS.items() for name in names.split()}
"""Each command, in the order of the help, and the part of the help that it stands in.

The function of a command has its name, and so has the module that it is in.
"""


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        name="xtok",
        help="Build cross-tokenizer projection maps: for each token of a student model, the tokens "
        "of a teacher model that it corresponds to, byte-exact.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
        callback=_root,
    )
    for name in names:
        function = name.replace("-", "_")
        module = import_module(f"xtok.cli.{function}")
        app.command(name, cls=Command, rich_help_panel=COMMANDS[name])(getattr(module, function))
    return app


def program() -> None:
    """Run the command line."""
    # A command's own options take Typer a millisecond, those of all commands together thirty.
    run(make_app([name for name in sys.argv[1:2] if name in COMMANDS] or COMMANDS))


def _version(show: bool) -> None:
    if show:
        print(f"xtok {__version__}")  # noqa: T201
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
