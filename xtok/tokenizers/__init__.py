"""Tokenizers of every kind as one `Tokenizer`: exact bytes, exact spelling."""

from __future__ import annotations

import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from xtok.errors import TokenizerError
from xtok.tokenizers._hf import HuggingFaceBackend
from xtok.tokenizers._sentencepiece import SentencePieceBackend
from xtok.tokenizers._tiktoken import TiktokenBackend, is_rank_file
from xtok.tokenizers._tokenizer import Backend, Tokenizer

__all__ = ["Backend", "Tokenizer", "from_transformers", "load_tokenizer"]

_FILE_BACKENDS: dict[str, Callable[..., Backend]] = {
    "spm": SentencePieceBackend,
    "tiktoken": TiktokenBackend,
}


def load_tokenizer(
    model: str | PathLike[str],
    *,
    revision: str | None = None,
    vocab_size: int | None = None,
    pattern: str | None = None,
) -> Tokenizer:
    """Load a tokenizer from a Hugging Face repo id or folder, a `.model` or a `.tiktoken` file.

    Args:
        model: repo id, folder or file; `hf:`, `spm:` or `tiktoken:` before it settles doubt. The
            kind of a file is told from its contents.
        revision: branch, tag or commit of a hub repo.
        vocab_size: the width of the model's logits; by default that of the model's config, else
            the tokenizer's largest id + 1.
        pattern: the split pattern of a tiktoken file of an unknown family.

    Raises:
        TokenizerError: if it cannot be found, read, or used byte for byte.
    """
    kind, location = _split_prefix(os.fspath(model))
    if not location:
        raise TokenizerError(
            "the model's name is empty", hint="give a repo id, a folder, or a file"
        )
    path = Path(location).expanduser()
    if kind is None and path.is_file():
        with path.open("rb") as file:
            kind = "tiktoken" if is_rank_file(file.read(4096)) else "spm"
    if kind in _FILE_BACKENDS and not path.is_file():
        raise _not_found(location)
    local = path.exists()
    if local and revision is not None:
        raise TokenizerError(
            f"{location} is a local path, which has no revision {revision}",
            hint="leave out --student-revision or --teacher-revision, or give a repo id",
        )
    if kind in _FILE_BACKENDS:
        backend = _FILE_BACKENDS[kind](path, pattern=pattern)
    elif local and not path.is_dir():
        raise TokenizerError(f"{location} is a file, not a folder", hint="give the folder it is in")
    elif local or _is_repo_id(location):
        backend = HuggingFaceBackend(
            path if local else location, revision=revision, pattern=pattern
        )
    else:
        raise _not_found(location)
    return Tokenizer(
        backend,
        model_id=_printable((path.resolve().name or location) if local else location),
        location=path if local else location,
        revision=revision,
        vocab_size=vocab_size,
    )


def from_transformers(tokenizer: Any, *, vocab_size: int | None = None) -> Tokenizer:
    """Wrap a fast Hugging Face tokenizer that is already loaded; it is copied, not changed.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        vocab_size: the width of the model's logits; by default that of the config in the folder it
            was loaded from, else the largest id + 1.

    Raises:
        TokenizerError: if it is a slow tokenizer, or its tokens are no byte strings.
    """
    name = str(getattr(tokenizer, "name_or_path", "") or "tokenizer")
    backend = HuggingFaceBackend.from_loaded(tokenizer, name)
    return Tokenizer(backend, model_id=Path(name).name or name, vocab_size=vocab_size)


def _split_prefix(model: str) -> tuple[str | None, str]:
    kind, colon, location = model.partition(":")
    if colon and (kind == "hf" or kind in _FILE_BACKENDS):
        return kind, location
    return None, model


def _is_repo_id(location: str) -> bool:
    """Tell a repo id (`name` or `owner/name`) from a path that does not exist."""
    parts = location.split("/")
    is_path = len(parts) > 2 or any(not p or p[0] in ".~" for p in parts)
    return not is_path and not location.endswith((".model", ".tiktoken", ".json"))


def _printable(name: str) -> str:
    """Return a name that a file can carry, whatever bytes the file system has in it."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _not_found(location: str) -> TokenizerError:
    return TokenizerError(
        f"no such file or folder: {location}",
        hint="give the path of a tokenizer file or folder, or a repo id such as Qwen/Qwen3-8B",
    )
