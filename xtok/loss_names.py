"""Names of the losses, and the kinds of maps that they require."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

BuildLoss: TypeAlias = Literal["p-kl", "gold", "h-kl"]  # losses with maps that `build` creates
EventLoss: TypeAlias = Literal["event-kl", "csd"]  # losses with event maps and spelling maps
LossName: TypeAlias = Literal[BuildLoss, EventLoss, "alm", "same-tokenizer", "topk-kl"]
MapKind: TypeAlias = Literal["map", "events", "spellings"]  # kind of map in a file

MAP_NAMES = {"map": "a projection map", "events": "an event map", "spellings": "a spelling map"}


class LossInfo(NamedTuple):
    """Facts about a loss, for its check of maps and for messages."""

    label: str
    map: MapKind | None  # kind of map that the loss requires
    hint: str  # how to create the input of the loss


LOSS_INFO: Mapping[LossName, LossInfo] = {
    "p-kl": LossInfo("P-KL", "map", "xtok build STUDENT TEACHER --for p-kl"),
    "gold": LossInfo("gold", "map", "xtok build STUDENT TEACHER --for gold"),
    "h-kl": LossInfo("H-KL", "map", "xtok build STUDENT TEACHER --for h-kl"),
    "event-kl": LossInfo("event KL", "events", "xtok events STUDENT TEACHER"),
    "csd": LossInfo("CSD", "spellings", "xtok events STUDENT TEACHER --for csd"),
    "alm": LossInfo("ALM", None, "train without a file: the teacher's log-probabilities suffice"),
    "same-tokenizer": LossInfo("plain KL", None, "train without a file: the tokenizers are equal"),
    "topk-kl": LossInfo("top-k KL", None, "xtok project TOPK STUDENT TEACHER -o OUTPUT.parquet"),
}
"""All losses. `xtok.training.losses.registry` contains their code."""


def with_hyphens(loss: Any) -> Any:
    """Replace underscores by hyphens in a string. Values of other types are returned unchanged."""
    return loss.replace("_", "-") if isinstance(loss, str) else loss


def loss_name(loss: str, choices: Any = BuildLoss) -> Any:
    """Validate the name of a loss, such as `p-kl` or `p_kl`.

    Raises:
        ValueError: if the name is not in `choices`.
    """
    name = with_hyphens(loss)
    if name in get_args(choices):
        return name
    if name in get_args(EventLoss):
        make = f"xtok.get_map(student, teacher, for_loss={name!r})"
        raise ValueError(f"{name} does not use a projection map; call {make} instead")
    raise ValueError(f"loss is {loss!r}, expected one of {get_args(choices)}")
