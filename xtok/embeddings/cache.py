"""Embeddings kept in the user's cache folder, by what they are made of."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.errors import EmbeddingError
from xtok.io import replacing


@dataclass(frozen=True)
class Cache:
    """A folder of embeddings, a file for each key; several processes may share it.

    Attributes:
        folder: where the files are.
        recompute: ignore files that exist, and replace them.
    """

    folder: Path
    recompute: bool = False

    def check(self) -> None:
        """Make the folder, before any work is done; `EmbeddingError` if it cannot be used."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError("Permission denied")
        except OSError as error:
            raise EmbeddingError(
                f"the cache folder {self.folder} cannot be used: {error.strerror or error}",
                hint="give another one with {option}",
                parameter="cache_dir",
            ) from error

    def get(self, key: Mapping[str, Any], num_rows: int) -> NDArray[np.float32] | None:
        """Return the embeddings of a key, float32 `[num_rows, d]`; None if missing or damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        if self.recompute:
            return None
        try:
            embeddings: NDArray[np.float32] = load_file(self.path(key))["embeddings"]
        except (SafetensorError, OSError, KeyError):
            return None
        whole = embeddings.dtype == np.float32 and embeddings.ndim == 2
        return embeddings if whole and len(embeddings) == num_rows else None

    def put(self, key: Mapping[str, Any], embeddings: NDArray[np.float32]) -> None:
        """Write the embeddings of a key; `EmbeddingError` if that fails."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        try:
            with replacing(self.path(key)) as temporary:
                key_as_text = json.dumps(key, sort_keys=True)
                save_file({"embeddings": embeddings}, temporary, {"xtok": key_as_text})
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise EmbeddingError(
                f"embeddings cannot be cached in {self.folder}: {reason}",
                hint="free some space, or give another folder with {option}",
                parameter="cache_dir",
            ) from error

    def path(self, key: Mapping[str, Any]) -> Path:
        """Return the file of a key: its name is the key's sha256."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest}.safetensors"
