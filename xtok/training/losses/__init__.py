"""Distillation losses across tokenizers: functions of logits, a map and an alignment.

Alignments hold the chunk ids of the *predicted* tokens: use `xtok.shift_to_predictions`.
"""

from xtok.training.losses.alm import alm
from xtok.training.losses.chunks import count_chunks
from xtok.training.losses.combine import combine
from xtok.training.losses.config import (
    ALMConfig,
    ChunkLossConfig,
    CombineConfig,
    CSDConfig,
    GoldConfig,
    PKLConfig,
    SameTokenizerConfig,
)
from xtok.training.losses.cross_entropy import cross_entropy
from xtok.training.losses.csd import csd
from xtok.training.losses.event_kl import EventIndex, event_index, event_kl
from xtok.training.losses.gold import ExactPairs, exact_pairs, gold
from xtok.training.losses.logits import HiddenLogits
from xtok.training.losses.p_kl import p_kl
from xtok.training.losses.registry import (
    LOSSES,
    BatchLoss,
    LossName,
    count_targets,
    loss_named,
    make_loss,
)
from xtok.training.losses.same_tokenizer import same_tokenizer_kl
from xtok.training.losses.spelling_index import SpellingIndex, spelling_index
from xtok.training.losses.topk_kl import topk_kl

__all__ = [
    "LOSSES",
    "ALMConfig",
    "BatchLoss",
    "CSDConfig",
    "ChunkLossConfig",
    "CombineConfig",
    "EventIndex",
    "ExactPairs",
    "GoldConfig",
    "HiddenLogits",
    "LossName",
    "PKLConfig",
    "SameTokenizerConfig",
    "SpellingIndex",
    "alm",
    "combine",
    "count_chunks",
    "count_targets",
    "cross_entropy",
    "csd",
    "event_index",
    "event_kl",
    "exact_pairs",
    "gold",
    "loss_named",
    "make_loss",
    "p_kl",
    "same_tokenizer_kl",
    "spelling_index",
    "topk_kl",
]
