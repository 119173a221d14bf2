"""Convert a function to a command: add options and --quiet, print errors, set exit codes.

An option is a parameter `name: type = option(...)` of the function. If the type of a parameter is a
config dataclass, each field becomes an option, and the function receives the config.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import typer

from xtok._lib.fields import OUTPUT, RARE, OptionDetails, checked_value, option, without_none
from xtok.cli import console
from xtok.cli.nemo_options import MODEL_OPTIONS, is_given, nemo_options, nemo_words
from xtok.cli.stdout import print_result, redirected, reserved_stdout, result_stream
from xtok.errors import XtokError
from xtok.tokenizers.display import to_json
from xtok.tokenizers.table import SIDES

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, like in shells. After SIGTERM, the exit code is 143."""

_QUIET = option(False, "Print only errors on stderr.", flag=True, short="-q", panel=OUTPUT)
_PANELS_AT_THE_END = {OUTPUT: 1, RARE: 2}
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function that Typer calls, with the additional option --quiet.

    The parameters of `function` are options and configs, and optionally `context: typer.Context`.
    """
    types = get_type_hints(function)
    configs = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    options = {option.name: option for option in _read_options(function, types)}

    @functools.wraps(function)
    def run_command(context: typer.Context, **typed: Any) -> None:
        words = nemo_words(context)
        typed_names = {name for name in options if is_given(context, name)}
        try:
            values = {name: option.value(typed[name]) for name, option in options.items()}
            by_name = {n: _config(config, values, typed_names) for n, config in configs.items()}
        except ValueError as error:
            message = words.as_typed(_with_flags(str(error), options))
            raise typer.BadParameter(message) from error
        for config in by_name.values():
            values |= vars(config)
        notes = [
            *words.notes,
            *_preset_notes(options, configs.values(), values, typed_names),
            *_effect_notes(options, typed_names, values),
        ]
        arguments = {**values, **by_name, "context": context}
        with _silence(values["quiet"]):
            console.print_notes(notes)
            try:
                function(**{name: arguments[name] for name in types if name in arguments})
            except XtokError as error:
                error.hint = _hint(error, options, context)
                raise

    context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
    ordered = sorted(options.values(), key=lambda o: _PANELS_AT_THE_END.get(o.panel or "", 0))
    hidden = _nemo_options(function.__name__.replace("_", "-"), options)
    parameters = [context, *(option.parameter for option in (*ordered, *hidden))]
    run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return run_command


def _read_options(function: Callable[..., None], types: Mapping[str, Any]) -> Iterator[Option]:
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, Field):
            yield Option(name, types[name], parameter.default)
        elif is_dataclass(types[name]):
            config: Any = types[name]
            kinds = get_type_hints(config)
            for field in fields(config):
                yield Option(field.name, kinds[field.name], field, config.panel)
    yield Option("quiet", bool, _QUIET)


def _nemo_options(command: str, options: Mapping[str, Option]) -> Iterator[Option]:
    for name, target in nemo_options(command, options):
        kind, parser = bool if target is None else str, None
        if target and target in options:
            kind, parser = options[target].type, options[target].details.parser
        default = False if target is None else None
        yield Option(name, kind, option(default, "", flag=True, hidden=True, parser=parser))
    for name, (side, short) in MODEL_OPTIONS.items():
        if "arguments" in options or (side in options and options[side].details.argument):
            yield Option(name, str | None, option(None, "", short=short, hidden=True))


def full_path(text: str) -> str:
    """Expand `~` in a path or glob, and keep a final slash."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return os.path.expanduser(text)


def read_path(text: str) -> Path:
    """Expand `~` in a path."""
    return Path(full_path(text))


@dataclass(frozen=True)
class Option:
    """An option or argument of a command, with its Python name, type and declaration."""

    name: str
    type: Any
    field: Field[Any]
    config_panel: str | None = None

    @property
    def details(self) -> OptionDetails:
        """The declaration's metadata."""
        details: OptionDetails = self.field.metadata["details"]
        return details

    @property
    def flag(self) -> str:
        """The option's flag, or the argument's name in the help."""
        return self.details.argument or f"--{(self.details.name or self.name).replace('_', '-')}"

    @property
    def panel(self) -> str | None:
        """The section in the help; None for arguments, which have their own section."""
        return None if self.details.argument else self.details.panel or self.config_panel

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter in the signature that Typer reads."""
        container, item = _container_and_item(self.type)
        kind, default = self.type, self.field.default
        if container is tuple:  # written as 1,2,3
            kind, default = str | None, None
        info = self._info(container, item)
        default = inspect.Parameter.empty if default is ... else default
        return inspect.Parameter(
            self.name, _KEYWORD, default=default, annotation=Annotated[kind, info]
        )

    def _info(self, container: Any, item: Any) -> Any:
        details = self.details
        metavar = _METAVARS.get(item if container is list else container)
        words: dict[str, Any] = {
            "metavar": details.argument or details.metavar or metavar,
            "parser": details.parser or (read_path if item is Path else None),
            "autocompletion": details.autocompletion,
        }
        if details.argument:
            return typer.Argument(help=details.help, show_default=False, **words)
        is_switch = container is bool and not details.flag
        flag = f"{self.flag}/--no-{self.flag[2:]}" if is_switch else self.flag
        flags = flag, *filter(None, [details.short])
        has_range = details.min is not None and details.max is not None
        limits = f" From {details.min} to {details.max}." if has_range else ""
        words |= {"rich_help_panel": self.panel, "hidden": details.hidden}
        return typer.Option(*flags, help=details.help + limits, **words)

    def value(self, typed: Any) -> Any:
        """Convert a typed value. Numbers such as 3,1,2 become a sorted tuple.

        Raises:
            ValueError: if the value is out of range.
        """
        container, _ = _container_and_item(self.type)
        value = typed or self.field.default if container in (list, tuple) else typed
        if container is tuple and typed is not None:
            try:
                value = tuple(sorted({int(number) for number in typed.split(",")}))
            except ValueError:
                message = f"{self.flag} {typed} is not a list of numbers such as 0,1,2"
                raise typer.BadParameter(message) from None
        return checked_value(self.name, value, self.type, self.details)

    def as_typed(self, value: Any) -> str:
        """Return the option with a value, as text for the command line."""
        if isinstance(value, bool):
            return self.flag if value else f"--no-{self.flag[2:]}"
        return f"{self.flag} {value}"


_METAVARS: Mapping[Any, str] = {Path: "FILE", int: "N", float: "NUMBER", str: "TEXT"}


def _container_and_item(kind: Any) -> tuple[Any, Any]:
    """Split `list[Path] | None` into `list` and `Path`."""
    kind = without_none(kind)
    return (get_origin(kind), get_args(kind)[0]) if get_args(kind) else (kind, kind)


def _config(config: Any, values: Mapping[str, Any], typed_names: Collection[str]) -> Any:
    """Create a config. With `--for LOSS`, options that the user typed override the preset."""
    names = [f.name for f in fields(config)]
    if values.get("for_loss") is None or not hasattr(config, "for_loss"):
        return config(**{name: values[name] for name in names})
    return config.for_loss(values["for_loss"], **{n: values[n] for n in names if n in typed_names})


def _with_flags(message: str, options: Mapping[str, Option]) -> str:
    for name, named in options.items():
        message = re.sub(rf"^{name}(?=[ ,])|(?<=\(){name}(?=\))", named.flag, message)
    return message


def _preset_notes(
    options: Mapping[str, Option],
    configs: Iterable[Any],
    values: Mapping[str, Any],
    typed_names: Collection[str],
) -> list[str]:
    presets = [f for config in configs if hasattr(config, "for_loss") for f in fields(config)]
    changed = [f.name for f in presets if f.name not in typed_names and values[f.name] != f.default]
    flags = [options[name].as_typed(values[name]) for name in changed]
    return [f"--for {values['for_loss']} sets {' '.join(flags)}"] if flags else []


def _effect_notes(
    options: Mapping[str, Option], typed_names: Collection[str], values: Mapping[str, Any]
) -> list[str]:
    """Return a note for each typed option without effect.

    If a typed option needs another option that was not typed, raise a usage error.
    """
    notes = []
    for typed in (options[name] for name in options if name in typed_names):
        conditions = _conditions(typed.details.needs, options, values)
        if conditions and not any(conditions.values()):
            raise typer.BadParameter(f"{typed.flag} needs {' or '.join(conditions)}")
        useless = _conditions(typed.details.no_effect_with, options, values)
        reasons = [words for words, holds in useless.items() if holds]
        notes += [f"{typed.flag} has no effect with {words}" for words in reasons[:1]]
    return notes


def _conditions(
    conditions: Mapping[str, Any], options: Mapping[str, Option], values: Mapping[str, Any]
) -> dict[str, bool]:
    holds = {}
    for name, value in conditions.items():
        if name in options:
            is_met = bool(values[name]) if value is True else values[name] == value
            holds[options[name].as_typed(value)] = is_met
    return holds


def show(result: Any, table: Callable[[Any], None], *, json: bool) -> None:
    """Print a result on stdout, as a table or as JSON. Closed pipes raise no error."""
    try:
        if json:
            print_result(to_json(result))
        else:
            table(result)
        result_stream().flush()
    except BrokenPipeError:
        _drop_stdout()


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())


def _hint(error: XtokError, options: Mapping[str, Option], context: typer.Context) -> str:
    """Return an error's hint. The options of the error's parameter replace `{option}`."""
    parameter = "output" if error.parameter == "path" else error.parameter
    if parameter == "pair":
        sides = [options[side].flag.strip("[]") for side in SIDES if side in options]
        return error.hint_with(" and ".join(sides or ["STUDENT", "TEACHER"]))
    ending = f"-{parameter.replace('_', '-')}"
    flags = [option.flag for option in options.values() if option.flag.endswith(ending)]
    if parameter in options:
        flags = [options[parameter].flag]
    words = nemo_words(context).as_typed(" or ".join(flags))
    return error.hint_with(words or f"{parameter}= in Python")


def run(app: typer.Typer) -> None:
    """Run the app. An `XtokError` is printed as two lines on stderr, with exit code 1."""
    gc.set_threshold(100_000)  # fewer searches for reference cycles save 8 % of the time
    sys.stdout, sys.stderr = (stream or _null() for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal's encoding may lack a character
            stream.reconfigure(errors="backslashreplace")
    stopped = signal.SIGINT

    def terminate(number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM like Ctrl-C, so that temporary files are removed and counts are saved."""
        nonlocal stopped
        stopped = signal.SIGTERM
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # shells ignore SIGINT in background jobs
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
        console.print_error(error)
        sys.exit(1)
    except SystemExit as done:
        if done.code == INTERRUPTED:  # Typer's exit code for an interrupt outside a command
            word = "interrupted" if stopped == signal.SIGINT else "terminated"
            print(word, file=sys.stderr)  # noqa: T201
            sys.exit(128 + stopped)
        raise


def _null() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


@contextmanager
def _silence(quiet: bool) -> Iterator[None]:
    """Run a command. With `quiet`, print only errors on stderr."""
    with _one_line_errors(), open(os.devnull, "wb") as null:
        try:
            with redirected(sys.stderr, 2, null) if quiet else nullcontext(), reserved_stdout():
                yield
        except KeyboardInterrupt as interrupt:
            raise SystemExit(INTERRUPTED) from interrupt
        finally:
            sys.stdout.flush()


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Convert an `OSError` to an `XtokError`. A closed pipe (head, less) is ignored."""
    try:
        yield
    except BrokenPipeError:
        _drop_stdout()
    except OSError as error:
        raise XtokError(
            f"{error.filename or 'the output'}: {error.strerror or error}",
            hint="check the path, its permissions and the free space",
        ) from error
