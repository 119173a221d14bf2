"""`get_map`: a map when it is needed, built once for all processes that ask for it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from xtok import __version__
from xtok.claims import once
from xtok.config import BuildConfig, Loss
from xtok.errors import OutputError, XtokError
from xtok.io import cache_folder, write
from xtok.maps import file as mapfile
from xtok.maps.names import name_of_map
from xtok.maps.projection_map import ProjectionMap, StageReport
from xtok.progress import Note, Progress, silent, silent_note
from xtok.stages.build import build
from xtok.stages.plans import empty_map
from xtok.tokenizers import Tokenizer, as_tokenizer

WAIT = 600.0
"""Seconds that a process waits for another one to build the map; a build takes a few."""


def get_map(
    student_model: str | PathLike[str] | Tokenizer,
    teacher_model: str | PathLike[str] | Tokenizer,
    config: BuildConfig | None = None,
    *,
    for_loss: Loss | None = None,
    cache_dir: str | PathLike[str] | None = None,
    timeout: float = WAIT,
    progress: Progress = silent,
    note: Note = silent_note,
) -> ProjectionMap:
    """Return the map that `build` makes, from the cache; if it is not there, build it once.

    Any number of processes on any number of hosts that share the folder may call this at once: one
    builds, the others wait for its file. The file is the same, byte for byte, as `build` writes.
    It is found by both tokenizers, the options and the version of xtok, and checked on each use; a
    damaged one is built again.

    Args:
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns, likewise.
        config: the options; the defaults if None.
        for_loss: the options that suit a loss, instead of `config`.
        cache_dir: the folder; `$XTOK_CACHE_DIR` or the user's cache folder if None.
        timeout: seconds to wait for another process that builds the map.
        progress: called for each pass over a vocabulary.
        note: called with a sentence when this process waits for another.

    Raises:
        TokenizerError: if a tokenizer cannot be found, read, or used byte for byte.
        XtokError: if the folder cannot be used, or another process takes longer than the timeout.
        ValueError: for both a config and a loss, or a timeout that is no number of seconds.
    """
    if config is not None and for_loss is not None:
        raise ValueError("give config or for_loss, not both: BuildConfig.for_loss takes options")
    if not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout is {timeout}, and must be a number of seconds")
    if config is None:
        config = BuildConfig() if for_loss is None else BuildConfig.for_loss(for_loss)
    cached = cached_map(as_tokenizer(student_model), as_tokenizer(teacher_model), config, cache_dir)
    return cached.get(timeout=timeout, progress=progress, note=note)


@dataclass(frozen=True, kw_only=True)
class CachedMap:
    """The map of two tokenizers, and its place in the cache.

    Attributes:
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        config: the options.
        path: the map's file. Beside it is a `.json` with its sha256, written last: without that
            the map does not count.
        about: what the map is of, for that `.json`.
    """

    student: Tokenizer
    teacher: Tokenizer
    config: BuildConfig
    path: Path
    about: dict[str, Any]

    def get(
        self, *, timeout: float = WAIT, progress: Progress = silent, note: Note = silent_note
    ) -> ProjectionMap:
        """Return the map; see `get_map`."""
        problems: list[str] = []

        def find() -> ProjectionMap | None:
            try:
                return self.load()
            except XtokError as error:
                problems[:] = [error.message]
                return None

        def make() -> ProjectionMap:
            projection = build(self.student, self.teacher, self.config, progress=progress)
            self.save(projection)
            notes = tuple(f"{problem}, and was built again" for problem in problems)
            built = StageReport("cache", {"map built for the cache": 1}, notes)
            return replace(projection, reports=(*projection.reports, built))

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return once(self.path, find, make, timeout=timeout, note=note)
        except (OSError, OutputError) as error:
            reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
            raise XtokError(
                f"the map cannot be kept in the cache {self.path.parent}: {reason}",
                hint="free some space there, or give a folder that can be written to with "
                "{option}, or in XTOK_CACHE_DIR",
                parameter="cache_dir",
            ) from error

    def load(self) -> ProjectionMap | None:
        """Return the map, with the reports of its build; None if there is none.

        Raises:
            XtokError: if it is damaged.
        """
        try:
            entry = json.loads(self._entry.read_bytes())
            contents = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        try:
            if hashlib.sha256(contents).hexdigest() != entry["sha256"]:
                raise self._damaged("its sha256 is another")
            reports = [
                StageReport(r["stage"], r["counts"], tuple(r["notes"]), tuple(r["failures"]))
                for r in entry["reports"]
            ]
        except (LookupError, TypeError) as error:
            raise self._damaged(f"its {self._entry.name} is not xtok's") from error
        projection = mapfile.load(self.path)
        found = StageReport("cache", {"map found in the cache": 1})
        return replace(projection, reports=(*reports, found))

    def save(self, projection: ProjectionMap) -> None:
        """Write a map, then what says that it is whole.

        Raises:
            OutputError: if that fails.
        """
        self._entry.unlink(missing_ok=True)
        projection.save(self.path)
        contents = self.path.read_bytes()
        entry = {
            **self.about,
            "sha256": hashlib.sha256(contents).hexdigest(),
            "reports": [asdict(report) for report in projection.reports],
        }
        write(self._entry, [json.dumps(entry).encode()])

    @property
    def _entry(self) -> Path:
        return self.path.with_suffix(".json")

    def _damaged(self, problem: object) -> XtokError:
        reason = getattr(problem, "strerror", None) or problem
        return XtokError(
            f"the cached map {self.path} is damaged ({reason})", hint=f"remove {self.path}"
        )


def cached_map(
    student: Tokenizer,
    teacher: Tokenizer,
    config: BuildConfig,
    cache_dir: str | PathLike[str] | None = None,
) -> CachedMap:
    """Return the place of a map in the cache.

    Its name is a digest of all that the file depends on: both vocabularies as the file has them,
    how both tokenizers spell, the options, and the version of xtok.
    """
    options = asdict(config)
    key = {
        "xtok_version": __version__,
        "options": options,
        "vocabularies": mapfile.sha256(empty_map(student, teacher, config)),
        "spelling": [_spelling_sha256(student), _spelling_sha256(teacher)],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    ids = student.vocabulary.model_id, teacher.vocabulary.model_id
    name = name_of_map(*ids, config).removesuffix(".safetensors")
    about = {"name": name, "student": ids[0], "teacher": ids[1], **key}
    folder = cache_folder() if cache_dir is None else Path(cache_dir)
    return CachedMap(
        student=student,
        teacher=teacher,
        config=config,
        path=folder / "maps" / f"{digest}.safetensors",
        about=about,
    )


_TOKENS_PER_TEXT = 64


def _spelling_sha256(tokenizer: Tokenizer) -> str:
    """Return a digest of how a tokenizer spells: tables may be equal and merges differ.

    What is spelled are its own tokens, one after another, in texts of 64.
    """
    tokens = [token for token in tokenizer.table.tokens() if token]
    texts = [
        b"".join(tokens[start : start + _TOKENS_PER_TEXT]).decode("utf-8", "ignore")
        for start in range(0, len(tokens), _TOKENS_PER_TEXT)
    ]
    digest = hashlib.sha256()
    for ids in tokenizer.library_arrays(texts):
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, "<i4").tobytes())
    return digest.hexdigest()
