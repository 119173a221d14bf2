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
    from xtok.config import BuildConfig as BuildConfig
    from xtok.config import GenerateConfig as GenerateConfig
    from xtok.config import MergeConfig as MergeConfig
    from xtok.config import MultitokenConfig as MultitokenConfig
    from xtok.config import SortCutConfig as SortCutConfig
    from xtok.conversation import Conversation as Conversation
    from xtok.conversation import collate as collate
    from xtok.conversation import render as render
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
    from xtok.mapfile import convert as convert
    from xtok.pairs import Plan as Plan
    from xtok.pairs import build_pairs as build_pairs
    from xtok.pairs import plan as plan
    from xtok.pairs import read_pairs as read_pairs
    from xtok.pipeline import build as build
    from xtok.projection import ProjectionMap as ProjectionMap
    from xtok.projection import RowKind as RowKind
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
    "EmbeddingError": "errors",
    "GenerateConfig": "config",
    "MapDescription": "describe",
    "MapFileError": "errors",
    "MergeConfig": "config",
    "MultitokenConfig": "config",
    "OutputError": "errors",
    "Overlap": "sharing",
    "Plan": "pairs",
    "ProjectionMap": "projection",
    "RowKind": "projection",
    "SortCutConfig": "config",
    "TokenTable": "tokens",
    "TokenType": "tokens",
    "Tokenizer": "tokenizers",
    "TokenizerError": "errors",
    "XtokError": "errors",
    "build": "pipeline",
    "build_pairs": "pairs",
    "collate": "conversation",
    "convert": "mapfile",
    "doctor": "diagnosis",
    "generate": "embeddings",
    "inspect": "describe",
    "load_tokenizer": "tokenizers",
    "merge": "stages",
    "multitoken": "stages",
    "overlap": "sharing",
    "plan": "pairs",
    "read_pairs": "pairs",
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
