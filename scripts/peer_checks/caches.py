"""Caches of predictions in the losses that read them: of one tokenizer, and of two."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from torch import Tensor

import xtok
from peer_checks import report
from peer_checks.report import Check, Checks
from xtok.config import BACK_MAP, CacheFormat, ProjectConfig

K = 16


class Sample(NamedTuple):
    """A cache file, the student's logits `[T, V]`, and the contents of the cache."""

    path: Path
    logits: Tensor
    row: dict[str, Any]  # of the neutral cache of the same predictions


Loss = Callable[[Sample, int], float]
"""The mean loss of the rows that predict something; the second is by how much rows are moved."""

Formula = Callable[[NDArray[Any], NDArray[Any]], float]
"""The loss of a row: log-probabilities of the candidates, the teacher's and the student's."""


def tail_kl(p: NDArray[Any], q: NDArray[Any]) -> float:
    """Forward KL over the candidates and a bucket for the rest."""
    rests = 1 - np.exp(p).sum(), 1 - np.exp(q).sum()
    inner = (np.exp(p) * (p - q)).sum()
    return float(inner + rests[0] * (np.log(rests[0]) - np.log(rests[1])))


def renormalized_kl(p: NDArray[Any], q: NDArray[Any]) -> float:
    """Forward KL of both sides, renormalized over the candidates."""
    p, q = (side - np.log(np.exp(side).sum()) for side in (p, q))
    return float((np.exp(p) * (p - q)).sum())


def agree(to: CacheFormat, what: str, loss: Loss, formula: Formula, work: Path) -> Checks:
    """Yield the loss of a reader on xtok's files.

    With one tokenizer and equal logits it is 0, and positive if shifted by a row; with two
    tokenizers it equals a plain formula.
    """
    label, names = next(iter(report.PAIRS.items()))
    student, teacher = (report.own_tokenizer(name, work) for name in names)
    text = report.text_of("english")[:300]
    equal = sample(student, student, text, to, work)
    same, moved = loss(equal, 0), loss(equal, 1)
    figure = f"equal logits {abs(same):.0e}, moved by one row {moved:.2f}"
    yield Check(f"{what}, one tokenizer", figure, holds=abs(same) < 1e-5 and moved > 0.1)
    other = sample(student, teacher, text, to, work)
    theirs, ours = loss(other, 0), expected(other, formula)
    apart = abs(theirs - ours) / ours
    figure = f"{theirs:.4f}, a plain formula {apart:.0e} apart"
    yield Check(f"{what}, {label}", figure, holds=apart < 1e-4)


def expected(sample: Sample, formula: Formula) -> float:
    """Return the mean of a formula over the rows that predict something."""
    q = sample.logits.double().log_softmax(-1).numpy()
    rows = enumerate(zip(sample.row["topk_ids"], sample.row["topk_logprobs"], strict=True))
    return float(
        np.mean([formula(np.array(p, np.float64), q[i - 1, ids]) for i, (ids, p) in rows if ids])
    )


def sample(
    student: xtok.Tokenizer, teacher: xtok.Tokenizer, text: str, to: CacheFormat, work: Path
) -> Sample:
    """Return a cache of a teacher with random logits, and a student with others, or the same."""
    [ids] = teacher.encode_batch([text])
    logits = _logits(teacher, len(ids), seed=0)
    logits[range(len(ids) - 1), ids[1:]] += math.log(logits.shape[1] / 4)  # it has read such texts
    values, chosen = logits.log_softmax(-1).topk(K)
    topk = {"topk_ids": [[], *chosen[:-1].tolist()], "topk_logprobs": [[], *values[:-1].tolist()]}
    given = work / "teacher.parquet"
    table = pyarrow.table({name: [value] for name, value in {"input_ids": ids, **topk}.items()})
    pyarrow.parquet.write_table(table, given)
    back_map = xtok.build(teacher, student, BACK_MAP)
    paths = {to: work / f"{to}{'.jsonl' if to == 'vllm' else '.parquet'}"}
    paths["neutral"] = work / "neutral.parquet"
    for kind, path in paths.items():
        config_of = ProjectConfig(top_k=K, to=kind)
        xtok.project(given, xtok.load_pair(student, teacher), path, config_of, back_map=back_map)
    [row] = pyarrow.parquet.read_table(paths["neutral"]).to_pylist()
    if student is not teacher:
        logits = _logits(student, len(row["input_ids"]), seed=1)
    return Sample(paths[to], logits, row)


def _logits(tokenizer: xtok.Tokenizer, num_tokens: int, seed: int) -> Tensor:
    """Return logits with almost no probability for unused ids, as in a trained model."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_tokens, tokenizer.vocabulary.vocab_size, generator=generator)
    logits[:, torch.from_numpy(tokenizer.table.lengths == 0)] = -40.0
    return logits
