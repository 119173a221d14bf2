"""Options that several commands share, each declared once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from xtok.config import (
    MAX_ENTRIES,
    Canonicalization,
    Loss,
    SpecialTokens,
    Target,
    TokenForm,
    Weights,
)


def output_text(text: str) -> str:
    """Return a path that is written to, its `~` expanded; a slash at its end stays."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return os.path.expanduser(text)


def output_path(text: str) -> Path:
    """Return the path of a file that is written."""
    return Path(output_text(text))


def _path(text: str) -> Path:
    return Path(text).expanduser()


_MODELS, _MAKING, _OUTPUT = "Models", "Making the map", "Output"
_MATCHING = "Which tokens are paired"
_FOREIGN = "A .pt by another program"

StudentModel = Annotated[
    str,
    typer.Option(
        help="Model of the rows: a Hugging Face repo id or folder; a SentencePiece .model, "
        "tiktoken, tekken.json or .gguf file; or the word bytes. If ambiguous, add a prefix: hf:, "
        "spm:, tiktoken:, tekken:, gguf:.",
        metavar="MODEL",
        rich_help_panel=_MODELS,
    ),
]
TeacherModel = Annotated[
    str,
    typer.Option(help="Model of the columns, likewise.", metavar="MODEL", rich_help_panel=_MODELS),
]
BuiltStudentModel = Annotated[
    str | None,
    typer.Option(
        help="Model of the rows: a Hugging Face repo id or folder; a SentencePiece .model, "
        "tiktoken, tekken.json or .gguf file; or the word bytes. If ambiguous, add a prefix: hf:, "
        "spm:, tiktoken:, tekken:, gguf:.",
        metavar="MODEL",
        rich_help_panel=_MODELS,
    ),
]
BuiltTeacherModel = Annotated[
    str | None,
    typer.Option(help="Model of the columns, likewise.", metavar="MODEL", rich_help_panel=_MODELS),
]
Pairs = Annotated[
    Path | None,
    typer.Option(
        help="Instead of the two models: a file with a student, a teacher and optionally an "
        "output on each line. Each tokenizer is loaded once.",
        metavar="FILE",
        parser=_path,
        rich_help_panel=_MODELS,
    ),
]
CheckedStudentModel = Annotated[
    str | None,
    typer.Option(
        help="Check that the map's rows are of this model; needed for a map without tokens.",
        metavar="MODEL",
        rich_help_panel=_MODELS,
    ),
]
CheckedTeacherModel = Annotated[
    str | None,
    typer.Option(
        help="Check that the map's columns are of this model; needed for a map without tokens.",
        metavar="MODEL",
        rich_help_panel=_MODELS,
    ),
]
StudentRevision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of the student's repo.", rich_help_panel=_MODELS),
]
TeacherRevision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of the teacher's repo.", rich_help_panel=_MODELS),
]
StudentVocabSize = Annotated[
    int | None,
    typer.Option(
        help="Width of the student's logits. Else from its config, else its largest token id + 1.",
        min=1,
        metavar="N",
        rich_help_panel=_MODELS,
    ),
]
TeacherVocabSize = Annotated[
    int | None,
    typer.Option(
        help="Width of the teacher's logits, likewise.", min=1, metavar="N", rich_help_panel=_MODELS
    ),
]
MapStudentVocabSize = Annotated[
    int | None,
    typer.Option(
        help="Width of the rows, for a .pt that does not tell it.",
        min=1,
        metavar="N",
        rich_help_panel=_FOREIGN,
    ),
]
MapTeacherVocabSize = Annotated[
    int | None,
    typer.Option(
        help="Width of the columns, for a .pt that does not tell it.",
        min=1,
        metavar="N",
        rich_help_panel=_FOREIGN,
    ),
]
StudentPattern = Annotated[
    str | None,
    typer.Option(
        help="Split pattern of a student's tiktoken or .gguf file of an unknown family.",
        metavar="REGEX",
        rich_help_panel=_MODELS,
    ),
]
TeacherPattern = Annotated[
    str | None,
    typer.Option(
        help="Split pattern of a teacher's tiktoken or .gguf file of an unknown family.",
        metavar="REGEX",
        rich_help_panel=_MODELS,
    ),
]
StudentChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Chat template of the student, if not its own: a Jinja file, or the name of a format.",
        metavar="FILE|NAME",
        rich_help_panel=_MODELS,
    ),
]
TeacherChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Chat template of the teacher, likewise.",
        metavar="FILE|NAME",
        rich_help_panel=_MODELS,
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Take models from the local cache only, as with HF_HUB_OFFLINE=1.",
        rich_help_panel=_MODELS,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow a repo's custom tokenizer code to run; a note says when it does.",
        rich_help_panel=_MODELS,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face repo ids or folders; SentencePiece .model, tiktoken, tekken.json or "
        ".gguf files; or the word bytes. If ambiguous, add a prefix: hf:, spm:, tiktoken:, "
        "tekken:, gguf:.",
        show_default=False,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="A Jinja file, or the name of a prompt format, instead of the model's own template.",
        metavar="FILE|NAME",
        rich_help_panel=_MODELS,
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(help="Width of the models' logits.", min=1, metavar="N", rich_help_panel=_MODELS),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of the models' repos.", rich_help_panel=_MODELS),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        help="Split pattern of tiktoken or .gguf files of an unknown family.",
        metavar="REGEX",
        rich_help_panel=_MODELS,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)
]
MapPath = Annotated[
    Path, typer.Argument(metavar="MAP", help="A map: .safetensors, or NeMo-RL's .pt.")
]
InitialProjectionPath = Annotated[
    Path, typer.Option(help="The map to work on.", metavar="MAP", rich_help_panel=_MAKING)
]
ExtendedProjectionPath = Annotated[
    Path | None,
    typer.Option(help="A map of the same pair to extend.", metavar="MAP", rich_help_panel=_MODELS),
]
TopK = Annotated[
    int,
    typer.Option(
        help=f"Entries per row, the scale slot included: 1 (with a slot 2) to {MAX_ENTRIES}.",
        metavar="N",
        rich_help_panel=_MAKING,
    ),
]
MaxPieces = Annotated[
    int,
    typer.Option(
        help="How many of a token's pieces on the other side count.",
        min=1,
        metavar="N",
        rich_help_panel=_MAKING,
    ),
]
WeightsChoice = Annotated[
    Weights,
    typer.Option(
        help="Weights of a row: falling by tenths from piece to piece, or counted on synthetic "
        "text generated from the two vocabularies.",
        rich_help_panel=_MAKING,
    ),
]
TargetChoice = Annotated[
    Target,
    typer.Option(
        help="What is counted, on synthetic or given text: pairs of tokens that begin at one "
        "byte, all pairs within a chunk, or both.",
        rich_help_panel=_MAKING,
    ),
]
ForLoss = Annotated[
    Loss | None,
    typer.Option(
        "--for",
        help="Preset for a loss (weights, pins, slot, --top-k); options you give explicitly "
        "override it.",
        rich_help_panel=_MAKING,
    ),
]
ScaleTrick = Annotated[
    bool,
    typer.Option(
        "--scale-trick/--no-scale-trick",
        help="Give each row that is no exact match a slot that takes a sixth of its weight.",
        rich_help_panel=_MAKING,
    ),
]
ReversePass = Annotated[
    bool,
    typer.Option(
        "--reverse-pass/--no-reverse-pass",
        help="Spell the teacher's tokens in the student's as well.",
        rich_help_panel=_MAKING,
    ),
]
ExactMatch = Annotated[
    bool,
    typer.Option(
        "--exact-match/--no-exact-match",
        help="Pin tokens that both sides have to each other, with weight 1.",
        rich_help_panel=_MAKING,
    ),
]
SpecialTokensChoice = Annotated[
    SpecialTokens,
    typer.Option(
        help="Pair special tokens by role, or by similar names, or leave their rows empty.",
        rich_help_panel=_MATCHING,
    ),
]
FuzzyThreshold = Annotated[
    float,
    typer.Option(help="With fuzzy: the least similarity that counts.", rich_help_panel=_MATCHING),
]
FuzzyTopK = Annotated[
    int,
    typer.Option(
        help="With fuzzy: teacher tokens per special token.",
        min=1,
        metavar="N",
        rich_help_panel=_MATCHING,
    ),
]
CanonicalizationChoice = Annotated[
    Canonicalization,
    typer.Option(
        help="Pair tokens of equal bytes, or also ' ,' and ',' and forms of a line break, where "
        "there are no equal bytes.",
        rich_help_panel=_MATCHING,
    ),
]
CanonicalizationOfMap = Annotated[
    Canonicalization | None,
    typer.Option(
        help="As in multitoken; by default what the map was made with.", rich_help_panel=_MATCHING
    ),
]
TokenFormChoice = Annotated[
    TokenForm,
    typer.Option(
        help="What a token is taken for: its bytes, the text that they decode to, or the "
        "vocabulary's display string.",
        rich_help_panel=_MATCHING,
    ),
]
IgnoreStudentIds = Annotated[
    str | None,
    typer.Option(
        help="Leave the rows of these ids empty.", metavar="ID,ID…", rich_help_panel=_MATCHING
    ),
]
IgnoreTeacherIds = Annotated[
    str | None,
    typer.Option(help="Do not use these columns.", metavar="ID,ID…", rich_help_panel=_MATCHING),
]
SpecialTokensOfMap = Annotated[
    SpecialTokens | None,
    typer.Option(
        help="As in multitoken; by default what the map was made with.", rich_help_panel=_MATCHING
    ),
]
PreserveLast = Annotated[
    bool | None,
    typer.Option(
        "--preserve-last/--no-preserve-last",
        help="Whether the last column holds scale slots, whatever the map's file says.",
        rich_help_panel=_FOREIGN,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        help="Where to write: .safetensors, or .pt in NeMo-RL's layout; or a folder. By default "
        "the current folder, under a name that tells the pair and the options.",
        metavar="FILE",
        parser=output_text,
        rich_help_panel=_OUTPUT,
    ),
]
RefinedOutput = Annotated[
    str | None,
    typer.Option(
        help="Where to write: .safetensors, or .pt in NeMo-RL's layout; or a folder. By default "
        "beside the input, in its format.",
        metavar="FILE",
        parser=output_text,
        rich_help_panel=_OUTPUT,
    ),
]
Texts = Annotated[
    list[str],
    typer.Option(
        "--text",
        help="Text to read: plain, .jsonl or .parquet, also as .gz or .zst; a quoted glob, too. "
        "Repeatable.",
        metavar="FILE",
        rich_help_panel="Text",
    ),
]
Field = Annotated[
    str,
    typer.Option(
        help="Field of JSON lines, or column of Parquet, that holds the text.",
        rich_help_panel="Text",
    ),
]
OptionalTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="Count the map on this text: plain, .jsonl or .parquet, also as .gz or .zst; a quoted "
        "glob, too. Repeatable.",
        metavar="FILE",
        rich_help_panel="Text",
    ),
]
WeighingTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="Weigh rows by how often their tokens occur in this text. Repeatable; globs, too.",
        metavar="FILE",
        rich_help_panel="Text",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Write nothing, and exit with 1, if a token could not be decoded or spelled.",
        rich_help_panel=_MAKING,
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the maps of --pairs; the current one by default.",
        metavar="FOLDER",
        parser=output_path,
        rich_help_panel=_OUTPUT,
    ),
]
SkipExisting = Annotated[
    bool,
    typer.Option(
        "--skip-existing",
        help="Keep an output that is already the same map: same tokenizers, options and stages. "
        "Any other is replaced, and a note says why.",
        rich_help_panel=_OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Load the tokenizers, show what would be written, and write nothing.",
        rich_help_panel=_OUTPUT,
    ),
]
NumExamples = Annotated[
    int,
    typer.Option(
        help="Show this many rows of the result.", min=0, metavar="N", rich_help_panel=_OUTPUT
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Nothing on stderr but errors.",
        rich_help_panel=_OUTPUT,
    ),
]
