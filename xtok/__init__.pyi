"""What `import xtok` offers: `__init__.py` imports each name when it is first asked for."""

from . import alignment as alignment
from . import building as building
from . import cli as cli
from . import config as config
from . import conversation as conversation
from . import errors as errors
from . import inspection as inspection
from . import maps as maps
from . import teachers as teachers
from . import tokenizers as tokenizers
from . import training as training
from .alignment.aligner import TokenAligner as TokenAligner
from .alignment.aligner import shift_to_predictions as shift_to_predictions
from .alignment.retokenize import Retokenizer as Retokenizer
from .alignment.text import align as align
from .building.build import build as build
from .building.build import get_map as get_map
from .building.counting.texts import read_samples as read_samples
from .building.embeddings.generate import generate as generate
from .building.events import events as events
from .building.exact import reapply_exact as reapply_exact
from .building.multitoken import multitoken as multitoken
from .building.sort_cut import sort_cut as sort_cut
from .config import BuildConfig as BuildConfig
from .config import GenerateConfig as GenerateConfig
from .config import MultitokenConfig as MultitokenConfig
from .config import ProjectConfig as ProjectConfig
from .config import ServeConfig as ServeConfig
from .config import SortCutConfig as SortCutConfig
from .conversation import render as render
from .errors import XtokError as XtokError
from .inspection.compare import compare as compare
from .inspection.describe import describe as describe
from .inspection.doctor import doctor as doctor
from .inspection.evaluate import evaluate as evaluate
from .inspection.explain import explain as explain
from .inspection.verify import verify as verify
from .inspection.vocab import vocab as vocab
from .maps.convert import convert as convert
from .maps.events import EventMap as EventMap
from .maps.projection_map import ProjectionMap as ProjectionMap
from .maps.spellings import SpellingMap as SpellingMap
from .predictions.topk import TopK as TopK
from .teachers.logprobs import project_logprobs as project_logprobs
from .teachers.project import project as project
from .teachers.serving import serve as serve
from .tokenizers import Tokenizer as Tokenizer
from .tokenizers import load_tokenizer as load_tokenizer
from .tokenizers import pair as pair
from .tokenizers.pairs import Pair as Pair
from .training import losses as losses
from .training.collator import DistillationCollator as DistillationCollator
from .training.module import ProjectionModule as ProjectionModule

__version__: str
__all__: list[str]
