"""The input-embedding layer of a checkpoint: which tensor it is, and its bytes alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok.errors import EmbeddingError
from xtok.hub import find_file, has_file

# The layer's name in the checkpoints of transformers' models, the more common first.
_NAMES = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "embeddings.word_embeddings.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "embed_tokens.weight",
    "wte.weight",
    "bert.embeddings.word_embeddings.weight",
    "roberta.embeddings.word_embeddings.weight",
    "distilbert.embeddings.word_embeddings.weight",
    "model.embeddings.tok_embeddings.weight",
    "embeddings.tok_embeddings.weight",
    "model.tok_embeddings.weight",
    "model.word_embeddings.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.word_embeddings.weight",
    "word_embeddings.weight",
    "transformer.embedding.word_embeddings.weight",
    "transformer.embd.wte.weight",
    "gpt_neox.embed_in.weight",
    "embed_in.weight",
    "backbone.embeddings.weight",
    "backbone.embedding.weight",
    "shared.weight",
)
_OUTPUT_NAME = "lm_head.weight"  # the same matrix where config.json ties the two

_DTYPES: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

_READ_AT_ONCE = 1 << 26  # bytes, so that a matrix is not held twice

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Model:
    """A model's files: those of a folder (a `Path`), or of a hub repo (a `str`)."""

    location: str | Path
    revision: str | None = None
    offline: bool = False

    def __str__(self) -> str:
        return str(self.location)

    @property
    def model_id(self) -> str:
        """The name that a map gives it: a folder's own, without the path to it."""
        return self.location.name if isinstance(self.location, Path) else self.location

    def find(self, name: str, *, required: bool = False) -> Path | None:
        """Return a file's path as `hub.find_file` does."""
        return find_file(
            self.location,
            name,
            revision=self.revision,
            required=required,
            offline=self.offline,
            error=EmbeddingError,
        )

    def has_checkpoint(self) -> bool:
        """Tell whether there is a safetensors checkpoint, without fetching it.

        Raises:
            EmbeddingError: if that is unknown, because the repo is not in the local cache.
        """
        if self.find(_INDEX) is not None:
            return True
        found = has_file(
            self.location,
            _FILE,
            revision=self.revision,
            offline=self.offline,
            error=EmbeddingError,
        )
        if found is None:
            raise EmbeddingError(
                f"the weights of {self} are not in the local cache, so its own embeddings are "
                "not available offline",
                hint=f"where there is a network: hf download {self} --include "
                "'model*.safetensors*'; or name an embedding model",
            )
        return found


@dataclass(frozen=True)
class Layer:
    """Where a matrix is: `shape` values of `dtype` (safetensors' name), from byte `start` on."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, int]
    start: int

    def read(self) -> NDArray[np.float32]:
        """Read the matrix, and no other byte of the file, as float32 `[rows, dimension]`."""
        stored = np.dtype(_DTYPES[self.dtype])
        result = np.empty(self.shape[0] * self.shape[1], np.float32)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            for first in range(0, len(result), _READ_AT_ONCE // stored.itemsize):
                count = min(_READ_AT_ONCE // stored.itemsize, len(result) - first)
                part = np.frombuffer(_read(file, count * stored.itemsize, self.path), stored)
                if self.dtype == "BF16":  # the upper half of a float32
                    part = (part.astype(np.uint32) << 16).view(np.float32)
                result[first : first + count] = part
        return result.reshape(self.shape)


def find_layer(model: Model) -> Layer:
    """Find the input-embedding layer of a model's checkpoint.

    Raises:
        EmbeddingError: if there is no safetensors checkpoint, or no such layer in it.
    """
    index = model.find(_INDEX)
    if index is None:
        path = model.find(_FILE, required=True)
        if path is None:
            raise EmbeddingError(
                f"{model} has neither {_FILE} nor {_INDEX}",
                hint="give a model with a safetensors checkpoint; save_pretrained writes one",
            )
        header, start = _header(path)
        return _layer(path, _choose(list(header), model), header, start)
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        name = _choose(list(files), model)
        shard = str(files[name])
    except (ValueError, LookupError, TypeError) as error:
        raise EmbeddingError(f"{index} is not an index of shards: {error}", hint=_FETCH) from error
    path = model.find(shard, required=True)
    if path is None:
        raise EmbeddingError(f"{model} lacks {shard}, which holds {name}", hint=_FETCH)
    header, start = _header(path)
    return _layer(path, name, header, start)


_FETCH = "the checkpoint is damaged: fetch it again"


def _choose(names: list[str], model: Model) -> str:
    """Return the layer's name of a checkpoint's tensors, by the known names alone."""
    for name in _NAMES:
        if name in names:
            return name
    if _OUTPUT_NAME in names and _is_tied(model):
        return _OUTPUT_NAME
    raise EmbeddingError(
        f"none of the {len(names)} tensors of {model} is an input-embedding layer that xtok knows",
        hint="give another model; known names are model.embed_tokens.weight, "
        "transformer.wte.weight, embeddings.word_embeddings.weight and their like",
    )


def _is_tied(model: Model) -> bool:
    path = model.find("config.json")
    try:
        return path is not None and json.loads(path.read_bytes())["tie_word_embeddings"] is True
    except (ValueError, LookupError, TypeError):
        return False


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the byte that its tensors begin at."""
    try:
        with path.open("rb", buffering=0) as file:
            length = int.from_bytes(_read(file, 8, path), "little")
            if length > path.stat().st_size:
                raise ValueError("its header is cut off")
            header = dict(json.loads(_read(file, length, path)))
    except (ValueError, TypeError, OSError) as error:
        raise EmbeddingError(
            f"{path} is not a whole safetensors file: {error}", hint=_FETCH
        ) from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _layer(path: Path, name: str, header: dict[str, Any], start: int) -> Layer:
    try:
        tensor = header[name]
        dtype, shape = str(tensor["dtype"]), tuple(int(n) for n in tensor["shape"])
        first, last = (int(n) for n in tensor["data_offsets"])
    except (ValueError, LookupError, TypeError) as error:
        raise EmbeddingError(f"{path} does not tell where {name} is", hint=_FETCH) from error
    if dtype not in _DTYPES:
        raise EmbeddingError(
            f"{name} of {path} is stored as {dtype}, not as float32, bfloat16 or float16",
            hint="give the checkpoint that is not quantized",
        )
    if len(shape) != 2 or last - first != shape[0] * shape[1] * np.dtype(_DTYPES[dtype]).itemsize:
        raise EmbeddingError(f"{name} of {path} is no matrix: its shape is {shape}", hint=_FETCH)
    return Layer(path, name, dtype, (shape[0], shape[1]), start + first)


def _read(file: Any, size: int, path: Path) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = file.readinto(view[done:])
        if not count:
            raise EmbeddingError(f"{path} is cut off", hint=_FETCH)
        done += count
    return data
