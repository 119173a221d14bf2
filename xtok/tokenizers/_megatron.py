"""Megatron's `vocab.json` for tiktoken: a list of byte tokens; pattern and special tokens apart."""

from __future__ import annotations

import json
from pathlib import Path

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import damaged
from xtok.tokenizers._tekken import FAULTS, ranks_of
from xtok.tokenizers._tiktoken import TEKKEN_PATTERN, RankBackend, bad_pattern
from xtok.vocab.table import Entry, TokenType

# Patterns by the name that `--tiktoken-pattern` takes, the special tokens, which come first, and
# how many there are: megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py.
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": TEKKEN_PATTERN,
}
_SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
_NUM_SPECIAL = 1000
_WIDTH = 1 << 17
_ROLES = {
    "unk": "<unk>",
    "bos": "<s>",
    "eos": "</s>",
    "mask": "<mask>",
    "pad": "<pad>",
    "cls": "<cls>",
    "sep": "<sep>",
}


def is_megatron(head: bytes) -> bool:
    """Whether a file that begins so is such a list."""
    return head.lstrip().startswith(b"[") and b'"token_bytes"' in head


def load_megatron(path: Path, pattern: str | None) -> RankBackend:
    """Load a `vocab.json`, with Megatron's own special tokens before it.

    Raises:
        TokenizerError: without a pattern, or if it is not such a file.
    """
    if pattern is None:
        raise TokenizerError(
            f"{path} is a vocabulary of Megatron, which does not tell its split pattern",
            hint=f"give that of --tiktoken-pattern: '{path}@v2', '{path}@v1', or '{path}@REGEX'",
        )
    try:
        vocab = json.loads(path.read_bytes())[: _WIDTH - _NUM_SPECIAL]
        ranks = ranks_of(vocab, _NUM_SPECIAL, path)
        special = [*_SPECIAL, *(f"<SPECIAL_{i}>" for i in range(len(_SPECIAL), _NUM_SPECIAL))]
        kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * (_NUM_SPECIAL - 1)]
        added = [
            Entry(i, kind, name.encode())
            for i, (kind, name) in enumerate(zip(kinds, special, strict=True))
        ]
    except FAULTS as error:
        raise damaged(f"{path} is not a vocabulary of Megatron: {error!r}") from error
    try:
        return RankBackend("tiktoken", ranks, _PATTERNS.get(pattern, pattern), added, _ROLES)
    except ValueError as error:
        raise bad_pattern(path, error) from error
