"""Quick ways beside the long ones: they give the same, or leave it to the long way."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtok.tokenizers import Tokenizer
from xtok.tokenizers._files import ModelFiles
from xtok.tokenizers._hf import HuggingFaceBackend
from xtok.tokenizers._plain import load_plain
from xtok.tokenizers._tiktoken import _parse_at_once, _parse_lines

# Folders that are loaded without transformers


@pytest.fixture
def folder(small: Path, tmp_path: Path) -> Path:
    """A tokenizer.json, and a config that names the generic class and a special token."""
    source = small / "small-byte-level"
    target = tmp_path / "plain"
    target.mkdir()
    shutil.copy(source / "tokenizer.json", target)
    special = next(t["content"] for t in tokenizer_json(target)["added_tokens"] if t["special"])
    write_config(target, eos_token=special)
    return target


def tokenizer_json(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tokenizer.json").read_text()))


def write_config(folder: Path, **config: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_plain_folder_is_what_auto_tokenizer_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_plain(ModelFiles(folder)) is not None
    quick = Tokenizer(HuggingFaceBackend(ModelFiles(folder)), model_id="plain")
    monkeypatch.setattr("xtok.tokenizers._hf.load_plain", lambda files: None)
    slow = Tokenizer(HuggingFaceBackend(ModelFiles(folder)), model_id="plain")
    assert quick.table.sha256() == slow.table.sha256()
    assert quick.table.roles == slow.table.roles
    text = "The price was 1299 dollars; naïve café.\n\tdef f(x):\r\n 東京"
    assert quick.encode(text).ids.tolist() == slow.encode(text).ids.tolist()
    tokens = [token for token in slow.table.tokens() if token]
    assert quick.segment_batch(tokens) == slow.segment_batch(tokens)
    assert quick.special_token_names() == slow.special_token_names()


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"add_prefix_space": True},
        {"bos_token": "<a token that is not there>"},
        {"bos_token": {"content": "<s>", "__type": "AddedToken"}},
        {"added_tokens_decoder": {"0": {"content": "?"}}},
        {"extra_special_tokens": ["<more>"]},
    ],
)
def test_a_folder_with_anything_more_is_left_to_auto_tokenizer(
    folder: Path, config: dict[str, Any]
) -> None:
    write_config(folder, **config)
    assert load_plain(ModelFiles(folder)) is None


@pytest.mark.parametrize("name", ["config.json", "special_tokens_map.json", "added_tokens.json"])
def test_a_folder_with_other_files_is_left_to_auto_tokenizer(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    assert load_plain(ModelFiles(folder)) is None


# Rank files

TWO = {b"a": 0, b"\xff\x00": 1}


def test_a_good_rank_file_is_parsed_at_once() -> None:
    assert _parse_at_once(b"YQ== 0\n/wA= 1\n") == TWO
    assert _parse_at_once(b"YQ== 0\n/wA= 1") == TWO


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"YQ== 0\r\n/wA= 1\r\n",
        b"YQ== 0\n\n/wA= 1\n",
        b"YQ==\t0\n/wA= 1\n",
        b"YQ==\n0 /wA= 1\n",
        b"YQ== 0 /wA=\n1\n",
        b"YQ== 0\n/wA=\n",
        b"YQ== 0\nYQ== 1\n",
        b"YQ== 0\n/wA= 0\n",
        b"Y=Q= 0\n/wA= 1\n",
        b"YQ==YQ== 0\n/wA= 1\n",
        b"YQ= 0\n/wA= 1\n",
        b"Y!== 0\n/wA= 1\n",
        b"YQ== +0\n/wA= 1\n",
        b"YQ== 0\n/wA= 99999999999\n",
        b"YQ== 0\n/wA= 99999999\n",
        b"==== 0\n/wA= 1\n",
    ],
)
def test_any_other_is_parsed_line_by_line(data: bytes) -> None:
    assert _parse_at_once(data) is None


@given(st.dictionaries(st.binary(min_size=1, max_size=9), st.integers(0, 2**23), min_size=1))
def test_both_ways_of_parsing_agree(ranks: dict[bytes, int]) -> None:
    data = b"".join(b"%s %d\n" % (base64.b64encode(t), i) for t, i in ranks.items())
    if len(set(ranks.values())) == len(ranks):
        assert _parse_at_once(data) == _parse_lines(data, "x") == ranks
    else:
        assert _parse_at_once(data) is None
