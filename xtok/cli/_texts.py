"""The commands that read text: maps counted on it, and maps measured on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from xtok.cli import _options as opt
from xtok.cli._load import load, load_map, load_side
from xtok.cli._run import check_output, command, config, deferred_interrupt, is_given, named, write
from xtok.config import EstimateConfig, Loss
from xtok.errors import XtokError

if TYPE_CHECKING:
    from xtok.counting.counts import CountedText, CountingPlan
    from xtok.tokenizers import Tokenizer

_CLUSTER = "Cluster"

Engine = Literal["local", "ray"]


def _is_number(bound: float | None) -> float | None:
    """Refuse a gate that would be open whatever is measured."""
    if bound is not None and isnan(bound):
        raise typer.BadParameter("nan is no bound")
    return bound


def estimate(
    context: typer.Context,
    *,
    text: opt.Texts,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    output: opt.Output = None,
    initial_projection_path: Annotated[
        Path | None,
        typer.Option(
            help="Smooth towards this map of the pair; towards one of the vocabularies alone "
            "(--weights prior) if none is given.",
            metavar="MAP",
            rich_help_panel="Models",
        ),
    ] = None,
    field: opt.Field = EstimateConfig.field,
    target: opt.TargetChoice = EstimateConfig.target,
    top_k: opt.TopK = EstimateConfig.top_k,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Pseudo-count: how many counted pairs a row of the initial map weighs. By default "
            "chosen on held-out documents."
        ),
    ] = EstimateConfig.alpha,
    pin_exact: Annotated[
        bool,
        typer.Option(
            "--pin-exact/--no-pin-exact",
            help="Give tokens that both sides have the one entry 1.0, for gold and H-KL losses.",
        ),
    ] = EstimateConfig.pin_exact,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Save counts here every minute, and go on from them after an interruption; beside "
            "the output if not given.",
            metavar="FILE",
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(help="Count on this machine, or on a Ray cluster.", rich_help_panel=_CLUSTER),
    ] = "local",
    address: Annotated[
        str,
        typer.Option(
            help="Of the Ray cluster: HOST:PORT, or auto for the one that this machine is part of.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "auto",
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Count a map on text: which teacher tokens begin where a student token does, and how often."""
    options = config(
        EstimateConfig, top_k=top_k, target=target, alpha=alpha, pin_exact=pin_exact, field=field
    )
    if engine == "local" and is_given(context, "address"):
        raise typer.BadParameter("--address goes with --engine ray")
    if engine == "ray" and checkpoint is not None:
        raise typer.BadParameter("--checkpoint is for --engine local; Ray survives lost nodes")
    with command(quiet):
        check_output(output)
        from xtok import report
        from xtok.counting import texts
        from xtok.maps import names
        from xtok.stages import estimate as counting

        texts.find_texts(text)
        if checkpoint is not None and not checkpoint.parent.is_dir():
            raise XtokError(
                f"--checkpoint: there is no folder {checkpoint.parent}",
                hint=f"mkdir -p {checkpoint.parent}",
            )
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        base = None
        if initial_projection_path is not None:
            base = load_map(
                initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
            )
        models = (
            (student_model, student_revision, student_vocab_size, student_pattern),
            (teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern),
        )
        if base is None:
            student, teacher = (load(*model, **safety) for model in models)
        else:
            name = str(initial_projection_path)
            base, student = load_side(base, "student", *models[0], name=name, **safety)
            base, teacher = load_side(base, "teacher", *models[1], name=name, **safety)
        ids = student.vocabulary.model_id, teacher.vocabulary.model_id
        chosen = {"target": target, "alpha": alpha, "pin_exact": pin_exact}
        words = names.option_words(chosen, asdict(EstimateConfig()))
        parts = "estimate", f"top{top_k}", *words, names.text_word(text)
        path = named(output, names.default_name(*ids, *parts))
        saved = checkpoint or checkpoint_of(path)
        is_local = engine == "local"
        count = partial(count_here, student=student, teacher=teacher, checkpoint=saved)
        if not is_local:
            from xtok.counting import ray as cluster

            sources = [
                cluster.TokenizerSource(
                    model=model,
                    revision=revision,
                    vocab_size=size if base is None else loaded.vocabulary.vocab_size,
                    pattern=pattern,
                    **safety,
                )
                for loaded, (model, revision, size, pattern) in zip(
                    (student, teacher), models, strict=True
                )
            ]
            count = partial(
                cluster.count_on_ray,
                student=sources[0],
                teacher=sources[1],
                address=address,
                progress=report.text_progress_bar,
            )
        with keeping(saved if is_local else None):
            with redirect_stdout(sys.stderr):  # Ray prints of lost nodes, and stdout is data
                projection = counting.estimate(
                    student,
                    teacher,
                    text,
                    options,
                    base=base,
                    count=count,
                    progress=report.progress_bar,
                )
            write(projection, path, num_examples=num_examples)


def checkpoint_of(output: Path) -> Path:
    """Return where counts are saved if no other place is given: beside the map."""
    return output.with_name(f"{output.name}.checkpoint")


def count_here(
    plan: CountingPlan, *, student: Tokenizer, teacher: Tokenizer, checkpoint: Path
) -> CountedText:
    """Count a plan on this machine; an interruption waits for the next batch, and saves counts."""
    from xtok import report
    from xtok.counting import counts as counting

    def resumed(share: float) -> None:
        report.print_notes([f"resuming at {share:.0%} of the text, from {checkpoint}"])

    with deferred_interrupt() as is_interrupted:
        return counting.count_text(
            plan,
            student,
            teacher,
            checkpoint=checkpoint,
            progress=report.text_progress_bar,
            resumed=resumed,
            stopping=is_interrupted,
        )


@contextmanager
def keeping(checkpoint: Path | None) -> Iterator[None]:
    """Remove a checkpoint at the end, when the map is written; say where it is if interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        if checkpoint is None or not checkpoint.exists():
            raise
        message = f"counts saved in {checkpoint}; run the same command again to go on"
        raise KeyboardInterrupt(message) from None
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)


def evaluate(
    map_paths: Annotated[
        list[Path],
        typer.Argument(metavar="MAP...", help="Map files of one pair, measured side by side."),
    ],
    *,
    text: opt.Texts,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    field: opt.Field = EstimateConfig.field,
    group_by: Annotated[
        str | None,
        typer.Option(
            help="Group documents by this field or column; by file if not given.",
            rich_help_panel="Text",
        ),
    ] = None,
    for_loss: Annotated[
        Loss | None,
        typer.Option(
            "--for", help="Rank the maps by what counts for this loss, and say which is better."
        ),
    ] = None,
    min_coverage: Annotated[
        float | None,
        typer.Option(
            help="Exit with 3 if a map covers less of any group of text.",
            min=0,
            max=1,
            callback=_is_number,
        ),
    ] = None,
    max_cross_entropy: Annotated[
        float | None,
        typer.Option(
            help="Exit with 3 if a map's cross-entropy is above this on any group.",
            callback=_is_number,
        ),
    ] = None,
    num_worst: Annotated[
        int, typer.Option(help="Show this many of each map's most costly rows.", min=0, metavar="N")
    ] = 5,
    json: opt.Json = False,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure maps on text: cross-entropy, coverage, and how near they come to the best map."""
    with command(quiet) as stderr:
        from xtok import report
        from xtok.counting import texts
        from xtok.inspection import evaluate as quality

        texts.find_texts(text)
        maps = [
            load_map(path, student_vocab_size, teacher_vocab_size, preserve_last)
            for path in map_paths
        ]
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        names = [str(path) for path in map_paths]
        models = (
            (student_model, student_revision, None, student_pattern),
            (teacher_model, teacher_revision, None, teacher_pattern),
        )
        maps[0], student = load_side(maps[0], "student", *models[0], name=names[0], **safety)
        maps[0], teacher = load_side(maps[0], "teacher", *models[1], name=names[0], **safety)
        for projection in maps:
            report.print_reports(projection.reports)
        found = quality.evaluate(
            maps,
            text,
            student,
            teacher,
            names=names,
            field=field,
            group_by=group_by,
            for_loss=for_loss,
            num_worst=num_worst,
            progress=report.progress_bar,
            text_progress=report.text_progress_bar,
        )
        missed = found.failing(min_coverage=min_coverage, max_cross_entropy=max_cross_entropy)
        report.print_failed(missed, stderr)
        if json:
            print(report.to_json(found))  # noqa: T201
        else:
            from xtok.report.quality import print_evaluation

            print_evaluation(found)
    if missed:
        raise typer.Exit(3)


def compare(
    first: Annotated[Path, typer.Argument(metavar="MAP", help="A map file.")],
    second: Annotated[Path, typer.Argument(metavar="MAP", help="Another map of the same pair.")],
    *,
    text: opt.WeighingTexts = None,
    student_model: Annotated[
        str | None,
        typer.Option(
            help="Model of the rows, which tokenizes the text.",
            metavar="MODEL",
            rich_help_panel="Models",
        ),
    ] = None,
    field: opt.Field = EstimateConfig.field,
    num_examples: Annotated[
        int, typer.Option(help="Show this many rows that differ.", min=0, metavar="N")
    ] = 10,
    json: opt.Json = False,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    student_pattern: opt.StudentPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare two maps of one pair row by row: which differ, by how much, and where it matters."""
    if bool(text) != (student_model is not None):
        raise typer.BadParameter("--text and --student-model go together")
    with command(quiet):
        from xtok import report
        from xtok.counting import texts
        from xtok.inspection import compare as comparison

        texts.find_texts(text or [])
        maps = [
            load_map(path, student_vocab_size, teacher_vocab_size, preserve_last)
            for path in (first, second)
        ]
        for projection in maps:
            report.print_reports(projection.reports)
        counts = None
        if text and student_model is not None:
            safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
            given = (student_model, student_revision, None, student_pattern)
            maps[0], student = load_side(maps[0], "student", *given, name=str(first), **safety)
            counts = comparison.count_tokens(text, student, field)
        found = comparison.compare(
            *maps, token_counts=counts, num_examples=num_examples, names=[str(first), str(second)]
        )
        if json:
            print(report.to_json(found))  # noqa: T201
        else:
            from xtok.report.quality import print_comparison

            print_comparison(found)
