"""File names of maps, from the models and the options that differ from the defaults."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtok._lib.io import shorten_name
from xtok.config import BuildConfig, GenerateConfig, MultitokenConfig
from xtok.loss_names import BuildLoss

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap


def build_name(
    student_id: str,
    teacher_id: str,
    config: BuildConfig,
    *,
    loss: BuildLoss | None = None,
    texts: Sequence[str | Path] = (),
) -> str:
    """Return the default file name for `build`, from models, loss, options and first text."""
    defaults = BuildConfig.for_loss(loss) if loss else BuildConfig()
    if texts:
        config, defaults = config.for_text(), defaults.for_text()
    slot = "scale-trick" if config.scale_trick else "no-scale-trick"
    return default_name(
        student_id,
        teacher_id,
        loss or "",
        f"top{config.top_k}",
        "" if config.scale_trick == defaults.scale_trick else slot,
        *option_words(asdict(config), asdict(defaults)),
        text_word(texts),
    )


def map_name(projection: ProjectionMap, stage: str) -> str:
    """Return a default file name for a map after a stage."""
    stages = projection.stages
    has_exact = "reapply-exact" in stages
    exact = ""
    if stage == "multitoken" and has_exact:
        exact = "exact-match"
    elif stage == "sort-cut" and "multitoken" in stages and not has_exact:
        exact = "no-exact-match"
    may_have_slots = not {"generate", "count"} & set(stages)
    slot = "no-scale-trick" if may_have_slots and not projection.enable_scale_trick else ""
    ids = projection.student.model_id, projection.teacher.model_id
    words = [
        word
        for name, step in zip(stages, projection.history, strict=True)
        for word in option_words(step["options"], _DEFAULTS.get(name, {}))
    ]
    return default_name(*ids, stage, f"top{projection.top_k}", slot, exact, *dict.fromkeys(words))


_DEFAULTS: dict[str, dict[str, Any]] = {
    "multitoken": MultitokenConfig().options,
    "reapply-exact": {"special_tokens": MultitokenConfig.special_tokens},
    "generate": asdict(GenerateConfig()),
    "count": {**MultitokenConfig().options, **BuildConfig().counting},
}


def default_name(student_id: str, teacher_id: str, *parts: str) -> str:
    """Return a file name from the names of both models and further parts."""
    models = f"{_name_part(student_id) or 'student'}_to_{_name_part(teacher_id) or 'teacher'}"
    name = "_".join(filter(None, (models, *parts)))
    if len(name.encode()) > 220:  # file systems allow 255 bytes, and temporary files add a suffix
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{shorten_name(name, 210)}_{digest}"
    return f"{name}.safetensors"


def _name_part(text: str) -> str:
    name = text.rstrip("/").rsplit("/", 1)[-1]
    for suffix in (".model", ".tiktoken"):
        name = name.removesuffix(suffix)
    kept = "".join(c if unicodedata.category(c)[0] in "LMN" or c in ".-" else "-" for c in name)
    return shorten_name(kept.lstrip("-."), 80)


def option_words(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return one part of a file name for each option that differs from its default."""
    return [
        _word(name.replace("_", "-"), value)
        for name, value in options.items()
        if name not in ("top_k", "scale_trick") and value != defaults.get(name)
    ]


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, Mapping) and value.keys() == {"kind"}:  # no embedding model
        return str(value["kind"])
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return f"{name}-{hashlib.sha256(json.dumps(value).encode()).hexdigest()[:6]}"
    return f"{name}-{_name_part(str(value))}"


def text_word(texts: Sequence[str | Path]) -> str:
    """Return the part of a file name for the counted texts, or "" without texts."""
    if not texts:
        return ""
    more = f"-and-{len(texts) - 1}" if len(texts) > 1 else ""
    return f"text-{shorten_name(_name_part(Path(texts[0]).stem), 40)}{more}"
