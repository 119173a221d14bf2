"""The options of the losses, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from numbers import Real
from typing import Any


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _check(config: Any, above_0: tuple[str, ...], at_least_0: tuple[str, ...] = ()) -> None:
    for name in (*above_0, *at_least_0):
        value, is_above = getattr(config, name), name in above_0
        if not _is_number(value) or value < 0 or (is_above and value == 0):
            words = "above 0" if is_above else "0 or above"
            raise ValueError(f"{name} is {value!r}, expected a number {words}")
    for field in fields(config):
        value = getattr(config, field.name)
        if str(field.type).startswith("int") and isinstance(value, float):
            raise ValueError(f"{field.name} is {value!r}, expected a whole number")
        if field.type == "bool" and not isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}, expected True or False")


@dataclass(frozen=True, kw_only=True)
class _KLConfig:
    # Divides both sides' logits. The loss is multiplied by its square to keep the size of gradients
    # (Hinton et al., arXiv 1503.02531, section 2).
    temperature: float = 1.0
    reverse_kl: bool = False  # KL(student ‖ teacher) instead of KL(teacher ‖ student)

    def __post_init__(self) -> None:
        counts = ("top_k", "uncommon_topk")  # options of some losses
        _check(self, ("temperature", *(n for n in counts if getattr(self, n, None) is not None)))


@dataclass(frozen=True, kw_only=True)
class ChunkLossConfig(_KLConfig):
    """Options of all losses over chunks."""

    exact_token_match_only: bool = False  # leave out chunks that are not `pair_is_correct`


@dataclass(frozen=True, kw_only=True)
class ALMConfig(ChunkLossConfig):
    """Options of `alm`."""

    # Both likelihoods are raised to 1 / temperature. The loss is multiplied by the temperature to
    # keep the size of gradients. tokenkit's default is 100.
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class CSDConfig(ChunkLossConfig):
    """Options of `csd`."""

    # Between 0 and 1: use the generalized Jensen-Shannon divergence, with this share of the teacher
    # in the mixture.
    jsd_beta: float | None = None
    beta: float = 1.0  # the weight of chunks that are not one token on each side
    alpha: float = 0.0  # the weight of shared tokens at their first position

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
    """Options of `p_kl`."""

    # Compare the teacher tokens with the largest maximum logit in the microbatch; None: all tokens.
    top_k: int | None = 8192


@dataclass(frozen=True, kw_only=True)
class GoldConfig(ChunkLossConfig):
    """Options of `gold`."""

    uncommon_topk: int = 8192  # maximum number of sorted probabilities to compare


@dataclass(frozen=True, kw_only=True)
class SameTokenizerConfig(_KLConfig):
    """Options of `same_tokenizer_kl`."""

    top_k: int | None = None


@dataclass(frozen=True, kw_only=True)
class CombineConfig:
    """Options of `combine`."""

    distillation_weight: float = 1.0
    cross_entropy_weight: float = 1.0
    # Ignore the weights; scale the distillation loss to the size of the cross-entropy.
    dynamic_scaling: bool = False

    def __post_init__(self) -> None:
        _check(self, (), ("distillation_weight", "cross_entropy_weight"))
