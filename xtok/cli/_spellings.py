"""The options of NeMo-RL's tools in xtok's words, so that their command lines work here.

`tools/x_token` of NeMo-RL (commit 7bca37e) spells some options in snake case and others in kebab
case, and has names of its own. One table turns them into xtok's before the command parses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from xtok.cli._run import options

# NeMo-RL's option to xtok's arguments; `{}` is its value. An empty list: it is so anyway. Besides,
# any option may be spelled in snake case, and `--output-dir` with `--output-filename` is one path.
SPELLINGS: Mapping[str, Sequence[str]] = {
    "--enable-scale-trick": ["--scale-trick"],
    "--disable-scale-trick": ["--no-scale-trick"],
    "--enable-reverse-pass": ["--reverse-pass"],
    "--disable-reverse-pass": ["--no-reverse-pass"],
    "--enable-exact-match": ["--exact-match"],
    "--skip-exact-map": ["--no-exact-match"],
    "--enable-special-token-mapping": [],
    "--disable-special-token-mapping": ["--special-tokens", "off"],
    "--no-special-token-mapping": ["--special-tokens", "off"],
    "--special-token-similarity-threshold": [
        "--special-tokens", "fuzzy", "--fuzzy-threshold", "{}"
    ],
    "--special-token-top-k": ["--special-tokens", "fuzzy", "--fuzzy-top-k", "{}"],
    "--use-canonicalization": ["--canonicalization", "relaxed"],
    "--use-raw-tokens": ["--token-form", "raw"],
    "--tokens-to-cut": ["--max-pieces", "{}"],
    "--runtime-top-k": ["--top-k", "{}"],
    "--output-path": ["--output", "{}"],
    "--final-output": ["--output", "{}"],
}  # fmt: skip

# What no argument can say, and what to do instead.
REFUSED: Mapping[str, str] = {
    "--prep-top-k": "build always makes 32 entries first; run multitoken, reapply-exact and "
    "sort-cut to choose",
    "--keep-top-tokens": "generate always takes every token",
    "--data-dir": "there are no intermediate files; give --output FILE, and to generate also "
    "--cache-dir",
}


class Command(TyperCommand):
    """A command that understands NeMo-RL's spellings of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments, then parse them as usual."""
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        options[:] = takes_value
        return super().parse_args(ctx, rewritten(args, takes_value))


def rewritten(args: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """Return arguments with NeMo-RL's spellings turned into xtok's; all others stay as they are.

    Args:
        args: what follows the command's name.
        takes_value: the command's own options, and whether each has a value.

    Raises:
        typer.BadParameter: for an option of NeMo-RL that xtok has no counterpart of.
    """
    found: list[str] = []
    output: dict[str, str] = {}
    rest = list(args)
    while rest and rest[0] != "--":
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        kebab = name.replace("_", "-") if name.startswith("--") else name
        if kebab in takes_value:
            found.append(kebab + equals + value)
            if takes_value[kebab] and not equals:
                found += rest[:1]
                del rest[:1]
        elif kebab in REFUSED:
            raise typer.BadParameter(f"{name}: {REFUSED[kebab]}")
        elif kebab in _OUTPUT:
            output[kebab] = value if equals else _next(rest, name)
        elif kebab in SPELLINGS:
            words = SPELLINGS[kebab]
            if "{}" in words and not equals:
                value = _next(rest, name)
            found += [value if word == "{}" else word for word in words]
        else:
            found.append(arg)
    return [*found, *_output(output), *rest]


_OUTPUT = ("--output-dir", "--output-filename")


def _next(rest: list[str], name: str) -> str:
    if not rest:
        raise typer.BadParameter(f"{name} needs a value")
    return rest.pop(0)


def _output(given: Mapping[str, str]) -> list[str]:
    """Return `--output` for what NeMo-RL says in two options; the suffix of a stem is its own."""
    if not given:
        return []
    path = Path(given.get("--output-dir", "."))
    stem = given.get("--output-filename")
    return ["--output", str(path if stem is None else path / f"{stem}.pt")]
