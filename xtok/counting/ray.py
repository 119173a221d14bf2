"""Text counted on a Ray cluster: a task per shard, and the counts added up in a tree of tasks."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from xtok.counting.checkpoint import digest_of
from xtok.counting.encode import TextEncoder
from xtok.counting.pair_text import PairText, TextCounter, Wanted, merged_texts
from xtok.counting.texts import FileDigest, Texts, TextShard, TextSource, read_batches
from xtok.errors import XtokError, install_hint
from xtok.progress import TextProgress, silent_texts
from xtok.tokenizers import Tokenizer, absolute, load_tokenizer
from xtok.vocab.pair import Pair

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


def read_on_ray(
    pair: Pair,
    texts: str | Path | Sequence[str | Path],
    wanted: Wanted = Wanted(),  # noqa: B008
    *,
    sources: Sequence[TokenizerSource],
    field: str = "text",
    address: str | None = "auto",
    progress: TextProgress = silent_texts,
) -> PairText:
    """Read text on a Ray cluster; the counts are those of `PairText.read`.

    Each shard of text is a task that reads it, encodes it on one core, and returns its counts. The
    counts stay on the nodes, where other tasks add them up eight at a time. If a node is lost, Ray
    recomputes its work on the others. All nodes read the text and the tokenizers under one path.

    Args:
        pair: the pair, with both tokenizers.
        texts: as `PairText.read` takes them.
        wanted: what to count, but nothing per document.
        sources: what the nodes load the two tokenizers from.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        address: the cluster's, as `ray.init` takes it; None starts one on this machine.
        progress: called with the bytes on disk.

    Raises:
        XtokError: if Ray is not installed, there is no cluster, a node lacks the text or the
            tokenizers, a text cannot be read, or there is nothing to count in it.
    """
    files = Texts(texts, field)
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
        job = _Job(
            tuple(source.absolute() for source in sources),
            tuple(map(digest_of, pair.tokenizers)),
            wanted,
        )
        text = _count(ray, job, files, progress)
    finally:
        if started:
            ray.shutdown()
    text.require_starts()
    return text


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise XtokError(
            f"there is no Ray cluster at {address}: {_first_line(error)}",
            hint="start one (ray start --head; on other nodes ray start --address HOST:6379), "
            "or count on this machine",
        ) from error


def _count(ray: Any, job: _Job, files: Texts, progress: TextProgress) -> PairText:
    # Ray runs a task again only if its node or process is lost: our own errors are values.
    remote = functools.partial(ray.remote, num_cpus=1, max_retries=MAX_RETRIES)
    count, merge = remote(num_returns=2)(_count_task), remote()(_merge_task)
    described = remote()(_describe_task)
    most = max(1, int(WAITING_PER_CORE * ray.cluster_resources().get("CPU", 1)))
    of_tasks, rest = ray.put(job), iter(files.shards)
    waiting: dict[Any, tuple[TextShard, Any]] = {}
    levels: list[list[Any]] = [[]]
    with progress("counting", files.size) as advance:
        while True:
            for shard in islice(rest, most - len(waiting)):
                counts, tokens = count.remote(of_tasks, replace(shard, path=shard.path.absolute()))
                waiting[tokens] = (shard, counts)
            if not waiting:
                break
            [done], _ = ray.wait(list(waiting), num_returns=1)
            shard, counts = waiting.pop(done)
            advance(shard.size, _value(ray, done))
            _add(levels, counts, merge)
        text: PairText = _result(ray, merge.remote(*chain(*levels)))
        sources = [described.remote(path.absolute()) for path in files.digests]
        return replace(text, sources=tuple(_value(ray, one) for one in sources))


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


def _value(ray: Any, reference: Any) -> Any:
    """Return what a task returned, unless it is the arguments of an error."""
    value = _result(ray, reference)
    if isinstance(value, dict):
        raise XtokError(**value)
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


class _Job(NamedTuple):
    sources: tuple[TokenizerSource, ...]
    digests: tuple[str, ...]  # of the tokenizers, from `digest_of`
    wanted: Wanted


def _count_task(job: _Job, shard: TextShard) -> tuple[PairText | None, int | dict[str, Any]]:
    """Return a shard's counts, and its student tokens or the arguments of an error."""
    try:
        encoder = _encoder(job.sources, job.digests)
        if not shard.path.exists():
            raise XtokError(
                f"the node {socket.gethostname()} has no file {shard.path}",
                hint="put the text on a file system that all nodes share",
            )
        counter = TextCounter(encoder.tokenizers, job.wanted)
        for batch in encoder.read(read_batches([shard]), shard.size):
            counter.add(encoder, batch)
    except XtokError as error:
        return None, _arguments(error)
    return counter.result(), counter.totals.student_tokens


def _describe_task(path: Path) -> TextSource | dict[str, Any]:
    """Return a file's name, size and digest, or the arguments of an error."""
    try:
        return FileDigest(path).source()
    except XtokError as error:
        return _arguments(error)


def _arguments(error: XtokError) -> dict[str, Any]:
    hint = error.hint_with("{option}")
    return {"message": error.message, "hint": hint, "parameter": error.parameter}


@functools.lru_cache(maxsize=1)
def _encoder(sources: tuple[TokenizerSource, ...], digests: tuple[str, ...]) -> TextEncoder:
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


def _merge_task(*parts: PairText) -> PairText:
    return merged_texts(parts)
