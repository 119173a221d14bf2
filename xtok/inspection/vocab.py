"""`vocab`: list the tokens of a vocabulary, and their counterparts in another vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from os import PathLike
from typing import Any

import numpy as np

from xtok._lib.io import atomic_output, check_output, write
from xtok._lib.progress import Progress, silent
from xtok._lib.ragged import offsets_of
from xtok.inspection.describe import describe_side
from xtok.tokenizers import ModelLike, load_pair, load_tokenizer
from xtok.tokenizers.display import safe_json
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import Token, TokenType

VOCAB_SUFFIXES = (".jsonl", ".npz")
"""Suffixes of vocabulary files."""


@dataclass(frozen=True, kw_only=True)
class VocabToken:
    """A token id of a vocabulary."""

    id: int
    bytes: str  # in hexadecimal; empty for special tokens and unused ids
    length: int  # length in bytes
    type: str  # the name of a `TokenType`, in lower case
    name: str  # escaped bytes, or a special token's name
    roles: tuple[str, ...]
    teacher_id: int | None  # teacher id with equal bytes or role
    # teacher ids that spell the token; empty for special tokens and tokens that cannot be spelled
    spelling: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class VocabTable:
    """Tokens of a vocabulary, with their counterparts or spellings in a teacher's vocabulary."""

    model: str
    teacher: str | None
    vocab_size: int  # V, the width of the model's logits
    types: Mapping[str, int]  # number of ids by type
    tokens: tuple[VocabToken, ...]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the tokens as `.jsonl` (one object per line), or a whole vocabulary as `.npz`.

        The arrays of an `.npz` are `bytes` (uint8 `[total]`), `offsets` (int64 `[V + 1]`) and
        `types` (uint8 `[V]`). With a teacher, the file also contains `teacher_ids` (int64 `[V]`, −1
        for tokens without a counterpart), `spellings` (int32) and `spelling_offsets` (int64 `[V +
        1]`).

        Raises:
            OutputError: if the file cannot be written.
            ValueError: if the suffix is `.npz`, and the tokens are not a whole vocabulary in the
                order of ids.
        """
        target = check_output(path, VOCAB_SUFFIXES)
        if target.suffix == ".jsonl":
            write(target, self._lines())
            return
        if [token.id for token in self.tokens] != [*range(self.vocab_size)]:
            raise ValueError(".npz requires all tokens sorted by id; use .jsonl for other lists")
        with atomic_output(target) as temporary, temporary.open("wb") as file:
            np.savez(file, **self._arrays())

    def _lines(self) -> Iterator[bytes]:
        omitted = () if self.teacher is not None else ("teacher_id", "spelling")
        for token in self.tokens:
            fields = {name: value for name, value in vars(token).items() if name not in omitted}
            yield safe_json(json.dumps(fields, ensure_ascii=False)).encode() + b"\n"

    def _arrays(self) -> dict[str, Any]:
        data = b"".join(bytes.fromhex(token.bytes) for token in self.tokens)
        arrays: dict[str, Any] = {
            "bytes": np.frombuffer(data, np.uint8),
            "offsets": offsets_of([token.length for token in self.tokens]),
            "types": np.array([TokenType[token.type.upper()] for token in self.tokens], np.uint8),
        }
        if self.teacher is not None:
            ids = [-1 if token.teacher_id is None else token.teacher_id for token in self.tokens]
            spellings = [token.spelling or () for token in self.tokens]
            arrays["teacher_ids"] = np.array(ids, np.int64)
            arrays["spellings"] = np.fromiter(chain.from_iterable(spellings), np.int32)
            arrays["spelling_offsets"] = offsets_of([*map(len, spellings)])
        return arrays


def vocab(
    student_model: ModelLike | Pair,
    tokens: Token | Sequence[Token] | None = None,
    *,
    teacher_model: ModelLike | None = None,
    progress: Progress = silent,
) -> VocabTable:
    """Return the bytes, types, names and roles of a model's tokens.

    `Tokenizer.table` contains the same data as arrays.

    >>> [token] = xtok.vocab("bytes", "a", teacher_model="bytes").tokens
    >>> token.id, token.bytes, token.teacher_id, token.spelling
    (97, '61', 97, (97,))

    Args:
        student_model: the model (see `load_tokenizer`), or a pair. For a pair, the student's tokens
            are listed.
        tokens: tokens as text, bytes or ids (see `Vocabulary.ids_of`). Default: all ids.
        teacher_model: a second model. Each token then includes the teacher id with the same bytes
            or role, and the spelling in the teacher's tokens.
        progress: called while tokens are spelled.

    Raises:
        XtokError: if a tokenizer cannot be loaded, or the model has no such token.
    """
    if isinstance(student_model, Pair) or teacher_model is not None:
        pair = load_pair(student_model, teacher_model)
        tokenizer = pair.tokenizers[0]
    else:
        pair, tokenizer = None, load_tokenizer(student_model)
    vocabulary, table = tokenizer.vocabulary, tokenizer.table
    ids: Sequence[int] = range(len(table))
    if tokens is not None:
        ids = list(dict.fromkeys(vocabulary.all_ids_of(tokens)))
    spellings: Iterable[tuple[int | None, tuple[int, ...] | None]] = repeat((None, None))
    if pair is not None:
        spellings = _teacher_spellings(pair, ids, progress)
    return VocabTable(
        model=vocabulary.model_id,
        teacher=None if pair is None else pair.teacher.model_id,
        vocab_size=vocabulary.vocab_size,
        types=describe_side(vocabulary).token_types,
        tokens=tuple(
            VocabToken(
                id=i,
                bytes=table[i].hex(),
                length=int(table.lengths[i]),
                type=TokenType(int(table.types[i])).name.lower(),
                name=table.name(i),
                roles=table.roles_by_id.get(i, ()),
                teacher_id=teacher_id,
                spelling=spelling,
            )
            for i, (teacher_id, spelling) in zip(ids, spellings, strict=False)
        ),
    )


def _teacher_spellings(
    pair: Pair, ids: Sequence[int], progress: Progress
) -> Iterable[tuple[int | None, tuple[int, ...]]]:
    token_ids = np.array(ids, np.int64)
    has_bytes = pair.tables[0].lengths[token_ids] > 0
    spelled = pair.pieces(token_ids[has_bytes], progress)
    counts = np.zeros(len(token_ids), np.int64)
    counts[has_bytes] = spelled.counts
    pieces = iter(spelled.ids.tolist())
    for partner, count in zip(pair.partners[token_ids].tolist(), counts.tolist(), strict=True):
        yield (partner if partner >= 0 else None), tuple(islice(pieces, count))
