"""Tokenizers of all kinds: encoding, decoding and exact bytes."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_tokenizers
from checks import not_loaded, not_none
from conftest import KINDS, Tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import byte_ranks, copy_folder, hf_folder_of_ranks, spelled, table_of

from xtok.errors import TokenizerError
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.table import TokenType

# Newer Pythons report a file name that is too long as a missing file.
TOO_LONG = "no such file or folder: " if sys.version_info >= (3, 14) else "cannot be opened: "


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: Tokenizers) -> Tokenizer:
    return tokenizers[request.param]


def test_segments_concatenate_to_the_same_bytes(tokenizer: Tokenizer) -> None:
    for data in (
        b" the", b"the", b"  the", b"the ", b"\n", b"\r\n", b"\t\t", b"", b"\x00", b"201", b" 2024",
        "中文".encode(), "é".encode(), "e\u0301".encode(), "ﬁ①".encode(), "▁a▁".encode(), b"<s>",
        b"<|im_end|>", b"<think>", b"a<think>b", b"[INST]", b"\xe4", b"\xe4\xb8", b" \xe4\xb8",
        b"\xb8\xad", b"a\xffb", bytes(range(256)), "👨\u200d👩".encode(), b"a" * 5000,
    ):  # fmt: skip
        assert b"".join(spelled(tokenizer, data)) == data


@given(data=st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)))
@settings(max_examples=200)
def test_any_bytes_are_spelled_exactly(tokenizer: Tokenizer, data: bytes) -> None:
    ids = tokenizer.segment(data)
    table = table_of(tokenizer)
    assert b"".join(table[i] for i in ids) == data
    assert not set(ids) & set(table.control_names)


def test_text_is_segmented_as_by_the_library(
    byte_level: Tokenizer, sentencepiece: Tokenizer, small: Path
) -> None:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as RustTokenizer

    text = " the tokens of a text, and 201 more"
    rust = RustTokenizer.from_file(str(small / "small-byte-level" / "tokenizer.json"))
    ids = rust.encode(text, add_special_tokens=False).ids
    assert byte_level.segment(text.encode()) == byte_level.segment(text) == ids
    # The file's own dummy prefix makes the first word " the".
    library = SentencePieceProcessor(model_file=str(small / "small.model")).encode(text[1:])
    assert sentencepiece.segment(text.encode()) == library
    assert spelled(sentencepiece, b" the")[0].startswith(b" ")
    assert not spelled(sentencepiece, b"the")[0].startswith(b" ")


def test_types_and_bytes_of_a_sentencepiece_file(sentencepiece: Tokenizer) -> None:
    table = table_of(sentencepiece)
    ids = {n: i for i, n in table.control_names.items()}
    assert table.types[ids["<unk>"]] == TokenType.UNKNOWN
    assert table.types[ids["[INST]"]] == TokenType.CONTROL
    assert table.roles["bos"] == (ids["<s>"],)
    assert table.roles["eos"] == (ids["</s>"],)
    newline = table.canonical_ids()[b"\n"]
    assert table.types[newline] == TokenType.BYTE
    assert len(table.ids_of_type(TokenType.BYTE)) == 256
    assert b" the" in table.canonical_ids()


def test_special_and_added_tokens_of_a_folder(byte_level: Tokenizer) -> None:
    table = table_of(byte_level)
    # The display form of byte A1 is a character with the UTF-8 bytes C2 A1; the table has A1.
    assert b"\xa1" in table.canonical_ids()
    control = {n for i, n in table.control_names.items()}
    assert control == set(small_tokenizers.SPECIAL_TOKENS)
    think = table.canonical_ids()[small_tokenizers.THINK.encode()]
    assert table.types[think] == TokenType.USER_DEFINED
    assert byte_level.segment(b"a<think>b")[1] == think


def test_width_comes_from_the_config_and_the_rest_is_unused(byte_level: Tokenizer) -> None:
    vocabulary = byte_level.vocabulary
    assert (vocabulary.vocab_size, vocabulary.width_source) == (1280, "config")
    assert vocabulary.tokenizer_vocab_size == 1200
    assert table_of(byte_level).ids_of_type(TokenType.UNUSED).tolist() == list(range(1200, 1280))


def test_width_option_and_width_without_a_config(small: Path) -> None:
    wide = load_tokenizer(str(small / "small.model"), vocab_size=5000).vocabulary
    assert (wide.vocab_size, wide.width_source) == (5000, "option")
    own = load_tokenizer(str(small / "small.model")).vocabulary
    assert (own.vocab_size, own.width_source) == (own.tokenizer_vocab_size, "tokenizer")
    assert wide.table is not None
    assert wide.table.sha256() == not_none(own.table).sha256()


def test_a_sentencepiece_file_and_its_folder_agree(small: Path, sentencepiece: Tokenizer) -> None:
    converted = load_tokenizer(str(small / "small-hf"))
    table, other = table_of(sentencepiece), table_of(converted)
    assert other.tokens()[: len(table)] == table.tokens()
    tokens = [t for t in table.tokens() if t]
    assert converted.segment_batch(tokens) == sentencepiece.segment_batch(tokens)


@pytest.fixture(params=[None, "NFC"])
def folder_of_ranks(request: pytest.FixtureRequest, small: Path, tmp_path: Path) -> Path:
    """The small rank file as a Hugging Face folder, made by Transformers' own converter."""
    pattern = small_tokenizers.tiktoken_pattern()
    return hf_folder_of_ranks(small / "small.tiktoken", pattern, tmp_path / "hf", request.param)


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Callable[..., Path]:
    def edited(name: str = "small-byte-level", **changes: Any) -> Path:
        model = json.loads((small / name / "tokenizer.json").read_text())["model"]
        changes["model"] = model | changes.get("model", {})
        return copy_folder(small / name, tmp_path / "hf", tokenizer=changes)

    return edited


Copy = Callable[..., Path]


def test_the_same_ranks_through_two_backends(
    folder_of_ranks: Path, ranks: Tokenizer, byte_level: Tokenizer
) -> None:
    hf = load_tokenizer(str(folder_of_ranks))
    assert table_of(hf).sha256() == table_of(ranks).sha256()
    tokens = [t for t in [*table_of(ranks).tokens(), *table_of(byte_level).tokens()] if t]
    tokens += ["e\u0301 café".encode(), "\u212b".encode(), b"\xcc\x81 \xe4"]
    assert hf.segment_batch(tokens) == ranks.segment_batch(tokens)


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_metaspace_prefix_is_not_part_of_the_middle_of_a_text(
    copy: Copy, sentencepiece: Tokenizer, scheme: str
) -> None:
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    tokenizer = load_tokenizer(copy("small-hf", normalizer=None, pre_tokenizer=metaspace))
    for text in (b"the", b" the", b"  the text"):
        assert spelled(tokenizer, text) == spelled(sentencepiece, text)


def test_truncation_padding_and_dropout_of_a_folder_are_ignored(
    copy: Copy, byte_level: Tokenizer
) -> None:
    folder = copy(
        model={"dropout": 0.5},
        truncation={
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
        },
        padding={
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>",
        },
    )  # fmt: skip
    text = b" the tokens of a longer text, one after another"
    assert load_tokenizer(folder).segment(text) == byte_level.segment(text)


def test_text_without_a_spelling_is_none_or_an_error(copy: Copy, small: Path) -> None:
    vocab = json.loads((small / "small-hf" / "tokenizer.json").read_text())["model"]["vocab"]
    kept = {t: i for t, i in vocab.items() if not t.startswith("<0x")}
    tokenizer = load_tokenizer(copy("small-hf", model={"vocab": kept, "byte_fallback": False}))
    assert tokenizer.segment_batch([b"\xff", b" the"])[0] is None
    with pytest.raises(TokenizerError):
        tokenizer.segment(b"\xff")


def test_the_emitted_id_is_canonical(small: Path, tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((small / "small.model").read_bytes())
    the = next(i for i, piece in enumerate(proto.pieces) if piece.piece == "▁the")
    letter = next(i for i, piece in enumerate(proto.pieces) if piece.piece == "a")
    # A second piece with the bytes of " the"; the normalizer replaces spaces, so it never occurs.
    duplicate = the - 1
    proto.pieces[duplicate].piece = " the"
    path = tmp_path / "duplicates.model"
    path.write_bytes(proto.SerializeToString())
    table = table_of(load_tokenizer(str(path)))
    assert table[duplicate] == table[the] == b" the"
    assert table.preferred_ids == (the,)
    assert table.canonical_ids()[b" the"] == the
    # "a" exists as a byte token with a lower id, and as a character, which the library uses.
    assert table.canonical_ids()[b"a"] == letter
    assert table.types[letter] == TokenType.NORMAL


# Bad input


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        *((name, f"no such file or folder: {name.rpartition(':')[2]}") for name in (
            "./no", "a/b/c", "spm:none", "tiktoken:none", "a.gguf", "a.model", "a.tiktoken",
            "a.json", "models/llama", "a--b", "a/b..c", ".hidden", "-a/b", "a b", "loop.model")),
        ("~/no", "no such file or folder: "), ("./spam:eggs", "no such file or folder: ./spam"),
        ("http://hf.co", "URLs are not supported: http://hf.co"),
        *((prefix + "a" * 5_000, TOO_LONG) for prefix in ("", "hf:", "spm:")),
        *((prefix + "~no-such-user/a.model", "~no-such-user/a.model cannot be opened: ")
          for prefix in ("", "hf:", "spm:")),
        ("hf:", "the model name is empty"), ("/dev/zero", "tokenizer.json is missing"),
        ("hf:SMALL/small.model", "tokenizer.json is missing"),
        ("MEGATRON", "is a Megatron vocabulary"),
        ("tiktoken:SMALL/small.model@x", "expected a base64 token"),
        ("spm:SMALL/small.tiktoken", "is neither a SentencePiece model"),
        ("SMALL/small-hf@main", "does not support @main"),
        *((f"SMALL/small.tiktoken@{regex}", "not a regular expression") for regex in ("", "x*")),
    ],
)  # fmt: skip
def test_error_names_the_cause_of_an_invalid_model_name(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, culprit: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "loop.model").symlink_to(tmp_path / "loop.model")
    megatron = tmp_path / "vocab.json"
    megatron.write_text('[\n{"rank": 0, "token_bytes": "AA==", "token_str": "\\u0000"}]')
    model = model.replace("MEGATRON", str(megatron))
    assert culprit in not_loaded(model.replace("SMALL", str(small)))


def test_a_prefix_marks_a_name_as_a_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "nor in the local cache" in not_loaded("hf:models/llama", offline=True)


def test_repr_of_a_tokenizer() -> None:
    assert repr(load_tokenizer("bytes")) == "Tokenizer('bytes', bytes, 256 ids)"
    assert repr(load_tokenizer("null:5", vocab_size=7)) == "Tokenizer('null:5', null, 7 ids)"


def test_a_loaded_tokenizer_keeps_its_width(byte_level: Tokenizer) -> None:
    width = byte_level.vocabulary.vocab_size
    assert load_tokenizer(byte_level, vocab_size=width) is byte_level
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(byte_level, vocab_size=width + 1)
    assert caught.value.parameter == "vocab_size"


def test_a_tokenizer_json_by_another_name_ignores_its_folder(
    small: Path, tmp_path: Path, byte_level: Tokenizer
) -> None:
    path = tmp_path / "mine.json"
    shutil.copy(small / "small-byte-level" / "tokenizer.json", path)
    (tmp_path / "config.json").write_text('{"vocab_size": 99999}')  # of another model
    loaded = load_tokenizer(path)
    assert loaded.vocabulary.model_id == "mine.json"
    assert loaded.vocabulary.width_source == "tokenizer"
    assert loaded.segment(b" the text") == byte_level.segment(b" the text")
    assert not loaded.chat_templates
    assert "does not support @x" in not_loaded(f"{path}@x")


def test_pointers_of_git_lfs(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 2183982\n"
    for name in ("tokenizer.model", "tokenizer.json"):
        path = tmp_path / name
        path.write_text(pointer)
        for model in (tmp_path, path):
            assert f"{path} is a Git LFS pointer" in not_loaded(model)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"version": "1.0", "model": {}}'])
def test_a_missing_or_damaged_tokenizer_json_is_an_error(tmp_path: Path, text: str) -> None:
    assert "tokenizer.json is missing" in not_loaded(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    wrong = "AutoTokenizer" if text else "tokenizer.json is empty"
    assert wrong in not_loaded(tmp_path)
    plain = '{"tokenizer_class": "PreTrainedTokenizerFast"}'  # is loaded without AutoTokenizer
    (tmp_path / "tokenizer_config.json").write_text(plain)
    assert wrong in not_loaded(tmp_path)


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Take from root the two capabilities that permissions do not bind; it stays the same user."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, sets) == 0
    whole = sets[0]
    try:
        sets[0] = whole & ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.capset(header, sets) == 0
        yield
    finally:
        sets[0] = whole
        assert libc.capset(header, sets) == 0


def test_files_that_may_not_be_read(small: Path, tmp_path: Path) -> None:
    shutil.copy(small / "small.model", tmp_path)
    files = [tmp_path / "small.model"]
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copytree(small / "small-byte-level", tmp_path / file)
        files.append(tmp_path / file / file)
    for path in files:
        path.chmod(0)
    with bound_by_permissions():
        wrong = [not_loaded(files[0]), *(not_loaded(path.parent) for path in files[1:])]
    assert wrong == [f"{path} cannot be read: Permission denied" for path in files]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig"])
def test_json_that_is_not_utf8(small: Path, tmp_path: Path, encoding: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        folder = tmp_path / name
        shutil.copytree(small / "small-byte-level", folder)
        text = (folder / name).read_text()
        for end in (None, -1):
            (folder / name).write_bytes(text.encode(encoding)[:end])
            assert re.search("is not a|AutoTokenizer cannot load", not_loaded(folder))


def test_two_tokens_with_the_same_id(copy: Copy, small: Path) -> None:
    path = small / "small-byte-level" / "tokenizer.json"
    vocab = json.loads(path.read_text())["model"]["vocab"]
    vocab[list(vocab)[-1]] = 5
    wrong = not_loaded(copy(model={"vocab": vocab}))
    # Some versions of Transformers copy it themselves, and fail.
    assert "have the same id" in wrong or "out of vocabulary" in wrong


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({}, 1200),
        ({"llm_config": {"vocab_size": 1300}}, 1300),  # InternVL
        ({"language_config": {"vocab_size": 1300}}, 1300),  # DeepSeek-VL2
        ({"padded_vocab_size": 1300, "vocab_size": 1250}, 1300),  # ChatGLM
        ({"text_config": {"vocab_size": True}, "vocab_size": 1300}, 1300),
    ],
)
def test_widths_of_unknown_model_types(copy: Copy, config: dict[str, Any], width: int) -> None:
    folder = copy()
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody-knows", **config}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocabulary.vocab_size == width
    assert ["has no vocabulary size" in note for note in tokenizer.notes] == [True] * (not config)
    assert load_tokenizer(str(folder), vocab_size=1400).vocabulary.vocab_size == 1400


def test_a_folder_whose_name_is_not_utf_8(copy: Copy, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    try:
        copy().rename(folder)
    except OSError:
        pytest.skip("the file system takes no such name")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocabulary.model_id == "\\xff\\xfe"
    assert tokenizer.encode("x").ids.tolist() == [87]
    assert tokenizer.library is None  # Transformers cannot read it


def test_a_damaged_generation_config(copy: Copy) -> None:
    folder = copy()
    path = folder / "generation_config.json"
    for eos in ("2.5", "[[1]]", '"</s>"', "true", "[2, false]"):
        path.write_text(f'{{"eos_token_id": {eos}}}')
        shown = json.loads(eos)
        assert not_loaded(folder) == f"{path}: eos_token_id is {shown!r}, expected token ids"
    for text in ("[1]", "[" * 100_000):
        path.write_text(text)
        assert not_loaded(folder).startswith(f"{path} is not a JSON object")


def test_a_byte_level_folder_without_a_pre_tokenizer(copy: Copy) -> None:
    tokenizer = load_tokenizer(copy(pre_tokenizer=None, normalizer={"type": "ByteLevel"}))
    for data in (b" the text", "é".encode(), b"\xff\xe4"):
        assert b"".join(spelled(tokenizer, data)) == data


@pytest.mark.parametrize("content", [b"hello", bytes(range(256)) * 9])
def test_files_that_are_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    for model in (path, f"{path}@x"):  # the error does not name the pattern
        assert "nor a tiktoken file" in not_loaded(model)


@pytest.mark.parametrize("piece", [b"\n\x05<unk>", b"\n\x04\xe2\x96\x81"])
def test_pieces_that_are_not_utf8(small: Path, tmp_path: Path, piece: bytes) -> None:
    data = (small / "small.model").read_bytes()
    assert piece in data
    path = tmp_path / "x.model"
    path.write_bytes(data.replace(piece, piece[:2] + b"\xff" * len(piece[2:]), 1))
    assert re.search(r"piece \d+: b'\\xff.*' is not UTF-8", not_loaded(path))


def test_a_piece_with_u_0000(small: Path, tmp_path: Path) -> None:
    data = (small / "small.model").read_bytes()
    path = tmp_path / "x.model"
    path.write_bytes(data.replace(b"\n\x05<unk>", b"\n\x05<u\0k>", 1))
    assert "piece 0: '<u\\x00k>' contains U+0000" in not_loaded(path)


def test_a_changed_rank_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    assert spelled(byte_ranks(path, "ab"), b"ab") == [b"ab"]
    assert spelled(byte_ranks(path, "ac"), b"ab") == [b"a", b"b"]


def test_tables_are_plain_arrays(tokenizer: Tokenizer) -> None:
    table = table_of(tokenizer)
    dtypes = [array.dtype for array in (table.data, table.offsets, table.types)]
    assert dtypes == [np.dtype(name) for name in ("uint8", "int64", "uint8")]
    assert len(table.offsets) == len(table) + 1 == tokenizer.vocabulary.vocab_size + 1
