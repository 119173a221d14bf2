"""Make a command of a function, and run it: options, quiet, errors, exit codes.

An option stands in the function's signature, as `name: type = option(...)`, or in a config: a
parameter whose type is a dataclass stands for that dataclass's fields, and gets it made of them.
So an option is declared once, and Python has what the command line has.
"""

from __future__ import annotations

import functools
import gc
import inspect
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import typer

from xtok.cli import console
from xtok.cli.nemo_options import is_given, nemo_options, nemo_words
from xtok.cli.stdout import print_result, reserved_stdout, result_stream
from xtok.config import OUTPUT, RARE, OptionDetails, check_value, option, without_none
from xtok.errors import XtokError

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 + SIGINT. After SIGTERM it is 143."""

_QUIET = option(False, "Print only errors on stderr.", flag=True, short="-q", panel=OUTPUT)
_PANELS_AT_THE_END = {OUTPUT: 1, RARE: 2}
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function that Typer calls; it adds --quiet to the function's options.

    Besides options and configs, the function may take `context: typer.Context` and
    `stderr: TextIO`, which --quiet does not silence.
    """
    arguments, types = inspect.signature(function).parameters, get_type_hints(function)
    configs = {name: types[name] for name in arguments if is_dataclass(types[name])}
    options: dict[str, Option] = {}
    for name, parameter in arguments.items():
        if name in configs:
            config = configs[name]
            for field in fields(config):
                kind = get_type_hints(config)[field.name]
                options[field.name] = Option(field.name, kind, field, config.panel)
        elif isinstance(parameter.default, Field):
            options[name] = Option(name, types[name], parameter.default)
    options["quiet"] = Option("quiet", bool, _QUIET)
    theirs = _of_nemo(function.__name__.replace("_", "-"), options)

    @functools.wraps(function)
    def run_command(context: typer.Context, **typed: Any) -> None:
        given = {name for name in options if is_given(context, name)}
        try:
            values = {name: one.value(typed[name]) for name, one in options.items()}
            of_configs = {n: _config(config, values, given) for n, config in configs.items()}
        except ValueError as error:
            message = nemo_words(context).as_typed(_with_flags(str(error), options))
            raise typer.BadParameter(message) from error
        for config in of_configs.values():
            values |= vars(config)
        of_presets = [c for c in configs.values() if hasattr(c, "for_loss")]
        preset = {field.name for config in of_presets for field in fields(config)}
        notes = _remarks(options, given, values, preset - given)
        with _silence(values["quiet"]) as stderr:
            console.print_notes([*nemo_words(context).notes, *notes])
            values |= {**of_configs, "context": context, "stderr": stderr}
            try:
                function(**{name: values[name] for name in arguments})
            except XtokError as error:
                error.hint = _hint(error, options, context)
                raise

    context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
    shown = sorted(options.values(), key=lambda one: _PANELS_AT_THE_END.get(one.panel or "", 0))
    parameters = [context, *(one.parameter for one in (*shown, *theirs))]
    run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return run_command


def _of_nemo(command: str, options: Mapping[str, Option]) -> Iterator[Option]:
    """Yield NeMo-RL's options that a command understands."""
    for name, target in nemo_options(command, options):
        kind, parser = bool if target is None else str, None
        if target and target in options:
            kind, parser = options[target].type, options[target].details.parser
        default = False if target is None else None
        yield Option(name, kind, option(default, "", flag=True, hidden=True, parser=parser))


def expanded(text: str) -> str:
    """Return a path or glob with its `~` expanded; a slash at its end stays."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return os.path.expanduser(text)


def read_path(text: str) -> Path:
    """Return a path with its `~` expanded."""
    return Path(expanded(text))


@dataclass(frozen=True)
class Option:
    """An option, or argument, of a command: its name and type in Python, and what declares it."""

    name: str
    type: Any
    field: Field[Any]
    panel_of_config: str | None = None

    @property
    def details(self) -> OptionDetails:
        """What is known of it besides."""
        details: OptionDetails = self.field.metadata["details"]
        return details

    @property
    def flag(self) -> str:
        """The option as it is typed; of an argument, its name in the help."""
        return self.details.argument or f"--{(self.details.name or self.name).replace('_', '-')}"

    @property
    def panel(self) -> str | None:
        """The part of the help that it stands in; arguments have their own."""
        return None if self.details.argument else self.details.panel or self.panel_of_config

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter that Typer reads the option from."""
        details, kind, default = self.details, self.type, self.field.default
        plain, item = _plain(kind)
        if plain is tuple:  # written as 1,2,3
            kind, default = str | None, None
        metavar = _METAVARS.get(item if plain is list else plain)
        words: dict[str, Any] = {
            "metavar": details.argument or details.metavar or metavar,
            "parser": details.parser or (read_path if item is Path else None),
            "autocompletion": details.autocompletion,
        }
        if details.argument:
            info: Any = typer.Argument(help=details.help, show_default=False, **words)
        else:
            is_switch = plain is bool and not details.flag
            flag = f"{self.flag}/--no-{self.flag[2:]}" if is_switch else self.flag
            flags = flag, *filter(None, [details.short])
            words |= {"rich_help_panel": self.panel, "hidden": details.hidden}
            has_ends = details.min is not None and details.max is not None
            ends = f" From {details.min} to {details.max}." if has_ends else ""
            info = typer.Option(*flags, help=details.help + ends, **words)
        default = inspect.Parameter.empty if default is ... else default
        return inspect.Parameter(
            self.name, _KEYWORD, default=default, annotation=Annotated[kind, info]
        )

    def value(self, typed: Any) -> Any:
        """Return what was typed; numbers written as 1,2,3 are a tuple, in order.

        Raises:
            ValueError: if it is out of the option's range.
        """
        plain, _ = _plain(self.type)
        value = typed or self.field.default if plain in (list, tuple) else typed
        if plain is tuple and typed is not None:
            try:
                value = tuple(sorted({int(number) for number in typed.split(",")}))
            except ValueError:
                message = f"{self.flag} {typed} is not a list such as 0,1,2"
                raise typer.BadParameter(message) from None
        check_value(self.name, value, self.type, self.details)
        return value

    def as_typed(self, value: Any) -> str:
        """Return the option with a value, as one would type it."""
        if isinstance(value, bool):
            return self.flag if value else f"--no-{self.flag[2:]}"
        return f"{self.flag} {value}"


_METAVARS: Mapping[Any, str] = {Path: "FILE", int: "N", float: "NUMBER", str: "TEXT"}


def _plain(kind: Any) -> tuple[Any, Any]:
    """Return a type without `None` and without its items, and the type of the items."""
    kind = without_none(kind)
    return (get_origin(kind), get_args(kind)[0]) if get_args(kind) else (kind, kind)


def _config(config: Any, values: Mapping[str, Any], given: Collection[str]) -> Any:
    """Make a config; with `--for LOSS`, one that has presets takes only what was given."""
    names = [f.name for f in fields(config)]
    if values.get("for_loss") is None or not hasattr(config, "for_loss"):
        return config(**{name: values[name] for name in names})
    return config.for_loss(values["for_loss"], **{n: values[n] for n in names if n in given})


def _with_flags(message: str, options: Mapping[str, Option]) -> str:
    """Return a message with the options in the place of the fields that it names."""
    for name, named in options.items():
        message = re.sub(rf"^{name}(?=[ ,])|(?<=\(){name}(?=\))", named.flag, message)
    return message


def _remarks(
    options: Mapping[str, Option],
    given: Collection[str],
    values: Mapping[str, Any],
    preset: Collection[str],
) -> list[str]:
    """Return notes on what a preset chose, and on options that were given and have no effect.

    Raises:
        typer.BadParameter: for one that goes with another which was not given.
    """
    chosen = [
        one.as_typed(values[name])
        for name, one in options.items()
        if name in preset and values[name] != one.field.default
    ]
    notes = [f"--for {values['for_loss']} chose {' '.join(chosen)}"] if chosen else []
    for typed in (options[name] for name in options if name in given):
        needed = _conditions(typed.details.needs, options, values)
        if needed and not any(needed.values()):
            raise typer.BadParameter(f"{typed.flag} needs {' or '.join(needed)}")
        useless = _conditions(typed.details.no_effect_with, options, values)
        reasons = [words for words, holds in useless.items() if holds]
        notes += [f"{typed.flag} has no effect with {words}" for words in reasons[:1]]
    return notes


def _conditions(
    conditions: Mapping[str, Any], options: Mapping[str, Option], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return conditions on the command's options, as one would type them, and whether they hold."""
    return {
        options[name].as_typed(value): bool(values[name])
        if value is True
        else values[name] == value
        for name, value in conditions.items()
        if name in options
    }


def show(result: Any, table: Callable[[Any], None], *, json: bool) -> None:
    """Print a result on stdout, as a table or as JSON; a closed pipe is not an error."""
    try:
        if json:
            print_result(console.to_json(result))
        else:
            table(result)
        result_stream().flush()
    except BrokenPipeError:
        _drop_stdout()


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())


def _hint(error: XtokError, options: Mapping[str, Option], context: typer.Context) -> str:
    """Return an error's hint, with the running command's options for the parameter it names."""
    if error.parameter in options and not options[error.parameter].details.hidden:
        return error.hint_with(nemo_words(context).as_typed(options[error.parameter].flag))
    name = error.parameter.replace("_", "-")
    names = ("student-model", "teacher-model") if name == "pair" else (name,)
    shown = [one for one in context.command.params if not getattr(one, "hidden", False)]
    flags = [flag for parameter in shown for flag in parameter.opts]
    setting = [
        flag for flag in flags if flag.removeprefix("--") in names or flag.endswith(f"-{name}")
    ]
    setting = [nemo_words(context).as_typed(flag) for flag in setting]
    joined = (" or " if len(names) == 1 else " and ").join(setting)
    return error.hint_with(joined or f"{error.parameter}= in Python")


def run(app: typer.Typer) -> None:
    """Run the app; an `XtokError` becomes two lines on stderr and exit code 1."""
    gc.set_threshold(100_000)  # a vocabulary is many lists, none in a circle: 8 % of a command
    sys.stdout, sys.stderr = (stream or _null() for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character
            stream.reconfigure(errors="backslashreplace")
    stopped = signal.SIGINT

    def terminate(number: int, frame: FrameType | None) -> None:
        """End as Ctrl-C does: clean up, and save counts."""
        nonlocal stopped
        stopped = signal.SIGTERM
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # ignored, as a shell's background jobs have it
            raise KeyboardInterrupt
        interrupt(number, frame)

    signal.signal(signal.SIGTERM, terminate)
    try:
        with _one_line_errors():
            try:
                app(prog_name="xtok")
            finally:
                sys.stdout.flush()
    except XtokError as error:
        if os.environ.get("XTOK_DEBUG"):
            raise
        console.print_error(error.message, error.hint, sys.stderr)
        sys.exit(1)
    except SystemExit as done:
        if done.code == INTERRUPTED:  # Typer makes this of an interrupt outside of a command
            word = "interrupted" if stopped == signal.SIGINT else "terminated"
            print(word, file=sys.stderr)  # noqa: T201
            sys.exit(128 + stopped)
        raise


def _null() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


@contextmanager
def _silence(quiet: bool) -> Iterator[TextIO]:
    """Run a command, silent where asked for; yield the stderr of errors, which never is."""
    with _one_line_errors():
        try:
            with (
                _quiet_stderr() if quiet else nullcontext(sys.stderr) as stderr,
                reserved_stdout(),
            ):
                yield stderr
        except KeyboardInterrupt as interrupt:
            raise SystemExit(INTERRUPTED) from interrupt
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
