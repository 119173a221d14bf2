"""Caches of predictions as files: which format one is of, and what is read of it."""

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
from xtok._lib.parquet import MAX_PAGE_BYTES, ParquetTable
from xtok._lib.shards import Paths, Shard, find_files, shards
from xtok.config import CacheFormat, CacheKind, ProjectConfig
from xtok.errors import OutputError
from xtok.predictions.topk import masses, rows_of
from xtok.teachers.formats import axolotl, distillkit, neutral, vllm
from xtok.teachers.formats.answers import FORMATS, kind_of_answers, read_answers
from xtok.teachers.formats.checks import check_predictions
from xtok.teachers.formats.columns import Target
from xtok.teachers.formats.documents import AGAIN_HINT, PROJECTED, Documents, cache_error
from xtok.tokenizers.table import Vocabulary

CANDIDATES_PER_BLOCK = 1 << 20
"""Candidates of the rows that are worked on at a time, about: 8 MB of them."""

_COLUMNS: Mapping[CacheKind, Sequence[tuple[str, ...]]] = {
    "neutral": [neutral.COLUMNS],
    "distillkit": distillkit.COLUMNS,
}
"""The columns that tell a format of Parquet, any one of the sets."""

_FOOTER = {
    "format_version": (str(neutral.FORMAT_VERSION),),
    "log_base": ("e",),
    "normalized": ("false", "topk"),
}
"""What a footer may say, if it does."""

_FOOTER_HINT = "correct the footer, or remove it"

_CACHES_HINT = (
    "give files of top-k log-probabilities (Parquet, or a server's answers as JSON lines), or a "
    "glob in quotes: 'cache/*.parquet'"
)


def find_caches(
    teacher_topk: Paths, output: str | Path, config: ProjectConfig
) -> tuple[list[Path], Path]:
    """Return the paths of the teacher's caches and of the output, before any work.

    Raises:
        XtokError: if there is no such file, the output is one of them or cannot be written, or
            pyarrow is not installed.
    """
    target = check_output(output, (".jsonl" if config.to == "vllm" else ".parquet",))
    paths = find_files(teacher_topk, _CACHES_HINT)
    for path in paths:
        if target.exists() and path.samefile(target):
            raise OutputError(f"the output {target} is an input", hint="give another path")
    need("pyarrow", target)  # the parts are Arrow's, whatever goes in and comes out
    return paths, target


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A file of stored predictions, and what it says of itself."""

    path: Path
    kind: CacheKind
    about: Mapping[str, Any] = field(default_factory=dict)  # the footer
    config: distillkit.Compression | None = None  # DistillKit's
    looks_renormalized: bool = False  # by its first rows, where the footer does not say

    @property
    def renormalized(self) -> bool:
        """Whether probabilities were made to sum to 1 over the candidates: the rest is unknown."""
        return self.looks_renormalized or self.about.get("normalized") == "topk"

    @property
    def is_projected(self) -> bool:
        """Whether `project` wrote it."""
        return bool(self.about.get("source") == PROJECTED)

    @property
    def files(self) -> list[Path]:
        """All files that its predictions depend on."""
        config = [self.path.with_name(distillkit.CONFIG)] * (self.config is not None)
        return [self.path, *config]

    @functools.cached_property
    def shards(self) -> list[Shard]:
        """Its shards: row groups, or ranges of lines, whatever its name ends in."""
        is_parquet = self.kind in _COLUMNS
        return shards(self.path, "parquet" if is_parquet else "jsonl")

    def check(self, documents: Documents, vocabulary: Vocabulary) -> Documents:
        """Check documents of it as predictions, and by what it says of itself.

        Of a vocabulary with gaps, DistillKit's d is the largest id.

        Raises:
            XtokError: as `check_predictions` does, and where the footer, or DistillKit's config,
                contradicts rows or vocabulary.
        """
        found = check_predictions(
            documents,
            vocabulary,
            renormalized=self.renormalized,
            is_answer=self.kind in ("vllm", "sglang"),
            is_projected=self.is_projected,
        )
        topk = found.topk
        size, counts = vocabulary.tokenizer_vocab_size or 0, np.diff(topk.starts)
        largest = topk.token_ids.copy()
        np.maximum.at(largest, rows_of(topk.starts), topk.ids)
        numbers = [("the footer", key, self.about.get(key)) for key in ("k", "vocab_size")]
        numbers += [(distillkit.CONFIG, "d", str(self.config.d))] if self.config is not None else []
        for where, key, number in numbers:
            if number is None:
                continue
            if not (number.isascii() and number.isdecimal()):
                problem = f"its footer has {key}={number}, which is not a number"
                raise cache_error(self.path, problem, _FOOTER_HINT)
            stated, is_width = int(number), key != "k"
            values = largest if is_width else counts
            wrong = values >= stated if is_width else values > stated
            what = "it has the id {}" if is_width else "a row has {} candidates"
            _require(found, wrong, what, values, f"{where} has {key}={stated}")
            if is_width and stated < size - 1:
                problem = f"{where} has {key}={stated}, and {vocabulary.model_id} has {size} tokens"
                raise cache_error(self.path, problem, "give the model that made these ids")
        if self.about.get("normalized") == "topk" and not self.is_projected:
            sums, stated_sums = masses(topk), "the footer has normalized=topk"
            wrong, what = topk.valid & (np.abs(sums - 1) > 0.01), "its probabilities sum to {:.4g}"
            _require(found, wrong, what, sums, stated_sums)
        return found


def _require(
    documents: Documents, wrong: NDArray[np.bool_], what: str, values: Any, stated: str
) -> None:
    """Raise an error where rows are not what a file says."""
    if wrong.any():
        index = int(np.argmax(wrong))
        problem = f"{what.format(values[index])}, and {stated}"
        raise cache_error(documents.place(index), problem, _FOOTER_HINT)


def open_cache(path: Path, kind: CacheKind | None = None) -> Cache:
    """Tell the format of a file from its contents, if it is not given, and read what it says.

    Raises:
        XtokError: if it cannot be read, is of no known format, or says that it holds what is not
            read: another base of the logarithms, rows of the next token, a newer version.
    """
    with reading(path, "the cache"):
        with path.open("rb") as raw:
            is_parquet = raw.read(4) == b"PAR1"
        if kind and is_parquet != (kind in _COLUMNS):
            what = "is Parquet" if is_parquet else "is not Parquet"
            raise cache_error(path, f"the file {what}, so it is not a {kind} cache", FORMATS)
        if not is_parquet:
            detected, about = kind_of_answers(path)
            return Cache(path=path, kind=kind or detected, about=about)
        schema = ParquetTable(path).schema
        kind = _kind_of_columns(path, schema.names, kind)
        about = {
            key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for key, value in (schema.metadata or {}).items()
            if key not in (b"ARROW:schema", b"pandas", b"huggingface")
        }
    known = {**_FOOTER, "convention": ("T" if kind == "neutral" else "N",)}
    for key, values in known.items():
        if about.get(key, values[0]) not in values:
            problem = f"its footer has {key}={about[key]}, and {' or '.join(values)} is read"
            raise cache_error(path, problem, "write it as this version of xtok does")
    temperature = about.get("temperature", "1")
    try:
        is_one = float(temperature) == 1
    except ValueError:
        is_one = False
    if not is_one:
        problem = f"its footer has temperature={temperature}, and only 1 is read"
        raise cache_error(path, problem, "store log-probabilities at temperature 1")
    config = distillkit.compression_of(path, schema.names) if kind == "distillkit" else None
    return Cache(path=path, kind=kind, about=about, config=config)


def _kind_of_columns(path: Path, names: Sequence[str], kind: CacheKind | None) -> CacheKind:
    """Tell a format of Parquet from the names of its columns."""
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise cache_error(path, f"two of its columns have the name {twice}", AGAIN_HINT)
    for known in [kind] if kind else _COLUMNS:
        if any({*columns} <= {*names} for columns in _COLUMNS[known]):
            return known
    logits = "; its logits tell no rest" if "packed_indices" in names else ""
    problem = f"not a cache of a known format; its columns are: {', '.join(names)}{logits}"
    raise cache_error(path, problem, FORMATS)


def read_cache(
    cache: Cache, shard: Shard, candidates: int = CANDIDATES_PER_BLOCK
) -> Iterator[tuple[Documents, int]]:
    """Read a shard of a cache, rows of about so many candidates at a time; nothing is checked.

    The cut depends on the file alone.

    Yields:
        rows, and the bytes on disk that they took, about.

    Raises:
        XtokError: if the file is damaged, or not what its format demands.
    """
    with reading(cache.path, "the cache"):
        if shard.format != "parquet":
            yield from read_answers(shard, cache.kind, candidates)
            return
        table = ParquetTable(shard.path)
        stop = table.num_row_groups if shard.stop is None else shard.stop
        for group in range(shard.start, stop):
            first = sum(map(table.num_rows, range(group)))
            num_rows, values = table.num_rows(group), table.num_values(group)
            at_once = max(1, num_rows * candidates // max(1, values))
            for batch in table.batches([group], max_rows=at_once, max_bytes=MAX_PAGE_BYTES):
                places = [f"{shard.path}, row {first + i}" for i in range(len(batch))]
                if cache.kind == "neutral":
                    rows = neutral.read(batch, places)
                else:
                    of_ours = cache.is_projected
                    rows = distillkit.read(batch, places, cache.config, is_projected=of_ours)
                yield rows, shard.size * len(batch) // max(1, num_rows)
                first += len(batch)


WRITERS: Mapping[CacheFormat, Callable[[Documents, Target], Any]] = {
    "axolotl": axolotl.table,
    "distillkit": distillkit.table,
    "vllm": lambda documents, target: vllm.lines(documents, target.model),
}
"""What makes a table, or lines, of documents."""
