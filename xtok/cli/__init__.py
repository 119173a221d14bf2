"""The command line: each command parses, calls one function of the library, and reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtok._version import __version__
from xtok.cli import _options as opt
from xtok.cli import _tokenizers
from xtok.cli._run import (
    check_output,
    command,
    config,
    load_tokenizer,
    read_chat,
    read_text,
    run,
    write,
)
from xtok.config import (
    AnchorFit,
    BuildConfig,
    Dtype,
    GenerateConfig,
    MergeConfig,
    MultitokenConfig,
    Normalize,
    SortCutConfig,
    Weighting,
)

if TYPE_CHECKING:
    from xtok.projection import ProjectionMap
    from xtok.tokenizers import Tokenizer
    from xtok.tokens import Vocabulary

app = typer.Typer(
    name="xtok",
    help="Build cross-tokenizer projection maps: for each token of a student model, the tokens of "
    "a teacher model that it corresponds to, right byte for byte.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


app.command()(_tokenizers.doctor)
app.command()(_tokenizers.overlap)


def main() -> None:
    """Run the command line."""
    run(app)


def _version(show: bool) -> None:
    if show:
        print(f"xtok {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def build(
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    output: opt.Output = None,
    top_k: opt.TopK = BuildConfig.top_k,
    max_pieces: opt.MaxPieces = BuildConfig.max_pieces,
    scale_trick: opt.ScaleTrick = BuildConfig.scale_trick,
    reverse_pass: opt.ReversePass = BuildConfig.reverse_pass,
    exact_match: opt.ExactMatch = BuildConfig.exact_match,
    special_tokens: opt.SpecialTokensChoice = BuildConfig.special_tokens,
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
    """Build a map in one go: multitoken, reapply-exact, sort-cut."""
    options = config(
        BuildConfig,
        top_k=top_k,
        max_pieces=max_pieces,
        scale_trick=scale_trick,
        reverse_pass=reverse_pass,
        exact_match=exact_match,
        special_tokens=special_tokens,
    )
    with command(quiet):
        check_output(output)
        from xtok import pipeline, report

        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = _load(
            student_model, student_revision, student_vocab_size, student_pattern, **safety
        )
        teacher = _load(
            teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern, **safety
        )
        projection = pipeline.build(student, teacher, options, progress=report.progress_bar)
        write(projection, output, num_examples=num_examples)


@app.command()
def multitoken(
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    initial_projection_path: opt.ExtendedProjectionPath = None,
    preserve_last: opt.PreserveLast = None,
    output: opt.Output = None,
    top_k: opt.TopK = MultitokenConfig.top_k,
    max_pieces: opt.MaxPieces = MultitokenConfig.max_pieces,
    scale_trick: opt.ScaleTrick = MultitokenConfig.scale_trick,
    reverse_pass: opt.ReversePass = MultitokenConfig.reverse_pass,
    exact_match: opt.ExactMatch = False,
    special_tokens: opt.SpecialTokensChoice = MultitokenConfig.special_tokens,
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
    """Map each student token to the teacher tokens that spell it, and the other way round."""
    options = config(
        MultitokenConfig,
        top_k=top_k,
        max_pieces=max_pieces,
        scale_trick=scale_trick,
        reverse_pass=reverse_pass,
        special_tokens=special_tokens,
    )
    with command(quiet):
        check_output(output)
        from xtok import report, stages

        models = (
            (student_model, student_revision, student_vocab_size, student_pattern),
            (teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern),
        )
        initial = None
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        if initial_projection_path is None:
            student, teacher = (_load(*model, **safety) for model in models)
        else:
            initial = _load_map(
                initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
            )
            student = _load_like(initial.student, *models[0], **safety)
            teacher = _load_like(initial.teacher, *models[1], **safety)
        projection = stages.multitoken(
            student, teacher, options, initial=initial, progress=report.progress_bar
        )
        if exact_match:
            projection = stages.reapply_exact(projection)
        write(projection, output, stage="multitoken", num_examples=num_examples)


@app.command()
def reapply_exact(
    *,
    initial_projection_path: opt.InitialProjectionPath,
    student_model: opt.CheckedStudentModel = None,
    teacher_model: opt.CheckedTeacherModel = None,
    output: opt.Output = None,
    special_tokens: opt.SpecialTokensOfMap = None,
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
    """Pin the tokens of a map that both sides have to each other, with weight 1."""
    for side, model, *others in (
        ("student", student_model, student_revision, student_pattern),
        ("teacher", teacher_model, teacher_revision, teacher_pattern),
    ):
        if model is None and any(others):
            raise typer.BadParameter(f"a revision or pattern needs --{side}-model")
    with command(quiet):
        check_output(output)
        from xtok import stages

        projection = _load_map(
            initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
        )
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        if student_model is not None:
            given = (student_model, student_revision, student_vocab_size, student_pattern)
            student = _load_like(projection.student, *given, **safety)
            projection = stages.with_vocabularies(projection, student=student.vocabulary)
        if teacher_model is not None:
            given = (teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern)
            teacher = _load_like(projection.teacher, *given, **safety)
            projection = stages.with_vocabularies(projection, teacher=teacher.vocabulary)
        projection = stages.reapply_exact(projection, special_tokens=special_tokens)
        write(projection, output, stage="reapply-exact", num_examples=num_examples)


@app.command()
def sort_cut(
    *,
    initial_projection_path: opt.InitialProjectionPath,
    top_k: opt.TopK = SortCutConfig.top_k,
    output: opt.Output = None,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Cut each row of a map to its heaviest entries and normalize it; a scale slot stays last."""
    options = config(SortCutConfig, top_k=top_k)
    with command(quiet):
        check_output(output)
        from xtok import stages

        projection = _load_map(
            initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
        )
        projection = stages.sort_cut(projection, options)
        write(projection, output, stage="sort-cut", num_examples=num_examples)


@app.command()
def generate(
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    embedding_model: Annotated[
        str,
        typer.Option(
            help="sentence:MODEL, a sentence-transformers model; input:MODEL, the input-embedding "
            "layer of a language model; or own, the two models' own input embeddings.",
            metavar="KIND:MODEL",
            rich_help_panel="Models",
        ),
    ],
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
        device=device,
        dtype=dtype,
        chunk_size=chunk_size,
    )
    with command(quiet):
        check_output(output)
        from xtok import cache, embeddings, report

        kept = cache.Cache(cache_dir or cache.default_folder(), recompute=force_recompute)
        embeddings.check_source(embedding_model, options, embedding_revision, kept)
        student = _load(student_model, student_revision, student_vocab_size, student_pattern)
        teacher = _load(teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern)
        projection = embeddings.generate(
            student,
            teacher,
            embedding_model,
            options,
            embedding_revision=embedding_revision,
            cache=kept,
            progress=report.progress_bar,
        )
        write(projection, output, stage="generate", num_examples=num_examples)


@app.command()
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
        from xtok import stages

        maps = [
            _load_map(path, student_vocab_size, teacher_vocab_size, preserve_last)
            for path in map_paths
        ]
        write(stages.merge(maps, options), output, stage="merge", num_examples=num_examples)


@app.command()
def inspect(
    map_path: opt.MapPath,
    *,
    token: Annotated[
        list[str] | None,
        typer.Option(
            help="Show the row of this student token, spaces included: ' the'. Repeatable.",
            metavar="TEXT",
        ),
    ] = None,
    token_id: Annotated[
        list[int] | None,
        typer.Option("--id", help="Show the row of this student id. Repeatable.", metavar="ID"),
    ] = None,
    num_examples: Annotated[
        int | None,
        typer.Option(help="Show this many rows, evenly spread; 5 if none are asked for.", min=0),
    ] = None,
    json: opt.Json = False,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    quiet: opt.Quiet = False,
) -> None:
    """Show what a map holds: who maps to whom, how it was made, and rows of it."""
    with command(quiet):
        from xtok import describe, report

        projection = _load_map(map_path, student_vocab_size, teacher_vocab_size, preserve_last)
        if num_examples is None:
            num_examples = 0 if token or token_id else 5
        description = describe.inspect(
            projection, tokens=token or [], ids=token_id or [], num_examples=num_examples
        )
        report.print_reports(projection.reports)
        if json:
            print(report.to_json(description))  # noqa: T201
        else:
            report.print_description(description)


@app.command()
def convert(
    map_path: opt.MapPath,
    *,
    output: Annotated[
        Path,
        typer.Option(
            help="Where to write: .safetensors, or .pt in NeMo-RL's layout.", metavar="FILE"
        ),
    ],
    normalize: Annotated[
        Normalize | None,
        typer.Option(
            help="Make rows of learned weights sum to 1: divide by the sum, or take the softmax.",
        ),
    ] = None,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    quiet: opt.Quiet = False,
) -> None:
    """Convert a map between xtok's .safetensors and NeMo-RL's .pt, both ways."""
    with command(quiet):
        check_output(output)
        projection = _load_map(
            map_path, student_vocab_size, teacher_vocab_size, preserve_last, normalize
        )
        write(projection, output)


@app.command()
def align(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT|-]", help="The text itself, or - to read it from stdin."),
    ] = None,
    *,
    student_model: opt.StudentModel,
    teacher_model: opt.TeacherModel,
    file: Annotated[
        Path | None, typer.Option(help="Read the text from this file.", metavar="FILE")
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(
            help="Align a conversation instead: a JSON file with a list of messages, rendered by "
            "each side's chat template.",
            metavar="FILE",
        ),
    ] = None,
    student_chat_template: opt.StudentChatTemplate = None,
    teacher_chat_template: opt.TeacherChatTemplate = None,
    max_comb_len: Annotated[
        int,
        typer.Option(help="Tokens that may match as one where the two sides differ.", min=1),
    ] = 4,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    student_revision: opt.StudentRevision = None,
    teacher_revision: opt.TeacherRevision = None,
    student_pattern: opt.StudentPattern = None,
    teacher_pattern: opt.TeacherPattern = None,
    quiet: opt.Quiet = False,
) -> None:
    """Show two tokenizations of a text over one another, and the chunks that they share."""
    if [text, file, chat].count(None) != 2:
        raise typer.BadParameter("give a text (or - for stdin), or --file, or --chat: one of them")
    data = read_text(text, file) if chat is None else b""
    conversation = {} if chat is None else read_chat(chat)
    with command(quiet):
        from xtok import chats, display, report
        from xtok.aligner import TokenAligner, describe_alignment

        student = _load(student_model, student_revision, None, student_pattern)
        teacher = _load(teacher_model, teacher_revision, None, teacher_pattern)
        aligner = TokenAligner(student, teacher, max_comb_len=max_comb_len)
        if chat is None:
            ids = (student.segment(data), teacher.segment(data))
            alignment = describe_alignment(aligner, student, teacher, *ids)
        else:
            found = chats.align_chat(
                aligner,
                student,
                teacher,
                **conversation,
                student_template=student_chat_template,
                teacher_template=teacher_chat_template,
            )
            alignment = chats.describe_chat(aligner, student, teacher, found)
        if json:
            print(report.to_json(alignment))  # noqa: T201
        else:
            display.print_alignment(alignment)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--weights {text} is not a list such as 0.7,0.3") from error


def _load(
    model: str, revision: str | None, vocab_size: int | None, pattern: str | None, **safety: bool
) -> Tokenizer:
    return load_tokenizer(
        model, revision=revision, vocab_size=vocab_size, pattern=pattern, **safety
    )


def _load_like(
    like: Vocabulary,
    model: str,
    revision: str | None,
    vocab_size: int | None,
    pattern: str | None,
    **safety: bool,
) -> Tokenizer:
    """Load a tokenizer with the width of a map's side, if it is that side's tokenizer."""
    if vocab_size is None and like.table is None:
        vocab_size = like.vocab_size
    tokenizer = _load(model, revision, vocab_size, pattern, **safety)
    differs = vocab_size is None and tokenizer.vocabulary.vocab_size != like.vocab_size
    if differs and like.table is not None and tokenizer.table.sha256() == like.table.sha256():
        return _load(model, revision, like.vocab_size, pattern, **safety)
    return tokenizer


def _load_map(
    path: Path,
    student_vocab_size: int | None,
    teacher_vocab_size: int | None,
    preserve_last: bool | None = None,
    normalize: Normalize | None = None,
) -> ProjectionMap:
    from xtok import mapfile

    return mapfile.load(
        path,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
        preserve_last=preserve_last,
        normalize=normalize,
    )
