"""`build`: two models in, a finished map out, in memory; `get_map` keeps it in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar, cast, get_args, overload

from xtok._lib.io import cache_folder, locked
from xtok._lib.progress import Note, Progress, TextProgress, silent, silent_note, silent_texts
from xtok._lib.shards import Paths, source_of
from xtok.building.counted import counted_map, synthetic_base, synthetic_map, wanted_by
from xtok.building.counting.pair_text import PairText, TextLike, counts_of
from xtok.building.counting.texts import find_texts
from xtok.building.events import events_of_pair
from xtok.building.exact_rows import with_exact
from xtok.building.match_options import options_after
from xtok.building.matches import check_ignored, find_matches
from xtok.building.multitoken import spelled_map
from xtok.building.sort_cut import cut_rows
from xtok.config import WAIT, BuildConfig, EventLoss, Loss, with_hyphens
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.binding import at_map_widths, bind_map
from xtok.maps.events import EventMap
from xtok.maps.map_like import AnyMap, MapLike, as_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.recipe import difference, difference_of_sides, recipe_of
from xtok.maps.records import Recipe
from xtok.maps.spellings import SpellingMap
from xtok.maps.stage_reports import report_of_pair
from xtok.tokenizers import ModelLike
from xtok.tokenizers import pair as pair_of
from xtok.tokenizers.pairs import Pair

M = TypeVar("M", bound=mapfile.StoredMap)


def build(
    student_model: ModelLike,
    teacher_model: ModelLike,
    config: BuildConfig | None = None,
    *,
    for_loss: Loss | None = None,
    texts: TextLike = (),
    field: str = "text",
    initial: MapLike | None = None,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> ProjectionMap:
    """Build a map from two tokenizers: `multitoken`, `reapply_exact`, `sort_cut`.

    It is the map that the three commands with files in between make, and carries its `recipe`.
    With texts, rows are counted on them and smoothed towards a map counted on synthetic text; there
    are no scale slots.

    >>> xtok.build("bytes", "bytes")
    ProjectionMap(bytes → bytes, 256 × 256, nnz=256)

    Args:
        student_model: the model of the rows: a repo id, folder or file as `load_tokenizer` takes
            it, or a loaded tokenizer (to give a width, revision or pattern).
        teacher_model: the model of the columns.
        config: the options; the defaults if None.
        for_loss: take the options that suit a loss, instead of `config`.
        texts: a path or glob, or several, of plain text, JSON lines or Parquet, gzip and zstd
            included; or what was counted on them, as `building.counted.wanted_by` asks for it.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        initial: with texts, a map of this pair to smooth towards instead.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
        XtokError: if a text cannot be read, there is nothing to count in it, or `initial` is of
            other tokenizers.
        ValueError: for `initial` without texts, both a config and a loss, or counts for other
            options.
    """
    config = _config_of(config, for_loss)
    earlier = None if initial is None else as_map(initial)
    return map_of_pair(
        _pair_of(student_model, teacher_model, earlier), config, texts=texts, field=field,
        initial=earlier, progress=progress, text_progress=text_progress,
    )  # fmt: skip


def map_of_pair(
    pair: Pair,
    config: BuildConfig | None = None,
    *,
    texts: TextLike = (),
    field: str = "text",
    initial: ProjectionMap | None = None,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> ProjectionMap:
    """Build the map of a pair that is made already, with its tokenizers; see `build`."""
    config = BuildConfig.or_default(config)
    if initial is not None and not texts:
        raise ValueError("initial needs texts; multitoken extends a map")
    if config.target != "start" and not (texts or config.weights == "synthetic"):
        raise ValueError(f"target {config.target!r} needs weights 'synthetic', or texts")
    config = config.for_text() if texts else config
    check_ignored(pair, config)
    if texts:
        base = None if initial is None else bind_map(pair, initial)
        text = counts_of(pair, texts, wanted_by(config), field=field, progress=text_progress)
        made = _on_text(pair, config, text, base, progress)
        recipe = recipe_of(config, text.sources, text.field, initial)
    else:
        made = _of_tokens(pair, config, progress)
        recipe = recipe_of(config)
    report = report_of_pair(
        "build", pair, made.map, config.multitoken,
        notes=made.notes, failures=made.failures, counts=made.counts,
    )  # fmt: skip
    return replace(made.map, reports=(report,), recipe=recipe)


class _Made(NamedTuple):
    """A map and what is to say of how it was made."""

    map: ProjectionMap
    failures: Sequence[str] = ()
    notes: Sequence[str] = ()
    counts: Mapping[str, float] = MappingProxyType({})


def _of_tokens(pair: Pair, config: BuildConfig, progress: Progress) -> _Made:
    """Make a map of two vocabularies: what matches, then the rows that are left; and cut it."""
    matches = find_matches(pair, config)
    only = ~matches.is_exact if config.exact_match else None
    if config.weights == "synthetic":
        made, failures = synthetic_map(pair, config, matches, only=only, progress=progress)
    else:
        options = config.multitoken
        made, failures = spelled_map(pair, options, matches, only=only, progress=progress)
    if config.exact_match:
        made = with_exact(made, matches, config)
    made, counts = cut_rows(made, config.sort_cut)
    return _Made(made, failures, counts=counts)


def _on_text(
    pair: Pair,
    config: BuildConfig,
    text: PairText,
    base: ProjectionMap | None,
    progress: Progress,
) -> _Made:
    """Make a map of what was counted on a text, smoothed towards another map."""
    options = config.multitoken if base is None else options_after(base, config)
    matches = find_matches(pair, options)
    failures: Sequence[str] = ()
    if base is None:
        base, failures = synthetic_base(pair, config, matches, progress)
    made, notes = counted_map(text, base, config, options)
    if config.exact_match:
        made = with_exact(made, matches, options)
    return _Made(made, failures, notes)


def _pair_of(
    student_model: ModelLike, teacher_model: ModelLike, initial: ProjectionMap | None
) -> Pair:
    pair = pair_of(student_model, teacher_model)
    return pair if initial is None else at_map_widths(pair, initial)


def _config_of(config: BuildConfig | None, loss: Loss | None) -> BuildConfig:
    if config is not None and loss is not None:
        raise ValueError("give config or for_loss, not both: BuildConfig.for_loss takes options")
    return BuildConfig.or_default(config) if loss is None else BuildConfig.for_loss(loss)


@overload
def get_map(
    student_model: ModelLike,
    teacher_model: ModelLike,
    *,
    path: str | PathLike[str] | None = None,
    for_loss: Literal["event-kl"],
    timeout: float = WAIT,
    progress: Progress = silent,
    note: Note = silent_note,
) -> EventMap: ...


@overload
def get_map(
    student_model: ModelLike,
    teacher_model: ModelLike,
    *,
    path: str | PathLike[str] | None = None,
    for_loss: Literal["csd"],
    timeout: float = WAIT,
    progress: Progress = silent,
    note: Note = silent_note,
) -> SpellingMap: ...


@overload
def get_map(
    student_model: ModelLike,
    teacher_model: ModelLike,
    config: BuildConfig | None = None,
    *,
    path: str | PathLike[str] | None = None,
    for_loss: Loss | None = None,
    texts: Paths = (),
    field: str = "text",
    initial: MapLike | None = None,
    timeout: float = WAIT,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
    note: Note = silent_note,
) -> ProjectionMap: ...


def get_map(
    student_model: ModelLike,
    teacher_model: ModelLike,
    config: BuildConfig | None = None,
    *,
    path: str | PathLike[str] | None = None,
    for_loss: Loss | EventLoss | None = None,
    texts: Paths = (),
    field: str = "text",
    initial: MapLike | None = None,
    timeout: float = WAIT,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
    note: Note = silent_note,
) -> AnyMap:
    """Return the map in a file if it is the one that `build` makes; else build it and write it.

    For `event-kl` and `csd` it is the one that `events` makes.

    Any number of processes may call this at once, on any hosts that share the folder: one builds,
    the others wait for its file. If it dies, the next one builds. Where the file system has no
    locks, each of them builds the same file.

    Args:
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns.
        config: the options; the defaults if None.
        path: the map's file; another map in it is replaced. By default it is in xtok's cache
            folder, under a digest of both tokenizers, the options and the texts.
        for_loss: take the options that suit a loss, instead of `config`; or `event-kl` or `csd`,
            which take neither a config nor texts.
        texts: text to count on, as `build` takes it.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        initial: with texts, a map of this pair to smooth towards.
        timeout: seconds to wait for another process; after that, this one builds the map itself.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.
        note: called with a sentence when the file is replaced, and when this process waits.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
        XtokError: if the file cannot be written, or a text cannot be read.
        ValueError: for both a config and a loss, or a timeout that is not a number of seconds.
    """
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout is {timeout}, and must be a number of seconds")
    if (loss := with_hyphens(for_loss)) in get_args(EventLoss):
        if config is not None or texts or initial is not None:
            raise ValueError(f"{loss} takes no config, texts or initial map")
        pair = pair_of(student_model, teacher_model)
        target = _cached(pair, {"for": loss}) if path is None else Path(path)
        return kept_events(pair, loss, target, timeout=timeout, progress=progress, note=note)
    config = _config_of(config, cast(Loss | None, for_loss))
    earlier = None if initial is None else as_map(initial)
    pair = _pair_of(student_model, teacher_model, earlier)
    recipe = asked_for(config, texts, field, earlier)
    target = _cached(pair, recipe) if path is None else Path(path)

    def make() -> ProjectionMap:
        projection = map_of_pair(
            pair, config, texts=texts, field=field, initial=earlier, progress=progress,
            text_progress=text_progress,
        )  # fmt: skip
        projection.save(target)
        return projection

    differs = partial(difference, pair=pair, recipe=recipe)
    return load_or_build(ProjectionMap, target, differs, make, timeout=timeout, note=note)


def kept_events(
    pair: Pair,
    for_loss: EventLoss,
    path: Path,
    *,
    timeout: float = WAIT,
    progress: Progress = silent,
    note: Note = silent_note,
) -> EventMap | SpellingMap:
    """Return what `events` makes of a pair, from the file if it has it; else make and write it."""

    def make() -> EventMap | SpellingMap:
        made = events_of_pair(pair, for_loss, progress)
        made.save(path)
        return made

    kind: type[EventMap | SpellingMap] = SpellingMap if for_loss == "csd" else EventMap
    differs = partial(difference_of_sides, pair=pair)
    return load_or_build(kind, path, differs, make, timeout=timeout, note=note)


def asked_for(
    config: BuildConfig, texts: Paths, field: str, initial: ProjectionMap | None
) -> Recipe:
    """Return the recipe of the map that `build` would make now; it reads the texts' bytes.

    Raises:
        XtokError: if a text cannot be read.
    """
    sources = map(source_of, find_texts(texts))
    return recipe_of(config, sources, field, initial)


def _cached(pair: Pair, recipe: Recipe) -> Path:
    """Return where a map is kept that is asked for without a path."""
    definitions = [side.definition_sha256 for side in pair.sides]
    key = [definitions, pair.shape, recipe]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "maps" / f"{digest[:32]}.safetensors"


def load_or_build(
    kind: type[M],
    path: Path,
    differs: Callable[[M], str | None],
    make: Callable[[], M],
    *,
    timeout: float = WAIT,
    note: Note = silent_note,
) -> M:
    """Return the map in a file if it does not differ; else one process at a time makes it.

    A map that was kept has no reports.
    """
    replaced: str | None = None

    def kept() -> M | None:
        nonlocal replaced
        if not path.exists():
            return None
        try:
            any_map = kind.load(path)
        except XtokError as error:
            replaced = error.message
            return None
        replaced = differs(any_map)
        return any_map if replaced is None else None

    any_map = kept()
    if any_map is None:
        mapfile.check_output(path, mapfile.SUFFIXES[: 1 if kind is EventMap else 2])
        with locked(path, timeout=timeout, note=note):
            any_map = kept()  # another process may have made it meanwhile
            if any_map is None:
                if replaced is not None:
                    note(f"{path} exists, and is replaced: {replaced}")
                return make()
    note(f"{path} exists, and is kept")
    return any_map
