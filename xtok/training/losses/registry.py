"""The table of losses, with their inputs and options."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtok.errors import XtokError
from xtok.loss_names import LOSS_INFO, MAP_NAMES, LossName, MapKind, loss_name
from xtok.maps.events import EventMap
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.maps.suitability import H_KL_THRESHOLD, p_kl_problems
from xtok.training.batches import Batch, SideBatch
from xtok.training.losses.alm import plan_alm
from xtok.training.losses.chunks import Chunks, TargetIds, chunks_in, count_chunks, wrap_logits
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
from xtok.training.losses.spelling_index import SpellingIndex, spelling_index
from xtok.training.losses.topk_kl import plan_topk_kl
from xtok.training.module import ProjectionModule
from xtok.training.sparse import work_dtype


class BatchLoss(ABC):
    """A loss that trainers call with a prepared batch and one teacher's part of the batch."""

    takes_hidden = True
    """Whether the loss accepts `HiddenLogits`."""

    @abstractmethod
    def count(self, batch: Batch, side: SideBatch, /) -> int:
        """Return the number of terms that the loss averages."""

    @abstractmethod
    def plan(self, student_logits: Any, teacher_logits: Any, batch: Batch, side: SideBatch) -> Plan:
        """Return the plan with which `one_pass` computes the loss."""

    def __call__(
        self, student_logits: Any, teacher_logits: Any, batch: Batch, side: SideBatch
    ) -> Tensor:
        """Return the mean loss of the batch."""
        plan = self.plan(student_logits, teacher_logits, batch, side)
        return one_pass(student_logits, [plan])[0]


@dataclass(frozen=True, eq=False)
class CustomLoss(BatchLoss):
    """A user-defined loss, which PyTorch computes from whole logits.

    `mean` takes the student's logits, the teacher's logits (None for stored predictions), the batch
    and the teacher's part. The result is the mean loss, a scalar. `count` returns the number of
    terms that `mean` averages. The default is the number of chunks.
    """

    mean: Callable[[Any, Any, Batch, SideBatch], Tensor]
    count: Callable[[Batch, SideBatch], int] = lambda batch, side: count_chunks(side["shifted"])

    takes_hidden = False

    def plan(self, student_logits: Any, teacher_logits: Any, batch: Batch, side: SideBatch) -> Plan:
        """Return a plan without comparisons, which contains the mean loss and its gradient."""
        mean = self.mean(student_logits, teacher_logits, batch, side)
        gradients = [(mean, torch.ones_like(mean))]
        return Plan((), 1, work_dtype(mean), gradients=gradients, value=mean.detach())


class RequiredMap(NamedTuple):
    """The kind of map that a loss requires."""

    file_type: type[ProjectionMap] | type[EventMap] | type[SpellingMap]
    device_type: type[ProjectionModule] | type[EventIndex] | type[SpellingIndex]
    to_device_type: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """The kind of map with an article, such as "an event map"."""
        return MAP_NAMES[self.file_type.KIND]

    def on_device(self, any_map: Any) -> Any:
        """Convert a map or a map's file to `device_type`; return None for other values."""
        any_map = self.file_type.of(any_map)
        if isinstance(any_map, self.file_type):
            any_map = self.to_device_type(any_map)
        return any_map if isinstance(any_map, self.device_type) else None


MAPS: Mapping[MapKind | None, RequiredMap] = {
    "map": RequiredMap(ProjectionMap, ProjectionModule, ProjectionModule),
    "events": RequiredMap(EventMap, EventIndex, event_index),
    "spellings": RequiredMap(SpellingMap, SpellingIndex, spelling_index),
}


@dataclass(frozen=True)
class LossSpec:
    """The definition of a loss: its plan, its other inputs and its options."""

    name: LossName
    # Its arguments are `BothLogits`, the map if required, and the config. For stored predictions,
    # its arguments are the student's logits and the predictions.
    plan: Callable[..., Plan]
    config: Any = None  # class of the options
    is_stored: bool = False  # whether stored predictions replace the teacher
    takes_logprobs: bool = False  # whether `teacher_logprobs` can replace the teacher's logits
    count: Callable[[Any, TargetIds, Chunks], int] = lambda map, targets, chunks: chunks.total
    prepare_map: Callable[[Any], Any] = lambda on_device: on_device

    @property
    def map(self) -> RequiredMap | None:
        """The kind of map that the loss requires, if any."""
        return MAPS.get(LOSS_INFO[self.name].map)


@dataclass(frozen=True, eq=False)
class _ConfiguredLoss(BatchLoss):
    """A loss of `LOSSES` with its map and options."""

    spec: LossSpec
    map: Any
    config: Any

    def count(self, batch: Batch, side: SideBatch) -> int:
        if self.spec.is_stored:
            return int(side["stored"].valid[:, 1:].sum())
        chunks = chunks_in(side["shifted"], self.config.chunk_filter, batch["targets"].device)
        return self.spec.count(self.map, (batch["targets"], side.get("targets")), chunks)

    def plan(self, student_logits: Any, teacher_logits: Any, batch: Batch, side: SideBatch) -> Plan:
        if self.spec.is_stored:
            return self.spec.plan(student_logits, side["stored"])
        logprobs = side.get("teacher_logprobs") if self.spec.takes_logprobs else None
        if teacher_logits is None and logprobs is None:
            hint = "pass a teacher model, or for alm, its log-probabilities"
            raise XtokError("the teacher's predictions are missing", hint=hint)
        chunks = chunks_in(side["shifted"], self.config.chunk_filter, student_logits.device)
        targets = batch.get("targets"), side.get("targets")
        sides = wrap_logits(
            student_logits, teacher_logits, chunks, targets=targets, teacher_logprobs=logprobs
        )
        maps = [] if self.map is None else [self.map]
        return self.spec.plan(sides, *maps, config=self.config)


def _warn_if_unfit(module: ProjectionModule) -> ProjectionModule:
    if problems := p_kl_problems(module.map):
        warnings.warn(
            f"this map is not made for P-KL: {'; '.join(problems)}. Build one with "
            'xtok.build(student, teacher, for_loss="p-kl")',
            stacklevel=3,
        )
    return module


def _pairs(module: ProjectionModule, threshold: float | None = None) -> ExactPairs:
    return exact_pairs(module.map, threshold=threshold).to(module.weights.device)


_SPECS = (
    LossSpec("p-kl", plan_p_kl, PKLConfig, prepare_map=_warn_if_unfit),
    LossSpec("event-kl", plan_event_kl, ChunkLossConfig),
    LossSpec("csd", plan_csd, CSDConfig, count=count_completed),
    LossSpec("alm", plan_alm, ALMConfig, takes_logprobs=True),
    LossSpec("gold", plan_gold, GoldConfig, prepare_map=_pairs),
    LossSpec("h-kl", plan_gold, GoldConfig, prepare_map=partial(_pairs, threshold=H_KL_THRESHOLD)),
    LossSpec("same-tokenizer", plan_event_kl, SameTokenizerConfig),
    LossSpec("topk-kl", plan_topk_kl, is_stored=True),
)
LOSSES: dict[LossName, LossSpec] = {spec.name: spec for spec in _SPECS}


def loss_spec(name: LossName) -> LossSpec:
    """Return the definition of a loss; `event_kl` and `event-kl` are equivalent."""
    return LOSSES[loss_name(name, LossName)]


def unused_map(name: str) -> XtokError:
    """Return the error for a loss that takes no map, but received a map."""
    takers = ", ".join(name for name, spec in LOSSES.items() if spec.map)
    return XtokError(f"{name} takes no map", hint=f"remove the map, or use one of {takers}")


def make_loss(name: LossName, *, map: Any = None, config: Any = None) -> BatchLoss:
    """Return a loss for batches from `prepare`.

    >>> xtok.losses.make_loss("alm", config=xtok.losses.ALMConfig(temperature=100)).takes_hidden
    True

    Args:
        name: a key of `LOSSES`.
        map: a map, the path of its file, or a map on a device (`ProjectionModule`, `EventIndex` or
            `SpellingIndex`).
        config: the options, such as `PKLConfig`. `h-kl` requires `GoldConfig`, and `event-kl`
            requires `ChunkLossConfig`.

    Raises:
        XtokError: if a required map is missing, or if `map` is set for a loss that takes no map.
        ValueError: if the loss does not exist, or the config belongs to another loss.
    """
    spec, name = loss_spec(name), loss_name(name, LossName)
    if config is not None and (spec.config is None or not isinstance(config, spec.config)):
        expected = spec.config.__name__ if spec.config else "no config"
        raise ValueError(f"{name} expects {expected}, not {type(config).__name__}")
    if config is None and spec.config:
        config = spec.config()
    on_device = None
    if map is not None and spec.map is None:
        raise unused_map(name)
    if spec.map:
        on_device = spec.map.on_device(map)
        if on_device is None:
            hint = "pass map= to the trainer (one map per teacher) or to make_loss"
            raise XtokError(f"{name} requires {spec.map.name}", hint=hint)
        on_device = spec.prepare_map(on_device)
    return _ConfiguredLoss(spec, on_device, config)
