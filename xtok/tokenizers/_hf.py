"""Read fast Hugging Face tokenizers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import MODEL, SPECIAL_NAMES, Backend, Roles, TextChange, damaged
from xtok.tokenizers._sentencepiece import CHARACTER_TABLE
from xtok.tokenizers.display import listed
from xtok.tokenizers.table import TokenEntry, TokenType, byte_offsets

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

Spec: TypeAlias = dict[str, Any]
"""A component of a tokenizer.json, such as a normalizer: its `type` and its options."""


_TEXTS_AT_ONCE = 4096


class HuggingFaceBackend(Backend):
    """A fast Hugging Face tokenizer (`PreTrainedTokenizerFast`).

    `model` is the name of the tokenizer in errors.
    """

    name, recognizes_names = "hf", True
    load_library: Callable[[], Any] | None = None

    def __init__(self, tokenizer: Any, model: str) -> None:
        if dropout := getattr(tokenizer.backend_tokenizer.model, "dropout", None):
            self.notes = (
                f"{model} has a dropout of {dropout:g}, so its library returns random ids; xtok "
                "disables the dropout",
            )
            tokenizer = copy.deepcopy(tokenizer)  # leave the caller's tokenizer unchanged
            tokenizer.backend_tokenizer.model.dropout = None
        self._hf, self._model, rust = tokenizer, model, tokenizer.backend_tokenizer
        _check_growth(rust, model)
        self._rust = _within_text(rust)
        self._added = rust.get_added_tokens_decoder()
        decoder = list(components(rust.decoder))
        self._decode = _decoder(decoder, model)
        _check_marks(rust.model, decoder, model)
        kinds = {component["type"] for component in decoder}
        self._byte_level = "ByteLevel" in kinds
        falls_back = not self._byte_level and _falls_back(rust.model)
        self._byte_fallback = "ByteFallback" in kinds or falls_back
        self.drops_text = self._drops_text()
        self.keeps_text = not (self.drops_text or _stripping(self._rust))
        self.text_changes = tuple(_text_changes(self._rust, decoder))
        self.notes = (*self.notes, *_notes_on_added(self._rust, model))

    def entries(self) -> Iterable[TokenEntry]:
        ids = self._hf.backend_tokenizer.get_vocab(with_added_tokens=True)
        if len(set(ids.values())) < len(ids):
            cause = "tokenizer.json is damaged"
            raise damaged(f"two tokens of {self._model} have the same id", cause)
        unknown = self._unknown_id()
        for display, i in ids.items():
            added = self._added.get(i)
            if i == unknown:
                kind, content = TokenType.UNKNOWN, display.encode()
            elif added is not None and added.special:
                kind, content = TokenType.CONTROL, added.content.encode()
            elif self._byte_fallback and display in _BYTE_TOKENS:
                kind, content = TokenType.BYTE, _BYTE_TOKENS[display]
            elif added is not None and self._byte_level:  # the display string is the text
                kind, content = TokenType.USER_DEFINED, added.content.encode()
            else:
                kind = TokenType.NORMAL if added is None else TokenType.USER_DEFINED
                content = self._decode(display)
            yield TokenEntry(i, kind, content, display.encode())

    def definition(self) -> Iterable[bytes]:
        # `__getstate__` writes the vocabulary in a fixed order, regardless of the file's order. For
        # DeepSeek's 128,000 tokens, this takes 70 ms of a loading time of 600 ms.
        rust = self._hf.backend_tokenizer
        parts = [_spec(part) for part in (rust.normalizer, rust.pre_tokenizer, rust.decoder)]
        added = sorted((i, repr(token)) for i, token in self._added.items())
        around = rust.encode("").ids  # ids from the post-processor
        options = [*parts, added, around, getattr(self._hf, "split_special_tokens", False)]
        head, name, vocab = rust.model.__getstate__().partition(b'"vocab":')
        head = head.replace(b'""', b"null")  # both mean that there is no prefix or suffix
        return [json.dumps(options, sort_keys=True).encode(), head + name, vocab]

    def _unknown_id(self) -> int | None:
        """Return the id that the model uses for unknown text, or None."""
        name, kind = getattr(self._rust.model, "unk_token", None), type(self._rust.model).__name__
        unknown: int | None = None if name is None else self._rust.token_to_id(name)
        if kind == "Unigram":
            unknown = json.loads(self._rust.to_str())["model"].get("unk_id")
        elif name is None and kind == "BPE" and self._byte_fallback:
            # LlamaTokenizer in Transformers 5 declares unk_token, but its model lacks this token.
            unknown = getattr(self._hf, "unk_token_id", None)
        return unknown

    def declared_roles(self) -> Roles:
        names = {role: f"{role}_token_id" for role in SPECIAL_NAMES}
        ids = {r: getattr(self._hf, name) for r, name in names.items() if hasattr(self._hf, name)}
        roles = {role: {} if i is None else {i: "the tokenizer"} for role, i in ids.items()}
        if not roles.get("unk") and (unknown := self._unknown_id()) is not None:
            roles["unk"] = {unknown: MODEL}  # the library can return this id, even if undeclared
        return roles

    def library(self) -> Any:
        if self.load_library is not None:
            return self.load_library()
        return self._hf if getattr(self._hf, "is_fast", False) else None

    def special_names(self) -> Mapping[str, str]:
        return dict(self._hf.special_tokens_map)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        # Encode in batches, because the library's results need much more memory than the ids.
        starts = range(0, len(texts), _TEXTS_AT_ONCE)
        return [ids for i in starts for ids in self._encode(texts[i : i + _TEXTS_AT_ONCE])]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            batch = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            # The library raises a plain Exception if no token matches a part of the text.
            if type(error) is not Exception:
                raise
            return [ids for text in texts for ids in self._encode([text])] if texts[1:] else [[]]
        return [encoding.ids for encoding in batch]

    def encode_bytes(self, data: bytes) -> list[int] | None:
        if not self._byte_level:
            return None
        try:
            text = data.decode()
            pieces = [piece for piece, _ in self._rust.pre_tokenizer.pre_tokenize_str(text)]
        except (AttributeError, UnicodeDecodeError):  # no pre-tokenizer, or invalid UTF-8
            pieces = [data.decode("latin-1").translate(_TO_DISPLAY)]
        return [token.id for piece in pieces for token in self._rust.model.tokenize(piece)]

    def encode_starts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as `apply_chat_template` does, with the tokenizer's prefix."""
        return [list(ids) for ids in self._call(list(texts))["input_ids"]] if texts else []

    def _drops_text(self) -> bool:
        if type(self._rust.model).__name__ != "BPE" or self._rust.model.unk_token is not None:
            return False
        if not (self._byte_level or self._byte_fallback):
            return True
        every = map(chr, _TO_DISPLAY.values()) if self._byte_level else _BYTE_TOKENS
        return any(self._rust.token_to_id(name) is None for name in every)

    def ids_before(self) -> Sequence[int]:
        ids: list[int] = self._hf.backend_tokenizer.encode("").ids
        return ids[:1]

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        spans = self._call([text], return_offsets_mapping=True)["offset_mapping"][0]
        byte_of = byte_offsets(text).tolist()
        return [(byte_of[start], byte_of[end]) for start, end in spans]

    def _call(self, texts: list[str], **options: bool) -> Any:
        try:
            return self._hf(texts, add_special_tokens=False, verbose=False, **options)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise TokenizerError(
                f"the library of {self._model} cannot encode the text {texts[0][:40]!r}: {error}",
                hint="use a tokenizer with byte tokens or a byte-level vocabulary",
            ) from error

    def byte_level_splits(self) -> str | None:
        first = next(components(self._rust.pre_tokenizer), None)
        if not self._byte_level or first is None or self._rust.get_vocab_size() <= 100_000:
            return None
        return str(first.get("pattern", {}).get("Regex"))

    def chat_templates(self) -> Mapping[str, str]:
        templates = self._hf.chat_template
        if isinstance(templates, str):
            return {"default": templates} if templates else {}
        return dict(templates) if isinstance(templates, Mapping) else {}


def _spec(component: Any) -> Spec:
    """Return the JSON of a component. For None, return an empty sequence."""
    return {"type": "Sequence"} if component is None else dict(json.loads(component.__getstate__()))


_PARTS = ("normalizers", "pretokenizers", "decoders")


def components(component: Any) -> Iterator[Spec]:
    """Yield the JSON of a component and its nested components."""
    stack = [_spec(component)]
    while stack:
        spec = stack.pop()
        if spec["type"] == "Sequence":
            stack += reversed([inner for key in _PARTS for inner in spec.get(key) or []])
        else:
            yield spec


def _within_text(rust: RustTokenizer) -> RustTokenizer:
    """Return a copy that encodes parts of a longer text, without a prefix or padding."""
    from tokenizers import Tokenizer as RustTokenizer

    within = RustTokenizer(rust.model)
    for name in ("normalizer", "pre_tokenizer"):
        part = getattr(rust, name)
        spec = _without_prefix(_spec(part))
        if part is not None and spec is not None:
            part.__setstate__(json.dumps(spec).encode())
            setattr(within, name, part)
    within.add_tokens([token for _, token in sorted(rust.get_added_tokens_decoder().items())])
    within.encode_special_tokens = True
    return within


def _notes_on_added(rust: RustTokenizer, model: str) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for token in rust.get_added_tokens_decoder().values():
        if token.normalized and rust.normalizer is not None:
            form = rust.normalizer.normalize_str(token.content)
            alike.setdefault(form, []).append(token.content)
    for names in alike.values():
        if len(names) > 1:
            yield (
                f"{model} has added tokens that are equal after normalization: "
                f"{listed(sorted(map(repr, names)))}; the library selects one of these at random "
                "each time it loads the tokenizer"
            )


def _stripping(rust: RustTokenizer) -> list[str]:
    """Return the added text tokens that absorb adjacent spaces."""
    added = rust.get_added_tokens_decoder().values()
    return sorted(t.content for t in added if not t.special and (t.lstrip or t.rstrip))


def _without_prefix(spec: Spec) -> Spec | None:
    """Return a component without its effect on the start of a text, or None if nothing remains."""
    if spec["type"] == "Prepend" or _is_at_start(spec):
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    spec = spec | {key: value for key, value in never.items() if key in spec}
    for key in _PARTS:
        if key in spec:
            inner = map(_without_prefix, spec[key])
            spec[key] = [component for component in inner if component is not None]
    return spec


def _is_at_start(spec: Spec) -> bool:
    """Whether a component replaces the start of a text, like SentencePiece's dummy prefix."""
    pattern: str = spec.get("pattern", {}).get("Regex", "") if spec["type"] == "Replace" else ""
    return pattern.startswith(r"\A")


_MAX_GROWTH = 100  # factor; published normalizers stay below 10 (`…` → `...` has 3)


def _check_growth(rust: RustTokenizer, model: str) -> None:
    for component in (rust.normalizer, rust.decoder):
        growth = 1.0
        for spec in components(component):
            if spec["type"] == "Replace":
                old, new = spec["pattern"].get("String"), len(spec["content"])
                # A regular expression can match "" between any two characters.
                growth *= max(1, new / len(old)) if old else 1 + new
        if growth > _MAX_GROWTH:
            problem = f"the replacements of {model} can make a text {growth:.0f} times longer"
            raise damaged(problem, "tokenizer.json is damaged")


def _decoder(components: list[Spec], model: str) -> Callable[[str], bytes]:
    """Return a function that converts the display string of a token to the token's bytes."""
    if not components:
        raise TokenizerError(
            f"{model} has no decoder, so the bytes of its tokens are unknown",
            hint="use a byte-level or SentencePiece-style tokenizer",
        )
    decode_token: Callable[[str], bytes] | None = None
    replacements: list[tuple[str, str]] = []
    is_joined = False  # whether the next components receive the whole text as one token
    for component in components:
        kind, (old, new) = component["type"], _find_replacement(component, is_joined)
        whole_token_rule = None if decode_token or replacements else _WHOLE_TOKEN_RULES.get(kind)
        if whole_token_rule and (kind, is_joined) != ("WordPiece", True):
            decode_token = whole_token_rule(component)
        elif old and decode_token is None:
            replacements.append((old, new))
        elif kind not in ("Fuse", "ByteFallback") and (kind, is_joined) != ("Strip", True):
            raise TokenizerError(
                f"{model} has {_describe(component, is_joined)}, so a text is not the "
                "concatenation of its tokens",
                hint="use a byte-level, SentencePiece-style or WordPiece tokenizer",
            )
        is_joined = is_joined or kind in ("ByteLevel", "Fuse")

    def decode(display: str) -> bytes:
        for old, new in replacements:
            display = display.replace(old, new)
        return display.encode()

    return decode_token or decode


def _find_replacement(component: Spec, is_joined: bool) -> tuple[str, str]:
    """Return the string that a component replaces in tokens, and the replacement.

    Both are empty if the component makes no such replacement.
    """
    old = new = ""
    if component["type"] == "Metaspace" and (
        not is_joined or component.get("prepend_scheme") == "never"
    ):
        old, new = component["replacement"], " "  # applies to all tokens except the first
    elif component["type"] == "Replace":
        old, new = component["pattern"].get("String", ""), component["content"]
    return ("", "") if is_joined and len(old) > 1 else (old, new)


def _describe(component: Spec, is_joined: bool) -> str:
    kind = component["type"]
    if kind == "Replace" and "Regex" in component["pattern"]:
        return f"a {kind} decoder with a regular expression"
    return f"a {kind} decoder that changes {'the whole text' if is_joined else 'each token'}"


def _word_piece(component: Spec) -> Callable[[str], bytes]:
    from tokenizers.decoders import WordPiece

    decoder = WordPiece(component["prefix"], component["cleanup"])
    return lambda display: decoder.decode([".", display])[1:].encode()


def _falls_back(model: Any) -> bool:
    """Whether a model encodes unknown text as byte tokens."""
    if type(model).__name__ == "Unigram":  # its options are not accessible from Python
        return bool(model.__getstate__().endswith(b'"byte_fallback":true}'))
    return bool(getattr(model, "byte_fallback", False))


def _check_marks(model: Any, decoder: list[Spec], name: str) -> None:
    suffix = getattr(model, "end_of_word_suffix", None)
    prefix = getattr(model, "continuing_subword_prefix", None) or ""
    prefixes = "".join(c["prefix"] for c in decoder if c["type"] == "WordPiece")
    problem = ""
    if suffix:
        problem = f"marks the end of words with {suffix!r} (end_of_word_suffix)"
    elif prefix != prefixes and type(model).__name__ != "WordLevel":  # all tokens are whole words
        problem = f"marks the inside of words with {prefix!r} (continuing_subword_prefix), but "
        problem += f"its decoder removes {prefixes!r}"
    if problem:
        raise TokenizerError(
            f"{name} {problem}, so the text of its tokens is unknown",
            hint="use a byte-level, SentencePiece-style or WordPiece tokenizer",
        )


_CHANGES = {
    "NFC": "composes characters and marks (e + U+0301 → é)",
    "NFD": "decomposes characters (é → e + U+0301)",
    "NFKC": "replaces compatibility characters (ﬁ → fi, ① → 1, Ａ → A) and composes characters",
    "NFKD": "replaces compatibility characters (ﬁ → fi, ① → 1, Ａ → A) and decomposes characters",
    "Lowercase": "replaces upper case by lower case",
    "StripAccents": "drops accents (é → e)",
    "Strip": "drops whitespace at the ends of a text",
    "Nmt": "drops control characters, and replaces special spaces by ordinary spaces",
    "Precompiled": CHARACTER_TABLE,
}


_AT_SPLITS = "drops the separators between words, such as whitespace"
_SPLITTING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")
_DROPPING = {
    **dict.fromkeys(_SPLITTING, _AT_SPLITS),
    "UnicodeScripts": "drops characters without a script, such as spaces, at the start of a text",
}


def _text_changes(rust: RustTokenizer, decoder: list[Spec]) -> Iterator[TextChange]:
    """Yield the changes of all components, except changes that decoding undoes."""
    yield from _normalizations(rust, decoder)
    if names := _stripping(rust):
        yield "added tokens", f"drops whitespace next to {listed(map(repr, names))}"
    if any(c["type"] == "WordPiece" for c in decoder):
        yield "WordPiece", "drops whitespace, then writes one space before each word except . , ? !"
        return
    for component in components(rust.pre_tokenizer):
        kind = component["type"]
        if component.get("behavior") == "Removed" or kind in _DROPPING:
            yield kind, _DROPPING.get(kind, _AT_SPLITS)


def _normalizations(rust: RustTokenizer, decoder: list[Spec]) -> Iterator[TextChange]:
    """Yield the changes of the normalizer, except changes that decoding undoes."""
    undone = {
        (c["content"], c["pattern"].get("String")) for c in decoder if c["type"] == "Replace"
    } | {(" ", c["replacement"]) for c in decoder if c["type"] == "Metaspace"}
    for component in components(rust.normalizer):
        kind = component["type"]
        if kind in _CHANGES:
            yield kind, _CHANGES[kind]
        elif kind == "Replace":
            old, new = component["pattern"].get("String"), component["content"]
            if (old, new) not in undone:
                yield kind, f"replaces {old or component['pattern'].get('Regex')!r} by {new!r}"
        elif kind not in ("Prepend", "ByteLevel"):
            options = [name for name, value in component.items() if value is True]
            yield kind, ", ".join(options) or "an unknown component"


_WHOLE_TOKEN_RULES = {"ByteLevel": lambda _: byte_level_bytes, "WordPiece": _word_piece}

_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _byte_level_alphabet() -> dict[int, int]:
    """Return the display character of each byte, like `bytes_to_unicode` in GPT-2's code."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {b: 256 + i for i, b in enumerate(hidden)}


_TO_DISPLAY = _byte_level_alphabet()
# Characters below 256 that represent no byte map to U+FFFF, which Latin-1 cannot encode.
_FROM_DISPLAY = dict.fromkeys(range(256), 65535) | {c: b for b, c in _TO_DISPLAY.items()}


def byte_level_bytes(display: str) -> bytes:
    """Return the bytes of a display string, or the UTF-8 bytes of any other string."""
    try:
        return display.translate(_FROM_DISPLAY).encode("latin-1")
    except UnicodeEncodeError:
        return display.encode()
