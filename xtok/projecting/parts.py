"""The parts of a projection: a file per shard of the caches; what is made is kept until the end.

A part is a stream of Arrow for some rows at a time, one behind another, and a seal: a digest of the
job, of the shard's number and of these bytes. So a part of another job or shard is never taken, nor
one that was cut short or damaged.
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
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from xtok import __version__
from xtok.config import ProjectConfig
from xtok.conversation import find_template
from xtok.errors import OutputError, XtokError
from xtok.files.opening import need
from xtok.files.shards import Shard, source_of
from xtok.io import parents_of, write, writing
from xtok.maps.projection_map import ProjectionMap
from xtok.pairs import SIDES, Pair
from xtok.predictions import neutral
from xtok.predictions.caches import Cache, read_cache
from xtok.predictions.topk import TopK
from xtok.progress import Note
from xtok.tokenizers import Tokenizer
from xtok.vocab.table import TokenTable

if TYPE_CHECKING:
    from xtok.projecting.rows import RowProjector

_TOTALS = b"xtok.totals"
_SEAL_BYTES = hashlib.sha256().digest_size
_BLOCK = 1 << 20


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
    bounded: int = 0  # tokens of it that are no candidates, and so cost at least what is counted

    def add(self, other: Mapping[str, float]) -> None:
        """Add another's numbers to these."""
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to project: the same job gives the same parts, wherever they are made."""

    identity: Mapping[str, Any]  # all that the parts depend on; see `identity_of`
    caches: tuple[Cache, ...]
    shards: tuple[tuple[int, Shard], ...]  # each with the number of its cache
    back_map: ProjectionMap
    config: ProjectConfig
    templates: Mapping[str, str | Path | None]  # by parameter of `RowProjector`
    folder: Path  # of the parts

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the identity."""
        return hashlib.sha256(_as_json(self.identity)).hexdigest()

    def part(self, shard: int) -> Path:
        """Return the path of a shard's part."""
        return self.folder / f"{shard:06}.part"

    def absolute(self) -> Job:
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
    templates: Mapping[str, str | Path | None],
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
            _templates(tokenizer, templates[f"{side}_template"])
            for side, tokenizer in zip(SIDES, pair.tokenizers, strict=True)
        ],
    }


def _templates(tokenizer: Tokenizer, template: str | Path | None) -> list[Any]:
    """Return what a side's conversations are rendered by."""
    names = dict(tokenizer.special_token_names)
    if template in (None, "default"):
        return [names, dict(tokenizer.chat_templates)]
    chosen = find_template(tokenizer, template)
    return [names, chosen if isinstance(chosen, str) else chosen.template]


def _update(digest: Any, file: BinaryIO, size: int) -> None:
    """Add so many bytes of a file to a digest."""
    while size > 0 and (block := file.read(min(_BLOCK, size))):
        digest.update(block)
        size -= len(block)


def _as_json(identity: Mapping[str, Any]) -> bytes:
    return json.dumps(identity, indent=1, sort_keys=True).encode()


def kept_parts(target: Path) -> list[Path]:
    """Return the parts that are kept for an output."""
    return sorted(folder_of(target).glob("*.part"))


def folder_of(target: Path) -> Path:
    """Return where the parts of an output are kept: beside it."""
    return target.with_name(f"{target.name}.checkpoint")


@contextmanager
def holding(job: Job, target: Path, note: Note) -> Iterator[None]:
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


def _begin(job: Job, plan: Path, note: Note) -> None:
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
        note(f"going on from {len(kept):,} parts in {job.folder}")
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


def make_part(
    job: Job, shard: int, worker: RowProjector, advance: Callable[[int, int], object]
) -> None:
    """Make the part of a shard, unless it is there; `advance` takes bytes read and tokens made."""
    if has_part(job, shard):
        advance(job.shards[shard][1].size, 0)
        return
    path, seal = job.part(shard), _seal(job, shard)
    with writing(path) as temporary, temporary.open("wb") as file:
        for data, consumed, tokens in _projected(job, shard, worker):
            seal.update(data)
            file.write(data)
            advance(consumed, tokens)
        file.write(seal.digest())


def has_part(job: Job, shard: int) -> bool:
    """Whether the part of a shard is there, whole, and of this job."""
    path, seal = job.part(shard), _seal(job, shard)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        _update(seal, file, os.fstat(file.fileno()).st_size - _SEAL_BYTES)
        return bool(file.read() == seal.digest())


def tables_of(path: Path) -> Iterator[tuple[Any, dict[str, float]]]:
    """Read a part: tables of a neutral cache, each with its totals."""
    arrow = need("pyarrow", path)
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size - _SEAL_BYTES
        while file.tell() < end:
            table = arrow.ipc.open_stream(file).read_all()
            yield table.replace_schema_metadata(), json.loads(table.schema.metadata[_TOTALS])


def _seal(job: Job, shard: int) -> Any:
    return hashlib.sha256(f"{job.digest} {shard}\n".encode())


def _projected(job: Job, shard: int, worker: RowProjector) -> Iterator[tuple[Any, int, int]]:
    """Project a shard; yield some rows at a time, the bytes they took, and the student's tokens."""
    number, of_file = job.shards[shard]
    cache, arrow = job.caches[number], need("pyarrow", of_file.path)
    for given, consumed in read_cache(cache, of_file):
        rows = cache.checked(given, worker.teacher.vocabulary)
        made = worker(rows)
        totals = _totals(rows.topk, made.topk, worker.teacher.table)
        table = neutral.table(made)
        table = table.replace_schema_metadata({_TOTALS: json.dumps(asdict(totals))})
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        yield sink.getvalue(), consumed, totals.positions


def _totals(given: TopK, made: TopK, table: TokenTable) -> Totals:
    """Count predictions, and what the text costs by the teacher's: −log₂ of its own tokens.

    A token that is no candidate has at most the rest.
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
