"""`convert`: what other programs read, read back as they do it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import REAL, Cli
from make import GOOD, byte_ranks
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor

import xtok
from xtok import ProjectionMap, XtokError
from xtok.maps.convert import convert, draft_mapping
from xtok.maps.subtokens import nemo_overrides, nemo_table_overrides, subtokens
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.vocab.table import TokenTable, TokenType


@pytest.fixture(scope="module")
def built(byte_level: Tokenizer, digits: Tokenizer) -> ProjectionMap:
    return xtok.build(byte_level, digits)


def words(*tokens: bytes, control: dict[int, str] | None = None) -> TokenTable:
    types = [TokenType.NORMAL] * len(tokens)
    for i in control or {}:
        types[i] = TokenType.CONTROL
    roles = {"eos": tuple(control or {})} if control else {}
    return TokenTable(
        np.frombuffer(b"".join(tokens), np.uint8),
        np.cumsum([0, *map(len, tokens)]),
        np.array(types, np.uint8),
        control_names=control or {},
        roles=roles,
    )


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
    byte_level: Tokenizer, digits: Tokenizer, built: ProjectionMap, tmp_path: Path
) -> None:
    files = [
        convert(
            built,
            tmp_path / name,
            to="nemo-subtokens",
            student_model=byte_level,
            teacher_model=digits,
        )
        for name in ("a.pt", "another.pt")
    ]
    assert files[0][0].read_bytes() == files[1][0].read_bytes()


def test_subtokens_need_the_tokenizers_of_the_map(
    byte_level: Tokenizer, digits: Tokenizer, built: ProjectionMap, tmp_path: Path
) -> None:
    with pytest.raises(XtokError, match="takes both tokenizers"):
        convert(built, tmp_path / "pair.pt", to="nemo-subtokens", student_model=byte_level)
    with pytest.raises(XtokError, match="the sides are swapped"):
        convert(
            built,
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


# vllm-tli: vLLM's arrays


class VocabMapping:
    """A stand-in for vLLM's class of this name, written after its source, not run.

    After `vllm/v1/spec_decode/vocab_mapping.py` (0f17ee0): how its three arrays are used.
    """

    def __init__(self, path: Path, unknown: tuple[int, int]) -> None:
        arrays = load_file(path)
        self.to_target = arrays["draft_to_target_ids"]
        self.to_draft = arrays["target_to_draft_ids"]
        self.mask = arrays["intersection_mask_draft"]
        self.unknown = unknown

    def draft_ids(self, target_ids: torch.Tensor) -> torch.Tensor:
        ids = self.to_draft[target_ids]
        return torch.where(ids == -1, self.unknown[0], ids)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        ids = self.to_target[draft_ids]
        return torch.where(ids == -1, self.unknown[1], ids)

    def constrained(self, draft_logits: torch.Tensor) -> torch.Tensor:
        return draft_logits.masked_fill(~self.mask, float("-inf"))


def test_draft_mapping() -> None:
    draft = words(b"a", b"b", b"a", b"c", b"", control={4: "<eos>"})
    target = words(b"c", b"a", b"a", b"", b"d", b"e", control={3: "</s>"})
    mapping = draft_mapping(draft, target)
    assert mapping.draft_to_target_ids.tolist() == [1, -1, -1, 0, 3]
    assert mapping.target_to_draft_ids.tolist() == [3, 0, -1, 4, -1, -1]
    assert mapping.intersection_mask_draft.tolist() == [True, False, False, True, True]
    nothing = draft_mapping(words(b"x"), words(b"y"))
    assert [array.tolist() for array in nothing] == [[-1], [-1], [False]]


def test_the_arrays_as_vllm_uses_them(
    sentencepiece: Tokenizer, byte_level: Tokenizer, tmp_path: Path
) -> None:
    notes: list[str] = []
    projection = xtok.build(sentencepiece, byte_level)
    path = tmp_path / "shared.safetensors"
    assert convert(projection, path, to="vllm-tli", note=notes.append) == [path]
    draft, target = sentencepiece.table, byte_level.table
    arrays = load_file(path)
    assert {name: (array.dtype, len(array)) for name, array in arrays.items()} == {
        "draft_to_target_ids": (torch.int64, len(draft)),
        "target_to_draft_ids": (torch.int64, len(target)),
        "intersection_mask_draft": (torch.bool, len(draft)),
    }
    mapping = VocabMapping(path, (0, 5))
    shared = mapping.mask.nonzero().flatten()
    assert torch.equal(mapping.draft_ids(mapping.target_ids(shared)), shared)
    assert set(mapping.target_ids((~mapping.mask).nonzero().flatten()).tolist()) == {5}
    best = int(mapping.constrained(torch.arange(len(draft), dtype=torch.float32)).argmax())
    assert best == int(shared.max())
    for s, t in zip(shared.tolist(), mapping.target_ids(shared).tolist(), strict=True):
        assert draft[s] == target[t]
    text = "The tea is in the teapot, 201 times."
    ids = torch.from_numpy(byte_level.encode(text).ids)
    spelled = b"".join(draft[i] for i in mapping.draft_ids(ids).tolist() if i)
    assert len(spelled) > len(text) // 2  # what the target wrote, as far as the draft has it
    [note] = notes
    num_text = sum(1 for s in shared.tolist() if draft[s])
    assert note.startswith(f"small-byte-level has the bytes of {num_text:,} of ")
    before = path.read_bytes()
    convert(projection, path, to="vllm-tli")
    assert path.read_bytes() == before


@pytest.mark.real
def test_real_drafts_share_more_by_bytes_than_by_vllms_rule(
    load_real: Callable[[str], Tokenizer],
) -> None:
    """Its rule: equal display strings, a leading space marker being a space (as above, 0f17ee0)."""
    draft, target = load_real("mistral-v3.model"), load_real("qwen.tiktoken")
    mapping = draft_mapping(draft.table, target.table)
    with_bytes = draft.table.lengths > 0
    assert int(mapping.intersection_mask_draft[with_bytes].sum()) == 29_234
    characters = bytes_to_unicode()
    names: dict[str, int] = {}
    for t, token in enumerate(target.table.tokens()):
        if token:
            name = "".join(characters[b] for b in token)
            names[f" {name[1:]}" if name[0] == "Ġ" else name] = t
    pieces = SentencePieceProcessor(model_file=str(REAL / "mistral-v3.model"))
    by_rule = {}
    for s in np.flatnonzero(with_bytes).tolist():
        piece = pieces.id_to_piece(s)
        piece = f" {piece[1:]}" if piece[0] == "▁" else piece
        if piece in names:
            by_rule[s] = names[piece]
    assert len(by_rule) == 24_747
    assert sum(draft.table[s] != target.table[t] for s, t in by_rule.items()) == 145


def bytes_to_unicode() -> dict[int, str]:
    """Return the characters that stand for bytes in vocabularies of GPT-2's kind."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + n) for n, b in enumerate(hidden)}}


# What is wrong, and the command


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(XtokError) as caught:
        convert(GOOD, tmp_path / "map.pt", to="vllm-tli")
    assert caught.value.hint == f"name it {tmp_path / 'map.safetensors'}"
    (tmp_path / "file").touch()
    with pytest.raises(XtokError, match="is a file"):
        convert(GOOD, tmp_path / "file" / "map.pt", to="pt")
    with pytest.raises(XtokError, match="the map carries no tokens"):
        convert(GOOD, tmp_path / "map.safetensors", to="vllm-tli")
    with pytest.raises(ValueError, match="to is 'csv'"):
        convert(GOOD, tmp_path / "map.csv", to="csv")  # type: ignore[arg-type]
    with pytest.raises(XtokError):
        convert(GOOD, tmp_path / "map.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command(cli: Cli, small: Path, built: ProjectionMap, tmp_path: Path) -> None:
    built.save(tmp_path / "map.safetensors")
    pt, again = cli("convert", "map.safetensors", "map.pt"), cli("convert", "map.pt", "-o", "m.pt")
    assert (pt.stdout, again.stdout) == ("map.pt\n", "m.pt\n")
    assert f" teachers.0.projection_matrix_path={tmp_path}/map.pt\n" in pt.stderr
    assert (tmp_path / "map.pt").read_bytes() == (tmp_path / "m.pt").read_bytes()
    shared = cli("convert", "map.safetensors", "--to", "vllm-tli", "--output", "vllm.safetensors")
    assert (shared.returncode, shared.stdout) == (0, "vllm.safetensors\n")
    assert shared.stderr.startswith("note: small-digits has the bytes of ")
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
