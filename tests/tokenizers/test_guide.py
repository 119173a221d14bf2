"""The guide of tokenizers says what `doctor` prints."""

from __future__ import annotations

import inspect
import re

from conftest import ROOT

from xtok.inspection import chat_checks, doctor


def test_the_findings_are_those_of_doctor() -> None:
    guide = (ROOT / "docs" / "guides" / "tokenizers.md").read_text()
    _, _, table = guide.partition("| finding |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])}
    code = "".join(inspect.getsource(module) for module in (doctor, chat_checks))
    assert {name for name in named if f'"{name}"' not in code} == set()
    assert set(re.findall(r'Check\(\s*"([^"]+)"', code)) <= named
