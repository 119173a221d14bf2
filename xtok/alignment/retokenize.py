"""Convert a student's token ids to the teacher's ids for the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from xtok.errors import TokenizerError
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenType, utf8_runs


class Retokenizer:
    """Converts student ids to teacher ids for the same text.

    The conversion keeps incomplete characters, and the first space of a SentencePiece model.
    Decoding the ids and encoding the text would lose incomplete characters and this space. The
    teacher's normalizer and tokenizer encode each text as a part of a longer text, without a prefix
    space. A control token becomes the teacher's token with the same role, or is dropped. If the
    tokenizers are equal, the ids do not change.

    >>> xtok.Retokenizer(xtok.load_pair("bytes", "bytes"))([[104, 105]])
    [[104, 105]]

    Args:
        pair: the student and the teacher, with their tokenizers.
        exact: keep every byte of the text, and do not apply the teacher's normalizer.
    """

    def __init__(self, pair: Pair, *, exact: bool = False) -> None:
        self.student, self.teacher = pair.tokenizers
        self._exact = exact
        self._roles = pair.equal_roles
        same = pair.is_same and self.student.definition_sha256 == self.teacher.definition_sha256
        self._is_same = same and not exact

    def __call__(
        self, rows: Sequence[Sequence[int]], *, begins: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Return the teacher's ids for each row.

        Args:
            rows: lists of the student's ids.
            begins: for each row, whether the row begins a sequence. The default is True. If a
                sequence begins with a token that is both bos and eos (GPT-2), this token counts as
                bos.

        Raises:
            TokenizerError: if the teacher's vocabulary cannot spell a row.
            ValueError: if a student id is invalid.
        """
        width = len(self.student.table)
        for token_id in chain.from_iterable(rows):
            if not 0 <= token_id < width:
                raise ValueError(f"student id {token_id} is outside 0..{width - 1}")
        if self._is_same:  # a narrower teacher lacks the last unused ids
            return [[i for i in row if i < len(self.teacher.table)] for row in rows]
        flags = [True] * len(rows) if begins is None else begins
        split = [self._parts(*row) for row in zip(rows, flags, strict=True)]
        by_part = self._spell({part for parts in split for part in parts})
        return [[token_id for part in parts for token_id in by_part[part]] for parts in split]

    def sequence(self, *parts: Sequence[int]) -> list[int]:
        """Convert the parts of one text to one list of ids, after the teacher's bos token (if any).

        Raises:
            TokenizerError: as in `__call__`.
        """
        begins = [not index for index in range(len(parts))]
        ids = [token_id for part in self(parts, begins=begins) for token_id in part]
        bos, _ = self.teacher.table.around(ids)
        return [*bos, *ids]

    def _parts(self, row: Sequence[int], begins: bool) -> list[str | bytes | int]:
        """Split a row into texts, bytes that are not UTF-8, and special tokens of the teacher."""
        tokens = self.student.table.tokens()
        parts: list[str | bytes | int] = []
        roles = {*self.student.table.roles_by_id.get(int(row[0]), ())} if len(row) else set()
        if begins and {"bos", "eos"} <= roles:
            parts, row = [*self.teacher.table.around(())[0]], row[1:]
        for is_special, group in groupby(row, self._roles.__contains__):
            if is_special:
                parts += [self._roles[i] for i in group]
                continue
            for index, run in enumerate(utf8_runs(b"".join(tokens[i] for i in group))):
                if run:
                    parts.append(run.encode("utf-8", "surrogateescape") if index % 2 else run)
        return parts

    def _has_all(self, text: str, ids: list[int]) -> bool:
        table = self.teacher.table
        if any(table.types[i] == TokenType.UNKNOWN for i in ids):
            return False
        return self.teacher.keeps_text or table.spell(ids) == text.encode()

    def _spell(self, parts: set[str | bytes | int]) -> dict[str | bytes | int, list[int]]:
        """Spell parts with the teacher's library, or exactly if the library would lose text."""
        by_part: dict[str | bytes | int, list[int]] = {i: [i] for i in parts if isinstance(i, int)}
        texts = [] if self._exact else sorted(part for part in parts if isinstance(part, str))
        by_library = zip(texts, self.teacher.library_ids(texts), strict=True)
        by_part |= {text: ids for text, ids in by_library if self._has_all(text, ids)}
        missing = [part for part in parts if not by_part.get(part) and not isinstance(part, int)]
        as_bytes = [part.encode() if isinstance(part, str) else part for part in missing]
        for part, ids in zip(missing, self.teacher.segment_batch(as_bytes), strict=True):
            if ids is None:
                raise TokenizerError(
                    f"{self.teacher.vocabulary.model_id} cannot spell {part[:40]!r}, which is in "
                    "the student's text",
                    hint="use a teacher with byte tokens or a byte-level tokenizer",
                )
            by_part[part] = ids
        return by_part
