"""`xtok report`."""

from pathlib import Path

import typer

from xtok._lib.fields import OUTPUT, option
from xtok.cli import console, options
from xtok.cli.command import command, full_path
from xtok.cli.stdout import print_path
from xtok.conversation.texts import check_texts
from xtok.maps.map_arguments import name_notes


@command
def report(
    *,
    arguments: list[str] = options.map_option(
        "A map file, or two map files of the same pair; then the two models: " + options.MODEL,
        ...,
        argument="MAP... [STUDENT TEACHER]",
        parser=full_path,
    ),
    text: list[str] = options.text_option("Text for measuring the maps (requires both models): "),
    models: options.ModelOptions,
    field: str = options.TEXT_FIELD,
    output: Path = option(Path("report.html"), "Output: an .html file.", short="-o", panel=OUTPUT),
    json: bool = option(
        False, "Also write the page's data as JSON next to the page.", flag=True, panel=OUTPUT
    ),
    map_options: options.MapOptions,
) -> None:
    """Write an HTML page about a map.

    The page lists suitable losses, rows and token classes, and has a search for tokens. If the
    models are given, the page also shows sentences in both tokenizations. With --text, the page
    also shows the map's quality and a verdict.

    Example: xtok report map.safetensors -o report.html
    """
    map_paths, pair_models = options.maps_and_models(arguments, models)
    if len(map_paths) > 2:
        raise typer.BadParameter("name one map, or two maps of one pair")
    if text or pair_models.names():
        pair_models.both()
    from xtok.inspection.page import page

    page.check_page(output, json)
    check_texts(text, field)
    maps = [map_options.load(path) for path in map_paths]
    pair = pair_models.pair() if pair_models.names() else None
    for projection in maps:
        console.print_reports(projection.reports)
        console.print_notes(name_notes(pair, projection) if pair else ())
    page.report(
        maps, output, data=json, texts=text, pair=pair, names=[path.name for path in map_paths],
        field=field, progress=console.progress_bar,
    )  # fmt: skip
    print_path(output)
    if json:
        print_path(output.with_suffix(".json"))
