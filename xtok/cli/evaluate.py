"""`xtok evaluate`."""

import xtok
from xtok.cli import console, options
from xtok.cli.command import command, full_path, show
from xtok.cli.tables.quality import print_evaluation
from xtok.conversation.texts import check_texts
from xtok.loss_names import BuildLoss
from xtok.maps.map_arguments import name_notes


@command
def evaluate(
    *,
    arguments: list[str] = options.map_option(
        "One or more map files of the same pair, then the two models: " + options.MODEL,
        ...,
        argument="MAP... STUDENT TEACHER",
        parser=full_path,
    ),
    text: list[str] = options.text_option("Text or conversations to measure on: ", required=True),
    field: str = options.TEXT_FIELD,
    for_loss: BuildLoss | None = options.loss_option(
        BuildLoss,
        None,
        "Judge and rank the maps for this loss. Default: judge the maps for P-KL.",
    ),
    json: bool = options.json_option(
        "student, teacher, measures, event_measures, verdicts, classes, worst_rows, num_bytes, "
        "lost_bytes, differing, notes, by_chunk, ranking"
    ),
    loading: options.Loading,
    map_options: options.MapOptions,
) -> None:
    """Measure maps on text, and print a verdict for each: good, usable or bad.

    Use text that was not used to build the maps. For projection maps, the command prints
    cross-entropy and coverage. For event maps, the command prints the leak: the share of shared
    token boundaries at which the student's and the teacher's token belong to different events.

    Example: xtok evaluate map.safetensors STUDENT TEACHER --text 'corpus/*.txt'
    """
    map_paths, models = options.maps_and_models(arguments, loading)
    models.both()
    check_texts(text, field)
    maps = [map_options.load_any(path) for path in map_paths]
    pair = models.pair()
    for m in maps:
        console.print_reports(m.reports)
        console.print_notes(name_notes(pair, m))
    evaluation = xtok.evaluate(
        pair, maps, text, names=[str(path) for path in map_paths], field=field, for_loss=for_loss,
        progress=console.progress_bar,
    )  # fmt: skip
    show(evaluation, print_evaluation, json=json)
