"""Distillation losses across tokenizers: functions of logits, a map and an alignment.

Losses require a shifted alignment: `xtok.shift_to_predictions(alignment)`. A shifted alignment
stores the chunk id of a token at the position that *predicts* the token.
"""

from xtok.loss_names import LossName as LossName
from xtok.training.losses.alm import alm as alm
from xtok.training.losses.chunks import count_chunks as count_chunks
from xtok.training.losses.config import ALMConfig as ALMConfig
from xtok.training.losses.config import ChunkLossConfig as ChunkLossConfig
from xtok.training.losses.config import CombineConfig as CombineConfig
from xtok.training.losses.config import CSDConfig as CSDConfig
from xtok.training.losses.config import GoldConfig as GoldConfig
from xtok.training.losses.config import PKLConfig as PKLConfig
from xtok.training.losses.config import SameTokenizerConfig as SameTokenizerConfig
from xtok.training.losses.cross_entropy import combine as combine
from xtok.training.losses.cross_entropy import cross_entropy as cross_entropy
from xtok.training.losses.csd import csd as csd
from xtok.training.losses.event_kl import EventIndex as EventIndex
from xtok.training.losses.event_kl import event_index as event_index
from xtok.training.losses.event_kl import event_kl as event_kl
from xtok.training.losses.event_kl import same_tokenizer_kl as same_tokenizer_kl
from xtok.training.losses.gold import ExactPairs as ExactPairs
from xtok.training.losses.gold import exact_pairs as exact_pairs
from xtok.training.losses.gold import gold as gold
from xtok.training.losses.logits import HiddenLogits as HiddenLogits
from xtok.training.losses.p_kl import p_kl as p_kl
from xtok.training.losses.registry import LOSSES as LOSSES
from xtok.training.losses.registry import BatchLoss as BatchLoss
from xtok.training.losses.registry import CustomLoss as CustomLoss
from xtok.training.losses.registry import loss_spec as loss_spec
from xtok.training.losses.registry import make_loss as make_loss
from xtok.training.losses.spelling_index import SpellingIndex as SpellingIndex
from xtok.training.losses.spelling_index import spelling_index as spelling_index
from xtok.training.losses.topk_kl import topk_kl as topk_kl
