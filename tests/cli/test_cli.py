"""The command line: the output, exit codes and errors of commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import pytest
import torch
import typer
from checks import fails, fits_80_columns, printed_json, usage_error, works
from command_lines import LAZY_PACKAGES, run_python, two_files
from conftest import Cli
from forked import Forks
from typer.testing import CliRunner

import xtok
from xtok.cli import COMMANDS, make_app
from xtok.cli.command import full_path
from xtok.cli.help import describe_command
from xtok.cli.options import output_path
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.classes import TokenClass, token_classes
from xtok.tokenizers.pairs import require_table


@pytest.fixture(scope="module")
def maps(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished map, a map of the first stage, and a map of another pair."""
    folder = tmp_path_factory.mktemp("maps")
    student, teacher = (load_tokenizer(small / name) for name in ("small-digits", "small.model"))
    xtok.build(student, teacher).save(folder / "map.safetensors")
    xtok.multitoken(xtok.load_pair(student, teacher)).save(folder / "first.pt")
    xtok.build(teacher, teacher).save(folder / "other.safetensors")
    return folder


def pair_options(small: Path) -> list[str]:
    return ["-s", str(small / "small-digits"), "-t", str(small / "small.model")]


BYTES = "-s bytes -t bytes"


def command_of(name: str) -> Any:
    [command] = typer.main.get_group(make_app([name])).commands.values()
    return command


# The commands


def test_build_prints_the_path_and_notes(cli: Cli, small: Path, tmp_path: Path) -> None:
    line, name = ["build", *pair_options(small)], "small-digits_to_small_top4.safetensors"
    result = works(cli(*line))
    assert result.stdout == f"{name}\n"
    assert os.listdir(tmp_path) == [name]
    reports = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert [line.split(":")[0] for line in reports] == ["build"]
    assert "it/s" not in result.stderr  # progress bars appear only on terminals
    quiet = works(cli(*line, "--quiet"))
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")
    notes = works(cli(*line, "--for", "p-kl", "--top-k", "3")).stderr
    chosen = "--no-scale-trick --weights synthetic --target both --no-exact-match"
    assert notes.startswith(f"note: --for p-kl sets {chosen}\n")
    assert " rows counted" in notes


def test_files_do_not_depend_on_the_run_the_threads_or_the_name(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    """A `.pt` file contains everything that a `.safetensors` file contains."""
    files = set()
    for threads, name in (("1", "a"), ("2", "another-name")):
        env = dict.fromkeys(["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"], threads)
        env["PYTHONHASHSEED"] = threads
        works(cli("build", *pair_options(small), "--output", f"{name}.pt", env=env))
        files.add((tmp_path / f"{name}.pt").read_bytes())
    assert len(files) == 1


def test_the_width_of_an_extended_map_is_kept(cli: Cli) -> None:
    line = "multitoken", "bytes", "bytes"
    works(cli(*line, "--teacher-vocab-size", "1234", "-o", "a.pt"))
    more = works(cli(*line, "--initial-projection-path", "a.pt", "-o", "b.pt"))
    assert "vocabulary width 1,234" in more.stderr


def test_json_has_the_written_paths_and_the_reports(cli: Cli) -> None:
    result = cli("multitoken", "bytes", "bytes", "--json", "-o", "a.safetensors", "-q")
    assert printed_json(result) == {
        "paths": ["a.safetensors"],
        "reports": [
            {
                "stage": "multitoken",
                "counts": {"rows from pieces": 256},
                "notes": [
                    "student bytes: vocabulary width 256 (from the tokenizer)",
                    "teacher bytes: vocabulary width 256 (from the tokenizer)",
                    "256 rows without a scale slot, because the teacher has no unused or special "
                    "id for the slot",
                ],
                "failures": [],
            }
        ],
    }
    result = cli("convert", "a.safetensors", "b.pt", "--json", "-q")
    assert printed_json(result) == {"paths": ["b.pt"], "reports": []}


@pytest.fixture(scope="module")
def by_nemo(maps: Path) -> Path:
    """A map of the pair in the form of NeMo-RL's tools: padded, bfloat16, only ids."""
    content = torch.load(maps / "first.pt", weights_only=True)
    del content["xtok"]
    content["likelihoods"] = content["likelihoods"].bfloat16()
    torch.save(content, maps / "special.pt")
    return maps / "special.pt"


FROM_NEMO = [
    # in another order than xtok's
    ("verify F", r"ok +format +[\d,]+ × [\d,]+, .*\n(.*\n)*note +as written "),
    ("verify F P", r"ok +teacher width "),
    ("inspect F", r"\(from the ids\)"),
    ("inspect F --against F", ""),
    ("inspect F a P", ""),
    ("evaluate F P T", ""),
    ("convert F -o x.pt", ""),
    ("convert F P -o x.safetensors", ""),
    ("sort-cut F --top-k 8 -o x.pt", ""),
    ("reapply-exact F P -o x.pt", ""),
    ("multitoken --initial-projection-path F P -o x.pt", ""),
    ("build --initial-projection-path F P T -o x.pt", ""),
]
"""What each command prints: `F` is the map, `P` both models, `T` a text."""


@pytest.mark.parametrize(("line", "printed"), FROM_NEMO)
def test_a_map_by_nemo_configures_every_command(
    cli: Cli, small: Path, by_nemo: Path, tmp_path: Path, line: str, printed: str
) -> None:
    (tmp_path / "text.txt").write_text("the cat and the dog\n" * 50)
    values: dict[str, list[Any]] = {
        "F": [by_nemo],
        "P": pair_options(small),
        "T": ["--text", "text.txt"],
    }
    result = works(cli(*(part for word in line.split() for part in values.get(word, [word]))))
    assert re.search(printed, result.stdout)
    assert result.stderr == "" or not line.startswith("verify")
    if (tmp_path / "x.pt").exists():
        teacher = xtok.ProjectionMap.load(tmp_path / "x.pt").teacher
        if "P" in line:
            width = xtok.load_tokenizer(small / "small.model").vocabulary.vocab_size
            assert (teacher.vocab_size, teacher.table is None) == (width, False)
        else:
            assert teacher.width_source == "ids"


def test_maps_of_nemo_rl_require_their_own_models(cli: Cli, small: Path, by_nemo: Path) -> None:
    result = cli("reapply-exact", by_nemo)
    fails(result, "the map has no token table", "STUDENT and TEACHER")
    result = cli("reapply-exact", by_nemo, *two_files(small))
    fails(result, f"the student of {by_nemo} (small-digits) has width ", "the map of this pair")


def test_a_note_on_each_map_that_names_another_model(
    cli: Cli, small: Path, by_nemo: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the cat and the dog\n" * 50)
    shutil.copytree(small / "small-digits", tmp_path / "renamed")
    for command in ("evaluate", "report"):
        maps = [by_nemo, by_nemo]
        result = works(cli(command, *maps, "renamed", small / "small.model", "--text", "text.txt"))
        assert result.stderr.count("names small-digits as its student") == 2


def test_sort_cut_reads_slots_with_preserve_last(cli: Cli, maps: Path, tmp_path: Path) -> None:
    slots = []
    for option in ([], ["--preserve-last"], ["--no-preserve-last"]):
        works(cli("sort-cut", maps / "first.pt", "-k", "2", "-o", "cut.safetensors", *option))
        slots.append(ProjectionMap.load(tmp_path / "cut.safetensors").is_slot.tolist())
    assert slots[0] == slots[1]
    assert any(slots[0])
    assert not any(slots[2])


def test_errors_of_several_maps_name_the_wrong_map(
    cli: Cli, small: Path, maps: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat and the dog\n")
    other = "the student of other.safetensors (small.model)"
    a, b = "map.safetensors", "other.safetensors"
    initial = "--initial-projection-path", b, "--text", text, "-o", tmp_path / "c.safetensors"
    for args in (
        ["inspect", a, "--against", b],
        ["evaluate", a, b, *pair_options(small), "--text", text],
    ):
        fails(cli(*args, cwd=maps), other)
    fails(cli("build", *pair_options(small), *initial, cwd=maps), other)
    wide = cli("build", *pair_options(small), *initial, "--student-vocab-size", "9000", cwd=maps)
    fails(wide, f"{b} has width ", "--student-vocab-size")


# inspect


def test_inspect_shows_the_map_at_80_columns_or_as_json(cli: Cli, maps: Path) -> None:
    result = cli("inspect", "map.safetensors", cwd=maps)
    assert (result.returncode, result.stderr) == (0, "")
    assert fits_80_columns(result.stdout)
    for expected in ("small-digits", "small.model", "multitoken", "exact"):
        assert expected in result.stdout
    assert "\x1b" not in result.stdout
    values = printed_json(
        cli("inspect", "map.safetensors", "--num-examples", "2", "--json", cwd=maps)
    )
    assert values["student"]["model_id"] == "small-digits"
    assert sum(values["rows_by_kind"].values()) == values["student"]["vocab_size"]
    assert 0 < values["slot_share"] < 1
    assert len(values["examples"]) == 2
    weights = [entry["weight"] for entry in values["examples"][1]["entries"]]
    assert sum(weights) == pytest.approx(1)


def test_inspect_lists_the_worst_rows(cli: Cli, maps: Path) -> None:
    path = maps / "map.safetensors"
    listed = works(cli("inspect", path, "--class", "digits", "--kind", "exact", "--worst", "2"))
    assert fits_80_columns(listed.stdout)
    assert "2 of " in listed.stdout
    assert "rows by kind" not in listed.stdout
    values = printed_json(cli("inspect", path, "--class", "digits", "--json"))
    projection = ProjectionMap.load(path)
    classes = token_classes(require_table(projection.student))
    digits = np.flatnonzero(classes <= TokenClass.DIGITS_MIXED)
    assert values["rows_matching"] == len(digits)
    assert len(values["rows"]) == min(20, len(digits))
    heaviest = [[*projection.row(row)[1], 0.0][0] for row in digits.tolist()]  # the slot comes last
    expected = digits[np.argsort(heaviest, kind="stable")][:20].tolist()
    assert [row["student_id"] for row in values["rows"]] == expected
    for words in (["nosuch"], ["--id", "99999"], ["--class", "digit"]):  # this token does not exist
        fails(cli("inspect", path, *words), "")


def shell(
    line: str, folder: Path, forks: Forks | None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `xtok` in a shell, in a fork or in a new process, to close one of its streams."""
    program = f"{forks.folder}/xtok" if forks and "&-" not in line else f"{sys.executable} -m xtok"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("xtok", program, 1)],
        cwd=folder, capture_output=True, text=True, errors="replace", check=False,
        env={**os.environ, **env},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code", "lines"),
    [
        ("inspect map.safetensors --num-examples 500 | head -1", 0, 1),
        ("inspect map.safetensors --num-examples 500 --json | head -1", 0, 1),
        ("verify map.safetensors -t $SMALL/small.model | true", 0, 0),
        ("verify map.safetensors -t $SMALL/small-digits | true", 3, 0),
        ("build $TWO_FILES -o $NEW 2> >(true)", 0, 1),
        ("build $TWO_FILES -o $NEW 2>&-", 0, 1),
        ("build $TWO_FILES -o $NEW 2>&- --quiet", 0, 1),
    ],
)
def test_closed_stdout_is_not_an_error(
    maps: Path, small: Path, tmp_path: Path, forks: Forks, line: str, code: int, lines: int
) -> None:
    """With a closed stream, the command exits with its usual code, and writes its map."""
    new = tmp_path / "new.safetensors"
    env = {"SMALL": str(small), "TWO_FILES": " ".join(two_files(small)), "NEW": str(new)}
    result = shell(f"xtok {line}", maps, forks, **env)
    assert (result.returncode, result.stderr, len(result.stdout.splitlines())) == (code, "", lines)
    assert new.exists() == line.startswith("build")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        *(
            (f"{words} > /dev/full", "the output: No space left", "free space")
            for words in ("inspect map.safetensors", "--version", "--help", "build --help")
        ),
        (f"align {BYTES} - <&-", "stdin is closed", "give a file with --file"),
    ],
)
def test_a_stream_that_cannot_be_used_is_an_error(
    maps: Path, forks: Forks, line: str, message: str, hint: str
) -> None:
    fails(shell(f"xtok {line}", maps, forks), message, hint)


@pytest.mark.parametrize(("line", "code"), [("inspect m.pt", 0), ("inspect", 2), ("inspect no", 1)])
def test_a_log_on_a_full_disk_does_not_change_the_exit_code(
    tmp_path: Path, forks: Forks, line: str, code: int
) -> None:
    torch.save({(0, 1): 1.0}, tmp_path / "m.pt")
    done = shell(f"xtok {line} 2> /dev/full", tmp_path, forks)
    assert (done.returncode, bool(done.stdout)) == (code, code == 0)


def test_a_terminal_that_cannot_show_a_character(maps: Path) -> None:
    for option in ("", "--json"):
        line = f"xtok inspect map.safetensors {option}"
        result = shell(line, maps, None, PYTHONIOENCODING="latin-1")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout


# Quiet, debug, help


def test_quiet_does_not_silence_errors_and_debug_shows_the_traceback(cli: Cli) -> None:
    fails(cli("build", "x/y/z", "x", "--quiet"), "x/y/z")
    result = cli("inspect", "none.pt", env={"XTOK_DEBUG": "1"})
    assert (result.returncode, "Traceback" in result.stderr) == (1, True)


def test_each_command_has_a_summary_and_a_valid_example(cli: Cli) -> None:
    listed = works(cli("--help")).stdout
    for name in COMMANDS:
        command, (text, example) = command_of(name), describe_command(name)
        assert command.help == text
        assert f"  {name} " in listed
        assert text.partition("\n\n")[0] in " ".join(listed.split())
        [_, typed, *words] = shlex.split(example)
        assert typed == name
        assert command.make_context(name, words).params


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_has_whole_sentences_and_every_option(columns: int) -> None:
    """Switches have no <bool>, lines are wrapped anew, and rare options have a separate section."""
    for name in COMMANDS:
        app, command = make_app([name]), command_of(name)
        env = {"COLUMNS": str(columns), "NO_COLOR": "1"}
        short, full = (
            CliRunner().invoke(app, [name, flag], env=env).stdout
            for flag in ("--help", "--help-all")
        )
        assert not re.search(r"<(bool|str|Path)|\x1b", full)
        assert max(map(len, full.splitlines())) <= columns
        for part in command.help.split("\n\n"):
            assert "\n".join(wrap(" ".join(part.split()), min(columns, 100))) in short
        assert f"Example:\n  {describe_command(name)[1]}\n" in short
        rare = re.search(r"--help-all also prints (\d+) rarely", short)
        assert ("--trust-remote-code" in full) == (rare is not None and name != "sort-cut")
        assert "--trust-remote-code" not in short
        shown = re.sub(r"--\[no-\]([\w-]+)", r"--\1 --no-\1", full).replace(",", " ").split()
        params = [p for p in command.params if not getattr(p, "hidden", False)]  # NeMo-RL's
        options = [o for p in params for o in (*p.opts, *p.secondary_opts)]
        assert [o for o in options if o.startswith("--") and o not in shown] == []


@pytest.mark.parametrize(
    "line",
    ["align bytes bytes abc", "build bytes bytes", "doctor bytes", "inspect MAP",
     "inspect MAP a", "inspect MAP --against MAP", "verify MAP", "vocab bytes a"],
)  # fmt: skip
def test_the_help_names_the_keys_of_json(cli: Cli, tmp_path: Path, line: str) -> None:
    xtok.build("bytes", "bytes").save(tmp_path / "m.safetensors")
    words = line.replace("MAP", "m.safetensors").split()
    [said] = [p.help for p in command_of(words[0]).params if p.name == "json"]
    # doctor reports a failed check for bytes
    keys = json.loads(cli(*words, "--json").stdout).keys()
    if line == "inspect MAP":  # the help names only some keys
        assert {"student", "teacher", "method", "history", "rows_by_kind", "examples"} <= keys
    else:
        assert keys <= {*re.findall(r"\w+", said)}


def test_the_help_names_the_keys_of_input_files() -> None:
    from xtok.inspection.evaluate import Evaluation
    from xtok.teachers.project import Projected

    for name, kind in (("evaluate", Evaluation), ("project", Projected)):
        [said] = [p.help for p in command_of(name).params if p.name == "json"]
        assert {f.name for f in fields(kind)} <= {*re.findall(r"\w+", said)}


def test_help_of_models_is_shown_once(cli: Cli) -> None:
    assert cli("help", "models").stdout == cli("help", "models", env={"COLUMNS": "120"}).stdout
    assert "SentencePiece" in cli("help", "models").stdout
    command_help = cli("help", "sort-cut").stdout
    assert command_help == cli("sort-cut", "--help").stdout
    assert "Usage: xtok sort-cut MAP [OPTIONS]\n" in command_help
    assert cli("help", "sort-cut", "--help-all").stdout == cli("sort-cut", "--help-all").stdout
    assert cli("--help-all").stdout == cli("--help").stdout == cli("help").stdout
    result = cli("help", "nosuch")
    assert (result.returncode, "No such command 'nosuch'" in result.stderr) == (2, True)


def test_models_follow_maps(cli: Cli, small: Path, maps: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat sat in 2012. " * 20, encoding="utf-8")
    options, models = pair_options(small), pair_options(small)[1::2]
    path = maps / "map.safetensors"
    text = ["--text", "text.txt", "--json"]
    single = works(cli("evaluate", path, *models, *text)).stdout
    assert single == works(cli("evaluate", path, *options, *text)).stdout
    assert works(cli("report", path, *models, "-o", "a.html")).stdout == "a.html\n"
    works(cli("report", path, *options, "-o", "b.html"))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    for words in (["a.pt", *models], ["-o", "b.pt", *models], ["c.pt", *options]):
        works(cli("convert", path, *words))
    contents = [(tmp_path / f"{name}.pt").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize(
    "line", ["--help", "--version", "inspect map.safetensors", "sort-cut map.safetensors", None]
)
def test_heavy_libraries_are_not_loaded(maps: Path, tmp_path: Path, line: str | None) -> None:
    (tmp_path / "map.safetensors").symlink_to(maps / "map.safetensors")
    code = "import xtok; xtok.BuildConfig; xtok.ProjectionMap; xtok.XtokError"
    if line is not None:
        words = ["xtok", *line.split()]
        code = f"from xtok.cli import program; sys.argv = {words}\n"
        code += "try:\n    program()\nexcept SystemExit:\n    pass"
    script = f"import sys\n{code}\nprint([m for m in {LAZY_PACKAGES} if m in sys.modules])"
    assert run_python(script, cwd=tmp_path, check=True).stdout.splitlines()[-1] == "[]"


# Bad input


def test_paths_of_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for folder in ("folder.pt", "a"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "input.pt").touch()
    for output, path in (
        ("new/f.pt", "new/f.pt"),
        ("folder", "folder/m.pt"),
        ("Llama-3.2-1B/", "Llama-3.2-1B/m.pt"),
        ("folder.pt", "folder.pt/m.pt"),
        (".", "m.pt"),
        ("-", "-"),
        ("-/", "-/m.pt"),
        ("~/f.pt", "/home/me/f.pt"),
    ):
        assert output_path(full_path(output), "m.pt", Path("a/input.pt")) == Path(path)
    assert output_path(None, "m.pt", Path("a/input.pt")) == Path("a/m.pt")
    assert output_path(None, "m.pt", Path("a")) == output_path(None, "m.pt") == Path("m.pt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # Models, maps and outputs
        ("build bytes", "name two models: STUDENT TEACHER"),
        ("evaluate m.pt --text no -s bytes", "name two models: STUDENT TEACHER"),
        ("evaluate a --text b", "name two models: STUDENT TEACHER"),
        ("doctor", "name one or two models: STUDENT [TEACHER]"),
        ("render a.json", "name a model: FILE MODEL"),
        ("render a.json bytes -m bytes", "name the model only once (argument or --model)"),
        (
            f"build {BYTES} bytes",
            "name the student model only once (argument or --student-model)",
        ),
        (f"verify m.pt x {BYTES}", "name the student model only once"),
        ("build bytes bytes -t bytes", "name the teacher model only once"),
        (f"convert {BYTES} m.pt", "name the output: xtok convert m.pt m.safetensors"),
        ("convert m.safetensors", "name the output: xtok convert m.safetensors m.pt"),
        ("convert a.pt b.pt -o c.pt", "name the output only once (OUTPUT or --output)"),
        ("report a.pt b.pt c.pt", "name one map, or two maps of one pair"),
        ("report a --text b", "name two models: STUDENT TEACHER"),
        ("evaluate bytes bytes --text b", "name two models: STUDENT TEACHER"),
        ("evaluate m.pt / bytes b.txt --text a.txt", "/ is a folder, not a map"),
        ("report / bytes", "/ is a folder, not a map"),
        ("sort-cut", "name a map (MAP or --initial-projection-path MAP)"),
        ("reapply-exact", "name a map (MAP or --initial-projection-path MAP)"),
        ("sort-cut a --initial-projection-path b", "name one map (MAP or "),
        ("reapply-exact a --initial-projection-path b", "name one map (MAP or "),
        # Empty paths
        ("build bytes bytes --output ''", "the path is empty"),
        ("sort-cut no --output ''", "the path is empty"),
        ("convert no --output=", "the path is empty"),
        ("inspect ''", "the path is empty"),
        ("sort-cut ''", "the path is empty"),
        ("inspect no --against ''", "the path is empty"),
        ("evaluate '' --text no", "the path is empty"),
        ("evaluate no --text ''", "the path is empty"),
        ("build bytes bytes --text ''", "the path is empty"),
        ("build bytes bytes --text no --text=", "the path is empty"),
        (f"multitoken {BYTES} --output-dir ''", "'--output-dir': the path is empty"),
        (
            "sort-cut --initial-projection-path m --output_path=",
            "'--output-path': the path is empty",
        ),
        # Options that would do nothing
        ("build --fuzzy-threshold 0.5", "--fuzzy-threshold needs --special-tokens fuzzy"),
        ("build --field body", "--field needs --text"),
        ("build --timeout 3", "--timeout needs --skip-existing"),
        ("build --target both", "--target needs --weights synthetic or --text"),
        ("inspect a --against b --field x", "--field needs --text"),
        ("align x --teacher-chat-template x", "--teacher-chat-template needs --chat"),
        # Values
        ("align x --max-comb-len 0", "--max-comb-len is 0, expected at least 1, at most 64"),
        ("build --top-k x", "Invalid value for '--top-k' / '-k': must be a valid integer"),
        ("build --for kl", "Invalid value for '--for': 'kl' is not one of"),
        ("build --top-k 5000", "4096"),
        ("build --top-k 1", "expected at least 2"),
        ("build --special-tokens maybe", "'maybe' is not one of"),
        ("build --ignore-student-ids a", "is not a list of numbers such as 0,1,2"),
        ("build --no-such-option", "No such option"),
        # NeMo-RL's options, spelled as in NeMo-RL
        ("sort-cut --tokens-to-cut 4", "No such option: --tokens-to-cut"),
        (f"multitoken {BYTES} --tokens-to-cut x", "Invalid value for '--tokens-to-cut'"),
        (f"multitoken {BYTES} --tokens-to-cut", "'--tokens-to-cut' requires an argument"),
        ("sort-cut --unknown_thing x", "No such option: --unknown-thing"),
        ("report m.pt --output-dir d", "No such option: --output-dir"),
        (f"multitoken {BYTES} --top_k 0", "expected at least 1, at most 4096"),
        (
            f"multitoken {BYTES} --special-token-similarity-threshold 2",
            "--special-token-similarity-threshold is 2.0, expected above 0, at most 1",
        ),
        (f"build {BYTES} --prep_top_k 0", "expected at least 1, at most 4096"),
        (f"generate {BYTES} --keep_top_tokens 9", "generate always uses all tokens"),
        (f"multitoken {BYTES} --special-token-top-k 5", "a special token has one counterpart"),
        (f"build {BYTES} --loss p-kl", "--loss is not an option of this command; use --for"),
    ],
)
def test_error_repeats_the_invalid_command_line(line: str, message: str) -> None:
    shown = usage_error(*shlex.split(line))
    assert message in shown
    assert "Value error" not in shown


def test_glob_without_quotes_is_an_error_with_a_hint(cli: Cli, tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in texts:
        path.write_text("x")
    result = cli("build", "bytes", "bytes", "--text", *map(str, texts))
    assert result.returncode == 2
    hint = "hint: put a glob in quotes, such as --text '*.txt'; or run xtok build --help"
    assert " ".join(result.stderr.split()).endswith(hint)


@pytest.mark.parametrize(
    "words",
    [
        ["align", "bytes", "bytes", "-5 boats"],
        ["align", "bytes", "bytes", "-- boats"],
        ["vocab", "bytes", "-5"],
    ],
)
def test_a_text_that_begins_with_a_dash(cli: Cli, words: list[str]) -> None:
    result = cli(*words)
    assert result.returncode == 2
    hint = f"hint: put -- before a text or token that begins with a dash; or run xtok {words[0]}"
    assert hint in " ".join(result.stderr.split())
    assert cli(*words[:-1], "--", words[-1]).returncode != 2


def test_the_output_is_checked_before_anything_is_loaded(cli: Cli, tmp_path: Path) -> None:
    """Loading comes last: otherwise the error would name the missing models and maps."""
    (tmp_path / "a-file").touch()
    (tmp_path / "page.json").mkdir()
    for line in ("build ./no ./no", "reapply-exact no", "convert no"):
        fails(
            cli(*line.split(), "--output", "a-file/map.pt"),
            "the output cannot be written: a-file is a file",
        )
        fails(cli(*line.split(), "--output", "-"), "a stream")
    fails(cli("report", "no", "--output", "page.html", "--json"), "page.json is a folder")
    assert cli("convert", "no", "folder/").stderr.endswith("hint: name it folder.safetensors\n")
    assert sorted(os.listdir(tmp_path)) == ["a-file", "page.json"]


def test_a_refined_map_is_written_to_the_folder_of_its_input(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    first = ["multitoken", small / "small-digits", "bytes", "-k", "8"]
    works(cli(*first, "-o", "a/x_top_32.pt"))
    works(cli("convert", "a/x_top_32.pt", "a/x.safetensors"))
    for args, path in (
        (first, "small-digits_to_bytes_multitoken_top8.safetensors"),
        (["reapply-exact", "a/x_top_32.pt"], "a/x_top_32_exact_map_remapped.pt"),
        (["sort-cut", "a/x_top_32.pt"], "a/x_top_4_sorted_preservelast.pt"),
        (["sort-cut", "a/x_top_32.pt", "-o", "b"], "b/x_top_4_sorted_preservelast.pt"),
        (
            ["sort-cut", "a/x.safetensors"],
            "a/small-digits_to_bytes_sort-cut_top4_no-exact-match.safetensors",
        ),
        (
            ["reapply-exact", "a/x.safetensors"],
            "a/small-digits_to_bytes_reapply-exact_top8.safetensors",
        ),
        (["reapply-exact", "a/x.safetensors", "-o", "b/y.pt"], "b/y.pt"),
        ([*first, "--exact-match", "-o", "b/z.pt"], "b/z.pt"),
    ):
        assert cli(*args).stdout == f"{path}\n"
    assert (tmp_path / "b/y.pt").read_bytes() == (tmp_path / "b/z.pt").read_bytes()


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("doctor a.tiktoken", "'a.tiktoken@REGEX'"),
        (
            "build bytes null --teacher-vocab-size 9",
            "logits with --student-vocab-size or --teacher-vocab-size",
        ),
        ("doctor bytes --vocab-size 10", "logits with --vocab-size"),
        ("doctor bytes:1", "more than 256 ids, add --vocab-size"),
        (
            f"align {BYTES} --chat chat.json --student-chat-template plain",
            "with --teacher-chat-template, or one of",
        ),
        (
            "doctor bytes bytes --text chat.json --student-chat-template chatml",
            "with --teacher-chat-template, or one of",
        ),
    ],
)
def test_a_hint_names_options_that_the_command_has(
    cli: Cli, tmp_path: Path, line: str, hint: str
) -> None:
    (tmp_path / "a.tiktoken").write_text("QQ== 0\n")
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "x"}]')
    fails(cli(*line.split()), "", hint)
