"""Model folders: roles and added tokens of their configs, for tokenizer files of other kinds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import (
    SPECIAL_NAMES,
    AddedNames,
    Backend,
    Roles,
    bad_config,
    chat_templates,
    json_flag,
)
from xtok.tokenizers.display import listed
from xtok.tokenizers.hub import ModelFiles
from xtok.tokenizers.table import TokenEntry, TokenType

NAMES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("tiktoken.model", "qwen.tiktoken", "*.model", "*.tiktoken", "tekken*.json"),
)
"""File names of such tokenizers, in order of preference; patterns apply to local folders only."""


def _contents(tokens: Any) -> Iterator[str]:
    """Yield the text of special tokens, listed as strings or as objects with flags."""
    for token in tokens if isinstance(tokens, list) else []:
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str):
            yield name


def _named(config: Mapping[str, Any]) -> list[str]:
    roles = [config.get(f"{role}_token") for role in SPECIAL_NAMES]
    more = (config.get(f"{kind}_special_tokens") for kind in ("additional", "extra"))
    return [*_contents(roles), *(name for tokens in more for name in _contents(tokens))]


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


class FolderBackend(Backend):
    """Backend of a tokenizer file, with the added tokens and roles of the configs next to it."""

    def __init__(self, inner: Backend, files: ModelFiles) -> None:
        self.name, self.keeps_text = inner.name, inner.keeps_text
        self._inner, self._files = inner, files
        self._config = files.json("tokenizer_config.json")
        if "added_tokens_decoder" not in self._config:
            self._config |= files.json("special_tokens_map.json")
        special = _named(self._config)
        self._added = _added_tokens(self._config, files, special)
        known = {entry.id: entry for entry in inner.entries()}
        contents = {entry.content for entry in (*known.values(), *self._added.values())}
        if missing := [name for name in special if name.encode() not in contents]:
            raise TokenizerError(
                f"the configs of {files} name special tokens without an id: {listed(missing)}",
                hint="add them with their ids to added_tokens_decoder in tokenizer_config.json",
            )
        self.text_tokens = {
            added.content.decode(): i
            for i, added in self._added.items()
            if added.type == TokenType.USER_DEFINED
            and (i not in known or known[i].type == TokenType.NORMAL)
        }
        self._text = AddedNames(self.text_tokens)

    def entries(self) -> Iterable[TokenEntry]:
        left = dict(self._added)
        for entry in self._inner.entries():
            added = left.pop(entry.id, None)
            named = entry.type in (TokenType.CONTROL, TokenType.UNKNOWN)
            yield entry if added is None or named else added
        yield from left.values()

    def definition(self) -> Iterable[bytes]:
        yield from self._inner.definition()
        yield json.dumps(sorted(self.text_tokens.items())).encode()

    def declared_roles(self) -> Roles:
        roles = dict(self._inner.declared_roles())
        ids = {added.content.decode(): i for i, added in self._added.items()}
        ids |= {
            e.content.decode("utf-8", "replace"): e.id
            for e in self._inner.entries()
            if e.type in (TokenType.CONTROL, TokenType.UNKNOWN)
        }
        for role in SPECIAL_NAMES:
            if (key := f"{role}_token") in self._config:
                names = _contents([self._config[key]])  # names without an id are text
                roles[role] = {ids[n]: "tokenizer_config.json" for n in names if n in ids}
        return roles

    def library(self) -> Any:
        return self.other[1]().library() if self.other else None

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        encode = self._inner.encode_texts
        return [self._text.encode(text, lambda part: encode([part])[0]) for text in texts]

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        return self._inner.spans(text, at_start=at_start)

    def encode_bytes(self, data: bytes) -> list[int] | None:
        return self._inner.encode_bytes(data)

    def chat_templates(self) -> Mapping[str, str]:
        return chat_templates(self._files)
