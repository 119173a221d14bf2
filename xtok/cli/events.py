"""`xtok events`."""

from contextlib import nullcontext

import xtok
from xtok import report
from xtok.cli.command import command
from xtok.cli.counting import checkpoint_of, counting_here
from xtok.cli.options import EVENT_TEXTS, TEXT_FIELD, EventsOutput, ModelArguments, Widths
from xtok.config import EventsConfig
from xtok.counting.texts import find_texts
from xtok.maps import names
from xtok.report.stdout import print_path


@command
def events(
    *,
    models: ModelArguments,
    output: EventsOutput,
    text: list[str] = EVENT_TEXTS,
    field: str = TEXT_FIELD,
    config: EventsConfig,
    widths: Widths,
) -> None:
    """Cut both vocabularies into events, which the models' predictions can be compared on.

    Without --text, by the tokens' bytes alone; with it, until at most --max-leak is left.
    """
    output.check()
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, models.both())
    find_texts(text)
    path = output.path(names.default_name(student_id, teacher_id, "events", names.text_word(text)))
    student, teacher = models.pair(widths)
    with counting_here(student, teacher, checkpoint_of(path)) if text else nullcontext() as count:
        result = xtok.events(
            student, teacher, text, config, field=field, count=count, progress=report.progress_bar
        )
        result.save(path)
    report.print_reports(result.reports)
    print_path(path)
