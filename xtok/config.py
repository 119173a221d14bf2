"""Options that Python and the command line share: name, type, default, range and help."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from xtok._lib.fields import COMPUTING, LIMITS, MAIN, MATCHING, MODELS, RARE, Config, option
from xtok.loss_names import BuildLoss, loss_name

SpecialTokens: TypeAlias = Literal["roles", "fuzzy", "off"]
Canonicalization: TypeAlias = Literal["exact", "relaxed"]
TokenForm: TypeAlias = Literal["bytes", "text", "raw"]
Transform: TypeAlias = Literal["power", "softmax"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Weights: TypeAlias = Literal["decay", "synthetic"]
Target: TypeAlias = Literal["start", "chunk", "both"]
CacheKind: TypeAlias = Literal["neutral", "vllm", "sglang", "distillkit"]
CacheFormat: TypeAlias = Literal["neutral", "axolotl", "distillkit", "vllm"]

MAX_ENTRIES = 4096
"""Upper limit for entries or pieces per row."""

MAX_COMB_LEN = 64
"""Upper limit for `max_comb_len`: the time for differing text grows with its square."""

DEFAULT_TIMEOUT = 600.0
"""Default number of seconds to wait for another process that builds the same map."""

DEFAULT_SHRINK = 0.2
"""Share of the mean row in the composed rows of `transplant`.

Without the mean row, a model predicts composed tokens too often. With Llama 3's tokenizer, SmolLM2
135M needs 2.00 bits per byte without the mean row, and 1.92 with the mean row
(`transplant_study.py`).
"""

DEFAULT_CANDIDATES = 64
"""Number of candidates per token that `serve` requests from the teacher's server."""

MIN_CANDIDATES = 20
"""Minimum number of candidates per token, for scores inside chunks. Also vLLM's default limit."""


def top_k_option(default: int, help: str) -> Any:
    """Declare a field `top_k`."""
    return option(default, help, short="-k", min=1, max=MAX_ENTRIES, panel=MAIN)


@dataclass(frozen=True, kw_only=True)
class MultitokenConfig(Config):
    """Options of `multitoken`."""

    # Options that a map's history contains only with values other than the defaults
    rarely_recorded = (
        "canonicalization", "token_form", "ignore_student_ids", "ignore_teacher_ids"
    )  # fmt: skip
    top_k: int = top_k_option(32, "Maximum entries per row, including the scale slot.")
    max_pieces: int = option(
        4, "Maximum number of tokens that spell a token of the other side.",
        no_effect_with={"text": True, "weights": "synthetic"}, min=1, max=MAX_ENTRIES, panel=RARE,
    )  # fmt: skip
    scale_trick: bool = option(
        True,
        "Add a scale slot with a sixth of the weight to each row that is not exact.",
        no_effect_with={"text": True},
    )
    reverse_pass: bool = option(
        True,
        "Also spell the teacher's tokens with student tokens.",
        no_effect_with={"text": True, "weights": "synthetic"},
    )
    special_tokens: SpecialTokens = option(
        "roles",
        "Pair special tokens by role or by similar names, or leave their rows empty.",
        panel=MATCHING,
    )
    fuzzy_threshold: float = option(
        0.6, "Minimum similarity of names for --special-tokens fuzzy.",
        above=0, max=1, needs={"special_tokens": "fuzzy"}, panel=RARE,
    )  # fmt: skip
    canonicalization: Canonicalization = option(
        "exact",
        "With exact, only tokens with equal bytes match. With relaxed, a token without such a "
        "match can match a variant: ' ,' matches ',', and all forms of line breaks match.",
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
                    f"{name} is 1, expected at least 2, because one entry is the scale slot "
                    "(scale_trick)"
                )

    @property
    def ignored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Student ids and teacher ids to ignore."""
        return self.ignore_student_ids, self.ignore_teacher_ids

    @property
    def options(self) -> dict[str, Any]:
        """Options for a map's history. Default values of rare options are omitted."""
        names = ["top_k", "max_pieces", "reverse_pass", "scale_trick", "special_tokens"]
        names += ["fuzzy_threshold"] if self.special_tokens == "fuzzy" else []
        names += [
            n for n in self.rarely_recorded if getattr(self, n) != getattr(MultitokenConfig, n)
        ]
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
        "Maximum entries per row before the last stage keeps --top-k entries.",
        min=1, max=MAX_ENTRIES, panel=RARE,
    )  # fmt: skip
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
        """Return the defaults for a loss; explicit options override the defaults.

        Maps for P-KL contain probabilities that are counted at shared token boundaries and within
        chunks, and have no exact rows. Gold and H-KL require exact rows. All presets use 8 entries
        per row and no scale slots.
        """
        loss = loss_name(loss)
        suits: dict[str, Any] = {"weights": "synthetic", "scale_trick": False, "top_k": 8}
        if loss == "p-kl" and options.get("weights", "synthetic") == "synthetic":
            suits["target"] = "both"
        return cls(**{**suits, "exact_match": loss != "p-kl", **options})

    def for_text(self) -> BuildConfig:
        """Return the options for a map counted on text, which has no slots."""
        return replace(self, weights="synthetic", scale_trick=False)

    @property
    def counting(self) -> dict[str, Any]:
        """Options of a map counted on synthetic text, for its history."""
        no_effect = ("max_pieces", "reverse_pass", *([] if self.scale_trick else ["scale_trick"]))
        of_stage = {k: v for k, v in self.multitoken.options.items() if k not in no_effect}
        return {"text": "synthetic", "target": self.target, **of_stage}

    @property
    def multitoken(self) -> MultitokenConfig:
        """Options of the stage `multitoken`, which also apply to counted maps."""
        shared = {f.name: getattr(self, f.name) for f in fields(MultitokenConfig)}
        return MultitokenConfig(**{**shared, "top_k": self.prep_top_k})


BACK_MAP = BuildConfig.for_loss("p-kl", target="start", top_k=32)
"""Options of the map from teacher to student that `project` and `serve` use."""


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
        False, "Count rows and teacher tokens by class: digits, punctuation, scripts …",
        flag=True, panel="Options",
    )  # fmt: skip
    worst: int | None = option(
        None,
        "List this number of rows, starting with the lowest maximum weight. Default for a class "
        "or kind: 20.",
        min=1,
    )
    token_class: str | None = option(
        None, "List only rows of this class of tokens: digits, han, punctuation, …",
        name="class", metavar="CLASS",
    )  # fmt: skip
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
        "Minimum share of an entry in its row's total weight. Smaller entries are dropped. With "
        "the method spelling, the total covers only the --top-k entries.",
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
        "With relaxed, near-equivalent texts count as equal, for example ' ,' and ',' or "
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

    student_template: str | None = option(
        None,
        "Chat template to use instead of the student's own: a Jinja file, or the name of a format.",
        name="student_chat_template", metavar="FILE|NAME", panel=MODELS, needs={"chat": True},
    )  # fmt: skip
    teacher_template: str | None = option(
        None, "Chat template to use instead of the teacher's own.",
        name="teacher_chat_template", metavar="FILE|NAME", panel=MODELS, needs={"chat": True},
    )  # fmt: skip

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
        "Output format: neutral (Parquet), axolotl or distillkit (the trainer's columns), or "
        "vllm (responses in vLLM's format, as JSON lines).",
        metavar="FORMAT",
    )
    source: CacheKind | None = option(
        None, "Input format, if it cannot be detected: neutral, vllm, sglang or distillkit.",
        name="from", metavar="FORMAT", panel=RARE,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ChatTemplates):
    """Options of `serve`."""

    panel = MAIN
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option(8100, "Port to listen on; 0 picks a free one.", min=0, max=65535)
    candidates: int | None = option(
        None,
        f"Candidates per token to request from the teacher. Default: {DEFAULT_CANDIDATES}, or the "
        "maximum of the teacher's server. If a client asks for more, xtok requests more.",
        short="-k", min=MIN_CANDIDATES, max=MAX_ENTRIES, panel=LIMITS,
    )  # fmt: skip
    chat: bool = option(
        True,
        "If a conversation can be recovered from the ids with certainty, the teacher reads the "
        "conversation in its own chat template. Otherwise, the teacher reads the text of all ids.",
    )
    teacher_system: str | None = option(
        None,
        "System text that only the teacher reads. The text replaces a conversation's system text "
        "and precedes other texts. The field teacher_system of a request overrides the text.",
    )
    concurrency: int = option(
        64, "Maximum number of concurrent sequences on the teacher's server.", min=1, panel=LIMITS
    )
    wait: float = option(
        600.0, "Seconds to wait at startup until the teacher's server responds.",
        min=0, panel=LIMITS,
    )  # fmt: skip
    api_key: str | None = option(
        None,
        "Bearer token that clients must send. Set XTOK_API_KEY instead to keep the token off the "
        "command line.",
        panel=LIMITS,
    )
    teacher_api_key: str | None = option(
        None,
        "Bearer token for the teacher's server. Set XTOK_TEACHER_API_KEY instead to keep the "
        "token off the command line.",
        panel=LIMITS,
    )
