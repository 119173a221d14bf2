"""SentencePiece `.model` files."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import Backend, Roles, TextChange
from xtok.tokenizers.table import TokenEntry, TokenType

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

_SPACE = "▁"
# A line of rwkv_vocab_v20230424.txt: an id, a Python literal, and how many bytes it has.
_RWKV = re.compile(rb"\d+ b?(['\"]).*\1 \d+\r?\n")


class SentencePieceBackend(Backend):
    """A SentencePiece model through its library, without dummy prefix and stripping.

    Raises:
        RuntimeError: if the library refuses the model.
        ValueError: if a piece is not UTF-8.
    """

    name = "sentencepiece"

    def __init__(self, proto: ModelProto) -> None:
        from sentencepiece import SentencePieceProcessor

        for place, piece in enumerate(proto.pieces):
            if not isinstance(piece.piece, str):  # protobuf gives bytes
                raise ValueError(f"piece {place} is not UTF-8: {piece.piece!r}")
        self._proto, self._data = proto, proto.SerializeToString()
        self._processor = SentencePieceProcessor()
        self._removes_spaces = proto.normalizer_spec.remove_extra_whitespaces
        # In the middle of a text there is no dummy prefix, and every space counts.
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        self._processor.LoadFromSerializedProto(proto.SerializeToString())

    @classmethod
    def from_bytes(cls, data: bytes) -> SentencePieceBackend:
        """Read a serialized ModelProto.

        Raises:
            DecodeError: if it is not one; else as the class.
        """
        from sentencepiece import sentencepiece_model_pb2

        return cls(sentencepiece_model_pb2.ModelProto.FromString(data))

    @classmethod
    def from_file(cls, path: Path) -> SentencePieceBackend:
        """Read a `.model` file.

        Raises:
            TokenizerError: if it is not one.
        """
        from google.protobuf.message import DecodeError

        data = path.read_bytes()
        if _RWKV.match(data):
            raise TokenizerError(
                f"{path} is a vocabulary of RWKV, which matches the longest token and is not read",
                hint="give a model with a tokenizer.json, .model, .tiktoken or tekken.json file",
            )
        try:
            return cls.from_bytes(data)
        except (DecodeError, RuntimeError, ValueError) as error:
            raise TokenizerError(
                f"{path} is not a SentencePiece model, nor a tiktoken file: {error}",
                hint="give a .model, .tiktoken or tekken.json file, or a Hugging Face folder",
            ) from error

    def __reduce__(self) -> tuple[object, ...]:  # pickle does not find the proto's class by name
        return SentencePieceBackend.from_bytes, (self._data,)

    def entries(self) -> Iterable[TokenEntry]:
        """Types are the file's own; a piece's bytes are its text with `▁` as a space."""
        for i, piece in enumerate(self._proto.pieces):
            kind, display = TokenType(piece.type), piece.piece
            content = display.replace(_SPACE, " ").encode()
            if kind is TokenType.BYTE:
                content = bytes([int(display[1:-1], 16)])
            elif kind in (TokenType.CONTROL, TokenType.UNKNOWN):
                content = display.encode()
            yield TokenEntry(i, kind, content, display.encode())

    def definition(self) -> Iterable[bytes]:
        """Return the whole model: scores, merges, normalizer and trainer specs."""
        return [self._data]

    def declared_roles(self) -> Roles:
        """Return the ids that the trainer spec names; -1 means that there is none."""
        p = self._processor
        ids = {"bos": p.bos_id(), "eos": p.eos_id(), "pad": p.pad_id(), "unk": p.unk_id()}
        return {role: {i: "the model file"} if i >= 0 else {} for role, i in ids.items()}

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode on all cores."""
        ids: list[list[int]] = self._processor.encode(list(texts), out_type=int)
        return ids

    def encode_start(self, text: str) -> list[int]:
        """Encode with the dummy prefix and the stripping of the file."""
        ids: list[int] = self._of_starts.encode(text, out_type=int)
        return ids

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        processor = self._of_starts if at_start else self._processor
        return [(piece.begin, piece.end) for piece in processor.EncodeAsProto(text).pieces]

    @functools.cached_property
    def _of_starts(self) -> SentencePieceProcessor:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self._data)

    def text_changes(self) -> Sequence[TextChange]:
        """Return what the model's own normalizer changes."""
        spec = self._proto.normalizer_spec
        changes: list[TextChange] = []
        if spec.precompiled_charsmap:
            what = "characters that its table maps, compatibility characters as a rule "
            changes.append((spec.name or "charsmap", what + "(ﬁ → fi, ① → 1)"))
        if self._removes_spaces:
            what = "several spaces become one, and those at the ends of a text are dropped"
            changes.append(("remove_extra_whitespaces", what))
        return tuple(changes)
