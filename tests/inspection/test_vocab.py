"""The table of a vocabulary is the same in Python, in JSON, and for each file format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import error_of, fails, fits_80_columns, is_printable, printed_json, usage_error, works
from conftest import FETCHED, KINDS, Cli, Load, Tokenizers

import xtok
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.table import TokenType

HEAD = ["id", "bytes", "length", "type", "name", "roles"]


def test_rows_equal_the_token_table(tokenizers: Tokenizers) -> None:
    for tokenizer in tokenizers.values():
        table, listing = tokenizer.table, xtok.vocab(tokenizer)
        assert [t.id for t in listing.tokens] == [*range(len(table))]
        assert [bytes.fromhex(t.bytes) for t in listing.tokens] == table.tokens()
        assert [t.length for t in listing.tokens] == table.lengths.tolist()
        assert [TokenType[t.type.upper()] for t in listing.tokens] == table.types.tolist()
        assert [t.name for t in listing.tokens] == [*map(table.name, range(len(table)))]
        role_ids = {(role, i) for role, ids in table.roles.items() for i in ids}
        assert {(role, t.id) for t in listing.tokens for role in t.roles} == role_ids
        assert sum(listing.types.values()) == len(table) == listing.vocab_size
        assert {(t.teacher_id, t.spelling) for t in listing.tokens} == {(None, None)}


def test_a_teacher_adds_its_ids_and_spellings(tokenizers: Tokenizers) -> None:
    for student in tokenizers.values():
        for teacher in tokenizers.values():
            pair = xtok.load_pair(student, teacher)
            vocabulary = xtok.vocab(student, teacher_model=teacher)
            assert [-1 if t.teacher_id is None else t.teacher_id for t in vocabulary.tokens] == (
                pair.partners.tolist()
            )
            theirs = teacher.table.tokens()
            for token in vocabulary.tokens:
                spelling = token.spelling or ()
                assert b"".join(theirs[i] for i in spelling) == bytes.fromhex(token.bytes)


def test_tokens_are_looked_up_as_inspect_does(byte_level: Tokenizer) -> None:
    [the] = xtok.vocab(byte_level, " the").tokens
    assert [t.id for t in xtok.vocab(byte_level, [the.id, b" the", " the"]).tokens] == [the.id]
    assert xtok.vocab(byte_level, []).tokens == ()
    width = len(byte_level.table)
    assert error_of(lambda: xtok.vocab(byte_level, width)).endswith(f"0 to {width - 1}")
    assert error_of(lambda: xtok.vocab(byte_level, "no such")).endswith("has no token 'no such'")


def test_table_has_the_requested_rows(cli: Cli, small: Path) -> None:
    model, teacher = small / "small-byte-level", small / "small.model"
    the = xtok.vocab(model, " the").tokens[0].id
    output = works(cli("vocab", model, " the", r"\xe4", "--id", "7", "-t", teacher)).stdout
    assert f" {the} " in output
    assert "' the'" in output
    assert "teacher: small.model" in output
    assert fits_80_columns(output)
    data = printed_json(cli("vocab", model, " the", "--id", "7", "--json"))
    assert [token["id"] for token in data["tokens"]] == [the, 7]
    assert data["model"] == "small-byte-level"
    printed_roles = works(cli("vocab", teacher)).stdout
    assert "bos" in printed_roles
    assert "'</s>'" in printed_roles
    whole = printed_json(cli("vocab", teacher, "--json"))["tokens"]
    assert [token["id"] for token in whole] == [
        *range(len(xtok.load_tokenizer(str(teacher)).table))
    ]
    wrong = usage_error("vocab", str(model), str(teacher))
    assert f"{teacher} is not a token; use -t {teacher}" in wrong
    assert "writes the whole vocabulary" in usage_error("vocab", "bytes", "a", "-o", "v.jsonl")
    fails(cli("vocab", model, "-o", "v.txt"), "does not end in .jsonl or .npz")


@pytest.mark.parametrize("with_teacher", [False, True])
def test_files_contain_the_table(cli: Cli, small: Path, tmp_path: Path, with_teacher: bool) -> None:
    model, teacher = small / "small-digits", small / "small.model"
    more = ["-t", str(teacher)] if with_teacher else []
    table = xtok.vocab(model, teacher_model=teacher if with_teacher else None)
    names = [*HEAD, "teacher_id", "spelling"] if with_teacher else HEAD
    rows = [{name: getattr(token, name) for name in names} for token in table.tokens]
    contents = []
    for name in ("a.jsonl", "folder/b.jsonl"):
        assert works(cli("vocab", model, *more, "-o", name)).stdout == f"{name}\n"
        contents.append((tmp_path / name).read_text(encoding="utf-8"))
    assert contents[0] == contents[1]
    assert [json.loads(line) for line in contents[0].split("\n")[:-1]] == [
        {name: [*x] if isinstance(x, tuple) else x for name, x in row.items()} for row in rows
    ]


def test_an_npz_contains_the_columns_of_the_table(cli: Cli, small: Path, tmp_path: Path) -> None:
    model, teacher = small / "small-digits", small / "small.model"
    pair = xtok.load_pair(model, teacher)
    table = pair.tables[0]
    works(cli("vocab", model, "-o", "a.npz"))
    works(cli("vocab", model, "-t", teacher, "-o", "b.npz"))
    works(cli("vocab", model, "-t", teacher, "-o", "c.npz"))
    assert (tmp_path / "b.npz").read_bytes() == (tmp_path / "c.npz").read_bytes()
    own: dict[str, Any] = {"bytes": table.data, "offsets": table.offsets, "types": table.types}
    single, both = np.load(tmp_path / "a.npz"), np.load(tmp_path / "b.npz")
    assert single.files == [*own]
    assert both.files == [*own, "teacher_ids", "spellings", "spelling_offsets"]
    for name, array in own.items():
        for file in (single, both):
            assert file[name].dtype == array.dtype
            assert np.array_equal(file[name], array)
    assert both["teacher_ids"].tolist() == pair.partners.tolist()
    assert both["spelling_offsets"].dtype == np.int64
    assert both["spellings"].dtype == np.int32
    spelled = pair.pieces(table.text_ids)
    assert both["spellings"].tolist() == spelled.ids.tolist()
    assert np.diff(both["spelling_offsets"])[table.text_ids].tolist() == spelled.counts.tolist()


def test_a_vocabulary_cannot_break_a_line(cli: Cli, tmp_path: Path) -> None:
    """The vocabulary of bytes contains line breaks, quotes, commas and control characters."""
    works(cli("vocab", "bytes", "-o", "v.jsonl"))
    content = (tmp_path / "v.jsonl").read_text(encoding="utf-8")
    assert content.count("\n") == 256
    assert is_printable(content)


def test_part_of_a_vocabulary_has_no_arrays(tmp_path: Path) -> None:
    for ids in ([97], range(255, -1, -1)):
        with pytest.raises(ValueError, match=r"\.npz"):
            xtok.vocab("bytes", ids).save(tmp_path / "v.npz")
    xtok.vocab("bytes", "a").save(tmp_path / "v.jsonl")
    assert json.loads((tmp_path / "v.jsonl").read_text(encoding="utf-8"))["id"] == 97


TEXTS = (
    "The cat sat on 2012 mats, didn't it?", " one space first", "x", "",
    "caf\u00e9 \u6771\u4eac\u90fd \u0416 \U0001f389 end\n", "def f(x):\n\treturn  x ** 2\n\n\n",
)  # fmt: skip


def lengths_are_the_texts(tokenizer: Tokenizer) -> None:
    """Lengths of a text's tokens sum to its bytes; an added leading space has length 0."""
    lengths = tokenizer.table.lengths
    for text in TEXTS:
        encoding = tokenizer.encode(text)
        own = np.diff(encoding.bounds)
        assert own.sum() == len(text.encode())
        token_lengths = lengths[encoding.ids]
        if len(own):
            first = tokenizer.table[int(encoding.ids[0])]
            token_lengths[0] -= first.startswith(b" ") and not text.startswith(" ")
            if text.startswith(" "):  # the prefix is a separate token, or part of the first
                token_lengths[0] -= token_lengths.sum() - own.sum()
        assert own.tolist() == token_lengths.tolist(), text


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_lengths_of_small_tokenizers(tokenizers: Tokenizers, kind: str) -> None:
    lengths_are_the_texts(load_tokenizer("bytes") if kind == "bytes" else tokenizers[kind])


@pytest.mark.real
@pytest.mark.parametrize("name", [*FETCHED, "tekken.json", "llama4.tiktoken"])
def test_lengths_of_real_tokenizers(load_real: Load, name: str) -> None:
    lengths_are_the_texts(load_real(name))


@pytest.mark.real
@pytest.mark.parametrize("name", ["gemma3", "llama2", "mistral-v3", "llama3"])
def test_lengths_of_folders(load_hub: Load, name: str) -> None:
    lengths_are_the_texts(load_hub(name))
