"""A data collator: texts or conversations in, both tokenizations and their alignment out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xtok.alignment.aligner import (
    AlignmentBatch,
    FlatAlignment,
    PaddedAlignment,
    TokenAligner,
    shift_to_predictions,
)
from xtok.alignment.retokenize import Retokenizer
from xtok.conversation.teacher_side import (
    SideChat,
    SideText,
    for_each_teacher,
    prompt_of,
    require_used,
)
from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers import pair as pair_of
from xtok.tokenizers.display import listed
from xtok.tokenizers.pairs import Pair
from xtok.training.losses.chunks import Chunks, NumberedAlignment
from xtok.training.rows import IGNORED, check_length, stack
from xtok.training.samples import (
    Part,
    Sample,
    SampleRow,
    align_rows,
    align_targets,
    parts_of,
    read_sample,
    row_of,
    scored_row,
)
from xtok.training.topk_collator import StoredTopK


@dataclass(frozen=True)
class Samples:
    """What rows of a batch were made of, to compare them with their library's."""

    rows: Sequence[SideText | SideChat]


class DistillationCollator:
    """Turns samples into a batch for a student and its teachers, for a `DataLoader`.

    A sample is a text, a list of messages, or a mapping with `text`, or with `messages` and maybe
    `tools` and `chat_template_kwargs`, the template's variables. Texts have the ids of each side's
    own library; conversations are rendered by each side's chat template, and only what the
    assistant wrote is a target. Rows are padded on the right; a chunk that `max_length` cuts is
    dropped. The collator holds no tensors, and can be pickled.

    A teacher may read more than the student. `teacher_context` beside `text` stands before it, for
    the teachers alone: after their bos token, and spelled apart, so that no token reaches across.
    `teacher_messages` beside `messages` is the conversation as the teachers read it: messages, or
    an object with `messages` and other `tools` or `chat_template_kwargs`. Its last answers must be
    those of `messages`, in their order; everything else may differ, and is not a target. Both may
    be a list with one for each teacher, None for a teacher that reads what the student does.
    `max_length` cuts them from the left, up to the first answer, before it cuts the rest.

    The batch is a dict: `input_ids`, `attention_mask`, `labels`, int64 `[B, T_s]`, and `teachers`,
    one dict for each teacher with the same three, `[B, T_t]`, and `alignment`, an `AlignmentBatch`.
    Each side has its `samples`, for the audit of a first batch.
    Labels are those of the tokens themselves (-100 where they are not targets), as Hugging Face
    models take them, and so are chunk ids: **shift the alignment** before a loss, with `prepare` or
    `xtok.shift_to_predictions`. Without this, losses are wrong silently. In conversations, chunks
    that are not targets on both sides are not valid.

    For `alm` from one teacher that does not run, a sample is a mapping of lists, a value for each
    of the teacher's tokens: `input_ids`, `realized_logprob` (the natural log-probability of the
    token itself, None where there is none, as for the first) and maybe `loss_mask`. The student
    reads the teacher's bytes, spelled in its own tokens.

    >>> batch = xtok.DistillationCollator("bytes", "bytes")(["hi", "h"])
    >>> [teacher] = batch["teachers"]
    >>> batch["labels"].tolist(), teacher["alignment"].num_chunks.tolist()
    ([[104, 105], [104, -100]], [2, 1])

    Args:
        student: an xtok `Tokenizer`, or a fast Hugging Face tokenizer.
        teachers: one, or a list; an empty list for a student that learns alone.
        max_length: tokens of a sample that are kept, on each side; all if None.
        bos: begin texts with the bos token that a tokenizer declares, but not twice.
        eos: end texts with the eos token that a tokenizer declares, but not twice.
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
        check_length(max_length)
        self.student = load_tokenizer(student)
        self.teachers = [load_tokenizer(teacher) for teacher in several]
        # For each teacher, the pair of the student and this teacher.
        self.pairs: list[Pair] = [pair_of(self.student, teacher) for teacher in self.teachers]
        self.aligners = [TokenAligner(pair, max_comb_len) for pair in self.pairs]
        self._retokenizers = [Retokenizer(pair) for pair in self.pairs]
        self.max_length, self.bos, self.eos = max_length, bos, eos
        self.student_template, self.teacher_templates = student_template, templates

    @property
    def tokenizer(self) -> Any:
        """The student's, as Transformers has it: trainers save it with each checkpoint."""
        return self.student.library

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the batch of the samples.

        Raises:
            XtokError: if a vocabulary cannot spell a text, a conversation cannot be rendered, or
                teachers read other answers.
            ValueError: if there are no samples, or one is something else; and for log-probabilities
                that do not fit their ids, are above 0, or are of the next tokens.
        """
        if not samples:
            raise ValueError("a batch needs samples")
        rows = [s for s in samples if isinstance(s, Mapping) and "input_ids" in s]
        if len(rows) == len(samples):
            return self._logprob_batch(rows)
        read = [read_sample(s, f"sample {n}", len(self.teachers)) for n, s in enumerate(samples)]
        of_student, *of_teachers = map(list, zip(*read, strict=True))
        ours = self._rows(self.student, self.student_template, of_student)
        if any(row.is_target.any() and not row.is_target[: self.max_length].any() for row in ours):
            note = f"max_length {self.max_length} cuts all targets of a sample: nothing is trained"
            warnings.warn(note, stacklevel=2)
        batch = _pad(ours, self.student, self.max_length)
        batch |= {"samples": Samples(of_student), "teachers": []}
        for number, (teacher, given) in enumerate(zip(self.teachers, of_teachers, strict=True)):
            theirs = self._rows(teacher, self.teacher_templates[number], given)
            self._warn_of_cuts(teacher, theirs)
            side = self._side(number, theirs, self._aligned(number, ours, theirs), batch)
            batch["teachers"].append({**side, "samples": Samples(given)})
        return batch

    def from_student_ids(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        *,
        teacher_messages: Sequence[Any] | None = None,
        teacher_context: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Return the batch of rows that are the student's ids already, as on-policy training has.

        The teachers read the bytes of the student's tokens, spelled in their own (`Retokenizer`).
        Prompt and completion are spelled apart, so that no token of a teacher reaches across. Only
        targets are aligned, each turn of them alone. `max_length` cuts the teachers' rows, first
        what they alone read. A batch with padding on the left also has `position_ids`, `[B, T]`,
        which count each row's own ids.

        Args:
            input_ids: int64 `[B, T]`, padded on any side.
            attention_mask: `[B, T]`, 0 where an id is padding.
            labels: int64 `[B, T]`, -100 where an id is not a target: prompts and padding.
            teacher_messages: what teachers read in place of a row's prompt, by their own template,
                up to its last answer: for each row messages, or an object with `messages` and maybe
                `tools` and `chat_template_kwargs`; a text is read as it is. None is the student's
                prompt, byte for byte; a list has one for each teacher.
            teacher_context: a text for each row that stands before its prompt, for the teachers
                alone; None or a list as well.

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
        given = {"teacher_messages": teacher_messages, "teacher_context": teacher_context}
        for name, values in given.items():
            if values is not None and len(values) != shape[0]:
                raise ValueError(f"{len(values)} {name} for {shape[0]} rows")
        own = [
            [
                for_each_teacher(value, len(self.teachers), name, f"row {n}")
                for n, value in enumerate(values or [None] * shape[0])
            ]
            for name, values in given.items()
        ]
        ids, mask, target = (x.cpu().numpy() for x in (input_ids, attention_mask, labels))
        wanted = (mask != 0) & (target != IGNORED)
        rows = [
            parts_of(row[keep], is_target[keep])
            for row, keep, is_target in zip(ids, mask != 0, wanted, strict=True)
        ]
        batch: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "teachers": [],
        }
        for number, teacher in enumerate(self.teachers):
            theirs = [
                self._teacher_row(number, parts, *(each[n][number] for each in own))
                for n, parts in enumerate(_spelled(self._retokenizers[number], rows))
            ]
            self._warn_of_cuts(teacher, theirs)
            alignments = [
                align_targets(self.aligners[number], row_of(parts), row, self.max_length)
                for parts, row in zip(rows, theirs, strict=True)
            ]
            batch["teachers"].append(self._side(number, theirs, alignments, batch))
        if (mask[:, :1] == 0).any():
            positions = (attention_mask != 0).long().cumsum(1) - 1
            batch["position_ids"] = positions.clamp(min=0)
        return batch

    def _logprob_batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of rows of a teacher's ids and their log-probabilities.

        The teacher's side has `realized_logprob`, `[B, T]`, of the token at that place; `prepare`
        shifts it. Tokens without a log-probability are in no chunk that counts.
        """
        if (count := len(self.teachers)) != 1:
            raise ValueError(f"rows of log-probabilities are of one teacher, and there are {count}")
        for n, row in enumerate(rows):
            require_used(row, f"sample {n}", "input_ids")
        theirs, realized = zip(*map(scored_row, rows), strict=True)
        parts = [parts_of(row.ids, row.is_target) for row in theirs]
        ours = [
            row_of(self._with_bos(self.student, of_row, is_target=True))
            for of_row in _spelled(Retokenizer(self.pairs[0].reversed), parts)
        ]
        batch = _pad(ours, self.student, self.max_length)
        side = self._side(0, theirs, self._aligned(0, ours, theirs), batch)
        side["realized_logprob"] = stack([one[: self.max_length] for one in realized], np.nan)
        return {**batch, "teachers": [side]}

    def _side(
        self,
        number: int,
        rows: Sequence[SampleRow],
        alignments: Sequence[FlatAlignment],
        batch: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return a teacher's part of a batch, and warn if none of its targets is in a chunk."""
        side = _pad(rows, self.teachers[number], self.max_length)
        side["alignment"] = alignment = _alignment_of_batch(alignments, batch, side)
        has_targets = bool((batch["labels"] != IGNORED).any())
        if has_targets and not bool(alignment.pair_valid.any()):
            name = self.teachers[number].vocabulary.model_id
            note = f"no chunk of this batch aligns with {name}, which teaches nothing here"
            warnings.warn(note, stacklevel=3)
        return side

    def _aligned(
        self, number: int, ours: Sequence[SampleRow], theirs: Sequence[SampleRow]
    ) -> list[FlatAlignment]:
        """Align the whole rows of both sides, and cut them."""
        aligner, tokenizers = self.aligners[number], self.pairs[number].tokenizers
        return [
            align_rows(aligner, tokenizers, rows, self.max_length)
            for rows in zip(ours, theirs, strict=True)
        ]

    def _teacher_row(
        self, number: int, parts: list[Part], prompt: Any, context: str | None
    ) -> SampleRow:
        """Return a row as a teacher reads it: with its own prompt, context and beginning."""
        teacher = self.teachers[number]
        if prompt is not None:
            while parts and not parts[0][1]:
                parts = parts[1:]
            parts = [(self._prompt_ids(number, prompt), False), *parts]
        if prompt is None or isinstance(prompt, str):
            parts = self._with_bos(teacher, parts, is_target=False)
        row = row_of(parts).after_bos(teacher.table)
        if prompt is not None:
            row = row.without_prompt()
        return row.behind(teacher.encode(context).ids) if context else row

    def _with_bos(self, tokenizer: Tokenizer, parts: list[Part], *, is_target: bool) -> list[Part]:
        """Return a row that begins with its bos, if texts do."""
        first = next((ids for ids, _ in parts if ids), [])
        begin, _ = tokenizer.table.around(first, bos=self.bos)
        return [(begin, is_target), *parts] if begin else parts

    def _prompt_ids(self, number: int, prompt: Any) -> list[int]:
        """Return what a teacher reads in place of the student's prompt."""
        teacher = self.teachers[number]
        if isinstance(prompt, str):
            return teacher.encode_batch([prompt])[0]
        with _naming("teacher_templates"):
            shown = prompt_of(prompt).render(
                teacher, self.teacher_templates[number], add_generation_prompt=True
            )
        return [*map(int, shown.ids)]

    def _rows(
        self,
        tokenizer: Tokenizer,
        template: str | Path | None,
        samples: Sequence[SideText | SideChat],
    ) -> list[SampleRow]:
        """Return texts and conversations as one side reads them, whole."""
        texts = [s for s in samples if isinstance(s, SideText)]
        encoded = iter(tokenizer.encode_batch([s.text for s in texts]))
        contexts = iter(tokenizer.encode_batch([s.context for s in texts]))
        name = "student_template" if tokenizer is self.student else "teacher_templates"
        rows = []
        for sample in samples:
            if isinstance(sample, SideText):
                inner = next(encoded)
                begin, end = tokenizer.table.around(inner, bos=self.bos, eos=self.eos)
                ids = np.array([*begin, *inner, *end], np.int64)
                row = SampleRow(
                    ids, np.ones(len(ids), np.bool_), text=sample.text, num_before=len(begin),
                    own_bos=int(bool({*inner[:1]} & {*tokenizer.table.roles.get("bos", ())})),
                )  # fmt: skip
                rows.append(row.behind(next(contexts)))
            else:
                with _naming(name):
                    shown = sample.render(tokenizer, template)
                for note in shown.notes:
                    warnings.warn(f"{tokenizer.vocabulary.model_id}: {note}", stacklevel=3)
                row = SampleRow(shown.ids.astype(np.int64), shown.assistant_mask, shown)
                if sample.answers is not None:
                    row = row.after_bos(tokenizer.table).without_prompt()
                rows.append(row)
        return rows

    def _warn_of_cuts(self, teacher: Tokenizer, rows: Sequence[SampleRow]) -> None:
        """Warn of rows whose teacher's context `max_length` cuts."""
        end, short = self.max_length, []
        for number, row in enumerate(rows):
            if row.num_alone and end is not None and len(row.ids) > end:
                has_room = len(row.ids) - row.num_alone < end
                short.append(f"sample {number}" + " (to nothing)" * (not has_room))
        if short:
            note = f"max_length {end} cuts what {teacher.vocabulary.model_id} alone reads from its "
            warnings.warn(f"{note}left: {listed(short)}", stacklevel=3)


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Move a batch, and everything in it, to a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Chunks):
        return batch.to(device)
    if isinstance(batch, AlignmentBatch | StoredTopK):
        moved = copy(batch)
        vars(moved).update(to_device(vars(batch), device))
        return moved
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list):
        return [to_device(value, device) for value in batch]
    return batch


def prepare(batch: dict[str, Any], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Add what losses take, shifted to the predicting positions, and move a batch to a device.

    Each side has `targets`, its labels of the next position, -100 where padding would predict it;
    each teacher also `shifted`, its alignment as `shift_to_predictions` gives it, with its chunks
    numbered; one with `realized_logprob` also `teacher_logprobs`, of the tokens that positions
    predict. What is `stored` stays as it is.
    """
    whole, *teachers = ({**side} for side in (batch, *batch["teachers"]))
    for side in (whole, *teachers):
        if "labels" in side:
            targets = predicted(side["labels"])
            side["targets"] = targets.masked_fill(side["attention_mask"] == 0, IGNORED)
        if "alignment" in side:
            shifted = shift_to_predictions(side["alignment"])
            side["shifted"] = NumberedAlignment(**vars(shifted))
        if "realized_logprob" in side:
            side["teacher_logprobs"] = predicted(side["realized_logprob"], torch.nan)
    moved: dict[str, Any] = to_device({**whole, "teachers": teachers}, device)
    return moved


def predicted(ids: torch.Tensor, fill: float = IGNORED) -> torch.Tensor:
    """Return what each position predicts, `[B, T]`: the id, label or mask of the next one."""
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=fill)


@contextmanager
def _naming(parameter: str) -> Iterator[None]:
    """Let errors about a template name the collator's own parameter."""
    try:
        yield
    except XtokError as error:
        if error.parameter == "template":
            error.renamed(parameter)
        raise


def _spelled(retokenizer: Retokenizer, rows: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """Return rows, part for part, in the other side's tokens."""
    parts = [(ids, not place) for row in rows for place, (ids, _) in enumerate(row)]
    begins = [begins for _, begins in parts]
    spelled = iter(retokenizer([ids for ids, _ in parts], begins=begins))
    return [[(next(spelled), is_target) for _, is_target in row] for row in rows]


def _pad(rows: Sequence[SampleRow], tokenizer: Tokenizer, end: int | None) -> dict[str, Any]:
    """Return rows of a side, cut to a maximum length, as a batch."""
    roles = tokenizer.table.roles
    pad_id = next((roles[role][0] for role in ("pad", "eos") if roles.get(role)), 0)
    kept = [(row, row.kept(end)) for row in rows]
    labels = [np.where(row.is_target, row.ids, IGNORED)[places] for row, places in kept]
    return {
        "input_ids": stack([row.ids[places] for row, places in kept], pad_id),
        "attention_mask": stack([np.ones(len(places), np.int64) for _, places in kept], 0),
        "labels": stack(labels, IGNORED),
    }


def _alignment_of_batch(
    alignments: Sequence[FlatAlignment], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> PaddedAlignment:
    """Return the alignments of rows as one of their padded batch."""
    joined = FlatAlignment(
        *(
            np.concatenate([getattr(alignment, field.name) for alignment in alignments])
            for field in fields(FlatAlignment)
        )
    )
    kept = (side["attention_mask"].cpu().numpy() != 0 for side in (ours, theirs))
    arrays = vars(joined.padded(*kept))
    return PaddedAlignment(**{name: torch.from_numpy(array) for name, array in arrays.items()})
