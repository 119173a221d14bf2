"""`build`: two models in, a finished map out, in memory; and `build_pairs` for a list of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xtok.config import BuildConfig, EstimateConfig, Loss
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.names import name_of_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.results import map_notes, require_complete, stage_report, tokenizer_notes
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.exact import with_exact
from xtok.stages.matches import compared_tables, exact_matches
from xtok.stages.multitoken import multitoken
from xtok.stages.plans import Plan, difference, plan
from xtok.stages.sort_cut import sort_cut
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizer, load_tokenizer, model_id

if TYPE_CHECKING:
    from xtok.counting.counts import CountedText, CountingPlan


def build(
    student_model: ModelLike,
    teacher_model: ModelLike,
    config: BuildConfig | None = None,
    *,
    texts: str | Path | Sequence[str | Path] = (),
    field: str = EstimateConfig.field,
    checkpoint: Path | None = None,
    count: Callable[[CountingPlan], CountedText] | None = None,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> ProjectionMap:
    """Build a map from two tokenizers: `multitoken`, `reapply_exact`, `sort_cut`.

    Saved, it is the same file, byte for byte, as the three commands with files in between make.
    With texts, the map is counted on them as by `estimate`, smoothed towards `multitoken` with the
    weights `prior`; it has no scale slot.

    Args:
        student_model: the model of the rows: a repo id, folder or file as `load_tokenizer` takes
            it, or a loaded tokenizer (to give a width, revision or pattern).
        teacher_model: the model of the columns, likewise.
        config: the options; the defaults if None.
        texts: a path or glob of text to count on, or several, as `estimate` takes them.
        field: the field or column that holds the text.
        checkpoint: as in `estimate`.
        count: likewise.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
        XtokError: if a text cannot be read.
    """
    config = config or BuildConfig()
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    if texts:
        from xtok.stages.estimate import estimate

        names = ("top_k", "target", "exact_match")
        shared = {name: getattr(config, name) for name in names}
        projection = estimate(
            student,
            teacher,
            texts,
            EstimateConfig(**shared, field=field),
            base=replace(config.multitoken, weights="prior", scale_trick=False),
            checkpoint=checkpoint,
            count=count,
            progress=progress,
            text_progress=text_progress,
        )
    else:
        matches = None
        if config.exact_match:
            matches = exact_matches(*compared_tables(student, teacher, config), config)
        open_rows = None if matches is None else ~matches.is_exact
        projection = multitoken(
            student, teacher, config.multitoken, only=open_rows, progress=progress
        )
        if matches is not None:
            projection = with_exact(projection, matches, config)
        projection = sort_cut(projection, config.sort_cut)
    # One report of what the map is; those of single stages count what was replaced.
    of_stage = {report.stage: report for report in projection.reports}
    notes = tokenizer_notes(student, teacher) + map_notes(projection, config.ignore_student_ids)
    notes += of_stage["estimate"].notes if texts else ()
    counts = {} if texts else of_stage["sort-cut"].counts
    failures = [failure for report in projection.reports for failure in report.failures]
    report = stage_report("build", projection, notes, failures, counts)
    return replace(projection, reports=(report,))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pair of models by name, where its map goes, and its line in the list."""

    line: int
    student: str
    teacher: str
    output: Path


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """The result of a pair: its map, or an error, or neither if its output was kept.

    Of a dry run it is the plan, or an error. `replaced` says how the output that existed differed,
    with `skip_existing`.
    """

    pair: Pair
    projection: ProjectionMap | None = None
    plan: Plan | None = None
    error: XtokError | None = None
    replaced: str | None = None


def read_pairs(
    path: Path, output_dir: Path, config: BuildConfig, loss: Loss | None = None
) -> list[Pair]:
    """Read a list of pairs: on each line a student, a teacher and, if it has a name, the output.

    Columns are separated by tabs, or by spaces on a line without tabs; blank lines and those that
    begin with `#` do not count. A `~` at the beginning of a column is the home folder.

    Args:
        path: the list.
        output_dir: the folder of the outputs, which names in the list are relative to.
        config: the options, which default names contain.
        loss: what the options were chosen for, likewise.

    Raises:
        XtokError: if it cannot be read, a line has too few or too many columns, or two lines have
            the same output.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise XtokError(
            f"the list of pairs {path} cannot be read: {reason}",
            hint="give a text file with a student and a teacher on each line",
        ) from error
    pairs: dict[Path, Pair] = {}
    for number, text in enumerate(lines, 1):
        words = [word.strip() for word in (text.split("\t") if "\t" in text else text.split())]
        words = [os.path.expanduser(word) for word in words if word]
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3):
            raise XtokError(
                f"line {number} of {path} has {len(words)} column{'s' * (len(words) > 1)}, "
                "expected 2 or 3",
                hint="write a student, a teacher and optionally an output; separate them with tabs "
                "if a path has spaces",
            )
        student, teacher, *named = words
        ids = model_id(student), model_id(teacher)
        name = named[0] if named else name_of_map(*ids, config, loss=loss)
        pair = Pair(line=number, student=student, teacher=teacher, output=output_dir / name)
        output = Path(os.path.abspath(pair.output))  # without `..`
        if output in pairs:
            raise XtokError(
                f"line {number} of {path} has the same output as line {pairs[output].line}: {name}",
                hint="name another output in a third column",
            )
        pairs[output] = pair
    if not pairs:
        raise XtokError(
            f"the list of pairs {path} is empty",
            hint="write a student and a teacher on each line",
        )
    return list(pairs.values())


def build_pairs(
    pairs: Sequence[Pair],
    config: BuildConfig | None = None,
    *,
    skip_existing: bool = False,
    dry_run: bool = False,
    strict: bool = False,
    load: Callable[[str], Tokenizer] = load_tokenizer,
    progress: Progress = silent,
) -> Iterator[PairResult]:
    """Build and save the maps of a list, loading each tokenizer once; an error ends its pair only.

    A tokenizer is freed after the last pair that needs it.

    Args:
        pairs: as `read_pairs` returns them.
        config: the options of all maps; the defaults if None.
        skip_existing: keep an output that is the same map already (see `difference`), so that a
            list can be run again after a failure; build and replace any other.
        dry_run: build nothing, and return plans.
        strict: a token that cannot be decoded or spelled is an error.
        load: what loads a tokenizer.
        progress: called for each pass over a vocabulary.
    """
    config = config or BuildConfig()
    checked = [_attempted(_checked, pair) for pair in pairs]
    yield from (result for result in checked if result.error is not None)
    pairs = [result.pair for result in checked if result.error is None]
    left = Counter(model for pair in pairs for model in (pair.student, pair.teacher))
    loaded: dict[str, Tokenizer] = {}

    def loaded_once(model: str) -> Tokenizer:
        if model not in loaded:
            loaded[model] = load(model)
        return loaded[model]

    def built(pair: Pair) -> PairResult:
        sides = loaded_once(pair.student), loaded_once(pair.teacher)
        exists = skip_existing and pair.output.exists()
        replaced = difference(pair.output, *sides, config) if exists else None
        if dry_run:
            return PairResult(pair=pair, plan=plan(*sides, config), replaced=replaced)
        if exists and replaced is None:
            return PairResult(pair=pair)
        projection = build(*sides, config, progress=progress)
        if strict:
            require_complete(projection)
        projection.save(pair.output)
        return PairResult(pair=pair, projection=projection, replaced=replaced)

    for pair in pairs:
        yield _attempted(built, pair)
        for model in (pair.student, pair.teacher):
            left[model] -= 1
            if not left[model]:
                loaded.pop(model, None)


def _checked(pair: Pair) -> PairResult:
    mapfile.check_output(pair.output)
    return PairResult(pair=pair)


def _attempted(work: Callable[[Pair], PairResult], pair: Pair) -> PairResult:
    """Return the result of a pair; an error is one, too."""
    try:
        return work(pair)
    except XtokError as error:
        return PairResult(pair=pair, error=error)
    except OSError as error:
        told = XtokError(
            f"{error.filename or pair.output}: {error.strerror or error}",
            hint="check the path, its permissions, and the free space",
        )
        return PairResult(pair=pair, error=told)
