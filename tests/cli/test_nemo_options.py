"""NeMo-RL's option names: each row of the guide's table is correct."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from checks import fails, works
from conftest import ROOT, Cli
from tiny_models import random_model
from typer.main import get_command
from typer.testing import CliRunner

import xtok
from xtok.cli import make_app
from xtok.cli.nemo_options import ALIASES, FIXED, MODEL_OPTIONS, clean_name, nemo_words
from xtok.maps.projection_map import ProjectionMap

GUIDE = ROOT / "docs" / "guides" / "trainers.md"
COMMANDS = get_command(make_app()).commands  # type: ignore[attr-defined]


def parsed(command: str, *args: str) -> dict[str, object]:
    """Return the parsed arguments of a command, and the notes about them."""
    context = COMMANDS[command].make_context(command, list(args))
    return {**context.params, "notes": nemo_words(context).notes}


MODELS = ["--student-model", "a", "--teacher-model", "b"]


@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("multitoken", ["--enable-scale-trick"], {"scale_trick": True}),
        ("multitoken", ["--disable-scale-trick"], {"scale_trick": False}),
        ("multitoken", ["--enable-reverse-pass"], {"reverse_pass": True}),
        ("multitoken", ["--disable-reverse-pass"], {"reverse_pass": False}),
        ("multitoken", ["--enable-exact-match"], {"exact_match": True}),
        ("build", ["--skip-exact-map"], {"exact_match": False}),
        ("multitoken", ["--enable-special-token-mapping"], {"special_tokens": "roles"}),
        ("multitoken", ["--disable-special-token-mapping"], {"special_tokens": "off"}),
        ("build", ["--no-special-token-mapping"], {"special_tokens": "off"}),
        ("multitoken", ["--special-token-similarity-threshold", "0.3"],
         {"special_tokens": "fuzzy", "fuzzy_threshold": 0.3}),
        ("multitoken", ["--special-token-top-k=1"], {"special_tokens": "roles"}),
        ("multitoken", ["--use-canonicalization"], {"canonicalization": "relaxed"}),
        ("reapply-exact", ["--use_canonicalization"], {"canonicalization": "relaxed"}),
        ("multitoken", ["--use-raw-tokens"], {"token_form": "raw"}),
        ("multitoken", ["--tokens-to-cut", "3"], {"max_pieces": 3}),
        ("multitoken", ["--tokens_to_cut=3"], {"max_pieces": 3}),
        ("build", ["--runtime-top-k", "8"], {"top_k": 8}),
        ("sort-cut", ["--output_path", "x.pt"], {"output": "x.pt"}),
        ("build", ["--final-output", "x.pt"], {"output": "x.pt"}),
        ("sort-cut", ["--output_path=~x/y.pt"], {"output": "~x/y.pt"}),
        ("multitoken", ["--output-dir", "d", "--output-filename", "f"], {"output": "d/"}),
        ("multitoken", ["--output-filename", "f"], {"output": "cross_tokenizer_data/"}),
        ("multitoken", ["--output-dir", "a.b"], {"output": "a.b/"}),
        ("multitoken", ["--enable-scale-trick"], {"output": "cross_tokenizer_data/"}),
        ("multitoken", ["--enable-scale-trick", "--output", "x.pt"], {"output": "x.pt"}),
        ("multitoken", ["--top_k", "8"], {"output": None}),
        ("sort-cut", ["--output-dir", "d", "--output-filename", "f"], {"output": "d/f.pt"}),
        ("generate", ["--data_dir", "d"], {"output": "d/", "cache_dir": Path("d")}),
        ("generate", ["--data_dir=d", "--cache-dir=c"], {"output": "d/", "cache_dir": Path("c")}),
        ("build", ["--data-dir", "d"], {"output": "d/"}),
        ("build", ["--data-dir", "d", "--final-output", "x.pt"], {"output": "x.pt"}),
        ("build", ["--prep-top-k", "16"], {"top_k": 4, "prep_top_k": 16}),
        ("build", ["--prep_top_k", "8"], {"prep_top_k": 8}),
        ("build", ["--student_model", "c", "--teacher_model=d"], {"student": "c", "teacher": "d"}),
        ("multitoken", ["--num_examples", "50"],
         {"output": "cross_tokenizer_data/", "num_examples": 50}),
        ("generate", ["--keep_top_tokens", "-1"], {"top_k": 10}),
        ("sort-cut", ["--top_k", "8"], {"top_k": 8}),
        ("sort-cut", ["--preserve_last"], {"preserve_last": True}),
        ("sort-cut", ["--no-preserve_last"], {"preserve_last": False}),
        ("generate", ["--weight_threshold", "0.1"], {"weight_threshold": 0.1}),
        ("generate", ["--force_recompute"], {"force_recompute": True}),
        *((command, ["--initial_projection_path=m.pt"], {"initial_projection_path": Path("m.pt")})
          for command in ("sort-cut", "reapply-exact", "multitoken", "build")),
    ],
)  # fmt: skip
def test_options_of_nemo_rl_set_ours(
    command: str, theirs: Sequence[str], ours: dict[str, object]
) -> None:
    required = {
        "sort-cut": ["--initial_projection_path", "m.pt"],
        "reapply-exact": ["--initial-projection-path", "m.pt"],
        "generate": [*MODELS, "--embedding-model", "own"],
    }.get(command, MODELS)
    values = parsed(command, *required, *theirs)
    assert {name: values[name] for name in ours} == ours


# Values for NeMo-RL's options
TYPED = {
    "special_token_similarity_threshold": "0.3", "special_token_top_k": "1",
    "keep_top_tokens": "-1",
    "output_path": "path.pt", "final_output": "path.pt", "output_dir": "d", "data_dir": "d",
    "output_filename": "stem",
}  # fmt: skip
THEIRS = [
    (command, option.name, option.is_flag)
    for command in ("build", "multitoken", "generate", "sort-cut", "reapply-exact")
    for option in COMMANDS[command].params
    if getattr(option, "hidden", False) and option.name not in MODEL_OPTIONS
]


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("events -s a -t b", {"student": "a", "teacher": "b"}),
        ("events -t b a", {"student": "a", "teacher": "b"}),
        ("doctor --teacher-model b a", {"student": "a", "teacher": "b"}),
        ("doctor -s a", {"student": "a", "teacher": None}),
        ("align -s a -t b c", {"student": "a", "teacher": "b", "text": "c"}),
        ("align -s a b c", {"student": "a", "teacher": "b", "text": "c"}),
        ("verify m -t b", {"map_path": Path("m"), "student": None, "teacher": "b"}),
        ("verify m a -t b", {"map_path": Path("m"), "student": "a", "teacher": "b"}),
        ("reapply-exact m -s a -t b", {"map_path": Path("m"), "student": "a", "teacher": "b"}),
        ("convert m o -s a -t b", {"target": "o", "student": "a", "teacher": "b"}),
        ("project p -s a -t b -o c", {"teacher_topk": "p", "student": "a", "teacher": "b"}),
        ("evaluate m n -s a -t b --text c", {"arguments": ["m", "n", "a", "b"]}),
        ("report m -s a -t b", {"arguments": ["m", "a", "b"]}),
        ("render c.json -m a", {"file": Path("c.json"), "model_argument": "a"}),
        ("inspect m 1 -s a -t b", {"tokens": ["1"], "student": "a", "teacher": "b"}),
    ],
)
def test_models_may_be_options(line: str, read: dict[str, object]) -> None:
    values = parsed(*line.split())
    assert {name: values[name] for name in read} == read


@pytest.mark.parametrize("output", [[], ["-o", "own.pt"]])
@pytest.mark.parametrize(("command", "name", "is_flag"), THEIRS)
def test_each_option_makes_a_map_with_and_without_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, is_flag: bool,
    output: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    models = ["bytes", "bytes"]
    if command in ("sort-cut", "reapply-exact"):
        xtok.multitoken(xtok.load_pair(*models)).save("map.pt")
        models = ["map.pt"]
    elif command == "generate":
        models += ["--embedding-model", "spelling"]
    value = [] if is_flag else [TYPED.get(name, "4")]
    args = [command, *models, f"--{name.replace('_', '-')}", *value, *output, "-q"]
    result = CliRunner().invoke(make_app([command]), args)
    assert (result.exit_code, result.exception) == (0, None)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt")} - {"map.pt"}
    assert len(written) == 1
    if output and name not in ("output_path", "final_output"):
        assert written == {"own.pt"}


def test_options_that_nemo_rl_ignores_are_accepted_with_a_note() -> None:
    ignored = [
        "--enable-scale-trick", "--disable-scale-trick", "--enable-reverse-pass",
        "--disable-reverse-pass", "--enable-exact-match",
        "--special-token-similarity-threshold=0.5", "--use-raw-tokens", "--tokens-to-cut=1",
        "--top-k=1", "--output-dir=d", "--special-token-top-k=1",
    ]  # fmt: skip
    names = [option.partition("=")[0] for option in ignored]
    values = parsed("reapply-exact", "--initial_projection_path", "x.pt", *ignored)
    assert values["notes"] == [f"{name} has no effect in reapply-exact" for name in names]
    assert values["special_tokens"] is None


def test_values_that_look_like_options_are_kept() -> None:
    assert parsed("inspect", "my_map", "--id", "3", "--", "--top_k")["tokens"] == ["--top_k"]
    assert parsed("sort-cut", "my_map", "--output=--use_raw")["output"] == "--use_raw"


def test_error_names_the_option_as_typed(cli: Cli, small: Path) -> None:
    works(cli("build", "bytes", small / "small.model", "--output", "m.pt"))
    result = cli("sort-cut", "--initial_projection_path", "m.pt", "--top_k", "1")
    fails(result, "", "--top-k")


def test_the_guide_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| (`--.*?) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {option for cell in rows for option in re.findall(r"`(--[\w-]+)", cell)}
    known = {f"--{name.replace('_', '-')}" for name in (*ALIASES, *FIXED)}
    assert known - {"--top-k"} <= named


def test_the_help_shows_only_our_own(cli: Cli) -> None:
    text = cli("multitoken", "--help-all").stdout
    assert "--max-pieces" in text
    assert not any(f"--{name.replace('_', '-')}" in text for name in ALIASES.keys() - {"top_k"})


EMBEDDED = "data/temp_projection_map_student_to_teacher_top_32.pt"
SPELLED = "data/projection_map_student_to_teacher_multitoken_top_32_double_special.pt"
EXACT = SPELLED.replace(".pt", "_exact_map_remapped.pt")

# NeMo-RL's recipe with xtok's commands: each command line, and the file that the next command
# reads. `MODELS` is replaced by both models.
RECIPE = {
    "generate MODELS --embedding-model own --top_k 32 --data_dir data --keep_top_tokens -1 "
    "--use_canonicalization": EMBEDDED,
    f"multitoken MODELS --initial-projection-path {EMBEDDED} --top-k 32 --output-dir data "
    "--enable-scale-trick --enable-reverse-pass --enable-special-token-mapping "
    "--use-canonicalization": SPELLED,
    f"reapply-exact MODELS --initial-projection-path {SPELLED}": EXACT,
    f"sort-cut --initial-projection-path {EXACT} --top_k 4 --output_path final/matrix_top4.pt":
    "final/matrix_top4.pt",
    f"sort-cut --initial-projection-path {EXACT} --top_k 8":
    EXACT.replace("_top_32", "").replace(".pt", "_top_8_sorted_preservelast.pt"),
}  # fmt: skip


def test_the_recipe_for_their_tools_runs_as_it_is(cli: Cli, small: Path, tmp_path: Path) -> None:
    random_model(tmp_path / "student", small / "small-digits", 32)
    random_model(tmp_path / "teacher", small / "small-byte-level", 48)
    models = f"--student-model {tmp_path / 'student'} --teacher-model {tmp_path / 'teacher'}"
    for line, path in RECIPE.items():
        result = cli(*line.replace("MODELS", models).split())
        assert result.stdout == f"{path}\n", result.stderr
    projection = ProjectionMap.load(tmp_path / "final" / "matrix_top4.pt")
    assert [step["stage"] for step in projection.history] == [
        "generate", "multitoken", "reapply-exact", "sort-cut"
    ]  # fmt: skip


def test_options_of_their_wrapper_name_the_output_of_build(cli: Cli, small: Path) -> None:
    models = ["--student-model", small / "small.model", "--teacher-model", "bytes"]
    result = cli("build", *models, "--runtime-top-k", "4", "-q")
    assert result.stdout == "cross_tokenizer_data/projection_matrix_smallodel_bytes_top4.pt\n"
    result = cli("build", *models, "--data-dir", "new/dir", "--prep-top-k", "32", "-q")
    assert result.stdout == "new/dir/projection_matrix_smallodel_bytes_top4.pt\n"
    # NeMo-RL's file names do not contain the loss, so xtok's name is used.
    result = cli("build", *models, "--data-dir", "new", "--for", "gold", "-q")
    assert result.stdout == "new/small_to_bytes_gold_top8.safetensors\n"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Llama-3.2-1B", "Llama-3.2"), ("Qwen3-4B-Base", "Qwen3"), ("gemma-3-12b-it", "gemma-3"),
        ("Phi-4-mini-instruct", "Phi-4-mini-instruct_mini"),
        ("Meta-Llama-3-8B-Instruct", "Meta-Llama-3"), ("SmolLM2-360m", "SmolLM2"),
        ("models/Qwen3-4B/", "Qwen3"), ("mistral-v3.model", "mistral-vodel"),
        ("cl100k.tiktoken", "cl100k.tiktoken"),
    ],
)  # fmt: skip
def test_their_short_names_of_models(model: str, name: str) -> None:
    assert clean_name(model) == name
