"""Run `xtok` or Python in forks of one process that has imported their libraries.

A command line of the tests takes a tenth of a second in a fork; its imports alone would take one to
three. The fork has the arguments, folder, environment, standard streams and exit code of a separate
process. If a test sets a variable that an import reads, the command runs as a separate process.
Copies of this file, named `xtok` and `python`, are programs for shells: they send their command
lines to the same process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

TIMEOUT = 300  # maximum seconds of a command line
PLAIN = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
AT_IMPORT = "HF_", "NUMBA_", "OMP_", "PYTHON", "RAYON_"
"""Prefixes of the variables that Python or a library reads once, when it is imported."""
IMPORTED = (
    "numba", "torch", "transformers.models.auto.tokenization_auto", "transformers.trainer",
)  # fmt: skip
Programs = dict[int, tuple[int, socket.socket]]
"""The running programs by their descriptors: the process, and the client that waits for it."""
SOCKET = ".socket"  # in the folder of the programs


class Forks:
    """A process that runs programs in forks of itself."""

    def __init__(
        self, env: Mapping[str, str], folder: Path, python: str | Path | None = None
    ) -> None:
        """Start the process; `env` is the environment of every command line.

        `folder` gets the programs, for the `PATH` of a shell. `python` is the interpreter of
        another installation of xtok.
        """
        self.env, self.folder = {**env, **PLAIN}, folder
        self.python = str(python or sys.executable)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / SOCKET))
            listener.listen()
            self._server = subprocess.Popen(
                [self.python, __file__], env=self.env, stdin=listener.fileno()
            )
        for name in ("xtok", "python"):
            program = folder / name
            program.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text()}")
            program.chmod(0o755)

    def run(
        self, args: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None,
        program: str = "xtok",
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command line of `xtok` or `python`."""
        typed, env = [*map(str, args)], {**self.env, **(env or {})}
        if any(name.startswith(AT_IMPORT) and self.env.get(name) != env[name] for name in env):
            command = [self.python, *["-m", "xtok"] * (program == "xtok"), *typed]
            options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT}
            return subprocess.run(command, cwd=cwd, env=env, check=False, **options)
        with (
            open(os.devnull) as stdin,
            tempfile.TemporaryFile("w+") as stdout,
            tempfile.TemporaryFile("w+") as stderr,
        ):
            files = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
            code = _request(self.folder, [program, typed, str(cwd), env], files)
            for file in (stdout, stderr):
                file.seek(0)
            return subprocess.CompletedProcess(typed, code, stdout.read(), stderr.read())

    def stop(self) -> None:
        """End the process."""
        _request(self.folder, [], [0, 1, 2])
        self._server.wait()


def _request(folder: Path, request: Sequence[object], files: list[int]) -> int:
    """Run a program with these standard streams; return its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(folder / SOCKET))
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], files)
        return int(server.recv(16) or 1)


def _serve() -> None:
    """Import the libraries, then run each requested program in a fork."""
    import gc
    import importlib
    import select

    for name in IMPORTED:
        importlib.import_module(name)
    _warm_up()
    gc.freeze()
    listener = socket.socket(fileno=0)
    programs: Programs = {}
    while True:
        watched: list[Any] = [listener, *programs, *(client for _, client in programs.values())]
        ready, *_ = select.select(watched, [], [])
        _finish(programs, ready)
        if listener in ready:
            client, _ = listener.accept()
            data, files, *_ = socket.recv_fds(client, 1 << 16, 3)
            while not data.endswith(b"\n"):
                data += client.recv(1 << 16)
            request = json.loads(data)
            if not request:
                return
            pid = os.fork()
            if not pid:
                _run(files, *request)
            programs[os.pidfd_open(pid)] = pid, client
            for number in files:
                os.close(number)


def _finish(programs: Programs, ready: list[Any]) -> None:
    """Send the exit codes of ended programs; kill programs without a client."""
    import signal

    for descriptor, (pid, client) in [*programs.items()]:
        if descriptor in ready:
            _, status = os.waitpid(pid, 0)
            with suppress(BrokenPipeError), client:
                client.sendall(b"%d" % os.waitstatus_to_exitcode(status))
            os.close(descriptor)
            del programs[descriptor]
        elif client in ready:  # closed, for example because the test has ended its server
            os.kill(pid, signal.SIGKILL)


def _warm_up() -> None:
    """Import the modules of all commands, and load the kernels for counting."""
    import importlib
    import pkgutil

    import numba
    from typer.testing import CliRunner

    import xtok
    from xtok.cli import console, make_app

    for module in pkgutil.walk_packages(xtok.__path__, "xtok."):
        if not module.name.startswith(
            ("xtok.__main__", "xtok.training.trainers", "xtok.teachers.serving", "xtok.training")
        ):
            importlib.import_module(module.name)
    CliRunner().invoke(make_app(["inspect"]), ["inspect", "none"])
    if not numba.config.DISABLE_JIT:
        xtok.build("bytes", "bytes", for_loss="p-kl")  # loads the kernels for counting
    console.EVERY = 3600.0  # no progress lines, however busy the machine


def _run(files: list[int], name: str, args: list[str], cwd: str, env: dict[str, str]) -> NoReturn:
    import atexit
    import runpy
    import signal
    import traceback

    os.chdir(cwd)
    for number, opened in enumerate(files):
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.argv, sys.path[0] = [name, *args], ""
    signal.alarm(TIMEOUT)
    code = 0
    try:
        if name == "xtok":
            runpy.run_module("xtok", run_name="__main__")
        elif args[0] == "-c":
            sys.argv = ["-c", *args[2:]]
            exec(args[1], {"__name__": "__main__"})
        elif args[0] == "-m":
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = args, str(Path(args[0]).resolve().parent)
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does at the end
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # freeing all modules would take longer than a command


if __name__ == "__main__":
    program = Path(sys.argv[0])
    if (program.parent / SOCKET).exists():
        request: list[object] = [program.name, sys.argv[1:], os.getcwd(), dict(os.environ)]
        sys.exit(_request(program.parent, request, [0, 1, 2]) % 256)
    _serve()
