"""`convert`: files for other programs, read back as these programs read them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from checks import works
from conftest import Cli
from make_maps import GOOD

from xtok import ProjectionMap, XtokError
from xtok.maps.convert import convert, nemo_overrides
from xtok.maps.file import to_safetensors
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES


def test_overrides_to_paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [line] = nemo_overrides(GOOD, Path("map.pt"), "h-kl")
    assert shlex.split(line.partition(": ")[2]) == [
        f"teachers.0.projection_matrix_path={tmp_path}/map.pt",
        "loss_fn.gold_loss=true",
        "loss_fn.xtoken_loss=true",
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/a b/c.pt", "'/a b/c.pt'"), ("/x=,[{.pt", "'/x=,[{.pt'"), ("/it's.pt", r"'/it\'s.pt'"),
        (r"/a\'b.pt", r"'/a\\\'b.pt'"), ("/end\\", "'/end\\\\'"), ("/ü.pt", "'/ü.pt'"),
    ],
)  # fmt: skip
def test_overrides_quote_paths_for_hydra(path: str, value: str) -> None:
    """The expected values are the arguments after shell expansion, parsed by hydra-core 1.3.2."""
    [line] = nemo_overrides(GOOD, Path(path))
    [word] = shlex.split(line.partition(": ")[2])
    assert word == f"teachers.0.projection_matrix_path={value}"


def test_a_map_without_tokens_accepts_its_tokenizers(
    pair: Pair, map_to_digits: ProjectionMap, tmp_path: Path
) -> None:
    sides = {name: replace(getattr(map_to_digits, name), table=None) for name in SIDES}
    bare = replace(map_to_digits, **sides)
    path = tmp_path / "whole.safetensors"
    assert convert(bare, path, pair) == path
    assert path.read_bytes() == to_safetensors(map_to_digits)
    with pytest.raises(XtokError, match="swapped"):
        convert(map_to_digits, tmp_path / "other.safetensors", pair.reversed)
    assert list(tmp_path.iterdir()) == [path]


# The command


def test_convert_writes_a_pt_and_prints_nemos_option(
    cli: Cli, map_to_digits: ProjectionMap, tmp_path: Path
) -> None:
    map_to_digits.save(tmp_path / "map.safetensors")
    pt, again = cli("convert", "map.safetensors", "map.pt"), cli("convert", "map.pt", "-o", "m.pt")
    assert (pt.stdout, again.stdout) == ("map.pt\n", "m.pt\n")
    assert f" teachers.0.projection_matrix_path={tmp_path}/map.pt\n" in pt.stderr
    assert (tmp_path / "map.pt").read_bytes() == (tmp_path / "m.pt").read_bytes()


@pytest.mark.parametrize(("loss", "is_gold"), [("p-kl", "false"), ("gold", "true")])
def test_convert_names_the_loss_of_a_counted_map(
    cli: Cli, small: Path, tmp_path: Path, loss: str, is_gold: str
) -> None:
    works(cli("build", small / "small.model", "bytes", "--for", loss, "-o", "m.safetensors"))
    printed = cli("convert", "m.safetensors", "m.pt").stderr
    assert f"m.pt loss_fn.gold_loss={is_gold} loss_fn.xtoken_loss=false\n" in printed
