"""The commands that look at tokenizers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xtok.cli import _options as opt
from xtok.cli._load import load_tokenizer
from xtok.cli._run import command

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


def doctor(
    models: opt.Models,
    *,
    chat_template: opt.ChatTemplate = None,
    json: opt.Json = False,
    vocab_size: opt.VocabSize = None,
    revision: opt.Revision = None,
    pattern: opt.Pattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check tokenizers for what makes training go wrong; exit with 3 if a check fails.

    Of exactly two, the first is taken for the student of a map, the second for its teacher.
    """
    with command(quiet):
        from xtok import report
        from xtok.inspection import doctor as diagnosis

        found = diagnosis.doctor(
            _load_all(models, revision, vocab_size, pattern, offline, trust_remote_code),
            template=chat_template,
        )
        if json:
            print(report.to_json(found))  # noqa: T201
        else:
            from xtok.report.tokenizers import print_diagnosis

            print_diagnosis(found)
    if found.failed:
        raise typer.Exit(3)


def overlap(
    models: opt.Models,
    *,
    json: opt.Json = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV, one line per ordered pair.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the matrix to a .png, .svg or .pdf file.",
            metavar="FILE",
            parser=opt.output_path,
        ),
    ] = None,
    revision: opt.Revision = None,
    pattern: opt.Pattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show what share of each tokenizer's tokens the others have, byte by byte."""
    if json and csv:
        raise typer.BadParameter("give --json or --csv, not both")
    with command(quiet):
        from xtok import report
        from xtok.inspection import overlap as sharing

        if plot is not None:
            sharing.check_plot(plot)
        found = sharing.overlap(
            _load_all(models, revision, None, pattern, offline, trust_remote_code)
        )
        if plot is not None:
            sharing.plot_overlap(found, plot)
            report.print_notes([f"the plot is {plot}"])
        if json:
            print(report.to_json(found))  # noqa: T201
        elif csv:
            print(sharing.overlap_csv(found), end="")  # noqa: T201
        else:
            from xtok.report.tokenizers import print_overlap

            print_overlap(found)


def _load_all(
    models: list[str],
    revision: str | None,
    vocab_size: int | None,
    pattern: str | None,
    offline: bool,
    trust_remote_code: bool,
) -> "list[Tokenizer]":
    return [
        load_tokenizer(
            model,
            revision=revision,
            vocab_size=vocab_size,
            pattern=pattern,
            offline=offline,
            trust_remote_code=trust_remote_code,
        )
        for model in models
    ]
