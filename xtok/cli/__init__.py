"""The command line. Each command parses arguments, calls the library and prints the result."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from xtok.cli import console, help
from xtok.cli.command import run
from xtok.cli.help import COMMANDS as COMMANDS
from xtok.cli.nemo_options import Command
from xtok.errors import XtokError


def make_app(names: Iterable[str] = COMMANDS, *, only_described: bool = False) -> typer.Typer:
    """Return the Typer app with the commands `names`.

    With `only_described`, the app can print the overview, but cannot run commands.
    """
    app = typer.Typer(
        name="xtok",
        help="Distil between models with different tokenizers: build byte-exact event maps and "
        "projection maps for losses, and convert a teacher's predictions to a student's tokens.",
        epilog="Run xtok help COMMAND for a command's options, and xtok help models for the kinds "
        "of models.",
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
        callback=_root,
    )
    for name in names:
        stem = name.replace("-", "_")
        function = _nothing if only_described else getattr(import_module(f"xtok.cli.{stem}"), stem)
        app.command(name, cls=Command, help=help.describe_command(name)[0])(function)
    return app


def _nothing() -> None:
    """Placeholder for a command in the overview."""


class _Group(TyperGroup):
    """The group of all commands; `xtok help COMMAND` prints `xtok COMMAND --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            if args[1:] == ["models"]:
                help.print_models()
                ctx.exit()
            args = [*args[1:2], help.ALL if help.ALL in args else "--help"]
        return super().parse_args(ctx, ["--help" if args == [help.ALL] else one for one in args])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        help.print_commands(self, ctx)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _usage_errors():  # an error in the options of the command `xtok`
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _usage_errors(ctx):
            return super().invoke(ctx)


@contextmanager
def _usage_errors(group: Any = None) -> Iterator[None]:
    """Print Typer's usage errors in two lines, like all errors, and exit with code 2."""
    try:
        yield
    except TyperException as error:
        message = " ".join(error.format_message().split()).removeprefix("Invalid value: ")
        if not message:  # `xtok` without arguments has already printed its help
            raise
        ctx: Any = getattr(error, "ctx", None)
        command = ctx.command_path if ctx else f"xtok {getattr(group, 'invoked_subcommand', '')}"
        hint = f"run {command.strip()} --help"
        if re.match(r"No such option: (-[^-]|-- )", message):  # not similar to any option
            hint = f"put -- before a text or token that begins with a dash; or {hint}"
        extra = re.match(r"Got unexpected extra argument\(s\) \((\S+?)[ )]", message)
        if extra and Path(extra[1]).is_file():  # the shell expanded an unquoted --text *.txt
            hint = f"put a glob in quotes, such as --text '*{Path(extra[1]).suffix}'; or {hint}"
        console.print_error(XtokError(message, hint=hint))
        raise typer.Exit(error.exit_code) from error


def program() -> None:
    """Run the command line."""
    if "_XTOK_COMPLETE" in os.environ:  # fish would offer each line of a wrapped help text
        os.environ["COLUMNS"] = "10000"
        return run(make_app())
    first, second = (*sys.argv[1:3], "", "")[:2]
    name = second if first == "help" else first
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
            "--version",
            callback=_version,
            is_eager=True,
            help="Show the versions of xtok and its dependencies.",
        ),
    ] = False,
) -> None:
    pass
