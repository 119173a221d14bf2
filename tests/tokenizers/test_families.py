"""Files of single families: other orders, an empty token, Megatron's format, unsupported files."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from make_tokenizers import copy_folder, table_of, tekken_file
from small_tokenizers import CORPUS

from xtok.errors import TokenizerError
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.table import TokenType

TEXT = CORPUS[0] + "It's 2024,\n\nin 12345 STEPS (caf\u00e9)!\r\n"


@pytest.mark.parametrize("first", ["special_tokens", "version", "vocab", "config"])
def test_tekken_files_in_any_order_of_keys(first: str, small: Path, tmp_path: Path) -> None:
    path = tekken_file(tmp_path / "tekken.json", small)
    before = load_tokenizer(path)
    document = {"version": 1, "special_tokens": None, **json.loads(path.read_text())}
    ordered = {first: document.pop(first), **document}
    path.write_text(json.dumps(ordered, indent=1))
    after = load_tokenizer(path)
    assert after.definition_sha256 == before.definition_sha256
    assert after.encode_batch([TEXT]) == before.encode_batch([TEXT])


def ranks_of(small: Path) -> list[tuple[bytes, int]]:
    lines = (small / "small.tiktoken").read_text().splitlines()
    return [(base64.b64decode(token), int(rank)) for token, rank in map(str.split, lines)]


@pytest.fixture
def megatron(small: Path, tmp_path: Path) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": "?"}
        for token, rank in ranks_of(small)
    ]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(vocab))
    return path


@pytest.mark.parametrize("name", ["v1", "v2", r"\p{N}|[^\p{N}]+"])
def test_megatrons_vocabulary_has_the_ids_of_tiktoken(
    name: str, megatron: Path, small: Path
) -> None:
    from tiktoken import Encoding

    pattern = {
        "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }.get(name, name)
    ranks = {token: 1000 + rank for token, rank in ranks_of(small)}
    encoding = Encoding("a", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    tokenizer = load_tokenizer(f"{megatron}@{name}")
    assert tokenizer.encode_batch([TEXT]) == [encoding.encode_ordinary(TEXT)]
    table = table_of(tokenizer)
    assert (table.roles["eos"], table.roles["pad"]) == ((2,), (4,))
    assert table.control_names[999] == "<SPECIAL_999>"
    assert table.types[0] == TokenType.UNKNOWN


def test_megatrons_vocabulary_needs_a_pattern(megatron: Path) -> None:
    with pytest.raises(TokenizerError, match="the pattern for"):
        load_tokenizer(f"{megatron}@(")
    megatron.write_text('[{"token_bytes": 1}]')
    with pytest.raises(TokenizerError, match="Megatron"):
        load_tokenizer(f"{megatron}@v1")


def test_a_rank_file_with_an_empty_token(small: Path, tmp_path: Path) -> None:
    """Whisper's multilingual.tiktoken ends with such a line: an id that occurs in no text."""
    path, ranks = tmp_path / "multilingual.tiktoken", ranks_of(small)
    path.write_text((small / "small.tiktoken").read_text() + f"= {len(ranks) + 5}\n")
    tokenizer = load_tokenizer(rf"{path}@\p{{N}}|[^\p{{N}}]+")
    plain = load_tokenizer(rf"{small / 'small.tiktoken'}@\p{{N}}|[^\p{{N}}]+")
    assert tokenizer.encode_batch([TEXT]) == plain.encode_batch([TEXT])
    assert table_of(tokenizer).sha256() == table_of(plain).sha256()
    with pytest.raises(TokenizerError, match="unknown family"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("model_type", "config", "hint"),
    [
        ("t5", {"tokenizer_class": "ByT5Tokenizer"}, "use bytes"),
        ("canine", {"model_max_length": 2048}, "code points"),
        ("gpt2", {}, "save_pretrained"),
    ],
)
def test_slow_tokenizers_are_an_error(
    model_type: str, config: dict[str, object], hint: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert hint in str(caught.value.hint)


def test_a_width_that_the_config_does_not_have(small: Path, tmp_path: Path) -> None:
    folder = copy_folder(small / "small-byte-level", tmp_path / "m", generation_config=None)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    vocabulary = load_tokenizer(folder).vocabulary
    assert (vocabulary.vocab_size, vocabulary.width_source) == (50257, "model type")
