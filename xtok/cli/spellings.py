"""The command lines of NeMo-RL's tools in xtok's words: its options, and its names of files.

`tools/x_token` of NeMo-RL (commit 7ea279a) spells some options in snake case and others in kebab
case, and has names of its own. Tables turn them into xtok's before the command parses them. Its
scripts guess what the step before has called its file, so such a command line also gets NeMo-RL's
names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from xtok import report
from xtok.cli.command import hint
from xtok.errors import XtokError
from xtok.maps.names import map_name

if TYPE_CHECKING:
    from xtok.cli.options import Models
    from xtok.maps.projection_map import ProjectionMap

# NeMo-RL's option to xtok's words; `{}` is its value. No words: it is so anyway. It holds for the
# commands that have xtok's option, or for the one before it. Besides, any option may be spelled in
# snake case.
SPELLINGS: Mapping[str, str] = {
    "reapply-exact --top-k": "--top-k {}",
    "--enable-scale-trick": "--scale-trick",
    "--disable-scale-trick": "--no-scale-trick",
    "--enable-reverse-pass": "--reverse-pass",
    "--disable-reverse-pass": "--no-reverse-pass",
    "--enable-exact-match": "--exact-match",
    "--skip-exact-map": "--no-exact-match",
    "--enable-special-token-mapping": "",
    "--disable-special-token-mapping": "--special-tokens off",
    "--no-special-token-mapping": "--special-tokens off",
    "--special-token-similarity-threshold": "--special-tokens fuzzy --fuzzy-threshold {}",
    "--special-token-top-k": "--special-tokens fuzzy --fuzzy-top-k {}",
    "--use-canonicalization": "--canonicalization relaxed",
    "--use-raw-tokens": "--token-form raw",
    "--tokens-to-cut": "--max-pieces {}",
    "--runtime-top-k": "--top-k {}",
    "--output-path": "--output {}",
    "--final-output": "--output {}",
}

# What has one possible value, in a command, and what to do to get another result.
FIXED: Mapping[str, tuple[str, str, str]] = {
    "--prep-top-k": (
        "build",
        "32",
        "build always makes 32 entries first; run multitoken, reapply-exact and sort-cut to choose",
    ),
    "--keep-top-tokens": ("generate", "-1", "generate always takes every token"),
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
_OUTPUT = ("--output-dir", "--data-dir", "--output-filename")


class Line:
    """A command line in xtok's words."""

    def __init__(self, typed: Sequence[str], own: Mapping[str, bool], command: str = "") -> None:
        """Rewrite what follows the command's name; `own` tells whether each option has a value."""
        self.own, self.command = own, command
        self.args: list[str] = []  # in xtok's words
        self.typed: dict[str, str] = {}  # xtok's options that were typed in other words
        self.notes: list[str] = []  # on options that have no effect
        self.is_nemo = False  # whether a word of NeMo-RL's own was among them
        self.folder: str | None = None  # of outputs
        self.stem: str | None = None  # of the output's name
        rest = list(typed)
        while rest and rest[0] != "--":
            self._add(rest)
        self._add_output()
        self.args += rest

    def as_typed(self, text: str) -> str:
        """Return a text with the options as they were typed."""
        return re.sub(r"--[a-z][a-z-]*[a-z]", lambda m: self.typed.get(m[0], m[0]), text)

    def _add(self, rest: list[str]) -> None:
        """Move the first of the words that are left, and its value, to the arguments."""
        arg = rest.pop(0)
        typed, equals, value = arg.partition("=")
        name = typed.replace("_", "-") if typed.startswith("--") else typed
        words = None if name in self.own else self._words(name)
        if words is not None:
            if "{}" in words and not equals:
                if not rest:
                    raise typer.BadParameter(f"{typed} needs a value")
                value = rest.pop(0)
            self._add_nemo(name, typed, value, words)
        elif name in self.own:
            self.args.append(name + equals + value)
            if self.own[name] and not equals:
                self.args += rest[:1]
                del rest[:1]
            if typed != name:
                self.typed[name] = typed
        else:
            self.args.append(arg)  # whatever it is, the parser's error names it

    def _words(self, name: str) -> list[str] | None:
        """Return xtok's words for an option of NeMo-RL; None if the command knows no such one."""
        if name in FIXED:
            return ["{}"] if FIXED[name][0] == self.command else None
        if name in _OUTPUT:
            return ["{}"] if "--output" in self.own else None
        spelling = SPELLINGS.get(f"{self.command} {name}", SPELLINGS.get(name))
        if spelling is None:
            return None
        words = spelling.split()
        return words if self._has(words) or self.command == _IGNORING else None

    def _has(self, words: Sequence[str]) -> bool:
        return self.own.keys() >= {word for word in words if word.startswith("--")}

    def _add_nemo(self, name: str, typed: str, value: str, words: Sequence[str]) -> None:
        self.is_nemo = True
        if self.command == _IGNORING and (name == "--output-dir" or not self._has(words)):
            self.notes.append(f"{typed} has no effect in {self.command}")
        elif name in FIXED:
            _, only, what_to_do = FIXED[name]
            if value != only:
                raise typer.BadParameter(f"{typed}: {what_to_do}")
        elif name == "--output-filename":
            self.stem = value
        elif name in _OUTPUT:
            self.folder = value
            self.typed.setdefault("--output", typed)
        else:
            self.args += [value if word == "{}" else word for word in words]
            self.typed |= {word: typed for word in words if word.startswith("--")}

    def _add_output(self) -> None:
        """Add `--output` for what NeMo-RL says in two options, or leaves to its default."""
        given = {arg.partition("=")[0] for arg in self.args}
        if self.command == "generate" and self.folder and "--cache-dir" not in given:
            self.args += ["--cache-dir", self.folder]
        folder, name = self.folder, f"{self.stem}.pt" if self.stem else ""
        if self.command in _NAMES and self.is_nemo:  # the name is chosen when options are known
            folder, name = _FOLDER if folder is None else folder, ""
        if (folder is not None or name) and not given & {"--output", "-o"}:
            self.args += ["--output", os.path.join(folder, name) if folder else name]


class Command(TyperCommand):
    """A command that understands NeMo-RL's spellings; its errors name what was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments, then parse them as usual."""
        if ctx.resilient_parsing:  # a shell completes a line that is not finished
            return super().parse_args(ctx, args)
        own = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        line = ctx.meta[__name__] = Line(args, own, self.name or "")
        with _errors_as_typed(ctx):
            return super().parse_args(ctx, line.args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if not ctx.params.get("quiet"):
            report.print_notes(ctx.meta[__name__].notes)
        with _errors_as_typed(ctx):
            return super().invoke(ctx)


@contextmanager
def _errors_as_typed(context: Any) -> Iterator[None]:
    """Word errors with the options as they were typed, in our words, not in Typer's validator's."""
    as_typed = context.meta[__name__].as_typed
    try:
        yield
    except typer.BadParameter as error:
        if error.param is not None:
            error.param_hint = as_typed(error.param.get_error_hint())
        message, _, _ = error.message.removeprefix("Value error, ").partition(", unable to")
        error.message = as_typed(message.replace("Input should be", "must be", 1))
        raise
    except XtokError as error:
        error.message, error.hint = as_typed(error.message), as_typed(hint(error, context))
        raise


def nemo_name(context: typer.Context, models: Models, config: Any) -> str | None:
    """Return the name that NeMo-RL gives to the output of a command line in its words, or None."""
    line: Line = context.meta[__name__]
    command = str(context.info_name)
    if not line.is_nemo:
        return None
    name = line.stem
    if name is None:
        student, teacher = map(cleaned, models.both())
        name = _NAMES[command].format(student=student, teacher=teacher, top_k=config.top_k)
    if command == "multitoken" and config.special_tokens != "off":
        name += "_special"
    if getattr(config, "weight_threshold", 0):
        name += f"_thresh_{config.weight_threshold:.3f}"
    return name if name.endswith(".pt") else f"{name}.pt"


def cleaned(model: str) -> str:
    """Return a model's name without its size and kind, as NeMo-RL's tools and script have it.

    Of a file, which they do not take, it is the name without its suffix.
    """
    name = model.rstrip("/").rsplit("/", 1)[-1]
    name = re.sub(r"\.(model|tiktoken|json)$", "", name)
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
