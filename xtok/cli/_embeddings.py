"""The commands that make a map of embeddings, and add maps up."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xtok.cli import _options as opt
from xtok.cli._load import load, load_map
from xtok.cli._run import check_output, command, config, default_name, named, write
from xtok.cli._spellings import nemo_name
from xtok.config import (
    AnchorFit,
    Canonicalization,
    Dtype,
    GenerateConfig,
    MergeConfig,
    Weighting,
)


def generate(
    context: typer.Context,
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="sentence:MODEL, a sentence-transformers model; input:MODEL, the input-embedding "
            "layer of a language model; or own, the two models' own input embeddings. By default "
            "own if both models have weights, else "
            "sentence:sentence-transformers/all-MiniLM-L6-v2.",
            metavar="KIND:MODEL",
            rich_help_panel="Models",
        ),
    ] = None,
    embedding_revision: Annotated[
        str | None,
        typer.Option(
            help="Branch, tag or commit of the embedding model's repo.", rich_help_panel="Models"
        ),
    ] = None,
    output: opt.Output = None,
    top_k: opt.TopK = GenerateConfig.top_k,
    weight_threshold: Annotated[
        float,
        typer.Option(
            help="Drop entries whose share of the whole row is less.",
            rich_help_panel="Making the map",
        ),
    ] = GenerateConfig.weight_threshold,
    weighting: Annotated[
        Weighting,
        typer.Option(
            help="A power of |cosine| that grows with the row's largest, or a softmax.",
            rich_help_panel="Making the map",
        ),
    ] = GenerateConfig.weighting,
    temperature: Annotated[
        float, typer.Option(help="Of the softmax.", rich_help_panel="Making the map")
    ] = GenerateConfig.temperature,
    anchor_fit: Annotated[
        AnchorFit,
        typer.Option(
            help="With own: how equal tokens bring the student's embeddings to the teacher's.",
            rich_help_panel="Making the map",
        ),
    ] = GenerateConfig.anchor_fit,
    ridge: Annotated[
        float,
        typer.Option(
            help="Penalty of the ridge regression, as a share of the mean variance.",
            rich_help_panel="Making the map",
        ),
    ] = GenerateConfig.ridge,
    canonicalization: Annotated[
        Canonicalization,
        typer.Option(
            help="Embed tokens as they are, or embed ' ,' and ',' and forms of a line break alike.",
            rich_help_panel="Making the map",
        ),
    ] = GenerateConfig.canonicalization,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or cuda:N.", rich_help_panel="Computing")
    ] = GenerateConfig.device,
    dtype: Annotated[
        Dtype,
        typer.Option(help="What embeddings are rounded to.", rich_help_panel="Computing"),
    ] = GenerateConfig.dtype,
    chunk_size: Annotated[
        int,
        typer.Option(
            help="Student tokens at once: bounds the memory, changes nothing else.",
            min=1,
            metavar="N",
            rich_help_panel="Computing",
        ),
    ] = GenerateConfig.chunk_size,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where embeddings are kept. By default xtok in the user's cache folder.",
            metavar="FOLDER",
            rich_help_panel="Computing",
        ),
    ] = None,
    force_recompute: Annotated[
        bool,
        typer.Option(
            "--force-recompute",
            help="Embed anew, and replace what is kept.",
            rich_help_panel="Computing",
        ),
    ] = False,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    offline: opt.Offline = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    strict: opt.Strict = False,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Map each student token to the teacher tokens whose embeddings are most similar."""
    options = config(
        GenerateConfig,
        top_k=top_k,
        weight_threshold=weight_threshold,
        weighting=weighting,
        temperature=temperature,
        anchor_fit=anchor_fit,
        ridge=ridge,
        canonicalization=canonicalization,
        device=device,
        dtype=dtype,
        chunk_size=chunk_size,
    )
    with command(quiet):
        check_output(output)
        from xtok import report
        from xtok.embeddings import cache
        from xtok.embeddings import generate as embeddings

        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = load(
            student_model, student_revision, student_vocab_size, student_pattern, **safety
        )
        teacher = load(
            teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern, **safety
        )
        projection = embeddings.generate(
            student,
            teacher,
            embedding_model,
            options,
            embedding_revision=embedding_revision,
            offline=offline,
            cache=cache.Cache(cache_dir or cache.default_folder(), recompute=force_recompute),
            progress=report.progress_bar,
        )
        name = nemo_name(context) or default_name(projection, "generate")
        write(projection, named(output, name), num_examples=num_examples, strict=strict)


def merge(
    map_paths: Annotated[
        list[Path], typer.Argument(metavar="MAP MAP...", help="Two or more maps of one pair.")
    ],
    *,
    weights: Annotated[
        str | None,
        typer.Option(
            help="A weight for each map, as in 0.7,0.3. By default all are equal.",
            metavar="A,B",
            rich_help_panel="Making the map",
        ),
    ] = None,
    fill: Annotated[
        bool,
        typer.Option(
            "--fill/--no-fill",
            help="Only add to rows of the first map that are empty or not exact.",
            rich_help_panel="Making the map",
        ),
    ] = MergeConfig.fill,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Entries per row, a slot included. By default those of the widest map.",
            min=1,
            metavar="N",
            rich_help_panel="Making the map",
        ),
    ] = None,
    output: opt.Output = None,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.StudentVocabSize = None,
    teacher_vocab_size: opt.TeacherVocabSize = None,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Make one map of several: a weighted sum of rows, or only what the first one lacks."""
    options = config(MergeConfig, weights=_numbers(weights), fill=fill, top_k=top_k)
    with command(quiet):
        check_output(output)
        from xtok.stages import merge as stages

        maps = [
            load_map(path, student_vocab_size, teacher_vocab_size, preserve_last)
            for path in map_paths
        ]
        projection = stages.merge(maps, options, names=[str(path) for path in map_paths])
        path = named(output, default_name(projection, "merge"))
        write(projection, path, num_examples=num_examples)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--weights {text} is not a list such as 0.7,0.3") from error
