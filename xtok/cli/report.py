"""`xtok report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli.command import Given, command
from xtok.cli.options import OUTPUT, MapOptions, Models, TextField, expanded, read_path
from xtok.config import TEXT, BuildConfig, Config, EstimateConfig, Loss, option

LIST = "Many maps"


@dataclass(frozen=True, kw_only=True)
class PageOutput(Config):
    """Where a page is written, and how large it may be."""

    output: str = option(
        "report.html",
        "Where to write the page: .html.",
        metavar="FILE",
        short="-o",
        parser=expanded,
        panel=OUTPUT,
    )
    json: bool = option(
        False, "Also write the page's data as JSON, beside it.", flag=True, panel=OUTPUT
    )
    max_kb: int = option(
        2000,
        "Most kilobytes of the page: what does not fit is left out of its search, and it says so.",
        min=200,
        panel=OUTPUT,
    )

    def check(self) -> None:
        """Check that the files can be written, before anything costs time."""
        from xtok.io import check_output

        for suffix in (".html", ".json")[: 1 + self.json]:
            check_output(self._path(suffix), [suffix], "page")

    def write(self, page: bytes, data: Any) -> None:
        """Write the page, and the data if it was asked for; print the paths on stdout."""
        from xtok import report
        from xtok.io import check_output, write

        files = {".html": page}
        if self.json:
            files[".json"] = f"{report.to_json(data)}\n".encode()
        for suffix, content in files.items():
            path = self._path(suffix)
            write(check_output(path, [suffix], "page"), [content])
            print(path)  # noqa: T201

    def _path(self, suffix: str) -> Path:
        path = Path(self.output)
        return path if suffix == ".html" else path.with_suffix(suffix)


@command
def report(
    context: typer.Context,
    given: Given,
    map_paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MAP...",
            help="A map file, or two of one pair to put side by side.",
            parser=read_path,
            show_default=False,
        ),
    ] = None,
    *,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="Measure the maps on this text: plain, .jsonl or .parquet, also as .gz or .zst; a "
            "quoted glob, too. Repeatable. Needs both models.",
            metavar="FILE",
            parser=expanded,
            rich_help_panel=TEXT,
        ),
    ] = None,
    models: Models,
    field: TextField = EstimateConfig.field,
    num_worst: Annotated[
        int, typer.Option(help="List this many of each map's most costly rows.", min=0, metavar="N")
    ] = 10,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Instead of MAP: an index of the maps of a list as build-pairs takes it. Those "
            "that need a look come first.",
            metavar="FILE",
            parser=read_path,
            rich_help_panel=LIST,
        ),
    ] = None,
    maps_dir: Annotated[
        str | None,
        typer.Option(
            help="With --pairs: the folder of the maps; the current one by default.",
            metavar="FOLDER",
            parser=expanded,
            rich_help_panel=LIST,
        ),
    ] = None,
    for_loss: Annotated[
        Loss | None,
        typer.Option(
            "--for",
            help="With --pairs: the loss that the maps were built for, which is in their names.",
            rich_help_panel=LIST,
        ),
    ] = None,
    page_output: PageOutput,
    map_options: MapOptions,
) -> None:
    """Write a page to look at: one HTML file that says what a map is fit for, and lets you search.

    With the models it has sentences in both tokenizations; with --text, the map's quality.
    """
    if pairs is not None and (map_paths or text or models.sides()):
        raise typer.BadParameter("--pairs goes with no map, text or model")
    if pairs is None and len(map_paths or []) not in (1, 2):
        raise typer.BadParameter("give a map, or two, or --pairs FILE")
    if pairs is None and given & {"maps_dir", "for_loss"}:
        raise typer.BadParameter("--maps-dir and --for go with --pairs")
    if "field" in given and not text:
        raise typer.BadParameter("--field goes with --text")
    if text or models.sides():
        models.both()
    page_output.check()
    from xtok import report as reports
    from xtok.inspection.page import examine
    from xtok.inspection.pages import examine_listed
    from xtok.report.page import render, render_index

    words = _command(context)
    if pairs is not None:
        from xtok.stages.pairs import read_pairs

        config = BuildConfig.for_loss(for_loss) if for_loss else BuildConfig()
        folder = Path(maps_dir or "")
        index = examine_listed(pairs.name, read_pairs(pairs, folder, config, for_loss), folder)
        page_output.write(render_index(index, command=words), index)
        return
    from xtok.counting.texts import find_texts

    find_texts(text or [])
    paths = map_paths or []
    maps = [map_options.load(path) for path in paths]
    for projection in maps:
        reports.print_reports(projection.reports)
    maps[0], tokenizers = models.with_map(maps[0], name=paths[0])
    examined = examine(
        maps,
        texts=text or [],
        tokenizers=(tokenizers["student_model"], tokenizers["teacher_model"])
        if tokenizers
        else None,
        names=[path.name for path in paths],
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
