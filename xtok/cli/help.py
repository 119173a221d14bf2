"""Print help texts: description, example and options. --help-all adds rare options."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from xtok._lib.fields import MAIN, RARE
from xtok.tokenizers.display import plural

PARTS = {
    "Start": ("doctor", "events", "build", "verify"),
    "Look": ("inspect", "report", "align", "evaluate", "vocab"),
    "A teacher's predictions": ("project", "serve"),
    "A model's tokenizer": ("transplant",),
    "Files": ("convert", "render"),
    "NeMo-RL's stages": ("generate", "multitoken", "reapply-exact", "sort-cut"),
}
"""The commands in the order of the help. A command, its function and its module share a name."""

COMMANDS = {name: part for part, names in PARTS.items() for name in names}
"""The help section of each command."""

ALL = "--help-all"
"""The option that prints all options."""


@functools.cache
def describe_command(name: str) -> tuple[str, str]:
    """Return a command's description and its example.

    The function parses the source code, because importing all commands takes much longer.
    """
    module = Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    nodes = ast.parse(module.read_text(encoding="utf-8")).body
    [function] = (n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == module.stem)
    text, _, example = str(ast.get_docstring(function)).partition("\n\nExample: ")
    return text, example


MODEL_KINDS = """Wherever a command takes a model, give one of these:

  REPO                 a Hugging Face repo id; REPO@REVISION pins a commit
  FOLDER               a folder of a model or a tokenizer
  FILE                 tokenizer.json, SentencePiece's .model, a tiktoken file,
                       or tekken.json; 'FILE@REGEX' gives a split pattern
  bytes                the 256 bytes, without a file

If a name is ambiguous, add a prefix: hf:, spm:, tiktoken: or tekken:."""
"""Output of `xtok help models`."""

ARGUMENTS = "Arguments"

_WIDEST = 100
"""Maximum width of a help line in columns."""


def print_models() -> None:
    """Print the kinds of model names that commands accept."""
    _Page().prose(MODEL_KINDS).show()


def print_commands(app: Any, ctx: Any) -> None:
    """Print the help of `xtok`: the commands, in sections."""
    page = _Page().prose("Usage: xtok COMMAND ...").prose(app.help)
    widest = max(map(len, COMMANDS))
    for part, names in PARTS.items():
        summaries = [(name, describe_command(name)[0].partition("\n\n")[0]) for name in names]
        page.rows(part, summaries, widest)
    options = [*filter(None, (p.get_help_record(ctx) for p in app.get_params(ctx)))]
    page.rows("Options", options, max(len(flags) for flags, _ in options))
    page.prose(app.epilog).show()


def print_command(command: Any, ctx: Any, *, rare: bool) -> None:
    """Print the help of a command. With `rare`, include rarely needed options."""
    parts = dict(_parts(command, ctx))
    left_out = 0 if rare else len(parts.pop(RARE, ()))
    page = _Page().prose(f"Usage: {usage(command, ctx.command_path)}").prose(command.help)
    page.line("Example:", "bold").line(f"  {describe_command(command.name)[1]}").line()
    widest = max(len(flags) for rows in parts.values() for flags, _ in rows)
    for part, rows in parts.items():
        page.rows(part, rows, widest)
    if left_out:
        page.prose(f"{ALL} also prints {plural(left_out, 'rarely needed option')}.")
    page.show()


class _Page:
    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False)
        self._width = min(self._console.width, _WIDEST)
        self._lines: list[Text] = []

    def line(self, text: str = "", style: str = "") -> _Page:
        self._lines.append(Text(text, style))
        return self

    def prose(self, text: str) -> _Page:
        for part in text.split("\n\n"):
            lines = part.split("\n") if part.startswith("  ") else wrap(part, self._width)
            self._lines += [*map(Text, lines), Text()]
        return self

    def rows(self, part: str, rows: Iterable[tuple[str, str]], widest: int) -> _Page:
        self.line(f"{part}:", "bold")
        left = 2 + widest + 2
        for name, text in rows:
            glued = re.sub(r"\[default: .*\]$", lambda m: m[0].replace(" ", "\xa0"), text)
            lines = wrap(glued, max(self._width - left, 20), break_on_hyphens=False) or [""]
            first, *more = (line.replace("\xa0", " ") for line in lines)
            self._lines.append(Text.assemble("  ", (name.ljust(widest), "cyan"), "  ", first))
            self._lines += [Text(" " * left + line) for line in more]
        return self.line()

    def show(self) -> None:
        """Print the page without its last line, because Typer adds an empty line."""
        self._console.print(Text("\n").join(self._lines[:-1]), soft_wrap=True)


def _parts(command: Any, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    rows: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], MAIN: []}
    for parameter in command.params:
        record = parameter.get_help_record(ctx)
        if record is None:  # hidden
            continue
        name, text = record
        if parameter.param_type_name == "argument":
            rows[ARGUMENTS].append((name.partition(" <")[0], text.replace("  [required]", "")))
        else:
            panel = getattr(parameter, "rich_help_panel", None) or MAIN
            rows.setdefault(panel, []).append((_flags(name), text))
    yield from ((panel, lines) for panel, lines in rows.items() if lines)


def _flags(record: str) -> str:
    """Format an option for the help: `--[no-]x`, and choices without brackets."""
    record = re.sub(r"--([\w-]+) / --no-\1", r"--[no-]\1", record)
    return re.sub(r"<(.+)>", r"\1", record)


def usage(command: Any, path: str) -> str:
    """Return the usage line of a command."""
    arguments = [str(p.metavar) for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    required = [f"{p.opts[0]} {p.metavar}" for p in options if p.required]
    return " ".join([path, *arguments, *required, "[OPTIONS]"])
