"""Define `Pair`, which contains two vocabularies and computes all facts that depend on both."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok.config import TokenForm
from xtok.errors import XtokError
from xtok.tokenizers.relaxed import match_relaxed
from xtok.tokenizers.roles import match_roles
from xtok.tokenizers.table import Decoded, TokenTable, Vocabulary, match_bytes, same_tokens

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


_TOKENS_AT_ONCE = 16_384  # tokens per call to a tokenizer, so that the progress bar moves


class Pieces(NamedTuple):
    """The spellings of several tokens, concatenated into one array of ids."""

    ids: NDArray[np.int32]  # [total], ids of the tokenizer that spells the tokens
    counts: NDArray[np.int64]  # [tokens], number of pieces of each token; 0 without a spelling


@dataclass(frozen=True, eq=False)
class Pair:
    """The vocabularies of a student and a teacher, with their tokenizers if available.

    Each fact is computed at its first use and cached. The vocabularies are as wide as the models'
    logits. `xtok.load_pair` creates a pair from two models, and `maps.map_arguments.bind_map`
    creates a pair from a map.
    """

    student: Vocabulary
    teacher: Vocabulary
    student_tokenizer: Tokenizer | None = None
    teacher_tokenizer: Tokenizer | None = None
    # Computed on demand. A map from Llama 3 to Qwen needs the spellings of 1 in 7 student tokens.
    _spellings: dict[int, list[int] | None] = field(default_factory=dict, init=False, repr=False)
    _forms: dict[tuple[object, ...], Pair] = field(default_factory=dict, init=False, repr=False)

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Both tokenizers. Raises a `ValueError` if the pair has no tokenizers."""
        if self.student_tokenizer is None or self.teacher_tokenizer is None:
            raise ValueError("the pair has no tokenizers: create the pair with xtok.load_pair")
        return self.student_tokenizer, self.teacher_tokenizer

    @functools.cached_property
    def tables(self) -> tuple[TokenTable, TokenTable]:
        """Both token tables. Raises an `XtokError` if the pair's map contains no tokens."""
        return require_table(self.student), require_table(self.teacher)

    @functools.cached_property
    def sides(self) -> tuple[Vocabulary, Vocabulary]:
        """The two vocabularies as stored in a map, with the digests of the tokenizers."""
        student, teacher = (
            replace(v, definition_sha256=tokenizer.definition_sha256) if tokenizer else v
            for v, tokenizer in self._with_tokenizers()
        )
        return student, teacher

    def _with_tokenizers(self) -> Iterator[tuple[Vocabulary, Tokenizer | None]]:
        yield self.student, self.student_tokenizer
        yield self.teacher, self.teacher_tokenizer

    @property
    def shape(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return self.student.vocab_size, self.teacher.vocab_size

    @functools.cached_property
    def reversed(self) -> Pair:
        """The pair with student and teacher exchanged. `pair.reversed.reversed` is `pair`."""
        other = Pair(self.teacher, self.student, self.teacher_tokenizer, self.student_tokenizer)
        vars(other)["reversed"] = self
        return other

    @functools.cached_property
    def equal_bytes(self) -> NDArray[np.int64]:
        """The teacher id with the same bytes as each student id, or −1, `[V_student]`, int64."""
        return match_bytes(*self.tables)

    @functools.cached_property
    def equal_roles(self) -> dict[int, int]:
        """Student id → id of the teacher's control token with the same role or name."""
        if self.is_same:
            return {i: i for i in self.tables[0].control_names}
        return match_roles(*self.tables)

    @functools.cached_property
    def partners(self) -> NDArray[np.int64]:
        """The teacher id with the same bytes or role as each student id, or −1.

        The array is `[V_student]`, int64. Unlike in `shared`, several student ids can have the same
        partner.
        """
        partners = self.equal_bytes.copy()
        partners[list(self.equal_roles)] = list(self.equal_roles.values())
        return partners

    @functools.cached_property
    def shared(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The teacher id for each student id and the student id for each teacher id, or −1.

        The partners are one-to-one. The arrays are `[V_student]` and `[V_teacher]`, int64. First, a
        student token and a teacher token with equal bytes are paired if the tokenizers emit both
        tokens. Then, tokens with equal roles are paired in the order of their ids.
        """
        to_teacher, to_student = self.equal_bytes, self.reversed.equal_bytes
        to_teacher, to_student = _mutual(to_teacher, to_student), _mutual(to_student, to_teacher)
        reversed_roles = ((s, t) for t, s in self.reversed.equal_roles.items())
        for s, t in (*self.equal_roles.items(), *reversed_roles):
            if to_teacher[s] < 0 and to_student[t] < 0:
                to_teacher[s], to_student[t] = t, s
        return to_teacher, to_student

    @functools.cached_property
    def near_equivalents(self) -> dict[int, int]:
        """Student id → near-equivalent teacher id, for ids without an equal teacher token."""
        return match_relaxed(*self.tables)

    @functools.cached_property
    def upper_case(self) -> NDArray[np.int64]:
        """Student ids with upper-case letters that a lower-case teacher cannot spell, int64.

        The array is empty if the teacher's vocabulary has upper-case letters.
        """
        student, teacher = self.tables
        if teacher.has_upper_case:
            return np.zeros(0, np.int64)
        texts = (token.decode("utf-8", "ignore") for token in student.tokens())
        return np.flatnonzero([text != text.lower() for text in texts])

    def pieces(self, student_ids: NDArray[np.int64], progress: Progress = silent) -> Pieces:
        """Spell student tokens with the teacher's tokenizer, as parts of a longer text.

        `student_ids` are distinct ids of text tokens, `[n]`, int64. Spellings are cached.

        >>> import numpy as np
        >>> xtok.load_pair("bytes", "bytes").pieces(np.array([97, 98])).ids.tolist()
        [97, 98]
        """
        ids = student_ids.tolist()
        if missing := [i for i in ids if i not in self._spellings]:
            self._spell(missing, progress)
        pieces = [self._spellings[i] or [] for i in ids]
        counts = np.fromiter(map(len, pieces), np.int64, len(pieces))
        return Pieces(np.fromiter(chain.from_iterable(pieces), np.int32), counts)

    def _spell(self, student_ids: list[int], progress: Progress) -> None:
        teacher, tokens = self.teacher_tokenizer or self.tokenizers[1], self.tables[0].tokens()
        label = f"spelling tokens in {teacher.vocabulary.model_id}"
        with progress(label, len(student_ids)) as advance:
            for start in range(0, len(student_ids), _TOKENS_AT_ONCE):
                chunk = student_ids[start : start + _TOKENS_AT_ONCE]
                pieces = teacher.segment_batch([tokens[i] for i in chunk])
                self._spellings.update(zip(chunk, pieces, strict=True))
                advance(len(chunk))

    @functools.cached_property
    def is_same(self) -> bool:
        """Whether both vocabularies have the same tokens. The widths can differ."""
        return same_tokens(*self.tables)

    def in_form(
        self, form: TokenForm, ignored: tuple[Collection[int], Collection[int]] = ((), ())
    ) -> Pair:
        """Return a copy with tokens in a form of `Decoded`. Ignored ids are UNUSED.

        A pair from a map does not support the form `raw`, because maps contain no display strings.
        """
        key = form, *map(frozenset, ignored)
        if key == ("bytes", frozenset(), frozenset()):
            return self
        if key not in self._forms:
            student, teacher = (
                replace(v, table=_in_form(require_table(v), tokenizer, form, frozenset(ids)))
                for (v, tokenizer), ids in zip(self._with_tokenizers(), ignored, strict=True)
            )
            self._forms[key] = replace(self, student=student, teacher=teacher)
        return self._forms[key]


def _mutual(partners: NDArray[np.int64], back: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where((partners >= 0) & (back[partners] == np.arange(len(partners))), partners, -1)


def require_table(vocabulary: Vocabulary) -> TokenTable:
    """Return the token table. Raises an `XtokError` if the map contains no tokens."""
    if vocabulary.table is None:
        raise XtokError(
            f"the map has no token table for {vocabulary.model_id}: xtok did not create the map",
            hint="give both models with {option}",
            parameter="pair",
        )
    return vocabulary.table


def _in_form(
    table: TokenTable, tokenizer: Tokenizer | None, form: TokenForm, ignored: Collection[int]
) -> TokenTable:
    if tokenizer is not None:
        return tokenizer.table_as(form, ignore=ignored)
    if form == "raw":
        raise XtokError(
            "the map was built with the token form 'raw', but contains no display strings",
            hint="give both models with {option}",
            parameter="pair",
        )
    if form == "bytes" and not ignored:
        return table
    return Decoded(table.entries(), form=form, ignore=ignored).table(len(table)).like(table)
