"""Decoders of a tokenizer.json: exact bytes, or an error that names the decoder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from make_tokenizers import saved, table_of
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Rust

import xtok
from xtok.errors import TokenizerError
from xtok.tokenizers import load_tokenizer

NAMES = "<unk> a b ▁a ▁ab ab , . ... ## ##a ##.. 's n't ' #a a▁b <0x0A> <0x41> do▁not é ?! x,"
WORDS = NAMES.split()
BPE: dict[str, Any] = {"vocab": {word: i for i, word in enumerate(WORDS)}, "merges": []}


def folder(path: Path, decoder: Any, model: Any = None) -> Path:
    rust = Rust(model or models.BPE(**BPE, unk_token="<unk>"))
    rust.decoder = decoder
    return saved(path, rust, unk_token="<unk>", eos_token="<unk>")


READ: dict[str, Any] = {
    "Metaspace": decoders.Metaspace(),
    "Metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "another Metaspace": decoders.Metaspace(replacement="a"),
    "Llama's": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                  decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "a replacement of the text": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
    "two replacements": decoders.Sequence([decoders.Replace("▁a", "X"), decoders.Replace("X", "")]),
    "joined, never": decoders.Sequence([
        decoders.Fuse(), decoders.Metaspace(prepend_scheme="never")]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_tokens_have_the_bytes_that_the_decoder_writes(name: str, tmp_path: Path) -> None:
    decoder = READ[name]
    tokens = load_tokenizer(folder(tmp_path, decoder)).table
    first = decoder.decode(["é"]).encode()
    for pair in itertools.product(range(1, len(WORDS)), repeat=2):
        if any(WORDS[i].startswith("<0x") and "Llama" not in name for i in pair):
            continue
        written = decoder.decode(["é", *(WORDS[i] for i in pair)]).encode()
        assert written == first + tokens[pair[0]] + tokens[pair[1]]


@pytest.mark.parametrize("cleanup", [True, False])
def test_word_piece_has_the_bytes_that_its_decoder_writes(cleanup: bool, tmp_path: Path) -> None:
    decoder = decoders.WordPiece(cleanup=cleanup)
    model = models.WordPiece(BPE["vocab"], unk_token="<unk>")
    tokens = load_tokenizer(folder(tmp_path, decoder, model)).table
    for pair in itertools.product(range(1, len(WORDS)), repeat=2):
        written = decoder.decode(["é", *(WORDS[i] for i in pair)]).encode()
        assert written == "é".encode() + tokens[pair[0]] + tokens[pair[1]]
    [dots, marks, n_t] = (tokens[WORDS.index(word)] for word in ("...", "##", "n't"))
    assert (dots, marks, n_t) == ((b"...", b"", b"n't") if cleanup else (b" ...", b"", b" n't"))


REFUSED: dict[str, tuple[str, Any, Any]] = {
    "CLIP": ("'</w>' .*end_of_word_suffix", decoders.ByteLevel(),
             models.BPE(**BPE, end_of_word_suffix="</w>")),
    "GPT-1": ("BPEDecoder decoder", decoders.BPEDecoder(suffix="</w>"),
              models.BPE(**BPE, end_of_word_suffix="</w>")),
    "a suffix with Metaspace": ("'@@' .*end_of_word_suffix", decoders.Metaspace(),
                                models.BPE(**BPE, end_of_word_suffix="@@")),
    "a prefix that stays": ("'##' .*subword_prefix", decoders.ByteLevel(),
                            models.BPE(**BPE, continuing_subword_prefix="##")),
    "WordPiece with Metaspace": ("'##' .*subword_prefix", decoders.Metaspace(),
                                 models.WordPiece(BPE["vocab"], unk_token="<unk>")),
    "two prefixes": ("decoder removes '@@'", decoders.WordPiece(prefix="@@"),
                     models.WordPiece(BPE["vocab"], unk_token="<unk>")),
    "no prefix": ("decoder removes '##'", decoders.WordPiece(), models.BPE(**BPE)),
    "a regular expression": ("Replace .*regular expression",
                             decoders.Replace(Regex("a+"), "b"), None),
    "Strip before Fuse": ("Strip .*each token", decoders.Sequence(
        [decoders.Metaspace(), decoders.Strip(" ", 1, 0), decoders.Fuse()]), None),
    "Replace across tokens": ("Replace .*whole text", decoders.Sequence(
        [decoders.Fuse(), decoders.Replace("ab", "c")]), None),
    "all spaces dropped": ("Metaspace .*whole text", decoders.Sequence(
        [decoders.Fuse(), decoders.Metaspace()]), None),
    "ByteLevel and Replace": ("Replace .*whole text", decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace("a", "c")]), None),
    "Replace and ByteLevel": ("ByteLevel decoder", decoders.Sequence(
        [decoders.Replace("a", "c"), decoders.ByteLevel()]), None),
    "WordPiece and Replace": ("Replace decoder", decoders.Sequence(
        [decoders.WordPiece(), decoders.Replace("a", "c")]),
        models.WordPiece(BPE["vocab"], unk_token="<unk>")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_error_names_an_unsupported_decoder(name: str, tmp_path: Path) -> None:
    words, decoder, model = REFUSED[name]
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(folder(tmp_path, decoder, model))


@pytest.mark.parametrize("kind", [models.BPE, models.Unigram])
def test_bytes_of_the_model_that_the_decoder_does_not_know(kind: Any, tmp_path: Path) -> None:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    if kind is models.BPE:
        vocab = {name: i for i, name in enumerate(names)}
        model: Any = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    else:
        model = models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True)
    rust = Rust(model)
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rust.decoder = decoders.Metaspace(prepend_scheme="never")
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("aé\n a").ids.tolist()
    assert b"".join(table_of(tokenizer)[i] for i in ids) == "aé\n a".encode()


def test_a_byte_token_that_is_an_added_token_too(tmp_path: Path) -> None:
    vocab = {name: i for i, name in enumerate(["<unk>", "<0x41>", "<0x0A>", "a"])}
    rust = Rust(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    rust.add_tokens(["<0x41>"])
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert rust.decode([3, 1, 2]) == "aA\n"
    assert table_of(tokenizer).tokens()[1:] == [b"A", b"\n", b"a"]
    assert table_of(tokenizer).types.tolist() == [2, 6, 6, 1]


def test_lost_first_space_of_unicode_scripts_is_noted(small: Path, tmp_path: Path) -> None:
    rust = Rust.from_file(str(small / "small-byte-level" / "tokenizer.json"))
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.UnicodeScripts(), rust.pre_tokenizer]
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    assert rust.decode(rust.encode("  a a").ids) == "a a"
    assert [name for name, _ in load_tokenizer(tmp_path).text_changes] == ["UnicodeScripts"]


def test_no_loss_is_recommended_if_text_does_not_round_trip(small: Path, tmp_path: Path) -> None:
    rust = Rust.from_file(str(small / "small-byte-level" / "tokenizer.json"))
    dropped = pre_tokenizers.Split(" ", "removed")
    rust.pre_tokenizer = pre_tokenizers.Sequence([dropped, rust.pre_tokenizer])
    rust.normalizer = normalizers.Lowercase()
    rust.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["normalizer"]
    assert [name for name, _ in load_tokenizer(tmp_path).text_changes] == ["Lowercase", "Split"]
    diagnosis = xtok.doctor(tmp_path, small / "small-digits")
    assert any(name.endswith("probe text") for name in diagnosis.failed)
    assert diagnosis.pair is not None
    assert diagnosis.advice is None
    assert diagnosis.summary.endswith("No loss is recommended, because text does not round-trip.")
