"""Model folders without `tokenizer.json`, but with a SentencePiece, tiktoken or tekken file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xtok.errors import TokenizerError
from xtok.tokenizers._configs import SPECIAL_NAMES, eos_ids, model_vocab_size
from xtok.tokenizers._tokenizer import Backend, TextChange
from xtok.tokenizers.hub import ModelFiles
from xtok.vocab.table import Entry, TokenType

NAMES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("tiktoken.model", "qwen.tiktoken", "*.model", "*.tiktoken", "tekken*.json"),
)
"""Where such a tokenizer is looked for, in this order; patterns only in a local folder."""


class FolderBackend(Backend):
    """The backend of a tokenizer file, with what the configs beside it add.

    `config.json` gives the width, `tokenizer_config.json` added tokens, roles and chat templates,
    `generation_config.json` further ids that end a text.
    """

    def __init__(self, inner: Backend, files: ModelFiles) -> None:
        self.name = inner.name
        self._inner, self._files = inner, files
        self._config = files.json("tokenizer_config.json")
        try:
            listed = self._config.get("added_tokens_decoder") or {}
            self._added = {int(i): _entry(int(i), token) for i, token in listed.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _bad_config(files, "added_tokens_decoder") from error
        own = {entry.id: entry.type for entry in inner.entries()}
        self._text = {
            added.content.decode(): i
            for i, added in self._added.items()
            if added.type == TokenType.USER_DEFINED
            and own.get(i, TokenType.NORMAL) == TokenType.NORMAL
        }
        names = sorted(map(re.escape, self._text), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(names) or '(?!)'})")

    def entries(self) -> Iterable[Entry]:
        """The file's ids; those that are added tokens by the config take their type from there."""
        left = dict(self._added)
        for entry in self._inner.entries():
            added = left.pop(entry.id, None)
            named = entry.type in (TokenType.CONTROL, TokenType.UNKNOWN)
            yield entry if added is None or named else added
        yield from left.values()

    def declared_roles(self) -> Mapping[str, Sequence[int]]:
        """Return the roles that the config, the file itself and the generation config name."""
        roles = {role: list(ids) for role, ids in self._inner.declared_roles().items()}
        ids = {added.content.decode(): i for i, added in self._added.items()}
        ids |= {
            e.content.decode("utf-8", "replace"): e.id
            for e in self._inner.entries()
            if e.type in (TokenType.CONTROL, TokenType.UNKNOWN)
        }
        for role in SPECIAL_NAMES:
            token = self._config.get(f"{role}_token")
            name = token.get("content") if isinstance(token, dict) else token
            if isinstance(name, str) and name in ids:
                roles[role] = [ids[name]]
        more = eos_ids(self._files)
        if more:
            roles["eos"] = list(dict.fromkeys([*roles.get("eos", []), *more]))
        return roles

    def model_vocab_size(self) -> int | None:
        """Return what config.json tells."""
        return model_vocab_size(self._files)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode with the file's backend what stands between added text tokens."""
        parts_of = [self._pattern.split(text) for text in texts]
        encoded = iter(self._inner.encode_texts([p for parts in parts_of for p in parts[::2]]))
        result = []
        for parts in parts_of:
            ids: list[int] = []
            for place, part in enumerate(parts):
                ids += [self._text[part]] if place % 2 else next(encoded)
            result.append(ids)
        return result

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """Merge as the file's backend does."""
        return self._inner.encode_bytes(data)

    def encode_prompt(self, text: str) -> list[int] | None:
        """Leave it to `Tokenizer` if the config adds tokens: the file's library knows them not."""
        return None if self._added else self._inner.encode_prompt(text)

    def chat_templates(self) -> Mapping[str, str]:
        """Return what `chat_template.jinja` or `tokenizer_config.json` say."""
        path = self._files.find("chat_template.jinja")
        if path is not None:
            try:
                return {"default": path.read_text(encoding="utf-8")}
            except UnicodeDecodeError as error:
                raise TokenizerError(
                    f"{path} is not text in UTF-8: {error}", hint="fix it, or fetch it again"
                ) from error
        templates: Any = self._config.get("chat_template")
        if isinstance(templates, list):
            try:
                return {str(one["name"]): str(one["template"]) for one in templates}
            except (LookupError, TypeError) as error:
                raise _bad_config(self._files, "chat_template") from error
        return {"default": templates} if isinstance(templates, str) else {}

    def text_changes(self) -> Sequence[TextChange]:
        """Return those of the file."""
        return self._inner.text_changes()


def _entry(token_id: int, token: Mapping[str, Any]) -> Entry:
    kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
    return Entry(token_id, kind, str(token["content"]).encode())


def _bad_config(files: ModelFiles, field: str) -> TokenizerError:
    return TokenizerError(
        f"the {field} in {files.find('tokenizer_config.json')} is malformed",
        hint="fix it, or fetch it again",
    )
