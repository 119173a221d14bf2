"""Losses by name, on batches of the collator: what a training script chooses from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer
from xtok.training.losses.combine import same_tokenizer_kl
from xtok.training.losses.config import (
    GoldConfig,
    PartitionConfig,
    PKLConfig,
    SameTokenizerConfig,
    ULDConfig,
)
from xtok.training.losses.gold import gold, h_kl, uld
from xtok.training.losses.p_kl import p_kl
from xtok.training.losses.pairs import exact_pairs
from xtok.training.losses.partition import ByteEvents, partition_kl
from xtok.training.module import ProjectionModule

LossName = Literal["p-kl", "gold", "h-kl", "uld", "partition-kl", "same-tokenizer"]
BatchLoss = Callable[[Tensor, Tensor, Mapping[str, Any], Mapping[str, Any]], Tensor]
"""Takes the student's logits, a teacher's, a prepared batch, and that teacher's part of it."""

H_KL_THRESHOLD = 0.6
"""The least weight that makes a row a pair for H-KL (NeMo-RL)."""


def make_loss(
    name: LossName,
    *,
    module: ProjectionModule | None = None,
    student: Tokenizer | None = None,
    teacher: Tokenizer | None = None,
    temperature: float = 1.0,
    reverse_kl: bool = False,
    top_k: int | None = None,
) -> BatchLoss:
    """Return a loss that takes a batch as `xtok.collator.prepare` leaves it.

    Args:
        name: which one.
        module: the map, for `p-kl`, `gold` and `h-kl`, already on its device.
        student: the tokenizer, for `partition-kl`.
        teacher: likewise.
        temperature: as in the configurations.
        reverse_kl: likewise; `uld` ignores it.
        top_k: for `p-kl` and `same-tokenizer`; their own defaults if None.

    Raises:
        XtokError: if the loss needs a map, and there is none.
        ValueError: if there is no such loss, or `partition-kl` lacks its tokenizers.
    """
    if name not in get_args(LossName):
        raise ValueError(f"the loss is {name!r}, and must be one of {get_args(LossName)}")
    common: dict[str, Any] = {"temperature": temperature, "reverse_kl": reverse_kl}
    cut: dict[str, Any] = {} if top_k is None else {"top_k": top_k}
    if name == "uld":
        plain = ULDConfig(temperature=temperature)
        return lambda s, t, batch, side: uld(s, t, side["shifted"], plain)
    if name == "same-tokenizer":
        same = SameTokenizerConfig(**common, **cut)
        return lambda s, t, batch, side: same_tokenizer_kl(s, t, batch["targets"] >= 0, same)
    if name == "partition-kl":
        if student is None or teacher is None:
            raise ValueError("partition-kl needs both tokenizers")
        events, parted = ByteEvents(student, teacher), PartitionConfig(**common)
        return lambda s, t, batch, side: partition_kl(
            s, t, events, batch["predicted_ids"], side["predicted_ids"], side["shifted"], parted
        )
    if module is None:
        raise XtokError(
            f"{name} needs a map",
            hint="give {option}, with a map for each teacher",
            parameter="module",
        )
    if name == "p-kl":
        projected = PKLConfig(**common, **cut)
        return lambda s, t, batch, side: p_kl(s, t, module, side["shifted"], projected)
    threshold = H_KL_THRESHOLD if name == "h-kl" else None
    pairs = exact_pairs(module.map, threshold=threshold).to(module.weights.device)
    compare, paired = h_kl if name == "h-kl" else gold, GoldConfig(**common)
    return lambda s, t, batch, side: compare(s, t, pairs, side["shifted"], paired)
