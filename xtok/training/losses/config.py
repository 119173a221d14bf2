"""Options of the losses and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from xtok._lib.fields import Config, option


class ChunkFilter(NamedTuple):
    """The chunks that a loss compares."""

    correct_only: bool = False  # exclude chunks if `pair_is_correct` is False
    starts_only: bool = False  # exclude chunks without a predicted first token


@dataclass(frozen=True, kw_only=True)
class _KLConfig(Config):
    # The loss is multiplied by the squared temperature, so that the size of gradients does not
    # depend on the temperature (Hinton et al., arXiv 1503.02531, section 2).
    temperature: float = option(1.0, "Divisor of both sides' logits.", above=0)
    reverse_kl: bool = option(False, "Use KL(student ‖ teacher) instead of KL(teacher ‖ student).")

    starts_only: ClassVar[bool] = True

    @property
    def chunk_filter(self) -> ChunkFilter:
        """The chunks that the loss compares."""
        return ChunkFilter(getattr(self, "exact_token_match_only", False), self.starts_only)


@dataclass(frozen=True, kw_only=True)
class ChunkLossConfig(_KLConfig):
    """Options of all losses that compare chunks."""

    exact_token_match_only: bool = option(False, "Exclude chunks if pair_is_correct is False.")


@dataclass(frozen=True, kw_only=True)
class ALMConfig(ChunkLossConfig):
    """Options of `alm`."""

    # The loss is multiplied by τ, so that the size of gradients does not depend on τ. tokenkit's
    # default is 100.
    temperature: float = option(1.0, "Both likelihoods are raised to the power 1 / τ.", above=0)


@dataclass(frozen=True, kw_only=True)
class CSDConfig(ChunkLossConfig):
    """Options of `csd`."""

    jsd_beta: float | None = option(
        None,
        "Use the generalized Jensen-Shannon divergence, with this share of the teacher in the "
        "mixture.",
        above=0,
        below=1,
    )
    beta: float = option(1.0, "Weight of chunks that are not 1:1 (one token per side).", min=0)
    alpha: float = option(
        0.0, "Weight, times beta, of shared tokens at the start of chunks that are not 1:1.", min=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jsd_beta is not None and self.reverse_kl:
            raise ValueError(f"jsd_beta is {self.jsd_beta}, expected None if reverse_kl is True")


@dataclass(frozen=True, kw_only=True)
class PKLConfig(ChunkLossConfig):
    """Options of `p_kl`."""

    top_k: int | None = option(
        8192, "Number of teacher tokens to compare (highest logits in the microbatch).", min=1
    )
    starts_only = False


@dataclass(frozen=True, kw_only=True)
class GoldConfig(ChunkLossConfig):
    """Options of `gold`."""

    uncommon_topk: int = option(8192, "Maximum number of sorted probabilities to compare.", min=1)
    starts_only = False


@dataclass(frozen=True, kw_only=True)
class SameTokenizerConfig(_KLConfig):
    """Options of `same_tokenizer_kl`."""

    top_k: int | None = option(None, "Number of most likely teacher tokens to compare.", min=1)


@dataclass(frozen=True, kw_only=True)
class CombineConfig(Config):
    """Options of `combine`."""

    distillation_weight: float = option(1.0, "Weight of the distillation losses.", min=0)
    cross_entropy_weight: float = option(1.0, "Weight of the student's cross-entropy.", min=0)
    dynamic_scaling: bool = option(
        False, "Ignore the weights; scale the distillation loss to the size of the cross-entropy."
    )
