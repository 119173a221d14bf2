"""Make a command of a function that takes configs, and run it: options, quiet, errors, exit codes.

A parameter whose type is a dataclass stands for that dataclass's fields. Each becomes an option
with the field's name, type and default, and with the help and range of its metadata (`option` in
`config.py`); the function gets the dataclass made of them. So an option is declared once, and
Python has what the command line has.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TextIO, TypeAlias, Union, get_args, get_origin, get_type_hints

import typer

from xtok.errors import XtokError

Given: TypeAlias = frozenset[str]
"""A parameter of this type gets the names of the options that were typed."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

options: list[str] = []
"""The options of the command that runs, as `--student-pattern`."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function that Typer calls; it adds --quiet to the function's options.

    Besides configs and options, the function may take `given: Given`, `context: typer.Context`,
    and `stderr: TextIO`, which --quiet does not silence.
    """
    own = inspect.signature(function, eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in own.items()}
    configs = {name: hints[name] for name in own if is_dataclass(hints[name])}
    shown = {"context": inspect.Parameter("context", _KEYWORD, annotation=typer.Context)}
    for name, parameter in own.items():
        if name in configs:
            shown |= {f.name: _parameter(f, kind) for f, kind in _typed_fields(configs[name])}
        elif name not in _SUPPLIED:
            shown[name] = parameter.replace(annotation=hints[name], kind=_KEYWORD)
    shown["quiet"] = inspect.Parameter("quiet", _KEYWORD, default=False, annotation=_QUIET)

    @functools.wraps(function)
    def run_command(context: typer.Context, *, quiet: bool, **values: Any) -> None:
        given = frozenset(name for name in values if _is_given(context, name))
        for name, config in configs.items():
            own_values = {
                f.name: _value(f, kind, values.pop(f.name)) for f, kind in _typed_fields(config)
            }
            values[name] = _config(config, own_values, given, values)
        with _silence(quiet) as stderr:
            supplied = {"context": context, "given": given, "stderr": stderr}
            function(**values, **{name: v for name, v in supplied.items() if name in own})

    run_command.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    run_command.__annotations__ = {name: p.annotation for name, p in shown.items()}
    return run_command


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_SUPPLIED = ("context", "given", "stderr")
_QUIET = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel="Output"),
]


def _typed_fields(config: type) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(config, include_extras=True)
    return [(f, hints[f.name]) for f in fields(config)]


def _parameter(field: Field[Any], kind: Any) -> inspect.Parameter:
    """Return the parameter that Typer reads an option, or argument, from."""
    about: Mapping[str, Any] = field.metadata
    shared = {key: about[key] for key in ("metavar", "parser", "hidden") if key in about}
    default = field.default
    if _list_item(kind) is not None:  # written as 1,2,3
        kind, default = str | None, None
    if about.get("argument"):
        info: Any = typer.Argument(help=about["help"], show_default=False, **shared)
    else:
        flag = "--" + about.get("name", field.name.replace("_", "-"))
        if _plain(kind) is bool and not about.get("flag"):
            flag = f"{flag}/--no-{flag[2:]}"
        if kind is int or kind == (int | None):
            shared.setdefault("metavar", "N")
        info = typer.Option(
            *(flag, *filter(None, [about.get("short")])),
            help=_help(about),
            rich_help_panel=about.get("panel", "Making the map"),
            **shared,
        )
    return inspect.Parameter(
        field.name, _KEYWORD, default=default, annotation=Annotated[kind, info]
    )


def _help(about: Mapping[str, Any]) -> str:
    """Return the help of an option; a range with two ends stands in it."""
    text: str = about["help"]
    return (
        f"{text} From {about['min']} to {about['max']}." if {"min", "max"} <= about.keys() else text
    )


def _plain(kind: Any) -> Any:
    """Return a type without its `None`."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    [plain] = [k for k in get_args(kind) if k is not NoneType]
    return plain


def _list_item(kind: Any) -> Any:
    """Return the type of the items of a `tuple[…, ...]`, else None."""
    plain = _plain(kind)
    return get_args(plain)[0] if get_origin(plain) is tuple else None


def _value(field: Field[Any], kind: Any, typed: Any) -> Any:
    """Return what was typed for a field: ids, a set, and numbers are written as 1,2,3."""
    item = _list_item(kind)
    if item is None:
        return typed
    if typed is None:
        return field.default
    try:
        numbers = [item(number) for number in typed.split(",")]
    except ValueError:
        flag, example = f"--{field.name.replace('_', '-')}", "0,1,2" if item is int else "0.7,0.3"
        raise typer.BadParameter(f"{flag} {typed} is not a list such as {example}") from None
    return tuple(sorted(set(numbers)) if item is int else numbers)


def _config(
    make: Any, own_values: Mapping[str, Any], given: Given, others: Mapping[str, Any]
) -> Any:
    """Make a config; values that do not go together are a usage error.

    With `--for LOSS`, a config that has presets for losses takes only what was given.
    """
    if others.get("for_loss") is not None and hasattr(make, "for_loss"):
        make = functools.partial(make.for_loss, others["for_loss"])
        own_values = {name: value for name, value in own_values.items() if name in given}
    try:
        return make(**own_values)
    except ValueError as error:
        raise typer.BadParameter(as_options(str(error), own_values)) from error


def as_options(text: str, names: Iterable[str]) -> str:
    """Return a message with the options in the place of the fields that it names."""
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        text = f"{flag}{text[len(name) :]}" if text.startswith((f"{name} ", f"{name},")) else text
        text = text.replace(f"({name})", f"({flag})")
    return text


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def show(result: Any, table: Callable[[Any], None], *, json: bool) -> None:
    """Print a result on stdout, as a table or as JSON; a reader that has seen enough may leave."""
    from xtok import report

    try:
        if json:
            print(report.to_json(result))  # noqa: T201
        else:
            table(result)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def hint(error: XtokError) -> str:
    """Return an error's hint, with the running command's options for the parameter it names."""
    name = error.parameter.replace("_", "-")
    setting = [option for option in options if option == f"--{name}" or option.endswith(f"-{name}")]
    return error.hint_with(" or ".join(setting) or f"{error.parameter}= in Python")


def run(app: typer.Typer) -> None:
    """Run the app; an `XtokError` becomes two lines on stderr and exit code 1."""
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
        if done.code == INTERRUPTED:  # Typer makes this of an interrupt outside of a command
            about = done.about if isinstance(done, Interrupted) else ""
            print(f"interrupted: {_line(about)}" if about else "interrupted", file=sys.stderr)  # noqa: T201
        raise


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


def _null() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _line(text: str) -> str:
    if text.isprintable():
        return text
    from xtok.vocab.display import printable

    return printable(text)


@contextmanager
def _silence(quiet: bool) -> Iterator[TextIO]:
    """Run a command, silent where asked for; yield the stderr of errors, which never is."""
    with _one_line_errors():
        try:
            with _quiet_stderr() if quiet else nullcontext(sys.stderr) as stderr:
                yield stderr
        except KeyboardInterrupt as interrupt:
            raise Interrupted(str(interrupt)) from interrupt
        finally:
            sys.stdout.flush()


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Make an `XtokError` of a failure of the operating system; a closed pipe is none.

    A reader of stdout that has seen enough (head, less) ends the block as if all were printed.
    """
    try:
        yield
    except BrokenPipeError:
        _drop_stdout()
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
