"""Groups of options that commands share, and what they stand for: models, maps, outputs, texts."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from xtok.config import TEXT, Config, Normalize, option

if TYPE_CHECKING:
    from xtok.maps.projection_map import ProjectionMap
    from xtok.tokenizers import Tokenizer

MODELS, OUTPUT, FOREIGN = "Models", "Output", "A .pt by another program"
_KINDS = (
    "a Hugging Face repo id, folder or tokenizer.json; a SentencePiece .model, tiktoken, "
    "tekken.json or .gguf file; or the word bytes. If ambiguous, add a prefix: hf:, spm:, "
    "tiktoken:, tekken:, gguf:."
)


def expanded(text: str) -> str:
    """Return a path or glob with its `~` expanded; a slash at its end stays."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return os.path.expanduser(text)


def read_path(text: str) -> Path:
    """Return a path that is read, its `~` expanded."""
    return Path(expanded(text))


MapArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(metavar="MAP", help="A map: .safetensors, or NeMo-RL's .pt.", parser=read_path),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=OUTPUT)
]


@dataclass(frozen=True, kw_only=True)
class Widths(Config):
    """The widths of the models' logits, and so of a map."""

    student_vocab_size: int | None = option(
        None,
        "Width of the student's logits; by default that of the map's file or the model's config, "
        "else the largest id + 1.",
        min=1,
        panel=MODELS,
    )
    teacher_vocab_size: int | None = option(
        None, "Width of the teacher's logits, likewise.", min=1, panel=MODELS
    )


@dataclass(frozen=True, kw_only=True)
class MapOptions(Widths):
    """How a map's file is read, where it does not say."""

    preserve_last: bool | None = option(
        None,
        "Whether the last column holds scale slots; by default what the file says.",
        panel=FOREIGN,
    )

    def load(self, path: Path, normalize: Normalize | None = None) -> ProjectionMap:
        """Load a map."""
        from xtok.maps import file

        return file.load(
            path,
            student_vocab_size=self.student_vocab_size,
            teacher_vocab_size=self.teacher_vocab_size,
            preserve_last=self.preserve_last,
            normalize=normalize,
        )


@dataclass(frozen=True, kw_only=True)
class InputMap(Config):
    """The map to work on, as an argument or under NeMo-RL's option."""

    map_path: Path | None = option(
        None,
        "The map to work on: .safetensors, or NeMo-RL's .pt.",
        argument=True,
        metavar="MAP",
        parser=read_path,
    )
    initial_projection_path: Path | None = option(
        None, "The map to work on, instead of MAP.", metavar="MAP", parser=read_path, panel=MODELS
    )

    @property
    def path(self) -> Path:
        """The map's path."""
        given = [p for p in (self.map_path, self.initial_projection_path) if p is not None]
        if len(given) != 1:
            raise typer.BadParameter("give one map: MAP or --initial-projection-path MAP")
        return given[0]


@dataclass(frozen=True, kw_only=True)
class Safety(Config):
    """What loading a model may do."""

    offline: bool = option(
        False,
        "Take models from the local cache only, as with HF_HUB_OFFLINE=1.",
        flag=True,
        panel=MODELS,
    )
    trust_remote_code: bool = option(
        False,
        "Allow a repo's custom tokenizer code to run; a note says when it does.",
        flag=True,
        panel=MODELS,
    )

    @property
    def safety(self) -> dict[str, bool]:
        """The two options, as `load_tokenizer` takes them."""
        return {"offline": self.offline, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True, kw_only=True)
class _Sides(Config):
    student_model: str | None = option(
        None, f"Model of the rows: {_KINDS}", metavar="MODEL", short="-s", panel=MODELS
    )
    teacher_model: str | None = option(
        None, "Model of the columns, likewise.", metavar="MODEL", short="-t", panel=MODELS
    )
    student_revision: str | None = option(
        None, "Branch, tag or commit of the student's repo.", panel=MODELS
    )
    teacher_revision: str | None = option(
        None, "Branch, tag or commit of the teacher's repo.", panel=MODELS
    )
    student_pattern: str | None = option(
        None,
        "Split pattern of a student's tiktoken or .gguf file of an unknown family.",
        metavar="REGEX",
        panel=MODELS,
    )
    teacher_pattern: str | None = option(
        None,
        "Split pattern of a teacher's tiktoken or .gguf file of an unknown family.",
        metavar="REGEX",
        panel=MODELS,
    )


@dataclass(frozen=True, kw_only=True)
class Models(Safety, _Sides):
    """The models of the rows and the columns, and how they are loaded."""

    def name(self, side: str) -> str | None:
        """Return the model of a side as it was given."""
        model: str | None = getattr(self, f"{side}_model")
        return model

    def required(self, side: str) -> str:
        """Return the model of a side; without one, that is a usage error."""
        model = self.name(side)
        if model is None:
            raise typer.BadParameter(f"give the {side}: --{side}-model")
        return model

    def both(self) -> tuple[str, str]:
        """Return both models; one that is not given is a usage error."""
        return self.required("student"), self.required("teacher")

    def pair(self, widths: Widths | None = None) -> tuple[Tokenizer, Tokenizer]:
        """Load both tokenizers; a model that is not given is a usage error."""
        self.both()
        return self._load("student", widths), self._load("teacher", widths)

    def given(self) -> dict[str, Tokenizer]:
        """Load the tokenizers that are given, by parameter."""
        return {f"{side}_model": self._load(side) for side in self.sides()}

    def sides(self) -> list[str]:
        """Return the sides whose models are given; a revision or pattern needs its model."""
        for side in ("student", "teacher"):
            needing = (getattr(self, f"{side}_revision"), getattr(self, f"{side}_pattern"))
            if self.name(side) is None and any(needing):
                raise typer.BadParameter(f"a revision or pattern needs --{side}-model")
        return [side for side in ("student", "teacher") if self.name(side) is not None]

    def with_map(
        self,
        projection: ProjectionMap,
        widths: Widths | None = None,
        *,
        name: Path | str = "the map",
    ) -> tuple[ProjectionMap, dict[str, Any]]:
        """Load the tokenizers of a map's sides that are given, as wide as the map and it as they.

        Returns:
            the map, with the tokens that it lacks, and the tokenizers by parameter.
        """
        from xtok.maps import pair

        tokenizers: dict[str, Any] = {}
        for side in self.sides():
            typed_width = getattr(widths, f"{side}_vocab_size", None)
            tokenizer = self._load(side, widths)
            width = pair.shared_width(getattr(projection, side), tokenizer.vocabulary)
            if typed_width is None and width != tokenizer.vocabulary.vocab_size:
                tokenizer = self._load(side, Widths(**{f"{side}_vocab_size": width}))
            vocabulary: dict[str, Any] = {side: tokenizer.vocabulary}
            projection = pair.with_vocabularies(projection, **vocabulary, name=str(name))
            tokenizers[f"{side}_model"] = tokenizer
        return projection, tokenizers

    def loading(self, side: str, widths: Widths | None = None) -> dict[str, Any]:
        """Return what `load_tokenizer` takes for a side."""
        return {
            "model": self.required(side),
            "vocab_size": getattr(widths, f"{side}_vocab_size", None),
            "revision": getattr(self, f"{side}_revision"),
            "pattern": getattr(self, f"{side}_pattern"),
            **self.safety,
        }

    def _load(self, side: str, widths: Widths | None = None) -> Tokenizer:
        return load_tokenizer(**self.loading(side, widths))


@dataclass(frozen=True, kw_only=True)
class ModelArguments(Models):
    """The models, as two arguments or two options."""

    student: str | None = option(
        None, f"Model of the rows: {_KINDS}", argument=True, metavar="STUDENT"
    )
    teacher: str | None = option(
        None, "Model of the columns, likewise.", argument=True, metavar="TEACHER"
    )
    student_model: str | None = option(
        None, "Model of the rows, instead of STUDENT.", metavar="MODEL", short="-s", panel=MODELS
    )
    teacher_model: str | None = option(
        None, "Model of the columns, instead of TEACHER.", metavar="MODEL", short="-t", panel=MODELS
    )

    def name(self, side: str) -> str | None:
        """Return the model of a side as it was given."""
        argument: str | None = getattr(self, side)
        model = super().name(side)
        if argument is not None and model is not None:
            raise typer.BadParameter(f"give the {side} once, as an argument or as --{side}-model")
        return argument if model is None else model

    def required(self, side: str) -> str:
        """Return the model of a side; without one, that is a usage error."""
        if self.name(side) is None:
            raise typer.BadParameter("give two models, STUDENT TEACHER")
        return super().required(side)


@dataclass(frozen=True, kw_only=True)
class MapOutput(Config):
    """Where a map is written, and how many of its rows are shown."""

    output: str | None = option(
        None,
        "Where to write: .safetensors, or .pt in NeMo-RL's layout; or a folder. By default the "
        "current folder, under a name that tells what the map is.",
        metavar="FILE",
        short="-o",
        parser=expanded,
        panel=OUTPUT,
    )
    num_examples: int = option(0, "Show this many rows of the result.", min=0, panel=OUTPUT)

    def check(self) -> None:
        """Check that the map can be written, before anything costs time."""
        from xtok.maps import file

        file.check_output(self.path("map.safetensors"))

    def path(self, name: str) -> Path:
        """Return the output's path; in a folder, and in the current one by default, `name` in it.

        A folder is one that exists, ends in a slash, or has no suffix and is not a file.
        """
        if self.output is None:
            return Path(name)
        path = Path(self.output)
        is_folder = path.is_dir() or self.output.endswith(("/", os.sep))
        return path / name if is_folder or not (path.suffix or path.exists()) else path

    def write(self, projection: ProjectionMap, path: Path, *, is_saved: bool = False) -> None:
        """Write the map, unless it is there, report on stderr, and print its path on stdout."""
        from xtok import report
        from xtok.inspection import inspect

        if not is_saved:
            projection.save(path)
        examples = inspect.example_ids(projection, self.num_examples)
        with suppress(OSError):  # the map is written, whether or not anybody reads the report
            report.print_reports(projection.reports)
            report.print_examples(projection[i] for i in examples)
        print(path)  # noqa: T201


@dataclass(frozen=True, kw_only=True)
class StrictOutput(MapOutput):
    """The output of a command that reads tokenizers, which may fail to decode or spell a token."""

    strict: bool = option(
        False,
        "Write nothing, and exit with 1, if a token could not be decoded or spelled.",
        flag=True,
        panel=OUTPUT,
    )

    def write(self, projection: ProjectionMap, path: Path, *, is_saved: bool = False) -> None:
        """Write the map, if every token could be decoded and spelled or --strict is not given."""
        from xtok.maps import results

        if self.strict:
            results.require_complete(projection)
        super().write(projection, path, is_saved=is_saved)


@dataclass(frozen=True, kw_only=True)
class RefinedOutput(MapOutput):
    """The output of a command that refines a map: beside it, in its format."""

    output: str | None = option(
        None,
        "Where to write: .safetensors, or .pt in NeMo-RL's layout; or a folder. By default beside "
        "the input, in its format.",
        metavar="FILE",
        short="-o",
        parser=expanded,
        panel=OUTPUT,
    )

    def beside(self, source: Path) -> RefinedOutput:
        """Return this output; without one, the folder of the input, but for a pipe."""
        if self.output is not None or not source.is_file():
            return self
        folder = os.path.join(source.parent, "")
        return RefinedOutput(output=folder, num_examples=self.num_examples)


Texts: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--text",
        help="Text to read: plain, .jsonl or .parquet, also as .gz or .zst; a quoted glob, too. "
        "Repeatable.",
        metavar="FILE",
        parser=expanded,
        rich_help_panel=TEXT,
    ),
]
OptionalTexts: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="Count the map on this text: plain, .jsonl or .parquet, also as .gz or .zst; a quoted "
        "glob, too. Repeatable.",
        metavar="FILE",
        parser=expanded,
        rich_help_panel=TEXT,
    ),
]
TextField: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Field of JSON lines, or column of Parquet, that holds the text.", rich_help_panel=TEXT
    ),
]


def load_tokenizer(model: str, **loading: Any) -> Tokenizer:
    """Load a tokenizer, and print the notes on how it was loaded."""
    from xtok import report, tokenizers

    tokenizer = tokenizers.load_tokenizer(model, **loading)
    report.print_notes(tokenizer.notes)
    return tokenizer
