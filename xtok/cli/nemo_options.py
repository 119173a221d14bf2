"""The command lines of NeMo-RL's tools in xtok's words: its options, and its names of files.

`tools/x_token` of NeMo-RL (commit 7ea279a) spells some options in snake case and others in kebab
case, and has names of its own: a table makes hidden options of them. Its scripts guess what the
step before has called its file, so such a command line also gets NeMo-RL's names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from xtok.cli import help
from xtok.maps.names import map_name

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap

# NeMo-RL's option to the ones of xtok that it sets: to the value that is typed (`...`), or to
# another; to None where it is so anyway. It holds for the commands that stand for NeMo-RL's tools
# and have all of these.
ALIASES: Mapping[str, Mapping[str, Any]] = {
    "enable_scale_trick": {"scale_trick": True},
    "disable_scale_trick": {"scale_trick": False},
    "enable_reverse_pass": {"reverse_pass": True},
    "disable_reverse_pass": {"reverse_pass": False},
    "enable_exact_match": {"exact_match": True},
    "skip_exact_map": {"exact_match": False},
    "special_token_similarity_threshold": {"special_tokens": "fuzzy", "fuzzy_threshold": ...},
    "enable_special_token_mapping": {"special_tokens": None},
    "disable_special_token_mapping": {"special_tokens": "off"},
    "no_special_token_mapping": {"special_tokens": "off"},
    "use_canonicalization": {"canonicalization": "relaxed"},
    "use_raw_tokens": {"token_form": "raw"},
    "tokens_to_cut": {"max_pieces": ...},
    "top_k": {"top_k": ...},
    "runtime_top_k": {"top_k": ...},
    "output_path": {"output": ...},
    "final_output": {"output": ...},
    "output_dir": {"output": ...},
    "data_dir": {"output": ...},
    "output_filename": {"output": ...},
}

_MATCHING = "multitoken", "build", "reapply-exact"

# Those for which xtok has none: the commands that take it, its one value, and why.
FIXED: Mapping[str, tuple[Collection[str], str, str]] = {
    "keep_top_tokens": (["generate"], "-1", "generate always takes every token"),
    "special_token_top_k": (_MATCHING, "1", "a special token has one counterpart"),
}

# The tool that takes the options of the step before and ignores them, and writes beside its input.
_IGNORING = "reapply-exact"

# Commands that stand for a tool with a folder of outputs: NeMo-RL's names there, without suffix.
_NAMES: Mapping[str, str] = {
    "generate": "temp_projection_map_{student}_to_{teacher}_top_{top_k}",
    "multitoken": "projection_map_{student}_to_{teacher}_multitoken_top_{top_k}_double",
    "build": "projection_matrix_{student}_{teacher}_top{top_k}",
}
_FOLDER = "cross_tokenizer_data"
_PLACES = ("data_dir", "output_dir", "output_filename")

# An option of the same name in both that only a command line in NeMo-RL's words has.
_THEIRS = {"multitoken": "num_examples"}


def nemo_options(command: str, options: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield NeMo-RL's options that a command understands, with what the value is of, if any."""
    is_tool = command in (*_NAMES, _IGNORING, "sort-cut")
    for name, sets in ALIASES.items() if is_tool else ():
        if name not in options and (command == _IGNORING or sets.keys() <= {*options}):
            yield name, next((target for target, value in sets.items() if value is ...), None)
    yield from ((name, "") for name, (tools, _, _) in FIXED.items() if command in tools)


@dataclass
class NemoWords:
    """What a command line has of NeMo-RL's words."""

    typed: dict[str, str] = field(default_factory=dict)  # xtok's options, to what was typed
    notes: list[str] = field(default_factory=list)  # on options that have no effect
    stem: str | None = None  # of the output's name

    def as_typed(self, text: str) -> str:
        """Return a text with NeMo-RL's options in the place of xtok's."""
        return re.sub(r"--[a-z][a-z-]*[a-z]", lambda m: self.typed.get(m[0], m[0]), text)


def nemo_words(context: typer.Context) -> NemoWords:
    """Return what a command line has of NeMo-RL's words."""
    line: NemoWords = context.meta[__name__]
    return line


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands in the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class Command(TyperCommand):
    """A command that understands NeMo-RL's options, and any option in snake case."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {"token_normalize_func": lambda name: name.replace("_", "-")}
        super().__init__(*args, **{**kwargs, "context_settings": settings})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, then set xtok's options by NeMo-RL's."""
        line = ctx.meta[__name__] = NemoWords()
        if help.ALL in args:
            ctx.meta[help.ALL], args = True, ["--help"]
        if self.name == "build" and "--loss" in {one.partition("=")[0] for one in args}:
            raise typer.BadParameter("--loss: name the map's loss as --for", ctx=ctx)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:  # in our words, not in those of Typer's validator
            message, _, _ = error.message.removeprefix("Value error, ").partition(", unable to")
            error.message = message.replace("Input should be", "must be", 1)
            raise
        hidden = [one.name for one in self.params if getattr(one, "hidden", False)]
        values = {name: ctx.params.pop(name) for name in hidden}
        theirs = {name: value for name, value in values.items() if is_given(ctx, name)}
        self._set_options(ctx, line, theirs)
        is_theirs = theirs or is_given(ctx, _THEIRS.get(str(self.name), ""))
        if is_theirs and self.name != _IGNORING:
            self._set_output(ctx, theirs)
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; rare options only with --help-all."""
        help.print_command(self, ctx, rare=help.ALL in ctx.meta)

    def _set_options(self, ctx: Any, line: NemoWords, theirs: Mapping[str, Any]) -> None:
        for name, value in theirs.items():
            sets, is_ignoring = ALIASES.get(name, {}), self.name == _IGNORING
            is_elsewhere = name in (*_PLACES, *FIXED) or not sets.keys() <= ctx.params.keys()
            if is_ignoring and is_elsewhere:
                line.notes.append(f"{_flag(name)} has no effect in {self.name}")
            elif name in FIXED:
                _, only, why = FIXED[name]
                if value != only:
                    raise typer.BadParameter(f"{_flag(name)}: {why}", ctx=ctx)
            elif name not in _PLACES:
                for target, fixed in sets.items():
                    if fixed is not None:
                        _set(ctx, target, value if fixed is ... else fixed, name)

    def _set_output(self, ctx: Any, theirs: Mapping[str, Any]) -> None:
        """Set `output`, which NeMo-RL has in two options, or leaves to its default."""
        name = next((name for name in _PLACES if name in theirs), "")
        stem = theirs.get("output_filename", "")
        folder = theirs.get("data_dir", theirs.get("output_dir"))
        if self.name == "generate" and folder and not is_given(ctx, "cache_dir"):
            _set(ctx, "cache_dir", Path(folder), name)
        file = f"{stem}.pt" if stem else ""
        if self.name in _NAMES:  # the name is chosen when options are known
            nemo_words(ctx).stem, folder, file = stem, folder or _FOLDER, ""
        if (folder or file) and not is_given(ctx, "output"):
            _set(ctx, "output", os.path.join(folder or "", file), name)


def _set(ctx: Any, target: str, value: Any, name: str) -> None:
    """Set an option of xtok, as if it was given in the place of one of NeMo-RL's."""
    ctx.params[target] = value
    if name:
        ctx.set_parameter_source(target, ctx.get_parameter_source(name))
        nemo_words(ctx).typed[_flag(target)] = _flag(name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def nemo_name(context: typer.Context, models: tuple[str, str], config: Any) -> str | None:
    """Return the name that NeMo-RL gives to the output of a command line in its words, or None."""
    name, command = nemo_words(context).stem, str(context.info_name)
    if name is None:
        return None
    if not name:
        student, teacher = map(cleaned, models)
        name = _NAMES[command].format(student=student, teacher=teacher, top_k=config.top_k)
    if command == "multitoken" and config.special_tokens != "off":
        name += "_special"
    if getattr(config, "weight_threshold", 0):
        name += f"_thresh_{config.weight_threshold:.3f}"
    return name if name.endswith(".pt") else f"{name}.pt"


def cleaned(model: str) -> str:
    """Return a model's name without its size and kind, as NeMo-RL's tools and script have it.

    >>> cleaned("models/Qwen3-4B-Base"), cleaned("mistral-v3.model")
    ('Qwen3', 'mistral-vodel')
    """
    name = model.rstrip("/").rsplit("/", 1)[-1]
    cleaned = re.sub(r"-?[0-9.]+[bm]", "", name, flags=re.IGNORECASE)
    for ending in ("-Base", "-it", "-Instruct"):
        cleaned = cleaned.replace(ending, "")
    return cleaned.strip("-_") + ("_mini" if "mini" in name else "")


def refined_name(source: Path, stage: str, projection: ProjectionMap) -> str:
    """Return the name of a refined map: for a `.pt`, the input's with NeMo-RL's ending."""
    if source.suffix != ".pt":
        return map_name(projection, stage)
    if stage == "reapply-exact":
        return f"{source.stem}_exact_map_remapped.pt"
    stem = re.sub(r"_top_\d+", "", source.stem)
    slot = "_preservelast" if projection.enable_scale_trick else ""
    return f"{stem}_top_{projection.top_k}_sorted{slot}.pt"
