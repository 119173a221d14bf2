"""`generate`: map tokens to similar tokens, by spelling or by embeddings."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok._lib.threads import one_thread_each
from xtok.building.embeddings.own import fitted_embeddings, lacking_weights
from xtok.building.embeddings.similarity import Vectors, largest_cosines
from xtok.building.embeddings.sources import InputLayer, SentenceModel, open_source, require_finite
from xtok.building.embeddings.spelling import Floats, most_similar
from xtok.config import GenerateConfig
from xtok.errors import EmbeddingError, XtokError
from xtok.maps.creating import map_from_edges
from xtok.maps.edges import Edges
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind, stage_report
from xtok.tokenizers.notes import examples_of, undecodable_tokens
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.relaxed import relaxed_form
from xtok.tokenizers.table import SIDES, TokenTable, TokenType

POWER_OF_LARGEST = 10.0
"""The exponent of a cosine is this number times the largest |cosine| in its row (NeMo-RL,
`minimal_projection_generator.py`)."""

OWN = "own"  # the input-embedding layers of both models

SPELLING = "spelling"  # byte n-grams, without an embedding model


def generate(
    pair: Pair,
    embedding_model: str | None = None,
    config: GenerateConfig | None = None,
    *,
    offline: bool = False,
    cache_dir: Path | None = None,
    force_recompute: bool = False,
    progress: Progress = silent,
) -> ProjectionMap:
    """Map each student token to the most similar teacher tokens.

    The rows of control and unused ids are empty. With embeddings, the rows of partial characters
    are also empty. By default, weights are |cosine| ** (10 * largest), where `largest` is the
    largest |cosine| in the row. NeMo-RL uses the same formula. Each row is normalized.

    >>> xtok.generate(xtok.load_pair("bytes", "bytes"), "spelling")["a"].entries[0]
    RowEntry(teacher_id=97, token='a', weight=1.0, is_slot=False)

    Args:
        pair: the student and the teacher, with their tokenizers.
        embedding_model: `own` (both models' input embeddings, fitted on shared tokens), `spelling`
            (byte n-grams), `sentence:MODEL` (a sentence-transformers model) or `input:MODEL` (the
            mean input embedding of a token's pieces). Default: `own` if both models have
            safetensors weights, otherwise `spelling`.
        config: the options.
        offline: use only the local cache of models.
        cache_dir: folder for sentence embeddings. Default: xtok's cache folder.
        force_recompute: recompute cached sentence embeddings.
        progress: called for each pass.

    Raises:
        EmbeddingError: if an embedding model cannot be used.
    """
    config = GenerateConfig.or_default(config)
    _check_device(config.device)
    if config.top_k > pair.shape[1]:
        raise XtokError(
            f"top_k is {config.top_k}, expected at most {pair.shape[1]} (the teacher's width)",
            hint="reduce {option}",
            parameter="top_k",
        )
    note = f"tokens were compared by {embedding_model}"
    if embedding_model is None:
        cause = lacking_weights(pair, offline=offline)
        embedding_model = SPELLING if cause else OWN
        note = "tokens were compared by the input embeddings of both models"
        if cause:
            note = f"tokens were compared by spelling, because {cause}"
    options: dict[str, Any] = {**asdict(config), "embedding_model": {"kind": embedding_model}}
    if embedding_model == SPELLING:
        edges, counts, notes = _edges_by_spelling(pair, config, progress)
        del options["device"], options["dtype"]
    else:
        source = None
        if embedding_model != OWN:
            source = open_source(
                embedding_model, config, cache_dir, force_recompute=force_recompute, offline=offline
            )
            options["embedding_model"] = source.key
        edges, counts, notes = _edges_by_embedding(
            pair, source, config, offline=offline, progress=progress
        )
        options["device"] = config.device.partition(":")[0]
    kind = np.zeros(pair.shape[0], np.uint8)
    kind[edges.student_ids] = RowKind.SIMILAR
    projection = map_from_edges(
        edges,
        student=pair.sides[0],
        teacher=pair.sides[1],
        row_kind=kind,
        scale_slot=None,
        method=embedding_model.partition(":")[0],
        top_k=config.top_k,
    ).after("generate", options)
    failures = undecodable_tokens(pair)
    report = stage_report("generate", projection, [note, *notes], failures, counts)
    return replace(projection, reports=(report,))


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    try:
        if device.partition(":")[0] != "cuda":
            raise RuntimeError("unknown device")
        torch.zeros(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch without CUDA
        raise EmbeddingError(
            f"the device {device} cannot be used: {str(error).splitlines()[0]}",
            hint="pass cpu, cuda or cuda:0 with {option}",
            parameter="device",
        ) from error


def _edges_by_spelling(
    pair: Pair, config: GenerateConfig, progress: Progress
) -> tuple[Edges, dict[str, float], list[str]]:
    student, teacher = pair.tables
    row_ids, column_ids = student.text_ids, np.sort(list(teacher.canonical_ids().values()))
    rows, teacher_tokens = [*filter(None, student.tokens())], teacher.tokens()
    columns = [teacher_tokens[i] for i in column_ids.tolist()]
    if config.canonicalization == "relaxed":
        rows, columns = list(map(relaxed_form, rows)), list(map(relaxed_form, columns))
    values, indices = most_similar(rows, columns, config.top_k, progress)
    weights = _weights(values, values[:, :1], config, power=_power)
    weights = np.where(indices >= 0, weights, 0)
    near, counts = _above_threshold(weights, indices, weights.sum(axis=1), config)
    edges = Edges(row_ids[near.student_ids], column_ids[near.teacher_ids], near.weights)
    alone = row_ids[indices[:, 0] < 0].tolist()
    note = f"not similar to any teacher token: {examples_of(alone, student)}"
    return edges, counts, [note] if alone else []


def _power(base: Floats, exponent: Floats) -> Floats:
    """Compute powers with exponents rounded to eighths, which gives equal results everywhere."""
    eighths = np.rint(exponent * 8).astype(np.int64)
    factor, result = np.sqrt(np.sqrt(np.sqrt(base))), np.ones_like(base)
    while eighths.any():
        result *= np.where(eighths & 1, factor, 1)
        factor, eighths = factor * factor, eighths >> 1
    return result


def _weights(
    cosines: Any, largest: Any, config: GenerateConfig, *, power: Any = pow, exp: Any = np.exp
) -> Any:
    if config.transform == "softmax":
        return exp((cosines - largest) / config.temperature)
    return power(abs(cosines), POWER_OF_LARGEST * largest)


def _above_threshold(
    weights: Floats, indices: NDArray[np.int32], sums: Floats, config: GenerateConfig
) -> tuple[Edges, dict[str, float]]:
    is_kept = weights > 0
    counts: dict[str, float] = {}
    if config.weight_threshold > 0:
        had = is_kept.any(axis=1)
        below = is_kept & (weights < config.weight_threshold * sums[:, None])
        is_kept &= ~below
        counts["entries below the threshold"] = int(below.sum())
        counts["rows emptied by the threshold"] = int((had & ~is_kept.any(axis=1)).sum())
    rows, ranks = np.nonzero(is_kept)
    edges = Edges(rows, indices[rows, ranks], weights[rows, ranks])
    return edges.normalized(), counts


def _edges_by_embedding(
    pair: Pair,
    source: SentenceModel | InputLayer | None,
    config: GenerateConfig,
    *,
    offline: bool,
    progress: Progress,
) -> tuple[Edges, dict[str, float], list[str]]:
    tables, relaxed = pair.tables, config.canonicalization == "relaxed"
    counts: dict[str, float] = {}
    (row_ids, row_texts), (column_ids, column_texts) = (_texts(table, relaxed) for table in tables)
    notes = [
        note
        for side, table, ids in zip(SIDES, tables, (row_ids, column_ids), strict=True)
        for note in _textless_notes(table, side, len(ids))
    ]
    if source is not None:
        x, y = source.embed(row_texts, progress), source.embed(column_texts, progress)
        notes += source.notes
        for vectors, ids, table in ((x, row_ids, tables[0]), (y, column_ids, tables[1])):
            require_finite(vectors, ids, table, source.model_id)
    else:
        if relaxed:
            notes.append(
                "the option canonicalization has no effect, because each id has its own embedding"
            )
        x, y, counts = fitted_embeddings(
            pair, row_ids, column_ids, offline=offline, progress=progress
        )
    # If teacher ids have equal bytes, only the canonical id is compared. Zero vectors are excluded.
    single = np.isin(column_ids, list(tables[1].canonical_ids().values()))
    in_student, in_teacher = x.any(axis=1), single & y.any(axis=1)
    for side, zeros in (("student", ~in_student), ("teacher", single & ~in_teacher)):
        if zeros.any():
            notes.append(f"{side} tokens with a zero embedding: {zeros.sum():,}")
    similar = _most_similar(x[in_student], y[in_teacher], config, progress)
    near, dropped = _above_threshold(*similar, config)
    row_ids, column_ids = row_ids[in_student], column_ids[in_teacher]
    edges = Edges(row_ids[near.student_ids], column_ids[near.teacher_ids], near.weights)
    return edges, {**counts, **dropped}, notes


def _texts(table: TokenTable, relaxed: bool) -> tuple[NDArray[np.int64], list[str]]:
    tokens = table.tokens()
    texts: dict[int, str] = {}
    for i in table.text_ids.tolist():
        with suppress(UnicodeDecodeError):
            texts[i] = (relaxed_form(tokens[i]) if relaxed else tokens[i]).decode()
    return np.array(list(texts), np.int64), list(texts.values())


def _textless_notes(table: TokenTable, side: str, num_texts: int) -> list[str]:
    counts = {
        "partial UTF-8": len(table.text_ids) - num_texts,
        "control": len(table.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN)),
        "unused": len(table.ids_of_type(TokenType.UNUSED)),
    }
    listed = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    return [f"{side} tokens without a text to embed: {listed}"] if listed else []


def _most_similar(
    x: Vectors, y: Vectors, config: GenerateConfig, progress: Progress
) -> tuple[Floats, NDArray[np.int32], Floats]:
    """Return the largest weights of each row with their indices, `[n, top_k]`, and row sums."""
    import torch

    # The threshold applies to an entry's share of its whole row, not of the `top_k` entries.
    weigh = partial(_weights, config=config, exp=torch.exp) if config.weight_threshold else None
    with one_thread_each() as pool, progress("comparing", len(x)) as advance:
        values, indices, sums = largest_cosines(
            x, y, config, pool=pool, advance=advance, weigh=weigh
        )
    return _weights(values.astype(np.float64), values[:, :1], config), indices, sums
