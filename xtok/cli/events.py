"""`xtok events`."""

import typer

from xtok import report
from xtok.cli.command import command
from xtok.cli.options import (
    JSON,
    TEXT_FIELD,
    ModelArguments,
    Widths,
    note_one_vocabulary,
    output_option,
    output_path,
    report_written,
    text_option,
)
from xtok.config import MAIN, EventLoss, EventsConfig, option
from xtok.counting.texts import check_texts
from xtok.maps import names
from xtok.maps.file import SUFFIXES, check_output, files_of


@command
def events(
    *,
    models: ModelArguments,
    for_loss: EventLoss = option(
        "event-kl",
        "The loss: event-kl, or csd, which takes each side's tokens spelled in the other's.",
        name="for",
        metavar="LOSS",
        panel=MAIN,
    ),
    output: str | None = output_option(
        "the current folder, under a name that tells the pair.",
        "a .safetensors file; with --for csd also NeMo-RL's two tables, NAME.pt and "
        "NAME.reverse.pt",
    ),
    text: list[str] = text_option("Also merge events that leak on this text: "),
    field: str = TEXT_FIELD,
    config: EventsConfig,
    json: bool = JSON,
    widths: Widths,
) -> None:
    """Make what a loss over events takes; by default, an event map.

    Without --text, by the tokens' bytes alone; with it, until at most --max-leak is left.
    """
    suffixes = SUFFIXES if for_loss == "csd" else SUFFIXES[:1]
    for_csd = for_loss == "csd"
    check_output(output_path(output, "events.safetensors"), suffixes)
    from xtok.stages.events import events_of_pair
    from xtok.stages.spellings import spellings_of_pair
    from xtok.tokenizers import model_id

    if for_csd and text:
        raise typer.BadParameter("--text goes with --for event-kl")
    student_id, teacher_id = map(model_id, models.both())
    check_texts(text, field)
    kind = "spellings" if for_csd else "events"
    name = names.default_name(student_id, teacher_id, kind, names.text_word(text))
    path = output_path(output, name)
    pair = models.pair(widths)
    note_one_vocabulary(pair)
    result = (
        spellings_of_pair(pair, report.progress_bar)
        if for_csd
        else events_of_pair(
            pair, text, config, field=field, progress=report.progress_bar,
            text_progress=report.text_progress_bar,
        )
    )  # fmt: skip
    result.save(path)
    if path.suffix == ".pt":
        from xtok.maps.convert import nemo_overrides

        report.print_note(nemo_overrides(result, path))
    report_written(result.reports, *files_of(result, path), json=json)
