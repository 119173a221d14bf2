"""The help: what a command does, an example, and its options; rare ones with --help-all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from xtok.config import MAIN, RARE

HELP = {
    "Start": {
        "doctor": "Check tokenizers, and tell which loss suits a pair.",
        "events": "Build an event map (default), or the tables for CSD.",
        "build": "Build a projection map from two tokenizers.",
        "verify": "Check a map file, and its models if they are given.",
    },
    "Look": {
        "inspect": "Show what a map holds, single rows, or where two maps differ.",
        "report": "Write a page (HTML) that shows what a map is good for.",
        "align": "Show a text in two tokenizations, and the chunks they share.",
        "evaluate": "Measure maps on text: cross-entropy, coverage, leak.",
        "vocab": "Show a model's tokens: bytes, types, roles; or write them all.",
    },
    "A teacher's predictions": {
        "project": "Turn a teacher's stored log-probabilities into a student's.",
        "serve": "Serve a teacher as if it had the student's tokenizer.",
    },
    "Files": {
        "convert": "Convert a map between .safetensors and NeMo-RL's .pt.",
        "render": "Write conversations as ids, with the assistant's masks.",
    },
    "NeMo-RL's stages": {
        "generate": "Map each student token to the most similar teacher tokens.",
        "multitoken": "Map each student token to the teacher tokens that spell it.",
        "reapply-exact": "Give tokens that both sides have a single entry of weight 1.",
        "sort-cut": "Keep the heaviest entries of each row, and normalize it.",
    },
}
"""The commands in the order of the help: its parts, and a command's first sentence.

The function of a command has its name, and so has the module that it is in.
"""

EXAMPLES = {
    "doctor": "xtok doctor meta-llama/Llama-3.2-1B Qwen/Qwen3-8B",
    "events": "xtok events meta-llama/Llama-3.2-1B Qwen/Qwen3-8B -o events.safetensors",
    "build": "xtok build meta-llama/Llama-3.2-1B Qwen/Qwen3-8B --for p-kl -o map.safetensors",
    "verify": "xtok verify map.safetensors",
    "inspect": "xtok inspect map.safetensors 201 ' the'",
    "report": "xtok report map.safetensors -o report.html",
    "align": "xtok align meta-llama/Llama-3.2-1B Qwen/Qwen3-8B 'In 2012, 201 of them'",
    "evaluate": "xtok evaluate map.safetensors STUDENT TEACHER --text 'corpus/*.txt'",
    "vocab": "xtok vocab meta-llama/Llama-3.2-1B 201 '<|eot_id|>'",
    "project": "xtok project teacher.parquet STUDENT TEACHER -o student.parquet",
    "serve": "xtok serve STUDENT TEACHER --teacher-url http://localhost:8000",
    "convert": "xtok convert map.safetensors map.pt",
    "render": "xtok render chats.jsonl Qwen/Qwen3-8B -o rows.parquet",
    "generate": "xtok generate meta-llama/Llama-3.2-1B Qwen/Qwen3-8B -o similar.safetensors",
    "multitoken": "xtok multitoken meta-llama/Llama-3.2-1B Qwen/Qwen3-8B -o first.pt",
    "reapply-exact": "xtok reapply-exact first.pt -o exact.pt",
    "sort-cut": "xtok sort-cut exact.pt --top-k 4 -o map.pt",
}
"""One use of each command, for its help."""

COMMANDS = {name: part for part, names in HELP.items() for name in names}
"""The part of the help that each command stands in."""

ALL = "--help-all"
"""The option that shows every option."""

MODEL_KINDS = """Wherever a command takes a model, give one of these:

  REPO                 a Hugging Face repo id; REPO@REVISION pins a commit
  FOLDER               a folder of a model or a tokenizer
  FILE                 tokenizer.json, SentencePiece's .model, a tiktoken file,
                       or tekken.json; 'FILE@REGEX' gives a split pattern
  bytes                the 256 bytes, without a file

If a name is ambiguous, add a prefix: hf:, spm:, tiktoken: or tekken:."""
"""What `xtok help models` prints."""

ARGUMENTS = "Arguments"

_WIDEST = 100
"""Columns of a line of help, however wide the terminal is: longer lines are hard to read."""


def print_models() -> None:
    """Print what a model can be."""
    _Page().prose(MODEL_KINDS).show()


def print_commands(app: Any, ctx: Any) -> None:
    """Print the help of `xtok`: its commands, by part."""
    page = _Page().prose("Usage: xtok COMMAND ...").prose(app.help)
    widest = max(map(len, COMMANDS))
    for part, summaries in HELP.items():
        page.rows(part, summaries.items(), widest)
    records = [p.get_help_record(ctx) for p in app.get_params(ctx)]
    options = [record for record in records if record is not None]
    page.rows("Options", options, max(len(flags) for flags, _ in options))
    page.prose(app.epilog).show()


def print_command(command: Any, ctx: Any, *, rare: bool) -> None:
    """Print the help of a command; `rare` options, too."""
    parts = dict(_parts(command, ctx))
    left_out = 0 if rare else len(parts.pop(RARE, ()))
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = [ctx.command_path, "[OPTIONS]", *map(_usage, arguments)]
    page = _Page().prose(f"Usage: {' '.join(usage)}").prose(command.help)
    page.line("Example:", "bold").line(f"  {EXAMPLES[command.name]}").line()
    widest = max(len(flags) for rows in parts.values() for flags, _ in rows)
    for part, rows in parts.items():
        page.rows(part, rows, widest)
    if left_out:
        page.prose(f"{ALL} also shows {left_out} options that are rarely needed.")
    page.show()


class _Page:
    """Lines of help, as wide as the terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False)
        self._width = min(self._console.width, _WIDEST)
        self._lines: list[Text] = []

    def line(self, text: str = "", style: str = "") -> _Page:
        self._lines.append(Text(text, style))
        return self

    def prose(self, text: str) -> _Page:
        """Add paragraphs; each is wrapped as a whole, wherever the source breaks its lines."""
        for part in text.split("\n\n"):
            lines = part.split("\n") if part.startswith("  ") else wrap(part, self._width)
            self._lines += [*map(Text, lines), Text()]
        return self

    def rows(self, part: str, rows: Iterable[tuple[str, str]], widest: int) -> _Page:
        """Add a part: names, each with what it is."""
        self.line(f"{part}:", "bold")
        left = 2 + widest + 2
        for name, says in rows:
            glued = re.sub(r"\[default: .*\]$", lambda m: m[0].replace(" ", "\xa0"), says)
            lines = wrap(glued, max(self._width - left, 20), break_on_hyphens=False) or [""]
            first, *more = (line.replace("\xa0", " ") for line in lines)
            self._lines.append(Text.assemble("  ", (name.ljust(widest), "cyan"), "  ", first))
            self._lines += [Text(" " * left + line) for line in more]
        return self.line()

    def show(self) -> None:
        """Print the page, without the empty line at its end: Typer adds one."""
        self._console.print(Text("\n").join(self._lines[:-1]), soft_wrap=True)


def _parts(command: Any, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the parts of a command's help, arguments and the main options first."""
    rows: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], MAIN: []}
    for parameter in command.params:
        record = parameter.get_help_record(ctx)
        if record is None:  # hidden
            continue
        name, says = record
        if parameter.param_type_name == "argument":
            rows[ARGUMENTS].append((name.partition(" <")[0], says.replace("  [required]", "")))
        else:
            panel = getattr(parameter, "rich_help_panel", None) or MAIN
            rows.setdefault(panel, []).append((_flags(name), says))
    yield from ((panel, lines) for panel, lines in rows.items() if lines)


def _flags(record: str) -> str:
    """Return an option as the help shows it: its values without brackets, its two names as one."""
    record = re.sub(r"--([\w-]+) / --no-\1", r"--[no-]\1", record)
    return re.sub(r"<(.+)>", r"\1", record)


def _usage(argument: Any) -> str:
    name = str(argument.metavar)
    return name if argument.required or name.startswith("[") else f"[{name}]"
