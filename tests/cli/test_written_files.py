"""Files written by commands: named on stdout, valid for `verify`, and equal when read back."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from checks import fails, printed_json, works
from conftest import Cli
from forked import Forks
from make_maps import pt_bytes

import xtok
from xtok.maps.file import to_safetensors
from xtok.maps.map_arguments import read_map
from xtok.tokenizers.pairs import Pair

STAGES = {
    "build": "build P",
    "p-kl": "build P --for p-kl",
    "gold": "build P --for gold",
    "h-kl": "build P --for h-kl",
    "no-exact": "build P --no-exact-match --top-k 2",
    "text": "build P --text T",
    "p-kl-text": "build P --for p-kl --text T",
    "gold-text": "build P --for gold --text T",
    "h-kl-text": "build P --for h-kl --text T",
    "wide-text": "build P --for p-kl --text T --top-k 16",
    "multitoken": "multitoken P",
    "few": "multitoken P --top-k 2 --exact-match",
    "generate": "generate P --embedding-model spelling",
    "one": "generate P --embedding-model spelling --top-k 1",
    "exact": "reapply-exact multitoken.F",
    "exact-of-generate": "reapply-exact generate.F",
    "cut": "sort-cut exact.F",
    "cut-of-generate": "sort-cut generate.F --top-k 2",
    "cut-of-text": "sort-cut p-kl-text.F --top-k 3",
    "events": "events P",
    "csd": "events P --for csd",
}
"""How each file is made, in order: `P` is both models, `T` a text, `F` the format."""


OTHER_FORMAT = {"pt": "safetensors", "safetensors": "pt"}
PROJECTION_MAPS = [name for name in STAGES if name not in ("events", "csd")]
# Event maps have one format, and xtok does not read NeMo-RL's tables for CSD.
FILES = [*product(STAGES, ["safetensors"]), *product(PROJECTION_MAPS, ["pt"])]
# Files are made from other files, so one process makes all of them.
pytestmark = pytest.mark.xdist_group("written files")
WrittenFile = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def written_file(
    forks: Forks, small: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> WrittenFile:
    """Run the command of a stage, once, after the stage that makes its input."""
    folder = tmp_path_factory.mktemp("written")
    words = {"P": [small / "small-byte-level", small / "small.model"], "T": [corpus]}

    @cache
    def write(name: str, suffix: str) -> Path:
        path = folder / f"{name}.{suffix}"
        args: list[str | Path] = []
        for word in STAGES[name].split():
            stage, is_file, _ = word.partition(".F")
            args += [write(stage, suffix)] if is_file else words.get(word, [word])
        result = works(forks.run([*args, "-o", path, "--quiet"], folder))
        assert result.stdout.splitlines()[0] == str(path)
        return path

    return write


@pytest.mark.parametrize(("name", "suffix"), FILES)
def test_every_file_passes_verify(
    written_file: WrittenFile, to_pieces: Pair, name: str, suffix: str
) -> None:
    assert not xtok.verify(written_file(name, suffix), to_pieces).failed


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("name", PROJECTION_MAPS)
def test_every_map_is_read_back_equal(
    written_file: WrittenFile, to_pieces: Pair, tmp_path: Path, name: str, suffix: str
) -> None:
    path = written_file(name, suffix)
    converted = xtok.convert(path, tmp_path / f"converted.{OTHER_FORMAT[suffix]}")
    assert not xtok.verify(converted, to_pieces).failed
    back = xtok.convert(converted, tmp_path / f"back.{suffix}")
    assert back.read_bytes() == path.read_bytes()
    assert to_safetensors(read_map(path)) == to_safetensors(read_map(converted))


NOTE = "note: Use plain KL: both models have the same vocabulary, so no map is needed."


@pytest.mark.parametrize(
    "line",
    ["build", "build --for p-kl", "build --skip-existing", "multitoken", "events",
     "events --for csd", "generate --embedding-model spelling"],
)  # fmt: skip
def test_a_map_of_equal_tokenizers_is_written_with_a_note(
    cli: Cli, small: Path, tmp_path: Path, line: str
) -> None:
    words = [*line.split(), small / "small-digits", small / "small-digits"]
    result = works(cli(*words))
    assert f"{NOTE}\n" in result.stderr
    path = result.stdout.removesuffix("\n")
    assert os.listdir(tmp_path) == [path]
    content = (tmp_path / path).read_bytes()
    assert works(cli(*words, "--quiet")).stdout == f"{path}\n"
    assert printed_json(cli(*words, "--json"))["paths"] == [path]
    assert (tmp_path / path).read_bytes() == content
    works(cli("verify", path))


# Paths that -o does not accept


@pytest.mark.parametrize("line", ["events P --for csd -o pair.pt", "convert m.safetensors pair.pt"])
def test_tables_of_other_pairs_are_not_overwritten(
    cli: Cli, small: Path, tmp_path: Path, line: str
) -> None:
    pair = [str(small / "small.model"), str(small / "small-byte-level")]
    m, beside = xtok.spellings(*pair), tmp_path / "pair.reverse.pt"
    for name in ("m.safetensors", "own.pt"):
        m.save(tmp_path / name)
    xtok.spellings(*pair[::-1]).save(tmp_path / "other.pt")
    own, other = ((tmp_path / name).read_bytes() for name in ("own.pt", "other.reverse.pt"))
    words = [w for word in line.split() for w in (pair if word == "P" else [word])]
    for content in (b"mine", pt_bytes({"weight": torch.zeros(3)}), own, other):
        beside.write_bytes(content)
        fails(cli(*words), "pair.reverse.pt")
        assert not (tmp_path / "pair.pt").exists()
        assert beside.read_bytes() == content
    beside.unlink()
    beside.mkdir()
    fails(cli(*words), "pair.reverse.pt")
    assert not (tmp_path / "pair.pt").exists()


def test_tables_of_the_pair_are_written_again(cli: Cli, small: Path, tmp_path: Path) -> None:
    line = ["events", small / "small.model", small / "small-byte-level", "--for", "csd"]
    first = works(cli(*line, "-o", "pair.pt"))
    content = (tmp_path / "pair.reverse.pt").read_bytes()
    assert works(cli(*line, "-o", "pair.pt")).stdout == first.stdout
    assert (tmp_path / "pair.reverse.pt").read_bytes() == content


def test_a_report_does_not_overwrite_other_data(cli: Cli, tmp_path: Path) -> None:
    xtok.build("bytes", "bytes").save(tmp_path / "m.safetensors")
    line = ["report", "m.safetensors", "-o", "page.html", "--json"]
    for _ in range(2):
        assert works(cli(*line)).stdout == "page.html\npage.json\n"
    (tmp_path / "page.html").unlink()
    (tmp_path / "page.json").write_text('{"mine": 1}')
    fails(cli(*line), "page.json exists and is not replaced")
    assert os.listdir(tmp_path).count("page.html") == 0


# Command lines of NeMo-RL's users


@pytest.mark.parametrize("output", [[], ["-o", "x.pt"]])
def test_output_for_training_is_noted_if_a_preset_is_better(cli: Cli, output: list[str]) -> None:
    better = "note: for training, use xtok events STUDENT TEACHER (event KL)"
    line = "generate -s bytes -t bytes --embedding-model spelling --top_k 8"
    result = works(cli(*line.split(), *output))
    for command in (result, works(cli("sort-cut", result.stdout.strip(), "--top_k", "4", *output))):
        assert better in command.stderr
        assert ("NeMo-RL reads only .pt: run xtok convert " in command.stderr) == (not output)


def test_a_counted_map_is_not_called_worse(cli: Cli, small: Path) -> None:
    works(cli("build", "bytes", small / "small.model", "--for", "p-kl", "-o", "m.safetensors"))
    assert "better" not in works(cli("sort-cut", "m.safetensors", "-k", "2")).stderr


def test_multitoken_shows_examples(cli: Cli, small: Path) -> None:
    line = ["multitoken", small / "small-digits", small / "small.model", "--num-examples", "50"]
    result = works(cli(*line, "-o", "m.pt"))
    assert result.stdout == "m.pt\n"
    assert result.stderr.count("│ pieces") == 50
    assert works(cli(*line, "-o", "m.pt", "--quiet")).stderr == ""


# Without -o


def test_a_default_output_replaces_no_other_map(cli: Cli, small: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.txt").write_text(f"a text in {folder}\n" * 40)
    pair = small / "small-digits", "bytes"
    first, second = (("build", *pair, "--text", f"{folder}/train.txt") for folder in "ab")
    path = tmp_path / works(cli(*first)).stdout.strip()
    before = path.read_bytes()
    works(cli(*first))  # the same map
    for more in ((), ("--skip-existing",)):
        other = cli(*second, *more)
        fails(other, f"{path.name} already exists and is not replaced: ", "--output")
        assert path.read_bytes() == before
    works(cli(*second, "-o", path.name))
    assert path.read_bytes() != before
    events = tmp_path / works(cli("events", *pair)).stdout.strip()
    works(cli("events", *pair))
    for named in ((), ("-o", ".")):  # xtok names the file in a folder
        other = cli("events", *pair, *named, "--student-vocab-size", "9999")
        fails(other, f"{events.name} already exists and is not replaced: ", "--output")
        assert other.stderr.count(events.name) == 1


def test_a_stage_does_not_replace_its_input_by_default(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    first = works(cli("multitoken", small / "small-digits", "bytes")).stdout.strip()
    cut = works(cli("sort-cut", first, "--top-k", "3")).stdout.strip()
    before = (tmp_path / cut).read_bytes()
    works(cli("sort-cut", first, "--top-k", "3"))  # the same map
    fails(
        cli("sort-cut", cut, "--top-k", "3"),
        f"{cut} already exists and is not replaced",
        "--output",
    )
    assert (tmp_path / cut).read_bytes() == before
    works(cli("sort-cut", cut, "--top-k", "3", "-o", cut))
    assert (tmp_path / cut).read_bytes() != before
