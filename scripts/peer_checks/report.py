"""Shared parts of the checks: table rows, checkouts, tokenizer folders, comparisons."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hub_folders
import torch
from torch import Tensor

import xtok
from xtok.loss_names import BuildLoss


class Check(NamedTuple):
    """One line of the table."""

    what: str
    figure: str
    holds: bool


Checks = Iterator[Check]
LossFunction = Callable[[Tensor, Tensor], Tensor]

PAIRS = {  # student, teacher, as `hub_folders` names them
    "Llama 3 → Qwen": ("llama3", "qwen"),
    "Mistral v3 (SentencePiece) → Qwen": ("mistral-v3", "qwen"),
}
LANGUAGES = ("english", "german", "russian", "chinese", "japanese")


def text_of(language: str) -> str:
    """Return the text of a language that xtok's own corpus has."""
    path = Path(hub_folders.__file__).with_name("small_corpus") / f"{language}.txt"
    return path.read_text(encoding="utf-8")


@cache
def folder_of(name: str, parent: Path) -> Path:
    """Return a model folder with a real tokenizer, written once."""
    return hub_folders.write(name, parent / name)


def pt_of(student: str, teacher: str, loss: BuildLoss, parent: Path) -> Path:
    """Return the `.pt` of a pair for a loss, built once."""
    path = parent / f"{student}-{teacher}-{loss}.pt"
    if not path.exists():
        rows, columns = (own_tokenizer(name, parent) for name in (student, teacher))
        xtok.build(rows, columns, for_loss=loss).save(path)
    return path


@cache
def auto_tokenizer(name: str, parent: Path) -> Any:
    """Load the tokenizer of such a folder as trainers do."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder_of(name, parent))


def own_tokenizer(name: str, parent: Path) -> xtok.Tokenizer:
    """Load it as xtok's own readers do."""
    return xtok.load_tokenizer(str(folder_of(name, parent)))


def commit_of(checkout: Path, stated: str) -> str:
    """Return a checkout's commit, with a `+` if files were changed, or the declared commit."""
    git = ("git", "-C", str(checkout))
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        return f"{stated} (as stated; no git checkout)" if stated else "unknown (no git checkout)"
    changes = [*git, "status", "--porcelain", "--untracked-files=no"]
    changed = subprocess.run(changes, capture_output=True, text=True, check=True).stdout
    return found.stdout[:7] + "+" * bool(changed)


def stand_in(name: str, **contents: Any) -> str:
    """Replace a module whose requirements are missing with an empty module; return its name."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return name


def imported(checkout: Path, name: str) -> Any:
    """Import a module of a checkout."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(name)


def guarded(what: str, check: Callable[[], Checks]) -> Checks:
    """Yield the lines of a check; an error of the other project is also a line."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001  # any error of the other project is the result
        reason = str(error).strip().splitlines()[:1] or [""]
        yield Check(what, f"{type(error).__name__}: {reason[0][:100]}", holds=False)


def value_and_gradient(loss: LossFunction, *logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss of the student's and the teacher's logits, and its gradient to the former."""
    leaf = logits[0].detach().clone().requires_grad_()
    value = loss(leaf, logits[1])
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def errors(
    loss: LossFunction,
    expected: tuple[Tensor, Tensor],
    logits: Sequence[Tensor],
    columns: Tensor | slice = slice(None),
) -> tuple[float, float]:
    """Return the errors of a loss's value and gradient.

    Each is the largest difference as a share of the largest expected absolute value; of the
    gradient only the columns of `columns` count.
    """
    value, gradient = value_and_gradient(loss, *logits)
    pairs = ((value, expected[0]), (gradient[..., columns], expected[1][..., columns]))
    first, second = (
        float((ours.double() - theirs.double()).abs().max())
        / max(float(theirs.double().abs().max()), 1e-30)
        for ours, theirs in pairs
    )
    return first, second
