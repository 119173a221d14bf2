"""The options of the losses, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, kw_only=True)
class ChunkLossConfig:
    """Options of all losses over chunks.

    Attributes:
        temperature: divides both sides' logits; the loss is multiplied by its square, so that
            gradients keep their size (Hinton et al., arXiv 1503.02531, section 2); > 0.
        reverse_kl: KL(student ‖ teacher) instead of KL(teacher ‖ student).
        exact_token_match_only: leave out chunks that are not `pair_is_correct`.
    """

    temperature: float = 1.0
    reverse_kl: bool = False
    exact_token_match_only: bool = False

    def __post_init__(self) -> None:
        _positive(temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class PKLConfig(ChunkLossConfig):
    """How `p_kl` compares.

    Attributes:
        top_k: how many teacher tokens are compared, those with the largest maximum logit in the
            microbatch; None compares all.
    """

    top_k: int | None = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class GoldConfig(ChunkLossConfig):
    """How `gold` compares.

    Attributes:
        uncommon_topk: how many probabilities of the sorted remainders are compared at most.
    """

    uncommon_topk: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(uncommon_topk=self.uncommon_topk)


@dataclass(frozen=True, kw_only=True)
class SameTokenizerConfig:
    """How `same_tokenizer_kl` compares.

    Attributes:
        temperature: as in `ChunkLossConfig`.
        reverse_kl: likewise.
        top_k: as in `PKLConfig`.
    """

    temperature: float = 1.0
    reverse_kl: bool = False
    top_k: int | None = None

    def __post_init__(self) -> None:
        _positive(temperature=self.temperature, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class CombineConfig:
    """How `combine` adds distillation and cross-entropy.

    Attributes:
        distillation_weight: of the distillation loss.
        cross_entropy_weight: of the cross-entropy.
        dynamic_scaling: ignore the weights, and scale the distillation loss to the size of the
            cross-entropy.
    """

    distillation_weight: float = 1.0
    cross_entropy_weight: float = 1.0
    dynamic_scaling: bool = False

    def __post_init__(self) -> None:
        for name in ("distillation_weight", "cross_entropy_weight"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}, and must be 0 or above")


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (value > 0 and isfinite(value)):
            raise ValueError(f"{name} is {value}, and must be above 0")
