"""The calls of xtok in hints, docstrings and documents are valid."""

from __future__ import annotations

import ast
import inspect
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import xtok

ROOT = Path(__file__).resolve().parents[1]
CALL = re.compile(r"\bxtok(?:\.\w+)+\(")


def calls(text: str) -> list[str]:
    """Return the calls in a text, up to their closing bracket."""
    named_calls = []
    for match in CALL.finditer(text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        named_calls.append(" ".join(text[match.start() : end].split()))
    return named_calls


def strings(path: Path) -> list[str]:
    """Return the strings of a module, docstrings included; values of f-strings as `…`."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    formatted = [n.values for n in nodes if isinstance(n, ast.JoinedStr)]
    parts = {id(part) for values in formatted for part in values}
    whole = [n for n in nodes if isinstance(n, ast.Constant) and id(n) not in parts]
    texts = [n.value for n in whole if isinstance(n.value, str)]
    return texts + [
        "".join(str(n.value) if isinstance(n, ast.Constant) else "…" for n in values)
        for values in formatted
    ]


def named() -> list[tuple[str, str]]:
    """Return the calls in the package's strings and in the documents' code spans."""
    named_calls = []
    for path in sorted((ROOT / "xtok").rglob("*.py")):
        named_calls += [(path.name, call) for text in strings(path) for call in calls(text)]
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for path in sorted(documents):
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        spans = re.findall(r"`([^`]+)`", prose)
        named_calls += [(path.name, call) for span in spans for call in calls(span)]
    return sorted(set(named_calls))


@pytest.mark.parametrize(("where", "call"), named())
def test_a_call_that_is_named_fits_the_function(where: str, call: str) -> None:
    node = ast.parse(call.replace("…", "..."), mode="eval").body
    assert isinstance(node, ast.Call), where
    function: Any = reduce(getattr, ast.unparse(node.func).split(".")[1:], xtok)
    keywords = {k.arg: None for k in node.keywords if k.arg is not None}
    if any(ast.unparse(arg).startswith(("*", "...")) for arg in node.args):
        assert keywords.keys() <= inspect.signature(function).parameters.keys(), where
    else:
        inspect.signature(function).bind(*node.args, **keywords)


def test_the_hint_of_a_map_that_is_not_made_for_p_kl_is_among_them() -> None:
    assert ("registry.py", 'xtok.build(student, teacher, for_loss="p-kl")') in named()
