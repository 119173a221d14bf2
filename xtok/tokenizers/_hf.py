"""Hugging Face tokenizers: a folder or a hub repo with a `tokenizer.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtok.errors import TokenizerError
from xtok.hub import find_file
from xtok.tokens import Entry, TokenType

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

Spec = dict[str, Any]
"""One component of a tokenizer.json: its `type`, and what it is made of."""


class HuggingFaceBackend:
    """What `AutoTokenizer` loads, byte for byte: the fast backend or an error."""

    name = "hf"

    def __init__(
        self, model: str | Path, *, revision: str | None = None, pattern: str | None = None
    ) -> None:
        if pattern is not None:
            raise TokenizerError(
                f"{model} is a Hugging Face tokenizer, which brings its own pattern",
                hint="leave out --student-pattern or --teacher-pattern",
            )
        self._model, self._revision = model, revision
        if self._find("tokenizer.json") is None:
            raise TokenizerError(
                f"{model} has no tokenizer.json, so no fast tokenizer",
                hint="make one with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), or "
                "give the .model or .tiktoken file itself",
            )
        self._use(self._load())

    @classmethod
    def from_loaded(cls, tokenizer: Any, name: str) -> HuggingFaceBackend:
        """Take a loaded tokenizer, and the model config of the folder that it came from."""
        backend = cls.__new__(cls)
        backend._model, backend._revision = Path(name), None
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                f"{name} is {type(tokenizer).__name__}, not a fast Hugging Face tokenizer",
                hint="load it with AutoTokenizer.from_pretrained(..., use_fast=True)",
            )
        backend._use(tokenizer)
        return backend

    def _use(self, tokenizer: Any) -> None:
        self._hf = tokenizer
        self._rust = _without_context(self._hf.backend_tokenizer)
        self._special = {
            i: token.content for i, token in self._hf.added_tokens_decoder.items() if token.special
        }
        self._added = {i: token.content for i, token in self._hf.added_tokens_decoder.items()}
        components = list(_components(_spec(self._rust.decoder)))
        self._decode = _decoder(components, str(self._model))
        self._byte_level = any(c["type"] == "ByteLevel" for c in components)
        self._byte_fallback = any(c["type"] == "ByteFallback" for c in components)

    def _load(self) -> Any:  # a PreTrainedTokenizerFast, whose module costs seconds to import
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._model, revision=self._revision, use_fast=True, trust_remote_code=False
            )
        except Exception as error:
            raise TokenizerError(
                f"{self._model} is not a tokenizer that AutoTokenizer loads: {error}",
                hint="check its tokenizer.json and tokenizer_config.json, or fetch them again",
            ) from error
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"{self._model} loads as {type(tokenizer).__name__}, a slow tokenizer",
                hint="save a fast one with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        return tokenizer

    def entries(self) -> Iterable[Entry]:
        """Added tokens are CONTROL where marked special, else USER_DEFINED; the rest NORMAL."""
        unknown = self._unknown_id()
        for display, i in self._rust.get_vocab(with_added_tokens=True).items():
            if i == unknown:
                yield Entry(i, TokenType.UNKNOWN, display.encode())
            elif i in self._special:
                yield Entry(i, TokenType.CONTROL, self._special[i].encode())
            elif i in self._added:
                # A byte-level vocabulary matches added tokens as the text that they are.
                text = display.encode() if self._byte_level else self._decode(display)
                yield Entry(i, TokenType.USER_DEFINED, text)
            elif self._byte_fallback and _is_byte_token(display):
                yield Entry(i, TokenType.BYTE, bytes([int(display[3:5], 16)]))
            else:
                yield Entry(i, TokenType.NORMAL, self._decode(display))

    def _unknown_id(self) -> int | None:
        """Return the id that the model emits for what it does not know, if it has one."""
        name = getattr(self._rust.model, "unk_token", None)
        if name is not None:
            return self._rust.token_to_id(name)
        if type(self._rust.model).__name__ != "Unigram":
            return None
        found = json.loads(self._rust.to_str())["model"].get("unk_id")
        return None if found is None else int(found)

    def declared_roles(self) -> Mapping[str, Iterable[int]]:
        """Return the special-token map, and the generation config's eos ids."""
        roles = {
            role: [i]
            for role in ("bos", "eos", "pad", "unk", "mask", "sep", "cls")
            if (i := getattr(self._hf, f"{role}_token_id", None)) is not None
        }
        path = self._find("generation_config.json")
        if path is not None:
            try:
                eos = json.loads(path.read_bytes()).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise TokenizerError(
                    f"{path} is not a generation config", hint="mend it, or remove it"
                ) from error
            ids = [eos] if isinstance(eos, int) else eos or []
            roles["eos"] = [*roles.get("eos", []), *ids]
        return roles

    def model_vocab_size(self) -> int | None:
        """Return `get_text_config().vocab_size`, or None where there is no config.json."""
        if self._find("config.json") is None:
            return None
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(
                self._model, revision=self._revision, trust_remote_code=False
            )
            return int(config.get_text_config().vocab_size)
        except Exception as error:
            raise TokenizerError(
                f"the config.json of {self._model} tells no vocabulary size: {error}",
                hint="give the width of the model's logits with --student-vocab-size or "
                "--teacher-vocab-size",
            ) from error

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode on all cores, special tokens as plain text."""
        batch = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """Merge bytes with a byte-level model, past its normalizer; others merge characters."""
        if not self._byte_level:
            return None
        model, pre_tokenizer = self._rust.model, self._rust.pre_tokenizer
        try:
            text = data.decode()
            pieces = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        except (AttributeError, UnicodeDecodeError):  # no pre-tokenizer, or no text
            pieces = [data.decode("latin-1").translate(_TO_DISPLAY)]
        return [token.id for piece in pieces for token in model.tokenize(piece)]

    def encode_prompt(self, text: str) -> list[int] | None:
        """Encode as `apply_chat_template` does, the prefix that the tokenizer adds included."""
        encoded = self._hf(text, add_special_tokens=False, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def chat_templates(self) -> Mapping[str, str]:
        """Return what `chat_template.jinja` or `tokenizer_config.json` say."""
        found = self._hf.chat_template
        if not found:
            return {}
        return {"default": found} if isinstance(found, str) else dict(found)

    def _find(self, name: str) -> Path | None:
        """Return a file of the folder or repo, fetched if need be; None where it has none."""
        return find_file(
            self._model,
            name,
            revision=self._revision,
            required=name == "tokenizer.json",
            error=TokenizerError,
        )


def _spec(component: Any) -> Spec:
    """Return a component's own JSON; None is an empty sequence."""
    return {"type": "Sequence"} if component is None else dict(json.loads(component.__getstate__()))


def _components(spec: Spec) -> Iterator[Spec]:
    """Walk a component and what its sequences hold."""
    parts = [spec.get(key) for key in ("normalizers", "pretokenizers", "decoders") if key in spec]
    if spec["type"] == "Sequence":
        for part in parts:
            for inner in part or []:
                yield from _components(inner)
    else:
        yield spec


def _without_context(rust: RustTokenizer) -> RustTokenizer:
    """Return a copy that encodes as in the middle of a text: no prefix, no padding, no dropout."""
    from tokenizers import Tokenizer as RustTokenizer

    components = [*_components(_spec(rust.normalizer)), *_components(_spec(rust.pre_tokenizer))]
    document = json.loads(rust.to_str()) if any(map(_adds_prefix, components)) else None
    if document is not None:
        for key in ("normalizer", "pre_tokenizer"):
            document[key] = _drop_prefix(document[key])
    rust = RustTokenizer.from_str(rust.to_str() if document is None else json.dumps(document))
    rust.encode_special_tokens = True
    rust.no_truncation()
    rust.no_padding()
    if getattr(rust.model, "dropout", None):
        rust.model.dropout = None
    return rust


def _adds_prefix(component: Spec) -> bool:
    return (
        component["type"] == "Prepend"
        or component.get("prepend_scheme", "never") != "never"
        or bool(component.get("add_prefix_space"))
    )


def _drop_prefix(spec: Spec | None) -> Spec | None:
    if spec is None or spec["type"] == "Prepend":
        return None
    spec = dict(spec)
    for key in ("normalizers", "pretokenizers"):
        if key in spec:
            spec[key] = [kept for inner in spec[key] if (kept := _drop_prefix(inner)) is not None]
    if "prepend_scheme" in spec:
        spec["prepend_scheme"] = "never"
    if "add_prefix_space" in spec:
        spec["add_prefix_space"] = False
    return spec


def _decoder(components: list[Spec], model: str) -> Callable[[str], bytes]:
    """Return display string → bytes in the middle of a text, as the decoder's components say.

    Raises:
        TokenizerError: if the text is not the concatenation of its tokens' bytes.
    """
    replacements: list[tuple[str, str]] = []
    for component in components:
        kind = component["type"]
        if kind == "ByteLevel":
            return _byte_level_bytes
        if kind == "Metaspace":
            replacements.append((component["replacement"], " "))
        elif kind == "Replace" and "String" in component["pattern"]:
            replacements.append((component["pattern"]["String"], component["content"]))
        elif kind not in ("ByteFallback", "Fuse", "Strip"):  # Strip is for the text's two ends
            raise TokenizerError(
                f"{model} has a {kind} decoder: its text is not the concatenation of its tokens",
                hint="use a byte-level or SentencePiece-style tokenizer",
            )
    if not components:
        raise TokenizerError(
            f"{model} has no decoder: what bytes its tokens stand for is not said",
            hint="use a byte-level or SentencePiece-style tokenizer",
        )

    def decode(display: str) -> bytes:
        for old, new in replacements:
            display = display.replace(old, new)
        return display.encode()

    return decode


def _is_byte_token(display: str) -> bool:
    return re.fullmatch("<0x[0-9A-F]{2}>", display) is not None


def _byte_level_alphabet() -> dict[int, int]:
    """Return byte to display character: GPT-2's bijection, `bytes_to_unicode` in its encoder."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {b: 256 + i for i, b in enumerate(hidden)}


_TO_DISPLAY = _byte_level_alphabet()
# Characters below 256 that display nothing map out of Latin-1, so that encoding them fails.
_FROM_DISPLAY = dict.fromkeys(range(256), 65535) | {c: b for b, c in _TO_DISPLAY.items()}


def _byte_level_bytes(display: str) -> bytes:
    """Return the bytes behind a display string; one that is none stands for itself."""
    try:
        return display.translate(_FROM_DISPLAY).encode("latin-1")
    except UnicodeEncodeError:
        return display.encode()
