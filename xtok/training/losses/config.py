"""The options of the losses, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from numbers import Real
from typing import Any


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _check(config: Any, above_0: tuple[str, ...], at_least_0: tuple[str, ...] = ()) -> None:
    """Check the numbers of a config, and that its switches are switches.

    Raises:
        ValueError: for a value of another type, or outside its range.
    """
    for name in (*above_0, *at_least_0):
        value, is_above = getattr(config, name), name in above_0
        if not _is_number(value) or value < 0 or (is_above and value == 0):
            words = "above 0" if is_above else "0 or above"
            raise ValueError(f"{name} is {value!r}, and must be {words}")
    for field in fields(config):
        value = getattr(config, field.name)
        if str(field.type).startswith("int") and isinstance(value, float):
            raise ValueError(f"{field.name} is {value!r}, and must be a whole number")
        if field.type == "bool" and not isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}, and must be True or False")


@dataclass(frozen=True, kw_only=True)
class _KLConfig:
    # Divides both sides' logits; the loss is multiplied by its square, so that gradients keep their
    # size (Hinton et al., arXiv 1503.02531, section 2).
    temperature: float = 1.0
    reverse_kl: bool = False  # KL(student ‖ teacher) instead of KL(teacher ‖ student)

    def __post_init__(self) -> None:
        counts = ("top_k", "uncommon_topk")  # which some of the losses have
        _check(self, ("temperature", *(n for n in counts if getattr(self, n, None) is not None)))


@dataclass(frozen=True, kw_only=True)
class ChunkLossConfig(_KLConfig):
    """Options of all losses over chunks."""

    exact_token_match_only: bool = False  # leave out chunks that are not `pair_is_correct`


@dataclass(frozen=True, kw_only=True)
class ALMConfig(ChunkLossConfig):
    """How `alm` compares."""

    # The root that is taken of both sides' likelihoods; the loss is multiplied by it, so that
    # gradients keep their size. tokenkit's default is 100.
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class CSDConfig(ChunkLossConfig):
    """How `csd` compares."""

    # Between 0 and 1: the generalized Jensen-Shannon divergence, in place of a KL, from a mixture
    # with this share of the teacher.
    jsd_beta: float | None = None
    beta: float = 1.0  # the weight of chunks that are not one token on each side
    alpha: float = 0.0  # the weight of shared tokens at the first place of such chunks

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, (), ("beta", "alpha"))
        if self.jsd_beta is None:
            return
        if not _is_number(self.jsd_beta) or not 0 < self.jsd_beta < 1 or self.reverse_kl:
            raise ValueError(
                f"jsd_beta is {self.jsd_beta!r}, expected 0 to 1, without a reverse KL"
            )


@dataclass(frozen=True, kw_only=True)
class PKLConfig(ChunkLossConfig):
    """How `p_kl` compares."""

    # Teacher tokens that are compared, those with the largest maximum logit in the microbatch; None
    # compares all.
    top_k: int | None = 8192


@dataclass(frozen=True, kw_only=True)
class GoldConfig(ChunkLossConfig):
    """How `gold` compares."""

    uncommon_topk: int = 8192  # the most probabilities of the sorted remainders that are compared


@dataclass(frozen=True, kw_only=True)
class SameTokenizerConfig(_KLConfig):
    """How `same_tokenizer_kl` compares; the options are those of `PKLConfig`."""

    top_k: int | None = None


@dataclass(frozen=True, kw_only=True)
class CombineConfig:
    """How `combine` adds distillation and cross-entropy."""

    distillation_weight: float = 1.0
    cross_entropy_weight: float = 1.0
    # Ignore the weights, and scale the distillation loss to the size of the cross-entropy.
    dynamic_scaling: bool = False

    def __post_init__(self) -> None:
        _check(self, (), ("distillation_weight", "cross_entropy_weight"))
