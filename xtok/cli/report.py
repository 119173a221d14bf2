"""`xtok report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from xtok import report as reports
from xtok.cli.command import command
from xtok.cli.options import TEXT_FIELD, MapOptions, Models, map_files, text_option
from xtok.config import OUTPUT, Config, option
from xtok.counting.texts import find_texts
from xtok.report.stdout import print_path

_TEXTS = text_option(
    [],
    "Measure the maps on this text: plain, .jsonl or .parquet, also as .gz or .zst; a quoted glob, "
    "too. Repeatable. Needs both models.",
)


@dataclass(frozen=True, kw_only=True)
class PageOutput(Config):
    """Where a page is written, and how large it may be."""

    panel = OUTPUT
    output: Path = option(Path("report.html"), "Where to write the page: .html.", short="-o")
    json: bool = option(False, "Also write the page's data as JSON, beside it.", flag=True)
    max_kb: int = option(
        2000,
        "Most kilobytes of the page: what does not fit is left out of its search, and it says so.",
        min=200,
    )

    def check(self) -> None:
        """Check that the files can be written, before anything costs time."""
        from xtok.io import check_output

        for suffix in (".html", ".json")[: 1 + self.json]:
            check_output(self._path(suffix), [suffix], "page")

    def write(self, page: bytes, data: Any) -> None:
        """Write the page, and the data if it was asked for; print the paths on stdout."""
        from xtok.io import check_output, write

        files = {".html": page}
        if self.json:
            files[".json"] = f"{reports.to_json(data)}\n".encode()
        for suffix, content in files.items():
            path = self._path(suffix)
            write(check_output(path, [suffix], "page"), [content])
            print_path(path)

    def _path(self, suffix: str) -> Path:
        return self.output if suffix == ".html" else self.output.with_suffix(suffix)


@command
def report(
    context: typer.Context,
    *,
    map_paths: list[Path] = option(
        [],
        "A map file, or two of one pair to put side by side.",
        argument="[MAP...]",
        autocompletion=map_files,
    ),
    text: list[str] = _TEXTS,
    models: Models,
    field: str = TEXT_FIELD,
    num_worst: int = option(10, "List this many of each map's most costly rows.", min=0),
    page_output: PageOutput,
    map_options: MapOptions,
) -> None:
    """Write a page to look at: one HTML file that says what a map is fit for, and lets you search.

    With the models it has sentences in both tokenizations; with --text, the map's quality.
    """
    if len(map_paths) not in (1, 2):
        raise typer.BadParameter("give a map, or two")
    if text or models.sides():
        models.both()
    page_output.check()
    from xtok.inspection.page import examine
    from xtok.report.page import render

    words = _command(context)
    find_texts(text)
    maps = [map_options.load(path) for path in map_paths]
    for projection in maps:
        reports.print_reports(projection.reports)
    maps[0], tokenizers = models.with_map(maps[0], name=map_paths[0])
    examined = examine(
        maps,
        texts=text,
        tokenizers=(tokenizers["student_model"], tokenizers["teacher_model"])
        if tokenizers
        else None,
        names=[path.name for path in map_paths],
        field=field,
        num_worst=num_worst,
        progress=reports.progress_bar,
        text_progress=reports.text_progress_bar,
    )
    page = render(examined, command=words, max_bytes=1000 * page_output.max_kb)
    page_output.write(page, examined.page)


def _command(context: typer.Context) -> list[str]:
    """Return the command as it was typed, whatever its output is called."""
    words = ["xtok", "report"]
    options: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in ("output", "json", "quiet"):
            continue
        value = context.params[name]
        values = value if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            words += map(str, values)
        elif isinstance(value, bool):
            options.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            options += [w for one in values for w in (max(parameter.opts, key=len), str(one))]
    return [*words, *options, "--output", "report.html"]
