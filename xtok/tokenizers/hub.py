"""Files of a model: in a local folder, or in a Hugging Face repo, fetched if need be."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from xtok.errors import TokenizerError, XtokError

_LEFT_OUT = ["*.md", ".*", "*.h5", "*.msgpack", "*.ot", "*.onnx", "onnx/*", "openvino/*"]


def find_file(
    model: str | Path,
    name: str,
    *,
    revision: str | None = None,
    required: bool = False,
    offline: bool = False,
    error: type[XtokError] = XtokError,
) -> Path | None:
    """Return a file of a folder (a `Path`) or repo (a `str`); None where it has none.

    Args:
        model: the folder or the repo id.
        name: the file's name in it.
        revision: branch, tag or commit of the repo.
        offline: take only what is in the local cache.
        required: offline, a file that is not in the local cache is an error, not None; it always is
            where the hub was asked and gave no answer.
        error: what is raised where the repo cannot be had.
    """
    if isinstance(model, Path):
        path = model / name
        return path if path.is_file() else None
    from huggingface_hub import errors, hf_hub_download

    asks = not offline and _asks()
    answers = asks and hub_answers()
    with quiet_hub(), _plain_errors(model, revision, error, asks=asks):
        try:
            found = hf_hub_download(model, name, revision=revision, local_files_only=not answers)
            return Path(found)
        except errors.LocalEntryNotFoundError:
            if required or asks:
                raise
            return None  # offline, and what was cached came without this file
        except errors.EntryNotFoundError:
            return None


def has_file(
    model: str | Path,
    name: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    error: type[XtokError] = XtokError,
) -> bool | None:
    """Tell whether a folder or repo has a file, without fetching it; None if offline and unknown.

    The arguments are those of `find_file`.
    """
    if isinstance(model, Path):
        return (model / name).is_file()
    from huggingface_hub import file_exists, try_to_load_from_cache

    asks = not offline and _asks()
    with quiet_hub(), _plain_errors(model, revision, error, asks=asks):
        cached = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(cached, str):
            return True
        if not asks:
            return None if cached is None else False  # else the cache knows that there is none
        return file_exists(model, name, revision=revision)


def find_folder(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    error: type[XtokError] = XtokError,
) -> Path:
    """Return the local folder of a repo, fetched if need be, without other frameworks' weights."""
    from huggingface_hub import snapshot_download

    asks = not offline and _asks()
    local = not (asks and hub_answers())
    with quiet_hub(), _plain_errors(model, revision, error, asks=asks):
        found = snapshot_download(
            model, revision=revision, ignore_patterns=_LEFT_OUT, local_files_only=local
        )
        return Path(found)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Hold back the hub library's warnings of each try, unless the user has set its verbosity."""
    from logging import ERROR, WARNING

    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    if before == WARNING:
        logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _asks() -> bool:
    """Tell whether the hub may be asked, `HF_HUB_OFFLINE` being unset."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE


def hub_answers() -> bool:
    """Tell whether the hub answers at all, by one request; its own library tries for 20 seconds.

    The answer holds for a minute, so that many files cost one request.
    """
    return _answers(int(time.monotonic() // 60))


@functools.lru_cache(maxsize=1)
def _answers(minute: int) -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(f"{constants.ENDPOINT}/api", timeout=5)
    except _client_errors():
        return False
    return True


def _client_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the HTTP client that the hub's library uses, whichever that is."""
    from huggingface_hub import errors

    bases = cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__)
    return (OSError, *bases)


@contextmanager
def _plain_errors(
    model: str, revision: str | None, error: type[XtokError], *, asks: bool
) -> Iterator[None]:
    """Turn the hub library's errors into one line, with the command that fixes it."""
    from huggingface_hub import errors

    repo = model + (f" at revision {revision}" if revision else "")
    others: tuple[type[Exception], ...] = (errors.HFValidationError, *_client_errors())
    try:
        yield
    except errors.LocalEntryNotFoundError as cause:
        hub = "cannot be reached" if asks else "is not asked (offline)"
        files = " --include 'tokenizer*' --include '*config.json'" * issubclass(
            error, TokenizerError
        )
        cached = "; to use only what is in the cache: {option}" * asks
        raise error(
            f"{repo} is no file or folder here and not in the local cache, and the hub {hub}",
            hint="check the spelling; to fetch the repo where there is a network: "
            f"hf download {model}{files}{cached}",
            parameter="offline" * asks,
        ) from cause
    except errors.GatedRepoError as cause:
        raise error(
            f"{repo} is gated, and access is not granted to you",
            hint="accept its terms on the hub, then: hf auth login (or set HF_TOKEN)",
        ) from cause
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as cause:
        raise error(
            f"no model {repo} on the hub, and no such file or folder here",
            hint="check the spelling; a private repo needs: hf auth login (or HF_TOKEN)",
        ) from cause
    except errors.EntryNotFoundError:
        raise
    except others as cause:
        raise error(
            f"{repo} cannot be fetched: {cause}",
            hint="give a repo id such as Qwen/Qwen3-8B, or the path of a file or folder",
        ) from cause
