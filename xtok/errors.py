"""What a user can mend: one message that names the culprit, one hint that mends it."""


class XtokError(Exception):
    """A mistake or a condition outside xtok that its user can mend.

    The command line prints one `error:` line and one `hint:` line and exits with 1. A caller's
    mistake in the Python API is a plain `ValueError` or `TypeError` instead.

    Attributes:
        message: names the file, token or option, and says what is wrong with it.
        hint: what to do about it, as a command or option where there is one.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.hint = " ".join(hint.split())

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"


class TokenizerError(XtokError):
    """A tokenizer that cannot be found, read, or used byte for byte."""


class EmbeddingError(XtokError):
    """Embeddings that cannot be had, or cannot be used."""


class MapFileError(XtokError):
    """A file that is not a projection map, or not a valid one."""


MAP_HINT = "make the map again with xtok build, or give another file"
"""What to do about a map that is damaged or none."""


def install_hint(extra: str) -> str:
    """Return the hint that installs an optional dependency; xtok is installed from a clone."""
    return f"in your clone of xtok: pip install -e '.[{extra}]'"


class OutputError(XtokError):
    """A result that cannot be written where it was asked for."""
