"""The checkpoint of a projection: a part per shard of the caches, kept until the output is written.

A part is a list of records: some rows at a time as a stream of Arrow, and last a summary. Behind
each record is a seal: a digest of the job, of the shard's number and of all bytes so far. So a part
of another job or shard is never taken, nor one that was cut short or damaged; and what is read is
checked before it is used, in one pass.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from xtok import __version__
from xtok._lib.io import atomic_output, parents_of, write
from xtok._lib.opening import need
from xtok._lib.progress import Note
from xtok._lib.shards import Shard, source_of
from xtok.config import ProjectConfig
from xtok.conversation import find_template
from xtok.errors import OutputError, XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.teachers.formats import neutral
from xtok.teachers.formats.caches import Cache, read_cache
from xtok.teachers.formats.topk import Documents, TopK
from xtok.teachers.shared_text import Templates
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable

_TOTALS = b"xtok.totals"
_SEAL_BYTES = hashlib.sha256().digest_size
_HEAD_BYTES = 8


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

    identity: Mapping[str, Any]  # all that the parts depend on; see `identity_of`
    caches: tuple[Cache, ...]
    shards: tuple[tuple[int, Shard], ...]  # each with the number of its cache
    back_map: ProjectionMap
    config: ProjectConfig
    templates: Templates  # of both sides
    folder: Path  # of the parts

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the identity."""
        return hashlib.sha256(_as_json(self.identity)).hexdigest()

    def part(self, shard: int) -> Path:
        """Return the path of a shard's part."""
        return self.folder / f"{shard:06}.part"

    def absolute(self) -> ProjectJob:
        """Make all paths absolute: workers run in another folder."""
        return replace(
            self,
            caches=tuple(replace(cache, path=cache.path.absolute()) for cache in self.caches),
            shards=tuple((n, s._replace(path=s.path.absolute())) for n, s in self.shards),
            folder=self.folder.absolute(),
        )


def identity_of(
    pair: Pair,
    inputs: Sequence[Cache],
    map_digest: str,
    config: ProjectConfig,
    templates: Templates,
) -> dict[str, Any]:
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


def _as_json(identity: Mapping[str, Any]) -> bytes:
    return json.dumps(identity, indent=1, sort_keys=True).encode()


def kept_parts(target: Path) -> list[Path]:
    """Return the parts that are kept for an output."""
    return sorted(folder_of(target).glob("*.part"))


def folder_of(target: Path) -> Path:
    """Return where the parts of an output are kept: next to it."""
    return target.with_name(f"{target.name}.checkpoint")


@contextmanager
def holding(job: ProjectJob, target: Path, note: Note) -> Iterator[None]:
    """Let one run at a time make the parts of an output.

    The kernel frees the lock of a run that dies. What is done stays, unless there is nothing.

    Raises:
        XtokError: if another run makes the same output, or parts of another job are there.
    """
    from filelock import FileLock, Timeout

    plan, lock = job.folder / "job.json", FileLock(job.folder / "lock")
    with parents_of(plan):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise OutputError(
                f"another run writes {target}: it works in {job.folder}",
                hint="wait until it has ended, or give another output",
            ) from error
        except (OSError, NotImplementedError) as error:
            note(f"{job.folder} has no locks: let no other run write {target} ({error})")
        try:
            _begin(job, plan, note)
            yield
        except BaseException:
            if not kept_parts(target):
                plan.unlink(missing_ok=True)
            Path(lock.lock_file).unlink(missing_ok=True)
            raise
        else:
            _discard(job.folder)
        finally:
            lock.release()


def _begin(job: ProjectJob, plan: Path, note: Note) -> None:
    """Write what the job is, or check that the parts that are there are its."""
    shutil.rmtree(_old(job.folder), ignore_errors=True)
    text = _as_json(job.identity)
    try:
        before = json.loads(plan.read_bytes())
    except (OSError, ValueError, RecursionError):  # the parts say whose they are, too
        before = None
    if isinstance(before, dict) and before != json.loads(text):
        differing = [name for name in job.identity if before.get(name) != job.identity[name]]
        raise XtokError(
            f"the checkpoint {job.folder} is of another run, of other {' and '.join(differing)}",
            hint=f"delete it to start again: rm -r {job.folder}",
        )
    kept = [*job.folder.glob("*.part")]
    if kept:
        note(f"resuming from {len(kept):,} parts in {job.folder}")
    write(plan, [text])


def _discard(folder: Path) -> None:
    """Remove the parts of a job that is done; the folder may be a link to another place.

    It is renamed first: a run that dies here leaves no parts without their job.
    """
    with suppress(OSError):
        folder.resolve().rename(_old(folder))
        folder.unlink(missing_ok=True)  # the link
    shutil.rmtree(_old(folder), ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.resolve().with_name(f".{folder.name}.old")


class Worker(NamedTuple):
    """What projects the rows of a job, one call at a time."""

    teacher: Tokenizer
    project: Callable[[Documents], Documents]  # of rows that are checked


@dataclass(frozen=True)
class PartSummary:
    """What a part holds: the columns of all its tables together, and its totals."""

    schema: Any  # pyarrow's
    totals: Totals


def make_part(
    job: ProjectJob,
    shard: int,
    worker: Worker,
    advance: Callable[[int, int], object],
) -> PartSummary:
    """Make the part of a shard, unless it is there; `advance` takes bytes read and tokens made."""
    found = summary_of(job, shard)
    if found is not None:
        advance(job.shards[shard][1].size, 0)
        return found
    arrow = need("pyarrow", job.part(shard))
    schema, totals, seal = arrow.schema([]), Totals(), _seal(job, shard)
    with atomic_output(job.part(shard)) as temporary, temporary.open("wb") as file:
        for table, counted, consumed in _projected(job, shard, worker):
            schema = one_schema([schema, table.schema])
            totals.add(counted)
            _put(file, seal, _streamed(table))
            advance(consumed, counted.positions)
        about = {_TOTALS: json.dumps(asdict(totals))}
        _put(file, seal, _streamed(schema.with_metadata(about).empty_table()))
    return PartSummary(schema, totals)


def summary_of(job: ProjectJob, shard: int) -> PartSummary | None:
    """Return the summary of a shard's part; None if it is not there, whole, and of this job."""
    last = None
    with suppress(_Damaged, FileNotFoundError):
        for data in _records(job, shard):
            last = data
        return _summary(last)
    return None


def tables_of(job: ProjectJob, shard: int) -> Iterator[Any]:
    """Yield the tables of a shard's part, of a neutral cache.

    Raises:
        XtokError: if the part was changed after it was written.
    """
    last = None
    try:
        for data in _records(job, shard):
            if last is not None:
                yield _table(last)
            last = data
        _summary(last)
    except (_Damaged, FileNotFoundError) as error:
        raise XtokError(
            f"the part {job.part(shard)} was changed after it was written",
            hint="run it again: this part is rebuilt, and the others are kept",
        ) from error


class _Damaged(Exception):
    """A part is not what was written, or not all of it."""


def _records(job: ProjectJob, shard: int) -> Iterator[bytes]:
    """Yield the records of a part, each when its seal is checked."""
    seal = _seal(job, shard)
    with job.part(shard).open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            size = int.from_bytes(head := file.read(_HEAD_BYTES), "little")
            left -= _HEAD_BYTES + size + _SEAL_BYTES
            if left < 0:
                raise _Damaged
            seal.update(head)
            seal.update(data := file.read(size))
            if file.read(_SEAL_BYTES) != seal.digest():
                raise _Damaged
            yield data


def _put(file: BinaryIO, seal: Any, data: Any) -> None:
    """Write a record, and its seal."""
    for part in (len(data).to_bytes(_HEAD_BYTES, "little"), data):
        seal.update(part)
        file.write(part)
    file.write(seal.digest())


def _seal(job: ProjectJob, shard: int) -> Any:
    return hashlib.sha256(f"{job.digest} {shard}\n".encode())


def _streamed(table: Any) -> Any:
    arrow = need("pyarrow", Path("a part"))
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _table(data: bytes) -> Any:
    return need("pyarrow", Path("a part")).ipc.open_stream(data).read_all()


def _summary(data: bytes | None) -> PartSummary:
    """Return what the last record of a part says; a part that was cut short has none."""
    schema = None if data is None else _table(data).schema
    if schema is None or _TOTALS not in (schema.metadata or {}):
        raise _Damaged
    return PartSummary(schema.remove_metadata(), Totals(**json.loads(schema.metadata[_TOTALS])))


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


def _projected(job: ProjectJob, shard: int, worker: Worker) -> Iterator[tuple[Any, Totals, int]]:
    """Project a shard; yield some rows at a time, what they have, and the bytes they took."""
    number, of_file = job.shards[shard]
    cache, teacher = job.caches[number], worker.teacher
    for given, consumed in read_cache(cache, of_file):
        rows = cache.check(given, teacher.vocabulary)
        made = worker.project(rows)
        yield neutral.table(made), _totals(rows.topk, made.topk, teacher.table), consumed


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
