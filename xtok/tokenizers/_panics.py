"""Panics of Rust libraries as errors: their class is no `Exception`, and cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xtok.errors import TokenizerError


def is_panic(error: BaseException) -> bool:
    """Tell a panic of a Rust library from other exceptions."""
    return type(error).__name__ == "PanicException"


@contextmanager
def no_panic(model: str) -> Iterator[None]:
    """Turn a panic into a `TokenizerError` that names the model."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise TokenizerError(
            f"{model} makes its library fail: {error}",
            hint="its files are damaged, or its pattern is too costly: fetch them again",
        ) from error
