"""A data collator: texts or conversations in, both tokenizations and their alignment out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xtok.alignment.aligner import AlignmentBatch, TokenAligner, shift_to_predictions
from xtok.alignment.chats import align_chat
from xtok.alignment.retokenize import Retokenizer
from xtok.conversation import render
from xtok.conversation.batching import pad
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer, from_transformers
from xtok.vocab.table import TokenType

Sample = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]

IGNORED = -100
"""The label of what is no target, as PyTorch's cross-entropy has it."""


class _Row(NamedTuple):
    """One sample on one side: ids, which of them are targets, and their chunks."""

    ids: NDArray[Any]
    is_target: NDArray[np.bool_]
    chunk: NDArray[Any]


class _Run(NamedTuple):
    """Neighbouring tokens of the student that are all targets, or all not."""

    ids: list[int]
    is_target: bool


class DistillationCollator:
    """Turns samples into a batch for a student and its teachers, for a `DataLoader`.

    A sample is a text, a list of messages, or a mapping with `text`, or with `messages` and maybe
    `tools`. Texts are spelled byte for byte, control tokens in them as text; conversations are
    rendered by each side's chat template, and only what the assistant wrote is a target. Rows are
    padded on the right; a chunk that `max_length` cuts is dropped. The collator holds no tensors,
    and can be pickled.

    The batch is a dict: `input_ids`, `attention_mask`, `labels`, int64 `[B, T_s]`, and `teachers`,
    one dict for each teacher with the same three, `[B, T_t]`, and `alignment`, an `AlignmentBatch`.
    Labels are those of the tokens themselves (-100 where they are no target), as Hugging Face
    models take them, and so are chunk ids: **shift the alignment** before a loss, with `prepare` or
    `xtok.shift_to_predictions`. Without this, losses are wrong silently. In conversations, chunks
    that are not targets on both sides are not valid.

    Args:
        student: an xtok `Tokenizer`, or a fast Hugging Face tokenizer.
        teachers: one, or a list; an empty list for a student that learns alone.
        max_length: tokens of a sample that are kept, on each side; all if None.
        bos: begin texts with the bos token, where a tokenizer has one.
        eos: end texts with the eos token, where a tokenizer has one.
        max_comb_len: as in `TokenAligner`.
        student_template: chat template of the student, if not its own.
        teacher_templates: one chat template per teacher; None is the teacher's own.

    Raises:
        ValueError: if there is not a template for each teacher.
    """

    def __init__(
        self,
        student: Any,
        teachers: Any,
        *,
        max_length: int | None = None,
        bos: bool = True,
        eos: bool = False,
        max_comb_len: int = 4,
        student_template: str | Path | None = None,
        teacher_templates: Sequence[str | Path | None] | None = None,
    ) -> None:
        several = list(teachers) if isinstance(teachers, list | tuple) else [teachers]
        templates = list(teacher_templates or [None] * len(several))
        if len(templates) != len(several):
            raise ValueError(f"{len(several)} teachers, {len(templates)} templates for them")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is {max_length}, and must be at least 1")
        self.student = _tokenizer(student)
        self.teachers = [_tokenizer(teacher) for teacher in several]
        self.aligners = [
            TokenAligner(self.student, teacher, max_comb_len=max_comb_len)
            for teacher in self.teachers or [self.student]
        ]
        self._retokenizers = [Retokenizer(self.student, teacher) for teacher in self.teachers]
        self.max_length, self.bos, self.eos = max_length, bos, eos
        self.student_template, self.teacher_templates = student_template, templates

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the batch of the samples.

        Raises:
            XtokError: if a vocabulary cannot spell a text, or a conversation cannot be rendered.
            ValueError: if there are no samples, or one is something else.
        """
        if not samples:
            raise ValueError("a batch needs samples")
        chats = [_messages(sample) for sample in samples]
        ours = self._spell(self.student, samples, chats)
        sides = []
        for number, teacher in enumerate(self.teachers or [self.student]):
            theirs = self._spell(teacher, samples, chats)
            aligned = [
                self._align(number, s, t) if chat is None else self._align_chat(number, chat)
                for s, t, chat in zip(ours, theirs, chats, strict=True)
            ]
            rows = [row[0] for row in aligned], [row[1] for row in aligned]
            side = _pad(rows[1], _pad_id(teacher))
            side["alignment"] = _batch(*rows, [row[2] for row in aligned])
            sides.append(side)
        own = _pad(rows[0], _pad_id(self.student))
        return {**own, "teachers": sides[: len(self.teachers)]}

    def from_student_ids(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        *,
        prompts: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> dict[str, Any]:
        """Return the batch of rows that are the student's ids already, as on-policy training has.

        The teachers read the bytes of the student's tokens, spelled in their own (`Retokenizer`).
        Prompt and completion are spelled apart, so that no token of a teacher reaches across. Only
        targets are aligned.

        Args:
            input_ids: int64 `[B, T]`, padded on any side.
            attention_mask: `[B, T]`, 0 where an id is padding.
            labels: int64 `[B, T]`, -100 where an id is no target: prompts and padding.
            prompts: for each row None, or the conversation that its prompt is: `messages`, and
                maybe `variables` of the template. Teachers then read the conversation by their own
                template instead of the bytes of the student's.

        Raises:
            XtokError: if a teacher cannot spell the bytes, or render a conversation.
            ValueError: for shapes that do not fit, and ids that the student does not have.
        """
        shape = tuple(input_ids.shape)
        if len(shape) != 2 or any(tuple(x.shape) != shape for x in (attention_mask, labels)):
            raise ValueError(
                f"input_ids {list(shape)}, attention_mask {list(attention_mask.shape)} and labels "
                f"{list(labels.shape)} are not all [B, T]"
            )
        if prompts is not None and len(prompts) != shape[0]:
            raise ValueError(f"{len(prompts)} prompts for {shape[0]} rows")
        ids, mask, target = (x.cpu().numpy() for x in (input_ids, attention_mask, labels))
        rows = [
            _runs(row[keep], is_target[keep])
            for row, keep, is_target in zip(ids, mask != 0, target != IGNORED, strict=True)
        ]
        wanted = (mask != 0) & (target != IGNORED)
        own = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        sides = [
            self._read_by(number, rows, ids, wanted, prompts or [None] * len(rows))
            for number in range(len(self.teachers))
        ]
        return {**own, "teachers": sides}

    def _read_by(
        self,
        number: int,
        rows: Sequence[Sequence[_Run]],
        ids: NDArray[Any],
        wanted: NDArray[np.bool_],
        prompts: Sequence[Mapping[str, Any] | None],
    ) -> dict[str, Any]:
        """Return a teacher's side of rows of the student's."""
        teacher, table = self.teachers[number], self.student.table
        spelled = iter(self._retokenizers[number]([run.ids for row in rows for run in row]))
        theirs: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = []
        for row, prompt in zip(rows, prompts, strict=True):
            parts = [(next(spelled), run.is_target) for run in row]
            theirs.append(self._teacher_row(number, parts, prompt))
        # Ids that stand for nothing, which a model wider than its tokenizer may write, have no
        # chunk.
        special = np.isin(table.types, [TokenType.CONTROL, TokenType.UNKNOWN])
        stands = (table.lengths > 0) | special
        wanted = wanted & stands[np.where(wanted, ids, 0)]
        alignment = self.aligners[number].align_ids(
            ids[wanted],
            _bounds(wanted.sum(1)),
            np.concatenate([own_ids[is_target] for own_ids, is_target in theirs]),
            _bounds(np.array([is_target.sum() for _, is_target in theirs])),
        )
        chunk = np.full(ids.shape, -1, np.int32)
        chunk[wanted] = alignment.student_chunk_id
        student_rows = [_Row(*row) for row in zip(ids, wanted, chunk, strict=True)]
        ends = np.cumsum([is_target.sum() for _, is_target in theirs])[:-1]
        side_rows = []
        numbers = np.split(alignment.teacher_chunk_id, ends)
        for (own_ids, is_target), chunk_of_targets in zip(theirs, numbers, strict=True):
            chunk_of = np.full(len(own_ids), -1, np.int32)
            chunk_of[is_target] = chunk_of_targets
            side_rows.append(_Row(own_ids, is_target, chunk_of))
        correct = np.split(alignment.is_correct, np.cumsum(alignment.num_chunks)[:-1])
        side = _pad(side_rows, _pad_id(teacher))
        side["alignment"] = _batch(student_rows, side_rows, correct)
        return side

    def _teacher_row(
        self,
        number: int,
        parts: list[tuple[list[int], bool]],
        prompt: Mapping[str, Any] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return a row's ids and which are targets, with the teacher's own beginning."""
        teacher = self.teachers[number]
        if prompt is not None:
            conversation = render(
                teacher,
                prompt["messages"],
                add_generation_prompt=True,
                template=self.teacher_templates[number],
                variables=prompt.get("variables"),
            )
            while parts and not parts[0][1]:
                parts = parts[1:]
            parts = [(conversation.ids.tolist(), False), *parts]
        else:
            begin = teacher.table.roles.get("bos", ())[:1] if self.bos else ()
            first = next((ids[0] for ids, _ in parts if ids), None)
            if begin and first not in teacher.table.roles["bos"]:
                parts = [(list(begin), False), *parts]
        ids = [i for part, _ in parts for i in part][: self.max_length]
        flags = [flag for part, flag in parts for _ in part][: self.max_length]
        return np.array(ids, np.int64), np.array(flags, np.bool_)

    def _spell(
        self, tokenizer: Tokenizer, samples: Sequence[Sample], chats: Sequence[Any]
    ) -> list[NDArray[np.int64]]:
        """Return the ids of the texts; none for conversations."""
        texts = ["" if chat else _text(s) for s, chat in zip(samples, chats, strict=True)]
        roles = tokenizer.table.roles
        begin, end = (
            list(roles.get(role, ())[:1]) if wanted else []
            for role, wanted in (("bos", self.bos), ("eos", self.eos))
        )
        rows = []
        spelled = tokenizer.segment_batch([text.encode() for text in texts])
        for text, ids in zip(texts, spelled, strict=True):
            if ids is None:
                raise XtokError(
                    f"{tokenizer.vocabulary.model_id} cannot spell the text {text[:40]!r}",
                    hint="leave the text out, or use a tokenizer with byte tokens",
                )
            rows.append(np.array([*begin, *ids, *end], np.int64)[: self.max_length])
        return rows

    def _align(
        self, number: int, ours: NDArray[np.int64], theirs: NDArray[np.int64]
    ) -> tuple[_Row, _Row, NDArray[np.bool_]]:
        alignment = self.aligners[number].align_document(ours, theirs)
        student, teacher = (
            _Row(ids, np.ones(len(ids), np.bool_), chunk)
            for ids, chunk in (
                (ours, alignment.student_chunk_id),
                (theirs, alignment.teacher_chunk_id),
            )
        )
        return student, teacher, alignment.is_correct

    def _align_chat(
        self, number: int, chat: Mapping[str, Any]
    ) -> tuple[_Row, _Row, NDArray[np.bool_]]:
        teacher, template = self.student, self.student_template
        if self.teachers:
            teacher, template = self.teachers[number], self.teacher_templates[number]
        aligned = align_chat(
            self.aligners[number],
            self.student,
            teacher,
            chat["messages"],
            tools=chat.get("tools"),
            student_template=self.student_template,
            teacher_template=template,
        )
        alignment, end = aligned.alignment, self.max_length
        sides = (
            (aligned.student, alignment.student_chunk_id),
            (aligned.teacher, alignment.teacher_chunk_id),
        )
        kept = np.ones(len(alignment.is_correct), np.bool_)
        for side, chunk in sides:
            is_outside = ~side.assistant_mask
            is_outside[len(is_outside) if end is None else end :] = True
            kept[chunk[(chunk >= 0) & is_outside]] = False
        number_of = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)  # chunk −1 stays −1
        rows = [
            _Row(side.ids[:end].astype(np.int64), side.assistant_mask[:end], number_of[chunk[:end]])
            for side, chunk in sides
        ]
        return rows[0], rows[1], alignment.is_correct[kept]


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Move a batch, and everything in it, to a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, AlignmentBatch):
        return AlignmentBatch(**to_device(vars(batch), device))
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list):
        return [to_device(value, device) for value in batch]
    return batch


def prepare(batch: dict[str, Any], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Move a batch to a device, and add what losses take, shifted to the predicting positions.

    Each side has `targets`, its labels of the next position; each teacher also `shifted`, its
    alignment as `shift_to_predictions` gives it.
    """
    moved: dict[str, Any] = to_device(batch, device)
    for side in (moved, *moved["teachers"]):
        side["targets"] = predicted(side["labels"])
    for side in moved["teachers"]:
        side["shifted"] = shift_to_predictions(side["alignment"])
    return moved


def predicted(ids: torch.Tensor, fill: int = IGNORED) -> torch.Tensor:
    """Return what each position predicts, `[B, T]`: the id, label or mask of the next one."""
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=fill)


def _runs(ids: NDArray[Any], is_target: NDArray[np.bool_]) -> list[_Run]:
    cuts = np.flatnonzero(np.diff(is_target)) + 1
    flags = [bool(part[0]) for part in np.split(is_target, cuts) if len(part)]
    return [_Run(p.tolist(), f) for p, f in zip(np.split(ids, cuts), flags, strict=False)]


def _bounds(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _tokenizer(given: Any) -> Tokenizer:
    return given if isinstance(given, Tokenizer) else from_transformers(given)


def _messages(sample: Sample) -> Mapping[str, Any] | None:
    """Return a conversation as a mapping, and None for a text."""
    if isinstance(sample, str) or (isinstance(sample, Mapping) and "text" in sample):
        return None
    if isinstance(sample, Mapping) and "messages" in sample:
        return sample
    if isinstance(sample, Sequence) and all(isinstance(m, Mapping) for m in sample):
        return {"messages": sample}
    raise ValueError(f"a sample is {type(sample).__name__}: neither a text nor a conversation")


def _text(sample: Sample) -> str:
    text = sample["text"] if isinstance(sample, Mapping) else sample
    if not isinstance(text, str):
        raise ValueError(f"a text is {type(text).__name__}, and must be a str")
    return text


def _pad_id(tokenizer: Tokenizer) -> int:
    roles = tokenizer.table.roles
    return next((roles[role][0] for role in ("pad", "eos") if roles.get(role)), 0)


def _pad(rows: Sequence[_Row], pad_id: int) -> dict[str, Any]:
    labels = [np.where(row.is_target, row.ids, IGNORED) for row in rows]
    ones = [np.ones(len(row.ids), np.int64) for row in rows]
    return {
        "input_ids": _stack([row.ids for row in rows], pad_id),
        "attention_mask": _stack(ones, 0),
        "labels": _stack(labels, IGNORED),
    }


def _stack(rows: Sequence[NDArray[Any]], fill: Any) -> torch.Tensor:
    return torch.from_numpy(pad(rows, fill, padding_side="right"))


def _batch(
    ours: Sequence[_Row], theirs: Sequence[_Row], correct: Sequence[NDArray[np.bool_]]
) -> AlignmentBatch:
    """Stack the alignments of rows into one of a batch."""
    valid, exact = [], ([], [])  # type: ignore[var-annotated]
    for s, t, right in zip(ours, theirs, correct, strict=True):
        sizes = [
            np.bincount(row.chunk[row.chunk >= 0], minlength=len(right))[: len(right)]
            for row in (s, t)
        ]
        valid.append((sizes[0] > 0) & (sizes[1] > 0))
        single = np.append(right & (sizes[0] == 1) & (sizes[1] == 1), False)
        for masks, row in zip(exact, (s, t), strict=True):
            masks.append(single[row.chunk])
    return AlignmentBatch(
        pair_valid=_stack(valid, False),
        pair_is_correct=_stack(correct, False),
        student_exact_partition_mask=_stack(exact[0], False),
        teacher_exact_partition_mask=_stack(exact[1], False),
        student_chunk_id=_stack([row.chunk.astype(np.int64) for row in ours], -1),
        teacher_chunk_id=_stack([row.chunk.astype(np.int64) for row in theirs], -1),
        num_chunks=torch.tensor([len(right) for right in correct]),
    )
