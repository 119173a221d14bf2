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
from dataclasses import dataclass, field
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
    "sort-cut --initial-projection-path": "{}",
    "reapply-exact --initial-projection-path": "{}",
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


@dataclass
class Line:
    """A command line in xtok's words.

    Attributes:
        args: what follows the command's name.
        typed: xtok's options that were typed in other words, and these words.
        notes: what is to be said of options that have no effect.
        is_nemo: whether a word of NeMo-RL's own was among them.
        folder: the folder of outputs.
        stem: the name of the output.
    """

    args: list[str] = field(default_factory=list)
    typed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_nemo: bool = False
    folder: str | None = None
    stem: str | None = None

    def as_typed(self, text: str) -> str:
        """Return a text with the options as they were typed."""
        return re.sub(r"--[a-z][a-z-]*[a-z]", lambda m: self.typed.get(m[0], m[0]), text)


class Command(TyperCommand):
    """A command that understands NeMo-RL's spellings; its errors name what was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments, then parse them as usual."""
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        line = ctx.meta[__name__] = rewritten(args, takes_value, self.name or "")
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


def rewritten(args: Sequence[str], takes_value: Mapping[str, bool], command: str = "") -> Line:
    """Return arguments with NeMo-RL's spellings turned into xtok's; all others stay as they are.

    Args:
        args: what follows the command's name.
        takes_value: the command's own options, and whether each has a value.
        command: its name.

    Raises:
        typer.BadParameter: for a value of an option of NeMo-RL that xtok has no counterpart of.
    """
    line = Line()
    rest = list(args)
    while rest and rest[0] != "--":
        arg = rest.pop(0)
        typed, equals, value = arg.partition("=")
        name = typed.replace("_", "-") if typed.startswith("--") else typed
        if name in takes_value:
            line.args.append(name + equals + value)
            if takes_value[name] and not equals:
                line.args += rest[:1]
                del rest[:1]
            if typed != name:
                line.typed[name] = typed
            continue
        words = _words(name, takes_value, command)
        if words is None:
            line.args.append(arg)  # whatever it is, the parser's error names it
            continue
        if "{}" in words and not equals:
            if not rest:
                raise typer.BadParameter(f"{typed} needs a value")
            value = rest.pop(0)
        flags = [word for word in words if word.startswith("--")]
        if command == _IGNORING and (name == "--output-dir" or not takes_value.keys() >= {*flags}):
            line.notes.append(f"{typed} has no effect in {command}")
        else:
            _add(line, name, typed, value, words)
    _add_output(line, command)
    line.args += rest
    return line


def _words(name: str, takes_value: Mapping[str, bool], command: str) -> list[str] | None:
    """Return xtok's words for an option of NeMo-RL; None if it is none that the command knows."""
    if name in FIXED:
        return ["{}"] if FIXED[name][0] == command else None
    if name in _OUTPUT:
        return ["{}"] if "--output" in takes_value else None
    spelling = SPELLINGS.get(f"{command} {name}", SPELLINGS.get(name))
    if spelling is None:
        return None
    words = spelling.split()
    is_known = takes_value.keys() >= {word for word in words if word.startswith("--")}
    return words if is_known or command == _IGNORING else None


def _add(line: Line, name: str, typed: str, value: str, words: Sequence[str]) -> None:
    """Add an option of NeMo-RL to a line."""
    line.is_nemo = True
    if name in FIXED:
        _, only, what_to_do = FIXED[name]
        if value != only:
            raise typer.BadParameter(f"{typed}: {what_to_do}")
    elif name == "--output-filename":
        line.stem = value
    elif name in _OUTPUT:
        line.folder = value
        line.typed.setdefault("--output", typed)
    else:
        line.args += [value if word == "{}" else word for word in words]
        line.typed |= {word: typed for word in words if word.startswith("--")}


def _add_output(line: Line, command: str) -> None:
    """Add `--output` for what NeMo-RL says in two options, or leaves to its default."""
    given = {arg.partition("=")[0] for arg in line.args}
    if command == "generate" and line.folder and "--cache-dir" not in given:
        line.args += ["--cache-dir", line.folder]
    folder, name = line.folder, f"{line.stem}.pt" if line.stem else ""
    if command in _NAMES and line.is_nemo:  # the name is chosen when the options are known
        folder, name = _FOLDER if folder is None else folder, ""
    if (folder is not None or name) and not given & {"--output", "-o"}:
        line.args += ["--output", os.path.join(folder, name) if folder else name]


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
    name = re.sub(r"\.(model|tiktoken|json|gguf)$", "", name)
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
