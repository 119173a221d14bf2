"""`generate`: a map from what tokens mean, by the similarity of their embeddings."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xtok.config import POWER_OF_LARGEST, GenerateConfig
from xtok.embeddings.cache import Cache
from xtok.embeddings.similarity import Cosine, Vectors
from xtok.embeddings.sources import Source, open_source, own_embeddings, own_model, table_embeddings
from xtok.errors import EmbeddingError, XtokError
from xtok.io import cache_folder
from xtok.maps.edges import Edges
from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.maps.results import map_of_edges, reported, undecodable_tokens
from xtok.progress import Progress, silent
from xtok.threads import one_thread_each
from xtok.tokenizers import ModelLike, Tokenizer, load_tokenizer
from xtok.vocab.relaxed import relaxed_form
from xtok.vocab.table import TokenTable, TokenType, match_bytes

if TYPE_CHECKING:
    import torch

OWN = "own"
"""The embedding model that stands for the two models' own input-embedding layers."""

DEFAULT_SENTENCE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
"""The model that embeds tokens as text where none is named and `own` is not possible."""

_HELD_OUT = 10  # every tenth anchor is not fitted on
_FEWEST_ANCHORS = 20


def generate(
    student_model: ModelLike,
    teacher_model: ModelLike,
    embedding_model: str | None = None,
    config: GenerateConfig | None = None,
    *,
    embedding_revision: str | None = None,
    offline: bool = False,
    cache: Cache | None = None,
    progress: Progress = silent,
) -> ProjectionMap:
    """Map each student token to the teacher tokens whose text has the most similar embedding.

    Tokens enter as text, with their leading space; those that are not UTF-8 alone, and control and
    unused ids, have no text, and their rows are empty. Weights are by NeMo-RL's rule: |cosine|
    to the power of 10 times the row's largest, over the sum of the whole row.

    Args:
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns, likewise.
        embedding_model: `sentence:MODEL`, a sentence-transformers model; `input:MODEL`, the mean
            of a language model's input embeddings over the token's pieces; or `own`, the two
            models' own input embeddings, fitted to each other on the tokens that both have. None
            is `own` if both models have safetensors weights, else `DEFAULT_SENTENCE_MODEL`.
        config: the options; the defaults if None.
        embedding_revision: branch, tag or commit of the embedding model's repo.
        offline: take models from the local cache only, as with `HF_HUB_OFFLINE=1`.
        cache: where embeddings are kept; in the user's cache folder if None.
        progress: called for each pass.

    Raises:
        EmbeddingError: if embeddings are missing or unusable.
        TokenizerError: if a tokenizer is.
        XtokError: if `top_k` is more than the teacher's tokens.
    """
    config = config or GenerateConfig()
    cache = cache or Cache(cache_folder())
    _check_device(config.device)
    if embedding_revision is not None and embedding_model in (None, OWN):
        raise EmbeddingError(
            f"the embedding revision {embedding_revision} is of no embedding model",
            hint="name one: sentence:MODEL or input:MODEL",
        )
    source = None
    if embedding_model not in (None, OWN):  # a mistake shows before tokenizers take time
        cache.check()
        source = open_source(embedding_model, config, revision=embedding_revision, offline=offline)
    student, teacher = (
        model if isinstance(model, Tokenizer) else load_tokenizer(model, offline=offline)
        for model in (student_model, teacher_model)
    )
    notes: list[str] = []
    if embedding_model is None:
        source, note = _default_source(student, teacher, config, cache, offline)
        notes.append(note)
    if config.top_k > len(teacher.table):
        raise XtokError(
            f"top_k {config.top_k} is more than the {len(teacher.table)} tokens of the teacher",
            hint="give a smaller {option}",
            parameter="top_k",
        )
    relaxed = config.canonicalization == "relaxed"
    row_ids, row_texts = _texts(student.table, relaxed)
    column_ids, column_texts = _texts(teacher.table, relaxed)
    notes += _notes_of_textless(student.table, "student", len(row_ids))
    notes += _notes_of_textless(teacher.table, "teacher", len(column_ids))
    counts: dict[str, float]
    if source is None:
        if relaxed:
            notes.append("own embeddings are of ids, not texts: canonicalization changes nothing")
        x = own_embeddings(student, row_ids, offline=offline)
        y = own_embeddings(teacher, column_ids, offline=offline)
        anchors = _anchors(student.table, teacher.table, row_ids, column_ids)
        x, y, counts = _fitted(x, y, anchors, config, progress)
    else:
        how = (cache, progress, config.canonicalization)
        x, x_cached = table_embeddings(source, student.table, row_ids, row_texts, *how)
        y, y_cached = table_embeddings(source, teacher.table, column_ids, column_texts, *how)
        counts = {"vocabularies' embeddings from the cache": x_cached + y_cached}
    # Of teacher ids with equal bytes, one stands for all. Zero vectors are similar to nothing.
    single = np.isin(column_ids, list(teacher.table.canonical_ids().values()))
    rows, columns = x.any(axis=1), single & y.any(axis=1)
    for side, zeros in (("student", ~rows), ("teacher", single & ~columns)):
        if zeros.any():
            notes.append(f"{side} tokens whose embedding is zero: {zeros.sum():,}")
    edges, dropped = _similar(
        row_ids[rows], x[rows], column_ids[columns], y[columns], config, progress
    )
    kind = np.zeros(len(student.table), np.uint8)
    kind[edges.student_ids] = RowKind.EMBEDDING
    options = asdict(config) | {
        "device": config.device.partition(":")[0],
        "embedding_model": {"kind": OWN} if source is None else source.key,
    }
    # What the map does not depend on; and maps without near-equivalents keep their bytes.
    for name in ("chunk_size",) if relaxed else ("chunk_size", "canonicalization"):
        del options[name]
    projection = map_of_edges(
        edges,
        student=student.vocabulary,
        teacher=teacher.vocabulary,
        row_kind=kind,
        scale_slot=None,
        method="generate",
        top_k=config.top_k,
    ).after("generate", options)
    failures = undecodable_tokens(student, teacher)
    return reported(projection, notes, failures, {**counts, **dropped})


def _check_device(device: str) -> None:
    import torch

    if not re.fullmatch(r"(cpu|cuda)(:[0-9]+)?", device):
        raise EmbeddingError(
            f"there is no device {device}",
            hint="give cpu, cuda or cuda:0 with {option}",
            parameter="device",
        )
    kind, _, number = device.partition(":")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and available <= int(number or 0):
        raise EmbeddingError(
            f"PyTorch finds {available} CUDA devices, and not the device {device}",
            hint="give cpu with {option}, or install a PyTorch with CUDA on a machine with a GPU",
            parameter="device",
        )


def _default_source(
    student: Tokenizer, teacher: Tokenizer, config: GenerateConfig, cache: Cache, offline: bool
) -> tuple[Source | None, str]:
    """Return None, which is `own`, if both models have weights, else the default sentence model.

    Also a note that says which, and why.
    """
    for side, tokenizer in (("student", student), ("teacher", teacher)):
        model = own_model(tokenizer, offline=offline)
        if model is None or not model.has_checkpoint():
            cause = f"the {side} {tokenizer.vocabulary.model_id} has no safetensors weights"
            break
    else:
        return None, "embeddings: own, as both models have weights"
    cache.check()
    try:
        source = open_source(f"sentence:{DEFAULT_SENTENCE_MODEL}", config, offline=offline)
    except EmbeddingError as error:
        raise EmbeddingError(
            f"{cause}, and the default embedding model is not usable: {error.message}",
            hint=f"where there is a network: hf download {DEFAULT_SENTENCE_MODEL}; without the "
            "hub: python scripts/fetch_tokenizers.py minilm, then name the embedding model "
            "sentence:data/tokenizers/minilm",
        ) from error
    return source, f"embeddings: sentence:{DEFAULT_SENTENCE_MODEL}, because {cause}"


def _texts(table: TokenTable, relaxed: bool) -> tuple[NDArray[np.int64], list[str]]:
    """Return the ids whose bytes are UTF-8, and their texts."""
    tokens = table.tokens()
    texts: dict[int, str] = {}
    for i in table.text_ids.tolist():
        with suppress(UnicodeDecodeError):
            texts[i] = (relaxed_form(tokens[i]) if relaxed else tokens[i]).decode()
    return np.array(list(texts), np.int64), list(texts.values())


def _notes_of_textless(table: TokenTable, side: str, num_texts: int) -> list[str]:
    """Return a note that counts the ids without a text; none if there are none."""
    counts = {
        "partial UTF-8": len(table.text_ids) - num_texts,
        "control": len(table.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN)),
        "unused": len(table.ids_of_type(TokenType.UNUSED)),
    }
    counted = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return [f"{side} tokens without a text to embed: {counted}"] if counted else []


def _similar(
    row_ids: NDArray[np.int64],
    x: Vectors,
    column_ids: NDArray[np.int64],
    y: Vectors,
    config: GenerateConfig,
    progress: Progress,
) -> tuple[Edges, dict[str, int]]:
    """Return the edges of the `top_k` most similar columns, of weights that sum to 1 per row.

    Also counts of what a threshold dropped.
    """
    power = config.transform == "power"
    k = min(config.top_k, len(column_ids))
    if not (len(row_ids) and k):
        return Edges(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)), {}
    dropped: dict[str, int] = {}
    with one_thread_each() as pool:
        cosine = Cosine(
            y, device=config.device, dtype=config.dtype, chunk_size=config.chunk_size, pool=pool
        )
        with progress("comparing", len(x)) as advance:
            values, places = cosine.top_k(x, k, absolute=power, advance=advance)
        largest = values[:, :1]
        if power:
            weights = values.astype(np.float64) ** (POWER_OF_LARGEST * largest)
        else:
            weights = np.exp((values.astype(np.float64) - largest) / config.temperature)
        keep = weights > 0
        if config.weight_threshold > 0:
            # The sum over the whole row, of which `weights` has only the k largest.
            parameters = np.float32(POWER_OF_LARGEST) * largest if power else largest

            def in_place(tile: torch.Tensor, own: torch.Tensor) -> None:
                if power:
                    tile.abs_().pow_(own)
                else:
                    tile.sub_(own).div_(config.temperature).exp_()

            with progress("summing up rows", len(x)) as advance:
                sums = cosine.sums(x, in_place, parameters[:, 0], advance=advance)
            keep &= weights >= config.weight_threshold * sums[:, None]
            dropped["entries below the threshold"] = int((~keep).sum())
            dropped["rows emptied by the threshold"] = int((~keep.any(axis=1)).sum())
    rows, ranks = np.nonzero(keep)
    edges = Edges(row_ids[rows], column_ids[places[rows, ranks]], weights[rows, ranks])
    return edges.normalized(), dropped


def _anchors(
    rows: TokenTable,
    columns: TokenTable,
    row_ids: NDArray[np.int64],
    column_ids: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of exactly equal tokens among the embedded ids, in order of student id."""
    equal = match_bytes(rows, columns)
    pairs = {s: equal[s] for s in row_ids.tolist() if s in equal}
    if len(pairs) < _FEWEST_ANCHORS:
        raise EmbeddingError(
            f"only {len(pairs)} tokens are exactly equal on both sides, too few to fit "
            "one model's embeddings to the other's",
            hint="give sentence:MODEL or input:MODEL with {option}",
            parameter="embedding_model",
        )
    return np.searchsorted(row_ids, list(pairs)), np.searchsorted(column_ids, list(pairs.values()))


def _fitted(
    x: Vectors,
    y: Vectors,
    anchors: tuple[NDArray[np.int64], NDArray[np.int64]],
    config: GenerateConfig,
    progress: Progress,
) -> tuple[Vectors, Vectors, dict[str, float]]:
    """Bring student vectors into the teacher's space by a linear map fitted on the anchors.

    Both sides are centred on the anchors' means first. Every tenth anchor is held out, and the
    counts that are returned last have the error on these. Orthogonal: Schönemann 1966, "A
    generalized solution of the orthogonal Procrustes problem".
    """
    import torch

    if config.anchor_fit == "orthogonal" and x.shape[1] != y.shape[1]:
        raise EmbeddingError(
            f"the student's embeddings have {x.shape[1]} dimensions, the teacher's {y.shape[1]}: "
            "no rotation makes them comparable",
            hint="give ridge with {option}",
            parameter="anchor_fit",
        )
    held_out = np.arange(len(anchors[0])) % _HELD_OUT == _HELD_OUT - 1
    fit, test = ([side[chosen] for side in anchors] for chosen in (~held_out, held_out))
    x_mean = x[fit[0]].mean(axis=0, dtype=np.float64).astype(np.float32)
    y_mean = y[fit[1]].mean(axis=0, dtype=np.float64).astype(np.float32)
    x, y = x - x_mean, y - y_mean
    with one_thread_each() as pool, progress("fitting", len(fit[0])) as advance:
        xx = _product(x[fit[0]], x[fit[0]], pool)
        xy = _product(x[fit[0]], y[fit[1]], pool)
        if config.anchor_fit == "ridge":
            penalty = config.ridge * float(xx.diagonal().mean()) * torch.eye(len(xx)).double()
            matrix, scale = torch.linalg.solve(xx + penalty, xy), 1.0
        else:
            u, singular, v = torch.linalg.svd(xy)
            matrix, scale = u @ v, float(singular.sum() / xx.trace())
        right = matrix.float()
        blocks = [torch.from_numpy(x[start : start + 4096]) for start in range(0, len(x), 4096)]
        parts = pool.map(lambda block: torch.mm(block, right), blocks)
        mapped = torch.cat(list(parts)).numpy()
        advance(len(fit[0]))
    ours, truth = mapped[test[0]].astype(np.float64), y[test[1]].astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(truth, axis=1)
    cosines = (ours * truth).sum(axis=1) / np.maximum(lengths, 1e-30)
    error = np.square(scale * ours - truth).sum() / max(np.square(truth).sum(), 1e-30)
    counts = {
        "anchors fitted on": len(fit[0]),
        "anchors held out": len(test[0]),
        "mean cosine of held-out anchors": float(cosines.mean()),
        "squared error of held-out anchors, relative": float(error),
    }
    return mapped, y, counts


def _product(x: Vectors, y: Vectors, pool: ThreadPoolExecutor) -> torch.Tensor:
    """Return xᵀy in float64, summed over blocks of rows in their order."""
    import torch

    def work(start: int) -> torch.Tensor:
        left, right = (torch.from_numpy(v[start : start + 8192]).double() for v in (x, y))
        return left.T @ right

    total = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    starts = range(0, len(x), 8192)
    for first in range(0, len(starts), 4):  # few at a time: each is a whole matrix
        for part in pool.map(work, starts[first : first + 4]):
            total += part
    return total
