"""`xtok build`."""

from contextlib import nullcontext
from dataclasses import replace

import typer

import xtok
from xtok import report
from xtok.cli.cache import Caching
from xtok.cli.command import command
from xtok.cli.counting import checkpoint_of, counting_here
from xtok.cli.options import (
    DRY_RUN,
    FOR_LOSS,
    OPTIONAL_TEXTS,
    SKIP_EXISTING,
    TEXT_FIELD,
    ModelArguments,
    StrictOutput,
    Widths,
)
from xtok.cli.spellings import nemo_name
from xtok.config import BuildConfig, Loss
from xtok.counting.texts import find_texts
from xtok.report.stdout import print_path


@command
def build(
    context: typer.Context,
    *,
    for_loss: Loss | None = FOR_LOSS,
    config: BuildConfig,
    models: ModelArguments,
    output: StrictOutput,
    text: list[str] = OPTIONAL_TEXTS,
    field: str = TEXT_FIELD,
    widths: Widths,
    skip_existing: bool = SKIP_EXISTING,
    dry_run: bool = DRY_RUN,
    caching: Caching,
) -> None:
    """Build a map for a pair of models, in one go: two tokenizers in, a finished map out.

    With --text, the map is counted on it.
    """
    if text:  # as `xtok.build` has it
        config = replace(config, weights="prior", scale_trick=False)
    useless = {"--text": text, "--skip-existing": skip_existing, "--dry-run": dry_run}
    for name in (name for name, value in useless.items() if value and caching.cache):
        raise typer.BadParameter(f"{name} does not go with --cache")
    if output.output is not None or not caching.cache:
        output.check()
    names = models.both()
    find_texts(text)
    from xtok.maps.names import name_of_map
    from xtok.stages import plans
    from xtok.tokenizers import model_id

    student_id, teacher_id = map(model_id, names)
    own_name = name_of_map(student_id, teacher_id, config, loss=for_loss, texts=text)
    path = output.path((None if for_loss else nemo_name(context, models, config)) or own_name)
    student, teacher = models.pair(widths)
    if caching.cache:
        from xtok.stages.map_cache import cached_map

        cached = cached_map(student, teacher, config, caching.cache_dir)
        projection = cached.get(
            timeout=caching.cache_timeout,
            progress=report.progress_bar,
            note=lambda sentence: report.print_notes([sentence]),
        )
        is_saved = output.output is None
        output.write(projection, cached.path if is_saved else path, is_saved=is_saved)
        return
    exists = skip_existing and path.exists()
    replaced = plans.difference(path, student, teacher, config, text) if exists else None
    if dry_run:
        plan = plans.plan(student, teacher, config)
        report.print_plan(path, plan, keep=skip_existing, replaced=replaced)
        return
    if exists:
        report.print_notes([report.kept_or_replaced(path, replaced)])
        if replaced is None:
            print_path(path)
            return
    with counting_here(student, teacher, checkpoint_of(path)) if text else nullcontext() as count:
        projection = xtok.build(
            student,
            teacher,
            config,
            texts=text,
            field=field,
            count=count,
            progress=report.progress_bar,
        )
        output.write(projection, path)
