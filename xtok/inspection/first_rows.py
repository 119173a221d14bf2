"""The first rows of a run's data: ids and masks beside the libraries', and what is aligned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.shards import Paths
from xtok.alignment.aligner import AlignmentBatch, TokenAligner
from xtok.alignment.chats import align_rendered
from xtok.building.counting.texts import check_texts, read_samples
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.teacher_side import SideChat, SideText, teachers_chats
from xtok.conversation.templates import is_missing
from xtok.errors import XtokError
from xtok.inspection import Check
from xtok.inspection.chat_audit import ChatAudit, audit_chats
from xtok.tokenizers import Tokenizer, library_differences
from xtok.tokenizers.display import percent, plural
from xtok.tokenizers.pairs import Pair

ENOUGH = 0.5
"""The share of targets in chunks, and of chunks with equal bytes, below which a pair is doubtful.
Pairs of the tests have 0.9 and more; uncased and Unicode-normalizing sides have less."""

NUM_ROWS = 64
"""Of a file, what `doctor` compares with the libraries."""

_SHOWN = 3


def side_differences(
    tokenizer: Tokenizer,
    samples: Sequence[SideText | SideChat],
    rows: Sequence[Sequence[int]],
    *,
    template: str | Path | None = None,
) -> list[str]:
    """Return where the ids, roles and masks of one side differ from those of its library.

    Args:
        tokenizer: of this side.
        samples: what it reads. Texts with a context are not compared: no library has them.
        rows: the ids of each sample in a batch, maybe cut.
        template: the side's chat template, if not its tokenizer's own.
    """
    of_texts = {
        number: sample.text
        for number, sample in enumerate(samples)
        if isinstance(sample, SideText) and not sample.context
    }
    differences = library_differences(
        tokenizer, [*of_texts.values()], [rows[number] for number in of_texts]
    )
    if chats := [sample.chat for sample in samples if isinstance(sample, SideChat)]:
        differences += chat_differences(audit_chats(tokenizer, chats, template=template))
    more = [f"{len(differences) - _SHOWN} more like these"] if len(differences) > _SHOWN else []
    name = tokenizer.vocabulary.model_id
    return [f"{name}: {line}" for line in (*differences[:_SHOWN], *more)]


def chat_differences(chats: ChatAudit) -> list[str]:
    """Return where conversations differ from what the library makes of them."""
    others = ("", chats.other_ids), ("the targets of ", chats.other_masks)
    lines = [
        f"{what}conversation {row} {'are' if what else 'is'} {both}"
        for what, rows in others
        for row, both in (rows or {}).items()
    ]
    return [*lines, *chats.errors]


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """How much of some rows the student can learn from one teacher; all are counts."""

    targets: int  # of the student's tokens, those that it learns
    in_chunks: int  # of these
    chunks: int
    equal: int  # of these, with the same bytes on both sides, or a role that both have
    ends: int  # targets that end a turn or a text
    ends_in_chunks: int
    begins: int  # rows that begin with bos on both sides, where that is a target
    begins_in_chunks: int

    @property
    def share(self) -> float:
        """The targets that are in a chunk, of all."""
        return self.in_chunks / max(1, self.targets)

    def differences(self) -> Iterator[str]:
        """Yield what a student would not learn from this teacher."""
        if not self.targets:
            yield "there is no target: the student learns nothing of these rows"
            return
        if self.share < ENOUGH:
            yield f"{self.in_chunks} of {self.targets} targets are in a chunk with the teacher"
        if self.equal < ENOUGH * self.chunks:
            yield f"{self.equal} of {self.chunks} chunks have the same bytes on both sides"
        if self.ends_in_chunks < ENOUGH * self.ends:
            what = "ends of turns or texts are in a chunk: the student does not learn to stop"
            yield f"{self.ends_in_chunks} of {self.ends} {what}"
        if self.begins_in_chunks < self.begins:
            yield f"{self.begins_in_chunks} of {plural(self.begins, 'bos token')} are in a chunk"


def aligned(
    tokenizers: tuple[Tokenizer, Tokenizer],
    labels: NDArray[Any],
    teacher_ids: NDArray[Any],
    alignment: AlignmentBatch,
) -> Aligned:
    """Count what is aligned in a batch.

    Args:
        tokenizers: the student's and the teacher's.
        labels: the student's, of the tokens themselves, `[B, T_s]`; below 0 for no target.
        teacher_ids: `[B, T_t]`.
        alignment: of arrays, not shifted.
    """
    chunk, valid, correct = (
        np.asarray(x)
        for x in (alignment.student_chunk_id, alignment.pair_valid, alignment.pair_is_correct)
    )
    student, teacher = tokenizers
    inside = (chunk >= 0) & np.take_along_axis(valid, np.maximum(chunk, 0), axis=1)
    is_target = labels >= 0
    ends = np.isin(labels, [*_ids(student, "eos"), *_ids(student, "turn_end")])
    both_begin = np.isin(labels[:, 0], [*_ids(student, "bos")])
    both_begin &= np.isin(teacher_ids[:, 0], [*_ids(teacher, "bos")])
    ends[:, 0] = is_target[:, 0] = False  # nothing predicts the first
    return Aligned(
        targets=int(is_target.sum()),
        in_chunks=int((is_target & inside).sum()),
        chunks=int(valid.sum()),
        equal=int((valid & correct).sum()),
        ends=int(ends.sum()),
        ends_in_chunks=int((ends & inside).sum()),
        begins=int(both_begin.sum()),
        begins_in_chunks=int((both_begin & inside[:, 0]).sum()),
    )


def _ids(tokenizer: Tokenizer, role: str) -> Sequence[int]:
    return tokenizer.table.roles.get(role, ())


def first_rows(texts: Paths, field: str = "text") -> list[SideText | SideChat]:
    """Read the first rows of files of texts or conversations.

    Raises:
        XtokError: if one cannot be read, or has neither the field nor `messages`.
    """
    rows: list[SideText | SideChat] = []
    for place, value in islice(read_samples(texts), NUM_ROWS):
        text = value.get(field) if isinstance(value, Mapping) else value
        if isinstance(text, str):
            rows.append(SideText(text))
        elif isinstance(value, Mapping) and "messages" not in value:
            check_texts(texts, field)  # it names the fields that there are; nulls are left out
        else:
            rows.append(SideChat(chat_record(value, place)))
    return rows


def row_checks(
    pair: Pair,
    rows: Sequence[SideText | SideChat],
    templates: Sequence[str | Path | None] = (None, None),
) -> Iterator[Check]:
    """Report what training makes of some rows, without a model.

    Of each side what is dropped, keys that nobody reads, roles, targets, and where ids and masks
    differ from its library's; of both how much is aligned.
    """
    texts = [row.text for row in rows if isinstance(row, SideText)]
    chats = [row.chat for row in rows if isinstance(row, SideChat)]
    for tokenizer, template in dict.fromkeys(zip(pair.tokenizers, templates, strict=True)):
        name = f"first rows, {tokenizer.vocabulary.model_id}"
        differences = library_differences(tokenizer, texts)
        counted = [plural(len(texts), "text")] if texts else []
        if chats:
            found = audit_chats(tokenizer, chats, template=template)
            differences += chat_differences(found)
            counted.append(plural(len(chats), "conversation"))
            counted += [plural(n, "message") + f" of {role}" for role, n in found.roles.items()]
            counted.append(f"{found.num_targets:,} of {found.num_tokens:,} tokens are targets")
            for note, count in found.notes.items():
                yield Check(name, "note", f"{count:,} of {len(chats):,}: {note}")
        for line in differences[:_SHOWN]:
            yield Check(name, "warning", line)
        if not differences:
            yield Check(name, "ok", f"{', '.join(counted)}: as the library has them")
    yield from _teachers_own(pair.tokenizers[1], chats, templates[1])
    counts = _aligned_rows(pair, rows, templates)
    lines = [*counts.differences()] if counts else []
    for line in lines:
        yield Check("first rows, aligned", "warning", line)
    if counts and not lines:
        shares = [percent(counts.share), percent(counts.equal / max(1, counts.chunks))]
        message = f"{shares[0]} of the targets are in a chunk, {shares[1]} of these of equal bytes"
        yield Check("first rows, aligned", "ok", message)


def _teachers_own(
    teacher: Tokenizer, chats: Sequence[ChatRecord], template: str | Path | None
) -> Iterator[Check]:
    """Report how many conversations a teacher reads otherwise, and how much longer these are."""
    name, sizes = "teacher_messages", []
    for chat in chats:
        if is_missing(chat.teacher_messages):
            continue
        try:
            sides = SideChat(chat), *teachers_chats(chat, 1)
            sizes.append([len(side.render(teacher, template).ids) for side in sides])
        except XtokError as error:
            yield Check(name, "warning", error.message)
    if sizes:
        usual, own = map(sum, zip(*sizes, strict=True))
        message = f"{len(sizes):,} of {plural(len(chats), 'conversation')} have them, with which "
        yield Check(
            name, "ok", f"{message}the teacher reads {own / usual:.1f} times as many tokens there"
        )


def _aligned_rows(
    pair: Pair, rows: Sequence[SideText | SideChat], templates: Sequence[str | Path | None]
) -> Aligned | None:
    """Count what is aligned in rows, as far as both sides can be rendered."""
    aligner, found = TokenAligner(pair), []
    for row in rows:
        with suppress(XtokError):
            if isinstance(row, SideText):
                sides = [tokenizer.encode(row.text).ids for tokenizer in pair.tokenizers]
                flat, mask = aligner.align_document(*sides), np.ones(len(sides[0]), np.bool_)
            else:
                ours, theirs = map(row.render, pair.tokenizers, templates)
                sides, mask = [ours.ids, theirs.ids], ours.assistant_mask
                flat = align_rendered(aligner, ours, theirs)
            padded = flat.padded(*(np.ones((1, len(ids)), np.bool_) for ids in sides))
            labels = np.where(mask, sides[0], -100)
            found.append(aligned(pair.tokenizers, labels[None], sides[1][None], padded))
    names = [field.name for field in fields(Aligned)]
    sums = {name: sum(getattr(one, name) for one in found) for name in names}
    return Aligned(**sums) if found else None
