"""The documentation site: it builds without a dead link, is complete, and loads nothing remote."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

import xtok
from xtok.cli import COMMANDS
from xtok.training import losses

pytestmark = pytest.mark.xdist_group("site")
pytest.importorskip("mkdocstrings", reason="no mkdocs here: pip install -e '.[docs]'")
pytest.importorskip("material", reason="no mkdocs-material here: pip install -e '.[docs]'")


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a tree as scripts/docs.sh does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=tree,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stdout
    return folder


def test_it_has_every_document(site: Path) -> None:
    pages = {str(p.relative_to(site).parent) for p in site.rglob("index.html")}
    guides = {f"guides/{p.stem}" for p in (ROOT / "docs" / "guides").glob("*.md")}
    assert (
        guides | {".", "changelog", "reference", "study", "study/rows", "study/evidence"} <= pages
    )
    assert (site / "changelog" / "index.html").read_text().count("<h2") >= 1


def test_it_describes_every_public_name(site: Path) -> None:
    text = "".join(p.read_text() for p in (site / "reference").rglob("index.html"))
    described = set(re.findall(r'<h\d id="(xtok\.[\w.]+)"', text))
    headings = set(re.findall(r"xtok\.losses\.(\w+)", text))
    functions = {n for n in xtok.__all__ if not isinstance(getattr(xtok, n), ModuleType)}
    assert {f"xtok.{name}" for name in functions} - described == set()
    internal = {"LOSSES", "LossName", "loss_spec"}  # of the objective
    public = {n for n, x in vars(losses).items() if n[0] != "_" and not isinstance(x, ModuleType)}
    assert public - headings == internal
    assert "option(" not in text
    assert "Maximum entries per row, including the scale slot. Range: at least" in text


def test_it_has_every_command_under_the_name_that_links_use(site: Path) -> None:
    text = (site / "guides" / "cli" / "index.html").read_text()
    for command in COMMANDS:
        assert f'id="xtok-{command}"' in text


def test_its_search_finds_words_of_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    locations = {entry["location"] for entry in index if "slot" in entry["text"]}
    assert {"guides/glossary/#slot", "guides/file-format/"} <= locations | {
        location.partition("#")[0] for location in locations
    }
    assert any(entry["location"] == "reference/building/#xtok.build" for entry in index)


def test_the_site_loads_no_external_files(site: Path) -> None:
    """No font, script, style or picture; links for the reader are allowed."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        taken = re.findall(r'<(?:script|img|iframe|source)[^>]+src="?([^" >]+)', text)
        taken += re.findall(r'<link[^>]+href="?([^" >]+)', text)
        assert [url for url in taken if re.match(r"(https?:)?//", url)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", style.read_text()), style


@pytest.mark.parametrize(
    ("broken", "about"),
    [
        ("[a](nowhere.md) [a](choosing.md#nowhere)", ["nowhere.md", "#nowhere"]),
        ("::: xtok.nowhere", ["xtok.nowhere"]),
    ],
)
def test_a_dead_link_fails_the_build(tmp_path: Path, broken: str, about: list[str]) -> None:
    tree = tmp_path / "tree"
    for name in ("docs", "xtok", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, tree)
    with (tree / "docs" / "guides" / "choosing.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{broken}\n")
    result = build(tree, tmp_path / "site")
    assert result.returncode == 1
    for name in about:
        assert name in result.stdout
