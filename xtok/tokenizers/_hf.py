"""Hugging Face tokenizers, once they are loaded."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import MODEL, SPECIAL_NAMES, Backend, Roles, TextChange, damaged
from xtok.tokenizers.display import listed
from xtok.tokenizers.table import TokenEntry, TokenType, byte_offsets

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

Spec = dict[str, Any]
"""One component of a tokenizer.json: its `type`, and what it is made of."""


_TEXTS_AT_ONCE = 4096


class HuggingFaceBackend(Backend):
    """A fast Hugging Face tokenizer.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        model: what errors call it.

    Raises:
        TokenizerError: if its tokens are not byte strings.
    """

    name = "hf"
    load_library: Callable[[], Any] | None = None

    def __init__(self, tokenizer: Any, model: str) -> None:
        if dropout := getattr(tokenizer.backend_tokenizer.model, "dropout", None):
            self.notes = (
                f"{model} has a dropout of {dropout:g}, with which its library draws ids at "
                "random; xtok reads it without",
            )
            tokenizer = copy.deepcopy(tokenizer)  # the one given is not changed
            tokenizer.backend_tokenizer.model.dropout = None
        self._hf, self._model, rust = tokenizer, model, tokenizer.backend_tokenizer
        _check_growth(rust, model)
        self._rust = _within_text(rust)
        self._added = dict(tokenizer.added_tokens_decoder)
        decoder = list(components(rust.decoder))
        self._decode = _decoder(decoder, model)
        _check_marks(rust.model, decoder, model)
        self._byte_level = any(c["type"] == "ByteLevel" for c in decoder)
        self._byte_fallback = any(c["type"] == "ByteFallback" for c in decoder) or (
            not self._byte_level and _falls_back(rust.model)
        )
        self._text_changes = tuple(_text_changes(self._rust, decoder))
        self.notes = (*self.notes, *_notes_on_added(self._rust, model))

    def entries(self) -> Iterable[TokenEntry]:
        """Added tokens are CONTROL where marked special, else USER_DEFINED; the rest NORMAL.

        Raises:
            TokenizerError: if two have the same id.
        """
        ids = self._hf.backend_tokenizer.get_vocab(with_added_tokens=True)
        if len(set(ids.values())) < len(ids):
            what = "its tokenizer.json is damaged"
            raise damaged(f"two tokens of {self._model} have the same id", what)
        unknown = self._unknown_id()
        for display, i in ids.items():
            added = self._added.get(i)
            kind, content = TokenType.NORMAL, None
            if i == unknown:
                kind, content = TokenType.UNKNOWN, display.encode()
            elif added is not None and added.special:
                kind, content = TokenType.CONTROL, added.content.encode()
            elif self._byte_fallback and display[:1] == "<" and _BYTE_TOKEN.fullmatch(display):
                kind, content = TokenType.BYTE, bytes([int(display[3:5], 16)])
            elif added is not None:
                kind = TokenType.USER_DEFINED
                # A byte-level vocabulary matches added tokens as the text that they are.
                content = added.content.encode() if self._byte_level else None
            yield TokenEntry(
                i, kind, self._decode(display) if content is None else content, display.encode()
            )

    def definition(self) -> Iterable[bytes]:
        """Return the components, the added tokens with their flags, and the model with its merges.

        The library writes the model in one order, whatever that of the file: 70 ms of the 600 that
        DeepSeek's 128,000 tokens take to load.
        """
        rust = self._hf.backend_tokenizer
        parts = [_spec(part) for part in (rust.normalizer, rust.pre_tokenizer, rust.decoder)]
        added = sorted((i, repr(token)) for i, token in self._added.items())
        around = rust.encode("").ids  # all that the post-processor adds
        options = [*parts, added, around, getattr(self._hf, "split_special_tokens", False)]
        head, name, vocab = rust.model.__getstate__().partition(b'"vocab":')
        head = head.replace(b'""', b"null")  # no prefix, no suffix, in either way of writing it
        return [json.dumps(options, sort_keys=True).encode(), head + name, vocab]

    def _unknown_id(self) -> int | None:
        """Return the id that the model emits for what it does not know, if it has one."""
        name = getattr(self._rust.model, "unk_token", None)
        if name is not None:
            return self._rust.token_to_id(name)
        if type(self._rust.model).__name__ == "BPE" and self._byte_fallback:
            # LlamaTokenizer of Transformers 5 declares the token, and builds a model without it.
            declared: int | None = getattr(self._hf, "unk_token_id", None)
            return declared
        if type(self._rust.model).__name__ != "Unigram":
            return None
        unknown: int | None = json.loads(self._rust.to_str())["model"].get("unk_id")
        return unknown

    def declared_roles(self) -> Roles:
        """Return the special-token map; a `tokenizer.json` alone has none."""
        names = {role: f"{role}_token_id" for role in SPECIAL_NAMES}
        ids = {r: getattr(self._hf, name) for r, name in names.items() if hasattr(self._hf, name)}
        roles = {role: {} if i is None else {i: "the tokenizer"} for role, i in ids.items()}
        if not roles.get("unk") and (unknown := self._unknown_id()) is not None:
            roles["unk"] = {unknown: MODEL}  # its library writes it, declared or not
        return roles

    def library(self) -> Any:
        """Return what Transformers makes of the folder, loaded now if `tokenizer.json` did."""
        if self.load_library is not None:
            return self.load_library()
        return self._hf if getattr(self._hf, "is_fast", False) else None

    def special_names(self) -> Mapping[str, str]:
        """Return the special-token map, with the names that are the model's own."""
        return dict(self._hf.special_tokens_map)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode on all cores, special tokens as plain text; no ids for what the model refuses."""
        # The library's results are many times as large as the ids.
        starts = range(0, len(texts), _TEXTS_AT_ONCE)
        return [ids for i in starts for ids in self._encoded(texts[i : i + _TEXTS_AT_ONCE])]

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            batch = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            # The library's own error: a text that the model has no token for, nor an unknown one.
            if type(error) is not Exception:
                raise
            if len(texts) == 1:
                return [[]]
            return [ids for text in texts for ids in self._encoded([text])]
        return [encoding.ids for encoding in batch]

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """Merge bytes with a byte-level model, past its normalizer; others merge characters."""
        if not self._byte_level:
            return None
        try:
            text = data.decode()
            pieces = [piece for piece, _ in self._rust.pre_tokenizer.pre_tokenize_str(text)]
        except (AttributeError, UnicodeDecodeError):  # no pre-tokenizer, or no text
            pieces = [data.decode("latin-1").translate(_TO_DISPLAY)]
        return [token.id for piece in pieces for token in self._rust.model.tokenize(piece)]

    def encode_whole(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Encode as `apply_chat_template` does, the prefix that the tokenizer adds included."""
        return [list(ids) for ids in self._call(list(texts))["input_ids"]] if texts else []

    @property
    def drops_text(self) -> bool:
        """So does BPE without an unknown token, if it does not have all bytes."""
        if type(self._rust.model).__name__ != "BPE" or self._rust.model.unk_token is not None:
            return False
        every: list[str] = []
        if self._byte_level:
            every = [chr(char) for char in _TO_DISPLAY.values()]
        elif self._byte_fallback:
            every = [f"<0x{byte:02X}>" for byte in range(256)]
        return not every or any(self._rust.token_to_id(name) is None for name in every)

    @property
    def keeps_text(self) -> bool:
        """Added tokens of text may take the white space beside them."""
        return not (self.drops_text or _stripping(self._rust))

    def ids_before(self) -> Sequence[int]:
        """Return the first special token of an empty text."""
        ids: list[int] = self._hf.backend_tokenizer.encode("").ids
        return ids[:1]

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        spans = self._call([text], return_offsets_mapping=True)["offset_mapping"][0]
        byte_of = byte_offsets(text).tolist()
        return [(byte_of[start], byte_of[end]) for start, end in spans]

    def _call(self, texts: list[str], **options: bool) -> Any:
        """Call the tokenizer as users do.

        Raises:
            TokenizerError: for a text that the model has no token for, nor an unknown one.
        """
        try:
            return self._hf(texts, add_special_tokens=False, verbose=False, **options)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise TokenizerError(
                f"the library of {self._model} rejects the text {texts[0][:40]!r}: {error}",
                hint="use a tokenizer with byte tokens or a byte-level vocabulary",
            ) from error

    def byte_level_splits(self) -> str | None:
        """Return the first split pattern of a byte-level model of more than 100,000 ids."""
        first = next(components(self._rust.pre_tokenizer), None)
        if not self._byte_level or first is None or self._rust.get_vocab_size() <= 100_000:
            return None
        return str(first.get("pattern", {}).get("Regex"))

    def chat_templates(self) -> Mapping[str, str]:
        """Return those of `chat_template.jinja` or `tokenizer_config.json`."""
        templates = self._hf.chat_template
        if isinstance(templates, str):
            return {"default": templates} if templates else {}
        return dict(templates) if isinstance(templates, Mapping) else {}

    def text_changes(self) -> Sequence[TextChange]:
        """Return what the normalizer, and a decoder that joins words with spaces, change."""
        return self._text_changes


def _spec(component: Any) -> Spec:
    """Return a component's own JSON; None is an empty sequence."""
    return {"type": "Sequence"} if component is None else dict(json.loads(component.__getstate__()))


_PARTS = ("normalizers", "pretokenizers", "decoders")


def components(component: Any) -> Iterator[Spec]:
    """Walk the JSON of a component and what its sequences hold."""
    left = [_spec(component)]
    while left:
        spec = left.pop()
        if spec["type"] == "Sequence":
            left += reversed([inner for key in _PARTS for inner in spec.get(key) or []])
        else:
            yield spec


def _within_text(rust: RustTokenizer) -> RustTokenizer:
    """Return a tokenizer that encodes as in the middle of a text: no prefix, no padding.

    The model is shared, because copying its vocabulary takes seconds.
    """
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
    """Name added tokens that the normalizer makes the same text."""
    alike: dict[str, list[str]] = {}
    for token in rust.get_added_tokens_decoder().values():
        if token.normalized and rust.normalizer is not None:
            form = rust.normalizer.normalize_str(token.content)
            alike.setdefault(form, []).append(token.content)
    for names in alike.values():
        if len(names) > 1:
            yield (
                f"{model} has added tokens that its normalizer makes the same text: "
                f"{listed(sorted(map(repr, names)))}; its library takes any of them, a different "
                "one each time that it is loaded"
            )


def _stripping(rust: RustTokenizer) -> list[str]:
    """Return the added tokens of text that take the white space beside them."""
    added = rust.get_added_tokens_decoder().values()
    return sorted(t.content for t in added if not t.special and (t.lstrip or t.rstrip))


def _without_prefix(spec: Spec) -> Spec | None:
    """Return a component that does nothing to a text's beginning; None for one that only does."""
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
    """Whether it replaces what a text begins with, as the dummy prefix of a SentencePiece file."""
    pattern: str = spec.get("pattern", {}).get("Regex", "") if spec["type"] == "Replace" else ""
    return pattern.startswith(r"\A")


_MAX_GROWTH = 100  # times; normalizers in use stay below ten, as with `...` for one character


def _check_growth(rust: RustTokenizer, model: str) -> None:
    """Refuse replacements that make a text so long that it fills the memory.

    Raises:
        TokenizerError: if those of the normalizer together do, or of the decoder.
    """
    for component in (rust.normalizer, rust.decoder):
        growth = 1.0
        for spec in components(component):
            if spec["type"] == "Replace":
                old, new = spec["pattern"].get("String"), len(spec["content"])
                # A regular expression may match nothing, and so between any two characters.
                growth *= max(1, new / len(old)) if old else 1 + new
        if growth > _MAX_GROWTH:
            problem = f"the replacements of {model} may make a text {growth:.0f} times as long"
            raise damaged(problem, "its tokenizer.json is damaged")


def _decoder(components: list[Spec], model: str) -> Callable[[str], bytes]:
    """Return display string → bytes in the middle of a text, by the decoder's components.

    Raises:
        TokenizerError: if the text is not the concatenation of its tokens' bytes.
    """
    decode_alone: Callable[[str], bytes] | None = None  # of a component that decodes a token alone
    replacements: list[tuple[str, str]] = []
    is_joined = False  # then what follows sees the whole text as one token
    for component in components:
        kind, (old, new) = component["type"], _replaced(component, is_joined)
        if kind == "ByteLevel" and not (decode_alone or replacements):
            decode_alone, is_joined = byte_level_bytes, True
        elif kind == "WordPiece" and not (decode_alone or replacements or is_joined):
            decode_alone = _word_piece(component)
        elif old and decode_alone is None:
            replacements.append((old, new))
        elif kind == "Fuse":
            is_joined = True
        elif kind != "ByteFallback" and not (kind == "Strip" and is_joined):  # of a text's ends
            raise TokenizerError(
                f"{model} has {_described(component, is_joined)}: its text is not the "
                "concatenation of its tokens",
                hint="use a byte-level, SentencePiece-style or WordPiece tokenizer",
            )
    if not components:
        raise TokenizerError(
            f"{model} has no decoder, so the bytes of its tokens are unknown",
            hint="use a byte-level or SentencePiece-style tokenizer",
        )

    def decode(display: str) -> bytes:
        for old, new in replacements:
            display = display.replace(old, new)
        return display.encode()

    return decode_alone or decode


def _replaced(component: Spec, is_joined: bool) -> tuple[str, str]:
    """Return what a component replaces by what, in each token by itself; "" for no string."""
    old = new = ""
    if component["type"] == "Metaspace" and (
        not is_joined or component.get("prepend_scheme") == "never"
    ):
        old, new = component["replacement"], " "  # but for those of the first token
    elif component["type"] == "Replace":
        old, new = component["pattern"].get("String", ""), component["content"]
    return ("", "") if is_joined and len(old) > 1 else (old, new)


def _described(component: Spec, is_joined: bool) -> str:
    """Name a decoder that is not read."""
    kind = component["type"]
    if kind == "Replace" and "Regex" in component["pattern"]:
        return f"a {kind} decoder of a regular expression"
    return f"a {kind} decoder {'of the whole text' if is_joined else 'of each token'}"


def _word_piece(component: Spec) -> Callable[[str], bytes]:
    """Ask the decoder itself: a word has a space before it, unless its clean-up takes it away."""
    from tokenizers.decoders import WordPiece

    decoder = WordPiece(component["prefix"], component["cleanup"])
    return lambda display: decoder.decode([".", display])[1:].encode()


def _falls_back(model: Any) -> bool:
    """Whether a model writes unknown text as byte tokens, independent of its decoder."""
    if type(model).__name__ == "Unigram":  # whose options Python does not see
        return bool(model.__getstate__().endswith(b'"byte_fallback":true}'))
    return bool(getattr(model, "byte_fallback", False))


def _check_marks(model: Any, decoder: list[Spec], name: str) -> None:
    """Reject a vocabulary with word marks that its decoder leaves in the text.

    Raises:
        TokenizerError: naming the option of the model, and the mark.
    """
    suffix = getattr(model, "end_of_word_suffix", None)
    prefix = getattr(model, "continuing_subword_prefix", None) or ""
    taken = "".join(c["prefix"] for c in decoder if c["type"] == "WordPiece")
    problem = ""
    if suffix:
        problem = f"marks the end of words with {suffix!r} (end_of_word_suffix)"
    elif prefix != taken and type(model).__name__ != "WordLevel":  # whose tokens are whole words
        problem = f"marks the inside of words with {prefix!r} (continuing_subword_prefix), and "
        problem += f"its decoder removes {taken!r}"
    if problem:
        raise TokenizerError(
            f"{name} {problem}, so the text of its tokens is unknown",
            hint="use a byte-level, SentencePiece-style or WordPiece tokenizer",
        )


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


_AT_SPLITS = "what it splits at, such as whitespace, is not kept"
_SPLITTING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")
_DROPPING = {
    **dict.fromkeys(_SPLITTING, _AT_SPLITS),
    "UnicodeScripts": "a beginning without a script, such as spaces, is not kept",
}


def _text_changes(rust: RustTokenizer, decoder: list[Spec]) -> Iterator[TextChange]:
    """Name the components that change a text; what the decoder turns back is not a change."""
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
                what = repr(old or component["pattern"].get("Regex"))
                yield kind, f"{what} becomes {new!r}"
        elif kind not in ("Prepend", "ByteLevel"):
            options = [name for name, value in component.items() if value is True]
            yield kind, ", ".join(options) or "not known here"
    if names := _stripping(rust):
        yield "added tokens", f"white space beside {listed(map(repr, names))} is not kept"
    if any(c["type"] == "WordPiece" for c in decoder):
        what = "whitespace is not kept: one space before each word, none before . , ? !"
        yield "WordPiece", what
        return
    for component in components(rust.pre_tokenizer):
        kind = component["type"]
        if component.get("behavior") == "Removed" or kind in _DROPPING:
            yield kind, _DROPPING.get(kind, _AT_SPLITS)


_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _byte_level_alphabet() -> dict[int, int]:
    """Return byte to display character: GPT-2's bijection, `bytes_to_unicode` in its encoder."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {b: 256 + i for i, b in enumerate(hidden)}


_TO_DISPLAY = _byte_level_alphabet()
# Characters below 256 that display nothing map out of Latin-1, so that encoding them fails.
_FROM_DISPLAY = dict.fromkeys(range(256), 65535) | {c: b for b, c in _TO_DISPLAY.items()}


def byte_level_bytes(display: str) -> bytes:
    """Return the bytes behind a display string; any other string is its own UTF-8."""
    try:
        return display.translate(_FROM_DISPLAY).encode("latin-1")
    except UnicodeEncodeError:
        return display.encode()
