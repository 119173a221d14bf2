"""The layers and packages match CONTRIBUTING.md, and names are unique."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layout")  # each file is parsed once


def test_a_group_of_tests_runs_in_one_process(request: pytest.FixtureRequest) -> None:
    """The id ends with the group, because pytest-xdist reads the group from the id."""
    is_distributed = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("one_process" + "@layout" * is_distributed)


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "xtok"
# entry points: they may import any package, and no package imports them
ENTRY = {"__init__", "__main__"}
INDEPENDENT = {"training", "teachers"}, {"building", "teachers"}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def packages() -> list[str]:
    """Return the packages in the order of the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `xtok/(\w+)(?:\.py|/)` \|", text, re.MULTILINE)


def package(path: Path) -> str:
    """Return the package of a module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_the_table_lists_every_package() -> None:
    """The packages and top-level modules of the table are complete."""
    names = {package(path) for path in PACKAGE.rglob("*.py")}
    assert sorted(names) == sorted([*packages(), *ENTRY])
    tests = {path.name for path in (ROOT / "tests").iterdir() if [*path.rglob("test_*.py")]}
    assert {name for name in tests if "." not in name} <= names


def test_a_package_imports_from_packages_above() -> None:
    """This includes imports inside functions; imports only for types are exempt."""
    order = {name: number for number, name in enumerate(packages())}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = package(path)
        if own in ENTRY:
            continue
        for name in imports(path):
            independent = {own, name} in INDEPENDENT
            if order.get(name, 0) > order[own] or independent:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_there_are_no_import_cycles() -> None:
    """This includes imports inside functions."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    path_of = {name.removesuffix(".__init__"): path for name, path in names.items()}
    left = {name: _files(modules(path), path_of) - {name} for name, path in path_of.items()}
    while leaves := {name for name, needs in left.items() if not needs}:
        left = {name: needs - leaves for name, needs in left.items() if needs}
    assert left == {}


def test_names_of_types_are_unique() -> None:
    """Two modules do not have classes or type aliases with the same name."""
    files: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in (*classes(path), *aliases(path)):
            files.setdefault(name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert {"ProjectionMap", "AnyMap", "MapKind"} <= files.keys()
    assert {name: in_files for name, in_files in files.items() if len(in_files) > 1} == {}


def test_names_of_functions_are_unique() -> None:
    """Commands have the names of their functions, and formats have the same functions."""
    files: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if package(path) != "cli" and path.parent != PACKAGE / "teachers" / "formats":
            for name in functions(path):
                files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {"build", "align", "check_output"} <= files.keys()
    assert {name: in_files for name, in_files in files.items() if len(in_files) > 1} == {}


def functions(path: Path) -> list[str]:
    """Return the names of a module's public functions."""
    tree = nodes(path)[0]
    assert isinstance(tree, ast.Module)
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted({node.name for node in defined if not node.name.startswith("_")})


def classes(path: Path) -> list[str]:
    """Return the names of a file's classes."""
    return [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]


def aliases(path: Path) -> list[str]:
    """Return the names of a module's type aliases: CamelCase, where constants are UPPER_CASE."""
    tree = nodes(path)[0]
    assert isinstance(tree, ast.Module)
    for_types = [inner for node in tree.body if isinstance(node, ast.If) for inner in node.body]
    assigned = [
        target.id
        for node in (*tree.body, *for_types)
        for target in getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    ]
    return [name for name in assigned if re.match(r"_?[A-Z]\w*[a-z]", name)]


def test_private_names_stay_in_their_folder() -> None:
    """Only its own package imports a module with a leading underscore."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("xtok."):
                continue
            parts = (node.module or "").split(".")
            names = [*parts[2:], *(alias.name for alias in node.names)]
            private = any(n.startswith("_") and not n.startswith("__") for n in names)
            if private and path.relative_to(PACKAGE).parts[0] != parts[1]:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_tests_use_no_private_names_of_the_package() -> None:
    """Tests only set and call names that other modules may use."""
    defined = re.compile(
        r"^ *(?:async def |def |class |self\.|)(_[A-Za-z]\w*)[(:, =]", re.MULTILINE
    )
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    own = {name for source in sources for name in defined.findall(source)}
    own -= {"_fill_buffer", "_id"}  # these names belong to TRL and pytest
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
                names = [node.attr]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr"):
                names = re.findall(r"\w+", " ".join(map(ast.unparse, node.args[:2])))
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            wrong += [f"{path.relative_to(ROOT)}: {x}" for x in names if x in own]
    assert wrong == []


def test_tests_import_public_modules() -> None:
    """`xtok._lib` is the infrastructure of the package, and `tests/_lib/` are its tests."""
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        private = [name for name in modules(path) if re.search(r"^xtok\b.*\._[a-z]", name)]
        if path.parent == ROOT / "tests" / "_lib":
            private = [name for name in private if name.split(".")[1] != "_lib"]
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in private]
    assert wrong == []


def test_tests_do_not_import_each_other() -> None:
    """Shared test helpers have separate modules."""
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        imported = [node for node in nodes(path) if isinstance(node, ast.Import)]
        names = [*modules(path), *(alias.name for node in imported for alias in node.names)]
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.startswith("test_")]
    assert wrong == []


OWN_INPUT = {
    "cli/align.py: read_bytes": "a pipe, whose end is unknown",
    "maps/file.py: read_bytes": "compared with a map's bytes",
    "building/embeddings/sources.py: open": "a digest",
    "building/embeddings/sources.py: read_bytes": "a digest",
    "inspection/page/page.py: read_bytes": "a file that xtok wrote next to a page",
    "cli/help.py: read_text": "source code of xtok",
    "inspection/page/page.py: read_text": "files of xtok",
    "conversation/formats/__init__.py: read_text": "templates of xtok",
    "conversation/reading.py: json.loads": "variables that the calling function wrote",
    "conversation/texts.py: open": "the reader of text",
    "maps/opening.py: open": "the reader of maps",
    "teachers/formats/caches.py: open": "the beginning of a cache, to recognize its format",
    "teachers/formats/vllm.py: json.loads": "text that it wrote, to replace NaN",
    "teachers/parts.py: json.loads": "parts that xtok wrote, sealed with a digest",
    "teachers/parts.py: open": "parts that xtok wrote, sealed with a digest",
    "teachers/project.py: read_bytes": "an output that xtok wrote",
    "tokenizers/_backend.py: read_text": "a model's .jinja, which Transformers reads in this way",
    "tokenizers/_hf.py: json.loads": "the state that the library `tokenizers` returns",
    "tokenizers/_sentencepiece.py: read_bytes": "the library `sentencepiece` parses it",
    "tokenizers/_tekken.py: read_bytes": "the reader of Tekken files",
    "tokenizers/_tiktoken.py: read_bytes": "the reader of tiktoken files",
    "tokenizers/checkpoint.py: open": "the reader of checkpoints",
    "tokenizers/hf_folder.py: read_bytes": "the library `tokenizers` parses it",
    "tokenizers/hub.py: read_bytes": "a model's JSON, without the byte order mark, as Transformers",
    "tokenizers/loading.py: open": "the beginning of a file, to recognize its format",
    "tokenizers/loading.py: read_bytes": "names of tokens, to compare them with AutoTokenizer's",
}
"""Calls that read input without the readers, each with its reason."""


def test_outside_input_passes_the_readers() -> None:
    """A second reader for the same kind of input could accept files that the first rejects.

    `_lib` contains the readers, and `bytes.decode` is for tokens.
    """
    calls = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path) if package(path) != "_lib" else []:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, ast.unparse(node.func.value)
            if owner == "json" and name in ("load", "loads"):
                name = f"json.{name}"
            elif name == "open":
                if owner == "os" or is_writing(node):
                    continue
            elif name not in ("to_pylist", "read_text", "read_bytes"):
                continue
            calls.add(f"{path.relative_to(PACKAGE).as_posix()}: {name}")
    assert calls == OWN_INPUT.keys()


def is_writing(call: ast.Call) -> bool:
    """Whether a call of `open` writes the file."""
    return any(ast.unparse(mode) in ("'w'", "'wb'") for mode in call.args)


def test_messages_contain_no_options_of_xtok_without_their_command() -> None:
    """A message of the library names the parameter; help texts of `config.py` name options."""
    reference = (ROOT / "docs" / "guides" / "cli.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"^\* `(-.*?)`", reference, re.M))))
    assert {"--for", "--id", "--skip-existing"} <= options
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if package(path) in {"cli", "config"}:
            continue
        for text in texts(path):
            without_commands = re.sub(r"(xtok|ray) [a-z]+[^.;,`]*", "", text)
            if " " in text and options & set(re.findall(r"--[a-z-]+", without_commands)):
                wrong.append(f"{path.relative_to(ROOT)}: {text}")
    assert wrong == []


def texts(path: Path) -> list[str]:
    """Return the strings and f-strings of a file's code, without docstrings."""
    formatted = [node for node in nodes(path) if isinstance(node, ast.JoinedStr)]
    others = {part for node in formatted for part in node.values}
    others |= {node.value for node in nodes(path) if isinstance(node, ast.Expr)}
    strings = [node for node in nodes(path) if isinstance(node, ast.Constant)]
    plain = [node.value for node in strings if isinstance(node.value, str) and node not in others]
    return plain + [ast.unparse(node) for node in formatted]


def test_install_hints_work_from_a_clone() -> None:
    """xtok is on no package index: `pip install xtok` fails, or installs another package."""
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    paths += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    wrong = re.compile(r"xtok\[[^]]*\](?! @ git\+)|pip3? install (-U )?xtok\b")
    wrong_files = [path.name for path in paths if wrong.search(path.read_text(encoding="utf-8"))]
    assert wrong_files == []


def _files(names: Set[str], path_of: Mapping[str, Path]) -> Set[str]:
    """Return the files among dotted names; a package only if its own names are imported."""
    packages = {name.rpartition(".")[0] for name in names if name in path_of}
    own = {name.rpartition(".")[0] for name in names if name not in path_of}
    return {name for name in names & path_of.keys() if name not in packages or name in own}


def imports(path: Path) -> set[str]:
    """Return the modules and packages, right below `xtok`, that a file imports from."""
    return {name.split(".")[1] for name in modules(path) if name.startswith("xtok.")}


@cache
def modules(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, but for those for types only."""
    names: set[str] = set()
    for_types = {
        inner
        for node in nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)
