"""User-facing errors: a message that names the cause, a hint with the fix."""

from __future__ import annotations

from typing import Any, Self


class XtokError(Exception):
    """A mistake or a condition outside xtok that its user can fix.

    The command line prints one `error:` line and one `hint:` line and exits with 1. A caller's
    mistake in the Python API is a plain `ValueError` or `TypeError` instead.

    Messages and hints name no option of the command line: commands differ in theirs, and a Python
    caller has none. An error that a parameter would fix carries its name, and `{option}` in the
    hint stands for it. In Python that reads `vocab_size=`; the command line fills in the options
    of its own that set this parameter, such as `--student-vocab-size or --teacher-vocab-size`.

    >>> str(XtokError("the width is unknown", hint="give {option}", parameter="vocab_size"))
    'the width is unknown (give vocab_size=)'

    Attributes:
        message: names the file, token or parameter, and the problem.
        hint: what to do about it, worded for Python.
        parameter: the parameter that fixes it, as the function of `xtok` spells it; "" for none.
    """

    def __init__(self, message: str, *, hint: str, parameter: str = "") -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.parameter = parameter
        self._hint = " ".join(hint.split())
        self.hint = self.hint_with(f"{parameter}=")

    def at(self, place: object) -> Self:
        """Put a place before the message: `raise error.at(path)` as the error passes by."""
        self.message = f"{place}: {self.message}"
        return self

    def renamed(self, parameter: str) -> Self:
        """Name the parameter as the caller's caller spells it: `raise error.renamed("…")`."""
        self.parameter, self.hint = parameter, self.hint_with(f"{parameter}=")
        return self

    def hint_with(self, option: str) -> str:
        """Return the hint with another name for the parameter."""
        return self._hint.replace("{option}", option) if self.parameter else self._hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process raise it: a `DataLoader`'s worker, or a node of Ray."""
        return _error_of, (type(self), self.message, self._hint, self.parameter)


def _error_of(kind: type[XtokError], message: str, hint: str, parameter: str) -> XtokError:
    return kind(message, hint=hint, parameter=parameter)


class TokenizerError(XtokError):
    """A tokenizer that cannot be found, read, or used byte for byte."""


class EmbeddingError(XtokError):
    """Embeddings that are missing or unusable."""


class MapFileError(XtokError):
    """A file that is not a projection map, or not a valid one."""


MALFORMED = (
    ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError
)  # fmt: skip
"""Exceptions that parsing a damaged file can raise."""

MAP_HINT = "make the map again, or give another file"
"""What to do about a map that is damaged or none."""


_EXTRAS = {
    "pyarrow": "parquet",
    "ray": "ray",
    "sentence-transformers": "sentence",
    "starlette": "serve",
}


def install_hint(packages: str) -> str:
    """Return the hint that installs optional dependencies, whether xtok is a clone or a wheel."""
    hint = f"pip install {packages}"
    if extra := _EXTRAS.get(packages.split()[0]):
        hint += f", or in a clone of xtok: pip install -e '.[{extra}]'"
    return hint


class OutputError(XtokError):
    """A result that cannot be written where it was asked for."""
