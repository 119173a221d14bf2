"""Options that several commands share: models, maps, outputs and texts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import Any, TypeVar, get_args

import typer

import xtok
from xtok._lib.fields import MAIN, MODELS, OUTPUT, RARE, TEXT, Config, option
from xtok.cli import console
from xtok.cli.command import full_path
from xtok.cli.stdout import print_path, print_result
from xtok.config import BACK_MAP, DEFAULT_TIMEOUT
from xtok.errors import OutputError, XtokError
from xtok.loss_names import LOSS_INFO, MAP_NAMES, BuildLoss, with_hyphens
from xtok.maps import file as mapfile
from xtok.maps.map_arguments import AnyMap, bind_map, name_notes, read_map
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import StageReport
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import to_json
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES, TokenTable

M = TypeVar("M", bound="AnyMap")

_FILES = "plain text, .jsonl or .parquet (also .gz or .zst), or a quoted glob. Repeatable."
MODEL = "a repo, folder or file (xtok help models)."


def map_files(incomplete: str) -> list[str]:
    """Return map files and folders for shell completion.

    If there is no map, or a name needs quotes, return nothing, so that the shell completes files.
    """
    paths = sorted(glob(f"{escape(incomplete)}*"))
    names = [f"{path}/" if os.path.isdir(path) else path for path in paths]
    names = [name for name in names if name.endswith((".safetensors", ".pt", "/"))]
    has_map = not all(name.endswith("/") for name in names)
    is_plain = all(re.fullmatch(r"[\w@%+,./-]+", name) for name in names)
    return names if has_map and is_plain else []


def map_option(help: str, default: Any = None, **extra: Any) -> Any:
    """Return an option or argument for one or more maps."""
    return option(default, help, **{"metavar": "MAP", "autocompletion": map_files, **extra})


MAP_HELP = "A map: .safetensors, NeMo-RL's .pt, or hf:OWNER/NAME/FILE on the hub."
MAP = map_option(MAP_HELP, ..., argument="MAP")
BACK_MAP_FILE = map_option(
    "Map from the teacher to the student (xtok build TEACHER STUDENT). Default: xtok builds "
    "and caches this map.",
    name="map",
    panel=MAIN,
)


def get_back_map(pair: Pair, path: Path | None) -> Path | ProjectionMap:
    """Return the map from the teacher to the student: `path`, or the default map."""
    if path is not None:
        return path
    notes = list[str]()

    def note(text: str) -> None:
        notes.append(text)
        console.print_note(text)

    back, progress = pair.reversed, console.progress_bar
    try:
        back_map: ProjectionMap = xtok.get_map(back, config=BACK_MAP, progress=progress, note=note)
    except OutputError as error:
        note(f"the map from the teacher to the student is not cached: {error}")
        return xtok.build(back, config=BACK_MAP, progress=progress)
    if not notes:
        note("built the map from the teacher to the student; later runs reuse the map")
    return back_map


def json_option(keys: str) -> Any:
    """Return the option --json, with the keys of its output in the help."""
    return option(False, f"Print one JSON object: {keys}.", flag=True, panel=OUTPUT)


JSON = json_option("paths, reports (counts, notes and failures of each stage)")
TEXT_FIELD = option(
    "text",
    "Field (JSON lines) or column (Parquet) that contains the text.",
    needs={"text": True},
    panel=TEXT,
)


CHAT_TEMPLATE = option(
    None,
    "Chat template to use instead of the model's own: a Jinja file, or the name of a format.",
    metavar="FILE|NAME",
    panel=MODELS,
)


def text_option(help: str, *, required: bool = False, **extra: Any) -> Any:
    """Return an option for text files. The formats are added to the help."""
    default: Any = ... if required else []
    return option(default, f"{help}{_FILES}", metavar="FILE", parser=full_path, panel=MAIN, **extra)


@dataclass(frozen=True, kw_only=True)
class Widths(Config):
    """Widths of the models' logits, which are also the numbers of rows and columns of a map."""

    panel = RARE
    student_vocab_size: int | None = option(
        None, "Width of the student's logits. Overrides the map file and the model's config.", min=1
    )
    teacher_vocab_size: int | None = option(
        None, "Width of the teacher's logits. Overrides the map file and the model's config.", min=1
    )


PRESERVE_LAST = option(
    None,
    "Whether the last column contains scale slots. Default: as recorded in the file.",
    panel=RARE,
)


@dataclass(frozen=True, kw_only=True)
class MapOptions(Widths):
    """Options for map files that lack metadata."""

    preserve_last: bool | None = PRESERVE_LAST

    def load(self, path: Path) -> ProjectionMap:
        """Load a projection map."""
        return xtok.ProjectionMap.load(path, **vars(self))

    def load_any(self, path: Path, *, normalize: bool = False) -> AnyMap:
        """Load a map of any kind."""
        return read_map(path, **vars(self), normalize=normalize)


@dataclass(frozen=True, kw_only=True)
class Loading(Config):
    """Options for loading models."""

    panel = RARE
    trust_remote_code: bool = option(
        False, "Allow custom tokenizer code from the repo; a note reports each use.", flag=True
    )

    def tokenizer(self, model: str, vocab_size: int | None = None) -> Tokenizer:
        """Load a tokenizer and print its notes."""
        with console.progress_bar(f"loading {model}"):
            tokenizer = xtok.load_tokenizer(
                model, vocab_size=vocab_size, trust_remote_code=self.trust_remote_code
            )
        console.print_notes(tokenizer.notes)
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class Models(Loading):
    """The two models of a pair."""

    student: str | None = option(
        None, f"The student (rows of the map): {MODEL}", argument="STUDENT"
    )
    teacher: str | None = option(None, "The teacher (columns of the map).", argument="TEACHER")

    def names(self) -> dict[str, Any]:
        """Return the names of the given models by side (`student`, `teacher`)."""
        return {side: name for side in SIDES if (name := getattr(self, side)) is not None}

    def both(self) -> tuple[str, str]:
        """Return the names of student and teacher. A missing model is a usage error."""
        if self.student is None or self.teacher is None:
            raise typer.BadParameter("name two models: STUDENT TEACHER")
        return self.student, self.teacher

    def pair(self, widths: Widths | None = None) -> Pair:
        """Load both tokenizers. A missing model is a usage error."""
        self.both()
        return xtok.load_pair(*self.tokenizers(widths).values())

    def tokenizers(self, widths: Widths | None = None) -> dict[str, Any]:
        """Load the tokenizers of the given models, by side."""
        return {
            side: self.tokenizer(model, getattr(widths, f"{side}_vocab_size", None))
            for side, model in self.names().items()
        }

    def with_initial(
        self, path: Path | None, options: MapOptions
    ) -> tuple[ProjectionMap | None, Pair]:
        """Load both tokenizers, and a map if given, with the same widths for all three."""
        if path is None:
            return None, self.pair(options)
        self.both()
        return self.with_map(options.load(path), options, name=path)

    def with_map(
        self, any_map: M, widths: Widths | None = None, *, name: Path | str = "the map"
    ) -> tuple[M, Pair]:
        """Load the tokenizers of the given models, with the map's widths.

        Returns:
            the map and the pair. If the map contains no tokens, the tokenizers' tokens are added.
        """
        bound, pair = bind_map(any_map, self.tokenizers(widths), name=str(name))
        console.print_notes(name_notes(pair, any_map))
        return bound, pair


@dataclass(frozen=True, kw_only=True)
class OptionalModels(Models):
    """The models of a map as optional arguments."""

    student: str | None = option(None, f"The map's student: {MODEL}", argument="[STUDENT]")
    teacher: str | None = option(None, "The map's teacher.", argument="[TEACHER]")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Models):
    """The models of a map as options, for commands with other arguments."""

    student: str | None = option(
        None, f"The map's student: {MODEL}", name="student-model", metavar="MODEL", short="-s",
        panel=MAIN,
    )  # fmt: skip
    teacher: str | None = option(
        None, "The map's teacher.", name="teacher-model", metavar="MODEL", short="-t", panel=MAIN
    )


def check_tokens(tokens: Sequence[str], hint: str, table: TokenTable | None) -> None:
    """Raise a usage error if a token is an existing file. `hint` names the option for files."""
    for token in tokens:
        if os.path.exists(token) and not (table and table.ids_of(token)):
            raise typer.BadParameter(f"{token} is not a token; {hint.format(token)}")


def maps_and_models(arguments: Sequence[str], loading: Loading) -> tuple[list[Path], Models]:
    """Split MAP... STUDENT TEACHER: up to two arguments after the last map are models."""
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
                f"{path} is a folder, not a map: pass MAP... STUDENT TEACHER, and quote globs"
            )
    return maps, Models(trust_remote_code=loading.trust_remote_code, **models)


def read_loss(text: str, choices: Any = BuildLoss) -> Any:
    """Return the name of a loss. If the loss needs a different kind of map, raise an error."""
    losses = get_args(choices)
    loss = with_hyphens(text)
    if loss in losses:
        return loss
    if loss in LOSS_INFO:
        kind: Any = LOSS_INFO[losses[0]].map
        raise XtokError(f"{loss} does not use {MAP_NAMES[kind]}", hint=LOSS_INFO[loss].hint)
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, losses))}.")


def loss_option(choices: Any, default: str | None, help: str) -> Any:
    """Return the option --for with the losses of a command."""
    return option(
        default,
        help,
        name="for",
        metavar="LOSS",
        parser=partial(read_loss, choices=choices),
        autocompletion=lambda incomplete: [
            x for x in get_args(choices) if x.startswith(incomplete)
        ],
        panel=MAIN,
    )


def output_option(default: str, file: str = ".safetensors, or NeMo-RL's .pt") -> Any:
    """Return the option --output."""
    return option(
        None,
        f"Output: {file}; or a folder. Default: {default}",
        metavar="FILE",
        short="-o",
        parser=full_path,
        panel=MAIN,
    )


def output_path(output: str | None, name: str, refined: Path | None = None) -> Path:
    """Return the path of the output file. If `output` is a folder, the file is called `name`.

    A path that does not exist is a folder if it ends in a slash or has no suffix. If `output` is
    None, the file is written next to the input `refined`, or in the current folder.
    """
    if output is None:
        return Path(name) if refined is None or not refined.is_file() else refined.with_name(name)
    path = Path(output)
    if output == "-":  # stdout, which `check_map_output` rejects
        return path
    is_folder = path.is_dir() or output.endswith(("/", os.sep))
    return path / name if is_folder or not (path.suffix or path.exists()) else path


def is_named(output: str | None, path: Path) -> bool:
    """Whether the user named the output file. If so, an existing file may be replaced."""
    return output is not None and Path(output) == path


@dataclass(frozen=True, kw_only=True)
class Output(Config):
    """The output option of a command that writes a map."""

    panel = OUTPUT
    output: str | None = output_option(
        "a file in the current folder, named after the pair and the options."
    )
    json: bool = JSON

    def path(self, name: str) -> Path:
        """Return the path of the output; see `output_path`."""
        return output_path(self.output, name)

    def check(self) -> None:
        """Check early that the map can be written."""
        mapfile.check_map_output(self.path("map.safetensors"), or_folder=True)

    def write(self, projection: ProjectionMap, name: str) -> Path:
        """Write the map to the output file (default: `name`), and return the path."""
        path = self.path(name)
        projection.save(path, overwrite=is_named(self.output, path))
        print_written(projection.reports, path, json=self.json)
        return path

    def write_stage(self, projection: ProjectionMap, name: str) -> None:
        """Write the map of a stage, and print recommendations for training."""
        from xtok.maps.suitability import is_counted

        path = self.write(projection, name)
        if path.suffix != ".pt":
            command = f"xtok convert {path} {path.with_suffix('.pt')}"
            console.print_note(f"NeMo-RL reads only .pt: run {command}, or use --output NAME.pt")
        if not is_counted(projection):
            console.print_note(
                "for training, use xtok events STUDENT TEACHER (event KL), or xtok build STUDENT "
                "TEACHER --for p-kl if the trainer supports only projection maps"
            )


def note_one_vocabulary(pair: Pair) -> None:
    """Print a note if student and teacher have the same vocabulary."""
    if pair.is_same:
        from xtok.inspection.advice import USE_PLAIN_KL

        console.print_note(USE_PLAIN_KL)


def print_written(reports: Sequence[StageReport], *paths: Path, json: bool) -> None:
    """Print reports on stderr, and the paths of the written files on stdout."""
    console.print_reports(reports)
    if json:
        print_result(to_json({"paths": [*map(str, paths)], "reports": [*reports]}))
    for path in () if json else paths:
        print_path(path)


def print_map(any_map: AnyMap, path: Path, *, json: bool, loss: Any = None) -> None:
    """Report a written map. For a `.pt` file, also print NeMo-RL's configuration."""
    from xtok.maps.convert import nemo_overrides

    print_written(any_map.reports, *any_map.files(path), json=json)
    if path.suffix == ".pt":
        console.print_notes(nemo_overrides(any_map, path, loss))


@dataclass(frozen=True, kw_only=True)
class ExistingMap(Config):
    """Options for an output that already exists."""

    skip_existing: bool = option(
        False,
        "Keep an existing output that has the same tokenizers, options and texts. Otherwise, one "
        "process builds the output, and other processes wait.",
        flag=True,
        panel=OUTPUT,
    )
    timeout: float = option(
        DEFAULT_TIMEOUT,
        "Seconds to wait for another process that builds the same file. Then this process builds "
        "the file.",
        min=0,
        needs={"skip_existing": True},
        panel=RARE,
    )

    def get_map(
        self, pair: Pair, path: Path, output: str | None, *, strict: bool = False, **request: Any
    ) -> Any:
        """Build a map, or keep the existing file. `output` is the option --output."""
        from xtok.building.build import check_existing

        note_one_vocabulary(pair)
        if not is_named(output, path):
            check_existing(path, pair, **request)
        return xtok.get_map(
            pair, **request, path=path, rebuild=not self.skip_existing, strict=strict,
            timeout=self.timeout, progress=console.progress_bar, note=console.print_note,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RefinedMap(Output):
    """The input and output of a command that refines a map."""

    map_path: Path | None = map_option(MAP_HELP, argument="MAP")
    initial_projection_path: Path | None = map_option("Alternative to MAP.", panel=RARE)
    output: str | None = output_option("a file next to the input, in the same format.")

    def source(self) -> Path:
        """Return the path of the input. Raise a usage error unless there is exactly one input."""
        paths = [p for p in (self.map_path, self.initial_projection_path) if p is not None]
        if len(paths) != 1:
            which = "one map" if paths else "a map"
            raise typer.BadParameter(f"name {which} (MAP or --initial-projection-path MAP)")
        return paths[0]

    def path(self, name: str) -> Path:
        """Return the path of the output, which is next to the input by default."""
        return output_path(self.output, name, self.source())


@dataclass(frozen=True, kw_only=True)
class StrictOutput(Output):
    """The output of a command that decodes and spells tokens."""

    strict: bool = option(
        False, "If a token cannot be decoded or spelled, write nothing and exit with 1.", flag=True
    )

    def write(self, projection: ProjectionMap, name: str) -> Path:
        """Write the map, unless --strict is set and a token failed."""
        from xtok.maps.records import require_complete

        if self.strict:
            require_complete(projection)
        return super().write(projection, name)
