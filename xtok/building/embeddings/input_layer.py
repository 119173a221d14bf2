"""Find and read the input-embedding layer of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.parsing import parse_json
from xtok.errors import EmbeddingError
from xtok.tokenizers.hub import ModelFiles

if TYPE_CHECKING:
    import torch

# Names of the layer in the checkpoints of transformers' models, the most common first
_NAMES = (
    "model.embed_tokens.weight", "transformer.wte.weight", "embeddings.word_embeddings.weight",
    "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight", "embed_tokens.weight", "wte.weight",
    "bert.embeddings.word_embeddings.weight", "roberta.embeddings.word_embeddings.weight",
    "distilbert.embeddings.word_embeddings.weight", "model.embeddings.tok_embeddings.weight",
    "embeddings.tok_embeddings.weight", "model.tok_embeddings.weight",
    "model.word_embeddings.weight", "model.decoder.embed_tokens.weight",
    "transformer.word_embeddings.weight", "word_embeddings.weight",
    "transformer.embedding.word_embeddings.weight", "transformer.embd.wte.weight",
    "gpt_neox.embed_in.weight", "embed_in.weight", "backbone.embeddings.weight",
    "backbone.embedding.weight", "shared.weight",
)  # fmt: skip
_OUTPUT_NAME = "lm_head.weight"  # the same matrix if config.json ties both

_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Model(ModelFiles):
    """A model's files, with errors about embeddings."""

    error = EmbeddingError

    @property
    def model_id(self) -> str:
        """The repo id, or the name of a folder without its path."""
        return self.model.name if isinstance(self.model, Path) else self.model

    def has_checkpoint(self) -> bool | None:
        """Whether there is a safetensors checkpoint, without fetching it; None if unknown."""
        return True if self.find(INDEX) is not None else self.has(_FILE)


def input_layer(model: Model) -> tuple[str, NDArray[np.float32]]:
    """Return the name of a model's input-embedding layer, and its float32 `[rows, dimension]`."""
    files = tensor_files(model)
    name = choose_layer(files, model)
    return name, np.asarray(read_tensor(shard_path(model, files[name]), name).float().numpy())


def tensor_files(model: Model) -> dict[str, str]:
    """Return the file name of each tensor in a safetensors checkpoint, without fetching shards."""
    if model.find(INDEX) is not None:
        shards = model.json(INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise EmbeddingError(f"the {INDEX} of {model} is damaged", hint=_FETCH_HINT)
        return {str(name): str(file) for name, file in shards.items()}
    path = model.find(_FILE, required=True)
    if path is None:
        raise EmbeddingError(
            f"{model} has no {_FILE}",
            hint="give a model with a safetensors checkpoint; save_pretrained writes one",
        )
    return dict.fromkeys(read_header(path), _FILE)


def read_header(path: Path) -> dict[str, Any]:
    """Return each tensor's dtype, shape and place in a safetensors file, in the file's order."""
    with opened_checkpoint(path), path.open("rb") as file:  # which checks the file
        header: dict[str, Any] = parse_json(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))


def shard_path(model: Model, name: str) -> Path:
    """Return the local path of a checkpoint's file, fetched if necessary."""
    path = model.find(name, required=True)
    if path is None:
        raise EmbeddingError(f"{model} lacks {name}, listed in its {INDEX}", hint=_FETCH_HINT)
    return path


def read_tensor(path: Path, name: str, dimensions: Collection[int] = (2,)) -> torch.Tensor:
    """Return a tensor of floats from a safetensors file, in its own dtype."""
    import torch

    with opened_checkpoint(path) as file:
        tensor: torch.Tensor = file.get_tensor(name)  # NumPy has no bfloat16
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if tensor.ndim not in dimensions or tensor.dtype not in floats:
        raise EmbeddingError(
            f"{path}, {name}: {tensor.dtype} {list(tensor.shape)}, expected a matrix of floats",
            hint="give a checkpoint without quantization, or fetch it again",
        )
    return tensor


@contextmanager
def opened_checkpoint(path: Path) -> Iterator[Any]:
    """Open a safetensors file for PyTorch; an `EmbeddingError` if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise EmbeddingError(
            f"{path} is not a whole safetensors file: {error}", hint=_FETCH_HINT
        ) from error


_FETCH_HINT = "the checkpoint is damaged: fetch it again"


def choose_layer(names: Collection[str], model: Model) -> str:
    """Return the first known name of an input-embedding layer."""
    for name in _NAMES:
        if name in names:
            return name
    if _OUTPUT_NAME in names and model.json("config.json").get("tie_word_embeddings") is True:
        return _OUTPUT_NAME
    raise EmbeddingError(
        f"{model}: none of its {len(names)} tensors is a known input-embedding layer",
        hint="give another model; known names include model.embed_tokens.weight, "
        "transformer.wte.weight and embeddings.word_embeddings.weight",
    )
