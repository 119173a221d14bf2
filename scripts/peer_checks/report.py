"""What the checks share: a row of the table, checkouts, folders of real tokenizers, comparisons."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hub_folders
import torch
from torch import Tensor

SHOWN_PATH = 60


class Check(NamedTuple):
    """One line of the table."""

    peer: str
    what: str
    figure: str
    holds: bool


Checks = Iterator[Check]

PAIRS = {  # student, teacher, as `hub_folders` names them
    "Llama 3 → Qwen": ("llama3", "qwen"),
    "Mistral v3 (SentencePiece) → Qwen": ("mistral-v3", "qwen"),
}
LANGUAGES = ("english", "german", "russian", "chinese", "japanese")


def text_of(language: str) -> str:
    """Return the text of a language that xtok's own corpus has."""
    path = Path(__file__).resolve().parents[1] / "small_corpus" / f"{language}.txt"
    return path.read_text(encoding="utf-8")


@cache
def folder_of(name: str, parent: Path) -> Path:
    """Return a model folder with a real tokenizer, written once."""
    return hub_folders.write(name, parent / name)


@cache
def auto_tokenizer(name: str, parent: Path) -> Any:
    """Load the tokenizer of such a folder as trainers do."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder_of(name, parent))


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, with a `+` if its files were changed."""
    git = ("git", "-C", str(checkout))
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        return "unknown (no git checkout)"
    changes = [*git, "status", "--porcelain", "--untracked-files=no"]
    changed = subprocess.run(changes, capture_output=True, text=True, check=True).stdout
    return found.stdout[:7] + "+" * bool(changed)


def stand_in(name: str, **contents: Any) -> str:
    """Put an empty module in the place of one that needs what is not installed; return its name."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return name


def imported(checkout: Path, name: str) -> Any:
    """Import a module of a checkout."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(name)


def guarded(peer: str, what: str, check: Callable[[], Checks]) -> Checks:
    """Yield the lines of a check; a peer that has moved on and breaks is one line, too."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001  # whatever another's code raises is the finding
        reason = str(error).strip().splitlines()[:1] or [""]
        yield Check(peer, what, f"{type(error).__name__}: {reason[0][:100]}", holds=False)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, as a share of their largest absolute value."""
    scale = theirs.double().abs().max().clamp(min=1e-30)
    return float((ours.double() - theirs.double()).abs().max() / scale)


def value_and_gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss of logits, and its gradient with respect to them."""
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient
