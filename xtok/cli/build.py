"""`xtok build`."""

from pathlib import Path

import typer

from xtok._lib.fields import TEXT
from xtok.cli import options
from xtok.cli.command import command
from xtok.cli.nemo_options import nemo_name
from xtok.config import BuildConfig
from xtok.conversation.texts import check_texts
from xtok.loss_names import BuildLoss


@command
def build(
    context: typer.Context,
    *,
    models: options.Models,
    for_loss: BuildLoss | None = options.loss_option(
        BuildLoss,
        None,
        "Use the preset for a loss (p-kl, gold or h-kl). Explicit options override the preset. "
        "Default: the recipe of X-Token. For event KL, use `xtok events`.",
    ),
    output: options.StrictOutput,
    text: list[str] = options.text_option("Text from which the map's weights are counted: "),
    field: str = options.TEXT_FIELD,
    initial_projection_path: Path | None = options.map_option(
        "Map of the same pair that smooths the counts. Default: a map counted on synthetic text.",
        needs={"text": True},
        panel=TEXT,
    ),
    config: BuildConfig,
    existing: options.ExistingMap,
    map_options: options.MapOptions,
) -> None:
    """Build a projection map from two tokenizers, for P-KL, gold or H-KL.

    With --text, the weights are counted on your text instead of synthetic text. This is rarely
    necessary.

    Example: xtok build meta-llama/Llama-3.2-1B Qwen/Qwen3-8B --for p-kl -o map.safetensors
    """
    names = models.both()
    check_texts(text, field)
    from xtok.maps.names import build_name
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, names)
    own_name = build_name(student_id, teacher_id, config, loss=for_loss, texts=text)
    path = output.path((None if for_loss else nemo_name(context, names, config)) or own_name)
    if not (existing.skip_existing and path.is_file()):  # the existing map may be kept
        output.check()
    initial, pair = models.with_initial(initial_projection_path, map_options)
    projection = existing.get_map(
        pair, path, output.output, strict=output.strict,
        config=config, texts=text, field=field, initial=initial,
    )  # fmt: skip
    options.print_map(projection, path, json=output.json, loss=for_loss)
