"""Parse model names `KIND:LOCATION@SUFFIX`. The location is a repo, a folder or a file."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from xtok.errors import TokenizerError

FILE_KINDS = ("tekken", "tiktoken", "spm")
BUILT_IN = ("bytes", "null")
_PREFIXES = ("hf", *FILE_KINDS, *BUILT_IN)

TOKENIZER_JSON = "tokenizer.json"  # this name means the folder that contains the file


class ModelName(NamedTuple):
    """The parts of a model name `KIND:LOCATION@SUFFIX`."""

    kind: str | None
    location: str
    suffix: str | None  # revision of a repo, or split pattern of a file
    path: Path  # path of the location, which may not exist

    @property
    def is_json(self) -> bool:
        """Whether the path is an existing `tokenizer.json`. The model is then its folder."""
        return self.path.name == TOKENIZER_JSON and self.path.is_file()

    @property
    def model_id(self) -> str:
        """Name of the model in maps: a repo id, or the last component of a path."""
        model = self.location
        if self.kind in BUILT_IN:
            return f"{self.kind}:{model}".rstrip(":")
        if self.path.exists():
            path = Path(os.path.abspath(self.path))
            model = (path.parent if self.is_json else path).name or model
        # A file name can contain any bytes, but maps require UTF-8.
        return os.fsencode(model).decode("utf-8", "backslashreplace")


def parse_name(model: str | PathLike[str]) -> ModelName:
    """Split a model name. An `@` in an existing path does not start a suffix."""
    kind, location = _split_prefix(os.fspath(model))
    if kind in BUILT_IN:
        return ModelName(kind, location, None, Path(location))
    if not location:
        raise TokenizerError("the model name is empty", hint="pass a repo id, a folder or a file")
    cuts = ((location[: m.start()], location[m.end() :]) for m in re.finditer("(?!^)@", location))
    splits: list[tuple[str, str | None]] = [(location, None), *cuts]
    for start, suffix in splits:
        with suppress(TokenizerError):  # a pattern can be too long for a path
            if (path := _path(start)).exists():
                return ModelName(kind, start, suffix, path)
    start, suffix = splits[:2][-1]  # in a repo's name, the revision starts after the first @
    if is_path(start, sure=True):
        start, suffix = splits[0]
    return ModelName(kind, start, suffix, _path(start))


def model_id(model: str | PathLike[str]) -> str:
    """Return the name that maps record for a model: a repo id, or the last component of a path.

    >>> model_id("Qwen/Qwen3-8B@main"), model_id("/usr")
    ('Qwen/Qwen3-8B', 'usr')
    """
    return parse_name(model).model_id


def absolute(model: str) -> str:
    """Make the path in a model name absolute. A name without a path is returned unchanged."""
    kind, _, suffix, path = parse_name(model)
    if kind in BUILT_IN or not path.exists():
        return model
    prefix = f"{kind}:" if kind else ""
    return f"{prefix}{os.path.abspath(path)}{'' if suffix is None else f'@{suffix}'}"


def _split_prefix(model: str) -> tuple[str | None, str]:
    kind, colon, location = model.partition(":")
    if location.startswith("//"):
        repo = "/".join(location[2:].split("/")[1:3]) or "Qwen/Qwen3-8B"
        raise TokenizerError(
            f"URLs are not supported: {model}", hint=f"pass the repo id, such as {repo}"
        )
    if colon and kind in _PREFIXES:
        return kind, location
    if not re.fullmatch(r"[A-Za-z][\w-]+", kind) or _path(model).exists():
        return None, model
    if colon:
        raise TokenizerError(
            f"unknown tokenizer prefix '{kind}:'",
            hint=f"use one of the prefixes {':, '.join(_PREFIXES)}:; for a file name "
            f"with a colon, pass ./{model}",
        )
    return (kind, "") if kind in BUILT_IN else (None, model)


def _path(location: str) -> Path:
    try:
        path = Path(location).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        raise TokenizerError(
            f"{location[:80]} cannot be opened: {getattr(error, 'strerror', None) or error}",
            hint="check the path and its permissions",
        ) from error
    return path


def is_path(location: str, *, sure: bool = False) -> bool:
    """Whether a model's name is a path.

    A name is a path if the name is not a valid repo id, or has the suffix of a tokenizer file, such
    as `.model`. If `sure` is False, a name is also a path if its first folder exists.
    """
    first, slash, _ = location.partition("/")
    return (
        not _REPO_ID.fullmatch(location)
        or location.endswith((".model", ".tiktoken", ".json", ".gguf"))
        or (not sure and bool(slash) and _path(first).exists())
    )


# `name` or `owner/name`; the rules are from utils/_validators.py of huggingface_hub.
_REPO_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w[\w.-]{0,95}", re.ASCII)


def not_found(location: str) -> TokenizerError:
    """Return the error for a path that does not exist."""
    hint = "pass the path of a tokenizer file or folder, or a repo id such as Qwen/Qwen3-8B"
    if _REPO_ID.fullmatch(location):
        hint = f"check the path; for a repo on the hub, pass hf:{location}"
    return TokenizerError(f"no such file or folder: {location}", hint=hint)
