"""The files of a model: those of a folder, or of a hub repo at one commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xtok.errors import TokenizerError
from xtok.tokenizers.hub import find_file

SPECIAL_NAMES = ("bos", "eos", "pad", "unk", "mask", "sep", "cls")
"""The roles that `tokenizer_config.json` gives to tokens, each as `bos_token` and the like."""


class ModelFiles:
    """Files by name, fetched if need be, all of one commit, even if the branch moves meanwhile.

    The hub's own variables apply: `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HOME`. Processes
    that fetch the same file at once wait for one another (huggingface_hub locks each blob).
    """

    def __init__(
        self, model: str | Path, *, revision: str | None = None, offline: bool = False
    ) -> None:
        self.model, self.revision, self.offline = model, revision, offline

    def __str__(self) -> str:
        return str(self.model)

    def find(self, name: str, *, required: bool = False) -> Path | None:
        """Return a file's path; None where the model has none.

        Raises:
            TokenizerError: if the repo is not available; with `required`, also if it is unknown
                whether it has the file, as when the hub is out of reach.
        """
        path = find_file(
            self.model,
            name,
            revision=self.revision,
            required=required,
            offline=self.offline,
            error=TokenizerError,
        )
        if path is None or isinstance(self.model, Path):
            return path
        if path.parent.parent.name == "snapshots":
            self.revision = path.parent.name  # what comes after is of this commit
        return path

    def first(self, names: tuple[str, ...]) -> Path | None:
        """Return the first of several files that exists; in a folder, names may be patterns.

        Raises:
            TokenizerError: as `find`, and if several files fit a pattern.
        """
        for name in names:
            if isinstance(self.model, Path):
                paths = sorted(filter(Path.is_file, self.model.glob(name)))
                if len(paths) > 1:
                    raise TokenizerError(
                        f"{self} has several files {name}: {', '.join(p.name for p in paths)}",
                        hint=f"give one of them, such as {paths[0]}",
                    )
                if paths:
                    return paths[0]
            elif "*" not in name:
                path = self.find(name)
                if path is not None:
                    return path
        return None

    def json(self, name: str) -> dict[str, Any]:
        """Return a file's JSON object; an empty one if the file does not exist.

        Raises:
            TokenizerError: if it is not a JSON object.
        """
        path = self.find(name)
        if path is None:
            return {}
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise _not_json(path) from error
        if not isinstance(content, dict):
            raise _not_json(path)
        return content


def model_vocab_size(files: ModelFiles) -> int | None:
    """Return the width that config.json gives; None without a config.json.

    Read from the file if it is there, so that a model of a new or custom type needs no code; else
    the default of its type, from transformers' `get_text_config().vocab_size`.

    Raises:
        TokenizerError: if there is none.
    """
    if files.find("config.json") is None:
        return None
    config = files.json("config.json")
    for part in (config.get("text_config"), config):
        if isinstance(part, dict) and isinstance(size := part.get("vocab_size"), int):
            return size
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(
            files.model,
            revision=files.revision,
            local_files_only=files.offline,
            trust_remote_code=False,
        )
        return int(loaded.get_text_config().vocab_size)
    except Exception as error:
        raise TokenizerError(
            f"the config.json of {files} has no vocabulary size: {error}",
            hint="give the width of the model's logits with {option}",
            parameter="vocab_size",
        ) from error


def eos_ids(files: ModelFiles) -> list[int]:
    """Return the ids that the generation config ends a text with.

    Raises:
        TokenizerError: if it is not a JSON object, or these are not ids.
    """
    try:
        eos = files.json("generation_config.json").get("eos_token_id")
    except TokenizerError as error:
        raise _not_generation_config(files) from error
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise _not_generation_config(files)
    return ids


def _not_generation_config(files: ModelFiles) -> TokenizerError:
    return TokenizerError(
        f"{files.find('generation_config.json')} is not a generation config",
        hint="fix it, or remove it",
    )


def _not_json(path: Path) -> TokenizerError:
    return TokenizerError(f"{path} is not a JSON object", hint="fix it, or fetch it again")
