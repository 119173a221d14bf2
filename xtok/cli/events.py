"""`xtok events`."""

from xtok import report
from xtok.cli.command import command
from xtok.cli.options import (
    JSON,
    TEXT_FIELD,
    ModelArguments,
    Widths,
    output_option,
    output_path,
    report_written,
    text_option,
)
from xtok.config import EventsConfig
from xtok.counting.texts import check_texts
from xtok.maps import names
from xtok.maps.file import check_output


@command
def events(
    *,
    models: ModelArguments,
    output: str | None = output_option(
        "the current folder, under a name that tells the pair.", "a .safetensors file"
    ),
    text: list[str] = text_option("Also merge events that leak on this text: "),
    field: str = TEXT_FIELD,
    config: EventsConfig,
    json: bool = JSON,
    widths: Widths,
) -> None:
    """Cut both vocabularies into events, which the models' predictions can be compared on.

    Without --text, by the tokens' bytes alone; with it, until at most --max-leak is left.
    """
    check_output(output_path(output, "events.safetensors"), (".safetensors",))
    from xtok.stages.events import events_of_pair
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, models.both())
    check_texts(text, field)
    name = names.default_name(student_id, teacher_id, "events", names.text_word(text))
    path = output_path(output, name)
    pair = models.pair(widths)

    result = events_of_pair(
        pair, text, config, field=field, progress=report.progress_bar,
        text_progress=report.text_progress_bar,
    )  # fmt: skip
    result.save(path)
    report_written(result.reports, path, json=json)
