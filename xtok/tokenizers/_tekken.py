"""Read byte ranks from JSON files: `tekken.json`, and Megatron's `vocab.json`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xtok._lib.parsing import parse_json
from xtok.errors import MALFORMED, TokenizerError
from xtok.tokenizers._backend import damaged, json_flag
from xtok.tokenizers._tiktoken import TEKKEN_PATTERN, RankBackend, bad_pattern, require_single_bytes
from xtok.tokenizers.table import MAX_WIDTH, TokenEntry, TokenType

# Special tokens of files before version 7, because these files list no special tokens. Source:
# tokens/tokenizers/tekken.py of mistral-common 1.13.1.
_FIRST_SPECIAL_TOKENS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_ROLES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}


_START = re.compile(rb'\s*\{\s*"config"\s*:\s*\{\s*"pattern"')
_TOKEN = re.compile(rb'"token_bytes"\s*:\s*"')


def is_tekken(path: Path) -> bool:
    """Whether a JSON file is a tekken file. Its keys can have any order."""
    data = path.read_bytes()
    return _TOKEN.search(data) is not None or _START.match(data) is not None


def load_tekken(path: Path) -> RankBackend:
    """Load a `tekken.json`."""
    try:
        document = parse_json(path.read_bytes())
        config = document["config"]
        reserved = int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"])
        if not 0 <= reserved <= size <= MAX_WIDTH:
            raise ValueError(f"{reserved} special tokens, but {size} tokens in total")
        listed = document.get("special_tokens") or _number(_FIRST_SPECIAL_TOKENS)
        special = _special_tokens(listed, reserved)
        ranks = _ranks(document["vocab"][: size - reserved], reserved, path)
        if len(ranks) < size - reserved:
            raise ValueError(f"its vocab has {len(ranks)} entries, expected {size - reserved}")
        return RankBackend("tekken", ranks, config["pattern"], special, _ROLES)
    except MALFORMED as error:
        raise damaged(f"{path} is not a tekken file: {error!r}") from error


def _number(names: str) -> list[dict[str, Any]]:
    return [{"rank": i, "token_str": name} for i, name in enumerate(names.split())]


def _special_tokens(listed: Iterable[Mapping[str, Any]], reserved: int) -> list[TokenEntry]:
    """Return the special tokens. A reserved id that is not listed has the name `<SPECIAL_id>`."""
    entries: dict[int, TokenEntry] = {}
    for token in listed:
        i, name = int(token["rank"]), token["token_str"].encode()
        if i in entries or not 0 <= i < reserved:
            raise ValueError(f"special token {i} is repeated, or outside 0..{reserved - 1}")
        kind = TokenType.CONTROL if json_flag(token, "is_control", True) else TokenType.USER_DEFINED
        entries[i] = TokenEntry(i, TokenType.UNKNOWN if name == b"<unk>" else kind, name)
    for i in range(reserved):
        entries.setdefault(i, TokenEntry(i, TokenType.CONTROL, f"<SPECIAL_{i}>".encode()))
    return sorted(entries.values())


def _ranks(vocab: Sequence[Mapping[str, Any]], first: int, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for index, entry in enumerate(vocab):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
        except binascii.Error as error:
            raise damaged(f"{path}, entry {index} of vocab: invalid base64") from error
        if token in ranks or int(entry["rank"]) != index:
            raise ValueError(f"entry {index} of vocab is repeated or out of order")
        ranks[token] = first + index
    require_single_bytes(ranks, str(path))
    return ranks


# A Megatron vocabulary lists only byte tokens. Megatron adds special tokens before the byte tokens,
# and its option `--tiktoken-pattern` sets the split pattern. Source of both:
# megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py.
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": TEKKEN_PATTERN,
}
_MEGATRON_SPECIAL = "<unk> <s> </s> <mask> <pad> <cls> <sep>"
_NUM_SPECIAL = 1000
_WIDTH = 1 << 17
_MEGATRON_ROLES = _ROLES | {role: f"<{role}>" for role in ("mask", "cls", "sep")}


def is_megatron(head: bytes) -> bool:
    return head.lstrip().startswith(b"[") and b'"token_bytes"' in head


def load_megatron(path: Path, pattern: str | None) -> RankBackend:
    """Load a `vocab.json`, and add Megatron's special tokens, which have the first ids."""
    if pattern is None:
        raise TokenizerError(
            f"{path} is a Megatron vocabulary without a split pattern",
            hint=f"append Megatron's split pattern: '{path}@v2', '{path}@v1', or '{path}@REGEX'",
        )
    try:
        vocab = parse_json(path.read_bytes())[: _WIDTH - _NUM_SPECIAL]
        ranks = _ranks(vocab, _NUM_SPECIAL, path)
        added = _special_tokens(_number(_MEGATRON_SPECIAL), _NUM_SPECIAL)
    except MALFORMED as error:
        raise damaged(f"{path} is not a Megatron vocabulary: {error!r}") from error
    try:
        return RankBackend(
            "tiktoken", ranks, _PATTERNS.get(pattern, pattern), added, _MEGATRON_ROLES
        )
    except ValueError as error:
        raise bad_pattern(path, error) from error
