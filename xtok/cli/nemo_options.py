"""Support NeMo-RL's command lines: translate its options, and use its file names.

xtok accepts the option names of NeMo-RL's `tools/x_token` (commit 7ea279a) as hidden options. If a
command line contains such an option, xtok also uses NeMo-RL's file names, because NeMo-RL's scripts
guess the name of the preceding step's output.
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

MODEL_OPTIONS: Mapping[str, tuple[str, str]] = {
    "student_model": ("student", "-s"),
    "teacher_model": ("teacher", "-t"),
    "model": ("model_argument", "-m"),
}
"""Options that set a model argument: the name of the argument, and the short option."""

_OUTPUT_OPTIONS = ("data_dir", "output_dir", "output_filename")

# NeMo-RL's option → the xtok options that replace it, with their values. `...` stands for the typed
# value, and None for xtok's default. A command that replaces a NeMo-RL tool accepts an alias if the
# command has all options that the alias sets.
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
    **{name: {"top_k": ...} for name in ("top_k", "runtime_top_k")},
    **{name: {"output": ...} for name in ("output_path", "final_output", *_OUTPUT_OPTIONS)},
}

_MATCHING = "multitoken", "build", "reapply-exact"

# NeMo-RL options without a counterpart in xtok: the commands that accept them, the only valid
# value, and the reason.
FIXED: Mapping[str, tuple[Collection[str], str, str]] = {
    "keep_top_tokens": (["generate"], "-1", "generate always uses all tokens"),
    "special_token_top_k": (_MATCHING, "1", "a special token has one counterpart"),
}

# This command ignores the options of the preceding step, and writes next to its input.
_IGNORING = "reapply-exact"

# File names (without suffix) of NeMo-RL's tools that write to a folder.
_NAMES: Mapping[str, str] = {
    "generate": "temp_projection_map_{student}_to_{teacher}_top_{top_k}",
    "multitoken": "projection_map_{student}_to_{teacher}_multitoken_top_{top_k}_double",
    "build": "projection_matrix_{student}_{teacher}_top{top_k}",
}
_FOLDER = "cross_tokenizer_data"

# Options with the same name in NeMo-RL and xtok. xtok users rarely need these options, so a command
# line with such an option is treated as a NeMo-RL command line.
_TYPICAL = {"multitoken": "num_examples"}


def nemo_options(command: str, options: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the NeMo-RL options of a command, and the xtok option that receives the value."""
    is_tool = command in (*_NAMES, _IGNORING, "sort-cut")
    for name, sets in ALIASES.items() if is_tool else ():
        if name not in options and (command == _IGNORING or sets.keys() <= {*options}):
            yield name, next((target for target, value in sets.items() if value is ...), None)
    yield from ((name, "") for name, (tools, _, _) in FIXED.items() if command in tools)


@dataclass
class NemoWords:
    """The NeMo-RL options in one command line."""

    typed: dict[str, str] = field(default_factory=dict)  # xtok's option → the typed NeMo-RL option
    notes: list[str] = field(default_factory=list)  # notes about options without effect
    stem: str | None = None  # the typed output name; "" for NeMo-RL's default name

    def as_typed(self, text: str) -> str:
        """Replace xtok's options in a text with the typed NeMo-RL options."""
        return re.sub(r"--[a-z][a-z-]*[a-z]", lambda m: self.typed.get(m[0], m[0]), text)


def nemo_words(context: typer.Context) -> NemoWords:
    """Return the NeMo-RL options in the running command line."""
    words: NemoWords = context.meta[__name__]
    return words


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line contains an option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class Command(TyperCommand):
    """A command that also accepts NeMo-RL's options, and all options in snake case."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {"token_normalize_func": lambda name: name.replace("_", "-")}
        super().__init__(*args, **{**kwargs, "context_settings": settings})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, then copy the values of NeMo-RL's options to xtok's options."""
        words = ctx.meta[__name__] = NemoWords()
        if help.ALL in args:
            ctx.meta[help.ALL], args = True, ["--help"]
        if self.name == "build" and "--loss" in {arg.partition("=")[0] for arg in args}:
            raise typer.BadParameter("--loss is not an option of this command; use --for", ctx=ctx)
        remaining = self._parse(ctx, args)
        hidden = [param.name for param in self.params if getattr(param, "hidden", False)]
        values = {name: ctx.params.pop(name) for name in hidden}
        typed = {name: value for name, value in values.items() if is_given(ctx, name)}
        models = {name: typed.pop(name) for name in MODEL_OPTIONS if name in typed}
        self._set_models(ctx, models)
        self._set_options(ctx, words, typed)
        is_nemo = typed or is_given(ctx, _TYPICAL.get(str(self.name), ""))
        if is_nemo and self.name != _IGNORING:
            self._set_output(ctx, typed)
        return remaining

    def _parse(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:  # shorten the message of Typer's validator
            message, _, _ = error.message.removeprefix("Value error, ").partition(", unable to")
            error.message = message.replace("Input should be", "must be", 1)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help. Rare options are included only with --help-all."""
        help.print_command(self, ctx, rare=help.ALL in ctx.meta)

    def _set_models(self, ctx: Any, models: Mapping[str, str]) -> None:
        """Set model arguments from NeMo-RL's options, and the others from the typed arguments."""
        if "arguments" in ctx.params:  # MAP... STUDENT TEACHER
            ctx.params["arguments"] = [*ctx.params["arguments"], *models.values()]
            return
        by_argument = {MODEL_OPTIONS[name][0]: model for name, model in models.items()}
        arguments = [param.name for param in self.params if param.param_type_name == "argument"]
        typed = [ctx.params[name] for name in arguments if ctx.params[name] is not None]
        free = [name for name in arguments if name not in by_argument]
        if by_argument and len(typed) > len(free):
            name = next(iter(models))
            problem = f"name the {name.replace('_', ' ')} only once (argument or {_flag(name)})"
            raise typer.BadParameter(problem, ctx=ctx)
        if by_argument:
            moved = dict(zip(free, typed, strict=False))
            ctx.params |= {**dict.fromkeys(arguments), **by_argument, **moved}

    def _set_options(self, ctx: Any, words: NemoWords, typed: Mapping[str, Any]) -> None:
        for name, value in typed.items():
            sets = ALIASES.get(name, {})
            is_unused = name in (*_OUTPUT_OPTIONS, *FIXED) or not sets.keys() <= ctx.params.keys()
            if self.name == _IGNORING and is_unused:
                words.notes.append(f"{_flag(name)} has no effect in {self.name}")
            elif name in FIXED:
                _, allowed, reason = FIXED[name]
                if value != allowed:
                    raise typer.BadParameter(f"{_flag(name)}: {reason}", ctx=ctx)
            elif name not in _OUTPUT_OPTIONS:
                for target, fixed in sets.items():
                    if fixed is not None:
                        _set(ctx, target, value if fixed is ... else fixed, name)

    def _set_output(self, ctx: Any, typed: Mapping[str, Any]) -> None:
        name = next((name for name in _OUTPUT_OPTIONS if name in typed), "")
        stem = typed.get("output_filename", "")
        folder = typed.get("data_dir", typed.get("output_dir"))
        if self.name == "generate" and folder and not is_given(ctx, "cache_dir"):
            _set(ctx, "cache_dir", Path(folder), name)
        path = os.path.join(folder or "", f"{stem}.pt" if stem else "")
        if self.name in _NAMES:  # `nemo_name` chooses the file name from the options
            nemo_words(ctx).stem, path = stem, os.path.join(folder or _FOLDER, "")
        if path and not is_given(ctx, "output"):
            _set(ctx, "output", path, name)


def _set(ctx: Any, target: str, value: Any, name: str) -> None:
    ctx.params[target] = value
    if name:
        ctx.set_parameter_source(target, ctx.get_parameter_source(name))
        nemo_words(ctx).typed[_flag(target)] = _flag(name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def nemo_name(context: typer.Context, models: tuple[str, str], config: Any) -> str | None:
    """Return NeMo-RL's name for the output, or None if no NeMo-RL option was used."""
    name, command = nemo_words(context).stem, str(context.info_name)
    if name is None:
        return None
    if not name:
        student, teacher = map(clean_name, models)
        name = _NAMES[command].format(student=student, teacher=teacher, top_k=config.top_k)
    if command == "multitoken" and config.special_tokens != "off":
        name += "_special"
    if getattr(config, "weight_threshold", 0):
        name += f"_thresh_{config.weight_threshold:.3f}"
    return name if name.endswith(".pt") else f"{name}.pt"


def clean_name(model: str) -> str:
    """Shorten a model's name in the same way as NeMo-RL's tools.

    >>> clean_name("models/Qwen3-4B-Base"), clean_name("mistral-v3.model")
    ('Qwen3', 'mistral-vodel')
    """
    name = model.rstrip("/").rsplit("/", 1)[-1]
    clean_name = re.sub(r"-?[0-9.]+[bm]", "", name, flags=re.IGNORECASE)
    clean_name = re.sub("-Base|-it|-Instruct", "", clean_name)
    return clean_name.strip("-_") + ("_mini" if "mini" in name else "")


def refined_name(source: Path, stage: str, projection: ProjectionMap) -> str:
    """Return the file name of a refined map. A `.pt` file gets the suffix that NeMo-RL adds."""
    if source.suffix != ".pt":
        return map_name(projection, stage)
    if stage == "reapply-exact":
        return f"{source.stem}_exact_map_remapped.pt"
    stem = re.sub(r"_top_\d+", "", source.stem)
    slot = "_preservelast" if projection.enable_scale_trick else ""
    return f"{stem}_top_{projection.top_k}_sorted{slot}.pt"
