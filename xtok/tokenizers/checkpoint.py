"""Read a model's weights from safetensors files, without the model's class."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtok._lib.parsing import parse_json
from xtok.errors import EmbeddingError
from xtok.tokenizers.hub import ModelFiles

if TYPE_CHECKING:
    import torch

    from xtok.tokenizers import Tokenizer

_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FETCH_HINT = "the checkpoint is damaged: download it again"


class Checkpoint(ModelFiles):
    """The weight files of a model. Missing and damaged files raise an `EmbeddingError`."""

    error = EmbeddingError

    @property
    def model_id(self) -> str:
        """The repo id, or the last component of a folder's path."""
        return self.model.name if isinstance(self.model, Path) else self.model

    def has_weights(self) -> bool | None:
        """Whether the model has safetensors weights, or None if unknown. Downloads no weights."""
        return True if self.find(INDEX) is not None else self.has(_FILE)

    def tensor_files(self) -> dict[str, str]:
        """Return a dict from the name of each tensor to its file name. Downloads no shards."""
        if self.find(INDEX) is not None:
            shards = self.json(INDEX).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise EmbeddingError(f"the {INDEX} of {self} is damaged", hint=_FETCH_HINT)
            return {str(name): str(file) for name, file in shards.items()}
        hint = "save the model with save_pretrained, or use a model with a safetensors checkpoint"
        path = self.require(_FILE, f"{self} has no {_FILE}", hint=hint)
        return dict.fromkeys(read_header(path), _FILE)

    def shard(self, name: str) -> Path:
        """Return the local path of a weight file. Downloads the file if necessary."""
        problem = f"{self} has no {name}, but its {INDEX} lists this file"
        return self.require(name, problem, hint=_FETCH_HINT)


def checkpoint_of(tokenizer: Tokenizer, offline: bool = False) -> Checkpoint | None:
    """Return the checkpoint in a tokenizer's folder or repo, or None for a single file."""
    location = tokenizer.location
    if location is None or (isinstance(location, Path) and not location.is_dir()):
        return None
    return Checkpoint(location, revision=tokenizer.vocabulary.revision, offline=offline)


def read_header(path: Path) -> dict[str, Any]:
    """Return the dtype, shape and offsets of each tensor in a safetensors file, in file order."""
    with _open(path), path.open("rb") as file:  # also checks the file
        header: dict[str, Any] = parse_json(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))


def read_tensor(path: Path, name: str, dimensions: Collection[int] = (2,)) -> torch.Tensor:
    """Return a floating-point tensor from a safetensors file without changing the dtype."""
    import torch

    with _open(path) as file:
        tensor: torch.Tensor = file.get_tensor(name)  # NumPy has no bfloat16
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if tensor.ndim not in dimensions or tensor.dtype not in floats:
        raise EmbeddingError(
            f"{path}, {name}: {tensor.dtype} {list(tensor.shape)}, expected a matrix of floats",
            hint="use a checkpoint without quantization, or download the checkpoint again",
        )
    return tensor


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a safetensors file for PyTorch. Raises an `EmbeddingError` if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise EmbeddingError(
            f"{path} is not a complete safetensors file: {error}", hint=_FETCH_HINT
        ) from error
