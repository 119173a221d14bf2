"""NeMo-RL's spellings: each row of the guide's table means what it says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from conftest import ROOT, Cli
from typer.main import get_command

from xtok.cli import make_app
from xtok.cli._spellings import REFUSED, SPELLINGS, rewritten
from xtok.projection import ProjectionMap

GUIDE = ROOT / "docs" / "guides" / "nemo-rl.md"
COMMANDS = get_command(make_app()).commands  # type: ignore[attr-defined]


def parsed(command: str, *args: str) -> dict[str, object]:
    """Return what a command makes of its arguments."""
    context = COMMANDS[command].make_context(command, list(args))
    return dict(context.params)


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
        (
            "multitoken",
            ["--special-token-similarity-threshold", "0.3"],
            {"special_tokens": "fuzzy", "fuzzy_threshold": 0.3},
        ),
        (
            "multitoken",
            ["--special-token-top-k=5"],
            {"special_tokens": "fuzzy", "fuzzy_top_k": 5},
        ),
        ("multitoken", ["--use-canonicalization"], {"canonicalization": "relaxed"}),
        ("reapply-exact", ["--use_canonicalization"], {"canonicalization": "relaxed"}),
        ("multitoken", ["--use-raw-tokens"], {"token_form": "raw"}),
        ("multitoken", ["--tokens-to-cut", "3"], {"max_pieces": 3}),
        ("multitoken", ["--tokens_to_cut=3"], {"max_pieces": 3}),
        ("build", ["--runtime-top-k", "8"], {"top_k": 8}),
        ("sort-cut", ["--output_path", "x.pt"], {"output": Path("x.pt")}),
        ("build", ["--final-output", "x.pt"], {"output": Path("x.pt")}),
        ("multitoken", ["--output-dir", "d", "--output-filename", "f"], {"output": Path("d/f.pt")}),
        ("multitoken", ["--output-filename", "f"], {"output": Path("f.pt")}),
        ("multitoken", ["--output-dir", "d"], {"output": Path("d")}),
        ("sort-cut", ["--top_k", "8"], {"top_k": 8}),
        ("sort-cut", ["--preserve_last"], {"preserve_last": True}),
        ("sort-cut", ["--no-preserve_last"], {"preserve_last": False}),
        ("generate", ["--weight_threshold", "0.1"], {"weight_threshold": 0.1}),
        ("generate", ["--force_recompute"], {"force_recompute": True}),
    ],
)
def test_each_row(command: str, theirs: Sequence[str], ours: dict[str, object]) -> None:
    required = {
        "sort-cut": ["--initial_projection_path", "m.pt"],
        "reapply-exact": ["--initial-projection-path", "m.pt"],
        "generate": [*MODELS, "--embedding-model", "own"],
    }.get(command, MODELS)
    found = parsed(command, *required, *theirs)
    assert {name: found[name] for name in ours} == ours


def test_models_may_be_in_snake_case() -> None:
    found = parsed("build", "--student_model", "a", "--teacher_model=b")
    assert (found["student_model"], found["teacher_model"]) == ("a", "b")


@pytest.mark.parametrize("option", REFUSED)
def test_what_no_argument_can_say_is_explained(option: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        rewritten([option.replace("-", "_").replace("__", "--", 1), "1"], {})
    assert REFUSED[option] in str(raised.value)


def test_values_and_what_is_not_an_option_stay() -> None:
    own = {"--token": True, "--json": False, "-q": False}
    assert rewritten(["my_map", "--token", "--top_k", "--json"], own) == [
        "my_map", "--token", "--top_k", "--json"
    ]  # fmt: skip
    assert rewritten(["--", "--top_k"], own) == ["--", "--top_k"]
    assert rewritten(["--unknown_thing", "x"], own) == ["--unknown_thing", "x"]
    assert rewritten(["--token=--use-raw-tokens"], own) == ["--token=--use-raw-tokens"]
    with pytest.raises(typer.BadParameter, match="--tokens-to-cut needs a value"):
        rewritten(["--tokens-to-cut"], own)


def test_the_guide_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| (`--.*?) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {option for cell in rows for option in re.findall(r"`(--[\w-]+)", cell)}
    assert {*SPELLINGS, *REFUSED} <= {option.replace("_", "-") for option in named}


def test_the_help_shows_only_our_own(cli: Cli) -> None:
    text = cli("multitoken", "--help").stdout
    assert "--max-pieces" in text
    assert not any(option in text for option in SPELLINGS)
    assert "--top_k" not in text


def test_their_three_commands_on_the_command_line(cli: Cli, small: Path, tmp_path: Path) -> None:
    models = [
        "--student_model",
        small / "small-byte-level",
        "--teacher_model",
        small / "small.model",
    ]
    (tmp_path / "out").mkdir()
    first = cli("multitoken", *models, "--top_k", "16", "--disable-scale-trick", "--tokens-to-cut",
                "2", "--output-dir", "out", "--output-filename", "prep", "-q")  # fmt: skip
    assert first.stdout == f"{Path('out/prep.pt')}\n", first.stderr
    second = cli("reapply-exact", *models, "--initial-projection-path", "out/prep.pt",
                 "--output-dir", "out", "-q")  # fmt: skip
    pinned = second.stdout.strip()
    assert pinned == (
        "out/small-byte-level_to_small_reapply-exact_top16_no-scale-trick.safetensors"
    ), second.stderr
    third = cli("sort-cut", "--initial-projection-path", pinned, "--top_k", "4", "--output_path",
                "final.pt", "-q")  # fmt: skip
    assert third.stdout == "final.pt\n", third.stderr
    made = ProjectionMap.load(tmp_path / "final.pt")
    assert made.history[0]["options"]["max_pieces"] == 2
    assert (made.top_k, made.enable_scale_trick) == (4, False)
