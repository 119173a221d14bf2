"""Cross-tokenizer projection maps for knowledge distillation, byte-exact.

>>> import xtok
>>> projection = xtok.build("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B")  # doctest: +SKIP
>>> projection.save("llama_to_qwen.safetensors")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xtok.alignment.aligner import TokenAligner as TokenAligner
    from xtok.alignment.aligner import shift_to_predictions as shift_to_predictions
    from xtok.alignment.logprobs import project_logprobs as project_logprobs
    from xtok.alignment.retokenize import Retokenizer as Retokenizer
    from xtok.alignment.text import align as align
    from xtok.config import BuildConfig as BuildConfig
    from xtok.config import GenerateConfig as GenerateConfig
    from xtok.config import MultitokenConfig as MultitokenConfig
    from xtok.config import ProjectConfig as ProjectConfig
    from xtok.config import ServeConfig as ServeConfig
    from xtok.config import SortCutConfig as SortCutConfig
    from xtok.conversation import render as render
    from xtok.embeddings.generate import generate as generate
    from xtok.errors import XtokError as XtokError
    from xtok.inspection.compare import compare as compare
    from xtok.inspection.describe import describe as describe
    from xtok.inspection.doctor import doctor as doctor
    from xtok.inspection.evaluate import evaluate as evaluate
    from xtok.inspection.explain import explain as explain
    from xtok.inspection.verify import verify as verify
    from xtok.maps.convert import convert as convert
    from xtok.maps.events import EventMap as EventMap
    from xtok.maps.projection_map import ProjectionMap as ProjectionMap
    from xtok.maps.spellings import SpellingMap as SpellingMap
    from xtok.pairs import Pair as Pair
    from xtok.projecting.files import project as project
    from xtok.serving import serve as serve
    from xtok.stages.build import build as build
    from xtok.stages.build import get_map as get_map
    from xtok.stages.events import events as events
    from xtok.stages.exact import reapply_exact as reapply_exact
    from xtok.stages.multitoken import multitoken as multitoken
    from xtok.stages.sort_cut import sort_cut as sort_cut
    from xtok.tokenizers import Tokenizer as Tokenizer
    from xtok.tokenizers import load_tokenizer as load_tokenizer
    from xtok.tokenizers import pair as pair
    from xtok.training.collator import DistillationCollator as DistillationCollator
    from xtok.training.module import ProjectionModule as ProjectionModule

# What `__getattr__` imports: the imports above again, which only type checkers read.
_MODULE_OF = {
    "TokenAligner": "xtok.alignment.aligner",
    "shift_to_predictions": "xtok.alignment.aligner",
    "project_logprobs": "xtok.alignment.logprobs",
    "Retokenizer": "xtok.alignment.retokenize",
    "align": "xtok.alignment.text",
    "BuildConfig": "xtok.config",
    "GenerateConfig": "xtok.config",
    "MultitokenConfig": "xtok.config",
    "ProjectConfig": "xtok.config",
    "ServeConfig": "xtok.config",
    "SortCutConfig": "xtok.config",
    "render": "xtok.conversation",
    "generate": "xtok.embeddings.generate",
    "XtokError": "xtok.errors",
    "compare": "xtok.inspection.compare",
    "describe": "xtok.inspection.describe",
    "doctor": "xtok.inspection.doctor",
    "evaluate": "xtok.inspection.evaluate",
    "explain": "xtok.inspection.explain",
    "verify": "xtok.inspection.verify",
    "pair": "xtok.tokenizers",
    "convert": "xtok.maps.convert",
    "EventMap": "xtok.maps.events",
    "ProjectionMap": "xtok.maps.projection_map",
    "SpellingMap": "xtok.maps.spellings",
    "Pair": "xtok.pairs",
    "project": "xtok.projecting.files",
    "serve": "xtok.serving",
    "build": "xtok.stages.build",
    "get_map": "xtok.stages.build",
    "events": "xtok.stages.events",
    "reapply_exact": "xtok.stages.exact",
    "multitoken": "xtok.stages.multitoken",
    "sort_cut": "xtok.stages.sort_cut",
    "Tokenizer": "xtok.tokenizers",
    "load_tokenizer": "xtok.tokenizers",
    "DistillationCollator": "xtok.training.collator",
    "ProjectionModule": "xtok.training.module",
}

# What works after `import xtok` besides: the rooms, and two modules under a short name.
_ROOMS = (
    *("alignment", "config", "conversation", "counting", "embeddings", "errors", "files"),
    *("inspection", "integrations", "maps", "predictions", "projecting", "serving", "stages"),
    *("tokenizers", "training", "vocab"),
)
_SUBMODULES = {
    "chats": "xtok.alignment.chats",
    "losses": "xtok.training.losses",
    **{room: f"xtok.{room}" for room in _ROOMS},
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use, so that `import xtok` costs nothing."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(_SUBMODULES[name])
    else:
        hint = ": xtok.ProjectionMap.load reads a map" if name in ("load_map", "load") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
