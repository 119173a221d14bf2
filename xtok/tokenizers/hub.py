"""Find and download the files of a model, from a local folder or a Hugging Face repo."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from xtok._lib.parsing import json_problem, parse_json
from xtok.errors import TokenizerError, XtokError

_LEFT_OUT = ["*.md", ".*", "*.h5", "*.msgpack", "*.ot", "*.onnx", "onnx/*", "openvino/*"]


class ModelFiles:
    """The files of a folder (a `Path`) or a hub repo (a `str`), downloaded on demand.

    All files come from the same commit, even if the branch changes during the downloads. The
    environment variables of huggingface_hub apply: `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`,
    `HF_HOME`.
    """

    error: type[XtokError] = TokenizerError
    """Class of the errors for unavailable repos and files."""

    def __init__(
        self, model: str | Path, *, revision: str | None = None, offline: bool = False
    ) -> None:
        self.model, self.revision, self.offline = model, revision, offline
        self.commit: str | None = None  # commit of the first file
        self.unknown: list[str] = []  # files that are not in the cache, but may be on the hub

    def __str__(self) -> str:
        return str(self.model)

    def find(self, name: str, *, required: bool = False) -> Path | None:
        """Return the path of a file, or None if the model has no such file.

        If `required` is set and xtok is offline, a file that is not in the cache is an error.
        """
        if isinstance(self.model, Path):
            path = self.model / name
            return path if path.is_file() else None
        from huggingface_hub import errors, hf_hub_download

        with self._hub():
            try:
                path = Path(hf_hub_download(self.model, name, **self._options()))
            except errors.EntryNotFoundError as error:
                if isinstance(error, errors.LocalEntryNotFoundError):
                    if required or not self.is_local:
                        raise
                    self.unknown.append(name)
                return None
        if path.parent.parent.name == "snapshots":
            self.commit = path.parent.name
        return path

    def require(self, name: str, problem: str, *, hint: str) -> Path:
        """Return the path of a file; if the model has no such file, raise an error."""
        path = self.find(name, required=True)
        if path is None:
            raise self.error(problem, hint=hint)
        return path

    def has(self, name: str) -> bool | None:
        """Whether the model has a file or folder, or None if unknown. Does not download it."""
        if isinstance(self.model, Path):
            return (self.model / name).exists()
        from huggingface_hub import get_paths_info, try_to_load_from_cache

        revision = self.commit or self.revision
        with self._hub():
            if not self.is_local:
                return bool(get_paths_info(self.model, name, revision=revision))
            if (self.folder() / name).exists():
                return True
            cached = try_to_load_from_cache(self.model, name, revision=revision)
            return None if cached is None else False  # the cache also records missing files

    def folder(self) -> Path:
        """Return the local folder. Downloads a repo, except the weights for other frameworks."""
        if isinstance(self.model, Path):
            return self.model
        from huggingface_hub import snapshot_download

        with self._hub():
            return Path(snapshot_download(self.model, ignore_patterns=_LEFT_OUT, **self._options()))

    def within(self, folder: str) -> list[Path]:
        """Return the files of a subfolder, sorted by name. A missing folder has no files."""
        if not self.has(folder):
            return []
        if isinstance(self.model, Path) or self.is_local:
            names = [path.name for path in (self.folder() / folder).iterdir()]
        else:
            from huggingface_hub import list_repo_tree

            with self._hub():
                tree = list_repo_tree(self.model, folder, revision=self.commit or self.revision)
                names = [Path(entry.path).name for entry in tree]
        paths = (self.find(f"{folder}/{name}") for name in sorted(names))
        return [path for path in paths if path is not None]

    def first(self, names: Sequence[str]) -> Path | None:
        """Return the first file that exists. In a local folder, the names can be patterns."""
        for name in names:
            if isinstance(self.model, Path):
                paths = sorted(filter(Path.is_file, self.model.glob(name)))
                if len(paths) > 1:
                    raise self.error(
                        f"several files in {self} match {name}: {', '.join(p.name for p in paths)}",
                        hint=f"give the path of a single file, such as {paths[0]}",
                    )
                if paths:
                    return paths[0]
            elif "*" not in name and (path := self.find(name)) is not None:
                return path
        return None

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file, or an empty dict if the file does not exist."""
        path = self.find(name)
        if path is None:
            return {}
        try:
            # Like Transformers, this rejects a byte order mark, and accepts Infinity (Mamba 2).
            content = parse_json(path.read_bytes().decode(), allow_nan=True)
        except ValueError as error:
            content = json_problem(error)
        if not isinstance(content, dict):
            problem = f": {content}" * isinstance(content, str)
            raise self.error(
                f"{path} is not a JSON object{problem}", hint="fix the file, or download it again"
            )
        return content

    def _is_online(self) -> bool:
        from huggingface_hub import constants

        return not (self.offline or constants.HF_HUB_OFFLINE)

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether files come only from the cache: xtok is offline, or the hub is unavailable."""
        return not (self._is_online() and is_reachable(int(time.monotonic() // 60)))

    def _options(self) -> dict[str, Any]:
        return {"revision": self.commit or self.revision, "local_files_only": self.is_local}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about files that were skipped because the hub is unavailable."""
        if not (self.unknown and self._is_online()):
            return ()
        names = ", ".join(dict.fromkeys(self.unknown))
        return (f"the hub cannot be reached, and the local cache of {self} has no {names}",)

    @contextmanager
    def _hub(self) -> Iterator[None]:
        """Silence the hub's library, and convert its errors to an `XtokError`."""
        from huggingface_hub import errors

        revision = self.commit or self.revision
        repo = str(self.model) + (f" at revision {revision}" if revision else "")
        kinds: tuple[type[Exception], ...] = (errors.HFValidationError, *_client_errors())
        try:
            with quiet_hub():
                yield
        except kinds as cause:
            # Test subclasses first: LocalEntryNotFoundError is also an EntryNotFoundError, and
            # GatedRepoError is also a RepositoryNotFoundError.
            if isinstance(cause, errors.LocalEntryNotFoundError):
                is_online, is_tokenizer = self._is_online(), issubclass(self.error, TokenizerError)
                hub = "the hub cannot be reached" if is_online else "xtok is offline"
                problem = f"{repo} is neither a local file or folder nor in the local cache, "
                problem += f"and {hub}"
                hint = "check the spelling; to download the repo on a machine with a network: "
                hint += f"hf download {self.model}"
                hint += " --include 'tokenizer*' --include '*config.json'" * is_tokenizer
                hint += "; to use only the cache: HF_HUB_OFFLINE=1" * is_online
            elif isinstance(cause, errors.EntryNotFoundError):
                raise  # the repo is available, but has no such file
            elif isinstance(cause, errors.GatedRepoError):
                problem = f"{repo} is gated, and you have no access"
                hint = "accept its terms on the hub, then run hf auth login (or set HF_TOKEN)"
            elif isinstance(cause, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
                problem = f"{repo} is neither a repo on the hub nor a local file or folder"
                hint = "check the spelling; for a private repo, run hf auth login (or set HF_TOKEN)"
            else:
                problem = f"{repo} cannot be downloaded: {cause}"
                hint = "use a repo id such as Qwen/Qwen3-8B, or the path of a file or folder"
            raise self.error(problem, hint=hint) from cause


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Suppress warnings of the hub's library, unless the user has set its verbosity."""
    from logging import ERROR, WARNING

    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    if before == WARNING:
        logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@functools.lru_cache(maxsize=1)
def is_reachable(minute: int) -> bool:
    """Whether the hub responds to a request. The result is cached for a minute.

    `minute` is the current minute. A request by `huggingface_hub` would retry for 20 seconds.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(f"{constants.ENDPOINT}/api", timeout=5)
    except _client_errors():
        return False
    return True


def _client_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of the HTTP client that huggingface_hub uses."""
    from huggingface_hub import errors

    bases = cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__)
    return (OSError, *bases)
