"""Threads that compute with PyTorch, each alone, so that no result depends on their number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """Give a pool of as many threads as PyTorch would use, each of which computes alone.

    The calling thread computes alone as well, so that no result depends on the number of threads.
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
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
