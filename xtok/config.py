"""Options that Python and the command line share: name, type, default, range and help."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args, get_origin, get_type_hints

from xtok._lib.lines import read_text

SpecialTokens: TypeAlias = Literal["roles", "fuzzy", "off"]
Canonicalization: TypeAlias = Literal["exact", "relaxed"]
TokenForm: TypeAlias = Literal["bytes", "text", "raw"]
Transform: TypeAlias = Literal["power", "softmax"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Weights: TypeAlias = Literal["decay", "synthetic"]
Target: TypeAlias = Literal["start", "chunk", "both"]
BuildLoss: TypeAlias = Literal["p-kl", "gold", "h-kl"]  # losses with maps that `build` creates
EventLoss: TypeAlias = Literal["event-kl", "csd"]  # losses with event maps and spelling maps
LossName: TypeAlias = Literal[BuildLoss, EventLoss, "alm", "same-tokenizer", "topk-kl"]
MapKind: TypeAlias = Literal["map", "events", "spellings"]  # kind of map in a file
CacheKind: TypeAlias = Literal["neutral", "vllm", "sglang", "distillkit"]
CacheFormat: TypeAlias = Literal["neutral", "axolotl", "distillkit", "vllm"]

MAX_ENTRIES = 4096
"""Upper limit for entries or pieces per row."""

MAX_COMB_LEN = 64
"""Upper limit for `max_comb_len`. The time for differing text grows with its square."""

FIRST_PIECE_WEIGHT = 0.9
"""Weight of a token's first piece. Each further weight is multiplied by `PIECE_DECAY`."""

PIECE_DECAY = 0.1

POWER_OF_LARGEST = 10.0
"""The exponent of a cosine is this number times the largest |cosine| in its row (NeMo-RL,
`minimal_projection_generator.py`)."""

MAIN = "Options"
"""First panel of the help."""

WAIT = 600.0
"""Default number of seconds to wait for another process that builds the same map."""

MODELS = "Models"
MAKING = "Making the map"
MATCHING = "Which tokens match"
COMPUTING = "Computing"
TEXT = "Text"
LIMITS = "Limits and keys"
OUTPUT = "Output"

RARE = "Rarely needed"
"""Last panel of the help."""


@dataclass(frozen=True, kw_only=True)
class OptionDetails:
    """Details of an option, in addition to its name, type and default."""

    help: str
    name: str | None = None  # name on the command line, if it differs from the parameter's name
    short: str | None = None  # such as -k
    argument: str | None = None  # name in the help of a positional argument
    flag: bool = False  # flag without a --no- form
    hidden: bool = False  # omitted from the help
    metavar: str | None = None
    panel: str | None = None  # panel of the help
    min: float | None = None  # minimum and maximum, inclusive
    max: float | None = None
    above: float | None = None  # limits, exclusive
    below: float | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Other options with values (True: any value). This option requires at least one of them."""
    no_effect_with: Mapping[str, Any] = field(default_factory=dict)
    parser: Callable[[str], Any] | None = None
    autocompletion: Callable[[str], list[str]] | None = None  # default: choices or files


SHRINK = 0.2
"""Share of the mean row in the composed rows of `transplant`. A model predicts composed rows too
often, and the mean row rarely. With Llama 3's tokenizer, SmolLM2 135M has 2.00 bits per byte
without the mean row, and 1.92 with it (`transplant_study.py`).
"""


def option(default: Any, help: str, **details: Any) -> Any:
    """Declare a field of a config, or a parameter of a command; the default `...` means required.

    Call this function or `top_k_option` directly in each config, because the API reference parses
    these calls.
    """
    return field(default=default, metadata={"details": OptionDetails(help=help, **details)})


def top_k_option(default: int, help: str) -> Any:
    """Declare a field `top_k`."""
    return option(default, help, short="-k", min=1, max=MAX_ENTRIES, panel=MAIN)


_types = functools.cache(get_type_hints)


class Config:
    """Base class of all configs. Validates each value against its field."""

    panel = MAKING  # default panel in the help

    @classmethod
    def or_default(cls, config: Self | None) -> Self:
        """Return the config; for None, return the defaults.

        Raises:
            TypeError: if the config has another type.
        """
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config is {config!r}, and must be a {cls.__name__}")
        return cls() if config is None else config

    def __post_init__(self) -> None:
        """Validate all fields, and convert numbers of NumPy.

        Raises:
            ValueError: if a value is invalid or out of range.
        """
        types = _types(type(self))  # type: ignore[arg-type]  # classes are hashable
        for f in fields(self):  # type: ignore[arg-type]  # every config is a dataclass
            value, details = getattr(self, f.name), f.metadata["details"]
            vars(self)[f.name] = checked_value(f.name, value, types[f.name], details)


def checked_value(name: str, value: Any, kind: Any, details: OptionDetails) -> Any:
    """Validate the value of an option, and return it; a number becomes an `int` or `float`.

    Raises:
        ValueError: if the value is invalid or out of range.
    """
    if value is None and NoneType in get_args(kind):
        return value
    kind = without_none(kind)
    base = get_origin(kind) or kind
    if base is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} is {value!r}, and must be one of {get_args(kind)}")
        return value
    accepted, description = _KINDS.get(base, (object, ""))
    if not isinstance(value, accepted) or (isinstance(value, bool) and base in (int, float)):
        raise ValueError(f"{name} is {value!r}, and must be {description}")
    if base is tuple:
        return tuple(
            checked_value(f"{name}, number {number},", item, get_args(kind)[0], details)
            for number, item in enumerate(value, start=1)
        )
    if base in (int, float):
        _check_range(name, value, details)
        return base(value)
    return value


def _check_range(name: str, value: float, details: OptionDetails) -> None:
    ends = {key: end for key in _ENDS if (end := getattr(details, key)) is not None}
    if isfinite(value) and all(_ENDS[key][1](value, end) for key, end in ends.items()):
        return
    words = [f"{_ENDS[key][0]} {end}" for key, end in ends.items()]
    expected = ", ".join(words) if len(words) > 1 else " and ".join([*words, "finite"])
    raise ValueError(f"{name} is {value}, and must be {expected}")


def without_none(kind: Any) -> Any:
    """Return the type `T` of `T | None`. Other types are returned unchanged."""
    kinds = [k for k in get_args(kind) if k is not NoneType]
    return kinds[0] if NoneType in get_args(kind) else kind


_KINDS: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
    tuple: (tuple, "a tuple"),
}

_ENDS = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def with_hyphens(loss: Any) -> Any:
    """Return `p-kl` for `p_kl`. Other types are returned unchanged."""
    return loss.replace("_", "-") if isinstance(loss, str) else loss


MAP_NAMES = {"map": "a projection map", "events": "an event map", "spellings": "a spelling map"}


class LossInfo(NamedTuple):
    """Facts about a loss, for messages."""

    label: str
    map: MapKind | None  # kind of map that the loss requires
    hint: str  # command that creates the input of the loss


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
        raise ValueError(f"{name} does not use a projection map: build its map with {make}")
    raise ValueError(f"loss is {loss!r}, and must be one of {get_args(choices)}")


@dataclass(frozen=True, kw_only=True)
class MultitokenConfig(Config):
    """Options of `multitoken`."""

    top_k: int = top_k_option(32, "Maximum entries per row, including the scale slot.")
    max_pieces: int = option(
        4,
        "Maximum number of pieces per token on the other side.",
        no_effect_with={"text": True, "weights": "synthetic"},
        min=1,
        max=MAX_ENTRIES,
        panel=RARE,
    )
    scale_trick: bool = option(
        True,
        "Add a scale slot with a sixth of the weight to each row that is not exact.",
        no_effect_with={"text": True},
    )
    reverse_pass: bool = option(
        True,
        "Also spell the teacher's tokens in the student's tokens.",
        no_effect_with={"text": True, "weights": "synthetic"},
    )
    special_tokens: SpecialTokens = option(
        "roles",
        "Pair special tokens by role or by similar names, or leave their rows empty.",
        panel=MATCHING,
    )
    fuzzy_threshold: float = option(
        0.6,
        "Minimum similarity of names for --special-tokens fuzzy.",
        above=0,
        max=1,
        needs={"special_tokens": "fuzzy"},
        panel=RARE,
    )
    canonicalization: Canonicalization = option(
        "exact",
        "exact matches only tokens with equal bytes. If no token has equal bytes, relaxed also "
        "pairs ' ,' with ',' and different forms of line breaks.",
        panel=MATCHING,
    )
    token_form: TokenForm = option(
        "bytes",
        "Compare tokens by their bytes, by their decoded text, or by the vocabulary's display "
        "strings.",
        panel=MATCHING,
    )
    ignore_student_ids: tuple[int, ...] = option(
        (), "Leave the rows of these ids empty.", min=0, metavar="ID,ID…", panel=RARE
    )
    ignore_teacher_ids: tuple[int, ...] = option(
        (), "Omit the columns of these ids.", min=0, metavar="ID,ID…", panel=RARE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("top_k", "prep_top_k"):
            if self.scale_trick and getattr(self, name, 2) < 2:
                raise ValueError(
                    f"{name} is 1, and must be at least 2, because one entry is the scale slot "
                    "(scale_trick)"
                )

    @property
    def ignored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Student ids and teacher ids to ignore."""
        return self.ignore_student_ids, self.ignore_teacher_ids

    @property
    def options(self) -> dict[str, Any]:
        """Options that affect the result, for a map's history, without unchanged rare options."""
        names = ["top_k", "max_pieces", "reverse_pass", "scale_trick", "special_tokens"]
        names += ["fuzzy_threshold"] if self.special_tokens == "fuzzy" else []
        rare = ("canonicalization", "token_form", "ignore_student_ids", "ignore_teacher_ids")
        names += [n for n in rare if getattr(self, n) != getattr(MultitokenConfig, n)]
        values = {name: getattr(self, name) for name in names}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


@dataclass(frozen=True, kw_only=True)
class SortCutConfig(Config):
    """Options of `sort_cut`."""

    top_k: int = top_k_option(4, "Maximum entries per row, including the scale slot.")


@dataclass(frozen=True, kw_only=True)
class BuildConfig(MultitokenConfig):
    """Options of `build`.

    `top_k` applies to the result, and `prep_top_k` to the stage `multitoken`.
    """

    top_k: int = top_k_option(
        SortCutConfig.top_k,
        "Maximum entries per row, including the scale slot. Default with --for: 8.",
    )
    prep_top_k: int = option(
        MultitokenConfig.top_k,
        "Maximum entries per row before the last stage keeps --top-k of them.",
        min=1,
        max=MAX_ENTRIES,
        panel=RARE,
    )
    weights: Weights = option(
        "decay",
        "Weights of a row: fixed weights that decrease from piece to piece, or counts on synthetic "
        "text generated from the two vocabularies.",
        no_effect_with={"text": True},
    )
    target: Target = option(
        "start",
        "Pairs of tokens to count: start (pairs that begin at the same byte), chunk (all pairs "
        "within a chunk), or both.",
        metavar="TARGET",
        needs={"weights": "synthetic", "text": True},
    )
    exact_match: bool = option(True, "Give each shared token a single entry with weight 1.")

    @classmethod
    def for_loss(cls, loss: BuildLoss, **options: Any) -> BuildConfig:
        """Return the defaults for a loss; explicit options override them.

        P-KL averages distributions over chunks. A map for P-KL contains probabilities, counted at
        shared token boundaries and within chunks, and has no exact rows. Gold and H-KL require
        exact rows. All presets use 8 entries per row and no scale slots.
        """
        loss = loss_name(loss)
        suits: dict[str, Any] = {"weights": "synthetic", "scale_trick": False, "top_k": 8}
        if loss == "p-kl" and options.get("weights", "synthetic") == "synthetic":
            suits["target"] = "both"
        return cls(**{**suits, "exact_match": loss != "p-kl", **options})

    def for_text(self) -> BuildConfig:
        """Return the options for a map that is counted on text. Such a map has no slots."""
        return replace(self, weights="synthetic", scale_trick=False)

    @property
    def counting(self) -> dict[str, Any]:
        """Return the options that affect a map counted on synthetic text, for its history."""
        no_effect = ("max_pieces", "reverse_pass", *([] if self.scale_trick else ["scale_trick"]))
        of_stage = {k: v for k, v in self.multitoken.options.items() if k not in no_effect}
        return {"text": "synthetic", "target": self.target, **of_stage}

    @property
    def multitoken(self) -> MultitokenConfig:
        """Return the options of `multitoken`; counted maps use the same options to match tokens."""
        shared = {f.name: getattr(self, f.name) for f in fields(MultitokenConfig)}
        return MultitokenConfig(**{**shared, "top_k": self.prep_top_k})


BACK_MAP = BuildConfig.for_loss("p-kl", target="start", top_k=32)
"""Options of the map from the teacher to the student that `project` and `serve` use."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Config):
    """Options of `inspect`: the part of a map to show. Default: an overview."""

    panel = "List rows, worst first"
    num_examples: int | None = option(
        None,
        "Number of example rows. Default: 5 evenly spread rows; for a comparison, the 10 rows that "
        "differ most.",
        min=0,
        panel="Options",
    )
    classes: bool = option(
        False,
        "Count rows and teacher tokens by class: digits, punctuation, scripts …",
        flag=True,
        panel="Options",
    )
    worst: int | None = option(
        None,
        "List this number of rows, starting with the lowest maximum weight. Default for a class "
        "or kind: 20.",
        min=1,
    )
    token_class: str | None = option(
        None,
        "List only rows of this class of tokens: digits, han, punctuation, …",
        name="class",
        metavar="CLASS",
    )
    kind: str | None = option(
        None, "List only rows of this kind: pieces, exact, empty, …", metavar="KIND"
    )

    @property
    def is_list(self) -> bool:
        """Whether to list rows, worst first."""
        return bool(self.worst or self.token_class or self.kind)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Config):
    """Options of `generate`."""

    top_k: int = top_k_option(10, "Maximum entries per row.")
    weight_threshold: float = option(
        0.0,
        "Drop entries with a smaller share of their row. With spelling, the row consists of its "
        "--top-k entries.",
        min=0,
        below=1,
    )
    transform: Transform = option(
        "power",
        "Weights from cosines: power (|cosine| to the power of 10 · the largest cosine of the "
        "row) or softmax (of cosine / temperature).",
        panel=RARE,
    )
    temperature: float = option(0.05, "Temperature of the softmax.", above=0, panel=RARE)
    canonicalization: Canonicalization = option(
        "exact",
        "relaxed treats near-equivalent tokens as the same text, for example ' ,' and ',' or "
        "different forms of line breaks.",
    )
    device: str = option("cpu", "Device: cpu, cuda or cuda:N.", panel=COMPUTING)
    dtype: Dtype = option(
        "float32",
        "Precision of a sentence model and of embeddings: float32, bfloat16 or float16. Sums are "
        "float32.",
        metavar="DTYPE",
        panel=COMPUTING,
    )


@dataclass(frozen=True, kw_only=True)
class ChatTemplates(Config):
    """Chat templates to use instead of the models' own."""

    panel = MODELS
    student_template: str | None = option(
        None,
        "Chat template to use instead of the student's own: a Jinja file, or the name of a format.",
        name="student_chat_template",
        metavar="FILE|NAME",
        panel=MODELS,
        needs={"chat": True},
    )
    teacher_template: str | None = option(
        None,
        "Chat template to use instead of the teacher's own.",
        name="teacher_chat_template",
        metavar="FILE|NAME",
        panel=MODELS,
        needs={"chat": True},
    )

    @property
    def templates(self) -> tuple[str | None, str | None]:
        """The templates of the student and the teacher."""
        return self.student_template, self.teacher_template


@dataclass(frozen=True, kw_only=True)
class ProjectConfig(ChatTemplates):
    """Options of `project`."""

    panel = MAIN
    top_k: int = top_k_option(64, "Maximum number of candidates per token.")
    to: CacheFormat = option(
        "neutral",
        "Output format: neutral (Parquet), axolotl or distillkit (the columns that they read), or "
        "vllm (responses in vLLM's format, as JSON lines).",
        metavar="FORMAT",
    )
    source: CacheKind | None = option(
        None,
        "Input format, if it cannot be detected: neutral, vllm, sglang or distillkit.",
        name="from",
        metavar="FORMAT",
        panel=RARE,
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ChatTemplates):
    """Options of `serve`."""

    panel = MAIN
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option(8100, "Port to listen on; 0 picks a free one.", min=0, max=65535)
    candidates: int | None = option(
        None,
        "Candidates per token to request from the teacher. Default: 64, or the maximum of its "
        "server. If a request asks for more, more are requested.",
        short="-k",
        min=20,
        max=MAX_ENTRIES,
        panel=LIMITS,
    )
    chat: bool = option(
        True,
        "If a conversation can be recovered from the ids with certainty, send it to the teacher in "
        "the teacher's own chat template. Otherwise, send everything as text.",
    )
    teacher_system: str | None = option(
        None,
        "File with a system text that only the teacher reads. It replaces the system text of "
        "conversations and precedes other sequences. A request can override it with its field "
        "teacher_system.",
        metavar="FILE",
        parser=lambda path: read_text(Path(path).expanduser(), "the system text").strip(),
    )
    concurrency: int = option(
        64, "Maximum number of concurrent sequences on the teacher's server.", min=1, panel=LIMITS
    )
    wait: float = option(
        600.0,
        "Seconds to wait at startup until the teacher's server responds.",
        min=0,
        panel=LIMITS,
    )
    api_key: str | None = option(
        None,
        "Bearer token that clients must send. Set XTOK_API_KEY instead to keep it off the "
        "command line.",
        panel=LIMITS,
    )
    teacher_api_key: str | None = option(
        None,
        "Bearer token for the teacher's server. Set XTOK_TEACHER_API_KEY instead to keep it "
        "off the command line.",
        panel=LIMITS,
    )
