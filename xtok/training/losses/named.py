"""The losses as a table: what each takes, in which direction, and what it is the mean of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from xtok.config import loss_name
from xtok.errors import XtokError
from xtok.maps.events import EventMap
from xtok.maps.loss_fit import H_KL_THRESHOLD, p_kl_problems
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.training.losses.alm import alm
from xtok.training.losses.chunks import count_chunks, require
from xtok.training.losses.combine import same_tokenizer_kl
from xtok.training.losses.config import (
    ALMConfig,
    ChunkLossConfig,
    CSDConfig,
    GoldConfig,
    PKLConfig,
    SameTokenizerConfig,
)
from xtok.training.losses.csd import count_completed, csd
from xtok.training.losses.event_kl import EventIndex, event_index, event_kl
from xtok.training.losses.gold import ExactPairs, exact_pairs, gold
from xtok.training.losses.p_kl import p_kl
from xtok.training.losses.spelling_index import SpellingIndex, spelling_index
from xtok.training.losses.topk_kl import topk_kl
from xtok.training.module import ProjectionModule

LossName = Literal[
    "p-kl", "event-kl", "csd", "alm", "gold", "h-kl", "same-tokenizer", "topk-kl"
]  # fmt: skip
Batch = Mapping[str, Any]


def _chunks(batch: Batch, side: Batch, _: Any, exactly: bool) -> int:
    return count_chunks(side["shifted"], exact_token_match_only=exactly)


def _starts(batch: Batch, side: Batch, _: Any, exactly: bool) -> int:
    return count_chunks(side["shifted"], exact_token_match_only=exactly, starts_only=True)


def _completed(batch: Batch, side: Batch, index: SpellingIndex, exactly: bool) -> int:
    targets = _targets(batch, side)
    return count_completed(index, targets, side["shifted"], exact_token_match_only=exactly)


def _targets(batch: Batch, side: Batch) -> tuple[Tensor, Tensor]:
    return batch["targets"], side["targets"]


def count_targets(batch: Batch, *_: Any) -> int:
    """Return how many of the batch's tokens are targets that something predicts."""
    return int((batch["targets"] >= 0).sum())


def _stored(batch: Batch, side: Batch, *_: Any) -> int:
    return int(side["stored"].valid[:, 1:].sum())


@dataclass(frozen=True)
class BatchLoss:
    """A loss as a trainer calls it, on a prepared batch and a teacher's part of it.

    `mean` takes the student's logits, the teacher's (None if they are stored), the batch and the
    teacher's part, and returns a scalar, the mean over some terms. `count` takes the batch and the
    teacher's part, and returns how many terms these are: the chunks by default.
    """

    mean: Callable[[Tensor, Any, Batch, Batch], Tensor]
    count: Callable[[Batch, Batch], int] = lambda batch, side: count_chunks(side["shifted"])

    def __call__(
        self, student_logits: Tensor, teacher_logits: Tensor | None, batch: Batch, side: Batch
    ) -> Tensor:
        """Return the mean."""
        return self.mean(student_logits, teacher_logits, batch, side)


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

    # Takes the student's logits, the teacher's, the batch, the teacher's part of it, what
    # `prepared` returned, and the config.
    call: Callable[..., Tensor]
    config: Any = None  # a dataclass; its fields are the options that the loss has
    artefact: Artefact | None = None
    is_stored: bool = False  # whether the teacher is a cache of predictions, and no model
    # Also takes what `prepared` returned, and whether the loss is of exact chunks alone.
    count: Callable[[Batch, Batch, Any, bool], int] = _chunks
    prepared: Callable[[Any], Any] = lambda module: module


def _aligned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda s, t, batch, side, artefact, config: function(
        s, t, artefact, side["shifted"], config
    )


def _for_p_kl(module: ProjectionModule) -> ProjectionModule:
    if problems := p_kl_problems(module.map):
        warnings.warn(
            f"this map is not made for P-KL: {'; '.join(problems)}. Build one for it: "
            'xtok.build(student, teacher, for_loss="p-kl")',
            stacklevel=3,
        )
    return module


def _pairs(module: ProjectionModule, threshold: float | None = None) -> ExactPairs:
    return exact_pairs(module.map, threshold=threshold).to(module.weights.device)


def _same_tokenizer(s: Tensor, t: Tensor, batch: Batch, side: Any, _: Any, config: Any) -> Tensor:
    return same_tokenizer_kl(s, t, batch["targets"] >= 0, config)


def _alm(s: Tensor, t: Any, batch: Batch, side: Batch, _: Any, config: Any) -> Tensor:
    logprobs = side.get("teacher_logprobs") if t is None else None
    if t is None and logprobs is None:
        hint = "give a model as the teacher, or rows of its log-probabilities to the collator"
        raise XtokError("there is no teacher, and no prediction of one", hint=hint)
    targets = _targets(batch, side)
    return alm(s, t, targets, side["shifted"], config, teacher_logprobs=logprobs)


def _csd(s: Tensor, t: Any, batch: Batch, side: Batch, index: Any, config: Any) -> Tensor:
    return csd(s, t, index, _targets(batch, side), side["shifted"], config)


def _top_k(s: Tensor, t: None, batch: Batch, side: Batch, *_: Any) -> Tensor:
    return topk_kl(s, **vars(side["stored"]))


LOSSES: dict[LossName, NamedLoss] = {
    "p-kl": NamedLoss(call=_aligned(p_kl), config=PKLConfig, artefact=MAP, prepared=_for_p_kl),
    "event-kl": NamedLoss(
        call=_aligned(event_kl), config=ChunkLossConfig, artefact=EVENTS, count=_starts
    ),
    "csd": NamedLoss(call=_csd, config=CSDConfig, artefact=SPELLINGS, count=_completed),
    "alm": NamedLoss(call=_alm, config=ALMConfig, count=_starts),
    "gold": NamedLoss(call=_aligned(gold), config=GoldConfig, artefact=MAP, prepared=_pairs),
    "h-kl": NamedLoss(
        call=_aligned(gold), config=GoldConfig, artefact=MAP,
        prepared=partial(_pairs, threshold=H_KL_THRESHOLD),
    ),
    "same-tokenizer": NamedLoss(
        call=_same_tokenizer, config=SameTokenizerConfig, count=count_targets
    ),
    "topk-kl": NamedLoss(call=_top_k, is_stored=True, count=_stored),
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
        ValueError: if there is no such loss, or it has not an option that is given.
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
        if module is not None:
            require(module, row.artefact.of_device, f"{row.artefact.to_torch.__name__}(…)")
        hint = "give one for each teacher, as projection= of a trainer or module= of make_loss"
        raise XtokError(f"{name} needs {row.artefact.name}", hint=hint)
    artefact = row.prepared(module)
    exactly = getattr(config, "exact_token_match_only", False)
    return BatchLoss(
        lambda s, t, batch, side: row.call(s, t, batch, side, artefact, config),
        lambda batch, side: row.count(batch, side, artefact, exactly),
    )
