"""Write docs/guides/cli.md, the command reference, from the help texts of the command line.

    python scripts/cli_reference.py            # write it
    python scripts/cli_reference.py --check    # exit with 1 if it is not current

Typer's `utils docs` generates the pages. This script adds links, complete sentences in the list of
commands, and a section for options that several commands share. The wording of types depends on
Typer's version, noted in the first line.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from typer.main import get_command

from xtok.cli import make_app
from xtok.cli.help import MODEL_KINDS, describe_command, usage

app = make_app()  # Typer reads it from this file
ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "guides" / "cli.md"
HEADER = "<!-- scripts/cli_reference.py wrote this file, with typer {}. Do not edit it. -->\n\n"


def typer_version() -> str:
    """Return Typer's version without the patch level, as the reference notes it."""
    return ".".join(version("typer").split(".")[:2])


def render() -> str:
    """Return the reference as Markdown, independent of terminal and locale."""
    command = [sys.executable, "-m", "typer", __file__, "utils", "docs", "--name", "xtok"]
    plain = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
    env = {**os.environ, **plain}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, encoding="utf-8")
    text = done.stdout.strip() + "\n"
    for entity, char in (("&#x27;", "'"), ("&quot;", '"')):  # Markdown needs no escapes for these
        text = text.replace(entity, char)
    summaries = dict(re.findall(r"^## `xtok (\S+)`\n\n(.+)$", text, re.MULTILINE))

    def whole(line: re.Match[str]) -> str:
        return f"* [`{line[1]}`](#xtok-{line[1]}): {summaries[line[1]]}"

    text = re.sub(r"^\* `([a-z][a-z-]*)`: .*$", whole, text, flags=re.MULTILINE)
    text = re.sub(r"\{([^}]*)\}(?:\.\.\.)?", r"\1", text)  # arguments that Typer puts in braces
    text = re.sub(r"^(\* `[^`<]+?) <(?:str|Path|list\[str\])>`", r"\1`", text, flags=re.MULTILINE)
    text = re.sub(r"^(\* `[^`<]+) <([^`>]+)>`", r"\1 \2`", text, flags=re.MULTILINE)  # choices
    commands = get_command(app).commands  # type: ignore[attr-defined]

    def with_usage(line: re.Match[str]) -> str:
        return f"$ {usage(commands[line[1]], f'xtok {line[1]}')}"

    text = re.sub(r"^\$ xtok ([a-z-]+) .*$", with_usage, text, flags=re.MULTILINE)

    def with_example(head: re.Match[str]) -> str:
        return f"{head[0]}Example: `{describe_command(head[1])[1]}`\n\n"

    text = re.sub(r"^## `xtok (\S+)`\n\n.+\n\n", with_example, text, flags=re.MULTILINE)
    return HEADER.format(typer_version()) + stated_once(text)


SHARED = f"""## Models

`xtok help models` prints:

```text
{MODEL_KINDS}
```

## Shared options

These options have the same meaning in each command.

"""
ENTRY = re.compile(r"^\* `([^`]+)`: .*$\n", re.MULTILINE)  # an option or argument, and its meaning
LIST = re.compile(r"(?:^\* `.*$\n)+", re.MULTILINE)


def stated_once(text: str) -> str:
    """Move options with equal help in at least three commands to a shared section."""
    head, *commands = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    counts = Counter(e.group(0, 1) for command in commands for e in ENTRY.finditer(command))
    most = {name: line for (line, name), number in reversed(counts.most_common()) if number > 2}
    alike = most.values()

    def shortened(lines: re.Match[str]) -> str:
        own = "".join(e[0] for e in ENTRY.finditer(lines[0]) if e[0] not in alike)
        names = [f"`{e[1]}`" for e in ENTRY.finditer(lines[0]) if e[0] in alike]
        return f"{own}* {', '.join(names)}: [shared](#shared-options)\n" if names else own

    shared = SHARED + "".join(sorted(alike, key=lambda line: line.lower().lstrip("* `-"))) + "\n"
    return head + shared + "".join(LIST.sub(shortened, command) for command in commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reference, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/guides/cli.md from the help texts.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is stale")
    check = parser.parse_args(argv).check
    text = render()
    if not check:
        REFERENCE.write_text(text, encoding="utf-8", newline="\n")
        print(REFERENCE.relative_to(ROOT))
        return 0
    if REFERENCE.exists() and REFERENCE.read_text(encoding="utf-8") == text:
        return 0
    print("error: docs/guides/cli.md is out of date", file=sys.stderr)
    print("hint: python scripts/cli_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
