"""Facts about real tokenizers and their maps; needs the files of scripts/fetch_tokenizers.py."""

from __future__ import annotations

import json
import random
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import naive
import numpy as np
import pytest
from checks import identity, not_none, related_by_bytes
from conftest import FETCHED, Load
from loss_inputs import nemo_values
from make_maps import built
from make_tokenizers import table_of

import xtok
from xtok.alignment.aligner import TokenAligner
from xtok.building.multitoken import multitoken
from xtok.config import BuildConfig, MultitokenConfig
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.table import TokenType

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("name", "ids", "partial", "control"),
    [
        ("llama3.tiktoken", 128_256, 1_352, 256), ("qwen.tiktoken", 151_669, 1_448, 14),
        ("mistral-v3.model", 32_768, 128, 751), ("deepseek-v3", 129_280, 1_470, 1_230),
        ("claude-2", 65_000, 753, 5), ("o200k.tiktoken", 200_019, 1_562, 2),
    ],
)  # fmt: skip
def test_real_vocabularies_have_the_recorded_sizes(
    load_real: Load, name: str, ids: int, partial: int, control: int
) -> None:
    table = table_of(load_real(name))
    assert len(table) == ids
    assert len(table.control_names) == control
    assert sum(not valid_utf8(token) for token in table.tokens()) == partial


def valid_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.fixture(scope="module")
def other_tokens(load_real: Load) -> list[bytes]:
    """The partial UTF-8 among the tokens of all tokenizers, and 20,000 tokens of text."""
    every = {token for name in FETCHED for token in table_of(load_real(name)).tokens() if token}
    partial = {token for token in every if not valid_utf8(token)}
    return sorted(partial) + random.Random(0).sample(sorted(every - partial), 20_000)


@pytest.mark.parametrize("name", FETCHED)
def test_tokens_of_all_tokenizers_are_spelled_exactly(
    load_real: Load, other_tokens: list[bytes], name: str
) -> None:
    """Of other tokenizers, a sample; of this tokenizer, every token."""
    table = table_of(load_real(name))
    tokens = table.tokens()
    wanted = [token for token in tokens if token] + other_tokens
    spelled = load_real(name).segment_batch(wanted)
    assert [ids and b"".join([tokens[i] for i in ids]) for ids in spelled] == wanted
    used = {i for ids in spelled for i in ids or ()}
    assert not used & set(table.control_names)


def test_qwen_as_ranks_and_as_a_folder(
    load_real: Load, hub_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also with Qwen's normalizer, NFC, which the rank file does not have.

    Only a sample of the tokens: another test encodes every token of the rank file.
    """
    folder = Path(shutil.copytree(hub_folder("qwen"), tmp_path / "qwen"))
    (folder / "config.json").unlink()  # the rank file has a wider table
    ranks = load_real("qwen.tiktoken")
    tables = [table_of(load_real(name)) for name in ("qwen.tiktoken", "llama3.tiktoken")]
    every = sorted({token for table in tables for token in table.tokens() if token})
    tokens = random.Random(0).sample(every, 20_000)
    expected = ranks.segment_batch(tokens)
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for normalizer in (None, {"type": "NFC"}):
        document["normalizer"] = normalizer
        (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
        hf = load_tokenizer(str(folder))
        assert hf.vocabulary.backend == "hf"
        assert table_of(hf).sha256() == table_of(ranks).sha256()
        assert hf.segment_batch(tokens) == expected


@pytest.fixture(scope="module")
def llama_to_qwen(load_real: Load) -> ProjectionMap:
    sides = load_real("llama3.tiktoken"), load_real("qwen.tiktoken")
    return built(*sides, BuildConfig(scale_trick=False))


def named_row(projection: ProjectionMap, token: bytes) -> list[tuple[str, float]]:
    rows, columns = projection.student.table, projection.teacher.table
    assert rows is not None
    assert columns is not None
    ids, weights = projection.row(rows.canonical_ids()[token])
    return [
        (columns.name(t), round(w, 4)) for t, w in zip(ids.tolist(), weights.tolist(), strict=True)
    ]


def test_llama_to_qwen(llama_to_qwen: ProjectionMap) -> None:
    llama_to_qwen.check()
    assert int((llama_to_qwen.row_kind == RowKind.EXACT).sum()) == 109_566
    assert named_row(llama_to_qwen, b" the") == [(" the", 1.0)]
    assert named_row(llama_to_qwen, b"201") == [("2", 0.9009), ("0", 0.0901), ("1", 0.009)]


def test_every_text_row_is_filled_and_related_by_bytes(llama_to_qwen: ProjectionMap) -> None:
    assert len(not_none(llama_to_qwen.student.table).text_ids) == 128_000
    related_by_bytes(llama_to_qwen)


def test_no_partial_utf8_token_is_mapped_to_the_replacement_character(load_real: Load) -> None:
    replacement = "\ufffd".encode()
    for student, teacher in (
        ("llama3.tiktoken", "mistral-v3.model"),
        ("claude-2", "qwen.tiktoken"),
    ):
        projection = built(load_real(student), load_real(teacher))
        table = table_of(load_real(teacher))
        holding = [i for i, token in enumerate(table.tokens()) if replacement in token]
        rows = table_of(load_real(student)).tokens()
        mapped = projection.student_ids[np.isin(projection.teacher_ids, holding)].tolist()
        # Only the bytes of the character, or tokens that are part of it or contain it, may map to
        # it.
        assert all(replacement in rows[s] or rows[s] in replacement for s in mapped if rows[s])


@pytest.mark.parametrize("name", FETCHED)
def test_every_tokenizer_onto_itself_is_the_identity(load_real: Load, name: str) -> None:
    identity(built(load_real(name), load_real(name)))


def test_llama_3_onto_mistral_does_not_confuse_byte_a1_with_a_character(load_real: Load) -> None:
    projection = built(load_real("llama3.tiktoken"), load_real("mistral-v3.model"))
    assert projection.teacher.table is not None
    table = projection.teacher.table
    [(_, weight)] = named_row(projection, b"\xa1")
    assert weight == 1
    assert table.types[table.canonical_ids()[b"\xa1"]] == TokenType.BYTE


# Against NeMo-RL's own maps: every 32nd row


def reference_rows() -> dict[int, dict[int, float]]:
    """The reference's rows without their last column, the slot, normalized; by student id."""
    values, rows = nemo_values("maps"), {}
    table = (
        values[name].tolist() for name in ("rows", "multitoken__indices", "multitoken__weights")
    )
    for s, ids, weights in zip(*table, strict=True):
        row: dict[int, float] = {}
        for t, w in zip(ids[:-1], weights[:-1], strict=True):
            if t >= 0 and w > 0:
                row[t] = row.get(t, 0) + w
        total = sum(row.values())
        rows[s] = {t: w / total for t, w in row.items()}
    return rows


def why(token: bytes, row: dict[int, float], ours: dict[int, float], columns: list[bytes]) -> str:
    """Name the class of a disagreement."""
    differ = [t for t in row.keys() | ours.keys() if abs(row.get(t, 0) - ours.get(t, 0)) > 0.01]
    texts = [columns[t].decode("utf-8", "replace") for t in differ]
    if not valid_utf8(token) or any("\ufffd" in text for text in texts):
        return "partial UTF-8 became U+FFFD"
    if b"\r" in token:
        return "spaces before a carriage return: the HF conversion of the file splits elsewhere"
    if any(not columns[t] for t in row):
        return "control tokens are spelled like text"
    if any(unicodedata.normalize("NFKC", text) != text for text in texts):
        return "NFKC of the student's normalizer takes one character for another"
    if max(len(ours), len(row)) >= 31:
        return "another choice among equal weights at the cut"
    return f"unnamed: {token!r} {differ}"


def test_against_the_reference_map(load_real: Load) -> None:
    student, teacher = load_real("claude-2"), load_real("mistral-v3.model")
    projection = multitoken(xtok.load_pair(student, teacher), MultitokenConfig(scale_trick=False))
    rows, columns = table_of(student).tokens(), table_of(teacher).tokens()
    same_top = same_weights = valid = 0
    classes: Counter[str] = Counter()
    for s, row in reference_rows().items():
        if not rows[s] or not row:
            continue
        top = min(row, key=lambda t: (-row[t], t))
        token, best = rows[s], columns[top]
        if not best or not (token.startswith(best) or best.startswith(token)):
            continue  # the best entry of the reference is not a prefix, so its bytes are invalid
        valid += 1
        ids, weights = projection.row(s)
        ours = dict(zip(ids.tolist(), weights.tolist(), strict=True))
        agrees_on_top = columns[int(ids[0])] == best
        close = all(abs(row.get(t, 0) - ours.get(t, 0)) <= 0.01 for t in row.keys() | ours.keys())
        same_top += agrees_on_top
        same_weights += close
        if not (agrees_on_top and close):
            classes[why(token, row, ours, columns)] += 1
    assert valid > 2_000
    assert same_top / valid >= 0.995
    assert same_weights / valid >= 0.995
    assert not [name for name in classes if name.startswith("unnamed")], classes


def test_against_the_reference_after_all_three_steps(load_real: Load) -> None:
    values = nemo_values("maps")
    student, teacher = load_real("claude-2"), load_real("mistral-v3.model")
    projection = built(student, teacher)
    rows, columns = table_of(student).tokens(), table_of(teacher).tokens()
    same = valid = 0
    table = (values[name] for name in ("rows", "sort_cut__indices", "sort_cut__weights"))
    for s, ids, weights in zip(*table, strict=True):
        top = int(ids[int(np.argmax(weights))])
        if top < 0 or not rows[s] or not columns[top]:
            continue
        if rows[s].startswith(columns[top]) or columns[top].startswith(rows[s]):
            valid += 1
            same += columns[int(projection.row(s)[0][0])] == columns[top]
    assert valid > 1_800
    assert same / valid >= 0.995


# Alignment

SAMPLE = (
    "The price was 1299 dollars in 2014; naïve café, Größe.\n\tdef f(x):\r\n  return x\n"
    "東京都に行きました。 今天天气很好，我们去公园。 Привет, как дела? "
    "שלום עולם مرحبا\n👨\u200d👩\u200d👧 🏳️\u200d🌈 ok"
)


@pytest.mark.parametrize("student", FETCHED)
def test_chunks_of_real_tokenizers_end_at_every_common_boundary(
    load_real: Load, student: str
) -> None:
    data = (SAMPLE * 3).encode()
    rows = load_real(student).table.tokens()
    s = load_real(student).segment(data)
    for teacher in FETCHED:
        columns = load_real(teacher).table.tokens()
        t = load_real(teacher).segment(data)
        aligner = TokenAligner(xtok.load_pair(load_real(student), load_real(teacher)))
        expected = naive.common_boundaries([rows[i] for i in s], [columns[i] for i in t])
        chunks = [
            (list(range(*p.student_tokens)), list(range(*p.teacher_tokens)))
            for p in aligner.pairs(s, t)
        ]
        assert chunks == expected, teacher
        assert all(p.is_correct for p in aligner.pairs(s, t))


@pytest.mark.parametrize("teacher", ["llama3.tiktoken", "mistral-v3.model"])
def test_a_real_normalizer_excludes_only_the_text_that_it_changes(
    load_real: Load, real: Callable[[str], str], teacher: str
) -> None:
    from tokenizers import Tokenizer as RustTokenizer

    # Claude 2 normalizes to NFKC, which replaces full-width punctuation and ligatures.
    text = "你好，世界！这是测试。The ﬁnal ½ of the text, in full: ＡＢＣ and then plain words."
    claude = RustTokenizer.from_file(str(Path(real("claude-2")) / "tokenizer.json"))
    s = claude.encode(text * 5).ids
    t = load_real(teacher).segment((text * 5).encode())
    aligner = TokenAligner(xtok.load_pair(load_real("claude-2"), load_real(teacher)))
    pairs = aligner.pairs(s, t)
    aligned = sum(p.teacher_bytes[1] - p.teacher_bytes[0] for p in pairs if p.is_correct)
    kept = "".join(char for char in text if unicodedata.normalize("NFKC", char) == char)
    assert aligned > 0.9 * 5 * len(kept.encode())
    assert pairs[-1].is_correct
    for p in pairs:
        ours = b"".join(aligner.student.table[i] for i in p.student_ids)
        theirs = b"".join(aligner.teacher.table[i] for i in p.teacher_ids)
        assert p.is_correct == (ours == theirs)
