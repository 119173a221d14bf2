"""Where embeddings of tokens come from: a sentence model, an input-embedding layer, or a cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xtok.config import Canonicalization, Dtype, GenerateConfig
from xtok.embeddings.cache import Cache
from xtok.embeddings.checkpoint import Model, find_layer
from xtok.embeddings.similarity import Vectors
from xtok.errors import EmbeddingError, install_hint
from xtok.progress import Progress
from xtok.threads import one_thread_each
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.vocab.display import quoted
from xtok.vocab.table import TokenTable

if TYPE_CHECKING:
    import torch

_BATCH = 256  # texts; fixed, because what they are padded to changes the last bits


class Source(Protocol):
    """A model that embeds texts. Its `key` holds everything that the vectors depend on."""

    model_id: str
    key: dict[str, Any]

    def embed(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Return a vector for each text, float32 `[n, d]`; zero if the model has none for it."""


def open_source(
    embedding_model: str,
    config: GenerateConfig,
    *,
    revision: str | None = None,
    offline: bool = False,
) -> Source:
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
            hint="leave out {option}, or give a repo id",
            parameter="embedding_revision",
        )
    if path.exists() and not path.is_dir():
        raise EmbeddingError(f"{location} is a file, not a folder", hint="give the folder it is in")
    if not path.exists() and (len(location.split("/")) > 2 or location[0] in "./~"):
        raise EmbeddingError(
            f"no such folder: {location}", hint="give the path of a model's folder, or a repo id"
        )
    model = Model(path.resolve() if path.exists() else location, revision=revision, offline=offline)
    if kind == "input":
        return InputLayer(model)
    return SentenceModel(model, config.device, config.dtype)


def _key(kind: str, model: Model, sha256: str, **more: str) -> dict[str, Any]:
    return {
        "kind": kind, "model": model.model_id, "revision": model.revision, "sha256": sha256, **more
    }  # fmt: skip


class SentenceModel:
    """A sentence-transformers model; its own pooling and normalization apply."""

    def __init__(self, model: Model, device: str, dtype: Dtype) -> None:
        from importlib.util import find_spec

        modules = model.find("modules.json", required=True)
        if modules is None:
            raise EmbeddingError(
                f"{model} has no modules.json, so it is no sentence-transformers model",
                hint=f"give input:{model} for its input-embedding layer, or another model",
            )
        self._pooling = _mean_pooling(model, modules)
        if self._pooling is None and find_spec("sentence_transformers") is None:
            raise EmbeddingError(
                f"{model} is no BERT with mean pooling, so it needs the package "
                "sentence-transformers, which is not installed",
                hint=install_hint("sentence-transformers"),
            )
        self._folder, self.model_id = model.folder(), model.model_id
        self._device, self._dtype = device, dtype
        self._loaded: Any = None
        self.key = _key(
            "sentence", model, _folder_sha256(self._folder), pooling="sentence-transformers",
            device=device.partition(":")[0], dtype=dtype,
        )  # fmt: skip

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
                vectors = model(on_device)["sentence_embedding"].float().cpu().numpy()
            advance(len(batch))
            return np.asarray(vectors, np.float32)

        label = f"embedding with {self.model_id}"
        with one_thread_each() as pool, progress(label, len(texts)) as advance:
            run = pool.map if self._device == "cpu" else map
            parts = list(run(work, batches))
        result = np.empty((len(texts), parts[0].shape[1] if parts else 0), np.float32)
        for batch, vectors in zip(batches, parts, strict=True):
            result[batch] = vectors
        return result

    def _load(self) -> Any:
        import torch
        from transformers.utils import logging

        had_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # one for weights that load in no time
        dtype = getattr(torch, self._dtype)
        try:
            if self._pooling is not None:
                return _MeanPooledBert(self._folder, self._pooling, self._device, dtype)
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(
                str(self._folder),
                device=self._device,
                model_kwargs={"dtype": dtype},
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:
            raise EmbeddingError(
                f"the sentence model {self.model_id} cannot be loaded: {error}",
                hint="check its modules.json and config.json, or fetch it again",
            ) from error
        finally:
            if had_bars:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        return model.eval()


class _Pooling(NamedTuple):
    """How a BERT model's last layer becomes one vector: the mean of so many tokens at most."""

    max_length: int
    normalize: bool


def _mean_pooling(model: Model, modules_file: Path) -> _Pooling | None:
    """Return the pooling of a plain BERT with mean pooling; None for every other model."""
    try:
        modules = json.loads(modules_file.read_bytes())
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
            return None
        config, text = model.json("config.json"), model.json("sentence_bert_config.json")
        pooling = model.json(f"{modules[1]['path']}/config.json")
        modes = {k for k, on in pooling.items() if k.startswith("pooling_mode_") and on}
        mean = modes == {"pooling_mode_mean_tokens"} or pooling.get("pooling_mode") == "mean"
        length: Any = text.get("max_seq_length")
        plain = text == {"max_seq_length": length, "do_lower_case": False} and length is not None
        bert = config.get("model_type") == "bert" and modules[0]["path"] == ""
        if bert and plain and mean and int(length) <= config["max_position_embeddings"]:
            return _Pooling(int(length), normalize="Normalize" in kinds)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EmbeddingError(
            f"{model} is no sentence-transformers model that can be read: {error!r}",
            hint="check its modules.json and config.json, or fetch it again",
        ) from error
    return None


class _MeanPooledBert:
    """A BERT with mean pooling by transformers alone: bit for bit what sentence-transformers gives.

    It has the two methods of a `SentenceTransformer` that are used here.
    """

    def __init__(self, folder: Path, pooling: _Pooling, device: str, dtype: torch.dtype) -> None:
        from transformers import AutoModel, AutoTokenizer

        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), **local)
        model: Any = AutoModel.from_pretrained(str(folder), dtype=dtype, **local)
        self._model, self._pooling = model.to(device).eval(), pooling

    def preprocess(self, texts: list[str]) -> Any:
        """Return the tensors that the model takes."""
        cut: dict[str, Any] = {"truncation": True, "max_length": self._pooling.max_length}
        return self._tokenizer(texts, padding=True, return_tensors="pt", **cut)

    def __call__(self, features: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the embeddings, `[n, d]`; padding does not count."""
        import torch

        hidden = self._model(**features).last_hidden_state
        mask = features["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        sums = (hidden * mask).sum(dim=1, dtype=torch.float32)
        mean = (sums / mask.sum(dim=1, dtype=torch.float32).clamp(min=1e-9)).to(hidden.dtype)
        if self._pooling.normalize:
            mean = torch.nn.functional.normalize(mean, dim=1)
        return {"sentence_embedding": mean}


class InputLayer:
    """The input-embedding layer of a language model: the mean over a text's pieces."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._layer = find_layer(model)
        tokenizer = model.find("tokenizer.json", required=True)
        if tokenizer is None:
            raise EmbeddingError(
                f"{model} has no tokenizer.json to cut tokens into its pieces with",
                hint="give a folder that holds the model's tokenizer as well",
            )
        self._matrix = self._layer.read()
        self.model_id = model.model_id
        digest = hashlib.sha256(tokenizer.read_bytes())
        digest.update(self._matrix.data)
        self.key = _key("input", model, digest.hexdigest(), pooling="mean")

    def embed(self, texts: Sequence[str], progress: Progress) -> Vectors:
        """Cut the texts as in the middle of a longer one, and take the mean of their rows."""
        at = f"@{self._model.revision}" if self._model.revision else ""
        tokenizer = load_tokenizer(f"hf:{self._model}{at}", offline=self._model.offline)
        _require_rows(tokenizer, len(self._matrix), self._layer.name)
        result = np.zeros((len(texts), self._matrix.shape[1]), np.float32)
        with progress(f"embedding with {self.model_id}", len(texts)) as advance:
            for start in range(0, len(texts), 8192):
                part = texts[start : start + 8192]
                spelled = tokenizer.segment_batch([text.encode() for text in part])
                pieces = {start + i: ids for i, ids in enumerate(spelled) if ids}
                if pieces:
                    # All texts' pieces one after the other; reduceat sums each text's stretch.
                    lengths = np.array([len(ids) for ids in pieces.values()])
                    flat = self._matrix[np.concatenate(list(pieces.values()))]
                    sums = np.add.reduceat(flat, np.cumsum(lengths) - lengths, axis=0)
                    result[list(pieces)] = sums / lengths[:, None].astype(np.float32)
                advance(len(part))
        return result


def own_model(tokenizer: Tokenizer, *, offline: bool = False) -> Model | None:
    """Return the folder or repo of a tokenizer; None for a file, which has no embeddings."""
    location = tokenizer.location
    if location is None or (isinstance(location, Path) and not location.is_dir()):
        return None
    return Model(location, revision=tokenizer.vocabulary.revision, offline=offline)


def own_embeddings(tokenizer: Tokenizer, ids: NDArray[np.int64], *, offline: bool) -> Vectors:
    """Return the rows of a model's own input-embedding layer, float32 `[n, d]`.

    Raises:
        EmbeddingError: if the tokenizer is not that of a folder or repo with such a layer.
    """
    model_id, model = tokenizer.vocabulary.model_id, own_model(tokenizer, offline=offline)
    if model is None:
        raise EmbeddingError(
            f"{model_id} is a tokenizer file: it has no embeddings of its own",
            hint="give the model's folder or repo id, or another {option}",
            parameter="embedding_model",
        )
    layer = find_layer(model)
    _require_rows(tokenizer, layer.shape[0], layer.name)
    vectors = layer.read()[ids]
    _require_finite(vectors, ids, tokenizer.table, model_id)
    return vectors


def table_embeddings(
    source: Source,
    table: TokenTable,
    ids: NDArray[np.int64],
    texts: Sequence[str],
    cache: Cache,
    progress: Progress,
    canonicalization: Canonicalization,
) -> tuple[Vectors, bool]:
    """Return the vectors of a table's ids, float32 `[n, d]`, and whether they were cached.

    Raises:
        EmbeddingError: if a vector is not finite.
    """
    key = {**source.key, "table_sha256": table.sha256()}
    if canonicalization != "exact":  # other texts of the same table
        key["canonicalization"] = canonicalization
    vectors = cache.get(key, len(ids))
    if vectors is not None:
        return vectors, True
    vectors = source.embed(texts, progress)
    _require_finite(vectors, ids, table, source.model_id)
    cache.put(key, vectors)
    return vectors, False


def _require_rows(tokenizer: Tokenizer, num_rows: int, name: str) -> None:
    """Check that a layer has a row for every id of a tokenizer."""
    needed = tokenizer.vocabulary.tokenizer_vocab_size or 0
    if num_rows < needed:
        raise EmbeddingError(
            f"{name} of {tokenizer.vocabulary.model_id} has {num_rows} rows, and its tokenizer "
            f"{needed} ids",
            hint="give a checkpoint and a tokenizer that belong together",
        )


def _require_finite(
    vectors: Vectors, ids: NDArray[np.int64], table: TokenTable, model_id: str
) -> None:
    """Check that no embedding holds NaN or infinity; the error names the tokens."""
    bad = ids[~np.isfinite(vectors).all(axis=1)].tolist()
    if bad:
        rows = ", ".join(f"{i} {quoted(table.name(i))}" for i in bad[:5])
        raise EmbeddingError(
            f"{len(bad)} embeddings by {model_id} are not finite: of tokens {rows}"
            + (", …" if len(bad) > 5 else ""),
            hint="check the checkpoint, or give float32 with {option}",
            parameter="dtype",
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
