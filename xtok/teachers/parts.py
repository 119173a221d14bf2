"""Write the parts of a projection: one file per shard, deleted when the output is complete.

A part contains a header, Arrow streams with rows, an empty stream with the totals in its metadata,
and a digest. The digest covers the job, the shard's number and all bytes, so a damaged part or a
part of another job is never used. Parts are not Parquet files, because a Parquet file has no
checksum, and later rows of a file cannot add columns.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from xtok import __version__
from xtok._lib.io import locked, opened_sealed, read_sealed, remove, write_sealed
from xtok._lib.opening import need
from xtok._lib.progress import Note
from xtok._lib.shards import Shard, source_of
from xtok._lib.version import installed_version
from xtok.config import ProjectConfig
from xtok.conversation.formats import FORMATS
from xtok.conversation.rendering import find_template
from xtok.errors import OutputError, XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import differing
from xtok.maps.records import Recipe
from xtok.predictions.topk import document_starts, segment_ids
from xtok.teachers.formats import neutral
from xtok.teachers.formats.caches import Cache, read_cache
from xtok.teachers.formats.documents import Documents
from xtok.teachers.stored_texts import project_documents
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable

_TOTALS = b"xtok.totals"
_PLAN = "job.json"
_PART = b"xtok part\n"
"""Header of a part. Files without this header are never deleted or replaced."""
_TEMPORARY = r"\.(job\.json|\d{6}\.part)\.[0-9a-f]{12}\.tmp"
_LIBRARIES = ("tokenizers", "transformers", "jinja2")


@dataclass
class Totals:
    """Statistics of the projected texts."""

    documents: int = 0
    teacher_tokens: int = 0
    student_tokens: int = 0
    first_tokens: int = 0  # number of texts without a prediction for the first student token
    targets: int = 0  # number of student tokens with a prediction
    rests: int = 0  # number of predictions with a known rest
    rest: float = 0.0  # sum of the known rests
    bits: float = 0.0  # number of bits that the teacher needs for the text
    num_bytes: int = 0  # number of bytes of the text that `bits` covers
    bounded: int = 0  # number of teacher tokens for which `bits` contains only a lower bound
    # number of documents with several turns in which all tokens are targets
    unmasked_chats: int = 0

    @classmethod
    def sum_of(cls, totals: Iterable[Totals]) -> Totals:
        """Add up the totals of several parts."""
        return cls(*map(sum, zip(*(astuple(total) for total in totals), strict=True)))


@dataclass(frozen=True, kw_only=True)
class ProjectJob:
    """The input of a projection. Equal jobs produce equal parts on all machines."""

    recipe: Recipe  # all data that determines the parts; see `parts_recipe`
    shards: tuple[tuple[Cache, Shard], ...]
    back_map: ProjectionMap
    config: ProjectConfig
    folder: Path  # folder of the parts

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the recipe."""
        return hashlib.sha256(_as_json(self.recipe)).hexdigest()

    @property
    def size(self) -> int:
        """The number of bytes to read."""
        return sum(shard.size for _, shard in self.shards)

    def part(self, shard: int) -> tuple[Path, str]:
        """Return the path of a shard's part, and the additional text that the digest covers."""
        return self.folder / f"{shard:06}.part", f"{self.digest} {shard}\n"

    def absolute(self) -> ProjectJob:
        """Make paths absolute and embed template files, because workers run in another folder."""
        shards = [
            (replace(cache, path=cache.path.absolute()), shard._replace(path=shard.path.absolute()))
            for cache, shard in self.shards
        ]
        templates = zip(self.config.templates, self.recipe["chat templates"], strict=True)
        student, teacher = (
            t if t in (None, "default", *FORMATS) else source for t, (_, source) in templates
        )
        config = replace(self.config, student_template=student, teacher_template=teacher)
        return replace(self, shards=tuple(shards), config=config, folder=self.folder.absolute())


def parts_recipe(
    pair: Pair, inputs: Sequence[Cache], map_digest: str, config: ProjectConfig
) -> Recipe:
    """Return all data that determine the bytes of a job's parts, as JSON values."""
    files = dict.fromkeys(path for cache in inputs for path in cache.files)
    options = asdict(replace(config, to="neutral", student_template=None, teacher_template=None))
    return {
        "version": __version__,
        "libraries": library_versions(),
        "models": [tokenizer.definition_sha256 for tokenizer in pair.tokenizers],
        "files": [[*vars(source_of(path)).values()] for path in files],
        "map": map_digest,
        "options": [options, [c.renormalized for c in inputs]],
        "chat templates": [
            _templates(tokenizer, template)
            for tokenizer, template in zip(pair.tokenizers, config.templates, strict=True)
        ],
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that affect token ids."""
    versions = {name: installed_version(name) for name in _LIBRARIES}
    return {name: number for name, number in versions.items() if number is not None}


def _templates(tokenizer: Tokenizer, template: str | Path | None) -> list[Any]:
    names = dict(tokenizer.special_token_names)
    if template in (None, "default"):
        return [names, dict(tokenizer.chat_templates)]
    chosen = find_template(tokenizer, template)
    return [names, getattr(chosen, "template", chosen)]


def _as_json(recipe: Recipe) -> bytes:
    return json.dumps(recipe, indent=1, sort_keys=True).encode()


@contextmanager
def holding(job: ProjectJob, target: Path, note: Note) -> Iterator[None]:
    """Lock an output while its parts are written, and delete the parts at the end.

    Raises:
        XtokError: if another run writes the same output, or the folder contains parts of a
            different job.
    """
    busy = OutputError(
        f"another run is writing {target}", hint="wait for the other run, or choose another output"
    )
    with locked(target, timeout=0, note=note, busy=busy):
        plan = job.folder / _PLAN
        earlier = _require_own_files(job)
        if num_kept := len(_parts_in(job.folder)):
            if earlier is not None and (names := differing(earlier, job.recipe)):
                raise XtokError(
                    f"the checkpoint {job.folder} belongs to another run, with different "
                    f"{' and '.join(names)}",
                    hint=f"delete its parts to start again: rm {job.folder}/*.part",
                )
            note(f"resuming from {num_kept:,} parts in {job.folder}")
        write_sealed(plan, [_as_json(job.recipe)], _PLAN)
        try:
            yield
        except BaseException as error:
            if not (num_kept := len(_parts_in(job.folder))):
                _remove(job.folder)
            elif isinstance(error, KeyboardInterrupt):
                note(f"{num_kept:,} parts are kept; run the same command again to resume")
            raise
        _remove(job.folder)


def _require_own_files(job: ProjectJob) -> Recipe | None:
    """Check that xtok wrote the existing files of a job. Return their recipe, if any."""
    plan = job.folder / _PLAN
    sealed = read_sealed(plan, _PLAN)
    own_files = {*_parts_in(job.folder), *([plan] if sealed else [])}
    for path in [plan, *(job.part(n)[0] for n in range(len(job.shards)))]:
        if path not in own_files and path.exists():
            hint = "move the file to a different folder, or choose a different output"
            raise OutputError(f"{path} already exists, and xtok did not write it", hint=hint)
    return json.loads(sealed) if sealed else None


def _parts_in(folder: Path) -> list[Path]:
    parts = []
    for path in folder.glob(f"{'[0-9]' * 6}.part"):
        with suppress(OSError), path.open("rb") as file:
            if file.read(len(_PART)) in (_PART, b""):  # a part can be empty after a system crash
                parts.append(path)
    return parts


def _remove(folder: Path) -> None:
    names = [_PLAN, *(path.name for path in _parts_in(folder))]
    remove(folder, [*map(re.escape, names), _TEMPORARY])


@dataclass(frozen=True)
class PartSummary:
    """The columns and the totals of a part."""

    schema: Any  # a pyarrow schema
    totals: Totals


def make_part(
    job: ProjectJob, shard: int, translator: Translator, advance: Callable[[int, int], object]
) -> PartSummary:
    """Write the part of a shard, and return the part's summary. An existing part is kept.

    `advance` is called with the number of bytes that were read, and the number of tokens that were
    written.
    """
    if (summary := read_summary(job, shard)) is not None:
        advance(job.shards[shard][1].size, 0)
        return summary
    arrow, teacher = need("pyarrow", job.folder), translator.teacher
    schema, totals = arrow.schema([]), Totals()

    def streams() -> Iterator[memoryview]:
        nonlocal schema, totals
        cache, file_shard = job.shards[shard]
        yield memoryview(_PART)
        for unchecked, consumed in read_cache(cache, file_shard):
            rows = cache.check(unchecked, teacher.vocabulary)
            projected = project_documents(translator, rows, job.config.top_k)
            table = neutral.table(projected)
            schema = one_schema([schema, table.schema])
            totals = Totals.sum_of([totals, _totals(rows, projected, teacher.table)])
            yield _stream(table)
            advance(consumed, len(projected.topk.token_ids))
        metadata = {_TOTALS: json.dumps(asdict(totals))}
        yield _stream(schema.with_metadata(metadata).empty_table())

    path, metadata = job.part(shard)
    write_sealed(path, streams(), metadata)
    return PartSummary(schema, totals)


def read_summary(job: ProjectJob, shard: int) -> PartSummary | None:
    """Return the summary of a shard's part, or None if there is no usable part."""
    last = deque(_streams(job, shard), maxlen=1)
    if not last:
        return None
    schema = last[0].schema
    return PartSummary(schema.remove_metadata(), Totals(**json.loads(schema.metadata[_TOTALS])))


def read_tables(job: ProjectJob, shard: int) -> Iterator[Any]:
    """Yield the tables of a shard's part, in the neutral format.

    Raises:
        XtokError: if the part's file was changed.
    """
    tables = _streams(job, shard)
    if (first := next(tables, None)) is None:
        hint = "run the command again to rebuild this part; the other parts are kept"
        raise XtokError(f"the part {job.part(shard)[0]} changed after it was written", hint=hint)
    yield from filter(len, chain([first], tables))  # the last stream contains only the totals


def _streams(job: ProjectJob, shard: int) -> Iterator[Any]:
    """Yield a part's tables, then an empty table with the totals in its metadata.

    If the part is missing or damaged, yield nothing.
    """
    arrow = need("pyarrow", "a part")
    with opened_sealed(*job.part(shard)) as file:
        if file is None:
            return
        file.seek(len(_PART))
        while True:
            yield (table := arrow.ipc.open_stream(file).read_all())
            if _TOTALS in (table.schema.metadata or {}):
                return


def _stream(table: Any) -> memoryview:
    arrow = need("pyarrow", "a part")
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return memoryview(sink.getvalue())


def one_schema(schemas: Sequence[Any]) -> Any:
    """Merge schemas into a schema with all columns."""
    arrow = need("pyarrow", Path("a part"))
    try:
        return arrow.unify_schemas(schemas)
    except arrow.ArrowException as error:
        problem = f"a column has different types in the files: {error}"
        hint = "project the files one at a time, or drop the column"
        raise XtokError(problem, hint=hint) from error


def _totals(rows: Documents, student_rows: Documents, table: TokenTable) -> Totals:
    """Count the predictions, and compute the bits that the teacher needs for the text.

    If the probability of a token is unknown, the rest of its row is used. The rest is at least this
    probability, so `bits` becomes a lower bound.
    """
    teacher, projected = rows.topk, student_rows.topk
    is_end = np.isin(teacher.token_ids, table.roles.get("turn_end", ())) & (rows.loss_mask is None)
    num_turns, excluded = (
        np.bincount(segment_ids(topk.bounds)[flags], minlength=len(topk.bounds) - 1)
        for topk, flags in ((teacher, is_end), (projected, ~student_rows.targets))
    )
    lengths = table.lengths[teacher.token_ids]
    is_text, own = teacher.valid & (lengths > 0), teacher.realized_logprob
    is_known = is_text & np.isfinite(own)
    is_bounded = is_text & ~is_known & np.isfinite(teacher.rest_logprob)
    nats = own[is_known].sum(dtype=np.float64)
    nats += teacher.rest_logprob[is_bounded].sum(dtype=np.float64)
    rests = np.exp(projected.rest_logprob[projected.valid], dtype=np.float64)
    return Totals(
        documents=len(teacher.bounds) - 1,
        teacher_tokens=len(teacher.token_ids),
        student_tokens=len(projected.token_ids),
        first_tokens=int((~projected.valid[document_starts(projected.bounds)]).sum()),
        targets=int(projected.valid.sum()),
        rests=int((~np.isnan(rests)).sum()),
        rest=float(np.nansum(rests)),
        bits=float(-nats / np.log(2)),
        num_bytes=int(lengths[is_known | is_bounded].sum()),
        bounded=int(is_bounded.sum()),
        unmasked_chats=int(((num_turns > 1) & (excluded == 0)).sum()),
    )
