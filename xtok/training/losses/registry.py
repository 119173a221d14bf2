"""The losses as a table: what each takes, what it is computed from, and what it is the mean of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from os import PathLike
from typing import Any, Literal, NamedTuple

from torch import Tensor

from xtok.config import loss_name
from xtok.errors import XtokError
from xtok.maps.events import EventMap
from xtok.maps.loss_fit import H_KL_THRESHOLD, p_kl_problems
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.training.losses.alm import plan_alm
from xtok.training.losses.chunks import count_chunks, require_type
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
from xtok.training.losses.gold import ExactPairs, exact_pairs, gold
from xtok.training.losses.one_pass import Plan, one_pass
from xtok.training.losses.p_kl import p_kl
from xtok.training.losses.same_tokenizer import plan_same_tokenizer_kl
from xtok.training.losses.spelling_index import SpellingIndex, spelling_index
from xtok.training.losses.topk_kl import plan_topk_kl
from xtok.training.module import ProjectionModule

LossName = Literal[
    "p-kl", "event-kl", "csd", "alm", "gold", "h-kl", "same-tokenizer", "topk-kl"
]  # fmt: skip
Batch = Mapping[str, Any]


def count_targets(batch: Batch, *_: Any) -> int:
    """Return how many of the batch's tokens are targets that something predicts."""
    return int((batch["targets"] >= 0).sum())


def _count_chunks(batch: Batch, side: Batch, _: Any, exact_only: bool) -> int:
    return count_chunks(side["shifted"], exact_token_match_only=exact_only)


def _count_starts(batch: Batch, side: Batch, _: Any, exact_only: bool) -> int:
    return count_chunks(side["shifted"], exact_token_match_only=exact_only, starts_only=True)


def _count_completed(batch: Batch, side: Batch, index: SpellingIndex, exact_only: bool) -> int:
    targets = batch["targets"], side["targets"]
    return count_completed(index, targets, side["shifted"], exact_token_match_only=exact_only)


def _count_stored(batch: Batch, side: Batch, *_: Any) -> int:
    return int(side["stored"].valid[:, 1:].sum())


def _alignment_only(batch: Batch, side: Batch) -> dict[str, Any]:
    return {"alignment": side["shifted"]}


def _alignment_and_targets(batch: Batch, side: Batch) -> dict[str, Any]:
    return {"alignment": side["shifted"], "targets": (batch["targets"], side["targets"])}


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
        return self._mean(student_logits, teacher_logits, batch, side)

    def count(self, batch: Batch, side: Batch) -> int:
        """Return how many terms it is the mean of."""
        return self._count(batch, side)

    def plan(
        self, student_logits: Any, teacher_logits: Any, batch: Batch, side: Batch
    ) -> Plan | None:
        """Return what it compares, for `one_pass` of several losses; None if it has no blocks."""
        return None


class Artefact(NamedTuple):
    """What a loss takes that belongs to two vocabularies."""

    name: str
    of_file: type[ProjectionMap] | type[EventMap] | type[SpellingMap]
    of_device: type[ProjectionModule] | type[EventIndex] | type[SpellingIndex]
    to_torch: Callable[[Any], Any]  # from the one to the other


MAP = Artefact("a map", ProjectionMap, ProjectionModule, ProjectionModule)
EVENTS = Artefact("an event map", EventMap, EventIndex, event_index)
SPELLINGS = Artefact("a spelling map", SpellingMap, SpellingIndex, spelling_index)


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """A row of the table."""

    # Takes the student's logits, the teacher's unless they are stored, what `prepared` returned if
    # there is an artefact, then `arguments` and `config` by name.
    plan: Callable[..., Plan] | None = None  # what `one_pass` takes; None if it has no blocks
    function: Any = None  # the loss itself, where there is no plan
    config: Any = None  # a dataclass; its fields are the options that the loss has
    artefact: Artefact | None = None
    is_stored: bool = False  # whether the teacher is a cache of predictions, and no model
    arguments: Callable[[Batch, Batch], dict[str, Any]] = _alignment_only
    # Also takes what `prepared` returned, and whether the loss is of exact chunks alone.
    count: Callable[[Batch, Batch, Any, bool], int] = _count_chunks
    prepared: Callable[[Any], Any] = lambda module: module


class _TableLoss(BatchLoss):
    """A row of the table with what it takes."""

    def __init__(self, row: NamedLoss, artefact: Any, config: Any) -> None:
        self.row, self.artefact, self.takes_hidden = row, artefact, row.plan is not None
        self.exact_only = getattr(config, "exact_token_match_only", False)
        self.config_argument = {} if row.config is None else {"config": config}

    def __call__(
        self, student_logits: Any, teacher_logits: Any, batch: Batch, side: Batch
    ) -> Tensor:
        args, kwargs = self._arguments(student_logits, teacher_logits, batch, side)
        if self.row.plan is not None:
            return one_pass(student_logits, [self.row.plan(*args, **kwargs)])[0]
        mean: Tensor = self.row.function(*args, **kwargs)
        return mean

    def count(self, batch: Batch, side: Batch) -> int:
        return self.row.count(batch, side, self.artefact, self.exact_only)

    def plan(
        self, student_logits: Any, teacher_logits: Any, batch: Batch, side: Batch
    ) -> Plan | None:
        args, kwargs = self._arguments(student_logits, teacher_logits, batch, side)
        return None if self.row.plan is None else self.row.plan(*args, **kwargs)

    def _arguments(
        self, student: Any, teacher: Any, batch: Batch, side: Batch
    ) -> tuple[list[Any], dict[str, Any]]:
        kwargs = self.row.arguments(batch, side) | self.config_argument
        if self.row.plan is plan_alm and teacher is None:
            kwargs["teacher_logprobs"] = side.get("teacher_logprobs")
        if teacher is None and not self.row.is_stored and kwargs.get("teacher_logprobs") is None:
            hint = "give a model as the teacher; for alm, its log-probabilities are enough"
            raise XtokError("neither a teacher nor its predictions are given", hint=hint)
        args = [student] if self.row.is_stored else [student, teacher]
        return [*args, *([self.artefact] if self.row.artefact else [])], kwargs


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


LOSSES: dict[LossName, NamedLoss] = {
    "p-kl": NamedLoss(function=p_kl, config=PKLConfig, artefact=MAP, prepared=_warn_if_unfit),
    "event-kl": NamedLoss(
        plan=plan_event_kl, config=ChunkLossConfig, artefact=EVENTS,
        count=_count_starts,
    ),
    "csd": NamedLoss(
        plan=plan_csd, config=CSDConfig, artefact=SPELLINGS,
        arguments=_alignment_and_targets, count=_count_completed,
    ),
    "alm": NamedLoss(
        plan=plan_alm, config=ALMConfig, arguments=_alignment_and_targets, count=_count_starts
    ),
    "gold": NamedLoss(function=gold, config=GoldConfig, artefact=MAP, prepared=_exact_pairs),
    "h-kl": NamedLoss(
        function=gold, config=GoldConfig, artefact=MAP,
        prepared=partial(_exact_pairs, threshold=H_KL_THRESHOLD),
    ),
    "same-tokenizer": NamedLoss(
        plan=plan_same_tokenizer_kl, config=SameTokenizerConfig, count=_count_starts,
    ),
    "topk-kl": NamedLoss(
        plan=plan_topk_kl, is_stored=True,
        arguments=lambda batch, side: {**vars(side["stored"])}, count=_count_stored,
    ),
}  # fmt: skip


def loss_named(name: LossName) -> NamedLoss:
    """Return a loss's row of the table; `event_kl` is `event-kl`.

    Raises:
        ValueError: if there is no such loss.
    """
    return LOSSES[loss_name(name, LossName)]


def make_loss(
    name: LossName,
    *,
    module: ProjectionModule | EventIndex | SpellingIndex | None = None,
    temperature: float = 1.0,
    reverse_kl: bool = False,
    top_k: int | None = None,
    config: Any = None,
) -> BatchLoss:
    """Return a loss that takes a batch as `prepare` of the collator leaves it.

    Args:
        name: which one.
        module: the map, for `p-kl`, `gold` and `h-kl`; the `event_index` of an event map, for
            `event-kl`; the `spelling_index` of a spelling map, for `csd`. Already on its device.
        temperature: as in the configurations; `topk-kl` has none. For `alm` that of likelihoods.
        reverse_kl: the reverse KL; `topk-kl` has none.
        top_k: for `p-kl` and `same-tokenizer`; their own defaults if None.
        config: all options of the loss, as a `CSDConfig`, in place of the three.

    Raises:
        XtokError: if the loss needs a map, or an event map, and there is none.
        ValueError: if there is no such loss, or it does not take a given option.
    """
    row, name = loss_named(name), loss_name(name, LossName)
    options: dict[str, Any] = {}
    if temperature != 1:
        options["temperature"] = temperature
    if reverse_kl:
        options["reverse_kl"] = reverse_kl
    if top_k is not None:
        options["top_k"] = top_k
    known = {field.name for field in fields(row.config)} if row.config else set()
    if unknown := options.keys() - known:
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}")
    if config is None:
        config = row.config(**options) if row.config else None
    elif options or row.config is None or not isinstance(config, row.config):
        what = row.config.__name__ if row.config else "no config"
        raise ValueError(f"{name} takes {what}, without other options")
    if row.artefact and not isinstance(module, row.artefact.of_device):
        if isinstance(module, row.artefact.of_file | str | PathLike):
            require_type(module, row.artefact.of_device, f"{row.artefact.to_torch.__name__}(…)")
        hint = "give one for each teacher, as projection= of a trainer or module= of make_loss"
        raise XtokError(f"{name} needs {row.artefact.name}", hint=hint)
    return _TableLoss(row, row.prepared(module), config)
