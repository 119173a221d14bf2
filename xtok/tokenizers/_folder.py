"""Model folders: what their configs say, and those with a file of another kind of tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from xtok.errors import TokenizerError
from xtok.tokenizers._tokenizer import Backend, TextChange, splitting_at
from xtok.tokenizers.hub import ModelFiles
from xtok.vocab.table import Entry, TokenType

NAMES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("tiktoken.model", "qwen.tiktoken", "*.model", "*.tiktoken", "tekken*.json"),
)
"""Where such a tokenizer is looked for, in this order; patterns only in a local folder."""

SPECIAL_NAMES = ("bos", "eos", "pad", "unk", "mask", "sep", "cls")
"""The roles that `tokenizer_config.json` gives to tokens, each as `bos_token` and the like."""


class ConfiguredBackend(Backend):
    """A backend with the configs of its model beside it."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    def model_vocab_size(self) -> int | None:
        """Return the width that config.json gives; None without a config.json.

        Read from the file if it is there, so that a model of a new or custom type needs no code;
        else the default of its type, from transformers' `get_text_config().vocab_size`.

        Raises:
            TokenizerError: if there is none.
        """
        files = self._files
        if files.find("config.json") is None:
            return None
        config = files.json("config.json")
        for part in (config.get("text_config"), config):
            if isinstance(part, dict) and isinstance(size := part.get("vocab_size"), int):
                return size
        from transformers import AutoConfig

        try:
            loaded = AutoConfig.from_pretrained(
                files.model,
                revision=files.commit or files.revision,
                local_files_only=files.offline,
                trust_remote_code=False,
            )
            return int(loaded.get_text_config().vocab_size)
        except Exception as error:
            raise TokenizerError(
                f"the config.json of {files} has no vocabulary size: {error}",
                hint="give the width of the model's logits with {option}",
                parameter="vocab_size",
            ) from error

    def eos_ids(self) -> list[int]:
        """Return the ids that the generation config ends a text with.

        Raises:
            TokenizerError: if it is not a JSON object, or these are not ids.
        """
        name = "generation_config.json"
        eos: Any = "unknown"
        with suppress(TokenizerError):
            eos = self._files.json(name).get("eos_token_id")
        ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(i, int) for i in ids):
            path = self._files.find(name)
            raise TokenizerError(f"{path} is not a generation config", hint="fix it, or remove it")
        return ids


class FolderBackend(ConfiguredBackend):
    """The backend of a tokenizer file, with what the configs beside it add.

    `config.json` gives the width, `tokenizer_config.json` added tokens, roles and chat templates,
    `generation_config.json` further ids that end a text.
    """

    def __init__(self, inner: Backend, files: ModelFiles) -> None:
        super().__init__(files)
        self.name = inner.name
        self._inner = inner
        self._config = files.json("tokenizer_config.json")
        try:
            listed = self._config.get("added_tokens_decoder") or {}
            kinds = (TokenType.USER_DEFINED, TokenType.CONTROL)
            self._added = {
                int(i): Entry(int(i), kinds[bool(t.get("special"))], str(t["content"]).encode())
                for i, t in listed.items()
            }
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _bad_config(files, "added_tokens_decoder") from error
        own = {entry.id: entry.type for entry in inner.entries()}
        self._text = {
            added.content.decode(): i
            for i, added in self._added.items()
            if added.type == TokenType.USER_DEFINED
            and own.get(i, TokenType.NORMAL) == TokenType.NORMAL
        }
        self._pattern: re.Pattern[str] = splitting_at(self._text)

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
        return {**roles, "eos": [*roles.get("eos", []), *self.eos_ids()]}

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode with the file's backend what stands between added text tokens."""
        parts_of = [self._pattern.split(text) for text in texts]
        encoded = iter(self._inner.encode_texts([p for parts in parts_of for p in parts[::2]]))
        result: list[list[int]] = []
        for parts in parts_of:
            result.append([])
            for place, part in enumerate(parts):
                result[-1] += [self._text[part]] if place % 2 else next(encoded)
        return result

    def encode_start(self, text: str) -> list[int]:
        start = self._pattern.split(text, maxsplit=1)[0]
        ids = self._inner.encode_start(start) if start else []
        return ids + self.encode_texts([text[len(start) :]])[0]

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        begin = 0
        for place, part in enumerate(self._pattern.split(text)):
            size = len(part.encode())
            inner = self._inner.spans(part, at_start=at_start and not place) if part else ()
            inner = [(0, size)] if place % 2 else inner
            spans += [(begin + start, begin + end) for start, end in inner]
            begin += size
        return spans

    def encode_bytes(self, data: bytes) -> list[int] | None:
        return self._inner.encode_bytes(data)

    def chat_templates(self) -> Mapping[str, str]:
        """Return what `chat_template.jinja` or `tokenizer_config.json` say."""
        return chat_templates(self._files)

    def text_changes(self) -> Sequence[TextChange]:
        return self._inner.text_changes()


def chat_templates(files: ModelFiles) -> dict[str, str]:
    """Return what `chat_template.jinja` or `tokenizer_config.json` of a model say.

    Raises:
        TokenizerError: if the one is not text, or the other malformed.
    """
    path = files.find("chat_template.jinja")
    if path is not None:
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise TokenizerError(
                f"{path} is not text in UTF-8: {error}", hint="fix it, or fetch it again"
            ) from error
    templates: Any = files.json("tokenizer_config.json").get("chat_template")
    if isinstance(templates, list):
        try:
            return {str(one["name"]): str(one["template"]) for one in templates}
        except (LookupError, TypeError) as error:
            raise _bad_config(files, "chat_template") from error
    return {"default": templates} if isinstance(templates, str) else {}


def _bad_config(files: ModelFiles, field: str) -> TokenizerError:
    return TokenizerError(
        f"the {field} in {files.find('tokenizer_config.json')} is malformed",
        hint="fix it, or fetch it again",
    )
