"""Files of a model: in a local folder, or in a Hugging Face repo, fetched if need be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from xtok.errors import XtokError

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

    with _plain_errors(model, revision, error):
        try:
            found = hf_hub_download(model, name, revision=revision, local_files_only=offline)
            return Path(found)
        except errors.LocalEntryNotFoundError as missing:
            if required or _was_asked(missing):
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
    from huggingface_hub import constants, file_exists, try_to_load_from_cache

    with _plain_errors(model, revision, error):
        cached = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(cached, str):
            return True
        if offline or constants.HF_HUB_OFFLINE:
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

    with _plain_errors(model, revision, error):
        folder = snapshot_download(
            model, revision=revision, ignore_patterns=_LEFT_OUT, local_files_only=offline
        )
        return Path(folder)


@contextmanager
def _plain_errors(model: str, revision: str | None, error: type[XtokError]) -> Iterator[None]:
    """Say what the hub says in one line, with the command that mends it."""
    from huggingface_hub import errors

    repo = model + (f" at revision {revision}" if revision else "")
    # The bases are the errors of the HTTP client that the hub's library uses, whichever that is.
    of_client = cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__)
    others: tuple[type[Exception], ...] = (errors.HFValidationError, OSError, *of_client)
    try:
        yield
    except errors.LocalEntryNotFoundError as cause:
        use = "; to take what is in the cache: --offline" if _was_asked(cause) else ""
        raise error(
            f"{repo} is not in the local cache, and the hub cannot be reached; nor is there a file "
            "or folder of this name",
            hint="check the spelling; fetch a repo where there is a network: hf download "
            f"{model}{use}",
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


def _was_asked(missing: Exception) -> bool:
    """Tell whether the hub was asked for what is not in the cache, and gave no answer."""
    from huggingface_hub import errors

    return not isinstance(missing.__cause__, (type(None), errors.OfflineModeIsEnabled))
