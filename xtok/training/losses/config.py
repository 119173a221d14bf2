"""The options of the losses, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, kw_only=True)
class _KLConfig:
    # Divides both sides' logits; the loss is multiplied by its square, so that gradients keep their
    # size (Hinton et al., arXiv 1503.02531, section 2).
    temperature: float = 1.0
    reverse_kl: bool = False  # KL(student ‖ teacher) instead of KL(teacher ‖ student)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "uncommon_topk"):
            value = getattr(self, name, None)
            if value is not None and not (value > 0 and isfinite(value)):
                raise ValueError(f"{name} is {value}, and must be above 0")


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
        for name in ("beta", "alpha"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}, and must be 0 or above")
        if self.jsd_beta is not None and (self.reverse_kl or not 0 < self.jsd_beta < 1):
            raise ValueError(
                f"jsd_beta is {self.jsd_beta}, and must be between 0 and 1, without a reverse KL"
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
        for name in ("distillation_weight", "cross_entropy_weight"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}, and must be 0 or above")
