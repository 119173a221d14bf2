"""`build` builds a map in memory; `get_map` also stores the map in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

from xtok._lib.io import cache_folder, locked, other_file
from xtok._lib.progress import Note, Progress, silent, silent_note
from xtok._lib.shards import Paths, source_of
from xtok.building.counted import counted_map, synthetic_map
from xtok.building.counting.pair_text import CountPlan, PairText
from xtok.building.events import events
from xtok.building.exact import check_ignored, config_after, find_matches, with_exact
from xtok.building.multitoken import spelled_map
from xtok.building.sort_cut import cut_rows
from xtok.building.spellings import spellings
from xtok.config import DEFAULT_TIMEOUT, BuildConfig
from xtok.conversation.texts import find_texts
from xtok.errors import XtokError
from xtok.loss_names import BuildLoss, EventLoss, with_hyphens
from xtok.maps import file as mapfile
from xtok.maps.events import EventMap
from xtok.maps.map_arguments import AnyMap, MapLike, bind_map, name_notes
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import difference, make_recipe
from xtok.maps.records import Recipe, map_notes, require_complete, stage_report
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers import ModelLike, load_pair
from xtok.tokenizers.notes import undecodable_tokens
from xtok.tokenizers.pairs import Pair


def build(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    config: BuildConfig | None = None,
    *,
    for_loss: BuildLoss | None = None,
    texts: Paths = (),
    field: str = "text",
    initial: MapLike | None = None,
    progress: Progress = silent,
) -> ProjectionMap:
    """Build a projection map from two tokenizers.

    `build` runs the stages `multitoken`, `reapply_exact` and `sort_cut`. If `texts` is given,
    `build` counts the weights on the texts, and smooths the counts towards a map that was counted
    on synthetic text. The resulting map has no scale slots.

    >>> xtok.build("bytes", "bytes")
    ProjectionMap(bytes → bytes, 256 × 256, nnz=256)

    Args:
        student_model: the student (a repo id, folder, file or loaded tokenizer), or the pair.
        teacher_model: the teacher.
        config: the options.
        for_loss: use the options for this loss instead of `config`.
        texts: paths or globs of text files: plain text, JSON Lines or Parquet, optionally
            compressed with gzip or zstd.
        field: the field (JSON Lines) or column (Parquet) that contains the text.
        initial: a map of this pair. The counts of `texts` are smoothed towards this map.
            Token-matching options that have their default values in `config` are taken from this
            map.
        progress: a progress callback.

    Raises:
        TokenizerError: if a tokenizer is missing, or its tokens have no exact bytes.
        XtokError: if a text is unreadable or empty, or `initial` belongs to another pair.
    """
    config = _resolve_config(config, for_loss, texts, initial)
    pair = load_pair(student_model, teacher_model)
    result: ProjectionMap = _map_request(pair, config, texts, field, initial, progress).make()
    return result


class GetMapOptions(TypedDict, total=False):
    """Keyword options of `get_map`."""

    texts: Paths
    field: str
    initial: MapLike | None
    progress: Progress
    path: str | PathLike[str] | None
    rebuild: bool
    strict: bool
    timeout: float
    note: Note


@overload
def get_map(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    config: BuildConfig | None = None,
    *,
    for_loss: BuildLoss | None = None,
    **options: Unpack[GetMapOptions],
) -> ProjectionMap: ...


@overload
def get_map(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    *,
    for_loss: Literal["event-kl"],
    **options: Unpack[GetMapOptions],
) -> EventMap: ...


@overload
def get_map(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    *,
    for_loss: Literal["csd"],
    **options: Unpack[GetMapOptions],
) -> SpellingMap: ...


def get_map(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    config: BuildConfig | None = None,
    *,
    path: str | PathLike[str] | None = None,
    rebuild: bool = False,
    strict: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    note: Note = silent_note,
    **options: Any,
) -> AnyMap:
    """Load a map from its file. If the file does not contain this map, build and save the map.

    Several processes can call this function at the same time, even on different hosts that share
    the folder. One process builds the map, and the others wait. If the building process dies,
    another process builds the map.

    >>> xtok.get_map("bytes", "bytes", path="map.safetensors")
    ProjectionMap(bytes → bytes, 256 × 256, nnz=256)
    >>> xtok.get_map("bytes", "bytes", path="events.safetensors", for_loss="event-kl")
    EventMap(bytes → bytes, 256 and 256 tokens, 256 events)

    Args:
        student_model: see `build`.
        teacher_model: see `build`.
        config: see `build`.
        path: the map's file. A different map in this file is replaced. Default: a file in xtok's
            cache folder.
        rebuild: always build the map, and do not wait for other processes.
        strict: raise an error and save nothing if a token cannot be decoded or spelled. An existing
            map is built again for this check.
        timeout: seconds to wait for another process before building the map.
        note: called with a message if the file is kept or replaced, or if this process waits for
            another process.
        options: `for_loss`, `texts`, `field`, `initial` and `progress`; see `build`. `for_loss` can
            also be `event-kl` or `csd`.

    Returns:
        an `EventMap` for event KL, a `SpellingMap` for CSD, otherwise a `ProjectionMap`.
    """
    request = _request(student_model, teacher_model, config, **options)
    target = request.cache_path() if path is None else Path(path)
    if rebuild:
        mapfile.check_map_output(target, request.kind.SUFFIXES)
        return _save(request.make(), target, strict)
    existing, _ = request.find(target)
    if existing is None:
        mapfile.check_map_output(target, request.kind.SUFFIXES)
        with locked(target, timeout=timeout, note=note):
            existing, reason = request.find(target)  # another process may have saved the map
            if existing is None:
                if reason is not None:
                    note(f"{target} exists, and is replaced: {reason}")
                return _save(request.make(), target, strict)
    if strict:  # files contain no reports
        require_complete(request.make())
    note(f"{target} exists, and is kept")
    student, teacher = request.pair.sides  # use the model names of this call, not of the file
    return replace(existing, student=student, teacher=teacher)


def check_existing(path: Path, pair: Pair, **options: Any) -> None:
    """Raise an `OutputError` if the file exists and contains another map."""
    _, reason = _request(pair, None, **options).find(path)
    if reason is not None:
        raise other_file(path, reason)


@dataclass(frozen=True)
class _Request:
    pair: Pair
    kind: type[AnyMap]
    make: Callable[[], Any]  # a map of this kind
    recipe: Callable[[], Recipe | None]  # returns None for event maps and spelling maps

    def find(self, path: Path) -> tuple[AnyMap | None, str | None]:
        """Return the requested map from a file, or the reason why the file does not contain it."""
        if not path.is_file():  # reading a pipe would block
            return None, None
        try:
            existing = self.kind.load(path)
        except XtokError as error:
            return None, error.message
        reason = difference(existing, self.pair, self.recipe())
        return (None, reason) if reason else (existing, None)

    def cache_path(self) -> Path:
        definitions = [vocabulary.definition_sha256 for vocabulary in self.pair.sides]
        loss = {EventMap: "event-kl", SpellingMap: "csd"}.get(self.kind)
        key = [definitions, self.pair.shape, self.recipe() or {"for": loss}]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return cache_folder() / "maps" / f"{digest[:32]}.safetensors"


def _request(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None,
    config: BuildConfig | None = None,
    *,
    for_loss: BuildLoss | EventLoss | None = None,
    texts: Paths = (),
    field: str = "text",
    initial: MapLike | None = None,
    progress: Progress = silent,
) -> _Request:
    loss = with_hyphens(for_loss)
    if loss not in get_args(EventLoss):
        config = _resolve_config(config, loss, texts, initial)
        pair = load_pair(student_model, teacher_model)
        return _map_request(pair, config, texts, field, initial, progress)
    if config is not None or texts or initial is not None:
        raise ValueError(f"for_loss={loss!r} does not support 'config', 'texts' or 'initial'")
    kind, make = (SpellingMap, spellings) if loss == "csd" else (EventMap, events)
    pair = load_pair(student_model, teacher_model)
    return _Request(pair, kind, partial(make, pair, progress=progress), lambda: None)


# Workaround: Python's error for an unknown option contains this name, but users call `get_map`.
_request.__qualname__ = get_map.__name__


def _resolve_config(
    config: BuildConfig | None, loss: BuildLoss | None, texts: Paths, initial: MapLike | None
) -> BuildConfig:
    if config is not None and loss is not None:
        raise ValueError("pass 'config' or 'for_loss', not both; BuildConfig.for_loss takes both")
    config = BuildConfig.or_default(config) if loss is None else BuildConfig.for_loss(loss)
    if initial is not None and not texts:
        raise ValueError("'initial' requires 'texts'; use multitoken to extend a map")
    if config.target != "start" and not (texts or config.weights == "synthetic"):
        raise ValueError(f"target={config.target!r} requires weights='synthetic' or 'texts'")
    return config.for_text() if texts else config


def _map_request(
    pair: Pair,
    config: BuildConfig,
    texts: Paths,
    field: str,
    initial: MapLike | None,
    progress: Progress,
) -> _Request:
    earlier, base = None, None
    if initial is not None:
        earlier = ProjectionMap.of(initial)
        config = config_after(earlier, config)
        base, pair = bind_map(earlier, pair)
    recipe_for = partial(make_recipe, config, field=field, initial=earlier)

    def make() -> ProjectionMap:
        check_ignored(pair, config)
        text = None
        if texts:
            plan = CountPlan(target=config.target, hold_out=True)
            text = PairText.read(pair, texts, plan, field=field, progress=progress)
        projection, failures, more, counts = _build_map(pair, config, text, base, progress)
        notes = [*map_notes(pair, projection, config.ignored[0]), *name_notes(pair, earlier)]
        failures = [*undecodable_tokens(pair, config.ignored), *failures]
        report = stage_report("build", projection, [*notes, *more], failures, counts)
        recipe = recipe_for(text.sources if text else ())
        return replace(projection, reports=(report,), recipe=recipe)

    @cache  # computing the recipe reads all texts
    def recipe() -> Recipe:
        return recipe_for(map(source_of, find_texts(texts)))

    return _Request(pair, ProjectionMap, make, recipe)


def _build_map(
    pair: Pair,
    config: BuildConfig,
    text: PairText | None,
    base: ProjectionMap | None,
    progress: Progress,
) -> tuple[ProjectionMap, list[str], list[str], dict[str, float]]:
    """Return a map without a report, and the report's failures, notes and counts."""
    options = config.multitoken
    matches = find_matches(pair, options)
    # If a text is given, exact rows are counted too, because their counts affect the smoothing of
    # all rows.
    only = ~matches.is_exact if config.exact_match and text is None else None
    result, failures = base, list[str]()
    if result is None:
        if config.weights == "synthetic":
            result, failures = synthetic_map(pair, config, matches, only=only, progress=progress)
        else:
            result, failures = spelled_map(pair, options, matches, only=only, progress=progress)
    notes = list[str]()
    if text is not None:
        result, notes = counted_map(text, result, config, options)
    if config.exact_match:
        result = with_exact(result, matches, options)
    counts = dict[str, float]()
    if text is None:
        result, counts = cut_rows(result, config.top_k)
    return result, failures, notes, counts


def _save(any_map: AnyMap, path: Path, strict: bool) -> AnyMap:
    if strict:
        require_complete(any_map)
    any_map.save(path)
    return any_map
