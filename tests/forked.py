"""Run `xtok` in forks of one process that has imported what its commands import.

So a command line of the tests takes a tenth of a second, not the one to three of its imports. All
else is as in a process of its own: arguments, folder, standard streams, exit code. The process
reads a request a line, as JSON, and answers with the exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

TIMEOUT = 300  # seconds that a command line may take
IMPORTED = "numba", "torch", "transformers.models.auto.tokenization_auto"


class Forks:
    """A process that runs command lines in forks of itself."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start it; `env` is the environment of every command line."""
        self.env = env
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=-1, stdout=-1, text=True
        )

    def run(self, args: list[str], cwd: Path, streams: Path) -> subprocess.CompletedProcess[str]:
        """Run a command line; what it prints goes to files in the folder `streams`."""
        out, err = streams / "stdout", streams / "stderr"
        request = json.dumps([args, str(cwd), str(out), str(err)])
        print(request, file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())  # type: ignore[union-attr]
        return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())

    def stop(self) -> None:
        """End the process."""
        self._server.communicate()


def _serve() -> None:
    """Answer requests."""
    from xtok import report
    from xtok.cli import make_app

    report.EVERY = 3600.0  # no lines on how far a command is, however busy the machine

    make_app()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _run(*json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _run(args: list[str], cwd: str, out: str, err: str) -> NoReturn:
    os.chdir(cwd)
    writing = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
    for number, path in enumerate((os.devnull, out, err)):
        opened = os.open(path, writing if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.argv = ["xtok", *args]
    signal.alarm(TIMEOUT)
    code = 0
    try:
        runpy.run_module("xtok", run_name="__main__")
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does at the end
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # to free all modules takes longer than a command


if __name__ == "__main__":
    _serve()
