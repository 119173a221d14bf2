"""Run a projection on a Ray cluster, with one task per shard."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from xtok._lib.opening import need
from xtok._lib.progress import Progress
from xtok.errors import XtokError
from xtok.teachers.parts import PartSummary, ProjectJob, make_part
from xtok.teachers.translator import Translator
from xtok.tokenizers import absolute, load_pair, load_tokenizer

WAITING_PER_CORE = 4
"""Maximum number of unfinished tasks per core of the cluster."""

MAX_RETRIES = 16
"""Maximum number of times that Ray restarts a task after its node or process failed."""

CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a TCP connection. Without this limit, Ray silently retries for minutes."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster, and the tokenizers that its nodes load.

    `student` and `teacher` are repo ids, or paths of folders or files that exist on all nodes.
    """

    student: str
    teacher: str
    address: str | None = "auto"  # address for `ray.init`
    offline: bool = False
    trust_remote_code: bool = False

    def absolute(self) -> Cluster:
        """Make the paths of existing files absolute, because workers run in a different folder."""
        return replace(self, student=absolute(self.student), teacher=absolute(self.teacher))


def make_parts_on_ray(job: ProjectJob, cluster: Cluster, progress: Progress) -> list[PartSummary]:
    """Make all parts of a job on a cluster, and return their summaries.

    Raises:
        XtokError: if Ray or the cluster is not available, if a node lacks a file or has different
            packages or tokenizers, if a task is lost, or if the projection fails.
    """
    rest, waiting = iter(range(len(job.shards))), dict[Any, int]()
    parts = dict[int, PartSummary]()
    with ray_connection(cluster.address) as ray, progress("projecting", job.size) as advance:
        # Ray retries a task only if its node or process is lost. Ray does not retry after user
        # errors, because a task returns user errors as values.
        task = task_for(job.recipe["version"], job.recipe["libraries"])
        remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(task)
        shared = [ray.put((job.absolute(), cluster.absolute()))]
        most = max(1, int(WAITING_PER_CORE * ray.cluster_resources().get("CPU", 1)))
        while len(parts) < len(job.shards):
            waiting |= {remote.remote(shared, n): n for n in islice(rest, most - len(waiting))}
            [done], _ = ray.wait(list(waiting), num_returns=1)
            value = fetch_result(ray, done)
            if isinstance(value, str):
                hint = "install the same versions of xtok and its packages on all nodes"
                raise XtokError(value, hint=hint)
            if isinstance(value, XtokError):
                raise value
            index = waiting.pop(done)
            tokens, parts[index] = value
            advance(job.shards[index][1].size, tokens)
    return [parts[index] for index in range(len(job.shards))]


def task_for(xtok_version: str, libraries: dict[str, str]) -> Callable[[list[Any], int], Any]:
    """Return the function that runs on the nodes.

    The function compares the versions of packages, then calls `_make_part`. Ray pickles a nested
    function by value, so the function can run on a node without xtok. The job is passed in a list,
    so that Ray does not unpickle the job before the versions are compared.
    """

    def checked_part(shared: list[Any], shard: int) -> Any:
        import importlib.metadata
        import socket

        node = f"the node {socket.gethostname()}"
        try:
            import ray

            import xtok

            for name, expected in {"xtok": xtok_version, **libraries}.items():
                other = xtok.__version__ if name == "xtok" else importlib.metadata.version(name)
                if other != expected:
                    return f"{node} has {name} {other} instead of {expected}"
            from xtok.teachers.cluster import _make_part
        except ImportError as error:  # also importlib.metadata.PackageNotFoundError
            return f"{node} does not have the package {error.name}"
        return _make_part(ray.get(shared[0]), shard)

    return checked_part


@contextmanager
def ray_connection(address: str | None) -> Iterator[Any]:
    """Connect to a Ray cluster, unless this process is already connected, and yield `ray`."""
    ray = need("ray", "work on a cluster")
    with ExitStack() as stack:
        if not ray.is_initialized():
            connect(ray, address)
            stack.callback(ray.shutdown)
        yield ray


def connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, or raise an `XtokError`."""
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        raise XtokError(
            f"cannot connect to a Ray cluster at {address}: {_first_line(error)}",
            hint="start a cluster (ray start --head; on other nodes ray start --address "
            "HOST:6379), set RAY_AUTH_MODE=token for a cluster with a token, or run without Ray",
        ) from error


def fetch_result(ray: Any, reference: Any) -> Any:
    """Return the value of a task, or raise an error if a node or the cluster failed."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OSError | MemoryError):
            raise error.cause from None
        raise  # a bug, because tasks return user errors as values
    except ray.exceptions.RayError as error:
        problem = f"the cluster lost a part of the work: {_first_line(error)}"
        hint = "run the command again to resume; to list the running nodes, run ray status"
        raise XtokError(problem, hint=hint) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _make_part(task: tuple[ProjectJob, Cluster], shard: int) -> tuple[int, PartSummary] | XtokError:
    job, tokens = task[0], list[int]()
    path = job.shards[shard][1].path
    try:
        if not path.exists():
            hint = "put the files on a file system that all nodes share"
            raise XtokError(f"the node {socket.gethostname()} has no file {path}", hint=hint)
        part = make_part(job, shard, _translator(*task), lambda _, more: tokens.append(more))
    except XtokError as error:
        return error
    return sum(tokens), part


_translators: dict[tuple[str, Cluster], Translator] = {}


def _translator(job: ProjectJob, cluster: Cluster) -> Translator:
    """Load the tokenizers once per process and job, and check that the tokenizers match the job."""
    key = job.digest, cluster
    if key not in _translators:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # Ray assigns one core to each task
        _translators.clear()
        sides = zip((cluster.student, cluster.teacher), job.back_map.shape[::-1], strict=True)
        offline, trusts = cluster.offline, cluster.trust_remote_code
        loaded = [
            load_tokenizer(name, vocab_size=width, offline=offline, trust_remote_code=trusts)
            for name, width in sides
        ]
        for tokenizer, digest in zip(loaded, job.recipe["models"], strict=True):
            if tokenizer.definition_sha256 != digest:
                name = tokenizer.vocabulary.model_id
                problem = f"{name} is a different tokenizer on the node {socket.gethostname()}"
                hint = "use the same files on all nodes, or pin a commit: REPO@REVISION"
                raise XtokError(problem, hint=hint)
        _translators[key] = Translator(
            load_pair(*loaded), job.back_map, templates=job.config.templates, num_threads=1
        )
    return _translators[key]
