"""The vocabulary inside a `.gguf` file: byte-level BPE, or SentencePiece BPE and Unigram.

Its metadata are read with every length checked against the file's size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtok.errors import TokenizerError
from xtok.tokenizers._hf import byte_level_bytes, merge_bytes
from xtok.tokenizers._sentencepiece import SentencePieceBackend
from xtok.tokenizers._tiktoken import LLAMA_3_PATTERN, O200K_PATTERN, QWEN_PATTERN
from xtok.tokenizers._tokenizer import Backend, TextChange, damaged, refuse_pattern
from xtok.vocab.table import Entry, TokenType

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_KEY = "tokenizer.ggml."
_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "pad": "padding_token_id",
    "unk": "unknown_token_id",
    "mask": "mask_token_id",
    "sep": "seperator_token_id",  # so it is spelled in the format
}
# What `tokenizer.ggml.pre` names: llama.cpp, src/llama-vocab.cpp (LLAMA_VOCAB_PRE_TYPE_…).
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "default"), (_GPT_2,)),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), (LLAMA_3_PATTERN,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN_PATTERN,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (O200K_PATTERN,)),
    "tekken": (_TEKKEN,),
    "smollm": (r"\p{N}", _GPT_2),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# Vocabularies whose tokens are taken whole where a piece is one of them.
_IGNORE_MERGES = {"llama-bpe", "llama-v3", "llama3", "tekken"}
# `tokenizer.ggml.model` to the model type of a SentencePiece file.
_SENTENCEPIECE = {"llama": "BPE", "t5": "UNIGRAM"}


def is_gguf(head: bytes) -> bool:
    """Tell from a file's beginning whether it is one."""
    return head.startswith(b"GGUF")


class GgufBackend(Backend):
    """The vocabulary of a `.gguf` file, its chat template, and its width."""

    name = "gguf"

    def __init__(self, path: Path, *, pattern: str | None = None) -> None:
        self._path = path
        try:
            self._fields = _metadata(path)
        except (ValueError, OSError) as error:
            raise self._damaged(error) from error
        model = self._fields.get(f"{_KEY}model")
        tokens = self._fields.get(f"{_KEY}tokens")
        if not tokens or model in (None, "none", "no_vocab"):
            raise TokenizerError(
                f"{path} has no vocabulary",
                hint="give the .gguf file of the model itself: a projector or an adapter has none",
            )
        self._tokens: list[str] = tokens
        kinds = self._column("token_type", int(TokenType.NORMAL))
        unknown = set(kinds).difference(TokenType)
        if unknown:
            raise self._damaged(f"it has tokens of the type {min(unknown)}")
        self._types = list(map(TokenType, kinds))
        self._vocabulary: Backend
        if model in _SENTENCEPIECE:
            refuse_pattern(pattern, f"{path} holds a SentencePiece model")
            self._vocabulary = self._sentencepiece(_SENTENCEPIECE[model])
        elif model == "gpt2":
            self._vocabulary = _ByteLevel(self._tokens, self._types, self._byte_level(pattern))
        else:
            raise TokenizerError(
                f"{path} holds a vocabulary of the kind {model!r}",
                hint="xtok reads byte-level BPE (gpt2) and SentencePiece (llama, t5) out of .gguf; "
                "give the model's Hugging Face folder",
            )

    def _column(self, name: str, default: float) -> Sequence[Any]:
        """Return a list with an entry for each token, all `default` if the file has no such list.

        Raises:
            TokenizerError: if the list is of another length.
        """
        column: Sequence[Any] = self._fields.get(_KEY + name) or [default] * len(self._tokens)
        if len(column) != len(self._tokens):
            raise self._damaged(
                f"{len(self._tokens)} tokens, and {len(column)} entries in {_KEY}{name}"
            )
        return column

    def _sentencepiece(self, kind: str) -> Backend:
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()
        scores = self._column("scores", 0.0)
        for token, score, token_type in zip(self._tokens, scores, self._types, strict=True):
            proto.pieces.add(piece=token, score=score, type=int(token_type))
        spec = proto.trainer_spec
        spec.model_type = spec.ModelType.Value(kind)
        spec.vocab_size = len(self._tokens)
        spec.byte_fallback = TokenType.BYTE in self._types
        for name in ("unk", "bos", "eos", "pad"):
            token_id = self._fields.get(_KEY + _ROLES[name], -1)
            if name != "unk" or token_id >= 0:
                setattr(spec, f"{name}_id", token_id)
        proto.normalizer_spec.name = "identity"
        charsmap = self._fields.get(f"{_KEY}precompiled_charsmap")
        if charsmap:
            proto.normalizer_spec.name = "of the file"
            proto.normalizer_spec.precompiled_charsmap = bytes(b % 256 for b in charsmap)
        try:
            return SentencePieceBackend(proto)
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from error

    def _byte_level(self, pattern: str | None) -> RustTokenizer:
        from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

        pre = str(self._fields.get(f"{_KEY}pre", "default"))
        patterns = _PATTERNS.get(pre, ()) if pattern is None else (pattern,)
        if not patterns:
            raise TokenizerError(
                f"{self._path} has the split pattern {pre!r}, which xtok does not know",
                hint="give its regular expression with {option}",
                parameter="pattern",
            )
        merges = [tuple(merge.split(" ", 1)) for merge in self._fields.get(f"{_KEY}merges") or []]
        ids = {token: i for i, token in reversed(list(enumerate(self._tokens)))}
        try:
            model = models.BPE(ids, merges, ignore_merges=pre in _IGNORE_MERGES)
            splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
        except Exception as error:
            raise TokenizerError(
                f"{self._path} has merges or a pattern that do not fit its tokens: {error}",
                hint="fetch the file again if it is damaged, or give another {option}",
                parameter="pattern",
            ) from error
        rust = Tokenizer(model)
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
        for special, kind in ((True, TokenType.CONTROL), (False, TokenType.USER_DEFINED)):
            named = [t for t, k in zip(self._tokens, self._types, strict=True) if k == kind and t]
            added = [AddedToken(t, normalized=False, special=special) for t in named]
            (rust.add_special_tokens if special else rust.add_tokens)(added)
        rust.encode_special_tokens = True
        return rust

    def _damaged(self, problem: object) -> TokenizerError:
        message = f"{self._path} is not a whole .gguf file: {problem}"
        return damaged(message, "the file is damaged or cut off")

    def entries(self) -> Iterable[Entry]:
        return self._vocabulary.entries()

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._vocabulary.encode_texts(texts)

    def encode_bytes(self, data: bytes) -> list[int] | None:
        return self._vocabulary.encode_bytes(data)

    def declared_roles(self) -> Mapping[str, Sequence[int]]:
        """Return the ids that the file names."""
        ids = {role: self._fields.get(_KEY + key) for role, key in _ROLES.items()}
        return {role: [int(i)] for role, i in ids.items() if i is not None and i >= 0}

    def model_vocab_size(self) -> int | None:
        """Return what `ARCHITECTURE.vocab_size` says; without it, every id has a token."""
        size = self._fields.get(f"{self._fields.get('general.architecture')}.vocab_size")
        return None if size is None else int(size)

    def chat_templates(self) -> Mapping[str, str]:
        """Return the file's templates."""
        prefix = "tokenizer.chat_template"
        return {
            key.removeprefix(prefix).lstrip(".") or "default": str(template)
            for key, template in self._fields.items()
            if key == prefix or key.startswith(f"{prefix}.")
        }

    def text_changes(self) -> Sequence[TextChange]:  # the format has no normalizer for bytes
        return self._vocabulary.text_changes()


class _ByteLevel(Backend):
    """Byte-level BPE; a token's bytes are those behind its characters."""

    name = "gguf"

    def __init__(self, tokens: list[str], types: list[TokenType], rust: RustTokenizer) -> None:
        self._tokens, self._types, self._rust = tokens, types, rust

    def entries(self) -> Iterable[Entry]:
        for i, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            named = kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
            display = token.encode()
            yield Entry(i, kind, display if named else byte_level_bytes(token), display)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_bytes(self, data: bytes) -> list[int] | None:
        return merge_bytes(self._rust, data)


# Value types of the format: ggml-org/ggml, docs/gguf.md.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_NUMBERS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays in arrays; files in use have one


def _metadata(path: Path) -> dict[str, Any]:
    """Return the fields of a file by name; tensors are not read.

    Raises:
        ValueError: if a length does not fit the file, or something in it is unknown.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).fields()
        except struct.error as error:
            raise ValueError("it ends before its metadata does") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = 4  # behind the magic
        self._order = "<"
        version = self._number("I")
        if version & 0xFFFF == 0:  # a file of a big-endian machine
            self._order, self._place = ">", 4
            version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"its version {version} is not 2 or 3")

    def fields(self) -> dict[str, Any]:
        self._number("Q")  # tensors
        fields: dict[str, Any] = {}
        for _ in range(self._count(13)):  # the shortest field: an empty name, a type, a byte
            name = self._string()
            if name in fields:
                raise ValueError(f"it has the field {name!r} twice")
            fields[name] = self._value(self._number("I"))
        return fields

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise ValueError(f"it has a value of the type {kind}")
        inner = self._number("I")
        if inner not in _NUMBERS:
            return [self._value(inner, depth + 1) for _ in range(self._count(8))]
        letter = _NUMBERS[inner]
        return self._numbers(f"{self._count(struct.calcsize(f'={letter}'))}{letter}")

    def _string(self) -> str:
        length = self._count(1)
        self._place += length
        return self._data[self._place - length : self._place].decode()

    def _number(self, letter: str) -> Any:
        [value] = self._numbers(letter)
        return value

    def _numbers(self, form: str) -> list[Any]:
        values = struct.unpack_from(self._order + form, self._data, self._place)
        self._place += struct.calcsize(f"={form}")
        return list(values)

    def _count(self, size: int) -> int:
        """Read how many values follow, of at least `size` bytes each."""
        count: int = self._number("Q")
        if count * size > len(self._data) - self._place:
            raise ValueError(f"it announces {count} values, more than it has")
        return count
