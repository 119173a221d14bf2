"""The wheel contains exactly the package, and works after installation. The metadata is current.

The tests build the wheel from the sdist, or take both from the folder in `XTOK_DIST`, and install
it into a separate virtual environment. Dependencies come from the environment of the tests. The
tests therefore show that the wheel is complete without the source tree, but not that its
requirements are sufficient, which `scripts/versions.sh` shows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest
from checks import works
from command_lines import EXAMPLE_ARGUMENTS, RUN_FIRST, TEACHER
from conftest import ROOT
from forked import Forks
from safetensors.numpy import save_file

import xtok
from xtok.cli import COMMANDS

pytestmark = pytest.mark.xdist_group("wheel")

PACKAGE = {
    str(path.relative_to(ROOT))
    for path in (ROOT / "xtok").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the tree, and the wheel that was built from it."""
    if "XTOK_DIST" in os.environ:
        return ROOT / os.environ["XTOK_DIST"]
    pytest.importorskip("build", reason="build is not installed: pip install -e '.[dev]'")
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("xtok", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"xtok-{xtok.__version__}-py3-none-any.whl"


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    about = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licence = archive.read(f"xtok-{xtok.__version__}.dist-info/licenses/LICENSE")
    assert set(names) == PACKAGE | {f"xtok-{xtok.__version__}.dist-info/{name}" for name in about}
    assert "xtok/py.typed" in names
    assert licence == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_contains_the_sources_of_the_wheel(dist: Path) -> None:
    with tarfile.open(dist / f"xtok-{xtok.__version__}.tar.gz") as archive:
        files = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    metadata = {name for name in files if name.startswith("xtok.egg-info/")}
    about = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert files - metadata == PACKAGE | about


def test_the_metadata_contains_version_license_and_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"xtok-{xtok.__version__}.dist-info/METADATA").decode()
    metadata: Message = Parser().parsestr(text)
    assert metadata["Version"] == xtok.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    needed = metadata.get_all("Requires-Dist", [])
    assert [r for r in needed if ">=" not in r and not r.startswith("xtok[")] == []


def environment() -> dict[str, str]:
    """Return environment variables without any reference to the source tree."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; a `.pth` file adds this one's dependencies.

    Python does not read the `.pth` files of a folder that a `.pth` file adds, so an editable
    install in this environment stays here.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    command = [*pip, "install", "-qq", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, env=environment(), timeout=300, check=True)
    [packages] = (folder / "lib").glob("python3.*/site-packages")
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "dependencies.pth").write_text("\n".join(paths), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def programs(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Runs programs with the installed wheel, without compiling kernels, which takes 10 s."""
    env = {**environment(), "NUMBA_DISABLE_JIT": "1"}
    forks = Forks(env, tmp_path_factory.mktemp("forks"), installed / "bin" / "python")
    yield forks
    forks.stop()


def test_the_tree_is_not_imported(installed: Path, programs: Forks, tmp_path: Path) -> None:
    code = (
        "import sys, json, importlib.metadata, xtok\n"
        "for name in xtok.__all__: getattr(xtok, name)\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'xtok']\n"
        "print(json.dumps([sys.path, files, importlib.metadata.version('xtok')]))"
    )
    result = works(programs.run(["-c", code], tmp_path, program="python"))
    path, files, version = json.loads(result.stdout.splitlines()[-1])
    assert str(ROOT) not in path
    assert len(files) > 40
    assert [file for file in files if not Path(file).is_relative_to(installed)] == []
    assert version == xtok.__version__
    command = [str(installed / "bin" / "xtok"), "--version"]
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment(), text=True)
    assert printed.startswith(f"xtok {xtok.__version__}")


def test_every_command_works(programs: Forks, small: Path, tmp_path: Path) -> None:
    assert EXAMPLE_ARGUMENTS.keys() == COMMANDS.keys(), "one example for each command"
    shutil.copy(small / "small.model", tmp_path)
    shutil.copytree(small / "small-digits", tmp_path / "model")
    rows = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    save_file({"model.embed_tokens.weight": rows}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "text.txt").write_text("In 2012 there were 201 of them.\n" * 20, encoding="utf-8")
    chat = '[{"role": "user", "content": "How many?"}]'
    (tmp_path / "chat.json").write_text(chat, encoding="utf-8")
    (tmp_path / "teacher.jsonl").write_text(TEACHER, encoding="utf-8")
    failed = []
    for name in [*RUN_FIRST, *(EXAMPLE_ARGUMENTS.keys() - set(RUN_FIRST))]:
        result = programs.run([name, *EXAMPLE_ARGUMENTS[name]], tmp_path)
        if result.returncode:
            failed.append(f"xtok {name} {' '.join(EXAMPLE_ARGUMENTS[name])}\n{result.stderr}")
    assert not failed, "\n".join(failed)
    outputs = {p.name for p in tmp_path.glob("*.*")}
    assert {args[-1] for args in EXAMPLE_ARGUMENTS.values() if "-o" in args} <= outputs


def test_citation_and_workflow_are_current() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {xtok.__version__}\n" in citation
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert "run: ./scripts/test.sh\n" in workflow
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = re.findall(r"Python :: (3\.\d+)", project)
    assert f"python: {json.dumps(supported)}\n" in workflow
    assert "PYTHON: python${{ matrix.python }}\n" in workflow
