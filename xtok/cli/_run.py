"""What every command does around its one function: quiet, errors, exit codes, the result."""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from xtok.errors import XtokError

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap

Config = TypeVar("Config")
T = TypeVar("T")


def run(app: typer.Typer) -> None:
    """Run the app; an `XtokError` becomes two lines on stderr and exit code 1."""
    gc.set_threshold(50_000)  # vocabularies are many objects that live long: a tenth of the time
    sys.stdout, sys.stderr = (stream or _null() for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character
            stream.reconfigure(errors="backslashreplace")
    try:
        with _one_line_errors():
            try:
                app()
            finally:
                sys.stdout.flush()
    except XtokError as error:
        if os.environ.get("XTOK_DEBUG"):
            raise
        print(f"error: {_line(error.message)}\nhint: {_line(error.hint)}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except SystemExit as done:
        if done.code == INTERRUPTED:  # Typer makes this of an interrupt outside of `command`
            about = done.about if isinstance(done, Interrupted) else ""
            print(f"interrupted: {_line(about)}" if about else "interrupted", file=sys.stderr)  # noqa: T201
        raise


INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


class Interrupted(SystemExit):
    """An interrupt within a command; `about` says what is left of its work, or nothing."""

    def __init__(self, about: str) -> None:
        super().__init__(INTERRUPTED)
        self.about = about


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed, once; a second one interrupts."""
    pressed = threading.Event()

    def press(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed.is_set():  # after the last question
        raise KeyboardInterrupt


options: list[str] = []
"""The options of the command that runs, as `--student-pattern`."""


def hint(error: XtokError) -> str:
    """Return an error's hint, with the running command's options for the parameter it names."""
    name = error.parameter.replace("_", "-")
    setting = [option for option in options if option.endswith(f"-{name}")]
    return error.hint_with(" or ".join(setting) or f"{error.parameter}= in Python")


def leave(code: str | int | None) -> None:
    """End the process without taking its objects apart, a tenth of the time of a `build`.

    What was registered to be done at the end is done, and what was written is flushed, before.
    """
    if isinstance(code, str):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


_kept: list[object] = []


def keep(value: T) -> T:
    """Return a large object, which from now on lives as long as the process."""
    _kept.append(value)
    return value


def _null() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _line(text: str) -> str:
    if text.isprintable():
        return text
    from xtok.vocab.display import printable

    return printable(text)


@contextmanager
def command(quiet: bool) -> Iterator[TextIO]:
    """Enter what every command does: silence where asked for, and one line for what goes wrong.

    A reader of stdout that has seen enough (head, less) ends the block as if all were printed; any
    other failure of the operating system becomes an `XtokError`.

    Yields:
        The stderr of errors, which is never silenced.
    """
    with _one_line_errors():
        try:
            with _quiet_stderr() if quiet else nullcontext(sys.stderr) as stderr:
                yield stderr
        except KeyboardInterrupt as interrupt:
            raise Interrupted(str(interrupt)) from interrupt
        sys.stdout.flush()


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Make an `XtokError` of a failure of the operating system; a closed pipe is none."""
    try:
        yield
    except BrokenPipeError:  # what follows may be a gate, which stays shut
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError as error:
        raise XtokError(
            f"{error.filename or 'the output'}: {error.strerror or error}",
            hint="check the path, its permissions, and the free space",
        ) from error


@contextmanager
def _quiet_stderr() -> Iterator[TextIO]:
    """Silence stderr, that of other libraries' C and Rust code included; yield it as it was."""
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    with open(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace") as saved:
        os.dup2(null, 2)
        try:
            yield saved
        finally:
            sys.stderr.flush()
            saved.flush()
            os.dup2(saved.fileno(), 2)
            os.close(null)


def config(make: Callable[..., Config], **options: Any) -> Config:
    """Make a config of the options; values that do not go together are a usage error."""
    try:
        return make(**options)
    except ValueError as error:
        message = str(error)
        for name in options:
            if message.startswith(name):
                message = f"--{name.replace('_', '-')}{message[len(name) :]}"
        if options.get("scale_trick") and message.startswith("--top-k"):
            message += " (one of them is the scale slot; see --no-scale-trick)"
        raise typer.BadParameter(message) from error


def is_given(context: typer.Context, name: str) -> bool:
    """Tell whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_output(output: str | None) -> None:
    """Check that the result can be written, before anything costs time."""
    from xtok.maps import file as mapfile

    mapfile.check_output(named(output, "map.safetensors"))


def named(output: str | None, name: str) -> Path:
    """Return the output's path; in a folder, and in the current one by default, it has this name.

    A folder is one that exists, ends in a slash, or has no suffix and is not a file.
    """
    if output is None:
        return Path(name)
    path = Path(output)
    is_folder = path.is_dir() or output.endswith(("/", os.sep))
    return path / name if is_folder or not (path.suffix or path.exists()) else path


def folder_of(source: Path) -> str | None:
    """Return the folder of an input, for an output beside it; that of a pipe is the current one."""
    return os.path.join(source.parent, "") if source.is_file() else None


def read_text(text: str | None, file: Path | None) -> bytes:
    """Return the bytes of a text given as an argument, as a file, or on stdin (`-`)."""
    if file is not None:
        return _read(file, "text", "--file")
    if text is None:
        raise typer.BadParameter("give a text (or - for stdin), --file or --chat")
    if text != "-":
        return text.encode("utf-8", "surrogateescape")
    if sys.stdin is None:
        raise XtokError("stdin is closed", hint="pipe the text in, or give a file with --file")
    return sys.stdin.buffer.read()


def read_chat(file: Path) -> dict[str, Any]:
    """Return `messages` and `tools` of a JSON file: a list of messages, or an object of both."""
    try:
        found = json.loads(_read(file, "conversation", "--chat"))
        chat = found if isinstance(found, dict) else {"messages": found}
        if isinstance(chat["messages"], list):
            return {"messages": chat["messages"], "tools": chat.get("tools")}
        problem = "its messages are no list"
    except (ValueError, KeyError, RecursionError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    raise XtokError(
        f"the conversation {file} is not one: {problem}",
        hint='write it as [{"role": "user", "content": "…"}, …], '
        'or {"messages": […], "tools": […]}',
    )


def _read(file: Path, what: str, option: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise XtokError(
            f"the {what} {file} cannot be read: {error.strerror or error}",
            hint=f"give the path of a file with {option}",
        ) from error


def write(
    projection: ProjectionMap, path: Path, *, num_examples: int = 0, strict: bool = False
) -> None:
    """Write the map, report on stderr, and print the map's path on stdout."""
    from xtok import report
    from xtok.inspection import inspect as describe

    if strict:
        from xtok.maps import results as stages

        stages.require_complete(projection)
    keep(projection).save(path)
    examples = describe.example_ids(projection, num_examples)
    with suppress(OSError):  # the map is written, whether or not anybody reads the report
        report.print_reports(projection.reports)
        report.print_examples(projection[i] for i in examples)
    print(path)  # noqa: T201


def default_name(projection: ProjectionMap, stage: str = "") -> str:
    """Return a file name that tells the pair, the stage, and what differs from the defaults."""
    from xtok.maps import names

    stages = [step["stage"] for step in projection.history]
    pinned = "reapply-exact" in stages
    exact = ""
    if stage == "multitoken" and pinned:
        exact = "exact-match"
    elif stage in ("", "sort-cut") and "multitoken" in stages and not pinned:
        exact = "no-exact-match"
    slot = "" if projection.enable_scale_trick else "no-scale-trick"
    ids = projection.student.model_id, projection.teacher.model_id
    words = names.history_words(projection.history)
    return names.default_name(*ids, stage, f"top{projection.top_k}", slot, exact, *words)
