"""Spelling maps: shared tokens, spelled tokens and omitted tokens, and the map files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import fails, full_disk, not_none, works
from conftest import KINDS, Cli, Load, Tokenizers
from make_tokenizers import byte_ranks

import xtok
from xtok.errors import MapFileError, OutputError
from xtok.inspection.doctor import doctor
from xtok.inspection.verify import verify
from xtok.maps.events import EventMap
from xtok.maps.file import sha256
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair


def rows(m: SpellingMap, side: str) -> list[list[int]]:
    """The spelling of each token of a side."""
    counts, pieces = getattr(m, f"{side}_counts"), getattr(m, f"{side}_pieces")
    return [part.tolist() for part in np.split(pieces, np.cumsum(counts)[:-1])]


def test_tokens_have_the_longest_exact_spelling(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", "abc", "cd", width=260)
    teacher = byte_ranks(tmp_path / "t.tiktoken", "cd", "bc", "abcd")
    m = xtok.spellings(xtok.load_pair(student, teacher))
    each = [[i] for i in range(256)]
    assert rows(m, "student") == [*each, [97, 98], [97, 257], [256], []]
    assert rows(m, "teacher") == [*each, [258], [98, 99], [257, 100]]
    assert [ids[-2:].tolist() for ids in m.shared] == [[255, 258], [255, 256]]
    assert repr(m) == "SpellingMap(s.tiktoken → t.tiktoken, 260 and 259 tokens, 257 shared)"
    for name in ("student", "teacher"):
        assert getattr(m, f"{name}_pieces").dtype == getattr(m, f"{name}_counts").dtype == np.int32
    assert m.reports[0].counts == {
        "shared tokens": 257, "student tokens spelled": 2, "student tokens left out": 0,
        "teacher tokens spelled": 2, "teacher tokens left out": 0,
    }  # fmt: skip
    assert {why: ids.tolist() for why, ids in m.left_out("student").items()} == {
        "another id has the same bytes": [], "cannot be spelled": [],
        "special, without counterpart": [], "unused": [259],
    }  # fmt: skip


def test_tokens_without_a_spelling_are_reported(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab")
    m = xtok.spellings(xtok.load_pair(student, "null:5"))
    assert len(m.shared[0]) == 0
    assert m.left_out("student")["cannot be spelled"].tolist() == list(range(257))
    assert m.reports[0].notes[-2:] == (
        "student, cannot be spelled: 257 tokens: 0 '\\x00', 1 '\\x01', 2 '\\x02', …",
        "teacher, special, without counterpart: 5 tokens: 0 '0', 1 '1', 2 '2', …",
    )


def test_canonical_id_is_shared(sentencepiece: Tokenizer) -> None:
    """The byte token has the lowest id, but encoded text never contains it."""
    byte, letter = (i for i, token in enumerate(sentencepiece.table.tokens()) if token == b"a")
    assert sentencepiece.segment(b"a") == [letter]
    m = xtok.spellings(xtok.load_pair(sentencepiece, "bytes"))
    assert (rows(m, "student")[byte], rows(m, "student")[letter]) == ([], [97])
    assert rows(m, "teacher")[97] == [letter]
    assert byte in m.left_out("student")["another id has the same bytes"].tolist()


def test_special_tokens_of_the_same_role_are_shared(to_pieces: Pair) -> None:
    m, (student, teacher) = xtok.spellings(to_pieces), to_pieces.tables
    shared = zip(*(ids.tolist() for ids in m.shared), strict=True)
    special = {student.name(s): teacher.name(t) for s, t in shared if not student[s]}
    assert special == {"<|begin_of_text|>": "<s>", "<|end_of_text|>": "</s>"}
    without = m.left_out("student")["special, without counterpart"].tolist()
    assert list(map(student.name, without)) == ["<|im_start|>", "<|im_end|>", "<|pad|>"]


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("to", KINDS)
def test_every_token_is_spelled_or_omitted(tokenizers: Tokenizers, of: str, to: str) -> None:
    student, teacher = tokenizers[of], tokenizers[to]
    m = xtok.spellings(xtok.load_pair(student, teacher))
    for side, ours, theirs in (("student", student, teacher), ("teacher", teacher, student)):
        others, canonical = theirs.table.tokens(), ours.table.canonical_ids()
        spellings = rows(m, side)
        for token_id, (token, pieces) in enumerate(
            zip(ours.table.tokens(), spellings, strict=True)
        ):
            if len(pieces) > 1:
                assert pieces == theirs.segment(token)
            if token and pieces:
                assert b"".join(others[i] for i in pieces) == token
                assert canonical[token] == token_id
        left_out = m.left_out(side)
        assert len(left_out["cannot be spelled"]) == 0
        reported = sorted(i for ids in left_out.values() for i in ids.tolist())
        assert reported == [i for i, pieces in enumerate(spellings) if not pieces]
        spelled = [tuple(pieces) for pieces in spellings if pieces]
        assert len({*spelled}) == len(spelled)


@pytest.mark.real
@pytest.mark.parametrize(
    ("names", "counts"),
    [
        (("llama3.tiktoken", "qwen.tiktoken"), [109_569, 18_434, 253, 42_089, 11]),
        (("mistral-v3.model", "qwen.tiktoken"), [29_236, 2_658, 874, 122_421, 12]),
    ],
)
def test_counts_of_real_models_are_as_recorded(
    load_real: Load, names: tuple[str, str], counts: list[int]
) -> None:
    m = xtok.spellings(xtok.load_pair(*map(load_real, names)))
    assert [*m.reports[0].counts.values()] == counts


# NeMo-RL's two tables


@pytest.fixture
def long_tokens(tmp_path: Path) -> SpellingMap:
    """The student has tokens of 2, 8 and 9 bytes; the teacher has only bytes."""
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", "abcdefgh", "abcdefghi", width=300)
    spelling_map: SpellingMap = xtok.spellings(xtok.load_pair(student, "bytes"))
    return spelling_map


def test_the_two_tables(long_tokens: SpellingMap, tmp_path: Path) -> None:
    long_tokens.save(tmp_path / "pair.pt")
    forward, back = (torch.load(tmp_path / name) for name in ("pair.pt", "pair.reverse.pt"))
    keys = ["subtoks", "lengths", "src", "dst", "N_max", "V_src", "V_dst", "xtok"]
    assert list(forward) == list(back) == keys
    assert [forward[key] for key in keys[2:-1]] == ["s.tiktoken", "bytes", 8, 259, 256]
    assert [back[key] for key in keys[2:-1]] == ["bytes", "s.tiktoken", 8, 256, 259]
    assert forward["subtoks"].dtype == forward["lengths"].dtype == torch.int64
    assert forward["subtoks"].shape == (259, 8)  # one row per token, not per logit
    eight = [97, 98, 99, 100, 101, 102, 103, 104]
    assert forward["subtoks"][[97, 256, 257, 258]].tolist() == [
        # the last is cut to 8 ids; its length remains 9
        [97, *[-1] * 7], [97, 98, *[-1] * 6], eight, eight,
    ]  # fmt: skip
    assert forward["lengths"][[97, 256, 257, 258]].tolist() == [1, 2, 8, 9]
    assert back["subtoks"][:, 0].tolist() == list(range(256))
    assert (back["lengths"].tolist(), int(back["subtoks"][:, 1:].max())) == ([1] * 256, -1)


def test_tables_are_written_and_not_read(
    long_tokens: SpellingMap, tmp_path: Path, cli: Cli
) -> None:
    long_tokens.save(tmp_path / "m.safetensors")
    xtok.convert(tmp_path / "m.safetensors", tmp_path / "pair.pt")
    for name in ("pair.pt", "pair.reverse.pt"):
        with pytest.raises(MapFileError, match="but not read"):
            SpellingMap.load(tmp_path / name)
        fails(cli("inspect", name), "but not read")


def test_both_tables_or_none(tmp_path: Path) -> None:
    """The second table is larger: only the first fits on the disk."""
    teacher = byte_ranks(tmp_path / "t.tiktoken", "ab", "abcdefgh", "abcdefghi", width=300)
    spellings = xtok.spellings("bytes", teacher)
    spellings.save(tmp_path / "pair.pt")
    first, second = ((tmp_path / n).stat().st_size for n in ("pair.pt", "pair.reverse.pt"))
    assert first < second
    message = r"pair\.reverse\.pt .*File too large"
    with full_disk(first), pytest.raises(OutputError, match=message):
        spellings.save(tmp_path / "new" / "pair.pt")
    assert not (tmp_path / "new").exists()


def test_commands_print_nemos_configuration_of_a_spelling_map(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    pair = [str(small / "small.model"), str(small / "small-byte-level")]
    result = cli("events", *pair, "--for", "csd", "-o", "pair.pt")
    assert (result.returncode, result.stdout) == (0, "pair.pt\npair.reverse.pt\n")
    flags = "loss_fn.common_indices_from_subtoks=true loss_fn.kl_chunk_shift=true"
    lines = result.stderr.splitlines()
    assert (
        "note: for NeMo-RL's draft of October 2026: teachers.0.is_cross_tokenizer=true "
        "teachers.0.aligner.projection_matrix_path=null "
        f"teachers.0.aligner.pseudo_target_path={tmp_path}/pair.pt "
        f"teachers.0.aligner.reverse_pseudo_target_path={tmp_path}/pair.reverse.pt {flags}"
    ) in lines
    assert (
        f"note: for NeMo-RL's draft 4177: teachers.0.projection_matrix_path={tmp_path}/pair.pt "
        f"teachers.0.pseudo_target_path={tmp_path}/pair.pt "
        f"teachers.0.reverse_pseudo_target_path={tmp_path}/pair.reverse.pt {flags}"
    ) in lines
    named = cli("events", *pair, "--for", "csd", "--quiet")
    own = "small_to_small-byte-level_spellings.safetensors"
    assert named.stdout == f"{own}\n"
    result = cli("convert", own, "-o", "again.pt", "-s", pair[0], "-t", pair[1], "--json")
    assert json.loads(result.stdout)["paths"] == ["again.pt", "again.reverse.pt"]
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "pair.pt").read_bytes()
    swapped = cli("verify", own, "-s", pair[1], "-t", pair[0])
    assert (swapped.returncode, "swapped" in swapped.stdout) == (3, True)
    fails(cli("convert", own, "x.pt", "-s", pair[1], "-t", pair[0]), "swapped")


def test_spellings_accepts_a_pair_or_two_tokenizers(
    byte_level: Tokenizer, digits: Tokenizer
) -> None:
    m = xtok.spellings(byte_level, digits)
    assert sha256(m) == sha256(xtok.spellings(xtok.load_pair(byte_level, digits)))
    assert isinstance(xtok.events(byte_level, digits), EventMap)
    with pytest.raises(ValueError, match="loss is 'kl'"):
        xtok.get_map(byte_level, digits, for_loss="kl")  # type: ignore[call-overload]


# Output of commands for spelling maps


def test_inspect_counts_spelled_and_omitted_tokens(
    long_tokens: SpellingMap, cli: Cli, tmp_path: Path
) -> None:
    long_tokens.save(tmp_path / "m.safetensors")
    result = works(cli("inspect", "m.safetensors"))
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    assert ["shared", "256", "256"] in cells
    assert ["2 pieces", "1", "0"] in cells
    assert ["student", "'ab'", "256", "'a' 'b'"] in cells
    values = json.loads(cli("inspect", "m.safetensors", "--num-examples", "1", "--json").stdout)
    assert values["spelled"]["student"] == {"shared": 256, "spelled": 3, "left_out": {}}
    assert values["pieces"]["student"] == {"0": 41, "1": 256, "2": 1, "8": 1, "9": 1}
    assert values["examples"] == [
        {"side": "student", "token_id": 256, "token": "ab", "pieces": ["a", "b"], "left_out": ""}
    ]
    fails(cli("inspect", "m.safetensors", "--classes"), "spelling map")


def test_verify_counts_spelled_and_omitted_tokens(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", width=258)
    m = xtok.spellings(xtok.load_pair(student, "null:5"))
    checks = {check.name: (check.level, check.message) for check in verify(m).checks}
    for side, left_out in (
        ("student", "257 (cannot be spelled)"), ("teacher", "5 (special, without counterpart)")
    ):  # fmt: skip
        message = f"0 shared, 0 spelled; left out: {left_out}"
        assert checks[f"{side} spelled"] == ("ok", message)


def test_doctor_counts_spelled_and_omitted_tokens(
    sentencepiece: Tokenizer, byte_level: Tokenizer
) -> None:
    student, teacher = not_none(not_none(doctor(sentencepiece, byte_level).pair).spellings)
    m = xtok.spellings(xtok.load_pair(sentencepiece, byte_level))
    assert student.shared == teacher.shared == len(m.shared[0])
    assert student.spelled == int((m.student_counts > 1).sum())
    assert sum(student.left_out.values()) == m.reports[0].counts["student tokens left out"]
    counts = f"{teacher.shared:,} shared, {teacher.spelled:,} spelled"
    assert str(teacher) == f"{counts}; left out: 3 (special, without counterpart)"
    assert not_none(doctor(byte_level, byte_level).pair).spellings is None
