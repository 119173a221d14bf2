"""Open, read and validate caches of predictions in all formats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.io import check_output
from xtok._lib.opening import need, reading
from xtok._lib.parquet import ParquetTable
from xtok._lib.shards import Paths, Shard, find_files, shards
from xtok.config import CacheFormat, CacheKind, ProjectConfig
from xtok.errors import OutputError
from xtok.predictions.checked import exceeds
from xtok.predictions.topk import masses, segment_ids
from xtok.teachers.formats import axolotl, distillkit, neutral, vllm
from xtok.teachers.formats.checks import check_predictions
from xtok.teachers.formats.columns import StudentSide
from xtok.teachers.formats.documents import PROJECTED, Documents, cache_error
from xtok.teachers.formats.responses import FORMATS, detect_responses, read_responses
from xtok.tokenizers.table import Vocabulary

CANDIDATES_PER_BLOCK = 1 << 20
"""Approximate number of candidates in memory at a time (8 MB)."""

_COLUMNS: Mapping[CacheKind, Sequence[tuple[str, ...]]] = {
    "neutral": [neutral.COLUMNS],
    "distillkit": distillkit.COLUMNS,
}
"""For each Parquet format, the sets of columns that identify the format."""

_FOOTER = {
    "format_version": (str(neutral.FORMAT_VERSION),),
    "log_base": ("e",),
    "normalized": ("false", "topk"),
    "temperature": ("1", "1.0"),
}
"""Supported values for optional keys of the footer."""

_FOOTER_HINT = "correct or remove the footer"

_FIRST_ROWS_HINT = "move this row to the start, or declare normalized=false in the footer"

_CACHES_HINT = (
    "pass files with top-k log-probabilities (Parquet, or responses of a server as JSON lines), or "
    "a quoted glob such as 'cache/*.parquet'"
)


def find_caches(
    teacher_topk: Paths, output: str | Path, config: ProjectConfig
) -> tuple[list[Path], Path]:
    """Return the paths of the teacher's caches and of the output."""
    target = check_output(output, (".jsonl" if config.to == "vllm" else ".parquet",))
    paths = find_files(teacher_topk, _CACHES_HINT)
    for path in paths:
        if target.exists() and path.samefile(target):
            raise OutputError(f"the output {target} is an input", hint="choose a different path")
    need("pyarrow", target)  # folder for the parts
    return paths, target


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A file of stored predictions, with its metadata."""

    path: Path
    kind: CacheKind
    footer: Mapping[str, Any] = field(default_factory=dict)
    config: distillkit.Compression | None = None
    # result of `is_renormalized` for the first rows; False if the footer declares `normalized`
    looks_renormalized: bool = False

    @property
    def renormalized(self) -> bool:
        """Whether the candidates were renormalized to sum to 1. If so, the rest is unknown."""
        return self.looks_renormalized or self.footer.get("normalized") == "topk"

    @property
    def is_projected(self) -> bool:
        """Whether `project` wrote the cache."""
        return bool(self.footer.get("source") == PROJECTED)

    @property
    def files(self) -> list[Path]:
        """The cache file, and its compression config if the config exists."""
        return [self.path] + [self.path.with_name(distillkit.CONFIG)] * (self.config is not None)

    @functools.cached_property
    def shards(self) -> list[Shard]:
        """The shards of the file: row groups or ranges of lines."""
        return shards(self.path, "parquet" if self.kind in _COLUMNS else "jsonl")

    def check(self, documents: Documents, vocabulary: Vocabulary) -> Documents:
        """Validate documents of this cache, and compare the documents with the cache's metadata."""
        rows = check_predictions(
            documents,
            vocabulary,
            renormalized=self.renormalized,
            is_response=self.kind in ("vllm", "sglang"),
            is_projected=self.is_projected,
        )
        topk, counts = rows.topk, np.diff(rows.topk.starts)
        if (k := self._number("k")) is not None:
            _require(rows, counts > k, "a row has {} candidates", counts, f"the footer has k={k}")
        largest = topk.token_ids.copy()
        np.maximum.at(largest, segment_ids(topk.starts), topk.ids)
        widths = {"the footer has vocab_size": self._number("vocab_size")}
        if self.config is not None:
            widths[f"{distillkit.CONFIG} has d"] = self.config.d
        size = vocabulary.tokenizer_vocab_size or 0
        for name, width in widths.items():
            if width is None:
                continue
            _require(rows, largest >= width, "it has the id {}", largest, f"{name}={width}")
            # If a vocabulary has gaps, DistillKit writes the largest id instead of the width.
            if width < size - 1:
                problem = f"{name}={width}, but {vocabulary.model_id} has {size} tokens"
                raise cache_error(self.path, problem, "pass the model that made the ids")
        if self.looks_renormalized or (self.renormalized and not self.is_projected):
            sums, problem = masses(topk), "its probabilities sum to {:.4g}"
            is_wrong = topk.valid & exceeds(np.abs(sums - 1), 0)
            reason, hint = "the footer has normalized=topk", _FOOTER_HINT
            if self.looks_renormalized:
                reason, hint = "the first rows look renormalized", _FIRST_ROWS_HINT
            _require(rows, is_wrong, problem, sums, reason, hint)
        return rows

    def _number(self, key: str) -> int | None:
        value = self.footer.get(key)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal()):
            problem = f"its footer has {key}={value}, expected a number"
            raise cache_error(self.path, problem, _FOOTER_HINT)
        return int(value)


def _require(
    documents: Documents, wrong: NDArray[np.bool_], problem: str, values: Any, metadata: str,
    hint: str = _FOOTER_HINT,
) -> None:  # fmt: skip
    if wrong.any():
        index = int(np.argmax(wrong))
        problem = f"{problem.format(values[index])}, but {metadata}"
        raise cache_error(documents.location(index), problem, hint)


def open_cache(path: Path, kind: CacheKind | None = None) -> Cache:
    """Open a cache. If `kind` is None, the format is detected from the contents.

    Raises:
        XtokError: if the file is unreadable, has no known format, or declares an unsupported
            convention, logarithm, temperature or version.
    """
    with reading(path, "the cache"):
        with path.open("rb") as raw:
            is_parquet = raw.read(4) == b"PAR1"
        if kind and is_parquet != (kind in _COLUMNS):
            form = "Parquet" if is_parquet else "not Parquet"
            raise cache_error(path, f"the file is {form}, so it is not a {kind} cache", FORMATS)
        if not is_parquet:
            detected, footer = detect_responses(path)
            return Cache(path=path, kind=kind or detected, footer=footer)
        schema = ParquetTable(path).schema
        kind = _detect_columns(path, schema.names, kind)
        footer = {
            key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for key, value in (schema.metadata or {}).items()
        }
    _check_footer(path, kind, footer)
    config = distillkit.read_compression(path, schema.names) if kind == "distillkit" else None
    return Cache(path=path, kind=kind, footer=footer, config=config)


def _check_footer(path: Path, kind: CacheKind, footer: Mapping[str, str]) -> None:
    expected = {**_FOOTER, "convention": ("T" if kind == "neutral" else "N",)}
    for key, values in expected.items():
        if footer.get(key, values[0]) not in values:
            problem = f"its footer has {key}={footer[key]}, expected {' or '.join(values)}"
            raise cache_error(path, problem, "write the cache with this version of xtok")


def _detect_columns(path: Path, names: Sequence[str], kind: CacheKind | None) -> CacheKind:
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise cache_error(path, f"two columns have the name {twice}")
    for candidate in [kind] if kind else _COLUMNS:
        if any({*columns} <= {*names} for columns in _COLUMNS[candidate]):
            return candidate
    logits = "; packed logits are not supported" if "packed_indices" in names else ""
    problem = f"the format is unknown; the columns are: {', '.join(names)}{logits}"
    raise cache_error(path, problem, FORMATS)


def read_cache(
    cache: Cache, shard: Shard, candidates: int = CANDIDATES_PER_BLOCK
) -> Iterator[tuple[Documents, int]]:
    """Read a shard of a cache in blocks, without validation.

    The division into blocks depends only on the file and on `candidates`.

    Yields:
        blocks with about `candidates` candidates, and their approximate sizes on disk in bytes.

    Raises:
        XtokError: if the file is damaged, or does not match its format.
    """
    with reading(cache.path, "the cache"):
        if shard.format != "parquet":
            projected = cache.is_projected
            yield from read_responses(shard, cache.kind, candidates, is_projected=projected)
            return
        table = ParquetTable(shard.path)
        for group in range(table.num_row_groups)[shard.start : shard.stop]:
            for locations, batch in table.batches([group], max_values=candidates):
                if cache.kind == "neutral":
                    rows = neutral.read(batch, locations)
                else:
                    rows = distillkit.read(batch, locations, cache.config, cache.is_projected)
                yield rows, shard.size * len(batch) // max(1, table.num_rows(group))


WRITERS: Mapping[CacheFormat, Callable[[Documents, StudentSide], Any]] = {
    "axolotl": axolotl.table,
    "distillkit": distillkit.table,
    "vllm": lambda documents, target: vllm.lines(documents, target.model),
}
"""Functions that convert documents to a table or to lines, by output format."""
