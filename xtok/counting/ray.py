"""Text counted on a Ray cluster: a task per shard, and the counts added up in a tree of tasks."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

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
    try:
        import ray
    except ImportError as error:
        raise XtokError(
            "counting on a cluster needs the package ray, which is not installed",
            hint=install_hint("ray"),
        ) from error
    started = not ray.is_initialized()
    if started:
        _connect(ray, address)
    try:
        return _count(ray, plan, (student.absolute(), teacher.absolute()), progress)
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
            "or count on this machine",
        ) from error


def _count(ray: Any, plan: CountingPlan, sources: Sources, progress: TextProgress) -> CountedText:
    # Ray runs a task again only if its node or process is lost: our own errors are values.
    remote = functools.partial(ray.remote, num_cpus=1, max_retries=MAX_RETRIES)
    count, merge = remote(num_returns=2)(_count_task), remote()(_merge_task)
    job = ray.put((sources, replace(plan, shards=())))
    most = max(1, int(WAITING_PER_CORE * ray.cluster_resources().get("CPU", 1)))
    rest = iter(plan.shards)
    waiting: dict[Any, tuple[TextShard, Any]] = {}
    levels: list[list[Any]] = [[]]
    with progress("counting", sum(shard.size for shard in plan.shards)) as advance:
        while True:
            for shard in islice(rest, most - len(waiting)):
                counts, tokens = count.remote(job, replace(shard, path=shard.path.absolute()))
                waiting[tokens] = (shard, counts)
            if not waiting:
                break
            [done], _ = ray.wait(list(waiting), num_returns=1)
            shard, counts = waiting.pop(done)
            tokens_or_error = _result(ray, done)
            if isinstance(tokens_or_error, dict):
                raise XtokError(**tokens_or_error)
            advance(shard.size, tokens_or_error)
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
) -> tuple[CountedText | None, int | dict[str, str]]:
    """Return a shard's counts, and its student tokens or the arguments of an error."""
    sources, plan = job
    try:
        encoder = _encoder(sources, plan.digests)
        if not shard.path.exists():
            raise XtokError(
                f"the node {socket.gethostname()} has no file {shard.path}",
                hint="put the text on a file system that all nodes share",
            )
        counts = count_shard(shard, encoder, plan)
    except XtokError as error:
        hint = error.hint_with("{option}")
        return None, {"message": error.message, "hint": hint, "parameter": error.parameter}
    return counts, counts.totals.student_tokens


@functools.lru_cache(maxsize=1)
def _encoder(sources: Sources, digests: tuple[str, str]) -> TextEncoder:
    """Load the tokenizers once per worker process."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # a task has one core
    loaded = [source.load() for source in sources]
    for tokenizer, source, digest in zip(loaded, sources, digests, strict=True):
        if digest_of(tokenizer) != digest:
            raise XtokError(
                f"{source.model} is another tokenizer on the node {socket.gethostname()}",
                hint="give all nodes the same files, or pin a commit: REPO@REVISION",
            )
    return TextEncoder(*loaded, num_threads=1)


def _merge_task(*parts: CountedText) -> CountedText:
    return merge_counts(parts)
