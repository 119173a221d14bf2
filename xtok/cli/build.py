"""`xtok build`."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from xtok.cli.cache import Caching
from xtok.cli.command import Given, as_options, command
from xtok.cli.counting import checkpoint_of, count_here, keeping
from xtok.cli.options import (
    OUTPUT,
    ModelArguments,
    OptionalTexts,
    StrictOutput,
    TextField,
    Widths,
)
from xtok.cli.plans import is_done
from xtok.cli.spellings import nemo_name
from xtok.config import BuildConfig, EstimateConfig, Loss, MultitokenConfig

ForLoss = Annotated[
    Loss | None,
    typer.Option(
        "--for",
        help="Preset for a loss: p-kl, gold or h-kl; options that you give override it. Without "
        "it, the recipe of X-Token.",
        metavar="LOSS",
        rich_help_panel="Making the map",
    ),
]
SkipExisting = Annotated[
    bool,
    typer.Option(
        "--skip-existing",
        help="Keep an output that is already the same map: same tokenizers, options and stages. "
        "Any other is replaced, and a note says why.",
        rich_help_panel=OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Load the tokenizers, say what would be written, and write nothing.",
        rich_help_panel=OUTPUT,
    ),
]


@command
def build(
    context: typer.Context,
    given: Given,
    *,
    for_loss: ForLoss = None,
    config: BuildConfig,
    models: ModelArguments,
    output: StrictOutput,
    text: OptionalTexts = None,
    field: TextField = EstimateConfig.field,
    widths: Widths,
    skip_existing: SkipExisting = False,
    dry_run: DryRun = False,
    caching: Caching,
) -> None:
    """Build a map for a pair of models, in one go: two tokenizers in, a finished map out.

    With --text, the map is counted on it.
    """
    texts = text or []
    if texts:  # as `xtok.build` has it
        config = replace(config, weights="prior", scale_trick=False)
    check_companions(given, config, has_text=bool(texts))
    caching.check(given, others=("text", "skip_existing", "dry_run"))
    if output.output is not None or not caching.cache:
        output.check()
    names = models.both()
    from xtok import report, tokenizers
    from xtok.counting.texts import find_texts
    from xtok.stages import build as stage
    from xtok.stages import map_cache, pairs

    find_texts(texts)
    report.print_notes(remarks(given, config, for_loss, has_text=bool(texts)))
    ids = [tokenizers.model_id(name) for name in names]
    own_name = pairs.name_of_map(ids[0], ids[1], config, loss=for_loss, texts=texts)
    path = output.path((None if for_loss else nemo_name(context, models, config)) or own_name)
    student, teacher = models.pair(widths)
    if caching.cache:
        cached = map_cache.cached_map(student, teacher, config, caching.cache_dir)
        projection = cached.get(
            timeout=caching.cache_timeout,
            progress=report.progress_bar,
            note=lambda sentence: report.print_notes([sentence]),
        )
        is_saved = output.output is None
        output.write(projection, cached.path if is_saved else path, is_saved=is_saved)
        return
    if is_done(student, teacher, path, config, texts, keep=skip_existing, dry_run=dry_run):
        return
    checkpoint = checkpoint_of(path)
    with keeping(checkpoint if texts else None):
        projection = stage.build(
            student,
            teacher,
            config,
            texts=texts,
            field=field,
            count=partial(count_here, student=student, teacher=teacher, checkpoint=checkpoint),
            progress=report.progress_bar,
        )
        output.write(projection, path)


_OF_A_LOSS = ("weights", "target", "exact_match", "scale_trick", "top_k")


def check_companions(given: Given, config: MultitokenConfig, *, has_text: bool = False) -> None:
    """Refuse options that need another one, which is not given."""
    is_fuzzy = config.special_tokens == "fuzzy"
    for name, needed, holds in (
        ("fuzzy_threshold", "--special-tokens fuzzy", is_fuzzy),
        ("fuzzy_top_k", "--special-tokens fuzzy", is_fuzzy),
        ("field", "--text", has_text),
        ("target", "--weights prior", has_text or config.weights == "prior"),
    ):
        if name in given and not holds:
            raise typer.BadParameter(f"{flag(name)} goes with {needed}")


def remarks(
    given: Given, config: BuildConfig, for_loss: Loss | None, *, has_text: bool = False
) -> list[str]:
    """Return what a loss chose, and which options that were given have no effect."""
    notes = []
    if for_loss is not None:
        chosen = [name for name in _OF_A_LOSS if name not in given]
        notes.append(f"--for {for_loss} chose {_as_typed(config, chosen)}")
    for applies, why, names in (
        (has_text, "--text", ("weights", "scale_trick")),
        (config.weights == "prior", "--weights prior", ("max_pieces", "reverse_pass")),
    ):
        useless = [name for name in names if applies and name in given]
        notes += [f"{flag(name)} has no effect with {why}" for name in useless]
    return notes


def _as_typed(config: BuildConfig, names: Iterable[str]) -> str:
    """Return options as they are typed."""
    words = []
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            words.append(f"{flag(name)} {value}")
    return " ".join(words) or "nothing that is not given"


def flag(name: str) -> str:
    """Return a field's option."""
    return as_options(f"{name} ", [name]).strip()
