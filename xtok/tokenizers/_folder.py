"""Read added tokens, roles and chat templates from the configs next to a rank file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import SPECIAL_NAMES, bad_config, json_flag
from xtok.tokenizers._tiktoken import RankBackend
from xtok.tokenizers.display import listed
from xtok.tokenizers.hub import ModelFiles
from xtok.tokenizers.table import TokenEntry, TokenType

NAMES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("tiktoken.model", "qwen.tiktoken", "*.model", "*.tiktoken", "tekken*.json"),
)
"""Names of the tokenizer file in models without a tokenizer.json. The first file found is used.

Names with `*` are patterns, which apply only to local folders."""


def _contents(tokens: Any) -> Iterator[str]:
    """Yield the strings of special tokens. A token is a string, or an object with `content`."""
    for token in tokens if isinstance(tokens, list) else []:
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str):
            yield name


def _special_names(config: Mapping[str, Any]) -> list[str]:
    roles = [config.get(f"{role}_token") for role in SPECIAL_NAMES]
    extra = (config.get(f"{kind}_special_tokens") for kind in ("additional", "extra"))
    return [*_contents(roles), *(name for tokens in extra for name in _contents(tokens))]


def _added_tokens(
    config: Mapping[str, Any], files: ModelFiles, special: Sequence[str]
) -> dict[int, TokenEntry]:
    try:
        tokens = config.get("added_tokens_decoder") or {
            i: {"content": name, "special": name in special}
            for name, i in files.json("added_tokens.json").items()
        }
        kinds = (TokenType.USER_DEFINED, TokenType.CONTROL)
        return {
            int(i): TokenEntry(
                int(i), kinds[json_flag(t, "special", False)], str(t["content"]).encode()
            )
            for i, t in tokens.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise bad_config(files, "added_tokens_decoder") from error


def add_configs(backend: RankBackend, files: ModelFiles) -> None:
    """Read the tokens, roles and chat templates from a folder's configs into a backend."""
    config = files.json("tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= files.json("special_tokens_map.json")
    special = _special_names(config)
    added = _added_tokens(config, files, special)
    entries = {entry.id: entry for entry in backend.entries()}
    contents = {entry.content for entry in (*entries.values(), *added.values())}
    if missing := [name for name in special if name.encode() not in contents]:
        raise TokenizerError(
            f"the configs of {files} list special tokens that have no id: {listed(missing)}",
            hint="add the tokens and their ids to added_tokens_decoder in tokenizer_config.json",
        )
    text = {
        token.content.decode(): i
        for i, token in added.items()
        if token.type == TokenType.USER_DEFINED
        and (i not in entries or entries[i].type == TokenType.NORMAL)
    }
    control = {i: e for i, e in entries.items() if e.type in (TokenType.CONTROL, TokenType.UNKNOWN)}
    all_entries = (*added.values(), *control.values())
    ids = {entry.content.decode("utf-8", "replace"): entry.id for entry in all_entries}
    for role in SPECIAL_NAMES:
        if (key := f"{role}_token") in config:
            names = _contents([config[key]])  # a name without an id is ordinary text
            backend.roles[role] = {ids[n]: "tokenizer_config.json" for n in names if n in ids}
    backend.added |= added | control
    backend.text_tokens = {**backend.text_tokens, **text}
    backend.definitions.append(json.dumps(sorted(text.items())).encode())
    backend.files = files
