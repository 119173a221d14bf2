"""`xtok report`."""

from pathlib import Path

import typer

from xtok._lib.io import check_output, write
from xtok._lib.parsing import parse_json
from xtok.cli import console
from xtok.cli.command import command, expanded
from xtok.cli.options import (
    MODEL,
    TEXT_FIELD,
    MapOptions,
    ModelOptions,
    map_option,
    maps_and_models,
    text_option,
)
from xtok.cli.stdout import print_path
from xtok.config import OUTPUT, option
from xtok.conversation.texts import check_texts
from xtok.errors import OutputError


@command
def report(
    *,
    arguments: list[str] = map_option(
        "A map file, or two of one pair to compare; then the two models: " + MODEL,
        ...,
        argument="MAP... [STUDENT TEACHER]",
        parser=expanded,
    ),
    text: list[str] = text_option("With both models: text to measure the maps on: "),
    models: ModelOptions,
    field: str = TEXT_FIELD,
    output: Path = option(Path("report.html"), "Output: an .html file.", short="-o", panel=OUTPUT),
    json: bool = option(
        False, "Also write the page's data as JSON, next to it.", flag=True, panel=OUTPUT
    ),
    map_options: MapOptions,
) -> None:
    """Write an HTML page about a map: suitable losses, rows, classes of tokens, and a search.

    With the models, the page also shows sentences in both tokenizations; with --text, the map's
    quality and a verdict.

    Example: xtok report map.safetensors -o report.html
    """
    map_paths, pair_models = maps_and_models(arguments, models)
    if len(map_paths) > 2:
        raise typer.BadParameter("give one map, or two of one pair")
    names = pair_models.both() if text or pair_models.names() else ()
    files = {output: check_output(output, [".html"], "page")}
    if json:
        data = output.with_suffix(".json")
        files[data] = _data_path(check_output(data, [".json"], "page"))
    from xtok.cli.page import render
    from xtok.inspection.report import examine

    check_texts(text, field)
    maps = [map_options.load(path) for path in map_paths]
    for projection in maps:
        console.print_reports(projection.reports)
    maps[0], pair = pair_models.with_map(maps[0], name=map_paths[0])
    examined = examine(
        maps,
        texts=text,
        pair=pair,
        models=names,
        names=[path.name for path in map_paths],
        field=field,
        progress=console.progress_bar,
    )
    contents = render(examined), f"{console.to_json(examined.report)}\n".encode()
    for (name, path), content in zip(files.items(), contents, strict=False):
        write(path, [content])
        print_path(name)


def _data_path(path: Path) -> Path:
    try:
        there = parse_json(path.read_bytes()) if path.exists() else {"pair": {}, "maps": []}
    except ValueError:
        there = None
    if not (isinstance(there, dict) and {"pair", "maps"} <= there.keys()):
        raise OutputError(
            f"{path} exists and does not contain the data of a page, so it is not replaced",
            hint="move the file, or choose another name for the page",
        )
    return path
