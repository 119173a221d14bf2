"""The checkpoint of a projection: a part per shard of the caches, kept until the output is written.

A part is streams of Arrow, one for some rows each, whose columns may differ; the last has no rows,
and says what all of them hold. Behind them is a digest of the job, of the shard's number and of
all bytes: so a part of another job or shard is never taken, nor one that was cut short or damaged.
Parquet would not do: its columns are those of its first rows, and its footer has no checksum.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xtok import __version__
from xtok._lib.io import locked, opened_sealed, read_sealed, remove, write_sealed
from xtok._lib.opening import need
from xtok._lib.progress import Note
from xtok._lib.shards import Shard, source_of
from xtok.config import ProjectConfig
from xtok.conversation import find_template
from xtok.errors import OutputError, XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.recipe import differing
from xtok.maps.records import Recipe
from xtok.predictions.topk import TopK
from xtok.teachers.formats import neutral
from xtok.teachers.formats.caches import Cache, read_cache
from xtok.teachers.stored_texts import project_documents
from xtok.teachers.translator import Templates, Translator
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable

_TOTALS = b"xtok.totals"
_PLAN = "job.json"
_OURS = (r"job\.json", r"\d{6}\.part", r"\.(job\.json|\d{6}\.part)\.[0-9a-f]{12}\.tmp")
"""What a checkpoint's files are called: parts, what their job is, and both while written."""


@dataclass
class Totals:
    """What was read and projected; numbers that add up."""

    documents: int = 0
    teacher_tokens: int = 0
    positions: int = 0  # student tokens
    firsts: int = 0  # of them a text's first, which nothing predicts
    targets: int = 0  # of them with a prediction
    rests: int = 0  # predictions whose rest is known
    rest: float = 0.0  # their rests together
    bits: float = 0.0  # of the text, by the teacher
    num_bytes: int = 0  # of that text
    bounded: int = 0  # tokens of it that are not candidates, and so cost at least what is counted

    def add(self, other: Totals) -> None:
        """Add another's numbers to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, kw_only=True)
class ProjectJob:
    """What to project: the same job gives the same parts, wherever they are made."""

    recipe: Recipe  # all that the parts depend on; see `recipe_of_parts`
    shards: tuple[tuple[Cache, Shard], ...]  # each with the cache that it is of
    back_map: ProjectionMap
    config: ProjectConfig
    templates: Templates  # of both sides
    folder: Path  # of the parts

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the recipe."""
        return hashlib.sha256(_as_json(self.recipe)).hexdigest()

    @property
    def size(self) -> int:
        """The bytes that are read."""
        return sum(shard.size for _, shard in self.shards)

    def part(self, shard: int) -> tuple[Path, str]:
        """Return the path of a shard's part, and what it is about."""
        return self.folder / f"{shard:06}.part", f"{self.digest} {shard}\n"

    def absolute(self) -> ProjectJob:
        """Make all paths absolute: workers run in another folder."""
        shards = [
            (replace(cache, path=cache.path.absolute()), shard._replace(path=shard.path.absolute()))
            for cache, shard in self.shards
        ]
        return replace(self, shards=tuple(shards), folder=self.folder.absolute())


def recipe_of_parts(
    pair: Pair,
    inputs: Sequence[Cache],
    map_digest: str,
    config: ProjectConfig,
    templates: Templates,
) -> Recipe:
    """Return all that the parts of a job depend on, for JSON.

    Raises:
        XtokError: if a file or a template cannot be read.
    """
    files = dict.fromkeys(path for cache in inputs for path in cache.files)
    return {
        "version": __version__,
        "models": [tokenizer.definition_sha256 for tokenizer in pair.tokenizers],
        "files": [[*vars(source_of(path)).values()] for path in files],
        "map": map_digest,
        "options": [asdict(replace(config, to="neutral")), [c.renormalized for c in inputs]],
        "chat templates": [
            _templates(tokenizer, template)
            for tokenizer, template in zip(pair.tokenizers, templates, strict=True)
        ],
    }


def _templates(tokenizer: Tokenizer, template: str | Path | None) -> list[Any]:
    """Return what a side's conversations are rendered by."""
    names = dict(tokenizer.special_token_names)
    if template in (None, "default"):
        return [names, dict(tokenizer.chat_templates)]
    chosen = find_template(tokenizer, template)
    return [names, chosen if isinstance(chosen, str) else chosen.template]


def _as_json(recipe: Recipe) -> bytes:
    return json.dumps(recipe, indent=1, sort_keys=True).encode()


@contextmanager
def holding(job: ProjectJob, target: Path, note: Note) -> Iterator[None]:
    """Let one run at a time make the parts of an output; they are removed at its end.

    Those of a run that fails or dies stay.

    Raises:
        XtokError: if another run makes the same output, or parts of another job are there.
    """
    busy = OutputError(
        f"another run writes {target}", hint="wait until it has ended, or give another output"
    )
    with locked(target, timeout=0, note=note, busy=busy):
        plan = job.folder / _PLAN
        if kept := _kept_parts(job):
            made = json.loads(read_sealed(plan, _PLAN) or "null")
            if made is not None and (names := differing(made, job.recipe)):
                others = " and ".join(names)
                raise XtokError(
                    f"the checkpoint {job.folder} is of another run, of other {others}",
                    hint=f"delete its parts to start again: rm {job.folder}/*.part",
                )
            note(f"resuming from {kept:,} parts in {job.folder}")
        write_sealed(plan, [_as_json(job.recipe)], _PLAN)
        try:
            yield
        except BaseException as error:
            if not (kept := _kept_parts(job)):
                remove(job.folder, _OURS)
            elif isinstance(error, KeyboardInterrupt):
                note(f"{kept:,} parts are kept; run the same command again to resume")
            raise
        remove(job.folder, _OURS)


def _kept_parts(job: ProjectJob) -> int:
    return len([*job.folder.glob(f"{'[0-9]' * 6}.part")])


@dataclass(frozen=True)
class PartSummary:
    """What a part holds: the columns of all its tables together, and its totals."""

    schema: Any  # pyarrow's
    totals: Totals


def make_part(
    job: ProjectJob,
    shard: int,
    translator: Translator,
    advance: Callable[[int, int], object],
) -> PartSummary:
    """Make the part of a shard, unless it is there; `advance` takes bytes read and tokens made."""
    if (found := summary_of(job, shard)) is not None:
        advance(job.shards[shard][1].size, 0)
        return found
    arrow, teacher = need("pyarrow", job.folder), translator.teacher
    schema, totals = arrow.schema([]), Totals()

    def streams() -> Iterator[memoryview]:
        nonlocal schema
        cache, of_file = job.shards[shard]
        for given, consumed in read_cache(cache, of_file):
            rows = cache.check(given, teacher.vocabulary)
            made = project_documents(translator, rows, job.config.top_k)
            table = neutral.table(made)
            schema = one_schema([schema, table.schema])
            totals.add(_totals(rows.topk, made.topk, teacher.table))
            yield _streamed(table)
            advance(consumed, len(made.topk.token_ids))
        about = {_TOTALS: json.dumps(asdict(totals))}
        yield _streamed(schema.with_metadata(about).empty_table())

    path, about = job.part(shard)
    write_sealed(path, streams(), about)
    return PartSummary(schema, totals)


def summary_of(job: ProjectJob, shard: int) -> PartSummary | None:
    """Return the summary of a shard's part; None if it is not there, whole, and of this job."""
    last = deque(_streams(job, shard), maxlen=1)
    if not last:
        return None
    schema = last[0].schema
    return PartSummary(schema.remove_metadata(), Totals(**json.loads(schema.metadata[_TOTALS])))


def tables_of(job: ProjectJob, shard: int) -> Iterator[Any]:
    """Yield the tables of a shard's part, of a neutral cache.

    Raises:
        XtokError: if the part was changed after it was written.
    """
    streams = _streams(job, shard)
    before = next(streams, None)
    if before is None:
        raise XtokError(
            f"the part {job.part(shard)[0]} was changed after it was written",
            hint="run it again: this part is rebuilt, and the others are kept",
        )
    for table in streams:
        yield before
        before = table  # the last is the summary


def _streams(job: ProjectJob, shard: int) -> Iterator[Any]:
    """Yield the tables of a part, its summary last; none if it is not whole, and of this job."""
    arrow = need("pyarrow", "a part")
    with opened_sealed(*job.part(shard)) as file:
        while file is not None:
            yield (table := arrow.ipc.open_stream(file).read_all())
            if _TOTALS in (table.schema.metadata or {}):
                return


def _streamed(table: Any) -> memoryview:
    arrow = need("pyarrow", "a part")
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return memoryview(sink.getvalue())


def one_schema(schemas: Sequence[Any]) -> Any:
    """Return the schema of all rows: a column of one name is of one type."""
    arrow = need("pyarrow", Path("a part"))
    try:
        return arrow.unify_schemas(schemas)
    except arrow.ArrowException as error:
        raise XtokError(
            f"the files have columns of one name and other types: {error}",
            hint="project them one by one, or leave out the column",
        ) from error


def _totals(given: TopK, made: TopK, table: TokenTable) -> Totals:
    """Count predictions, and what the text costs by the teacher's: −log₂ of its own tokens.

    A token that is not a candidate has at most the rest.
    """
    lengths = table.lengths[given.token_ids]
    is_known = given.valid & (lengths > 0) & np.isfinite(given.realized_logprob)
    is_bounded = given.valid & (lengths > 0) & ~is_known & np.isfinite(given.rest_logprob)
    nats = given.realized_logprob[is_known].sum(dtype=np.float64)
    nats += given.rest_logprob[is_bounded].sum(dtype=np.float64)
    rests = np.exp(made.rest_logprob[made.valid], dtype=np.float64)
    starts = made.bounds[:-1][np.diff(made.bounds) > 0]
    return Totals(
        documents=len(given.bounds) - 1,
        teacher_tokens=len(given.token_ids),
        positions=len(made.token_ids),
        firsts=int((~made.valid[starts]).sum()),
        targets=int(made.valid.sum()),
        rests=int((~np.isnan(rests)).sum()),
        rest=float(np.nansum(rests)),
        bits=float(-nats / np.log(2)),
        num_bytes=int(lengths[is_known | is_bounded].sum()),
        bounded=int(is_bounded.sum()),
    )
