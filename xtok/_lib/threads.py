"""Thread pools for PyTorch. Results do not depend on the number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool with PyTorch's number of threads.

    Inside the context, each thread computes on one core, including the calling thread. Therefore,
    results do not depend on the number of threads.
    """
    import torch

    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, "xtok", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(count)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
