"""Work on a Ray cluster: a task per shard."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from xtok.counting.checkpoint import digest_of
from xtok.counting.texts import TextShard
from xtok.errors import XtokError, install_hint
from xtok.tokenizers import Tokenizer, absolute, load_tokenizer

T = TypeVar("T")

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


def load_same(sources: Sequence[TokenizerSource], digests: Sequence[str]) -> list[Tokenizer]:
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
