"""Options that commands share, and what they stand for: models, maps, outputs, texts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import typer

import xtok
from xtok.cli import console
from xtok.cli.command import expanded
from xtok.cli.stdout import print_path, print_result
from xtok.config import (
    BACK_MAP,
    MAIN,
    MODELS,
    OUTPUT,
    RARE,
    TEXT,
    WAIT,
    Config,
    Loss,
    option,
    with_hyphens,
)
from xtok.errors import OutputError, XtokError
from xtok.maps.map_arguments import bind_map, name_notes
from xtok.tokenizers.pairs import SIDES

if TYPE_CHECKING:
    from xtok.maps.map_arguments import AnyMap
    from xtok.maps.projection_map import ProjectionMap, StageReport
    from xtok.tokenizers import Tokenizer
    from xtok.tokenizers.pairs import Pair

M = TypeVar("M", bound="AnyMap")

_FILES = "plain, .jsonl or .parquet (also .gz or .zst), or a quoted glob. Repeatable."
KINDS = "a repo, folder or file (xtok help models)."


def map_files(incomplete: str) -> list[str]:
    """Return the maps and folders that a shell may complete a word to.

    None without a map, or if a name needs quotes: then the shell completes files itself, which
    quotes names, and sets no space behind a folder.
    """
    paths = sorted(glob(f"{escape(incomplete)}*"))
    names = [f"{path}/" if os.path.isdir(path) else path for path in paths]
    names = [name for name in names if name.endswith((".safetensors", ".pt", "/"))]
    has_map = not all(name.endswith("/") for name in names)
    is_plain = all(re.fullmatch(r"[\w@%+,./-]+", name) for name in names)
    return names if has_map and is_plain else []


def map_option(help: str, default: Any = None, **about: Any) -> Any:
    """Return an option, or argument, for a map or several."""
    return option(default, help, **{"metavar": "MAP", "autocompletion": map_files, **about})


MAP_HELP = "A map: .safetensors, NeMo-RL's .pt, or hf:OWNER/NAME/FILE on the hub."
MAP = map_option(MAP_HELP, ..., argument="MAP")
BACK_MAP_FILE = map_option(
    "Map from the teacher to the student (xtok build TEACHER STUDENT). Default: build one, once.",
    name="map",
    panel=MAIN,
)


def map_to_student(pair: Pair, path: Path | None) -> Path | ProjectionMap:
    """Return the path of a map from teacher to student, or else build this map once and keep it."""
    if path is not None:
        return path
    notes = list[str]()

    def note(text: str) -> None:
        notes.append(text)
        console.print_note(text)

    back, progress = pair.reversed, console.progress_bar
    try:
        made: ProjectionMap = xtok.get_map(back, config=BACK_MAP, progress=progress, note=note)
    except OutputError as error:
        note(f"the map from the teacher to the student is not kept: {error}")
        return xtok.build(back, config=BACK_MAP, progress=progress)
    if not notes:
        note("built the map from the teacher to the student; later runs reuse it")
    return made


def json_option(keys: str) -> Any:
    """Return the option for JSON, with its keys."""
    return option(False, f"Print one JSON object: {keys}.", flag=True, panel=OUTPUT)


JSON = json_option("paths, reports (of each stage: its counts, notes and failures)")
TEXT_FIELD = option(
    "text",
    "Field (JSON lines) or column (Parquet) that holds the text.",
    needs={"text": True},
    panel=TEXT,
)


CHAT_TEMPLATE = option(
    None,
    "Chat template to use instead of the model's own: a Jinja file, or the name of a format.",
    metavar="FILE|NAME",
    panel=MODELS,
)


def text_option(help: str, *, required: bool = False) -> Any:
    """Return an option for files of text; the help ends with what they may be."""
    default: Any = ... if required else []
    return option(default, f"{help}{_FILES}", metavar="FILE", parser=expanded, panel=MAIN)


@dataclass(frozen=True, kw_only=True)
class Widths(Config):
    """The widths of the models' logits, and so of a map."""

    panel = RARE
    student_vocab_size: int | None = option(
        None,
        "Width of the student's logits, instead of that of the map's file or the model's config.",
        min=1,
    )
    teacher_vocab_size: int | None = option(None, "Width of the teacher's logits.", min=1)


PRESERVE_LAST = option(
    None,
    "Whether the last column holds scale slots. Default: as in the file.",
    panel=RARE,
)


@dataclass(frozen=True, kw_only=True)
class MapOptions(Widths):
    """How a map's file is read, where it has no metadata."""

    preserve_last: bool | None = PRESERVE_LAST

    def load(self, path: Path, **more: Any) -> ProjectionMap:
        """Load a map."""
        return xtok.ProjectionMap.load(path, **vars(self), **more)

    def load_any(self, path: Path, **more: Any) -> AnyMap:
        """Load a map of any kind."""
        from xtok.maps.map_arguments import read_map

        return read_map(path, **vars(self), **more)


@dataclass(frozen=True, kw_only=True)
class Loading(Config):
    """How models are loaded."""

    panel = RARE
    trust_remote_code: bool = option(
        False, "Allow a repo's custom tokenizer code to run; a note says when it does.", flag=True
    )

    def tokenizer(self, model: str, vocab_size: int | None = None) -> Tokenizer:
        """Load a tokenizer, and print the notes on how it was loaded."""
        with console.progress_bar(f"loading {model}"):
            tokenizer = xtok.load_tokenizer(
                model, vocab_size=vocab_size, trust_remote_code=self.trust_remote_code
            )
        console.print_notes(tokenizer.notes)
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class Models(Loading):
    """The two models of a pair, and how they are loaded."""

    student: str | None = option(None, f"The student, a map's rows: {KINDS}", argument="STUDENT")
    teacher: str | None = option(None, "The teacher, a map's columns.", argument="TEACHER")

    def names(self) -> dict[str, str]:
        """Return the models that are given, by side."""
        return {side: name for side in SIDES if (name := getattr(self, side)) is not None}

    def both(self) -> tuple[str, str]:
        """Return both models; a missing model is a usage error."""
        if self.student is None or self.teacher is None:
            raise typer.BadParameter("give two models, STUDENT TEACHER")
        return self.student, self.teacher

    def pair(self, widths: Widths | None = None) -> Pair:
        """Load both tokenizers; a model that is not given is a usage error."""
        self.both()
        return xtok.pair(*self.tokenizers(widths).values())

    def tokenizers(self, widths: Widths | None = None) -> dict[str, Any]:
        """Load the tokenizers that are given, by side."""
        return {
            side: self.tokenizer(model, getattr(widths, f"{side}_vocab_size", None))
            for side, model in self.names().items()
        }

    def pair_of(self, path: Path | None, options: MapOptions) -> tuple[Pair, ProjectionMap | None]:
        """Load both tokenizers, and the map to begin with, if any; the pair is as wide as it."""
        self.both()
        if path is None:
            return self.pair(options), None
        return self.with_map(options.load(path), options, name=path)[::-1]

    def with_map(
        self, any_map: M, widths: Widths | None = None, *, name: Path | str = "the map"
    ) -> tuple[M, Pair]:
        """Load the tokenizers of a map's sides that are given, as wide as the map and it as they.

        Returns:
            the map, with the tokens that it lacks, and its pair.
        """
        bound, pair = bind_map(any_map, self.tokenizers(widths), name=str(name))
        console.print_notes(name_notes(pair, any_map))
        return bound, pair


@dataclass(frozen=True, kw_only=True)
class OptionalModels(Models):
    """The models of a map, for a command that also works without them."""

    student: str | None = option(None, f"The map's student: {KINDS}", argument="[STUDENT]")
    teacher: str | None = option(None, "The map's teacher.", argument="[TEACHER]")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Models):
    """The models of a map as options, for a command whose arguments are tokens."""

    student: str | None = option(
        None, f"The map's student: {KINDS}", name="student-model", metavar="MODEL", short="-s",
        panel=MAIN,
    )  # fmt: skip
    teacher: str | None = option(
        None, "The map's teacher.", name="teacher-model", metavar="MODEL", short="-t", panel=MAIN
    )


def check_tokens(tokens: Sequence[str], where: str, ids_of: Callable[[str], Sequence[int]]) -> None:
    """Raise a usage error for a file among the tokens, with the place `where` it goes."""
    for token in tokens:
        if os.path.exists(token) and not ids_of(token):
            raise typer.BadParameter(f"{token} is not a token; {where.format(token)}")


def maps_and_models(arguments: Sequence[str], loading: Loading) -> tuple[list[Path], Models]:
    """Split MAP... STUDENT TEACHER: up to two arguments behind the last map file are the models."""
    end = len(arguments)
    while len(arguments) - end < 2 and end > 1:
        if arguments[end - 1].endswith((".safetensors", ".pt")):
            break
        end -= 1
    models: dict[str, Any] = dict(zip(SIDES, arguments[end:], strict=False))
    maps = [*map(Path, arguments[:end])]
    for path in maps:
        if path.is_dir():
            raise typer.BadParameter(
                f"{path} is a folder, not a map: give MAP... STUDENT TEACHER, and a glob in quotes"
            )
    return maps, Models(trust_remote_code=loading.trust_remote_code, **models)


_MADE_FOR = {
    **{loss: ("map", f"xtok build STUDENT TEACHER --for {loss}") for loss in get_args(Loss)},
    "event-kl": ("event map", "xtok events STUDENT TEACHER"),
    "csd": ("spelling map", "xtok events STUDENT TEACHER --for csd"),
    "topk-kl": ("rows of predictions", "xtok project TOPK STUDENT TEACHER -o OUTPUT.parquet"),
    "alm": ("file", "train with it as it is: it needs the teacher's log-probabilities alone"),
    "same-tokenizer": ("file", "train with it as it is: it needs the same vocabulary alone"),
}
"""What each loss is given, and the command that makes it."""


def read_loss(text: str, known: Any = Loss) -> str:
    """Return the name of one of the `known` losses; an `XtokError` names another's command."""
    losses = get_args(known)
    loss: str = with_hyphens(text)
    if loss in losses:
        return loss
    if loss in _MADE_FOR:
        hint = _MADE_FOR[loss][1]
        raise XtokError(f"{loss} takes no {_MADE_FOR[losses[0]][0]}", hint=hint)
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, losses))}.")


def loss_option(known: Any, default: str | None, help: str) -> Any:
    """Return the option for a loss, one of the `known` that the command makes something for."""
    return option(
        default,
        help,
        name="for",
        metavar="LOSS",
        parser=partial(read_loss, known=known),
        autocompletion=lambda incomplete: [x for x in get_args(known) if x.startswith(incomplete)],
        panel=MAIN,
    )


def output_option(default: str, file: str = ".safetensors, or NeMo-RL's .pt") -> Any:
    """Return the option of where a command writes its file."""
    return option(
        None,
        f"Output: {file}; or a folder. Default: {default}",
        metavar="FILE",
        short="-o",
        parser=expanded,
        panel=MAIN,
    )


def output_path(output: str | None, name: str, beside: Path | None = None) -> Path:
    """Return the path of an output; in a folder, `name` in it.

    A folder is one that exists, ends in a slash, or has no suffix and is not a file. By default it
    is the one of the file that a command refines, unless that is a pipe, else the current one.
    """
    if output is None:
        return Path(name) if beside is None or not beside.is_file() else beside.with_name(name)
    path = Path(output)
    if output == "-":  # means stdout, which `check_output` refuses
        return path
    is_folder = path.is_dir() or output.endswith(("/", os.sep))
    return path / name if is_folder or not (path.suffix or path.exists()) else path


@dataclass(frozen=True, kw_only=True)
class Output(Config):
    """Where a command writes a map."""

    panel = OUTPUT
    output: str | None = output_option(
        "a file in the current folder, named after the pair and the options."
    )
    json: bool = JSON

    def path(self, name: str) -> Path:
        """Return the output's path; see `output_path`."""
        return output_path(self.output, name)

    def check(self) -> None:
        """Check that the map can be written, before anything costs time."""
        from xtok.maps import file

        file.check_output(self.path("map.safetensors"), or_folder=True)

    def write(self, projection: ProjectionMap, name: str) -> None:
        """Write the map, under this name unless another is given, and report it."""
        path = self.path(name)
        projection.save(path)
        print_written(projection.reports, path, json=self.json)

    def write_of_stage(self, projection: ProjectionMap, name: str) -> None:
        """Write a map that NeMo-RL's users may train on, and recommend a better one for that."""
        from xtok.maps.provenance import is_counted

        self.write(projection, name)
        path = self.path(name)
        if path.suffix != ".pt":
            console.print_note(
                f"NeMo-RL reads .pt: xtok convert {path} {path.with_suffix('.pt')}, or --output "
                "NAME.pt"
            )
        if not is_counted(projection):
            console.print_note(
                "to train, xtok events STUDENT TEACHER (event KL) is better; where a trainer takes "
                "projection maps alone, xtok build STUDENT TEACHER --for p-kl"
            )


def note_one_vocabulary(pair: Pair) -> None:
    """Print a note where both models have one vocabulary, which needs no file; it is made."""
    if pair.is_same:
        from xtok.inspection.advice import USE_PLAIN_KL

        console.print_note(USE_PLAIN_KL)


def print_written(reports: Sequence[StageReport], *paths: Path, json: bool) -> None:
    """Report on stderr what stages did, and print the paths of their results on stdout."""
    with suppress(OSError):  # the map is written, whether or not anybody reads the report
        console.print_reports(reports)
    if json:
        print_result(console.to_json({"paths": [*map(str, paths)], "reports": [*reports]}))
    for path in () if json else paths:
        print_path(path)


def print_map(
    any_map: AnyMap, path: Path, reports: Sequence[StageReport], *, json: bool, loss: Any = None
) -> None:
    """Report a map that is written, and of a `.pt` what NeMo-RL's training script takes for it."""
    from xtok.maps.convert import nemo_overrides
    from xtok.maps.file import files_of

    print_written(reports, *files_of(any_map, path), json=json)
    if path.suffix == ".pt":
        console.print_notes(nemo_overrides(any_map, path, loss))


SKIP_EXISTING = option(
    False,
    "Keep an existing output if it is the same map (same tokenizers, options and texts). "
    "Otherwise one process builds it, and others that need the same file wait.",
    flag=True,
    panel=OUTPUT,
)
TIMEOUT = option(
    WAIT,
    "Seconds to wait for another process that builds the same file, before building it here.",
    min=0,
    needs={"skip_existing": True},
    panel=RARE,
)


@dataclass(frozen=True, kw_only=True)
class RefinedMap(Output):
    """The map that a command refines, as an argument or as an option, and where it writes it."""

    map_path: Path | None = map_option(MAP_HELP, argument="MAP")
    initial_projection_path: Path | None = map_option("The same as MAP, as an option.", panel=RARE)
    output: str | None = output_option("a file next to the input, in the same format.")

    def source(self) -> Path:
        """Return the path of the map to refine; none, or two, are a usage error."""
        paths = [p for p in (self.map_path, self.initial_projection_path) if p is not None]
        if len(paths) != 1:
            which = "one map" if paths else "a map"
            raise typer.BadParameter(f"give {which}, as MAP or as --initial-projection-path MAP")
        return paths[0]

    def path(self, name: str) -> Path:
        """Return the output's path, by default next to the map."""
        return output_path(self.output, name, self.source())


@dataclass(frozen=True, kw_only=True)
class StrictOutput(Output):
    """The output of a command that reads tokenizers, which may fail to decode or spell a token."""

    strict: bool = option(
        False,
        "Write nothing, and exit with 1, if a token could not be decoded or spelled.",
        flag=True,
    )

    def write(self, projection: ProjectionMap, name: str) -> None:
        """Write the map, if every token could be decoded and spelled or --strict is not given."""
        from xtok.maps.records import require_complete

        if self.strict:
            require_complete(projection)
        super().write(projection, name)
