"""Every tunable and its default, stated once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from numbers import Integral
from typing import Any, Literal, get_args

SpecialTokens = Literal["roles", "fuzzy", "off"]
Canonicalization = Literal["exact", "relaxed"]
TokenForm = Literal["bytes", "text", "raw"]
Weighting = Literal["power", "softmax"]
AnchorFit = Literal["ridge", "orthogonal"]
Normalize = Literal["sum", "softmax"]
Dtype = Literal["float32", "bfloat16", "float16"]
Weights = Literal["decay", "prior"]
Target = Literal["start", "chunk", "both"]
Loss = Literal["p-kl", "gold", "h-kl"]
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
        special_tokens: `roles` pairs special tokens by role, `fuzzy` by the similarity of their
            names, `off` leaves their rows empty.
        fuzzy_threshold: the least similarity that counts with `fuzzy`; 0 < threshold ≤ 1.
        fuzzy_top_k: how many teacher tokens a special token may have with `fuzzy`; ≥ 1.
        canonicalization: `relaxed` also pairs tokens that differ only in a space before
            punctuation, or in the form of a line break, where they have no exact counterpart.
        token_form: what a token is taken for: its `bytes`; the `text` that they decode to, U+FFFD
            for what is not UTF-8; or the `raw` display string of the vocabulary.
        ignore_student_ids: rows that are left empty.
        ignore_teacher_ids: columns that are not used.
        weights: `decay` gives pieces falling weights; `prior` counts pairs on a text that is made
            up of the two vocabularies (`max_pieces` and `reverse_pass` then have no effect).
        target: what `prior` counts, as in `EstimateConfig`.
    """

    top_k: int = 32
    max_pieces: int = 4
    reverse_pass: bool = True
    scale_trick: bool = True
    special_tokens: SpecialTokens = "roles"
    fuzzy_threshold: float = 0.6
    fuzzy_top_k: int = 1
    canonicalization: Canonicalization = "exact"
    token_form: TokenForm = "bytes"
    ignore_student_ids: tuple[int, ...] = ()
    ignore_teacher_ids: tuple[int, ...] = ()
    weights: Weights = "decay"
    target: Target = "start"

    def __post_init__(self) -> None:
        _within(2 if self.scale_trick else 1, top_k=self.top_k)
        _within(1, max_pieces=self.max_pieces)
        _within(1, fuzzy_top_k=self.fuzzy_top_k)
        check_choice(SpecialTokens, special_tokens=self.special_tokens)
        check_choice(Canonicalization, canonicalization=self.canonicalization)
        check_choice(TokenForm, token_form=self.token_form)
        check_choice(Weights, weights=self.weights)
        check_choice(Target, target=self.target)
        if self.target != "start" and self.weights != "prior":
            raise ValueError(
                f"target is {self.target!r}, which goes with the weights 'prior' (--weights prior)"
            )
        if not 0 < self.fuzzy_threshold <= 1:
            raise ValueError(f"fuzzy_threshold is {self.fuzzy_threshold}, and must be in (0, 1]")
        for name in ("ignore_student_ids", "ignore_teacher_ids"):
            if any(i < 0 for i in getattr(self, name)):
                raise ValueError(f"{name} has an id below 0")

    @property
    def options(self) -> dict[str, Any]:
        """What the result depends on, for a map's history: the rest is at its default."""
        used = ["top_k", "max_pieces", "reverse_pass", "scale_trick", "special_tokens"]
        if self.special_tokens == "fuzzy":
            used += ["fuzzy_threshold", "fuzzy_top_k"]
        rare = ("weights", "target", "canonicalization", "token_form")
        for name in (*rare, "ignore_student_ids", "ignore_teacher_ids"):
            if getattr(self, name) != getattr(MultitokenConfig, name):
                used.append(name)
        found = {name: getattr(self, name) for name in used}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


@dataclass(frozen=True, kw_only=True)
class SortCutConfig:
    """How `sort_cut` cuts a map: to `top_k` entries per row, the slot included."""

    top_k: int = 4

    def __post_init__(self) -> None:
        _within(1, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class BuildConfig(MultitokenConfig):
    """How `build` composes the stages: `multitoken`, then `reapply_exact`, then `sort_cut`.

    Attributes:
        top_k: entries per row of the result, the slot included; `multitoken` has its own default.
        exact_match: pin tokens that both sides have to each other.
    """

    top_k: int = SortCutConfig.top_k
    exact_match: bool = True

    @classmethod
    def for_loss(cls, loss: Loss, **options: Any) -> BuildConfig:
        """Return the options that suit a loss; those that are given go before.

        P-KL compares distributions averaged over chunks: rows are probabilities, counted at common
        starts and within chunks, nothing is pinned, 8 entries. Gold and H-KL need tokens that both
        sides have as pairs: these are pinned. None has a scale slot.
        """
        if loss not in get_args(Loss):
            raise ValueError(f"loss is {loss!r}, and must be one of {get_args(Loss)}")
        suits: dict[str, Any] = {"weights": "prior", "scale_trick": False, "top_k": 8}
        if loss == "p-kl" and options.get("weights", "prior") == "prior":
            suits["target"] = "both"
        return cls(**{**suits, "exact_match": loss != "p-kl", **options})

    @property
    def multitoken(self) -> MultitokenConfig:
        """The options of the first stage."""
        shared = {f.name: getattr(self, f.name) for f in fields(MultitokenConfig)}
        return MultitokenConfig(**{**shared, "top_k": MultitokenConfig.top_k})

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
        canonicalization: `relaxed` embeds near-equivalent tokens, such as ` ,` and `,` and the
            forms of a line break, as one text.
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
    canonicalization: Canonicalization = "exact"
    device: str = "cpu"
    dtype: Dtype = "float32"
    chunk_size: int = 8192

    def __post_init__(self) -> None:
        _within(1, top_k=self.top_k)
        _positive(chunk_size=self.chunk_size)
        _positive(temperature=self.temperature, ridge=self.ridge)
        check_choice(Weighting, weighting=self.weighting)
        check_choice(AnchorFit, anchor_fit=self.anchor_fit)
        check_choice(Canonicalization, canonicalization=self.canonicalization)
        check_choice(Dtype, dtype=self.dtype)
        if not 0 <= self.weight_threshold < 1:
            raise ValueError(f"weight_threshold is {self.weight_threshold}, and must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class EstimateConfig:
    """How `estimate` makes a map of counts.

    Attributes:
        top_k: entries per row; ≥ 1.
        target: `start` counts pairs of tokens that begin at one byte; `chunk` every pair of tokens
            within a chunk, each student token's share of it being 1 divided by its tokens; `both`
            adds the two up.
        alpha: the pseudo-count of the base map's row; > 0. None chooses one on documents
            that are held out.
        pin_exact: give tokens that both sides have the one entry 1.0, as gold losses need it.
        field: the field of JSON lines, or column of Parquet, that holds the text.
    """

    top_k: int = 8
    target: Target = "start"
    alpha: float | None = None
    pin_exact: bool = False
    field: str = "text"

    def __post_init__(self) -> None:
        _within(1, top_k=self.top_k)
        check_choice(Target, target=self.target)
        if self.alpha is not None:
            _positive(alpha=self.alpha)


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
            raise ValueError(f"{name} is {number}, and must be above 0 and finite")


def _within(minimum: int, **value: int) -> None:
    for name, number in value.items():
        if not isinstance(number, Integral):
            raise ValueError(f"{name} is {number!r}, and must be an integer")
        if not minimum <= number <= MAX_ENTRIES:
            raise ValueError(
                f"{name} is {number}, and must be at least {minimum}, at most {MAX_ENTRIES}"
            )


def check_choice(choices: Any, **value: str) -> None:
    """Raise a `ValueError` unless the value is one of a `Literal`'s."""
    for name, chosen in value.items():
        if chosen not in get_args(choices):
            raise ValueError(f"{name} is {chosen!r}, and must be one of {get_args(choices)}")
