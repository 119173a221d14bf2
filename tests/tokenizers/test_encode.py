"""Text for a model has the ids of the model's library, and byte bounds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from conftest import Load
from hub_folders import PATTERNS
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import byte_ranks, copy_folder, qwen_like, sentencepiece_with
from random_texts import Library, check_encoding, pieces_for, texts
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from xtok import DistillationCollator
from xtok.alignment.retokenize import Retokenizer
from xtok.errors import TokenizerError, XtokError
from xtok.tokenizers import Tokenizer, from_transformers, load_pair, load_tokenizer
from xtok.tokenizers.table import TokenType


def by_transformers(folder: Path) -> Library:
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(str(folder))
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module", params=["NFC", "NFKC", "Lowercase"])
def folder_tokenizer(
    request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Library]:
    folder = qwen_like(small, tmp_path_factory.mktemp("encode") / request.param, request.param)
    return load_tokenizer(folder), by_transformers(folder)


@settings(max_examples=150)
@given(data=st.data())
def test_a_folder_encodes_as_transformers(
    folder_tokenizer: tuple[Tokenizer, Library], data: st.DataObject
) -> None:
    tokenizer, library = folder_tokenizer
    pieces = st.lists(st.sampled_from(pieces_for(tokenizer)), max_size=12)
    check_encoding(tokenizer, library, data.draw(pieces.map("".join)))


def test_a_decomposed_character_changes_only_its_own_bounds(small: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(qwen_like(small, tmp_path / "nfc", "NFC"))
    think = tokenizer.table.canonical_ids()[b"<think>"]
    text = "<think>cafe\u0301<think> hi"
    encoding = check_encoding(tokenizer, by_transformers(tmp_path / "nfc"), text)
    indices = np.flatnonzero(encoding.ids == think)
    assert [tuple(encoding.bounds[[i, i + 1]]) for i in indices.tolist()] == [(0, 7), (13, 20)]
    assert encoding.num_changed == 3  # "e" and the accent
    assert tokenizer.encode("<think>caf\u00e9<think> hi").num_changed == 0


def test_bounds_of_text_that_a_normalizer_shortens_or_lengthens(
    small: Path, tmp_path: Path
) -> None:
    folder = qwen_like(small, tmp_path / "kc", "NFKC")
    encoding = check_encoding(load_tokenizer(folder), by_transformers(folder), "\ufb01x \u3388 a")
    assert encoding.bounds[-1] == len("\ufb01x \u3388 a".encode())
    assert encoding.num_changed == 7  # " ㎈" became " c", "al"
    assert encoding.bounds.tolist() == [0, 1, 3, 4, 5, 8, 10]


@pytest.mark.parametrize(
    ("pattern", "content", "text", "pieces"),
    [
        ("[0-9]+", "#", "EX1234567 b", ["E", "X", "1234567", " b"]),
        ("[0-9]+", "#", "EX1 b", ["E", "X", "1", " b"]),
        ("[0-9]+", "#", "12 EX", ["12", " ", "E", "X"]),
        ("''", '"', "a'' b", ["a", "''", " b"]),
    ],
)
def test_a_normalizer_replaces_a_run_of_characters_by_one_token(
    small: Path, tmp_path: Path, pattern: str, content: str, text: str, pieces: list[str]
) -> None:
    normalizer = {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
    folder = copy_folder(
        small / "small-byte-level", tmp_path / "replace", tokenizer={"normalizer": normalizer}
    )
    bounds = load_tokenizer(folder).encode(text).bounds.tolist()
    assert [text[a:b] for a, b in pairwise(bounds)] == pieces


def test_bounds_of_ids_between_spaces_of_several_bytes() -> None:
    encoding = load_tokenizer("null").encode("1\u00a025\u30003")
    assert encoding.ids.tolist() == [1, 25, 3]
    assert encoding.bounds.tolist() == [0, 3, 8, 9]


@pytest.mark.parametrize("strips", [False, True])
def test_a_sentencepiece_file_encodes_as_its_library(
    small: Path, tmp_path: Path, strips: bool
) -> None:
    path = sentencepiece_with(
        small / "small.model",
        tmp_path / "a.model",
        lambda proto: setattr(proto.normalizer_spec, "remove_extra_whitespaces", strips),
    )
    tokenizer, library = load_tokenizer(path), SentencePieceProcessor(model_file=str(path))
    for text in texts(tokenizer, names=False):
        check_encoding(tokenizer, library.encode, text)
    [inst] = tokenizer.table.ids_of("[INST]")
    start, end = library.encode("the text"), tokenizer.library_ids([" the text"])[0]
    ids = tokenizer.encode("the text[INST] the text").ids.tolist()
    assert ids == [*start, inst, *end]


@pytest.mark.real
@pytest.mark.parametrize(
    "name", ["llama3", "llama4", "qwen", "cl100k", "o200k", "mistral-v1", "mistral-v3"]
)
def test_real_files_encode_as_their_libraries(
    real: Callable[[str], str], load_real: Load, name: str
) -> None:
    file = f"{name}.{'model' if name.startswith('mistral') else 'tiktoken'}"
    path, tokenizer = Path(real(file)), load_real(file)
    library: Library
    if path.suffix == ".model":
        library = SentencePieceProcessor(model_file=str(path)).encode
    else:
        table = tokenizer.table
        added = table.ids_of_type(TokenType.USER_DEFINED).tolist()
        ranks = {table[i]: i for i in table.ids_of_type(TokenType.NORMAL).tolist()}
        special = {name: i for i, name in table.control_names.items()}
        special |= {table[i].decode(): i for i in added}
        encoding = tiktoken.Encoding(
            name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=special
        )
        library = lambda text: encoding.encode(text, allowed_special="all")  # noqa: E731
    for text in texts(tokenizer, names=path.suffix == ".tiktoken", num_texts=150):
        check_encoding(tokenizer, library, text)


def test_a_loaded_tokenizer_encodes_as_itself(small: Path) -> None:
    fast: Any = PreTrainedTokenizerFast
    own = fast(tokenizer_file=str(small / "small-byte-level" / "tokenizer.json"))
    own.backend_tokenizer.enable_truncation(max_length=3)
    text = "the tokens of <think> a longer text"
    check_encoding(
        from_transformers(own), lambda t: list(own(t, add_special_tokens=False).input_ids), text
    )


def test_a_split_pattern_that_omits_text(tmp_path: Path) -> None:
    tokenizer = byte_ranks(tmp_path / "a.tiktoken")  # knows words, digits and spaces
    assert not tokenizer.keeps_text
    assert load_tokenizer(f"{tmp_path / 'a.tiktoken'}@[\\s\\S]").keeps_text
    assert tokenizer.encode("a 1").bounds.tolist() == [0, 1, 2, 3]
    with pytest.raises(TokenizerError, match=r"does not match all .*'a\.'"):
        tokenizer.encode("a.")
    retokenizer = Retokenizer(load_pair("bytes", tokenizer))
    assert retokenizer([list(b"a.1")]) == [list(b"a.1")]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "ranks", "digits", "bytes"])
def test_half_a_surrogate_pair_is_an_error(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer = load_tokenizer("bytes") if kind == "bytes" else request.getfixturevalue(kind)
    collator = DistillationCollator(tokenizer, tokenizer, bos=False)
    for call in (tokenizer.encode_batch, tokenizer.library_ids, tokenizer.library_arrays, collator):
        for wrong in ("ok\ud800bad", "\udc00"):
            with pytest.raises(XtokError, match=r"text 1, .*surrogate"):
                call(["two boats", wrong])
    for method in (tokenizer.encode, tokenizer.segment):
        with pytest.raises(XtokError, match="surrogate"):
            method("ok\ud800bad")
