"""SentencePiece `.model` files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xtok.errors import TokenizerError
from xtok.tokenizers._tokenizer import TextChange
from xtok.vocab.table import Entries, TokenType

if TYPE_CHECKING:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

_SPACE = "▁"
_NAMED = (TokenType.CONTROL, TokenType.UNKNOWN)


class SentencePieceBackend:
    """A `.model` file through the `sentencepiece` library, without dummy prefix and stripping."""

    name = "sentencepiece"

    def __init__(self, path: Path, *, pattern: str | None = None) -> None:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()
        try:
            proto.ParseFromString(path.read_bytes())
            self._load(proto)
        except (DecodeError, RuntimeError, ValueError) as error:
            raise TokenizerError(
                f"{path} is not a SentencePiece model, nor a tiktoken file: {error}",
                hint="give a .model, .tiktoken, tekken.json or .gguf file, or the folder of a "
                "Hugging Face tokenizer",
            ) from error
        if pattern is not None:
            raise TokenizerError(
                f"{path} is a SentencePiece model, which takes no pattern",
                hint="leave out {option}",
                parameter="pattern",
            )

    @classmethod
    def from_proto(cls, proto: ModelProto) -> SentencePieceBackend:
        """Make one of a ModelProto that was in another form.

        Raises:
            RuntimeError: if the library does not take it.
            ValueError: if a piece is not UTF-8.
        """
        backend = cls.__new__(cls)
        backend._load(proto)
        return backend

    def __getstate__(self) -> bytes:
        state: bytes = self._proto.SerializeToString()  # its class is not found by its name
        return state

    def __setstate__(self, state: bytes) -> None:
        from sentencepiece import sentencepiece_model_pb2

        self._load(sentencepiece_model_pb2.ModelProto.FromString(state))

    def _load(self, proto: ModelProto) -> None:
        from sentencepiece import SentencePieceProcessor

        for place, piece in enumerate(proto.pieces):
            if not isinstance(piece.piece, str):  # protobuf gives bytes
                raise ValueError(f"piece {place} is not UTF-8: {piece.piece!r}")
        self._proto = proto
        self._processor = SentencePieceProcessor()
        # In the middle of a text there is no dummy prefix, and every space counts.
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        self._processor.LoadFromSerializedProto(proto.SerializeToString())

    def entries(self) -> Entries:
        """Types are the file's own; a piece's bytes are its text with `▁` as a space."""
        pieces = self._proto.pieces
        displays = [piece.piece for piece in pieces]
        types = [piece.type for piece in pieces]
        contents = [display.replace(_SPACE, " ").encode() for display in displays]
        for i, token_type in enumerate(types):
            if token_type == TokenType.BYTE:
                contents[i] = bytes([int(displays[i][1:-1], 16)])
            elif token_type in _NAMED:
                contents[i] = displays[i].encode()
        return Entries(range(len(types)), types, contents, lambda: [d.encode() for d in displays])

    def declared_roles(self) -> Mapping[str, Iterable[int]]:
        """Return the ids that the trainer spec names; -1 means that there is none."""
        p = self._processor
        ids = {"bos": p.bos_id(), "eos": p.eos_id(), "pad": p.pad_id(), "unk": p.unk_id()}
        return {role: [i] for role, i in ids.items() if i >= 0}

    def model_vocab_size(self) -> int | None:
        """A `.model` file has no model beside it."""
        return None

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode on all cores."""
        ids: list[list[int]] = self._processor.encode(list(texts), out_type=int)
        return ids

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """SentencePiece merges characters, not bytes."""
        return None

    def encode_prompt(self, text: str) -> list[int] | None:
        """SentencePiece takes the names of control tokens for text."""
        return None

    def chat_templates(self) -> Mapping[str, str]:
        """A `.model` file has no chat template."""
        return {}

    def text_changes(self) -> Sequence[TextChange]:
        """Return what the model's own normalizer changes."""
        spec = self._proto.normalizer_spec
        if not spec.precompiled_charsmap:
            return ()
        what = "characters that its table maps, compatibility characters as a rule (ﬁ → fi, ① → 1)"
        return (TextChange(normalizer=spec.name or "charsmap", changes=what),)
