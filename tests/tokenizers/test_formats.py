"""Further formats of tokenizers, their changes to text, and safe loading."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import not_loaded
from conftest import REAL, Load
from hypothesis import given
from hypothesis import strategies as st
from make_tokenizers import (
    copy_folder,
    saved,
    sentencepiece_with,
    spelled,
    table_of,
    tekken_file,
    unigram_model,
    word_piece,
)
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from xtok.errors import TokenizerError
from xtok.tokenizers import Tokenizer, absolute, load_tokenizer, model_id
from xtok.tokenizers.table import TokenType

SAMPLES = [
    b" the", b"the", b"  the ", b"\r\n", b"201", "中文 café".encode(), "ﬁ①".encode(), b"\xe4\xb8",
    b"<s>", b"a<think>b", bytes(range(256)), "👨\u200d👩 e\u0301".encode(),
]  # fmt: skip


# Tekken


def test_a_tekken_file(small: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tekken_file(tmp_path / "tekken.json", small)))
    table = table_of(tokenizer)
    assert tokenizer.vocabulary.backend == "tekken"
    assert len(table) == 930  # 100 ranks are listed, but not used
    assert [table.control_names[i] for i in (0, 1, 2, 3, 11, 19, 20, 29)] == [
        *["<unk>", "<s>", "</s>", "[INST]", "<pad>", "[TOOL_CONTENT]"],
        *["<SPECIAL_20>", "<SPECIAL_29>"],
    ]
    assert table.types[0] == TokenType.UNKNOWN
    assert (table.roles["eos"], table.roles["pad"]) == ((2,), (11,))
    assert table[30] == b"\x00" or len(table[30]) == 1
    for sample in SAMPLES:
        assert b"".join(spelled(tokenizer, sample)) == sample
    assert "does not support @x" in not_loaded(f"{tokenizer.location}@x")


def test_a_tekken_file_that_lists_its_special_tokens(small: Path, tmp_path: Path) -> None:
    listed = [
        {"rank": 0, "token_str": "<unk>", "is_control": True},
        {"rank": 1, "token_str": "[THINK]", "is_control": False},
    ]
    path = tekken_file(tmp_path / "t.json", small, special_tokens=listed)
    table = table_of(load_tokenizer(str(path)))
    assert table.types[1] == TokenType.USER_DEFINED
    assert table[1] == b"[THINK]"
    assert table.control_names[2] == "<SPECIAL_2>"


@pytest.mark.parametrize("flag", ["false", 0, None])
def test_a_flag_is_true_or_false(small: Path, tmp_path: Path, flag: object) -> None:
    listed = [{"rank": 1, "token_str": "[THINK]", "is_control": flag}]
    path = tekken_file(tmp_path / "t.json", small, special_tokens=listed)
    assert f"is_control is {flag!r}" in not_loaded(path)


def config(**values: object) -> dict[str, Any]:
    return {"config": values}


def special(*tokens: tuple[int, object]) -> dict[str, Any]:
    return {"special_tokens": [{"rank": rank, "token_str": name} for rank, name in tokens]}


NO_TEKKEN = "not a tekken file"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda vocab: vocab[300].update(token_bytes="YW="), "entry 300 "),
        (lambda vocab: vocab.__delitem__(slice(100, None)), "156 of the 256"),
        ('{"config": {"pattern": ' + "[" * 100_000, NO_TEKKEN),
        *((config(default_num_special_tokens=n), NO_TEKKEN) for n in (float("inf"), -1, 10**9)),
        *((config(default_vocab_size=n), NO_TEKKEN) for n in (10, 2_000)),
        *((config(pattern=pattern), NO_TEKKEN) for pattern in ("", "(")),
        *((special((1, "<s>"), token), NO_TEKKEN)
          for token in ((0, 5), (0, "\ud800"), (30, "x"), (-1, "x"), (1, "twice"))),
    ],
)  # fmt: skip
def test_damaged_tekken_files(small: Path, tmp_path: Path, damage: Any, problem: str) -> None:
    changed = damage if isinstance(damage, dict) else {}
    path = tekken_file(tmp_path / "tekken.json", small, **changed)
    if callable(damage):
        document = json.loads(path.read_text())
        damage(document["vocab"])
        path.write_text(json.dumps(document))
    elif isinstance(damage, str):
        path.write_text(damage)
    assert problem in not_loaded(path)


# Tiktoken


SINGLE = {bytes([byte]): 1000 + byte for byte in range(256)}
TWO = {b"ab": 0, b"\xff\x00": 1}


def rank_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(t), i) for t, i in ranks.items())


def ranks_of(path: Path, data: bytes) -> dict[bytes, int]:
    path.write_bytes(data)
    table = load_tokenizer(f"{path}@.+").table
    return {table[i]: i for i in table.ids_of_type(TokenType.NORMAL).tolist()}


@pytest.mark.parametrize("data", [
    b"YWI= 0\n/wA= 1\n", b"YWI= 0\n/wA= 1", b"YWI= 0\r\n/wA= 1\r\n", b"YWI= 0\n\n/wA= 1\n",
    b"YWI=\t0\n/wA= 1\n",
])  # fmt: skip
def test_a_good_rank_file(data: bytes, tmp_path: Path) -> None:
    assert ranks_of(tmp_path / "x.tiktoken", rank_file(SINGLE) + data) == SINGLE | TWO


@pytest.mark.parametrize("data", [
    b"YWI=\n0 /wA= 1\n", b"YWI= 0 /wA=\n1\n", b"YWI= 0\n/wA=\n", b"YWI= 0\nYWI= 1\n",
    b"YWI= 0\n/wA= 0\n", b"Y=W= 0\n/wA= 1\n", b"YWI=YWI= 0\n/wA= 1\n", b"YWI 0\n/wA= 1\n",
    b"Y!I= 0\n/wA= 1\n", b"YWI= +0\n/wA= 1\n", b"YWI= 0\n/wA= 99999999999\n",
    b"YWI= 0\n/wA= 99999999\n", b"==== 0\n/wA= 1\n",
])  # fmt: skip
def test_a_rank_file_with_a_bad_line(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"x\.tiktoken, line 25[78]: "):
        ranks_of(tmp_path / "x.tiktoken", rank_file(SINGLE) + data)


@given(st.dictionaries(st.binary(min_size=2, max_size=9), st.integers(0, 999), min_size=1))
def test_parsing_undoes_writing(
    tmp_path_factory: pytest.TempPathFactory, ranks: dict[bytes, int]
) -> None:
    path, data = tmp_path_factory.mktemp("ranks") / "x.tiktoken", rank_file(SINGLE | ranks)
    if len(set(ranks.values())) == len(ranks):
        assert ranks_of(path, data) == SINGLE | ranks
    else:
        with pytest.raises(TokenizerError, match="is repeated"):
            ranks_of(path, data)


def test_a_text_that_is_too_much_for_the_pattern(small: Path, tmp_path: Path) -> None:
    """A regular expression that backtracks without end makes the library panic."""
    many = "a" * 40 + "!"
    pattern = r"(?:a|aa)+(?!.|\n)|."
    tokenizer = load_tokenizer(f"{small / 'small.tiktoken'}@{pattern}")
    assert b"".join(spelled(tokenizer, many.encode())) == many.encode()
    [array] = tokenizer.library_arrays([many])
    assert array.tolist() == tokenizer.library_ids([many])[0] == tokenizer.segment(many.encode())
    assert tokenizer.encode(many).ids.tolist() == array.tolist()
    tekken = load_tokenizer(tekken_file(tmp_path / "t.json", small, config={"pattern": pattern}))
    assert tekken.segment(many.encode()) == [i + 30 for i in array.tolist()]


# Folders without a tokenizer.json


def test_a_folder_with_only_a_sentencepiece_file(
    small: Path, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    shutil.copy(small / "small.model", tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 1024}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    config = {
        "added_tokens_decoder": {
            "1000": {"content": "<|im_start|>", "special": True},
            "1001": {"content": "<tool>", "special": False},
        },
        "pad_token": "<|im_start|>",
        "chat_template": "{{ bos_token + messages[0].content }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    table = table_of(tokenizer)
    assert tokenizer.vocabulary.backend == "hf"  # as AutoTokenizer reads it
    assert (tokenizer.vocabulary.vocab_size, tokenizer.vocabulary.width_source) == (1024, "config")
    assert (table.control_names[1000], table[1001]) == ("<|im_start|>", b"<tool>")
    assert (table.roles["pad"], table.roles["eos"]) == ((1000,), (2, 4))
    assert tokenizer.segment(b" the<tool>the") == [
        *sentencepiece.segment(b" the"),
        1001,
        *sentencepiece.segment(b"the"),
    ]
    from xtok.conversation import render

    rendered = render(tokenizer, [{"role": "user", "content": "<|im_start|>a"}])
    assert rendered.ids[:2].tolist() == [1, 1000]


AT = r"@\w+|\W+"


@pytest.fixture
def folder(small: Path, tmp_path: Path) -> Path:
    """A folder of a rank file."""
    shutil.copy(small / "small.tiktoken", tmp_path / "anything.tiktoken")
    return tmp_path


def test_a_folder_with_only_a_tiktoken_file(folder: Path, ranks: Tokenizer) -> None:
    assert "unknown family" in not_loaded(folder)
    tokenizer = load_tokenizer(f"{folder}{AT}")
    assert tokenizer.vocabulary.backend == "tiktoken"
    assert table_of(tokenizer).sha256() == table_of(ranks).sha256()


def test_invalid_added_tokens_of_a_folder_are_errors(folder: Path) -> None:
    content = '{"5": {"content": "\\ud800"}}'
    flag = '{"5": {"content": "a", "special": "false"}}'
    for tokens in ("[1]", '{"x": {"content": "a"}}', '{"5": {}}', '{"5": "a"}', content, flag):
        (folder / "tokenizer_config.json").write_text(f'{{"added_tokens_decoder": {tokens}}}')
        assert "added_tokens_decoder" in not_loaded(f"{folder}{AT}")


def test_more_chat_templates_of_a_folder(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_tokenizer(f"{folder}{AT}").chat_templates == {"tool_use": "tools"}
    (folder / "chat_template.jinja").write_text("plain")
    templates = load_tokenizer(f"{folder}{AT}").chat_templates
    assert templates == {"default": "plain", "tool_use": "tools"}


def test_added_tokens_of_a_tiktoken_folder(folder: Path) -> None:
    (folder / "added_tokens.json").write_text('{"<|end|>": 1000, "<tool>": 1001}')
    named = folder / "special_tokens_map.json"
    named.write_text('{"eos_token": {"content": "<|end|>", "lstrip": false}}')
    tokenizer = load_tokenizer(f"{folder}{AT}")
    assert tokenizer.table.control_names == {1000: "<|end|>"}
    assert tokenizer.encode("<tool><|end|>").ids.tolist() == [1001, 1000]
    assert tokenizer.special_token_names == {"eos_token": "<|end|>"}
    named.write_text('{"eos_token": "<|end|>", "additional_special_tokens": ["<|other|>"]}')
    assert "special tokens that have no id: <|other|>" in not_loaded(f"{folder}{AT}")


def test_other_damage_in_a_folder(folder: Path, small: Path, tmp_path: Path) -> None:
    pieces_folder = tmp_path / "pieces"
    pieces_folder.mkdir()
    shutil.copy(small / "small.model", pieces_folder / "tokenizer.model")
    (pieces_folder / "tokenizer_config.json").write_text("[" * 100_000)
    assert "is not a JSON object" in not_loaded(pieces_folder)
    config = '{"bos_token": ["a"], "chat_template": [{"name": "a"}]}'
    (folder / "tokenizer_config.json").write_text(config)
    tokenizer = load_tokenizer(f"{folder}{AT}")
    with pytest.raises(TokenizerError, match="malformed"):
        assert tokenizer.chat_templates
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(TokenizerError, match="UTF-8"):
        assert tokenizer.chat_templates


def test_a_folder_with_a_folder_that_is_named_like_a_tokenizer(folder: Path) -> None:
    (folder / "a.tiktoken").mkdir()
    (folder / "b.tiktoken").symlink_to("b.tiktoken")
    assert load_tokenizer(f"{folder}{AT}").vocabulary.backend == "tiktoken"


def test_a_folder_with_several_tokenizers_is_not_guessed_at(small: Path, tmp_path: Path) -> None:
    for name in ("a.model", "b.model"):
        shutil.copy(small / "small.model", tmp_path / name)
    assert "several files" in not_loaded(tmp_path)
    (tmp_path / "b.model").rename(tmp_path / "tokenizer.model")
    assert "several tokenizers" in not_loaded(tmp_path)
    # therefore the folder is a model's folder
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert len(load_tokenizer(tmp_path).table) == 1000


# WordPiece and Unigram


def test_word_piece_reports_its_changes_of_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_piece(tmp_path, lowercase=True)))
    table = table_of(tokenizer)
    ids = table.canonical_ids()
    assert {b" the", b" cat", b"s", b"ing", b",", b"."} <= set(ids)
    assert table.types[1] == TokenType.UNKNOWN
    assert table.roles["cls"] == (2,)
    assert spelled(tokenizer, b" cats") == [b" cat", b"s"]
    assert spelled(tokenizer, b" the, cat") == [b" the", b",", b" cat"]
    assert b"".join(spelled(tokenizer, b"the")) == b"the"
    changes = dict(tokenizer.text_changes)
    assert "lowercase" in changes["BertNormalizer"]
    assert "drops whitespace" in changes["WordPiece"]
    # Spelling never returns tokens of a changed text.
    assert b"".join(spelled(tokenizer, b" THE")) == b" THE"


def unigram(folder: Path) -> Path:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    pieces += [("▁the", -2.0), ("the", -3.0), ("▁", -4.0), ("s", -5.0), ("▁cat", -3.0)]
    rust = Rust(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return saved(folder, rust, unk_token="<unk>", eos_token="</s>")


def test_model_without_an_unknown_token_refuses_unknown_text(tmp_path: Path) -> None:
    rust = Rust(models.WordLevel({"▁one": 0, "▁two": 1}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rust.decoder = decoders.Metaspace(prepend_scheme="never")
    rust.save(str(tmp_path / "tokenizer.json"))
    words = load_tokenizer(str(tmp_path))
    assert words.segment_batch([b" one", b" six", b" two one"]) == [[0], None, [1, 0]]
    assert words.library_ids([" one", " six"]) == [[0], []]
    with pytest.raises(TokenizerError, match="cannot spell"):
        words.segment(b" six")
    with pytest.raises(TokenizerError, match="cannot encode"):
        words.encode(" six")


def test_a_unigram_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(unigram(tmp_path)))
    table = table_of(tokenizer)
    assert table.types[0] == TokenType.UNKNOWN
    assert table.types[2] == TokenType.BYTE
    assert spelled(tokenizer, b" the cats") == [b" the", b" cat", b"s"]
    assert spelled(tokenizer, b"the") == [b"the"]
    assert set(dict(tokenizer.text_changes)) == {"NFKC", "Lowercase"}
    for sample in SAMPLES:
        assert b"".join(spelled(tokenizer, sample)) == sample


def test_removed_spaces_of_a_sentencepiece_file_are_reported(small: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        sentencepiece_with(
            small / "small.model",
            tmp_path / "a.model",
            lambda proto: setattr(proto.normalizer_spec, "remove_extra_whitespaces", True),
        )
    )
    table = table_of(tokenizer)
    assert b"".join(table[i] for i in tokenizer.encode("  the  the ").ids) == b" the the"
    assert list(dict(tokenizer.text_changes)) == ["remove_extra_whitespaces"]


def test_the_charsmap_of_a_sentencepiece_file_is_reported(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "unigram.model"
    path.write_bytes(unigram_model(byte_fallback=True))
    tokenizer = load_tokenizer(str(path))
    assert list(dict(tokenizer.text_changes)) == ["nmt_nfkc", "remove_extra_whitespaces"]
    assert not load_tokenizer(str(small / "small.model")).text_changes
    for sample in SAMPLES:
        assert b"".join(spelled(tokenizer, sample)) == sample


def test_text_that_does_not_round_trip_is_noted_by_build(
    tmp_path: Path, sentencepiece: Tokenizer
) -> None:
    import xtok

    lossy = load_tokenizer(str(word_piece(tmp_path / "wp", lowercase=True)))
    notes = xtok.build(lossy, sentencepiece).reports[0].notes
    assert any(note.startswith("wp changes text: BertNormalizer: ") for note in notes)


def test_the_tokenizer_bytes_has_a_token_per_byte() -> None:
    tokenizer = load_tokenizer("bytes")
    assert table_of(tokenizer).tokens() == [bytes([b]) for b in range(256)]
    assert tokenizer.segment("é".encode() + b"\xff") == [0xC3, 0xA9, 0xFF]
    assert load_tokenizer("bytes", vocab_size=264).vocabulary.vocab_size == 264


# Built-in tokenizers


def test_the_null_tokenizer_has_numbers_as_text() -> None:
    tokenizer = load_tokenizer("null:100")
    assert tokenizer.vocabulary.vocab_size == 100
    assert len(table_of(tokenizer).text_ids) == 0
    assert table_of(tokenizer).roles["eos"] == (99,)
    assert tokenizer.encode("5 17  3").ids.tolist() == [5, 17, 3]
    for size in ("x", "0", "-1", "99999999999", "9" * 5000):
        assert "expected a number" in not_loaded(f"null:{size}")
    assert load_tokenizer("null").vocabulary.vocab_size == 131_072
    for text in ("5 100", "five", "9" * 5000):
        with pytest.raises(TokenizerError, match="ids below"):
            tokenizer.encode(text)


# Bad input


SLOW = """
from transformers import PreTrainedTokenizer


class Slow(PreTrainedTokenizer):
    vocab_size = 1

    def get_vocab(self):
        return {"a": 0}

    def _convert_token_to_id(self, token):
        return 0
"""


def test_a_slow_tokenizer_is_an_error(small: Path, tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["tokenization.Slow", None]}, "tokenizer_class": "Slow"}
    folder = copy_folder(small / "small-byte-level", tmp_path / "slow", tokenizer_config=config)
    (folder / "tokenization.py").write_text(SLOW)
    message = not_loaded(folder, trust_remote_code=True)
    assert "a slow tokenizer (Slow)" in message


# Real tokenizers


@pytest.mark.real
def test_a_real_tekken_file_has_special_tokens_before_ranks(load_real: Load) -> None:
    table = table_of(load_real("tekken.json"))
    assert len(table) == 131_072
    assert table.control_names[999] == "<SPECIAL_999>"
    assert sorted(table.tokens()[1000:1256]) == [bytes([b]) for b in range(256)]
    listed = json.loads((REAL / "tekken.json").read_bytes())["vocab"]
    assert table[131_071] == base64.b64decode(listed[130_071]["token_bytes"])


@pytest.mark.real
@pytest.mark.parametrize("name", ["tekken.json", "llama4.tiktoken"])
def test_real_tokens_are_spelled_exactly(load_real: Load, name: str) -> None:
    tokenizer = load_real(name)
    own = table_of(tokenizer).tokens()
    tokens = [token for token in own if token]
    spelled = [b"".join([own[i] for i in ids or ()]) for ids in tokenizer.segment_batch(tokens)]
    assert spelled == tokens


@pytest.mark.real
def test_real_llama_4(load_real: Load) -> None:
    tokenizer = load_real("llama4.tiktoken")
    table = table_of(tokenizer)
    assert len(table) == 202_048
    names = table.control_names
    # Ids in comments of llama4/tokenizer.py of llama-models 0.3.0.
    assert (names[200_000], names[200_005]) == ("<|begin_of_text|>", "<|header_start|>")
    assert names[200_018] == "<|finetune_right_pad|>"
    assert names[200_080] == "<|image_start|>"
    assert names[201_133] == "<|vision_reserved_special_token_1047|>"
    assert names[201_142] == "<|reasoning_thinking_start|>"
    assert names[202_047].startswith("<|reserved_special_token_")
    assert table.roles["pad"] == (200_018,)


def test_a_revision_and_a_pattern_follow_the_name(small: Path, tmp_path: Path) -> None:
    assert "org/no at revision refs/pr/1" in not_loaded("org/no@refs/pr/1", offline=True)
    folder = copy_folder(small / "small-byte-level", tmp_path / "with@sign")
    assert load_tokenizer(folder).vocabulary.model_id == "with@sign"
    assert "does not support @main" in not_loaded(f"{folder}@main")
    long = "|".join(["[a-z]+"] * 90) + r"|\s+|."  # exceeds the maximum length of a file name
    ranks = load_tokenizer(f"{small}/small.tiktoken@{long}")
    assert ranks.vocabulary.model_id == "small.tiktoken"
    assert absolute(f"tiktoken:{small}/../{small.name}/small.tiktoken@{long}") == (
        f"tiktoken:{small}/small.tiktoken@{long}"
    )


def test_a_link_to_a_folder_keeps_its_own_name(small: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(small / "small-byte-level")
    assert load_tokenizer(tmp_path / "mine").vocabulary.model_id == "mine"
    assert model_id(tmp_path / "mine" / "tokenizer.json") == "mine"


def test_a_tokenizer_json_needs_none_of_its_folders_code(
    small: Path, tmp_path: Path, byte_level: Tokenizer
) -> None:
    config = {"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}, "tokenizer_class": "Own"}
    folder = copy_folder(small / "small-byte-level", tmp_path / "own", tokenizer_config=config)
    assert "requires custom tokenizer code" in not_loaded(folder)
    own = load_tokenizer(folder / "tokenizer.json")
    assert own.table.sha256() == byte_level.table.sha256()
    assert (own.vocabulary.model_id, own.vocabulary.width_source) == ("own", "config")
    assert not own.notes


def test_a_loaded_hugging_face_tokenizer(small: Path, byte_level: Tokenizer) -> None:
    loaded = AutoTokenizer.from_pretrained(str(small / "small-byte-level"))
    assert load_tokenizer(loaded).table.sha256() == byte_level.table.sha256()


def test_transformers_reads_the_same_vocabulary_from_a_sentencepiece_file(
    small: Path, tmp_path: Path, sentencepiece: Tokenizer
) -> None:
    shutil.copy(small / "small.model", tmp_path / "tokenizer.model")
    for config in ("{}", '{"tokenizer_class": "LlamaTokenizer"}'):
        (tmp_path / "tokenizer_config.json").write_text(config)
        loaded = load_tokenizer(AutoTokenizer.from_pretrained(str(tmp_path)))
        # Since Transformers 5.24, its general class no longer adds user-defined pieces to the
        # vocabulary's added tokens, though it still cuts text at them.
        table, types = sentencepiece.table, loaded.table.types.copy()
        is_user_defined = table.types == TokenType.USER_DEFINED
        types[is_user_defined & (types == TokenType.NORMAL)] = TokenType.USER_DEFINED
        assert replace(loaded.table, types=types).sha256() == table.sha256()
        assert loaded.table.roles["unk"] == table.roles["unk"]
        text = f"a{table[int(np.flatnonzero(is_user_defined)[0])].decode()}b"
        assert loaded.encode(text).ids.tolist() == sentencepiece.encode(text).ids.tolist()
