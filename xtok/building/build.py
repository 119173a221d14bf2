"""`build`: two models in, a finished map out, in memory; `get_map` keeps it in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, get_args

from xtok._lib.io import cache_folder, locked
from xtok._lib.progress import Note, Progress, silent, silent_note
from xtok._lib.shards import Paths, source_of
from xtok.building.counted import count_plan, counted_map, synthetic_map
from xtok.building.counting.pair_text import PairText, TextLike
from xtok.building.counting.texts import find_texts
from xtok.building.events import events
from xtok.building.exact import check_ignored, find_matches, options_after, with_exact
from xtok.building.multitoken import spelled_map
from xtok.building.sort_cut import cut_rows
from xtok.config import WAIT, BuildConfig, EventLoss, Loss, with_hyphens
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import AnyMap, MapLike, as_map, at_map_widths, bind_map, name_notes
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.recipe import difference, recipe_of
from xtok.maps.records import Recipe
from xtok.maps.spellings import SpellingMap
from xtok.maps.stage_reports import report_of_pair, require_complete
from xtok.tokenizers import ModelLike
from xtok.tokenizers import pair as pair_of
from xtok.tokenizers.pairs import Pair

M = TypeVar("M", bound=mapfile.StoredMap)


def build(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    config: BuildConfig | None = None,
    *,
    for_loss: Loss | None = None,
    texts: TextLike = (),
    field: str = "text",
    initial: MapLike | None = None,
    progress: Progress = silent,
) -> ProjectionMap:
    """Build a map from two tokenizers: `multitoken`, `reapply_exact`, `sort_cut`.

    It is the map that the three commands with files in between make, and carries its `recipe`.
    With texts, rows are counted on them and smoothed towards a map counted on synthetic text; there
    are no scale slots.

    >>> xtok.build("bytes", "bytes")
    ProjectionMap(bytes → bytes, 256 × 256, nnz=256)

    Args:
        student_model: the model of the rows: a repo id, folder or file as `load_tokenizer` takes
            it, or a loaded tokenizer (to give a width, revision or pattern); or the pair of both.
        teacher_model: the model of the columns.
        config: the options; the defaults if None.
        for_loss: take the options that suit a loss, instead of `config`.
        texts: a path or glob, or several, of plain text, JSON lines or Parquet, gzip and zstd
            included; or what was counted on them, as `building.counted.count_plan` asks for it.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        initial: with texts, a map of this pair to smooth towards instead.
        progress: called for each pass over a vocabulary, and for the text.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
        XtokError: if a text cannot be read, there is nothing to count in it, or `initial` is of
            other tokenizers.
        ValueError: for `initial` without texts, both a config and a loss, or counts for other
            options.
    """
    config = _config_of(config, for_loss)
    earlier = None if initial is None else as_map(initial)
    pair = at_map_widths(pair_of(student_model, teacher_model), earlier)
    if earlier is not None and not texts:
        raise ValueError("initial needs texts; multitoken extends a map")
    if config.target != "start" and not (texts or config.weights == "synthetic"):
        raise ValueError(f"target {config.target!r} needs weights 'synthetic', or texts")
    config = config.for_text() if texts else config
    check_ignored(pair, config)
    base = None if earlier is None else bind_map(pair, earlier)
    text = None
    if isinstance(texts, PairText):
        text = texts
    elif texts:
        text = PairText.read(pair, texts, count_plan(config), field=field, progress=progress)
    made, failures, notes, counts = _made(pair, config, text, base, progress)
    recipe = recipe_of(config, text.sources, text.field, earlier) if text else recipe_of(config)
    report = report_of_pair(
        "build", pair, made, config.multitoken,
        notes=[*name_notes(pair, earlier), *notes], failures=failures, counts=counts,
    )  # fmt: skip
    return replace(made, reports=(report,), recipe=recipe)


def _made(
    pair: Pair,
    config: BuildConfig,
    text: PairText | None,
    base: ProjectionMap | None,
    progress: Progress,
) -> tuple[ProjectionMap, Sequence[str], Sequence[str], Mapping[str, float]]:
    """Make a map: what matches, the rows that are left, what a text adds to them, and the cut.

    With a text no row is left out: the counts of exact tokens decide how much all are smoothed.
    Returns also the failures, notes and counts of its report.
    """
    options = config.multitoken if base is None else options_after(base, config)
    matches = find_matches(pair, options)
    only = ~matches.is_exact if config.exact_match and text is None else None
    made, failures, notes, counts = base, list[str](), list[str](), dict[str, float]()
    if made is None:
        if config.weights == "synthetic":
            made, failures = synthetic_map(pair, config, matches, only=only, progress=progress)
        else:
            made, failures = spelled_map(pair, options, matches, only=only, progress=progress)
    if text is not None:
        made, notes = counted_map(text, made, config, options)
    if config.exact_match:
        made = with_exact(made, matches, options)
    if text is None:
        made, counts = cut_rows(made, config.sort_cut)
    return made, failures, notes, counts


def _config_of(config: BuildConfig | None, loss: Loss | None) -> BuildConfig:
    if config is not None and loss is not None:
        raise ValueError("give config or for_loss, not both: BuildConfig.for_loss takes options")
    return BuildConfig.or_default(config) if loss is None else BuildConfig.for_loss(loss)


def get_map(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    config: BuildConfig | None = None,
    *,
    path: str | PathLike[str] | None = None,
    for_loss: Loss | EventLoss | None = None,
    texts: Paths = (),
    field: str = "text",
    initial: MapLike | None = None,
    rebuild: bool = False,
    strict: bool = False,
    timeout: float = WAIT,
    progress: Progress = silent,
    note: Note = silent_note,
) -> Any:
    """Return the map in a file if it is the one that `build` makes; else build it and write it.

    For `event-kl` and `csd` it is the `EventMap` or `SpellingMap` that `events` makes, else a
    `ProjectionMap`. One that was kept has no reports.

    Any number of processes may call this at once, on any hosts that share the folder: one builds,
    the others wait for its file. If it dies, the next one builds. Where the file system has no
    locks, each of them builds the same file.

    Args:
        student_model: the model of the rows, or the pair, as `build` takes it.
        teacher_model: the model of the columns.
        config: the options; the defaults if None.
        path: the map's file; another map in it is replaced. By default it is in xtok's cache
            folder, under a digest of both tokenizers, the options and the texts.
        for_loss: take the options that suit a loss, instead of `config`; or `event-kl` or `csd`,
            which take neither a config nor texts.
        texts: text to count on, as `build` takes it.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        initial: with texts, a map of this pair to smooth towards.
        rebuild: build and write the map even if the file holds it.
        strict: raise an error, and write nothing, if a token could not be decoded or spelled.
        timeout: seconds to wait for another process; after that, this one builds the map itself.
        progress: called for each pass over a vocabulary, and for the text.
        note: called with a sentence when the file is replaced, and when this process waits.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
        XtokError: if the file cannot be written, or a text cannot be read.
        ValueError: for both a config and a loss, or a timeout that is not a number of seconds.
    """
    loss = with_hyphens(for_loss)
    is_of_events = loss in get_args(EventLoss)
    if not is_of_events:
        config = _config_of(config, loss)
    elif config is not None or texts or initial is not None:
        raise ValueError(f"{loss} takes no config, texts or initial map")
    earlier = None if initial is None else as_map(initial)
    pair = at_map_widths(pair_of(student_model, teacher_model), earlier)
    kind: type[AnyMap] = ProjectionMap
    make: Callable[[], AnyMap] = partial(
        build, pair, config=config, texts=texts, field=field, initial=earlier, progress=progress
    )
    if is_of_events:
        kind = SpellingMap if loss == "csd" else EventMap
        make = partial(events, pair, for_loss=loss, progress=progress)

    @cache  # it reads the texts
    def recipe() -> Recipe | None:
        if config is None:
            return None
        return recipe_of(config, map(source_of, find_texts(texts)), field, earlier)

    target = _cached(pair, recipe() or {"for": loss}) if path is None else Path(path)
    kept = partial(_kept, kind, target, lambda found: difference(found, pair, recipe()))
    if rebuild:
        return _saved(make(), target, strict)
    found, _ = kept()
    if found is None:
        mapfile.check_output(target, mapfile.SUFFIXES[: 1 if kind is EventMap else 2])
        with locked(target, timeout=timeout, note=note):
            found, why = kept()  # another process may have made it meanwhile
            if found is None:
                if why is not None:
                    note(f"{target} exists, and is replaced: {why}")
                return _saved(make(), target, strict)
    note(f"{target} exists, and is kept")
    student, teacher = pair.sides  # as `build` has them, whatever the file calls them
    return replace(found, student=student, teacher=teacher)


def _kept(
    kind: type[AnyMap], path: Path, differs: Callable[[AnyMap], str | None]
) -> tuple[AnyMap | None, str | None]:
    """Return the map in a file if it does not differ; if it does, how."""
    if not path.is_file():  # reading a pipe would block
        return None, None
    try:
        found = kind.load(path)
    except XtokError as error:
        return None, error.message
    why = differs(found)
    return (None, why) if why else (found, None)


def _saved(made: M, path: Path, strict: bool) -> M:
    if strict:
        require_complete(made)
    made.save(path)
    return made


def _cached(pair: Pair, recipe: Recipe) -> Path:
    """Return where a map is kept that is asked for without a path."""
    definitions = [side.definition_sha256 for side in pair.sides]
    key = [definitions, pair.shape, recipe]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "maps" / f"{digest[:32]}.safetensors"
