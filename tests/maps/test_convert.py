"""`convert`: what other programs read, read back as they do it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import Cli
from make import GOOD, byte_ranks

import xtok
from xtok import ProjectionMap, XtokError
from xtok.maps.convert import convert
from xtok.maps.subtokens import nemo_overrides, nemo_table_overrides, subtokens
from xtok.tokenizers import Tokenizer, load_tokenizer

# nemo-subtokens: two tables


class Tables(NamedTuple):
    """What NeMo-RL's draft makes of the two files; see `as_the_draft_reads`."""

    common: dict[int, int]
    forward: dict[tuple[int, ...], list[tuple[int, int]]]
    reverse: dict[tuple[int, ...], list[tuple[int, int]]]


def as_the_draft_reads(forward: Path, reverse: Path, teacher_size: int) -> Tables:
    """A stand-in for NeMo-RL, written after its source, not run.

    After `_common_indices_from_subtoks` and `_ensure_bidir_prefix_support_index` in
    `loss_functions.py`, branch `avenkateshha/xtoken-v6-loss` (a84de17). Common are rows of length
    1, the lowest student id of each teacher id. Longer rows are indexed by all but their last
    token; those that are longer than the table is wide, or that hold a −1, are skipped.
    """
    loaded = [
        torch.load(path, map_location="cpu", weights_only=True) for path in (forward, reverse)
    ]
    tables = [(table["subtoks"].long(), table["lengths"].long()) for table in loaded]
    subtoks, lengths = tables[0]
    common: dict[int, int] = {}
    for student_id in (lengths == 1).nonzero(as_tuple=True)[0].tolist():
        teacher_id = int(subtoks[student_id, 0])
        if 0 <= teacher_id < teacher_size:
            common.setdefault(teacher_id, student_id)
    indexes = []
    for rows, sizes in tables:
        index: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for token_id, size in enumerate(sizes.tolist()):
            chain = rows[token_id, :size].tolist()
            if 1 < size <= rows.size(1) and min(chain) >= 0:
                index.setdefault(tuple(chain[:-1]), []).append((token_id, chain[-1]))
        indexes.append(index)
    return Tables({s: t for t, s in common.items()}, *indexes)


def write_tables(
    student: Tokenizer, teacher: Tokenizer, folder: Path
) -> tuple[list[Path], list[str]]:
    notes: list[str] = []
    projection = xtok.build(student, teacher)
    models = {"student_model": student, "teacher_model": teacher}
    path = folder / "pair.pt"
    return convert(projection, path, to="nemo-subtokens", note=notes.append, **models), notes


def check_tables(student: Tokenizer, teacher: Tokenizer, paths: list[Path]) -> Tables:
    """Check that what the draft makes of the files is true of the tokenizers."""
    tables = as_the_draft_reads(paths[0], paths[1], len(teacher.table))
    ours, theirs = student.table, teacher.table
    ids_of = ours.canonical_ids(), theirs.canonical_ids()
    text = {s: t for s, t in tables.common.items() if ours[s]}
    assert text == {s: ids_of[1][token] for token, s in ids_of[0].items() if token in ids_of[1]}
    for index, of, into in ((tables.forward, ours, theirs), (tables.reverse, theirs, ours)):
        for prefix, alternatives in index.items():
            start = b"".join(into[i] for i in prefix)
            for token_id, last in alternatives:
                assert of[token_id] == start + into[last]
    return tables


def test_nemo_subtokens(byte_level: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path) -> None:
    for student, teacher in ((byte_level, sentencepiece), (sentencepiece, byte_level)):
        paths, _ = write_tables(student, teacher, tmp_path)
        assert [path.name for path in paths] == ["pair.pt", "pair.reverse.pt"]
        for path, src, dst in ((paths[0], student, teacher), (paths[1], teacher, student)):
            found = torch.load(path, weights_only=True)
            assert list(found) == ["subtoks", "lengths", "src", "dst", "N_max", "V_src", "V_dst"]
            sizes = [one.vocabulary.tokenizer_vocab_size or 0 for one in (src, dst)]
            assert [found["V_src"], found["V_dst"], found["N_max"]] == [*sizes, 8]
            assert [found["src"], found["dst"]] == [
                src.vocabulary.model_id,
                dst.vocabulary.model_id,
            ]
            subtoks, lengths = found["subtoks"], found["lengths"]
            assert subtoks.dtype == lengths.dtype == torch.int64
            assert subtoks.shape == (sizes[0], 8)
            assert torch.equal((subtoks >= 0).sum(1), lengths.clamp(max=8))
            assert int(subtoks.max()) < sizes[1]
        tables = check_tables(student, teacher, paths)
        assert len(tables.common) > 256
        assert min(len(tables.forward), len(tables.reverse)) > 50
        eos = [one.table.roles["eos"][0] for one in (student, teacher)]
        assert tables.common[eos[0]] == eos[1]


def test_of_several_ids_the_tables_have_the_one_that_a_text_has(sentencepiece: Tokenizer) -> None:
    """The draft keeps the lowest id, which would be the byte token instead of the letter."""
    byte, letter = (i for i, token in enumerate(sentencepiece.table.tokens()) if token == b"a")
    assert sentencepiece.segment(b"a") == [letter]
    spelled = subtokens(xtok.pair(sentencepiece, "bytes"))
    assert (spelled.get(byte), spelled[letter]) == (None, [97])


def test_long_spellings_are_cut_and_told(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", "abcdefgh", "abcdefghi", width=300)
    paths, notes = write_tables(student, load_tokenizer("bytes"), tmp_path)
    found = torch.load(paths[0], weights_only=True)
    assert found["subtoks"].shape == (259, 8)  # the tokenizer's ids, not the width of the logits
    assert found["subtoks"][256:].tolist() == [
        [97, 98, -1, -1, -1, -1, -1, -1],
        [97, 98, 99, 100, 101, 102, 103, 104],
        [97, 98, 99, 100, 101, 102, 103, 104],
    ]
    assert found["lengths"][256:].tolist() == [2, 8, 9]
    tables = as_the_draft_reads(paths[0], paths[1], 256)
    assert sorted(token_id for rows in tables.forward.values() for token_id, _ in rows) == [
        256,
        257,
    ]
    assert notes == [
        "s.tiktoken: more than 8 tokens of bytes, cut to 8, and skipped by NeMo-RL: "
        "1 token: 258 'abcdefghi'"
    ]


@pytest.mark.real
def test_nemo_subtokens_of_real_models(
    load_real: Callable[[str], Tokenizer], tmp_path: Path
) -> None:
    student, teacher = load_real("mistral-v3.model"), load_real("qwen.tiktoken")
    paths, notes = write_tables(student, teacher, tmp_path)
    tables = check_tables(student, teacher, paths)
    assert len(tables.common) == 29_234 + 8
    assert len(notes) == 1
    assert notes[0].startswith("qwen.tiktoken: more than 8 tokens of mistral-v3.model, cut to 8")
    assert "213 tokens" in notes[0]


def test_subtokens_are_the_same_bytes_whatever_the_name(
    byte_level: Tokenizer, digits: Tokenizer, map_to_digits: ProjectionMap, tmp_path: Path
) -> None:
    files = [
        convert(
            map_to_digits,
            tmp_path / name,
            to="nemo-subtokens",
            student_model=byte_level,
            teacher_model=digits,
        )
        for name in ("a.pt", "another.pt")
    ]
    assert files[0][0].read_bytes() == files[1][0].read_bytes()


def test_subtokens_need_the_tokenizers_of_the_map(
    byte_level: Tokenizer, digits: Tokenizer, map_to_digits: ProjectionMap, tmp_path: Path
) -> None:
    with pytest.raises(XtokError, match="takes both tokenizers"):
        convert(map_to_digits, tmp_path / "pair.pt", to="nemo-subtokens", student_model=byte_level)
    with pytest.raises(XtokError, match="the sides are swapped"):
        convert(
            map_to_digits,
            tmp_path / "p.pt",
            to="nemo-subtokens",
            student_model=digits,
            teacher_model=byte_level,
        )
    assert list(tmp_path.iterdir()) == []


def test_overrides_to_paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = nemo_overrides(Path("map.pt"), "h-kl").partition(": ")[2]
    assert shlex.split(found) == [
        f"teachers.0.projection_matrix_path={tmp_path}/map.pt",
        "loss_fn.gold_loss=true",
        "loss_fn.xtoken_loss=true",
    ]
    found = nemo_table_overrides(Path("pair.pt"), Path("pair.reverse.pt")).partition(": ")[2]
    assert shlex.split(found) == [
        "teachers.0.is_cross_tokenizer=true",
        "teachers.0.aligner.projection_matrix_path=null",
        f"teachers.0.aligner.pseudo_target_path={tmp_path}/pair.pt",
        f"teachers.0.aligner.reverse_pseudo_target_path={tmp_path}/pair.reverse.pt",
        "loss_fn.common_indices_from_subtoks=true",
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/a b/c.pt", "'/a b/c.pt'"),
        ("/x=,[{.pt", "'/x=,[{.pt'"),
        ("/it's.pt", r"'/it\'s.pt'"),
        (r"/a\'b.pt", r"'/a\\\'b.pt'"),
        ("/end\\", "'/end\\\\'"),
        ("/ü.pt", "'/ü.pt'"),
    ],
)
def test_overrides_with_paths_that_hydra_takes_in_quotes_only(path: str, value: str) -> None:
    """What the shell hands on; read back by hydra-core 1.3.2 when this was written."""
    [word] = shlex.split(nemo_overrides(Path(path)).partition(": ")[2])
    assert word == f"teachers.0.projection_matrix_path={value}"


# What is wrong, and the command


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(XtokError) as caught:
        convert(GOOD, tmp_path / "map.safetensors", to="nemo-subtokens")
    assert caught.value.hint == f"name it {tmp_path / 'map.pt'}"
    (tmp_path / "file").touch()
    with pytest.raises(XtokError, match="is a file"):
        convert(GOOD, tmp_path / "file" / "map.pt", to="pt")
    with pytest.raises(ValueError, match="to is 'csv'"):
        convert(GOOD, tmp_path / "map.csv", to="csv")  # type: ignore[arg-type]
    with pytest.raises(XtokError):
        convert(GOOD, tmp_path / "map.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command(cli: Cli, small: Path, map_to_digits: ProjectionMap, tmp_path: Path) -> None:
    map_to_digits.save(tmp_path / "map.safetensors")
    pt, again = cli("convert", "map.safetensors", "map.pt"), cli("convert", "map.pt", "-o", "m.pt")
    assert (pt.stdout, again.stdout) == ("map.pt\n", "m.pt\n")
    assert f" teachers.0.projection_matrix_path={tmp_path}/map.pt\n" in pt.stderr
    assert (tmp_path / "map.pt").read_bytes() == (tmp_path / "m.pt").read_bytes()
    tables = ["convert", "map.safetensors", "pair.pt", "--to", "nemo-subtokens"]
    models = ["-s", small / "small-byte-level", "-t", small / "small-digits"]
    done = cli(*tables, *models)
    assert (done.returncode, done.stdout) == (0, "pair.pt\npair.reverse.pt\n")
    assert f" teachers.0.aligner.pseudo_target_path={tmp_path}/pair.pt " in done.stderr
    done = cli(*tables)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--student-model" in done.stderr.splitlines()[-1]
    for wrong in (["map.pt", "-o", "x.pt"], [], ["x.csv", "--to", "csv"]):
        assert cli("convert", "map.safetensors", *wrong).returncode == 2
