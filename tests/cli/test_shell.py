"""The command line in a shell: completion, signals, progress bars."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
from checks import KILLED, killed
from command_lines import LAZY_PACKAGES, run_python, two_files
from conftest import ROOT, Cli
from forked import Forks

from xtok import __version__
from xtok.cli import console, make_app

APP = make_app()
SHELLS = ["bash", "zsh", "fish"]


def completing(shell: str, line: str) -> dict[str, str]:
    """Return the environment of a shell that completes the last word of a line."""
    asked = {"bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}}
    typed = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return {"_XTOK_COMPLETE": f"complete_{shell}", **asked.get(shell, typed)}


def words(shell: str, printed: str) -> list[str]:
    """Return the completions without their help."""
    if shell == "zsh":
        return re.findall(r'^(?:_arguments .*\(\()?"([^"]+)"', printed, re.MULTILINE)
    return [line.partition("\t")[0] for line in printed.splitlines() if line]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with maps and other files, for completion."""
    for name in ("a.safetensors", "b.pt", "notes.txt", ".hidden.pt", "sub/c.pt", "odd/x y.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("xtok bu", ["build"]),
        ("xtok help conv", ["convert"]),
        ("xtok build --no-scale", ["--no-scale-trick"]),
        ("xtok build --for ", ["p-kl", "gold", "h-kl"]),
        ("xtok build --target c", ["chunk"]),
        ("xtok build s t --weights ", ["decay", "synthetic"]),
        ("xtok build --tokens_to_cut ", []),
        ("xtok build --top_k 3 --fo", ["--for"]),
        ("xtok inspect ", ["a.safetensors", "b.pt", "odd/", "sub/"]),
        ("xtok evaluate a.safetensors b", ["b.pt"]),
        ("xtok evaluate a.safetensors sub/", ["sub/c.pt"]),
        ("xtok build s t --initial-projection-path a", ["a.safetensors"]),
        ("xtok inspect a.safetensors --against ./b", ["./b.pt"]),
        # No output: the shell itself completes files.
        ("xtok inspect su", []),
        ("xtok inspect odd/", []),
        ("xtok inspect n", []),
        ("xtok build ", []),
        ("xtok build --text n", []),
    ],
)
def test_a_shell_gets_the_completions_of_a_line(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    shell: str, line: str, expected: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(files)
    monkeypatch.setenv("COLUMNS", "10000")  # `program` sets this width as well
    for name, value in completing(shell, line).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as result:
        APP(prog_name="xtok")
    assert result.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert words(shell, printed.out) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_a_long_help_is_no_completion(cli: Cli, shell: str) -> None:
    result = cli(env=completing(shell, "xtok build --weig"))
    assert words(shell, result.stdout) == ["--weights"]
    assert len(result.stdout.splitlines()) == 1


def test_completion_is_quick(files: Path) -> None:
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print([m for m in {LAZY_PACKAGES} if m in sys.modules]))\n"
        "from xtok.__main__ import program\n"
        "program()"
    )
    env = {**os.environ, **completing("bash", "xtok inspect ")}
    result = run_python(code, cwd=files, check=True, env=env)
    assert len(result.stdout.splitlines()) > 2
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a new user, with only `xtok` in the path."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "xtok"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m xtok "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:/usr/local/bin:/usr/bin:/bin"
    return {"HOME": str(tmp_path), "PATH": path, "PYTHONPATH": str(ROOT), "TERM": "dumb"}


def test_bash_completes_after_installation(home: dict[str, str], files: Path) -> None:
    def bash(*command: str) -> str:
        return subprocess.run(
            ["bash", "--norc", *command],
            cwd=files, env=home, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    installed = bash("-c", "xtok --install-completion; true")
    path = files / ".bash_completions" / "xtok.sh"
    assert installed.splitlines()[0] == f"bash completion installed in {path}"
    ask = (
        'source ~/.bashrc; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        "$(complete -p xtok | sed 's/.*-F //; s/ .*//') xtok; echo \"${COMPREPLY[*]}\""
    )
    assert bash("-c", ask, "-", "xtok", "build", "--for", "") == "p-kl gold h-kl\n"
    assert bash("-c", ask, "-", "xtok", "verify", "") == "a.safetensors b.pt bin/ odd/ sub/\n"
    # the shell completes files if xtok returns no completions
    assert "-o default" in path.read_text()


@pytest.mark.parametrize(
    ("shell", "path"), [("zsh", ".zfunc/_xtok"), ("fish", ".config/fish/completions/xtok.fish")]
)
def test_completion_is_installed_for(home: dict[str, str], shell: str, path: str) -> None:
    chosen = {**home, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    program, script = Path(home["HOME"]) / "bin" / "xtok", Path(home["HOME"]) / path
    install = [str(program), "--install-completion", shell]
    subprocess.run(install, env=chosen, check=True, stdout=subprocess.DEVNULL)
    assert f"_XTOK_COMPLETE=complete_{shell}" in script.read_text()
    if executable := shutil.which(shell):
        subprocess.run([executable, "-n", script], env=home, check=True)


# xtok --version


def test_the_version_has_the_facts_for_a_bug_report(cli: Cli) -> None:
    result = cli("--version", env={"HF_TOKEN": "hf_secret"})
    assert (result.returncode, result.stderr) == (0, "")
    first, python, *rest = result.stdout.splitlines()
    assert first == f"xtok {__version__} ({Path(console.__file__).parents[1]})"
    assert python.startswith(f"Python {sys.version.split()[0]} ")
    assert {line.split()[0] for line in rest} >= {"numpy", "tokenizers", "torch", "transformers"}
    assert "hf_secret" not in result.stdout


# Signals

AT_IMPORT = """
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "{}":
            os.kill(os.getpid(), stop)
sys.meta_path.insert(0, Interrupting())
"""
IN_A_THREAD = """
from xtok.tokenizers import Tokenizer
encode = Tokenizer.library_arrays
def encoding(*given):
    os.kill(os.getpid(), stop)
    return encode(*given)
Tokenizer.library_arrays = encoding
"""
COUNTING = """
from xtok.building.counting import pair_text
from xtok.conversation import texts
texts.BATCH_CHARACTERS = 1000
add, calls = pair_text.TextCounter.add, []
def counting(self, *batch):
    calls.append(batch)
    if len(calls) == 3:
        os.kill(os.getpid(), stop)
    add(self, *batch)
pair_text.TextCounter.add = counting
"""
WHILE_WRITING = """
from pathlib import Path
if stop == signal.SIGTERM:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
replace = Path.replace
def replacing(self, target):
    assert self.exists()
    os.kill(os.getpid(), stop)
    return replace(self, target)
Path.replace = replacing
"""
AT_THE_END = """
import atexit
atexit.register(lambda: os.kill(os.getpid(), stop))
"""
STOPS = [
    # The program, the signal, and a command line with models M and a text T
    *(
        (AT_IMPORT.format(module), "SIGINT", f"build M bytes{quiet}")
        for module in ("typer", "xtok.cli.build", "xtok.building.build")
        for quiet in ("", " --quiet")
    ),
    *(
        (program, stop, line)
        for program, line in (
            (IN_A_THREAD, "doctor M bytes --text T"),
            (COUNTING, "build M bytes --text T --quiet"),
            (WHILE_WRITING, "build M M --output new/map.safetensors --quiet"),
        )
        for stop in ("SIGINT", "SIGTERM")
    ),
]


@pytest.mark.parametrize(("program", "stop", "line"), STOPS)
def test_a_signal_prints_a_line_and_leaves_no_file(
    small: Path, corpus: Path, tmp_path: Path, forks: Forks, program: str, stop: str, line: str
) -> None:
    """SIGTERM also ends a background job, which ignores Ctrl-C."""
    names = {"M": str(small / "small.model"), "T": str(corpus)}
    typed = [names.get(word, word) for word in line.split()]
    result = killed(program, stop, typed, tmp_path, None if "find_spec" in program else forks)
    code, message = {"SIGINT": (130, "interrupted\n"), "SIGTERM": (143, "terminated\n")}[stop]
    assert (result.returncode, result.stdout, result.stderr) == (code, "", message)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_a_signal_while_python_ends_shows_no_traceback(tmp_path: Path, stop: str) -> None:
    result = killed(AT_THE_END, stop, ["--version"], tmp_path)
    assert (result.returncode, result.stderr) == (-getattr(signal, stop), "")
    assert result.stdout.startswith(f"xtok {__version__} (")


# Progress bars


SLOWLY = """
from xtok.cli import console
console.EVERY = 0.01
"""


def on_a_terminal(args: list[str], folder: Path, forks: Forks, columns: int, code: str = "") -> str:
    """Return the stderr of `xtok` on a terminal with this number of columns."""
    terminal, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    with os.fdopen(terminal, "rb", buffering=0) as output, os.fdopen(end, "wb") as stderr:
        command = [str(forks.folder / "python"), "-c", KILLED.format(code=code), "SIGINT", *args]
        result = subprocess.run(
            command, cwd=folder, env=forks.env, stdout=subprocess.PIPE, stderr=stderr, check=True
        )
        assert result.stdout == b"map.safetensors\n"
        return output.read(65536).decode()


@pytest.fixture
def counting(small: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("the cat and the dog\n" * 50)
    return ["build", *two_files(small), "--text", "text.txt", "--output", "map.safetensors"]


@pytest.mark.parametrize("columns", [40, 200])
def test_a_progress_bar_fits_the_terminal_and_is_cleared(
    counting: list[str], tmp_path: Path, forks: Forks, columns: int
) -> None:
    printed = on_a_terminal(counting, tmp_path, forks, columns)
    assert (columns == 200) == bool(re.search(r"\rloading \S+ …", printed))  # a bar without a total
    bars = [part for part in re.split(r"[\r\n]", printed) if "%|" in part]
    assert {bar.split(":")[0] for bar in bars} == {"counting", "counting synthetic texts"}
    assert max(map(len, bars)) == columns - 3  # leaves room for the terminal's ^C
    drawn: dict[str, str] = {}
    for line in printed.replace("\r\n", "\n").split("\n"):
        drawn[line] = ""
        for part in line.split("\r"):
            drawn[line] = part + drawn[line][len(part) :]
    assert not [line for line in drawn.values() if "%|" in line]


def test_a_terminal_without_a_size_has_lines(
    counting: list[str], tmp_path: Path, forks: Forks
) -> None:
    printed = on_a_terminal(counting, tmp_path, forks, 0, SLOWLY)
    assert re.findall(
        r"^counting synthetic texts: \d+%, about \d+ s left\r$", printed, re.MULTILINE
    )
    assert "%|" not in printed


def test_a_line_reports_the_progress_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 6.0, 12.0, 13.0, 40.0])
    monkeypatch.setattr("xtok.cli.console.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with console.progress_bar("a\x1b", 4) as advance:
        for _ in range(4):
            advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "a\\x1b: 50%, about 12 s left", "a\\x1b: 100%, about 0 s left"
    ]  # fmt: skip
    clock = iter([0.0, 12.0, 24.0])
    with console.progress_bar("c", 1000) as advance:
        advance(1)
        advance(9)
    assert capsys.readouterr().err.splitlines() == ["c: 0%", "c: 1%, about 40 min left"]
    monkeypatch.undo()
    with console.progress_bar("loading b") as advance:
        advance(1)
    assert capsys.readouterr().err == ""
