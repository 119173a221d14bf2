"""The house is as CONTRIBUTING.md draws it: rooms, floors, and one name for one thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from xtok import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "xtok"
DOOR = {"__init__", "__main__"}  # they import anything, and nothing imports them
STRANGERS = {"training", "teachers"}  # each runs without the other


def rooms() -> list[str]:
    """Return the rooms as the table in CONTRIBUTING.md has them, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `xtok/(\w+)(?:\.py|/)` \|", text, re.MULTILINE)


def room(path: Path) -> str:
    """Return the room that a module is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_the_table_is_what_ls_shows() -> None:
    """Fifteen names, no more and no fewer than the table has."""
    there = {room(path) for path in PACKAGE.rglob("*.py")}
    assert there - DOOR == set(rooms())
    assert len(there) == len(rooms()) + len(DOOR) == 15
    tests = {path.name for path in (ROOT / "tests").iterdir() if [*path.rglob("test_*.py")]}
    assert {name for name in tests if "." not in name} <= there


def test_a_room_imports_from_rooms_above() -> None:
    """Within functions, too; what is for types only may come from below."""
    floor = {name: number for number, name in enumerate(rooms())}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = room(path)
        if own in DOOR:
            continue
        for name in imports(path):
            strange = {own, name} == STRANGERS
            if floor.get(name, 0) > floor[own] or strange:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_files_import_each_other_in_no_circle() -> None:
    """Nor within functions."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    of = {name.removesuffix(".__init__"): path for name, path in names.items()}
    left = {name: _files(modules(path), of) - {name} for name, path in of.items()}
    while leaves := {name for name, needs in left.items() if not needs}:
        left = {name: needs - leaves for name, needs in left.items() if needs}
    assert left == {}


def test_a_class_has_a_name_of_its_own() -> None:
    """One word for one thing: what two rooms have carries the room's noun."""
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


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


def test_tests_use_no_private_names_of_the_package() -> None:
    """What a test sets or calls has a name that a reader may rely on."""
    defined = re.compile(
        r"^ *(?:async def |def |class |self\.|)(_[A-Za-z]\w*)[(:, =]", re.MULTILINE
    )
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    own = {name for source in sources for name in defined.findall(source)}
    own.remove("_fill_buffer")  # TRL's
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
                names = [node.attr]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr"):
                names = re.findall(r"\w+", " ".join(map(ast.unparse, node.args[:2])))
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            wrong += [f"{path.relative_to(ROOT)}: {x}" for x in names if x in own]
    assert wrong == []


def test_install_hints_work_from_a_clone() -> None:
    """No package index has xtok, so `pip install` of that name fails, or installs a stranger's."""
    places = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    places += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    wrong = re.compile(r"xtok\[[^]]*\](?! @ git\+)|pip3? install (-U )?xtok\b")
    found = [path.name for path in places if wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []


def _files(names: set[str], of: Mapping[str, Path]) -> set[str]:
    """Return the files among dotted names; a package only if one of its own names is imported."""
    packages = {name.rpartition(".")[0] for name in names if name in of}
    own = {name.rpartition(".")[0] for name in names if name not in of}
    return {name for name in names & of.keys() if name not in packages or name in own}


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
