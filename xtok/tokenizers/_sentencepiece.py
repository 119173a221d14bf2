"""Read SentencePiece `.model` files."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import Backend, Roles, TextChange, damaged
from xtok.tokenizers.table import TokenEntry, TokenType

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec

CHARACTER_TABLE = "replaces the characters in a table, such as compatibility forms (ﬁ → fi, ① → 1)"
_SPACE = "▁"


class SentencePieceBackend(Backend):
    """A SentencePiece model.

    Parts of a longer text are encoded without the dummy prefix, and keep all spaces.
    """

    name = "sentencepiece"

    def __init__(self, proto: ModelProto) -> None:
        from sentencepiece import SentencePieceProcessor

        for index, piece in enumerate(proto.pieces):
            if not isinstance(piece.piece, str):  # protobuf returns bytes for invalid UTF-8
                raise ValueError(f"piece {index}: {piece.piece!r} is not UTF-8")
            if "\0" in piece.piece:
                raise ValueError(f"piece {index}: {piece.piece!r} contains U+0000")
        self._proto, self._data = proto, proto.SerializeToString()
        self._processor = SentencePieceProcessor()
        self.text_changes = tuple(_text_changes(proto.normalizer_spec))
        # In the middle of a text, the dummy prefix is omitted, and all spaces are significant.
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        self._processor.LoadFromSerializedProto(proto.SerializeToString())

    @classmethod
    def from_bytes(cls, data: bytes) -> SentencePieceBackend:
        """Read a serialized ModelProto. Raises a `DecodeError` for other data."""
        from sentencepiece import sentencepiece_model_pb2

        return cls(sentencepiece_model_pb2.ModelProto.FromString(data))

    @classmethod
    def from_file(cls, path: Path) -> SentencePieceBackend:
        from google.protobuf.message import DecodeError

        try:
            return cls.from_bytes(path.read_bytes())
        except ValueError as error:
            raise damaged(f"{path}, {error}") from error
        except (DecodeError, RuntimeError) as error:
            raise TokenizerError(
                f"{path} is neither a SentencePiece model nor a tiktoken file: {error}",
                hint="give a .model, .tiktoken or tekken.json file, or a Hugging Face folder",
            ) from error

    def __reduce__(self) -> tuple[object, ...]:  # pickle cannot import ModelProto
        return SentencePieceBackend.from_bytes, (self._data,)

    def entries(self) -> Iterable[TokenEntry]:
        """Return the pieces of the file as entries, with a space for each `▁`."""
        for i, piece in enumerate(self._proto.pieces):
            kind, display = TokenType(piece.type), piece.piece
            content = display.replace(_SPACE, " ").encode()
            if kind is TokenType.BYTE:
                content = bytes([int(display[1:-1], 16)])
            elif kind in (TokenType.CONTROL, TokenType.UNKNOWN):
                content = display.encode()
            yield TokenEntry(i, kind, content, display.encode())

    def definition(self) -> Iterable[bytes]:
        return [self._data]

    def declared_roles(self) -> Roles:
        p = self._processor
        ids = {"bos": p.bos_id(), "eos": p.eos_id(), "pad": p.pad_id(), "unk": p.unk_id()}
        return {role: {i: "the model file"} if i >= 0 else {} for role, i in ids.items()}

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(texts), out_type=int)
        return ids

    def encode_starts(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._start_processor.encode(list(texts), out_type=int)
        return ids

    def spans(self, text: str, *, at_start: bool = True) -> Sequence[tuple[int, int]]:
        processor = self._start_processor if at_start else self._processor
        return [(piece.begin, piece.end) for piece in processor.EncodeAsProto(text).pieces]

    @functools.cached_property
    def _start_processor(self) -> SentencePieceProcessor:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self._data)


def _text_changes(spec: NormalizerSpec) -> Iterator[TextChange]:
    if spec.precompiled_charsmap:
        yield spec.name or "charsmap", CHARACTER_TABLE
    if spec.remove_extra_whitespaces:
        change = "replaces repeated spaces by one space, and drops spaces at the ends of a text"
        yield "remove_extra_whitespaces", change
