"""Every tunable and its default, stated once."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

SpecialTokens = Literal["roles", "off"]
Weighting = Literal["power", "softmax"]
AnchorFit = Literal["ridge", "orthogonal"]
Normalize = Literal["sum", "softmax"]
Dtype = Literal["float32", "bfloat16", "float16"]
ExportFormat = Literal["nemo-subtokens", "byte-prefix-map", "shared-vocab", "scipy-npz", "parquet"]

MAX_ENTRIES = 4096
"""How many entries or pieces a row may be asked for: far more than any map has."""

FIRST_PIECE_WEIGHT = 0.9
"""Weight of a token's first piece; each further one has `PIECE_DECAY` times the last one's."""

PIECE_DECAY = 0.1

SLOT_WEIGHT = 0.2
"""Weight of the scale slot beside a row that sums to 1, before both are normalized."""


@dataclass(frozen=True, kw_only=True)
class MultitokenConfig:
    """How `multitoken` makes a map.

    Attributes:
        top_k: entries per row, the slot included; ≥ 1, with the scale trick ≥ 2.
        max_pieces: how many of a token's pieces on the other side count; ≥ 1.
        reverse_pass: spell the teacher's tokens in the student's as well.
        scale_trick: give every non-empty row a scale slot.
        special_tokens: `roles` pairs special tokens by role, `off` leaves their rows empty.
    """

    top_k: int = 32
    max_pieces: int = 4
    reverse_pass: bool = True
    scale_trick: bool = True
    special_tokens: SpecialTokens = "roles"

    def __post_init__(self) -> None:
        _within(2 if self.scale_trick else 1, top_k=self.top_k)
        _within(1, max_pieces=self.max_pieces)
        check_special_tokens(self.special_tokens)


@dataclass(frozen=True, kw_only=True)
class SortCutConfig:
    """How `sort_cut` cuts a map: to `top_k` entries per row, the slot included."""

    top_k: int = 4

    def __post_init__(self) -> None:
        _within(1, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How `build` composes the stages: `multitoken`, then `reapply_exact`, then `sort_cut`.

    Attributes:
        top_k: entries per row of the result, the slot included; `multitoken` has its own default.
        max_pieces: as in `MultitokenConfig`, like the next three.
        reverse_pass: see there.
        scale_trick: see there.
        special_tokens: see there.
        exact_match: pin tokens that both sides have to each other.
    """

    top_k: int = SortCutConfig.top_k
    max_pieces: int = MultitokenConfig.max_pieces
    reverse_pass: bool = MultitokenConfig.reverse_pass
    scale_trick: bool = MultitokenConfig.scale_trick
    special_tokens: SpecialTokens = MultitokenConfig.special_tokens
    exact_match: bool = True

    def __post_init__(self) -> None:
        _within(2 if self.scale_trick else 1, top_k=self.top_k)
        _within(1, max_pieces=self.max_pieces)
        check_special_tokens(self.special_tokens)

    @property
    def multitoken(self) -> MultitokenConfig:
        """The options of the first stage."""
        return MultitokenConfig(
            max_pieces=self.max_pieces,
            reverse_pass=self.reverse_pass,
            scale_trick=self.scale_trick,
            special_tokens=self.special_tokens,
        )

    @property
    def sort_cut(self) -> SortCutConfig:
        """The options of the last stage."""
        return SortCutConfig(top_k=self.top_k)


POWER_OF_LARGEST = 10.0
"""A cosine's exponent, times the largest |cosine| of its row (`minimal_projection_generator.py` of
NeMo-RL)."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How `generate` makes a map.

    Attributes:
        top_k: entries per row; ≥ 1.
        weight_threshold: entries of less weight are dropped, and their row normalized; the weights
            are those that sum to 1 over the teacher's whole vocabulary. 0 ≤ threshold < 1.
        weighting: `power` raises |cosine| to 10 times the row's largest; `softmax` takes
            exp(cosine / temperature).
        temperature: of the softmax; > 0.
        anchor_fit: how the student's input embeddings are brought into the teacher's space, with
            the embedding model `own`.
        ridge: the penalty of the ridge regression, as a share of the mean variance; > 0.
        device: `cpu`, `cuda`, or `cuda:N`.
        dtype: what a sentence-transformers model computes in, and what normalized embeddings are
            rounded to; sums of products are always float32.
        chunk_size: student tokens at once; it bounds the memory and changes nothing else.
    """

    top_k: int = 10
    weight_threshold: float = 0.0
    weighting: Weighting = "power"
    temperature: float = 0.05
    anchor_fit: AnchorFit = "ridge"
    ridge: float = 0.01
    device: str = "cpu"
    dtype: Dtype = "float32"
    chunk_size: int = 8192

    def __post_init__(self) -> None:
        _within(1, top_k=self.top_k)
        _positive(chunk_size=self.chunk_size)
        _positive(temperature=self.temperature, ridge=self.ridge)
        if not 0 <= self.weight_threshold < 1:
            raise ValueError(f"weight_threshold is {self.weight_threshold}, and must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """How `merge` makes one map of several.

    Attributes:
        weights: one per map, each > 0; equal ones if None.
        fill: leave the exact and role rows of the first map as they are.
        top_k: entries per row, a slot included; that of the widest map if None.
    """

    weights: tuple[float, ...] | None = None
    fill: bool = False
    top_k: int | None = None

    def __post_init__(self) -> None:
        _within(1, **({} if self.top_k is None else {"top_k": self.top_k}))
        for number, weight in enumerate(self.weights or (), start=1):
            _positive(**{f"weights, number {number},": weight})


def _positive(**value: float) -> None:
    for name, number in value.items():
        if not (number > 0 and isfinite(number)):
            raise ValueError(f"{name} is {number}, and must be above 0")


def _within(minimum: int, **value: int) -> None:
    for name, number in value.items():
        if not minimum <= number <= MAX_ENTRIES:
            raise ValueError(
                f"{name} is {number}, and must be at least {minimum}, at most {MAX_ENTRIES}"
            )


def check_special_tokens(value: str) -> None:
    """Raise a `ValueError` unless the value is one of `SpecialTokens`."""
    if value not in get_args(SpecialTokens):
        raise ValueError(
            f"special_tokens is {value!r}, and must be one of {get_args(SpecialTokens)}"
        )
