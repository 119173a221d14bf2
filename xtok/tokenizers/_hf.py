"""Hugging Face tokenizers: a folder or a hub repo with a `tokenizer.json`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok.errors import TokenizerError
from xtok.tokenizers._files import ModelFiles, eos_ids, model_vocab_size
from xtok.tokenizers._plain import SPECIAL_NAMES, load_plain
from xtok.tokenizers._tokenizer import TextChange
from xtok.tokenizers.hub import hub_answers, quiet_hub
from xtok.vocab.table import MAX_WIDTH, Entries, Entry, TokenType

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

Spec = dict[str, Any]
"""One component of a tokenizer.json: its `type`, and what it is made of."""


class HuggingFaceBackend:
    """What `AutoTokenizer` loads, byte for byte: the fast backend or an error."""

    name = "hf"

    def __init__(
        self, files: ModelFiles, *, pattern: str | None = None, trust_remote_code: bool = False
    ) -> None:
        _refuse_pattern(pattern, str(files))
        self._files, self._trusted = files, trust_remote_code
        plain = None if trust_remote_code else load_plain(files)
        if plain is None:
            self._use_loaded(self._hf)
        else:
            self._use(plain.rust, plain.added)
            self._role_ids = plain.roles

    @classmethod
    def from_loaded(cls, tokenizer: Any, name: str) -> HuggingFaceBackend:
        """Take a loaded tokenizer, and the model config of the folder that it came from."""
        backend = cls.__new__(cls)
        backend._files = ModelFiles(Path(name))
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                f"{name} is {type(tokenizer).__name__}, not a fast Hugging Face tokenizer",
                hint="load it with xtok.load_tokenizer, or with AutoTokenizer and use_fast=True",
            )
        backend._hf = tokenizer
        backend._use_loaded(tokenizer)
        return backend

    @classmethod
    def from_file(cls, path: Path, *, pattern: str | None = None) -> HuggingFaceBackend:
        """Take a `tokenizer.json` by another name, with nothing beside it."""
        from transformers import PreTrainedTokenizerFast

        _refuse_pattern(pattern, str(path))
        load: Callable[..., Any] = PreTrainedTokenizerFast
        try:
            tokenizer = load(tokenizer_file=str(path))
        except Exception as error:
            raise TokenizerError(
                f"{path} is JSON, but neither a tokenizer.json nor a tekken file: {error}",
                hint="give a tokenizer's file, or the folder of a Hugging Face tokenizer",
            ) from error
        return cls.from_loaded(tokenizer, str(path))

    @functools.cached_property
    def _hf(self) -> Any:
        """What `AutoTokenizer` loads; a plain folder's is loaded for prompts and templates only."""
        return self._load(self._trusted)

    def _use_loaded(self, tokenizer: Any) -> None:
        rust = tokenizer.backend_tokenizer
        document = _document(rust, str(self._files))
        own = _read_back(document, rust, str(self._files))  # what follows changes it
        self._use(own, tokenizer.added_tokens_decoder)
        ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in SPECIAL_NAMES}
        self._role_ids = {role: i for role, i in ids.items() if i is not None}

    def _use(self, rust: RustTokenizer, added: Mapping[int, AddedToken]) -> None:
        _check_growth(rust, str(self._files))
        self._rust = _without_context(rust, str(self._files))
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._added = {i: token.content for i, token in added.items()}
        components = list(_components(_spec(self._rust.decoder)))
        self._decode = _decoder(components, str(self._files))
        self._byte_level = any(c["type"] == "ByteLevel" for c in components)
        self._byte_fallback = any(c["type"] == "ByteFallback" for c in components)
        self._text_changes = tuple(_text_changes(self._rust, components))

    def _load(self, trust_remote_code: bool) -> Any:  # its module costs seconds to import
        from transformers import AutoTokenizer

        files = self._files
        is_repo = isinstance(files.model, str)
        try:
            with quiet_hub():
                tokenizer = AutoTokenizer.from_pretrained(
                    files.model,
                    revision=files.revision,
                    local_files_only=files.offline or (is_repo and not hub_answers()),
                    use_fast=True,
                    trust_remote_code=trust_remote_code,
                )
        except Exception as error:
            code = "trust_remote_code" in str(error)
            raise TokenizerError(
                f"{files} needs code of its own"
                if code
                else f"{files} is not a tokenizer that AutoTokenizer loads: {error}",
                hint="read that code, then allow it with {option}"
                if code
                else "check its tokenizer.json and tokenizer_config.json, or fetch them again",
                parameter="trust_remote_code" if code else "",
            ) from error
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"{files} loads as {type(tokenizer).__name__}, a slow tokenizer",
                hint="save a fast one with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        return tokenizer

    def entries(self) -> Iterable[Entry]:
        """Added tokens are CONTROL where marked special, else USER_DEFINED; the rest NORMAL."""
        vocab = self._rust.get_vocab(with_added_tokens=True)
        displays = list(vocab)
        ids = list(vocab.values())
        types = [int(TokenType.NORMAL)] * len(ids)
        contents = self._contents(displays)
        place_of = dict(zip(ids, range(len(ids)), strict=True))
        if self._byte_fallback:
            for display, i in vocab.items():
                if _is_byte_token(display):
                    place = place_of[i]
                    types[place] = TokenType.BYTE
                    contents[place] = bytes([int(display[3:5], 16)])
        for i, name in self._added.items():
            place = place_of[i]
            types[place] = TokenType.CONTROL if i in self._special else TokenType.USER_DEFINED
            # A byte-level vocabulary matches added tokens as the text that they are.
            text = i in self._special or self._byte_level
            contents[place] = name.encode() if text else self._decode(name)
        unknown = self._unknown_id()
        if unknown is not None:
            types[place_of[unknown]] = TokenType.UNKNOWN
            contents[place_of[unknown]] = str(self._rust.id_to_token(unknown)).encode()
        return Entries(ids, types, contents, lambda: [name.encode() for name in displays])

    def _contents(self, displays: list[str]) -> list[bytes]:
        """Return the bytes behind display strings; a byte-level vocabulary's all at once."""
        if not self._byte_level:
            return list(map(self._decode, displays))
        codes = np.frombuffer("".join(displays).encode("utf-32-le", "surrogatepass"), "<u4")
        found = _BYTE_OF_CODE[np.minimum(codes, len(_BYTE_OF_CODE) - 1)]
        ends = np.cumsum(np.fromiter(map(len, displays), np.int64, len(displays)))
        data = found.astype(np.uint8).tobytes()
        contents = [data[a:b] for a, b in pairwise([0, *ends.tolist()])]
        odd = np.searchsorted(ends, np.flatnonzero(found < 0), side="right")
        for place in set(odd.tolist()):  # added tokens, as a rule
            contents[place] = self._decode(displays[place])
        return contents

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
        roles = {role: [i] for role, i in self._role_ids.items()}
        more = eos_ids(self._files)
        if more:
            roles["eos"] = [*roles.get("eos", []), *more]
        return roles

    def model_vocab_size(self) -> int | None:
        """Return what config.json tells."""
        return model_vocab_size(self._files)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode on all cores, special tokens as plain text; no ids for what the model refuses."""
        try:
            batch = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            # The library's own error: a text that the model has no token for, nor an unknown one.
            if type(error) is not Exception:
                raise
            return [self._encode_text(text) for text in texts]
        return [encoding.ids for encoding in batch]

    def _encode_text(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        except Exception as error:
            if type(error) is not Exception:
                raise
            return []
        return ids

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """Merge bytes with a byte-level model, past its normalizer; others merge characters."""
        return merge_bytes(self._rust, data) if self._byte_level else None

    def encode_prompt(self, text: str) -> list[int] | None:
        """Encode as `apply_chat_template` does, the prefix that the tokenizer adds included."""
        encoded = self._hf(text, add_special_tokens=False, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def chat_templates(self) -> Mapping[str, str]:
        """Return what `chat_template.jinja` or `tokenizer_config.json` say."""
        found = self._hf.chat_template
        if isinstance(found, str):
            return {"default": found} if found else {}
        return dict(found) if isinstance(found, Mapping) else {}

    def text_changes(self) -> Sequence[TextChange]:
        """Return what the normalizer, and a decoder that joins words with spaces, change."""
        return self._text_changes


def _refuse_pattern(pattern: str | None, model: str) -> None:
    if pattern is not None:
        raise TokenizerError(
            f"{model} is a Hugging Face tokenizer, which brings its own pattern",
            hint="leave out {option}",
            parameter="pattern",
        )


def merge_bytes(rust: RustTokenizer, data: bytes) -> list[int]:
    """Merge any bytes by a byte-level model, past its normalizer."""
    try:
        text = data.decode()
        pieces = [piece for piece, _ in rust.pre_tokenizer.pre_tokenize_str(text)]
    except (AttributeError, UnicodeDecodeError):  # no pre-tokenizer, or no text
        pieces = [data.decode("latin-1").translate(_TO_DISPLAY)]
    return [token.id for piece in pieces for token in rust.model.tokenize(piece)]


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


def _document(rust: RustTokenizer, model: str) -> str:
    """Return a tokenizer's JSON.

    Raises:
        TokenizerError: if an id is so large that writing the JSON, id by id, takes minutes.
    """
    largest = max(rust.get_vocab().values(), default=0)
    if largest >= MAX_WIDTH:
        raise TokenizerError(
            f"{model} has the token id {largest}, and ids end at {MAX_WIDTH - 1}",
            hint="its tokenizer.json is damaged: fetch it again",
        )
    return rust.to_str()


def _read_back(document: str, like: RustTokenizer, model: str) -> RustTokenizer:
    """Make a tokenizer of the JSON of one that has the same tokens.

    Raises:
        TokenizerError: if it loses some of them, as one of two that have the same id.
    """
    from tokenizers import Tokenizer as RustTokenizer

    try:
        rust = RustTokenizer.from_str(document)
        if rust.get_vocab_size() != like.get_vocab_size():
            raise ValueError("it has fewer")
    except Exception as error:
        raise TokenizerError(
            f"{model} loses tokens when it is copied, as where two have the same id: {error}",
            hint="its tokenizer.json is damaged: fetch it again",
        ) from error
    return rust


_MAX_GROWTH = 100  # times; normalizers in use stay below ten, as with `...` for one character


def _check_growth(rust: RustTokenizer, model: str) -> None:
    """Refuse replacements that make a text so long that it takes minutes to encode.

    Raises:
        TokenizerError: if those of the normalizer together do, or of the decoder.
    """
    for component in (rust.normalizer, rust.decoder):
        growth = 1.0
        for spec in _components(_spec(component)):
            if spec["type"] == "Replace":
                old, new = spec["pattern"].get("String"), len(spec["content"])
                # A regular expression may match nothing, and so between any two characters.
                growth *= max(1, new / len(old)) if old else 1 + new
        if growth > _MAX_GROWTH:
            raise TokenizerError(
                f"the replacements of {model} may make a text {growth:.0f} times as long",
                hint="its tokenizer.json is damaged: fetch it again",
            )


def _without_context(rust: RustTokenizer, model: str) -> RustTokenizer:
    """Have it encode as in the middle of a text: no prefix, no padding, no dropout."""
    components = [*_components(_spec(rust.normalizer)), *_components(_spec(rust.pre_tokenizer))]
    if any(map(_adds_prefix, components)):
        document = json.loads(_document(rust, model))
        for key in ("normalizer", "pre_tokenizer"):
            document[key] = _drop_prefix(document[key])
        rust = _read_back(json.dumps(document), rust, model)
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
            return byte_level_bytes
        if kind == "WordPiece":
            return functools.partial(_word_piece_bytes, prefix=component["prefix"])
        if kind == "Metaspace":
            replacements.append((component["replacement"], " "))
        elif kind == "Replace" and "String" in component["pattern"]:
            replacements.append((component["pattern"]["String"], component["content"]))
        elif kind not in ("ByteFallback", "Fuse", "Strip"):  # Strip is for the text's two ends
            raise TokenizerError(
                f"{model} has a {kind} decoder: its text is not the concatenation of its tokens",
                hint="use a byte-level, SentencePiece-style or WordPiece tokenizer",
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


def _word_piece_bytes(display: str, prefix: str) -> bytes:
    """Return a word's beginning with the space that the decoder puts before it."""
    if display.startswith(prefix) and len(display) > len(prefix):
        return display[len(prefix) :].encode()
    return display.encode() if display in _NO_SPACE_BEFORE else f" {display}".encode()


# What the decoder's clean-up writes without a space: tokenizers, decoders/wordpiece.rs, `cleanup`.
_NO_SPACE_BEFORE = frozenset(".?!,")

_CHANGES = {
    "NFC": "characters and marks are composed (e + U+0301 → é)",
    "NFD": "characters are taken apart (é → e + U+0301)",
    "NFKC": "compatibility characters become plain ones (ﬁ → fi, ① → 1, Ａ → A), and are composed",
    "NFKD": "compatibility characters become plain ones (ﬁ → fi, ① → 1, Ａ → A), and taken apart",
    "Lowercase": "upper case becomes lower case",
    "StripAccents": "accents are dropped (é → e)",
    "Strip": "whitespace at the ends is dropped",
    "Nmt": "control characters are dropped, odd spaces become plain ones",
    "Precompiled": "characters that its table maps, compatibility characters as a rule "
    "(ﬁ → fi, ① → 1)",
}


def _text_changes(rust: RustTokenizer, decoder: list[Spec]) -> Iterator[TextChange]:
    """Name the components that change a text; what the decoder turns back is no change."""
    undone = {
        (c["content"], c["pattern"].get("String")) for c in decoder if c["type"] == "Replace"
    } | {(" ", c["replacement"]) for c in decoder if c["type"] == "Metaspace"}
    for component in _components(_spec(rust.normalizer)):
        kind = component["type"]
        if kind in _CHANGES:
            yield TextChange(normalizer=kind, changes=_CHANGES[kind])
        elif kind == "BertNormalizer":
            yield from _bert_text_changes(component)
        elif kind == "Replace":
            old = component["pattern"].get("String")
            new = component["content"]
            if (old, new) not in undone:
                what = repr(old or component["pattern"].get("Regex"))
                yield TextChange(normalizer="Replace", changes=f"{what} becomes {new!r}")
        elif kind not in ("Prepend", "ByteLevel"):
            yield TextChange(normalizer=kind, changes="not known here")
    if any(c["type"] == "WordPiece" for c in decoder):
        yield TextChange(
            normalizer="WordPiece",
            changes="whitespace is not kept: one space before each word, none before . , ? !",
        )


def _bert_text_changes(spec: Spec) -> Iterator[TextChange]:
    lowercase = bool(spec.get("lowercase"))
    accents = spec.get("strip_accents")
    parts = {
        "control characters are dropped, odd spaces become plain ones": spec.get("clean_text"),
        "upper case becomes lower case": lowercase,
        "accents are dropped (é → e)": lowercase if accents is None else accents,
    }
    changes = "; ".join(what for what, does in parts.items() if does)
    if changes:
        yield TextChange(normalizer="BertNormalizer", changes=changes)


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


_BYTE_OF_CODE = np.full(1 + max(_FROM_DISPLAY) + 1, -1, np.int16)
_BYTE_OF_CODE[list(_TO_DISPLAY.values())] = list(_TO_DISPLAY)


def byte_level_bytes(display: str) -> bytes:
    """Return the bytes behind a display string; one that is none stands for itself."""
    try:
        return display.translate(_FROM_DISPLAY).encode("latin-1")
    except UnicodeEncodeError:
        return display.encode()
