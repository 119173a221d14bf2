"""Lists of pairs: reading, planning and building them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok.config import BuildConfig, Loss
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps import names
from xtok.maps.edges import heaviest
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.results import require_complete
from xtok.progress import Progress, silent
from xtok.stages import build as pipeline
from xtok.stages.exact import special_edges
from xtok.tokenizers import load_tokenizer, model_id
from xtok.vocab.table import match_bytes

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pair of models by name, where its map goes, and its line in the list."""

    line: int
    student: str
    teacher: str
    output: Path


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a map of two tokenizers, known without building it.

    Attributes:
        rows: the student's width.
        columns: the teacher's width.
        single_entry: rows of one entry: tokens of both sides, and special tokens.
        max_entries: entries if every other row is as full as it may be.
        max_bytes: bytes of the `.safetensors` file then. Real maps have 55 to 100 % of it.
    """

    rows: int
    columns: int
    single_entry: int
    max_entries: int
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """The result of a pair: its map, or an error, or neither if its output was kept.

    `replaced` says how the output that existed differed, with `skip_existing`.
    """

    pair: Pair
    projection: ProjectionMap | None = None
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


def name_of_map(
    student_id: str,
    teacher_id: str,
    config: BuildConfig,
    *,
    loss: Loss | None = None,
    texts: Sequence[str | Path] = (),
) -> str:
    """Return the file name that `build` gives to a map that has none.

    It has the models, the loss, `top_k`, each option that differs from its default (or from the
    loss's), and the first text.
    """
    usual = BuildConfig.for_loss(loss) if loss else BuildConfig()
    if texts:
        usual = replace(usual, weights="prior", scale_trick=False)
    slot = "" if config.scale_trick == usual.scale_trick else "no-scale-trick"
    return names.default_name(
        student_id,
        teacher_id,
        loss or "",
        f"top{config.top_k}",
        slot.removeprefix("no-" if config.scale_trick else ""),
        *names.option_words(asdict(config), asdict(usual)),
        names.text_word(texts),
    )


def difference(
    path: Path,
    student: Tokenizer,
    teacher: Tokenizer,
    config: BuildConfig,
    texts: Sequence[str | Path] = (),
) -> str | None:
    """Return how a file differs from the map that `build` would make, or None.

    Tokenizers are compared by their tokens, options by the history in the file, texts by name and
    size. Versions of xtok are not compared.
    """
    try:
        existing = mapfile.load(path)
    except XtokError as error:
        return error.message
    for side, there, tokenizer in (
        ("student", existing.student, student),
        ("teacher", existing.teacher, teacher),
    ):
        here = tokenizer.vocabulary
        if there.vocab_size != here.vocab_size:
            return f"its {side} is {there.vocab_size} wide, not {here.vocab_size}"
        if there.table is None or there.table.sha256() != tokenizer.table.sha256():
            return f"its {side} {there.model_id} has other tokens than {here.model_id}"
    return _other_options(existing.history, _steps(config, bool(texts))) or _other_texts(
        existing, texts
    )


def _steps(config: BuildConfig, counted: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return the stages of `build` and their options, as a map's history tells them."""
    matching: dict[str, Any] = {"special_tokens": config.special_tokens}
    if config.canonicalization == "relaxed":
        matching["canonicalization"] = "relaxed"
    if counted:
        first = replace(config.multitoken, weights="prior", scale_trick=False)
        second = ("estimate", {"top_k": config.top_k, "target": config.target})
        steps = [("multitoken", first.options), second, ("reapply-exact", matching)]
    else:
        last = ("sort-cut", asdict(config.sort_cut))
        steps = [("multitoken", config.multitoken.options), ("reapply-exact", matching), last]
    return [step for step in steps if config.exact_match or step[0] != "reapply-exact"]


def _other_options(
    history: Sequence[Mapping[str, Any]], steps: Sequence[tuple[str, Mapping[str, Any]]]
) -> str | None:
    stages = [step["stage"] for step in history]
    if stages != [stage for stage, _ in steps]:
        return f"its stages are {', '.join(stages) or 'unknown'}"
    for step, (stage, options) in zip(history, steps, strict=True):
        there = {k: v for k, v in step["options"].items() if k != "alpha"}  # chosen on the text
        for name in sorted({*there, *options}):
            if there.get(name) != options.get(name):
                now, before = options.get(name, "the default"), there.get(name, "the default")
                return f"its {stage} has {name} {before}, not {now}"
    return None


def _other_texts(existing: ProjectionMap, texts: Sequence[str | Path]) -> str | None:
    if not texts:
        return None
    from xtok.counting.texts import find_texts

    here = [(path.name, path.stat().st_size) for path in find_texts(texts)]
    there = [
        (one["name"], one["size"]) for step in existing.history for one in step.get("texts", ())
    ]
    return None if here == there else "it was counted on other text"


def plan(student: Tokenizer, teacher: Tokenizer, config: BuildConfig | None = None) -> Plan:
    """Return what `build` will make of two tokenizers, at most."""
    config = config or BuildConfig()
    rows = student.table_as(config.token_form, ignore=config.ignore_student_ids)
    columns = teacher.table_as(config.token_form, ignore=config.ignore_teacher_ids)
    special = heaviest(special_edges(rows, columns, config), config.top_k)
    sizes = np.zeros(len(rows), np.int64)
    sizes[rows.text_ids] = min(config.top_k, len(columns))
    beside_slot = config.scale_trick and not config.exact_match
    np.add.at(sizes, special.student_ids, 1)
    sizes[special.student_ids] += beside_slot
    if config.exact_match:
        sizes[list(match_bytes(rows, columns))] = 1
    entries = int(sizes.sum())
    empty = empty_map(student, teacher, config)
    size = len(mapfile.to_safetensors(empty)) + _HISTORY + len(str(config.options))
    return Plan(
        rows=len(rows),
        columns=len(columns),
        single_entry=int(np.count_nonzero(sizes == 1)),
        max_entries=entries,
        max_bytes=size + 12 * entries,
    )


def empty_map(student: Tokenizer, teacher: Tokenizer, config: BuildConfig) -> ProjectionMap:
    """Return a map with the vocabularies of two tokenizers and without entries."""
    rows = len(student.table)
    return ProjectionMap(
        student=student.vocabulary,
        teacher=teacher.vocabulary,
        student_ids=np.zeros(0, np.int32),
        teacher_ids=np.zeros(0, np.int32),
        weights=np.zeros(0, np.float32),
        row_kind=np.zeros(rows, np.uint8),
        scale_slot=np.zeros(rows, np.uint8) if config.scale_trick else None,
        method="multitoken",
        top_k=config.top_k,
    )


_HISTORY = 1024
"""Bytes that the stages' options and the numbers in the header take, at most."""


def build_pairs(
    pairs: Sequence[Pair],
    config: BuildConfig | None = None,
    *,
    skip_existing: bool = False,
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
        strict: a token that cannot be decoded or spelled is an error.
        load: what loads a tokenizer.
        progress: called for each pass over a vocabulary.
    """
    refused = [PairResult(pair=pair, error=_refusal(pair.output)) for pair in pairs]
    yield from (result for result in refused if result.error is not None)
    pairs = [result.pair for result in refused if result.error is None]
    left = Counter(model for pair in pairs for model in (pair.student, pair.teacher))
    loaded: dict[str, Tokenizer] = {}

    def build(pair: Pair) -> PairResult:
        for model in (pair.student, pair.teacher):
            if model not in loaded:
                loaded[model] = load(model)
        sides = loaded[pair.student], loaded[pair.teacher]
        replaced = None
        if skip_existing and pair.output.exists():
            replaced = difference(pair.output, *sides, config or BuildConfig())
            if replaced is None:
                return PairResult(pair=pair)
        projection = pipeline.build(*sides, config, progress=progress)
        if strict:
            require_complete(projection)
        projection.save(pair.output)
        return PairResult(pair=pair, projection=projection, replaced=replaced)

    for pair in pairs:
        yield _attempted(build, pair)
        for model in (pair.student, pair.teacher):
            left[model] -= 1
            if not left[model]:
                loaded.pop(model, None)


def _attempted(build: Callable[[Pair], PairResult], pair: Pair) -> PairResult:
    """Build a pair; an error is its result."""
    try:
        return build(pair)
    except XtokError as error:
        return PairResult(pair=pair, error=error)
    except OSError as error:
        told = XtokError(
            f"{error.filename or pair.output}: {error.strerror or error}",
            hint="check the path, its permissions, and the free space",
        )
        return PairResult(pair=pair, error=told)


def _refusal(output: Path) -> XtokError | None:
    """Return why an output cannot be written, or None."""
    try:
        mapfile.check_output(output)
    except XtokError as error:
        return error
    return None
