"""Public names of xtok.training. `__init__.py` imports each name at its first use."""

from . import audit as audit
from . import losses as losses
from .batches import Batch as Batch
from .batches import SideBatch as SideBatch
from .batches import StoredTopK as StoredTopK
from .collator import DistillationCollator as DistillationCollator
from .collator import prepare as prepare
from .heads import Head as Head
from .heads import find_heads as find_heads
from .module import ProjectionModule as ProjectionModule
from .objective import LossTerms as LossTerms
from .objective import Objective as Objective
from .objective import make_objective as make_objective
from .rows import IGNORED as IGNORED
from .running import logits_of as logits_of
from .running import router_loss as router_loss
from .running import run as run
from .topk_collator import TopKCollator as TopKCollator
from .topk_collator import pad_candidates as pad_candidates
from .trainers.nemo_rl import NemoTokenAligner as NemoTokenAligner
from .trainers.transformers import XTokTrainer as XTokTrainer
from .trainers.trl import GOLDConfig as GOLDConfig
from .trainers.trl import XTokGOLDTrainer as XTokGOLDTrainer

__all__: list[str]
