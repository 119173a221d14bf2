"""The command line: each command parses, calls one function of the library, and reports."""

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

from xtok import __version__
from xtok.cli._run import leave, run
from xtok.cli._spellings import Command

COMMANDS = {
    "build": "_maps",
    "multitoken": "_maps",
    "reapply-exact": "_maps",
    "sort-cut": "_maps",
    "estimate": "_texts",
    "evaluate": "_texts",
    "compare": "_texts",
    "generate": "_embeddings",
    "merge": "_embeddings",
    "inspect": "_views",
    "explain": "_checks",
    "verify": "_checks",
    "convert": "_views",
    "export": "_exports",
    "align": "_views",
    "doctor": "_tokenizers",
    "overlap": "_tokenizers",
}
"""Each command, in the order of the help, and the module that has the function of its name."""


class _Command(Command):
    """A command whose usage errors are in xtok's words, not in those of Typer's validator."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            message, _, _ = error.message.removeprefix("Value error, ").partition(", unable to")
            error.message = message.replace("Input should be", "must be", 1)
            raise


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
        module = import_module(f"xtok.cli.{COMMANDS[name]}")
        app.command(cls=_Command)(getattr(module, name.replace("-", "_")))
    return app


def main() -> None:
    """Run the command line."""
    # A command's own options take Typer a millisecond, those of all commands together thirty.
    run(make_app([name for name in sys.argv[1:2] if name in COMMANDS] or COMMANDS))


def program() -> None:
    """Run the command line, and end the process."""
    try:
        main()
    except SystemExit as done:
        leave(done.code)


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
