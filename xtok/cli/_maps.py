"""The commands that make and refine a map."""

# No postponed annotations: Typer would compile the 150 of them one by one, at each start.

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from xtok.cli import _options as opt
from xtok.cli._load import load, load_map, load_side
from xtok.cli._pairs import build_listed, is_done
from xtok.cli._run import (
    check_output,
    command,
    config,
    default_name,
    folder_of,
    is_given,
    named,
    write,
)
from xtok.cli._spellings import nemo_name, refined_name
from xtok.cli._texts import checkpoint_of, count_here, keeping
from xtok.config import (
    BuildConfig,
    EstimateConfig,
    Loss,
    MultitokenConfig,
    SortCutConfig,
)

_OF_ONE_PAIR = (
    *("student_model", "teacher_model", "output", "student_vocab_size", "teacher_vocab_size"),
    *("student_revision", "teacher_revision", "student_pattern", "teacher_pattern"),
    *("text", "field", "num_examples"),
)


_OF_A_LOSS = ("weights", "target", "exact_match", "scale_trick", "top_k")


def build(
    context: typer.Context,
    *,
    student_model: opt.BuiltStudentModel = None,
    teacher_model: opt.BuiltTeacherModel = None,
    pairs: opt.Pairs = None,
    output: opt.Output = None,
    output_dir: opt.OutputDir = None,
    skip_existing: opt.SkipExisting = False,
    dry_run: opt.DryRun = False,
    for_loss: opt.ForLoss = None,
    top_k: opt.TopK = BuildConfig.top_k,
    max_pieces: opt.MaxPieces = BuildConfig.max_pieces,
    scale_trick: opt.ScaleTrick = BuildConfig.scale_trick,
    reverse_pass: opt.ReversePass = BuildConfig.reverse_pass,
    exact_match: opt.ExactMatch = BuildConfig.exact_match,
    special_tokens: opt.SpecialTokensChoice = BuildConfig.special_tokens,
    fuzzy_threshold: opt.FuzzyThreshold = BuildConfig.fuzzy_threshold,
    fuzzy_top_k: opt.FuzzyTopK = BuildConfig.fuzzy_top_k,
    canonicalization: opt.CanonicalizationChoice = BuildConfig.canonicalization,
    token_form: opt.TokenFormChoice = BuildConfig.token_form,
    ignore_student_ids: opt.IgnoreStudentIds = None,
    ignore_teacher_ids: opt.IgnoreTeacherIds = None,
    weights: opt.WeightsChoice = BuildConfig.weights,
    target: opt.TargetChoice = BuildConfig.target,
    strict: opt.Strict = False,
    text: opt.OptionalTexts = None,
    field: opt.Field = EstimateConfig.field,
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
    """Build a map in one go: multitoken, reapply-exact, sort-cut; or those of a list of pairs.

    With --text, the map is counted on it.
    """
    _check_companions(context, special_tokens, has_text=bool(text))
    given = {
        "top_k": top_k,
        "max_pieces": max_pieces,
        "scale_trick": scale_trick,
        "reverse_pass": reverse_pass,
        "exact_match": exact_match,
        "special_tokens": special_tokens,
        "fuzzy_threshold": fuzzy_threshold,
        "fuzzy_top_k": fuzzy_top_k,
        "canonicalization": canonicalization,
        "token_form": token_form,
        "ignore_student_ids": _ids(ignore_student_ids, "--ignore-student-ids"),
        "ignore_teacher_ids": _ids(ignore_teacher_ids, "--ignore-teacher-ids"),
        "weights": weights,
        "target": target,
    }
    if text:  # as `pipeline.build` has it
        given |= {"weights": "prior", "scale_trick": False}
    if for_loss is not None:
        chosen = {name: value for name, value in given.items() if is_given(context, name)}
        options = config(partial(BuildConfig.for_loss, for_loss), **chosen)
    else:
        options = config(BuildConfig, **given)
    notes = _remarks(context, options, for_loss, has_text=bool(text))
    safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
    if pairs is not None:
        for name in _OF_ONE_PAIR:
            if is_given(context, name):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter(f"{option} is of one pair, and does not go with --pairs")
        with command(quiet) as stderr:
            from xtok import report

            report.print_notes(notes)
            build_listed(
                pairs,
                output_dir or Path(),
                options,
                loss=for_loss,
                skip_existing=skip_existing,
                dry_run=dry_run,
                strict=strict,
                safety=safety,
                stderr=stderr,
            )
        return
    if student_model is None or teacher_model is None:
        raise typer.BadParameter("give --student-model and --teacher-model, or --pairs")
    if output_dir is not None:
        raise typer.BadParameter("--output-dir goes with --pairs; give --output")
    with command(quiet):
        check_output(output)
        from xtok import report, tokenizers
        from xtok.counting import texts
        from xtok.stages import build as pipeline
        from xtok.stages import pairs as pair_list

        texts.find_texts(text or [])
        report.print_notes(notes)
        ids = tokenizers.model_id(student_model), tokenizers.model_id(teacher_model)
        name = pair_list.name_of_map(*ids, options, loss=for_loss, texts=text or [])
        path = named(output, (nemo_name(context) if for_loss is None else None) or name)
        student = load(
            student_model, student_revision, student_vocab_size, student_pattern, **safety
        )
        teacher = load(
            teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern, **safety
        )
        sides = student, teacher
        if is_done(*sides, path, options, text or [], keep=skip_existing, dry_run=dry_run):
            return
        saved = checkpoint_of(path)
        with keeping(saved if text else None):
            projection = pipeline.build(
                student,
                teacher,
                options,
                texts=text or [],
                field=field,
                count=partial(count_here, student=student, teacher=teacher, checkpoint=saved),
                progress=report.progress_bar,
            )
            write(projection, path, num_examples=num_examples, strict=strict)


def multitoken(
    context: typer.Context,
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
    fuzzy_threshold: opt.FuzzyThreshold = MultitokenConfig.fuzzy_threshold,
    fuzzy_top_k: opt.FuzzyTopK = MultitokenConfig.fuzzy_top_k,
    canonicalization: opt.CanonicalizationChoice = MultitokenConfig.canonicalization,
    token_form: opt.TokenFormChoice = MultitokenConfig.token_form,
    ignore_student_ids: opt.IgnoreStudentIds = None,
    ignore_teacher_ids: opt.IgnoreTeacherIds = None,
    weights: opt.WeightsChoice = MultitokenConfig.weights,
    target: opt.TargetChoice = MultitokenConfig.target,
    strict: opt.Strict = False,
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
    _check_companions(context, special_tokens)
    options = config(
        MultitokenConfig,
        top_k=top_k,
        max_pieces=max_pieces,
        scale_trick=scale_trick,
        reverse_pass=reverse_pass,
        special_tokens=special_tokens,
        fuzzy_threshold=fuzzy_threshold,
        fuzzy_top_k=fuzzy_top_k,
        canonicalization=canonicalization,
        token_form=token_form,
        ignore_student_ids=_ids(ignore_student_ids, "--ignore-student-ids"),
        ignore_teacher_ids=_ids(ignore_teacher_ids, "--ignore-teacher-ids"),
        weights=weights,
        target=target,
    )
    with command(quiet):
        check_output(output)
        from xtok import report
        from xtok.stages import exact as xtok_exact
        from xtok.stages import multitoken as stages

        models = (
            (student_model, student_revision, student_vocab_size, student_pattern),
            (teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern),
        )
        initial = None
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        if initial_projection_path is None:
            student, teacher = (load(*model, **safety) for model in models)
        else:
            initial = load_map(
                initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
            )
            name = str(initial_projection_path)
            initial, student = load_side(initial, "student", *models[0], name=name, **safety)
            initial, teacher = load_side(initial, "teacher", *models[1], name=name, **safety)
        projection = stages.multitoken(
            student, teacher, options, initial=initial, progress=report.progress_bar
        )
        if exact_match:
            projection = xtok_exact.reapply_exact(
                projection, student_model=student, teacher_model=teacher
            )
        name = nemo_name(context) or default_name(projection, "multitoken")
        write(projection, named(output, name), num_examples=num_examples, strict=strict)


def reapply_exact(
    *,
    initial_projection_path: opt.InitialProjectionPath,
    student_model: opt.CheckedStudentModel = None,
    teacher_model: opt.CheckedTeacherModel = None,
    output: opt.RefinedOutput = None,
    special_tokens: opt.SpecialTokensOfMap = None,
    canonicalization: opt.CanonicalizationOfMap = None,
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
    output = output or folder_of(initial_projection_path)
    with command(quiet):
        check_output(output)
        from xtok.stages import exact as stages

        projection = load_map(
            initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
        )
        safety: dict[str, Any] = {"offline": offline, "trust_remote_code": trust_remote_code}
        student = teacher = None
        name = str(initial_projection_path)
        if student_model is not None:
            given = (student_model, student_revision, student_vocab_size, student_pattern)
            projection, student = load_side(projection, "student", *given, name=name, **safety)
        if teacher_model is not None:
            given = (teacher_model, teacher_revision, teacher_vocab_size, teacher_pattern)
            projection, teacher = load_side(projection, "teacher", *given, name=name, **safety)
        projection = stages.reapply_exact(
            projection,
            special_tokens=special_tokens,
            canonicalization=canonicalization,
            student_model=student,
            teacher_model=teacher,
        )
        name = refined_name(initial_projection_path, "reapply-exact", projection)
        write(projection, named(output, name), num_examples=num_examples)


def sort_cut(
    *,
    initial_projection_path: opt.InitialProjectionPath,
    top_k: opt.TopK = SortCutConfig.top_k,
    output: opt.RefinedOutput = None,
    preserve_last: opt.PreserveLast = None,
    student_vocab_size: opt.MapStudentVocabSize = None,
    teacher_vocab_size: opt.MapTeacherVocabSize = None,
    num_examples: opt.NumExamples = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Cut each row of a map to its heaviest entries and normalize it; a scale slot stays last."""
    options = config(SortCutConfig, top_k=top_k)
    output = output or folder_of(initial_projection_path)
    with command(quiet):
        check_output(output)
        from xtok import report
        from xtok.inspection import inspect as describe
        from xtok.stages import sort_cut as stages

        projection = load_map(
            initial_projection_path, student_vocab_size, teacher_vocab_size, preserve_last
        )
        projection = stages.sort_cut(projection, options)
        name = refined_name(initial_projection_path, "sort-cut", projection)
        write(projection, named(output, name), num_examples=num_examples)
        report.print_notes(describe.weight_notes(projection))


def _check_companions(
    context: typer.Context, special_tokens: str, *, has_text: bool = False
) -> None:
    """Refuse options that need another one, which is not there."""
    for name in ("fuzzy_threshold", "fuzzy_top_k"):
        if special_tokens != "fuzzy" and is_given(context, name):
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--{option} goes with --special-tokens fuzzy")
    if not has_text and is_given(context, "field"):
        raise typer.BadParameter("--field goes with --text")


def _remarks(
    context: typer.Context, options: BuildConfig, for_loss: Loss | None, *, has_text: bool
) -> list[str]:
    """Return what a loss chose, and which options that were given have no effect."""
    notes = []
    if for_loss is not None:
        preset = [name for name in _OF_A_LOSS if not is_given(context, name)]
        notes.append(f"--for {for_loss} chose {_flags(options, preset)}")
    for applies, why, names in (
        (has_text, "--text", ("weights", "scale_trick")),
        (options.weights == "prior", "--weights prior", ("max_pieces", "reverse_pass")),
    ):
        given = [name for name in names if applies and is_given(context, name)]
        notes += [f"--{name.replace('_', '-')} has no effect with {why}" for name in given]
    return notes


def _flags(options: BuildConfig, names: Iterable[str]) -> str:
    """Return options as they are typed."""
    found = []
    for name in names:
        value, flag = getattr(options, name), name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found.append(f"--{flag} {value}")
    return " ".join(found) or "nothing that is not given"


def _ids(text: str | None, option: str) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(sorted({int(i) for i in text.split(",")}))
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text} is not a list such as 0,1,2") from error
