"""The command line: each command parses, calls one function of the library, and reports."""

from typing import Annotated

import typer

from xtok._version import __version__
from xtok.cli import _checks, _embeddings, _exports, _maps, _texts, _tokenizers, _views
from xtok.cli._run import leave, run
from xtok.cli._spellings import Command

app = typer.Typer(
    name="xtok",
    help="Build cross-tokenizer projection maps: for each token of a student model, the tokens of "
    "a teacher model that it corresponds to, right byte for byte.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line."""
    run(app)


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


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


for _command in (
    _maps.build,
    _maps.multitoken,
    _maps.reapply_exact,
    _maps.sort_cut,
    _texts.estimate,
    _texts.evaluate,
    _texts.compare,
    _embeddings.generate,
    _embeddings.merge,
    _views.inspect,
    _checks.explain,
    _checks.verify,
    _views.convert,
    _exports.export,
    _views.align,
    _tokenizers.doctor,
    _tokenizers.overlap,
):
    app.command(cls=Command)(_command)
