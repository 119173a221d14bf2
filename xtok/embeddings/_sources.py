"""Where embeddings of tokens come from: a sentence model, an input-embedding layer, or a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xtok.config import Dtype
from xtok.embeddings._checkpoint import find_layer
from xtok.embeddings.cache import Cache
from xtok.embeddings.similarity import Vectors
from xtok.errors import EmbeddingError
from xtok.hub import find_file, find_folder
from xtok.progress import Progress
from xtok.threads import one_thread_each
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokens import TokenTable

_BATCH = 256  # texts; fixed, because what they are padded to changes the last bits


class Source(Protocol):
    """A model that embeds texts. Its `key` holds everything that decides what comes out."""

    model_id: str
    key: dict[str, Any]

    def embed(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Return a vector for each text, float32 `[n, d]`; zero where there is none."""


def open_source(embedding_model: str, *, revision: str | None, device: str, dtype: Dtype) -> Source:
    """Return the source that `sentence:MODEL` or `input:MODEL` names, fetched but not loaded.

    Raises:
        EmbeddingError: if it is neither, cannot be found, or lacks what it needs.
    """
    kind, colon, location = embedding_model.partition(":")
    if not (colon and location and kind in ("sentence", "input")):
        raise EmbeddingError(
            f"the embedding model {embedding_model} does not say what to take of it",
            hint="give sentence:MODEL for its sentence embeddings, input:MODEL for its "
            "input-embedding layer, or own for the two models' own layers",
        )
    path = Path(location).expanduser()
    if path.exists() and revision is not None:
        raise EmbeddingError(
            f"{location} is a local path, which has no revision {revision}",
            hint="leave out --embedding-revision, or give a repo id",
        )
    if path.exists() and not path.is_dir():
        raise EmbeddingError(f"{location} is a file, not a folder", hint="give the folder it is in")
    if not path.exists() and (len(location.split("/")) > 2 or location[0] in "./~"):
        raise EmbeddingError(
            f"no such folder: {location}", hint="give the path of a model's folder, or a repo id"
        )
    model = path.resolve() if path.exists() else location
    if kind == "sentence":
        return SentenceModel(model, revision, device, dtype)
    return InputLayer(model, revision)


class SentenceModel:
    """A sentence-transformers model; its own pooling and normalization apply."""

    def __init__(self, model: str | Path, revision: str | None, device: str, dtype: Dtype) -> None:
        from importlib.util import find_spec

        if find_spec("sentence_transformers") is None:
            raise EmbeddingError(
                "sentence:MODEL needs the package sentence-transformers, which is not installed",
                hint="pip install 'xtok[sentence-transformers]'",
            )
        modules = find_file(
            model, "modules.json", revision=revision, required=True, error=EmbeddingError
        )
        if modules is None:
            raise EmbeddingError(
                f"{model} has no modules.json, so it is no sentence-transformers model",
                hint=f"give input:{model} for its input-embedding layer, or another model",
            )
        folder = model if isinstance(model, Path) else None
        self._folder = folder or find_folder(str(model), revision=revision, error=EmbeddingError)
        self._device, self._dtype = device, dtype
        self._loaded: Any = None
        self.model_id = folder.name if folder else str(model)
        self.key = {
            "kind": "sentence",
            "model": self.model_id,
            "revision": revision,
            "sha256": _folder_sha256(self._folder),
            "pooling": "sentence-transformers",
            "device": device.partition(":")[0],
            "dtype": dtype,
        }

    def embed(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Embed batches of texts of like length, each on one thread."""
        import torch

        self._loaded = model = self._loaded or self._load()
        lock = Lock()
        order = sorted(range(len(texts)), key=lambda i: (len(texts[i].encode()), i))
        batches = [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]

        def work(batch: list[int]) -> Vectors:
            with lock:  # a fast tokenizer is not to be shared
                features = model.preprocess([texts[i] for i in batch])
            with torch.inference_mode():
                on_device = {k: v.to(self._device) if isinstance(v, torch.Tensor) else v
                             for k, v in features.items()}  # fmt: skip
                found = model(on_device)["sentence_embedding"].float().cpu().numpy()
            advance(len(batch))
            return np.asarray(found, np.float32)

        label = f"embedding with {self.model_id}"
        with one_thread_each() as pool, progress(label, len(texts)) as advance:
            run = pool.map if self._device == "cpu" else map
            found = list(run(work, batches))
        result = np.empty((len(texts), found[0].shape[1] if found else 0), np.float32)
        for batch, vectors in zip(batches, found, strict=True):
            result[batch] = vectors
        return result

    def _load(self) -> Any:
        import torch
        from transformers.utils import logging

        had_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # one for weights that load in no time
        try:
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(
                str(self._folder),
                device=self._device,
                model_kwargs={"dtype": getattr(torch, self._dtype)},
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:
            raise EmbeddingError(
                f"{self.model_id} is not a model that sentence-transformers loads: {error}",
                hint="check its modules.json and config.json, or fetch it again",
            ) from error
        finally:
            if had_bars:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        return model.eval()


class InputLayer:
    """The input-embedding layer of a language model: the mean over a text's pieces."""

    def __init__(self, model: str | Path, revision: str | None) -> None:
        self._model, self._revision = model, revision
        self._layer = find_layer(model, revision=revision)
        tokenizer = find_file(
            model, "tokenizer.json", revision=revision, required=True, error=EmbeddingError
        )
        if tokenizer is None:
            raise EmbeddingError(
                f"{model} has no tokenizer.json to cut tokens into its pieces with",
                hint="give a folder that holds the model's tokenizer as well",
            )
        self._matrix = self._layer.read()
        self.model_id = model.name if isinstance(model, Path) else model
        digest = hashlib.sha256(tokenizer.read_bytes())
        digest.update(self._matrix.data)
        self.key = {
            "kind": "input",
            "model": self.model_id,
            "revision": revision,
            "sha256": digest.hexdigest(),
            "pooling": "mean",
        }

    def embed(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Cut the texts as in the middle of a longer one, and take the mean of their rows."""
        tokenizer = load_tokenizer(f"hf:{self._model}", revision=self._revision)
        require_rows(tokenizer, len(self._matrix), self._layer.name)
        result = np.zeros((len(texts), self._matrix.shape[1]), np.float32)
        with progress(f"embedding with {self.model_id}", len(texts)) as advance:
            for start in range(0, len(texts), 8192):
                part = texts[start : start + 8192]
                found = tokenizer.segment_batch([text.encode() for text in part])
                rows = [start + i for i, pieces in enumerate(found) if pieces]
                pieces = [p for p in found if p]
                if pieces:
                    lengths = np.array([len(p) for p in pieces])
                    flat = self._matrix[np.concatenate(pieces)]
                    sums = np.add.reduceat(flat, np.cumsum(lengths) - lengths, axis=0)
                    result[rows] = sums / lengths[:, None].astype(np.float32)
                advance(len(part))
        return result


def own_embeddings(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> Vectors:
    """Return the rows of a model's own input-embedding layer, float32 `[n, d]`.

    Raises:
        EmbeddingError: if the tokenizer is not that of a folder or repo with such a layer.
    """
    model_id, model = tokenizer.vocabulary.model_id, tokenizer.location
    if model is None or (isinstance(model, Path) and not model.is_dir()):
        raise EmbeddingError(
            f"{model_id} is a tokenizer file: it has no embeddings of its own",
            hint="give the model's folder or repo id, or another --embedding-model",
        )
    layer = find_layer(model, revision=tokenizer.vocabulary.revision)
    require_rows(tokenizer, layer.shape[0], layer.name)
    vectors = layer.read()[ids]
    require_finite(vectors, ids, tokenizer.vocabulary.table, model_id)
    return vectors


def table_embeddings(
    source: Source,
    table: TokenTable,
    ids: NDArray[np.int64],
    texts: Sequence[str],
    cache: Cache,
    progress: Progress,
) -> tuple[Vectors, bool]:
    """Return the vectors of a table's ids, float32 `[n, d]`, and whether they were cached.

    Raises:
        EmbeddingError: if a vector is not finite.
    """
    key = {**source.key, "table_sha256": table.sha256()}
    vectors = cache.get(key, len(ids))
    if vectors is not None:
        return vectors, True
    vectors = source.embed(texts, progress)
    require_finite(vectors, ids, table, source.model_id)
    cache.put(key, vectors)
    return vectors, False


def require_rows(tokenizer: Tokenizer, num_rows: int, name: str) -> None:
    """Check that a layer has a row for every id of a tokenizer."""
    needed = tokenizer.vocabulary.tokenizer_vocab_size or 0
    if num_rows < needed:
        raise EmbeddingError(
            f"{name} of {tokenizer.vocabulary.model_id} has {num_rows} rows, and its tokenizer "
            f"{needed} ids",
            hint="give a checkpoint and a tokenizer that belong together",
        )


def require_finite(
    vectors: Vectors, ids: NDArray[np.int64], table: TokenTable | None, model_id: str
) -> None:
    """Check that no embedding holds NaN or infinity; the error names the tokens."""
    bad = ids[~np.isfinite(vectors).all(axis=1)].tolist()
    if bad:
        rows = ", ".join(f"{i} '{table.shown(i)}'" if table else str(i) for i in bad[:5])
        raise EmbeddingError(
            f"{len(bad)} embeddings by {model_id} are not finite: of tokens {rows}"
            + (", …" if len(bad) > 5 else ""),
            hint="check the checkpoint, or give --dtype float32",
        )


def _folder_sha256(folder: Path) -> str:
    """Return a digest of a folder's files, by name and content; hidden ones and .md apart."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".") and path.suffix != ".md":
            digest.update(f"{name}\n".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()
