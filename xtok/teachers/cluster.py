"""A projection on a Ray cluster, a task per shard: the same parts, byte for byte."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

from xtok._lib.progress import Progress
from xtok.errors import XtokError, install_hint
from xtok.teachers.checkpoint import PartSummary, ProjectJob, make_part
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer, absolute, load_tokenizer
from xtok.tokenizers import pair as pair_of

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


def make_parts_on_ray(
    job: ProjectJob,
    sources: Sequence[TokenizerSource],
    address: str | None,
    progress: Progress,
) -> list[PartSummary]:
    """Make all parts of a job on a cluster; return their summaries.

    All nodes read the files and the tokenizers, and write the parts, under one path.

    Raises:
        XtokError: if Ray is not installed, there is no cluster, a node lacks a file or has another
            tokenizer, or work is lost; also what projecting raises.
    """
    rest, waiting = iter(range(len(job.shards))), dict[Any, int]()
    parts = dict[int, PartSummary]()
    with connected(address) as ray, progress("projecting", job.size) as advance:
        # Ray runs a task again only if its node or process is lost: our own errors are values.
        remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_make_part)
        shared = ray.put((job.absolute(), tuple(source.absolute() for source in sources)))
        most = max(1, int(WAITING_PER_CORE * ray.cluster_resources().get("CPU", 1)))
        while len(parts) < len(job.shards):
            waiting |= {remote.remote(shared, n): n for n in islice(rest, most - len(waiting))}
            [done], _ = ray.wait(list(waiting), num_returns=1)
            value = _result(ray, done)
            if isinstance(value, XtokError):
                raise value
            number = waiting.pop(done)
            tokens, parts[number] = value
            advance(job.shards[number][1].size, tokens)
    return [parts[number] for number in range(len(job.shards))]


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
        connect(ray, address)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, or raise an `XtokError`."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise XtokError(
            f"there is no Ray cluster at {address}: {_first_line(error)}",
            hint="start one (ray start --head; on other nodes ray start --address HOST:6379), "
            "set RAY_AUTH_MODE=token if it wants a token, or work on this machine",
        ) from error


Task: TypeAlias = tuple[ProjectJob, tuple[TokenizerSource, ...]]
"""What each task is given, besides the number of its shard."""


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise  # a bug: what a user can fix comes back as a value
    except ray.exceptions.RayError as error:
        raise XtokError(
            f"the cluster has lost a part of the work: {_first_line(error)}",
            hint="run it again to resume; ray status shows the nodes that are up",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _make_part(task: Task, shard: int) -> tuple[int, PartSummary] | XtokError:
    """Make a part on a node; return the student's tokens made, or an error of the user's."""
    job, tokens = task[0], list[int]()
    path = job.shards[shard][1].path
    try:
        if not path.exists():
            raise XtokError(
                f"the node {socket.gethostname()} has no file {path}",
                hint="put the files on a file system that all nodes share",
            )
        part = make_part(job, shard, _translator(*task), lambda _, more: tokens.append(more))
    except XtokError as error:
        return error
    return sum(tokens), part


_translators: dict[tuple[str, tuple[TokenizerSource, ...]], Translator] = {}


def _translator(job: ProjectJob, sources: tuple[TokenizerSource, ...]) -> Translator:
    """Load the tokenizers once per worker process and job; they must be those of the job."""
    key = job.digest, sources
    if key not in _translators:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # a task has one core
        _translators.clear()
        loaded = [source.load() for source in sources]
        for tokenizer, source, digest in zip(loaded, sources, job.recipe["models"], strict=True):
            if tokenizer.definition_sha256 != digest:
                raise XtokError(
                    f"{source.model} is another tokenizer on the node {socket.gethostname()}",
                    hint="give all nodes the same files, or pin a commit: REPO@REVISION",
                )
        _translators[key] = Translator(
            pair_of(*loaded), job.back_map, templates=job.templates, num_threads=1
        )
    return _translators[key]
