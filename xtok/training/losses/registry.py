"""The losses as a table: what each takes, what it is computed from, and what it is the mean of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Literal, NamedTuple

from torch import Tensor

from xtok.config import loss_name
from xtok.errors import XtokError
from xtok.maps.events import EventMap
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.provenance import H_KL_THRESHOLD, p_kl_problems
from xtok.maps.spellings import SpellingMap
from xtok.training.losses.alm import plan_alm
from xtok.training.losses.chunks import Chunks, chunks_in, count_chunks
from xtok.training.losses.config import (
    ALMConfig,
    ChunkLossConfig,
    CSDConfig,
    GoldConfig,
    PKLConfig,
    SameTokenizerConfig,
)
from xtok.training.losses.csd import count_completed, plan_csd
from xtok.training.losses.event_kl import EventIndex, event_index, plan_event_kl
from xtok.training.losses.gold import ExactPairs, exact_pairs, plan_gold
from xtok.training.losses.one_pass import Plan, one_pass
from xtok.training.losses.p_kl import plan_p_kl
from xtok.training.losses.same_tokenizer import plan_same_tokenizer_kl
from xtok.training.losses.spelling_index import SpellingIndex, spelling_index
from xtok.training.losses.topk_kl import plan_topk_kl
from xtok.training.module import ProjectionModule
from xtok.training.sparse import work_dtype

LossName = Literal[
    "p-kl", "event-kl", "csd", "alm", "gold", "h-kl", "same-tokenizer", "topk-kl"
]  # fmt: skip
Batch = Mapping[str, Any]


def count_targets(batch: Batch, *_: Any) -> int:
    """Return how many of the batch's tokens are targets that something predicts."""
    return int((batch["targets"] >= 0).sum())


def _targets(batch: Batch, side: Batch) -> dict[str, Any]:
    return {"targets": (batch["targets"], side["targets"])}


class BatchLoss:
    """A loss as a trainer calls it, on a prepared batch and a teacher's part of it.

    `mean` takes the student's logits, the teacher's (None if they are stored), the batch and the
    teacher's part, and returns a scalar, the mean over some terms. `count` takes the batch and the
    teacher's part, and returns how many terms these are: the chunks by default.
    """

    takes_hidden = False
    """Whether logits may be `HiddenLogits`."""

    def __init__(
        self,
        mean: Callable[[Any, Any, Batch, Batch], Tensor],
        count: Callable[[Batch, Batch], int] = lambda batch, side: count_chunks(side["shifted"]),
    ) -> None:
        self._mean, self._count = mean, count

    def __call__(
        self, student_logits: Any, teacher_logits: Any, batch: Batch, side: Batch
    ) -> Tensor:
        """Return the mean."""
        plan = self.plan(student_logits, teacher_logits, batch, side)
        return one_pass(student_logits, [plan])[0]

    def count(self, batch: Batch, side: Batch) -> int:
        """Return how many terms it is the mean of."""
        return self._count(batch, side)

    def plan(self, student_logits: Any, teacher_logits: Any, batch: Batch, side: Batch) -> Plan:
        """Return what it compares, for `one_pass` of several losses."""
        mean = self._mean(student_logits, teacher_logits, batch, side)
        return Plan((), 1, work_dtype(mean), by_autograd=mean)


class MapKind(NamedTuple):
    """A kind of map that a loss takes: it belongs to two vocabularies."""

    name: str
    of_file: type[ProjectionMap] | type[EventMap] | type[SpellingMap]
    of_device: type[ProjectionModule] | type[EventIndex] | type[SpellingIndex]
    to_torch: Callable[[Any], Any]  # from the one to the other

    def on_device(self, given: Any) -> Any:
        """Return a map, its path or what it is on a device as the last; None for another."""
        if isinstance(given, str | PathLike):
            given = self.of_file.load(given)
        if isinstance(given, self.of_file):
            given = self.to_torch(given)
        return given if isinstance(given, self.of_device) else None


MAP = MapKind("a map", ProjectionMap, ProjectionModule, ProjectionModule)
EVENTS = MapKind("an event map", EventMap, EventIndex, event_index)
SPELLINGS = MapKind("a spelling map", SpellingMap, SpellingIndex, spelling_index)


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """A row of the table."""

    # Takes the student's logits, the teacher's, the map if there is one, the chunks and the config;
    # of stored predictions the student's logits alone; and `arguments` by name.
    plan: Callable[..., Plan]
    config: Any = None  # a dataclass; its fields are the options that the loss has
    map: MapKind | None = None
    is_stored: bool = False  # whether the teacher is a cache of predictions, and no model
    starts_only: bool = True  # whether only chunks count whose first token both sides predict
    arguments: Callable[[Batch, Batch], dict[str, Any]] = lambda batch, side: {}
    count: Callable[[Any, Batch, Batch, Chunks], int] | None = None  # the chunks if None
    prepared: Callable[[Any], Any] = lambda given: given


class _TableLoss(BatchLoss):
    """A row of the table with what it takes."""

    takes_hidden = True

    def __init__(self, row: NamedLoss, given: Any, config: Any) -> None:
        self.row, self.map, self.config = row, given, config
        self.kind = getattr(config, "exact_token_match_only", False), row.starts_only

    def count(self, batch: Batch, side: Batch) -> int:
        if self.row.is_stored:
            return int(side["stored"].valid[:, 1:].sum())
        chunks = chunks_in(side, self.kind, batch["targets"].device)
        count = self.row.count
        return chunks.total if count is None else count(self.map, batch, side, chunks)

    def plan(self, student_logits: Any, teacher_logits: Any, batch: Batch, side: Batch) -> Plan:
        options = self.row.arguments(batch, side)
        if self.row.is_stored:
            return self.row.plan(student_logits, **options)
        if teacher_logits is None and options.get("teacher_logprobs") is None:
            hint = "give a model as the teacher; for alm, its log-probabilities are enough"
            raise XtokError("neither a teacher nor its predictions are given", hint=hint)
        given = [] if self.map is None else [self.map]
        chunks = chunks_in(side, self.kind, student_logits.device)
        return self.row.plan(student_logits, teacher_logits, *given, chunks, self.config, **options)


def _warn_if_unfit(module: ProjectionModule) -> ProjectionModule:
    if problems := p_kl_problems(module.map):
        warnings.warn(
            f"this map is not made for P-KL: {'; '.join(problems)}. Build one for it: "
            'xtok.build(student, teacher, for_loss="p-kl")',
            stacklevel=3,
        )
    return module


def _exact_pairs(module: ProjectionModule, threshold: float | None = None) -> ExactPairs:
    return exact_pairs(module.map, threshold=threshold).to(module.weights.device)


def _completed(index: SpellingIndex, batch: Batch, side: Batch, chunks: Chunks) -> int:
    return count_completed(index, (batch["targets"], side["targets"]), chunks)


LOSSES: dict[LossName, NamedLoss] = {
    "p-kl": NamedLoss(
        plan=plan_p_kl, config=PKLConfig, map=MAP, prepared=_warn_if_unfit, starts_only=False
    ),
    "event-kl": NamedLoss(plan=plan_event_kl, config=ChunkLossConfig, map=EVENTS),
    "csd": NamedLoss(
        plan=plan_csd, config=CSDConfig, map=SPELLINGS, arguments=_targets, count=_completed
    ),
    "alm": NamedLoss(
        plan=plan_alm, config=ALMConfig,
        arguments=lambda batch, side: {
            **_targets(batch, side), "teacher_logprobs": side.get("teacher_logprobs"),
        },
    ),
    "gold": NamedLoss(
        plan=plan_gold, config=GoldConfig, map=MAP, prepared=_exact_pairs, starts_only=False
    ),
    "h-kl": NamedLoss(
        plan=plan_gold, config=GoldConfig, map=MAP, starts_only=False,
        prepared=partial(_exact_pairs, threshold=H_KL_THRESHOLD),
    ),
    "same-tokenizer": NamedLoss(plan=plan_same_tokenizer_kl, config=SameTokenizerConfig),
    "topk-kl": NamedLoss(
        plan=plan_topk_kl, is_stored=True,
        arguments=lambda batch, side: {**vars(side["stored"])},
    ),
}  # fmt: skip


def loss_named(name: LossName) -> NamedLoss:
    """Return a loss's row of the table; `event_kl` is `event-kl`.

    Raises:
        ValueError: if there is no such loss.
    """
    return LOSSES[loss_name(name, LossName)]


def make_loss(name: LossName, *, map: Any = None, config: Any = None) -> BatchLoss:
    """Return a loss that takes a batch as `prepare` of the collator leaves it.

    >>> xtok.losses.make_loss("alm", config=xtok.losses.ALMConfig(temperature=100)).takes_hidden
    True

    Args:
        name: which one.
        map: a map, its path, or what it is on a device: a `ProjectionModule` for `p-kl`, `gold` and
            `h-kl`, the `event_index` of an event map for `event-kl`, the `spelling_index` of a
            spelling map for `csd`.
        config: the options: a `PKLConfig`, `GoldConfig` (of `h-kl`, too), `ChunkLossConfig` (of
            `event-kl`), `CSDConfig`, `ALMConfig` or `SameTokenizerConfig`; the defaults if None.

    Raises:
        XtokError: if the loss needs a map, or an event map, and there is none.
        ValueError: if there is no such loss, or the config is of another one.
    """
    row, name = loss_named(name), loss_name(name, LossName)
    if config is not None and (row.config is None or not isinstance(config, row.config)):
        what = row.config.__name__ if row.config else "no config"
        raise ValueError(f"{name} expects {what}, not {type(config).__name__}")
    if config is None and row.config:
        config = row.config()
    given = None
    if row.map:
        given = row.map.on_device(map)
        if given is None:
            hint = "give one for each teacher, as map= of a trainer or of make_loss"
            raise XtokError(f"{name} needs {row.map.name}", hint=hint)
        given = row.prepared(given)
    return _TableLoss(row, given, config)
