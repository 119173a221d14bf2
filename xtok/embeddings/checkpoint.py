"""The input-embedding layer of a checkpoint: which tensor it is, read without the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.errors import EmbeddingError
from xtok.tokenizers.hub import ModelFiles

# The layer's name in the checkpoints of transformers' models, the more common first.
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
_OUTPUT_NAME = "lm_head.weight"  # the same matrix where config.json ties the two

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Model(ModelFiles):
    """A model's files."""

    error = EmbeddingError

    @property
    def model_id(self) -> str:
        """The name that a map gives it: a folder's own, without the path to it."""
        return self.model.name if isinstance(self.model, Path) else self.model

    def has_checkpoint(self) -> bool | None:
        """Tell whether there is a safetensors checkpoint, without fetching it.

        None if that is unknown, because the repo is not in the local cache.
        """
        return True if self.find(_INDEX) is not None else self.has(_FILE)


@dataclass(frozen=True)
class Layer:
    """Which tensor of which file is the layer, and its shape."""

    path: Path
    name: str
    shape: tuple[int, int]

    def read(self) -> NDArray[np.float32]:
        """Read the matrix, and no other tensor of the file, as float32 `[rows, dimension]`."""
        with _opened(self.path) as file:  # by PyTorch, because NumPy has no bfloat16
            matrix: NDArray[np.float32] = file.get_tensor(self.name).float().numpy()
        return matrix


def find_layer(model: Model) -> Layer:
    """Find the input-embedding layer of a model's checkpoint.

    Raises:
        EmbeddingError: if there is no safetensors checkpoint, or no such layer in it.
    """
    index = model.find(_INDEX)
    path = model.find(_FILE, required=True) if index is None else None
    if index is not None:
        try:
            files = json.loads(index.read_bytes())["weight_map"]
            name = _choose(list(files), model)
            shard = str(files[name])
        except (ValueError, LookupError, TypeError) as error:
            raise EmbeddingError(
                f"{index} is not an index of shards: {error}", hint=_FETCH
            ) from error
        path = model.find(shard, required=True)
        if path is None:
            raise EmbeddingError(f"{model} lacks {shard}, which holds {name}", hint=_FETCH)
    elif path is None:
        raise EmbeddingError(
            f"{model} has neither {_FILE} nor {_INDEX}",
            hint="give a model with a safetensors checkpoint; save_pretrained writes one",
        )
    with _opened(path) as file:
        names = list(file.keys())
        if index is None:
            name = _choose(names, model)
        if name not in names:
            raise EmbeddingError(f"{path} lacks {name}, which its index says it has", hint=_FETCH)
        tensor = file.get_slice(name)
        dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
    if dtype not in ("F64", "F32", "F16", "BF16"):  # no integers of quantized weights
        raise EmbeddingError(
            f"{name} of {path} is stored as {dtype}, not as float32, bfloat16 or float16",
            hint="give the checkpoint that is not quantized",
        )
    if len(shape) != 2:
        raise EmbeddingError(f"{name} of {path} is no matrix: its shape is {shape}", hint=_FETCH)
    return Layer(path, name, shape)


_FETCH = "the checkpoint is damaged: fetch it again"


def _choose(names: list[str], model: Model) -> str:
    """Return the layer's name of a checkpoint's tensors, by the known names alone."""
    for name in _NAMES:
        if name in names:
            return name
    if _OUTPUT_NAME in names and model.json("config.json").get("tie_word_embeddings") is True:
        return _OUTPUT_NAME
    raise EmbeddingError(
        f"none of the {len(names)} tensors of {model} is an input-embedding layer that xtok knows",
        hint="give another model; known names are model.embed_tokens.weight, "
        "transformer.wte.weight, embeddings.word_embeddings.weight and their like",
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file: its header is read and checked, its tensors only when asked for."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise EmbeddingError(
            f"{path} is not a whole safetensors file: {error}", hint=_FETCH
        ) from error
