"""Exports, read back as their readers do it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import REAL, Cli
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from test_projection_map import GOOD, make
from test_stages import byte_ranks

import xtok
from xtok import ProjectionMap, XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.training.exports import byte_prefixes, draft_mapping, export, shared_vocabulary
from xtok.training.subtokens import nemo_overrides, subtokens
from xtok.vocab.table import TokenTable, TokenType, match_bytes


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


def export_tables(
    student: Tokenizer, teacher: Tokenizer, folder: Path
) -> tuple[list[Path], list[str]]:
    notes: list[str] = []
    projection = xtok.build(student, teacher)
    models = {"student_model": student, "teacher_model": teacher}
    path = folder / "pair.pt"
    return export(projection, path, "nemo-subtokens", note=notes.append, **models), notes


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
        paths, _ = export_tables(student, teacher, tmp_path)
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
    assert sentencepiece.encode("a").ids.tolist()[-1] == letter
    lengths = subtokens(sentencepiece, load_tokenizer("bytes")).lengths
    assert (lengths[byte], lengths[letter]) == (0, 1)


def test_long_spellings_are_cut_and_told(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", "abcdefgh", "abcdefghi", width=300)
    paths, notes = export_tables(student, load_tokenizer("bytes"), tmp_path)
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
    paths, notes = export_tables(student, teacher, tmp_path)
    tables = check_tables(student, teacher, paths)
    assert len(tables.common) == 29_234 + 8
    assert len(notes) == 1
    assert notes[0].startswith("qwen.tiktoken: more than 8 tokens of mistral-v3.model, cut to 8")
    assert "213 tokens" in notes[0]


def test_subtokens_are_the_same_bytes_whatever_the_name(
    byte_level: Tokenizer, digits: Tokenizer, built: ProjectionMap, tmp_path: Path
) -> None:
    files = [
        export(
            built, tmp_path / name, "nemo-subtokens", student_model=byte_level, teacher_model=digits
        )
        for name in ("a.pt", "another.pt")
    ]
    assert files[0][0].read_bytes() == files[1][0].read_bytes()


def test_subtokens_need_the_tokenizers_of_the_map(
    byte_level: Tokenizer, digits: Tokenizer, built: ProjectionMap, tmp_path: Path
) -> None:
    with pytest.raises(XtokError, match="takes both tokenizers"):
        export(built, tmp_path / "pair.pt", "nemo-subtokens", student_model=byte_level)
    with pytest.raises(
        XtokError, match=r"student of the map \(.*\) has other tokens than small-dig"
    ):
        export(
            built,
            tmp_path / "p.pt",
            "nemo-subtokens",
            student_model=digits,
            teacher_model=byte_level,
        )
    assert list(tmp_path.iterdir()) == []


def test_overrides_to_paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = Path("pair.pt"), Path("pair.reverse.pt")
    assert nemo_overrides(*files, Path("map.pt")).splitlines() == [
        "# NeMo-RL 0.8.0",
        f"teachers.0.projection_matrix_path={tmp_path}/map.pt",
        '# NeMo-RL, pull requests 3286 and 4177 ("v6")',
        "teachers.0.is_cross_tokenizer=true",
        "teachers.0.aligner.projection_matrix_path=null",
        f"teachers.0.aligner.pseudo_target_path={tmp_path}/pair.pt",
        f"teachers.0.aligner.reverse_pseudo_target_path={tmp_path}/pair.reverse.pt",
        "loss_fn.common_indices_from_subtoks=true",
    ]
    other = nemo_overrides(*files, Path("map.safetensors")).splitlines()
    assert other[0] == f"# NeMo-RL 0.8.0, after: xtok convert MAP --output {tmp_path}/map.pt"
    assert other[1] == f"teachers.0.projection_matrix_path={tmp_path}/map.pt"


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
    lines = nemo_overrides(Path(path), Path("/r.pt"), Path("/m.pt")).splitlines()
    [[word]] = [shlex.split(line) for line in lines if "aligner.pseudo" in line]
    assert word == f"teachers.0.aligner.pseudo_target_path={value}"


# byte-prefix-map: one student id for each teacher id


def test_byte_prefixes() -> None:
    student = words(b"a", b"ab", b"abc", b"x", b"ab", b"", control={5: "<eos>"})
    teacher = words(b"abd", b"abc", b"a", b"q", b"xabc", b"", b"aa", control={5: "</s>"})
    assert byte_prefixes(student, teacher).tolist() == [1, 2, 0, -1, 3, 5, 0]


def test_byte_prefix_map(built: ProjectionMap, tmp_path: Path) -> None:
    [path] = export(built, tmp_path / "prefix.safetensors", "byte-prefix-map")
    found = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    ids, exact = found["student_ids"], found["exact"]
    student, teacher = built.student.table, built.teacher.table
    assert student is not None
    assert teacher is not None
    assert ids.shape == exact.shape == (len(teacher),)
    text = teacher.text_ids
    assert all(teacher[t].startswith(student[ids[t]]) for t in text.tolist())
    assert np.flatnonzero(exact).tolist() == sorted(match_bytes(teacher, student))
    # As its reader does it: the teacher's probabilities, summed up by student token.
    probs = torch.softmax(torch.arange(len(ids)) / 100.0, 0)
    inside = torch.from_numpy(ids) >= 0
    target = torch.zeros(len(student)).index_add(0, torch.from_numpy(ids)[inside], probs[inside])
    residual = probs[~inside].sum()
    assert float(target.sum() + residual) == pytest.approx(1.0, abs=1e-5)


# shared-vocab: JSON pairs


def test_shared_vocabulary() -> None:
    student = words(b"a", b"b", b"a", b"c", b"", control={4: "<eos>"})
    teacher = words(b"c", b"a", b"a", b"", b"d", control={3: "</s>"})
    shared = shared_vocabulary(student, teacher)
    assert shared.pairs == [(0, 1), (3, 0)]
    assert shared.special_pairs == [(4, 3)]


def test_shared_vocab_file(built: ProjectionMap, tmp_path: Path) -> None:
    [path] = export(built, tmp_path / "shared.json", "shared-vocab")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["student"] == {"model_id": "small-byte-level", "vocab_size": 1280}
    pairs = found["pairs"] + found["special_pairs"]
    for side in (0, 1):
        ids = [pair[side] for pair in pairs]
        assert len(set(ids)) == len(ids) > 256
    student, teacher = built.student.table, built.teacher.table
    assert student is not None
    assert teacher is not None
    assert all(student[s] == teacher[t] != b"" for s, t in found["pairs"])
    assert all(student[s] == teacher[t] == b"" for s, t in found["special_pairs"])


# shared-vocab as .safetensors: vLLM's arrays


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
    assert export(projection, path, "shared-vocab", note=notes.append) == [path]
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
    export(projection, path, "shared-vocab")
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


# scipy-npz and parquet: the matrix


def test_scipy_npz(tmp_path: Path) -> None:
    from scipy import sparse

    m = make({0: [(3, 0.75), (1, 0.25)], 2: [(5, 1.0)], 3: [(0, 0.5), (4, 0.5)]})
    [path] = export(m, tmp_path / "map.npz", "scipy-npz")
    matrix = sparse.load_npz(path)
    assert (matrix.format, matrix.dtype, matrix.shape) == ("csr", np.float32, (4, 6))
    assert matrix.has_canonical_format
    assert matrix.toarray().tolist() == [
        [0, 0.25, 0, 0.75, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
        [0.5, 0, 0, 0, 0.5, 0],
    ]
    first = path.read_bytes()
    export(m, path, "scipy-npz")
    assert path.read_bytes() == first


def test_parquet(built: ProjectionMap, tmp_path: Path) -> None:
    from pyarrow import parquet

    [path] = export(built, tmp_path / "map.parquet", "parquet")
    found = parquet.read_table(path)
    types = {field.name: str(field.type) for field in found.schema}
    assert types == {
        "student_id": "int32",
        "teacher_id": "int32",
        "weight": "float",
        "is_slot": "bool",
        "student_token": "binary",
        "teacher_token": "binary",
    }
    columns: dict[str, Any] = found.to_pydict()
    assert columns["student_id"] == built.student_ids.tolist()
    assert columns["weight"] == built.weights.tolist()
    assert columns["is_slot"] == built.is_slot.tolist()
    student = built.student.table
    assert student is not None
    assert columns["student_token"][:9] == [student[i] for i in built.student_ids[:9].tolist()]
    assert json.loads(found.schema.metadata[b"xtok"])["teacher"]["vocab_size"] == 896
    [plain] = export(GOOD, tmp_path / "plain.parquet", "parquet")
    assert parquet.read_table(plain).column_names == [
        "student_id", "teacher_id", "weight", "is_slot"
    ]  # fmt: skip


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(XtokError, match="parquet needs pyarrow") as caught:
        export(GOOD, tmp_path / "map.parquet", "parquet")
    assert caught.value.hint == "pip install pyarrow"


# What is wrong


def test_bad_exports(tmp_path: Path) -> None:
    with pytest.raises(
        XtokError, match=r"the scipy-npz file .*map\.pt does not end in \.npz"
    ) as caught:
        export(GOOD, tmp_path / "map.pt", "scipy-npz")
    assert caught.value.hint == f"name it {tmp_path / 'map.npz'}"
    (tmp_path / "file").touch()
    with pytest.raises(XtokError, match=r"the folder of the scipy-npz file, .*file, is a file"):
        export(GOOD, tmp_path / "file" / "map.npz", "scipy-npz")
    assert export(GOOD, tmp_path / "new" / "map.npz", "scipy-npz") == [tmp_path / "new/map.npz"]
    with pytest.raises(XtokError, match="the map carries no tokens"):
        export(GOOD, tmp_path / "map.json", "shared-vocab")
    with pytest.raises(ValueError, match="format is 'csv'"):
        export(GOOD, tmp_path / "map.csv", "csv")  # type: ignore[arg-type]


def test_the_command(cli: Cli, small: Path, built: ProjectionMap, tmp_path: Path) -> None:
    built.save(tmp_path / "map.safetensors")
    done = cli("export", "map.safetensors", "--format", "shared-vocab", "--output", "shared.json")
    assert (done.returncode, done.stdout) == (0, "shared.json\n")
    assert done.stderr.startswith("note: small-digits has the bytes of ")
    done = cli(
        "export", "map.safetensors", "--format", "nemo-subtokens", "--output", "pair.pt",
        "--student-model", small / "small-byte-level", "--teacher-model", small / "small-digits",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "pair.pt\npair.reverse.pt\n")
    overrides = cli(
        "export", "map.safetensors", "--format", "nemo-subtokens", "-o", "pair.pt",
        "-s", small / "small-byte-level", "-t", small / "small-digits", "--print-config",
    )  # fmt: skip
    config = nemo_overrides(*(tmp_path / f"{name}.pt" for name in ("pair", "pair.reverse", "map")))
    first, _, rest = config.partition("\n")
    assert overrides.stdout == (
        f"{first}, after: xtok convert MAP --output {tmp_path}/map.pt\n{rest}\n"
    )
    done = cli("export", "m.pt", "--format", "parquet", "-o", "m.parquet", "--print-config")
    assert done.returncode == 2
    assert "--print-config goes with --format nemo-subtokens" in done.stderr
    done = cli("export", "map.safetensors", "--format", "nemo-subtokens", "--output", "pair.pt")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(
        "hint: give both models that the map was made with, the student's with --student-model\n"
    )
    done = cli("export", "map.safetensors", "--format", "csv", "--output", "map.csv")
    assert done.returncode == 2


def test_offline_asks_no_hub(cli: Cli, built: ProjectionMap, tmp_path: Path) -> None:
    built.save(tmp_path / "a.safetensors")
    env = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://[::1]:9", "HF_HOME": str(tmp_path / "hf")}
    args = ["--format", "nemo-subtokens", "--output", "b.pt", "--trust-remote-code"]
    done = cli("export", "a.safetensors", *args, "--student-model", "org/model", env=env)
    assert done.returncode == 1
    assert "error: org/model is no file or folder here and not in the local cache" in done.stderr
    assert "thrown while requesting" not in done.stderr
