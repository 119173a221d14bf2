"""Spell a student's tokens in a teacher's, byte for byte: what the teacher reads on policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xtok.errors import TokenizerError
from xtok.tokenizers import Tokenizer, from_transformers
from xtok.vocab.roles import match_roles


class Retokenizer:
    """Turns rows of a student's ids into a teacher's ids of the same bytes.

    A decoded text would not do: decoding drops a SentencePiece model's first space, and replaces
    bytes that are no characters yet. Stretches of text are spelled as in the middle of a longer
    text. A control token becomes the teacher's of the same role; one without a counterpart is left
    out, and so is an id that stands for nothing.

    Args:
        student: an xtok `Tokenizer`, or a fast Hugging Face tokenizer.
        teacher: likewise.
    """

    def __init__(self, student: Any, teacher: Any) -> None:
        self.student, self.teacher = (
            given if isinstance(given, Tokenizer) else from_transformers(given)
            for given in (student, teacher)
        )
        self._roles = match_roles(self.student.table, self.teacher.table)

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the teacher's ids of each row.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell the bytes of a row.
            ValueError: for an id that the student does not have.
        """
        split = [self._parts(row) for row in rows]
        texts = sorted({part for parts in split for part in parts if isinstance(part, bytes)})
        spelled = dict(zip(texts, self.teacher.segment_batch(texts), strict=True))
        for text, found in spelled.items():
            if found is None:
                raise TokenizerError(
                    f"{self.teacher.vocabulary.model_id} cannot spell {text[:40]!r}, which the "
                    "student has written",
                    hint="use a teacher whose tokenizer has byte tokens or is byte-level",
                )
        respelled = []
        for parts in split:
            ids: list[int] = []
            for part in parts:
                ids += (spelled[part] or []) if isinstance(part, bytes) else [part]
            respelled.append(ids)
        return respelled

    def sequence(self, *parts: Sequence[int]) -> list[int]:
        """Return a whole sequence for the teacher, such as a prompt and a response.

        It begins with the teacher's bos token, if it has one. No token of it reaches from one part
        into the next, so the last part's tokens are the last of it.

        Raises:
            TokenizerError: as for rows.
            ValueError: likewise.
        """
        ids = [token_id for part in self(parts) for token_id in part]
        begin = self.teacher.table.roles.get("bos", ())
        return ids if not begin or ids[:1] in [[i] for i in begin] else [begin[0], *ids]

    def _parts(self, row: Sequence[int]) -> list[bytes | int]:
        """Return a row as stretches of bytes, and the teacher's ids of the control tokens."""
        tokens = self.student.table.tokens()
        parts: list[bytes | int] = []
        pending: list[bytes] = []
        for token_id in row:
            if not 0 <= token_id < len(tokens):
                raise ValueError(f"student id {token_id} is not in 0..{len(tokens) - 1}")
            counterpart = self._roles.get(token_id)
            if counterpart is None:
                pending.append(tokens[token_id])
                continue
            if text := b"".join(pending):
                parts.append(text)
            pending = []
            parts.append(counterpart)
        if text := b"".join(pending):
            parts.append(text)
        return parts
