"""The command line: each command parses, calls one function of the library, and reports."""

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from xtok.cli.command import run
from xtok.cli.spellings import Command

HELP = {
    "Everyday": {
        "build": "Build a finished map from two tokenizers.",
        "inspect": "Show what a map holds, why its rows are as they are, or where two maps differ.",
        "verify": "Check a map file, and its models if given; exit with 3 if a check fails.",
        "convert": "Convert a map between .safetensors and NeMo-RL's .pt.",
        "doctor": "Check tokenizers for what spoils training; exit with 3 if a check fails.",
    },
    "Measure": {
        "evaluate": "Measure maps on text: cross-entropy, coverage, how near they are to the best.",
        "align": "Show two tokenizations of a text, and the chunks that they share.",
        "vocab": "Show a model's tokens: exact bytes, types and roles; or write them all.",
        "report": "Write a page, one HTML file, that says what a map is fit for.",
    },
    "Stages": {
        "multitoken": "Map each student token to the teacher tokens that spell it, and back.",
        "reapply-exact": "Give tokens that both sides have a single entry of weight 1.",
        "sort-cut": "Keep the heaviest entries of each row, and normalize it; a slot stays last.",
        "generate": "Map each student token to the teacher tokens that are most similar.",
    },
    "Train": {
        "events": "Build an event map (default), or the tables for CSD.",
        "render": "Write conversations as ids, with masks of what the assistant wrote.",
        "project": "Turn a teacher's stored top-k log-probabilities into a student's.",
        "serve": "Answer trainers as a served teacher would if it had the student's tokenizer.",
    },
}
"""The commands in the order of the help: its parts, and a command's first sentence.

The function of a command has its name, and so has the module that it is in.
"""

COMMANDS = {name: part for part, names in HELP.items() for name in names}
"""The part of the help that each command stands in."""


def make_app(names: Iterable[str] = COMMANDS, *, only_described: bool = False) -> typer.Typer:
    """Return the command line with these commands, or with what `xtok --help` says of them."""
    app = typer.Typer(
        name="xtok",
        help="Build cross-tokenizer projection maps: for each token of a student model, the tokens "
        "of a teacher model that it corresponds to, byte-exact.",
        epilog="xtok help COMMAND shows the options of a command.",
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
        callback=_root,
    )
    for name in names:
        function = _described(name) if only_described else _loaded(name)
        app.command(name, cls=Command, rich_help_panel=COMMANDS[name])(function)
    return app


def _loaded(name: str) -> Callable[..., None]:
    module = import_module(f"xtok.cli.{name.replace('-', '_')}")
    function: Callable[..., None] = getattr(module, name.replace("-", "_"))
    return function


def _described(name: str) -> Callable[..., None]:
    """Return a function that has the first sentence of a command's help, and imports nothing."""

    def function() -> None:
        pass

    function.__doc__ = HELP[COMMANDS[name]][name]
    return function


class _Group(TyperGroup):
    """The commands; `xtok help COMMAND` is `xtok COMMAND --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*args[1:2], "--help"] if args[:1] == ["help"] else args)


def program() -> None:
    """Run the command line."""
    if "_XTOK_COMPLETE" in os.environ:  # of a help that Typer wraps, fish would offer each line
        os.environ["COLUMNS"] = "10000"
        return run(make_app())
    first, second = (*sys.argv[1:3], "", "")[:2]
    name = second if first == "help" else first
    # To import all commands takes three times as long as to show the help.
    return run(make_app([name]) if name in COMMANDS else make_app(only_described=True))


def _version(show: bool) -> None:
    if show:
        from xtok._lib.version import version_lines

        for line in version_lines():
            print(line)  # noqa: T201
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show what a bug report needs."
        ),
    ] = False,
) -> None:
    pass
