"""Looking at maps and tokenizers: what a map holds, whether it is right, how good it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from xtok.tokenizers import ModelLike, Tokenizer

Level = Literal["ok", "note", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One thing that was checked, and what was found.

    Only `failed` makes a command exit with 3. `skipped` are checks that a map file has nothing for.
    """

    name: str
    level: Level
    message: str


def given_tokenizers(
    student_model: ModelLike | None, teacher_model: ModelLike | None
) -> dict[str, Tokenizer]:
    """Load the tokenizers of the sides whose models are given; for none, import nothing."""
    models = {"student": student_model, "teacher": teacher_model}
    given = {side: model for side, model in models.items() if model is not None}
    if not given:
        return {}
    from xtok.tokenizers import load_tokenizer

    return {side: load_tokenizer(model) for side, model in given.items()}
