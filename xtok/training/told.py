"""What a teacher said of a text, a row of a cache in its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import CacheKind
from xtok.predictions.caches import Cache, open_cache, read_cache
from xtok.predictions.checks import is_renormalized
from xtok.predictions.topk import Documents, cache_error
from xtok.tokenizers import ModelLike, Tokenizer, load_tokenizer
from xtok.training.losses.boundaries import ROUNDING

LAYOUT = "for the first token, which nothing predicts: row i must be of token i, not of the next"
"""What is wrong with a row that predicts its first token."""


class Told(NamedTuple):
    """What a teacher said of a text of T of its tokens."""

    ids: NDArray[np.int64]  # [T]
    is_target: NDArray[np.bool_]  # [T], of the tokens that have a prediction
    realized: NDArray[np.float32]  # [T], NaN for none
    counts: NDArray[np.int64]  # [T], candidates of each token
    top_ids: NDArray[np.int64]  # [candidates]
    top_logprobs: NDArray[np.float32]  # [candidates]

    @staticmethod
    def of(row: Mapping[str, Any]) -> Told:
        """Read a row of a cache.

        Raises:
            ValueError: if columns differ in length, the first token has a prediction, or a token is
                more than certain.
        """
        names = ("realized_logprob", "topk_ids", "topk_logprobs", "loss_mask")
        ids, columns = np.asarray(row["input_ids"], np.int64), columns_of(row, names)
        counts, top_ids, top_logprobs = candidates_of(columns, len(ids))
        if "realized_logprob" in columns:
            realized = np.array(columns["realized_logprob"], np.float32)  # None becomes NaN
            if not np.isnan(realized[:1]).all():
                raise ValueError(f"realized_logprob begins with a value {LAYOUT}")
        else:
            realized = np.full(len(ids), np.nan, np.float32)
            of = np.repeat(np.arange(len(ids)), counts)
            own = top_ids == ids[of]
            realized[of[own]] = top_logprobs[own]
        if (wrong := realized > ROUNDING).any():
            raise ValueError(f"realized_logprob has {realized[wrong][0]:.4g}, and is at most 0")
        is_target = np.asarray(columns.get("loss_mask", np.ones(len(ids))), np.bool_).copy()
        is_target[1:] &= ~np.isnan(realized[1:])
        return Told(ids, is_target, realized, counts, top_ids, top_logprobs)


def teacher_rows(
    path: str | PathLike[str], teacher: ModelLike, *, source: CacheKind | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a teacher's cache as a `DistillationCollator` takes them.

    Args:
        path: predictions in the teacher's own tokens, in any format that `xtok project` reads:
            lines of vLLM's or SGLang's answers, or Parquet.
        teacher: the model whose tokens they are; only its tokenizer is read.
        source: the format, if the contents should not tell it.

    Yields:
        a mapping of `input_ids`, `realized_logprob`, `topk_ids` and `topk_logprobs`, and
        `loss_mask` where the cache has one, for each document.

    Raises:
        XtokError: if the file cannot be read, is another model's, or has probabilities that are not
            the teacher's own: renormalized over the candidates, or of another temperature.
    """
    tokenizer, cache = load_tokenizer(teacher), open_cache(Path(path), source)
    is_first = True
    for shard in cache.shards:
        for given, _ in read_cache(cache, shard):
            if is_first:
                _require_own(cache, given, tokenizer)
            is_first = False
            yield from _rows(cache.checked(given, tokenizer.vocabulary))


def _require_own(cache: Cache, first: Documents, teacher: Tokenizer) -> None:
    """Raise an error if a cache says that its predictions are not the teacher's own."""
    digest, model_id = cache.about.get("tokenizer_sha256"), teacher.vocabulary.model_id
    if digest not in (None, teacher.table.sha256()):
        problem = f"it is in the tokens of another model than {model_id}"
        raise cache_error(cache.path, problem, "give the model whose ids these are")
    is_file = "normalized" not in cache.about and cache.kind in ("neutral", "distillkit")
    if cache.renormalized or (is_file and is_renormalized(first.topk, teacher.vocabulary)):
        problem = "its probabilities sum to 1 over the candidates, and are not the teacher's own"
        hint = "store natural log-probabilities as a server gives them; or project it, for topk-kl"
        raise cache_error(cache.path, problem, hint)
    if cache.temperature not in ("1", "1.0"):
        problem = f"its predictions have the temperature {cache.temperature}"
        raise cache_error(cache.path, problem, "make a cache at temperature 1")


def _rows(documents: Documents) -> Iterator[dict[str, Any]]:
    topk = documents.topk
    for begin, end in zip(topk.bounds[:-1], topk.bounds[1:], strict=True):
        cuts = topk.starts[begin : end + 1]
        row = {
            "input_ids": topk.token_ids[begin:end],
            "realized_logprob": topk.realized_logprob[begin:end],
            "topk_ids": [topk.ids[a:b] for a, b in pairwise(cuts)],
            "topk_logprobs": [topk.logprobs[a:b] for a, b in pairwise(cuts)],
        }
        if documents.loss_mask is not None:
            row["loss_mask"] = documents.loss_mask[begin:end]
        yield row


def columns_of(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the columns of these names that a row has, each with a value per token."""
    columns = {name: row[name] for name in names if row.get(name) is not None}
    for name, values in columns.items():
        if len(values) != len(row["input_ids"]):
            raise ValueError(f"{name} has {len(values)} rows for {len(row['input_ids'])} input_ids")
    return columns


def candidates_of(
    columns: Mapping[str, Any], num_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return how many candidates each token has, and, flat, their ids and log-probabilities."""
    lists = [columns.get(name, [[]] * num_tokens) for name in ("topk_ids", "topk_logprobs")]
    counts, others = ([len(best) for best in column] for column in lists)
    if any(counts[:1]):
        raise ValueError(f"topk_ids begin with candidates {LAYOUT}")
    if counts != others:
        raise ValueError("topk_ids and topk_logprobs have different numbers of candidates")
    ids, logprobs = map(chain.from_iterable, lists)
    return np.array(counts, np.int64), np.fromiter(ids, np.int64), np.fromiter(logprobs, np.float32)


def pad_candidates(
    counts: NDArray[np.int64], ids: NDArray[Any], logprobs: NDArray[Any], width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return candidates that lie one after another as rows, `[rows, width]`: id 0, −inf behind."""
    filled = np.arange(width) < counts[:, None]
    top_ids = np.zeros(filled.shape, np.int64)
    top_logprobs = np.full(filled.shape, -np.inf, np.float32)
    top_ids[filled], top_logprobs[filled] = ids, logprobs
    return top_ids, top_logprobs
