"""Embed tokens as text, with sentence models or input-embedding layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.io import cache_folder, read_sealed, write_sealed
from xtok._lib.progress import Progress
from xtok._lib.threads import one_thread_each
from xtok.building.embeddings.input_layer import input_layer
from xtok.building.embeddings.similarity import Vectors
from xtok.config import GenerateConfig
from xtok.errors import EmbeddingError, OutputError, install_hint
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.checkpoint import Checkpoint
from xtok.tokenizers.notes import examples_of
from xtok.tokenizers.table import TokenTable

# Constant, because padding depends on the batch size and changes the last bits of the results
_TEXTS_PER_BATCH = 256


def open_source(
    embedding_model: str,
    config: GenerateConfig,
    cache_dir: Path | None,
    *,
    force_recompute: bool,
    offline: bool,
) -> SentenceModel | InputLayer:
    """Download and open the model of `sentence:MODEL` or `input:MODEL`."""
    kind, colon, location = embedding_model.partition(":")
    if not (colon and location and kind in ("sentence", "input")):
        raise EmbeddingError(
            f"the embedding model {embedding_model} does not specify which embeddings to use",
            hint="pass sentence:MODEL (a sentence-transformers model), input:MODEL (the input "
            "embeddings of a model), 'own' (the input embeddings of both models) or 'spelling'",
        )
    path = Path(location).expanduser()
    if not path.is_dir() and (path.exists() or location.count("/") > 1 or location[0] in "./~"):
        raise EmbeddingError(
            f"no such folder: {location}", hint="pass the path of a model's folder, or a repo id"
        )
    repo, _, revision = location.partition("@")
    model = Checkpoint(repo, revision=revision or None, offline=offline)
    if path.is_dir():
        model = Checkpoint(path.resolve(), offline=offline)
    if kind == "input":
        return InputLayer(model)
    folder = cache_dir or cache_folder()
    return SentenceModel(model, config, folder, force_recompute=force_recompute)


class SentenceModel:
    """A sentence-transformers model. Its vectors are cached, because embedding takes minutes."""

    def __init__(
        self, model: Checkpoint, config: GenerateConfig, cache: Path, *, force_recompute: bool
    ) -> None:
        try:
            import sentence_transformers as library
        except ImportError as error:
            raise EmbeddingError(
                "sentence embeddings need sentence-transformers",
                hint=install_hint("sentence-transformers"),
            ) from error
        problem = f"{model} has no modules.json, so it is not a sentence-transformers model"
        hint = f"pass input:{model} for its input-embedding layer, or another model"
        model.require("modules.json", problem, hint=hint)
        self._library, self._folder, self.model_id = library, model.folder(), model.model_id
        self._config, self._cache, self._recompute = config, cache, force_recompute
        self.notes: list[str] = []
        self.key = {
            "kind": "sentence", "model": self.model_id, "revision": model.revision,
            "sha256": _folder_sha256(self._folder),
            "device": config.device.partition(":")[0], "dtype": config.dtype,
        }  # fmt: skip

    def embed(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Return the embeddings of the texts, from the cache if possible."""
        digest = hashlib.sha256(json.dumps([self.key, *texts], sort_keys=True).encode())
        path = self._cache / f"{digest.hexdigest()}.npy"
        cached = None if self._recompute else read_sealed(path, path.name)
        if cached is not None:
            self.notes.append(f"embeddings of {len(texts):,} tokens were read from the cache")
            return np.asarray(np.load(BytesIO(cached)))
        vectors = self._compute(texts, progress)
        if np.isfinite(vectors).all():
            content = BytesIO()
            np.save(content, vectors)
            try:
                write_sealed(path, [content.getbuffer()], path.name)
            except OutputError as error:  # keep the vectors, which can take minutes to compute
                self.notes.append(f"embeddings are not cached: {error.message}")
        return vectors

    def _compute(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Embed texts in batches of similar lengths, on one thread for reproducible rounding."""
        order = sorted(range(len(texts)), key=lambda i: (len(texts[i].encode()), i))
        result: Vectors = np.zeros((len(texts), 0), np.float32)
        with one_thread_each(), progress(f"embedding with {self.model_id}", len(texts)) as advance:
            for start in range(0, len(texts), _TEXTS_PER_BATCH):
                batch = order[start : start + _TEXTS_PER_BATCH]
                vectors = self._model.encode(
                    [texts[i] for i in batch], batch_size=_TEXTS_PER_BATCH, show_progress_bar=False
                )
                if not start:
                    result = np.empty((len(texts), vectors.shape[1]), np.float32)
                result[batch] = vectors
                advance(len(batch))
        return result

    @cached_property
    def _model(self) -> Any:
        import torch

        try:
            return self._library.SentenceTransformer(
                str(self._folder), device=self._config.device, local_files_only=True,
                model_kwargs={"dtype": getattr(torch, self._config.dtype)},
            )  # fmt: skip
        except Exception as error:
            raise EmbeddingError(
                f"the sentence model {self.model_id} cannot be loaded: {error}",
                hint="check modules.json and config.json, or download the model again",
            ) from error


class InputLayer:
    """The input-embedding layer of a language model. Averages the embeddings of a text's tokens."""

    def __init__(self, model: Checkpoint) -> None:
        self._model = model
        self._name, self._matrix = input_layer(model)
        problem = f"{model} has no tokenizer.json, which is needed to segment tokens"
        hint = "use a folder that also contains the model's tokenizer"
        tokenizer = model.require("tokenizer.json", problem, hint=hint)
        self.model_id, self.notes = model.model_id, list[str]()
        digest = hashlib.sha256(tokenizer.read_bytes())
        digest.update(self._matrix.data)
        self.key = {
            "kind": "input", "model": self.model_id, "revision": model.revision,
            "sha256": digest.hexdigest(), "pooling": "mean",
        }  # fmt: skip

    def embed(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Segment each text like a part of a longer text, and average the pieces' embeddings."""
        suffix = f"@{self._model.revision}" if self._model.revision else ""
        tokenizer = load_tokenizer(f"hf:{self._model}{suffix}", offline=self._model.offline)
        require_embedding_rows(tokenizer, len(self._matrix), self._name)
        result = np.zeros((len(texts), self._matrix.shape[1]), np.float32)
        with progress(f"embedding with {self.model_id}", len(texts)) as advance:
            for start in range(0, len(texts), 8192):
                part = texts[start : start + 8192]
                spelled = tokenizer.segment_batch([text.encode() for text in part])
                pieces = {start + i: ids for i, ids in enumerate(spelled) if ids}
                if pieces:
                    # The pieces of all texts are concatenated, and reduceat adds up each text's
                    # pieces.
                    lengths = np.array([len(ids) for ids in pieces.values()])
                    flat = self._matrix[np.concatenate(list(pieces.values()))]
                    sums = np.add.reduceat(flat, np.cumsum(lengths) - lengths, axis=0)
                    result[list(pieces)] = sums / lengths[:, None].astype(np.float32)
                advance(len(part))
        return result


def require_embedding_rows(tokenizer: Tokenizer, num_rows: int, name: str) -> None:
    """Raise an `EmbeddingError` if a layer has fewer rows than the tokenizer has ids."""
    needed = tokenizer.vocabulary.tokenizer_vocab_size or 0
    if num_rows < needed:
        raise EmbeddingError(
            f"{tokenizer.vocabulary.model_id}, {name}: {num_rows} rows, expected at least {needed} "
            "(the tokenizer's ids)",
            hint="use a checkpoint and a tokenizer that belong together",
        )


def require_finite(
    vectors: Vectors, ids: NDArray[np.int64], table: TokenTable, model_id: str
) -> None:
    """Raise an `EmbeddingError` if embeddings contain NaN or infinity."""
    bad = ids[~np.isfinite(vectors).all(axis=1)].tolist()
    if bad:
        raise EmbeddingError(
            f"embeddings from {model_id} are not finite for {examples_of(bad, table)}",
            hint="check the checkpoint, or pass float32 with {option}",
            parameter="dtype",
        )


def _folder_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".") and path.suffix != ".md":
            digest.update(f"{name}\n".encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
