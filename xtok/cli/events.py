"""`xtok events`."""

from xtok import report
from xtok.cli.command import command
from xtok.cli.options import (
    JSON,
    ModelArguments,
    Widths,
    needs_nothing,
    output_option,
    output_path,
    report_written,
)
from xtok.config import MAIN, EventLoss, option
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
    json: bool = JSON,
    widths: Widths,
) -> None:
    """Build an event map (default), or the tables for CSD."""
    suffixes = SUFFIXES if for_loss == "csd" else SUFFIXES[:1]
    check_output(output_path(output, "events.safetensors"), suffixes)
    from xtok.stages.events import events_of_pair
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, models.both())
    kind = "spellings" if for_loss == "csd" else "events"
    path = output_path(output, names.default_name(student_id, teacher_id, kind))
    pair = models.pair(widths)
    if needs_nothing(pair, output):
        return

    result = events_of_pair(pair, for_loss, report.progress_bar)
    result.save(path)
    if path.suffix == ".pt":
        from xtok.maps.convert import nemo_overrides

        report.print_note(nemo_overrides(result, path))
    report_written(result.reports, *files_of(result, path), json=json)
