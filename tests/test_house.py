"""The picture of the house in CONTRIBUTING.md and the tree agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from xtok import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "xtok"
OUTSIDE = {"__init__", "__main__"}  # they import anything, and nothing imports them


def floors() -> dict[str, int]:
    """Return the line of the table that each module or package stands on."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `xtok/")]
    found: dict[str, int] = {}
    for floor, row in enumerate(rows):
        for path in re.findall(r"`xtok/([^`]+)`", row):
            name = path.removesuffix(".py").removesuffix("/")
            assert name not in found, f"{name} stands on two lines"
            assert (PACKAGE / path).exists(), path
            found[name] = floor
    return found


def test_the_table_has_every_module() -> None:
    """Modules and packages of the tree, no more and no fewer."""
    there = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/*.py")}
    assert there - OUTSIDE == floors().keys()


def test_imports_come_from_above() -> None:
    """Those within functions too; those for types only may come from below."""
    floor = floors()
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        above = floor.get(name, len(floor))
        wrong += [
            f"{path.relative_to(ROOT)} imports {imported}"
            for imported in imports(path)
            if floor.get(imported, 0) > above
        ]
    assert not wrong


def test_files_import_each_other_in_no_circle() -> None:
    """Nor within functions; and no chain of imports is longer than ten files."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    of = {name.removesuffix(".__init__"): path for name, path in names.items()}
    left = {name: modules(path) & of.keys() - {name} for name, path in of.items()}
    for _ in range(10):
        leaves = {name for name, needs in left.items() if not needs}
        left = {name: needs - leaves for name, needs in left.items() if needs}
    assert left == {}


def test_private_names_stay_in_their_folder() -> None:
    """A module with an underscore is imported by its own package only."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("xtok."):
                continue
            parts = (node.module or "").split(".")
            names = [*parts[2:], *(alias.name for alias in node.names)]
            private = any(n.startswith("_") and not n.startswith("__") for n in names)
            if private and path.relative_to(PACKAGE).parts[0] != parts[1]:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_install_hints_work_from_a_clone() -> None:
    """No package index has xtok, so `pip install` of that name fails, or installs a stranger's."""
    places = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    places += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    wrong = re.compile(r"xtok\[|pip3? install (-U )?xtok\b")
    found = [path.name for path in places if wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []


def imports(path: Path) -> set[str]:
    """Return the modules and packages, right below `xtok`, that a file imports from."""
    return {name.split(".")[1] for name in modules(path) if name.startswith("xtok.")}


def modules(path: Path) -> set[str]:
    """Return the dotted names that a file imports, but for those for types only."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_citation_is_of_this_version() -> None:
    """And the workflow runs what everybody runs."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert "run: ./scripts/test.sh\n" in workflow
