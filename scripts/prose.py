"""Check the English of the guides, docstrings, comments and messages, and of the tests.

    python scripts/prose.py           # rates per 1,000 words; exit code 1 above a limit
    python scripts/prose.py --list    # the sentences that contain a counted phrase

It counts phrases that technical documentation rarely needs: noun clauses with "what" and "whose",
software that "tells" or "says", "the one that", "is of", "has none", "of which". A low rate does
not make a text clear; a rising rate is a reason to read it again.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "guides": 1.3,
    "docstrings": 1.0,
    "comments": 1.0,
    "messages": 1.0,
    "test docstrings": 2.5,
    "test comments": 2.5,
}
"""Counted phrases per 1,000 words, slightly above the rates of the tree."""

COUNTED = re.compile(
    r"\b(?:what(?:ever)?|whose|whom|tells?|told|telling|says?|said|saying)\b"
    r"|\b(?:one that|one of whose|the one|ones)\b"
    r"|\b(?:is|are|was|were) (?:of|no|none)\b|\b(?:has|have|had) none\b"
    r"|\b(?:of which|in which|by which|that of|those of|of its own|of their own|as such)\b",
    re.IGNORECASE,
)
MARKUP = re.compile(
    r"```.*?```|`+[^`]*`+|^\s*\|.*?$|^#.*?$|^\s*>>>.*?$|(?<=\])\([^)]*\)", re.DOTALL | re.MULTILINE
)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without code, tables and headings."""
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", MARKUP.sub("X", text), flags=re.M):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())):
            if len(sentence.split()) > 2:
                yield sentence


def texts_of_module(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstrings, comments and messages (strings of at least four words) of a module."""
    source = path.read_text(encoding="utf-8")
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    seen = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield "docstrings", docstring
            seen.add(id(node.body[0].value))  # type: ignore[attr-defined]
        elif isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "X" for v in node.values]
            seen.update(map(id, node.values))
            yield "messages", "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen
        ):
            yield "messages", node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "comments", token.string.lstrip("#: ")


def texts() -> Iterator[tuple[str, Path, str]]:
    """Yield the part, the file and each sentence of the tree."""
    guides = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "cli.md"]
    for path in sorted({path.resolve() for path in guides}):
        yield from (("guides", path, one) for one in sentences(path.read_text(encoding="utf-8")))
    for folder, prefix in (("xtok", ""), ("tests", "test ")):
        modules = (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".pyi"))
        for path in sorted(modules):
            for part, text in texts_of_module(path):
                if prefix + part in LIMITS and (part != "messages" or len(text.split()) >= 4):
                    yield from ((prefix + part, path, sentence) for sentence in sentences(text))


def main() -> int:
    """Print the rates, or the sentences; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the counted sentences")
    options = parser.parse_args()
    words, counts = dict.fromkeys(LIMITS, 0), dict.fromkeys(LIMITS, 0)
    for part, path, sentence in texts():
        found = len(COUNTED.findall(sentence))
        words[part] += len(sentence.split())
        counts[part] += found
        if found and options.list:
            print(f"{path.relative_to(ROOT)}: {part}: {sentence}")
    rates = {part: 1000 * counts[part] / max(1, words[part]) for part in LIMITS}
    for part, rate in rates.items():
        print(f"{part:15} {words[part]:6,} words, {rate:.1f} per 1,000 (limit {LIMITS[part]})")
    return int(any(rates[part] > limit for part, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
