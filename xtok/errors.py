"""User-facing errors: a message that names the cause, a hint with the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class XtokError(Exception):
    """A problem that the user can fix: bad input, a missing file, a missing package.

    The command line prints an `error:` line and a `hint:` line, and exits with 1. Incorrect use of
    the Python API raises `ValueError` or `TypeError` instead.

    Messages and hints can contain a command, such as `xtok events STUDENT TEACHER --for csd`, but
    no option without its command. In a hint, `{option}` is replaced by the parameter's name:
    `vocab_size=` in Python, and `--student-vocab-size or --teacher-vocab-size` on the command line.

    >>> str(XtokError("the width is unknown", hint="give {option}", parameter="vocab_size"))
    'the width is unknown (give vocab_size=)'

    Attributes:
        message: the file, token or parameter, and the problem.
        hint: the fix, worded for Python.
        parameter: the parameter of the `xtok` function that fixes the problem, or "".
    """

    def __init__(self, message: str, *, hint: str, parameter: str = "") -> None:
        super().__init__(message)
        self.message = _on_one_line(message)
        self.parameter = parameter
        self._hint = _on_one_line(hint)
        self.hint = self.hint_with(f"{parameter}=")

    def hint_with(self, option: str) -> str:
        """Return the hint with the parameter named `option`."""
        return self._hint.replace("{option}", option) if self.parameter else self._hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, which `DataLoader` workers and Ray nodes require."""
        return partial(type(self), hint=self._hint, parameter=self.parameter), (self.message,)


def _on_one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())  # spaces within a line may belong to a name


@contextmanager
def at_location(location: object) -> Iterator[None]:
    """Prefix error messages with a location, such as a file and a line."""
    try:
        yield
    except XtokError as error:
        error.message = f"{location}: {error.message}"
        raise


class ChatTemplateError(XtokError):
    """A chat template that is missing, fails, or drops a value."""

    def __init__(self, message: str, *, hint: str, parameter: str = "template") -> None:
        super().__init__(message, hint=hint, parameter=parameter)


@contextmanager
def naming_template(parameter: str) -> Iterator[None]:
    """Give chat-template errors the parameter name of the calling function."""
    try:
        yield
    except ChatTemplateError as error:
        error.parameter, error.hint = parameter, error.hint_with(f"{parameter}=")
        raise


class TokenizerError(XtokError):
    """A tokenizer that is missing or unreadable, or has tokens without exact bytes."""


class EmbeddingError(XtokError):
    """Embeddings, or a model's checkpoint, that are missing or unusable."""


class MapFileError(XtokError):
    """A file that is not a valid map."""


MALFORMED = (
    ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError
)  # fmt: skip
"""Exceptions that a parser can raise for a damaged file."""


def describe_damage(error: Exception) -> str:
    """Describe an exception of a parser; a bare `KeyError` names only the missing part."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


MAP_HINT = "build the map again, or give another file"
"""Hint for an invalid map file."""


_EXTRAS = {
    "pyarrow": "parquet",
    "ray": "ray",
    "sentence-transformers": "sentence",
    "starlette": "serve",
}


def install_hint(packages: str) -> str:
    """Return a hint with the `pip` command for an optional dependency."""
    hint = f"pip install {packages}"
    if extra := _EXTRAS.get(packages.split()[0]):
        hint += f", or in a clone of xtok: pip install -e '.[{extra}]'"
    return hint


class OutputError(XtokError):
    """An output that cannot be written."""
