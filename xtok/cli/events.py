"""`xtok events`."""

import xtok
from xtok.cli import options
from xtok.cli.command import command
from xtok.loss_names import EventLoss
from xtok.maps import names
from xtok.maps.file import check_map_output, check_reverse


@command
def events(
    *,
    models: options.Models,
    for_loss: EventLoss = options.loss_option(
        EventLoss,
        "event-kl",
        "The loss that uses the map: event-kl (an event map) or csd (a spelling map).",
    ),
    output: str | None = options.output_option(
        "a file in the current folder, named after the pair.",
        "a .safetensors file; with --for csd also NeMo-RL's two tables, NAME.pt and "
        "NAME.reverse.pt",
    ),
    json: bool = options.JSON,
    existing: options.ExistingMap,
    widths: options.Widths,
) -> None:
    """Build an event map (default), or a spelling map (--for csd).

    An event map groups the tokens of both vocabularies for training with event KL. A spelling map
    is for CSD. The map contains the spellings of each model's tokens in tokens of the other model.

    Example: xtok events meta-llama/Llama-3.2-1B Qwen/Qwen3-8B -o events.safetensors
    """
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, models.both())
    kind = "spellings" if for_loss == "csd" else "events"
    path = options.output_path(output, names.default_name(student_id, teacher_id, kind))
    if not (existing.skip_existing and path.is_file()):  # the existing map may be kept
        map_class = xtok.SpellingMap if for_loss == "csd" else xtok.EventMap
        check_map_output(path, map_class.SUFFIXES, or_folder=True)
    if path.suffix == ".pt":
        check_reverse(path, student_id, teacher_id)
    result = existing.get_map(models.pair(widths), path, output, for_loss=for_loss)
    options.print_map(result, path, json=json)
