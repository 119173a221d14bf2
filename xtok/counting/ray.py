"""Text counted on a Ray cluster: a task per shard, and the counts added up in a tree of tasks."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from xtok.counting.counts import (
    CountedText,
    CountingPlan,
    count_shard,
    digest_of,
    merge_counts,
)
from xtok.counting.encode import TextEncoder
from xtok.counting.texts import TextShard
from xtok.errors import XtokError, install_hint
from xtok.progress import TextProgress, silent_texts
from xtok.tokenizers import Tokenizer, absolute, load_tokenizer

T = TypeVar("T")

FAN_IN = 8
"""Counts that one task adds up."""

WAITING_PER_CORE = 4
"""Shards per core of the cluster that are submitted at a time."""

MAX_RETRIES = 16
"""How often a task whose node or process is lost is run again."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """What a worker loads a tokenizer from: the arguments of `load_tokenizer`.

    `model` is a repo id, or a folder or file that every node has under this path.
    """

    model: str
    vocab_size: int | None = None
    offline: bool = False
    trust_remote_code: bool = False

    def load(self) -> Tokenizer:
        """Load the tokenizer."""
        options = {name: value for name, value in vars(self).items() if name != "model"}
        return load_tokenizer(self.model, **options)

    def absolute(self) -> TokenizerSource:
        """Make the path of an existing file absolute: workers run in another folder."""
        return replace(self, model=absolute(self.model))


Sources = tuple[TokenizerSource, TokenizerSource]


def count_on_ray(
    plan: CountingPlan,
    student: TokenizerSource,
    teacher: TokenizerSource,
    *,
    address: str | None = "auto",
    progress: TextProgress = silent_texts,
) -> CountedText:
    """Count what a plan says on a Ray cluster; the counts are those of `counting.count_text`.

    Each shard of text is a task that reads it, encodes it on one core, and returns its counts. The
    counts stay on the nodes, where other tasks add them up eight at a time. If a node is lost, Ray
    recomputes its work on the others. All nodes read the text and the tokenizers under one path.

    Args:
        plan: made for these tokenizers.
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        address: the cluster's, as `ray.init` takes it; None starts one on this machine.
        progress: called with the bytes on disk.

    Raises:
        XtokError: if Ray is not installed, there is no cluster, a node lacks the text or the
            tokenizers, or a text cannot be read.
    """
    with connected(address) as ray:
        return _count(ray, plan, (student.absolute(), teacher.absolute()), progress)


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to a Ray cluster, unless this process is connected already, and yield `ray`.

    Raises:
        XtokError: if Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise XtokError(
            "work on a cluster needs the package ray, which is not installed",
            hint=install_hint("ray"),
        ) from error
    started = not ray.is_initialized()
    if started:
        _connect(ray, address)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise XtokError(
            f"there is no Ray cluster at {address}: {_first_line(error)}",
            hint="start one (ray start --head; on other nodes ray start --address HOST:6379), "
            "or work on this machine",
        ) from error


def done_on(
    ray: Any, task: Callable[..., Any], job: Any, items: Iterable[T], *, num_returns: int = 1
) -> Iterator[tuple[T, Any, list[Any]]]:
    """Run `task(job, item)` on the cluster for each item, some at a time, as they are done.

    Yields:
        an item, the last value that its task returned, and references to those before it.

    Raises:
        XtokError: made of the last value, if that is the arguments of one; also if work is lost.
    """
    # Ray runs a task again only if its node or process is lost: our own errors are values.
    remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES, num_returns=num_returns)(task)
    job = ray.put(job)
    most = max(1, int(WAITING_PER_CORE * ray.cluster_resources().get("CPU", 1)))
    rest = iter(items)
    waiting: dict[Any, tuple[T, list[Any]]] = {}
    while True:
        for item in islice(rest, most - len(waiting)):
            returned = remote.remote(job, item)
            *others, last = returned if num_returns > 1 else [returned]
            waiting[last] = (item, others)
        if not waiting:
            return
        [done], _ = ray.wait(list(waiting), num_returns=1)
        value = _result(ray, done)
        if isinstance(value, ErrorArguments):
            raise XtokError(value.message, hint=value.hint, parameter=value.parameter)
        item, others = waiting.pop(done)
        yield item, value, others


class ErrorArguments(NamedTuple):
    """What an `XtokError` is made of; the error itself would not survive the way back."""

    message: str
    hint: str
    parameter: str

    @staticmethod
    def of(error: XtokError) -> ErrorArguments:
        """Take an error apart."""
        return ErrorArguments(error.message, error.hint_with("{option}"), error.parameter)


def _count(ray: Any, plan: CountingPlan, sources: Sources, progress: TextProgress) -> CountedText:
    merge = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_merge_task)
    job = (sources, replace(plan, shards=()))
    levels: list[list[Any]] = [[]]
    with progress("counting", sum(shard.size for shard in plan.shards)) as advance:
        shards = [replace(shard, path=shard.path.absolute()) for shard in plan.shards]
        for shard, tokens, [counts] in done_on(ray, _count_task, job, shards, num_returns=2):
            advance(shard.size, tokens)
            _add(levels, counts, merge)
        counted: CountedText = _result(ray, merge.remote(*chain(*levels)))
        return counted


def _add(levels: list[list[Any]], counts: Any, merge: Any) -> None:
    """Add counts to the first level; where a level is full, its sum goes to the next one."""
    for level in levels:
        level.append(counts)
        if len(level) < FAN_IN:
            return
        counts = merge.remote(*level)
        level.clear()
    levels.append([counts])


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise  # a bug: what a user can fix comes back as a value
    except ray.exceptions.RayError as error:
        raise XtokError(
            f"the cluster has lost a part of the work: {_first_line(error)}",
            hint="start again; ray status shows the nodes that are up",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _count_task(
    job: tuple[Sources, CountingPlan], shard: TextShard
) -> tuple[CountedText | None, int | ErrorArguments]:
    """Return a shard's counts, and its student tokens or the arguments of an error."""
    sources, plan = job
    try:
        encoder = _encoder(sources, plan.digests)
        require_here(shard)
        counts = count_shard(shard, encoder, plan)
    except XtokError as error:
        return None, ErrorArguments.of(error)
    return counts, counts.totals.student_tokens


@functools.lru_cache(maxsize=1)
def _encoder(sources: Sources, digests: tuple[str, str]) -> TextEncoder:
    """Load the tokenizers once per worker process."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # a task has one core
    return TextEncoder(*load_same(sources, digests), num_threads=1)


def load_same(sources: Sources, digests: tuple[str, str]) -> list[Tokenizer]:
    """Load tokenizers on a node; others than those of these digests are an `XtokError`."""
    loaded = [source.load() for source in sources]
    for tokenizer, source, digest in zip(loaded, sources, digests, strict=True):
        if digest_of(tokenizer) != digest:
            raise XtokError(
                f"{source.model} is another tokenizer on the node {socket.gethostname()}",
                hint="give all nodes the same files, or pin a commit: REPO@REVISION",
            )
    return loaded


def require_here(shard: TextShard) -> None:
    """Raise an `XtokError` if a node lacks the file of a shard."""
    if not shard.path.exists():
        raise XtokError(
            f"the node {socket.gethostname()} has no file {shard.path}",
            hint="put the files on a file system that all nodes share",
        )


def _merge_task(*parts: CountedText) -> CountedText:
    return merge_counts(parts)
