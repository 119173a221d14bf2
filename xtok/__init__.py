"""Cross-tokenizer projection maps for knowledge distillation, right byte for byte.

>>> import xtok
>>> projection = xtok.build("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B")  # doctest: +SKIP
>>> projection.save("llama_to_qwen.safetensors")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xtok._version import __version__

if TYPE_CHECKING:
    from xtok.aligner import AlignedPair as AlignedPair
    from xtok.aligner import AlignmentBatch as AlignmentBatch
    from xtok.aligner import FlatAlignment as FlatAlignment
    from xtok.aligner import TextAlignment as TextAlignment
    from xtok.aligner import TokenAligner as TokenAligner
    from xtok.aligner import align as align
    from xtok.aligner import shift_to_predictions as shift_to_predictions
    from xtok.classes import TokenClass as TokenClass
    from xtok.classes import token_classes as token_classes
    from xtok.collator import DistillationCollator as DistillationCollator
    from xtok.comparison import Comparison as Comparison
    from xtok.comparison import compare as compare
    from xtok.config import BuildConfig as BuildConfig
    from xtok.config import EstimateConfig as EstimateConfig
    from xtok.config import GenerateConfig as GenerateConfig
    from xtok.config import MergeConfig as MergeConfig
    from xtok.config import MultitokenConfig as MultitokenConfig
    from xtok.config import SortCutConfig as SortCutConfig
    from xtok.conversation import Conversation as Conversation
    from xtok.conversation import collate as collate
    from xtok.conversation import render as render
    from xtok.counting import estimate as estimate
    from xtok.describe import MapDescription as MapDescription
    from xtok.describe import inspect as inspect
    from xtok.diagnosis import Diagnosis as Diagnosis
    from xtok.diagnosis import doctor as doctor
    from xtok.embeddings import generate as generate
    from xtok.errors import EmbeddingError as EmbeddingError
    from xtok.errors import MapFileError as MapFileError
    from xtok.errors import OutputError as OutputError
    from xtok.errors import TokenizerError as TokenizerError
    from xtok.errors import XtokError as XtokError
    from xtok.explanation import Explanation as Explanation
    from xtok.explanation import explain as explain
    from xtok.exports import export as export
    from xtok.mapfile import convert as convert
    from xtok.pair_list import Plan as Plan
    from xtok.pair_list import build_pairs as build_pairs
    from xtok.pair_list import plan as plan
    from xtok.pair_list import read_pairs as read_pairs
    from xtok.pipeline import build as build
    from xtok.projection import ProjectionMap as ProjectionMap
    from xtok.projection import RowKind as RowKind
    from xtok.projection import transpose as transpose
    from xtok.quality import Evaluation as Evaluation
    from xtok.quality import evaluate as evaluate
    from xtok.runtime import Projection as Projection
    from xtok.runtime import project_token_likelihoods as project_token_likelihoods
    from xtok.sharing import Overlap as Overlap
    from xtok.sharing import overlap as overlap
    from xtok.stages import merge as merge
    from xtok.stages import multitoken as multitoken
    from xtok.stages import reapply_exact as reapply_exact
    from xtok.stages import sort_cut as sort_cut
    from xtok.tokenizers import Tokenizer as Tokenizer
    from xtok.tokenizers import from_transformers as from_transformers
    from xtok.tokenizers import load_tokenizer as load_tokenizer
    from xtok.tokens import TokenTable as TokenTable
    from xtok.tokens import TokenType as TokenType
    from xtok.verification import Verification as Verification
    from xtok.verification import verify as verify

_MODULE_OF = {
    "AlignedPair": "aligner",
    "AlignmentBatch": "aligner",
    "FlatAlignment": "aligner",
    "TextAlignment": "aligner",
    "TokenAligner": "aligner",
    "align": "aligner",
    "shift_to_predictions": "aligner",
    "from_transformers": "tokenizers",
    "BuildConfig": "config",
    "Conversation": "conversation",
    "Diagnosis": "diagnosis",
    "DistillationCollator": "collator",
    "EmbeddingError": "errors",
    "EstimateConfig": "config",
    "GenerateConfig": "config",
    "MapDescription": "describe",
    "MapFileError": "errors",
    "MergeConfig": "config",
    "MultitokenConfig": "config",
    "OutputError": "errors",
    "Overlap": "sharing",
    "Projection": "runtime",
    "Plan": "pair_list",
    "ProjectionMap": "projection",
    "RowKind": "projection",
    "SortCutConfig": "config",
    "TokenTable": "tokens",
    "TokenType": "tokens",
    "Tokenizer": "tokenizers",
    "TokenizerError": "errors",
    "XtokError": "errors",
    "TokenClass": "classes",
    "token_classes": "classes",
    "Explanation": "explanation",
    "explain": "explanation",
    "transpose": "projection",
    "Verification": "verification",
    "verify": "verification",
    "build": "pipeline",
    "build_pairs": "pair_list",
    "collate": "conversation",
    "convert": "mapfile",
    "Comparison": "comparison",
    "Evaluation": "quality",
    "compare": "comparison",
    "doctor": "diagnosis",
    "estimate": "counting",
    "evaluate": "quality",
    "export": "exports",
    "generate": "embeddings",
    "inspect": "describe",
    "load_tokenizer": "tokenizers",
    "merge": "stages",
    "multitoken": "stages",
    "overlap": "sharing",
    "project_token_likelihoods": "runtime",
    "plan": "pair_list",
    "read_pairs": "pair_list",
    "reapply_exact": "stages",
    "render": "conversation",
    "sort_cut": "stages",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use, so that `import xtok` costs nothing."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"xtok.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
