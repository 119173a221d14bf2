"""Errors for users: a message with the cause, and a hint with the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class XtokError(Exception):
    """A problem that the user can fix, such as invalid input or a missing file or package.

    The command line prints an `error:` line and a `hint:` line, and exits with 1. Incorrect use of
    the Python API raises `ValueError` or `TypeError` instead.

    Messages and hints can contain whole commands, but no single options. In a hint, `{option}` is
    replaced: by `vocab_size=` in Python, and by `--student-vocab-size or --teacher-vocab-size` on
    the command line.

    >>> str(XtokError("the width is unknown", hint="give {option}", parameter="vocab_size"))
    'the width is unknown (give vocab_size=)'

    Attributes:
        message: the problem, with the name of the file, token or parameter.
        hint: the fix, with parameter names of Python.
        parameter: the name of the parameter that fixes the problem, or "".
    """

    def __init__(self, message: str, *, hint: str, parameter: str = "") -> None:
        super().__init__(message)
        self.message = _on_one_line(message)
        self.parameter = parameter
        self._hint = _on_one_line(hint)
        self.hint = self.hint_with(f"{parameter}=")

    def hint_with(self, option: str) -> str:
        """Return the hint, with `option` as the parameter's name."""
        return self._hint.replace("{option}", option) if self.parameter else self._hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling: `DataLoader` workers and Ray nodes send errors to other processes."""
        return partial(type(self), hint=self._hint, parameter=self.parameter), (self.message,)


def _on_one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())  # spaces within a line may belong to a name


@contextmanager
def at_location(location: object) -> Iterator[None]:
    """Prefix error messages inside the context with a location, such as a file and a line."""
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
    """Name the calling function's parameter in chat-template errors inside the context."""
    try:
        yield
    except ChatTemplateError as error:
        error.parameter, error.hint = parameter, error.hint_with(f"{parameter}=")
        raise


class TokenizerError(XtokError):
    """A tokenizer that is missing or unreadable, or has tokens without exact bytes."""


class EmbeddingError(XtokError):
    """Embeddings or a model's checkpoint that are missing or unusable."""


class MapFileError(XtokError):
    """A file that is not a valid map."""


class OutputError(XtokError):
    """An output that cannot be written."""


MALFORMED = (
    ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError
)  # fmt: skip
"""Exceptions that a parser can raise for a damaged file."""


def describe_damage(error: Exception) -> str:
    """Describe an exception of a parser; a `KeyError` contains only the missing key."""
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
