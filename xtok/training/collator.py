"""The data collator, which tokenizes samples for student and teachers, and aligns the tokens."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from xtok.alignment.aligner import (
    FlatAlignment,
    PaddedAlignment,
    TokenAligner,
    shift_to_predictions,
)
from xtok.alignment.retokenize import Retokenizer
from xtok.conversation.files import ChatRecord
from xtok.conversation.teacher_side import SideText, check_fields, drop_answer, teacher_values
from xtok.errors import naming_template
from xtok.tokenizers import Tokenizer, load_pair, load_tokenizer
from xtok.tokenizers.display import listed
from xtok.tokenizers.pairs import Pair
from xtok.training.batches import Batch, Samples, SideBatch, predicted, shifted_targets
from xtok.training.losses.chunks import NumberedAlignment
from xtok.training.rows import IGNORED, check_length, stack, to_device
from xtok.training.samples import (
    Part,
    Sample,
    SampleRow,
    align_rows,
    align_targets,
    covered_bytes,
    join_parts,
    read_sample,
    read_scored_row,
    split_parts,
)


class DistillationCollator:
    """A `collate_fn` that tokenizes samples for a student and its teachers, and aligns the tokens.

    A sample is a text, a list of messages, or a mapping with `text` or `messages`, and optionally
    `tools` and `chat_template_kwargs`. Each model's chat template renders the conversations. Only
    the assistant's answers are targets. Rows are padded on the right. If `max_length` cuts off a
    part of a chunk, the alignment excludes the whole chunk.

    The teachers can read more than the student. `teacher_context` is a text that the teachers read
    before `text`. `teacher_messages` (messages, or an object with `messages`, `tools` and
    `chat_template_kwargs`) replaces `messages`, but must end with the same answers. Each of the two
    fields can also be a list with one value per teacher. If a teacher's row exceeds `max_length`,
    the text that only the teacher reads is cut first, from the left.

    `Batch` describes the keys of the batch. The label and the chunk id of token i are at position
    i. **Shift the alignment** with `prepare` or `xtok.shift_to_predictions` before you compute a
    loss; xtok's losses reject an alignment that is not shifted.

    For `alm` with stored log-probabilities of one teacher, a sample is a mapping of lists:
    `input_ids`, `realized_logprob` (the natural log-probability of each token; None for the first
    token and for unknown values), and optionally `loss_mask` or `labels` (-100: not a target).

    >>> batch = xtok.DistillationCollator("bytes", "bytes")(["hi", "h"])
    >>> [teacher] = batch["teachers"]
    >>> batch["labels"].tolist(), teacher["alignment"].num_chunks.tolist()
    ([[104, 105], [104, -100]], [2, 1])

    Args:
        student: a repo id, a path or a loaded tokenizer (see `load_tokenizer`).
        teachers: one teacher, or a list of teachers. An empty list trains without teachers.
        max_length: maximum number of tokens per sample, for each model.
        bos: add the declared bos token before each text that does not begin with this token.
        eos: add the declared eos token after each text that does not end with this token.
        max_comb_len: see `TokenAligner`.
        student_template: a chat template that replaces the template of the student's tokenizer.
        teacher_templates: one chat template per teacher. None uses the template of the teacher's
            tokenizer.

    Raises:
        ValueError: if the numbers of teachers and templates differ.
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
            raise ValueError(f"{len(several)} teachers, but {len(templates)} templates")
        check_length(max_length)
        self.student = load_tokenizer(student)
        self.teachers = [load_tokenizer(teacher) for teacher in several]
        # One pair per teacher.
        self.pairs: list[Pair] = [load_pair(self.student, teacher) for teacher in self.teachers]
        self.aligners = [TokenAligner(pair, max_comb_len) for pair in self.pairs]
        self._retokenizers = [Retokenizer(pair) for pair in self.pairs]
        self.max_length, self.bos, self.eos = max_length, bos, eos
        self.student_template, self.teacher_templates = student_template, templates

    @property
    def tokenizer(self) -> Any:
        """The student's tokenizer. `Trainer` calls its `save_pretrained` for checkpoints."""
        return self.student.library or _TokenizerFile(self.student)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Return the batch for the given samples.

        Raises:
            XtokError: if a vocabulary cannot spell a text, a conversation cannot be rendered, or
                the teachers' answers differ from the student's.
            ValueError: if the batch is empty, or if a sample or its log-probabilities are invalid.
        """
        if not samples:
            raise ValueError("a batch needs at least one sample")
        rows = [s for s in samples if isinstance(s, Mapping) and "input_ids" in s]
        if len(rows) == len(samples):
            return self._logprob_batch(rows)
        sides = [read_sample(s, f"sample {n}", len(self.teachers)) for n, s in enumerate(samples)]
        student_samples, *teacher_samples = map(list, zip(*sides, strict=True))
        student = self.rows(0, student_samples)
        if any(r.is_target.any() and not r.is_target[: self.max_length].any() for r in student):
            note = (
                f"max_length {self.max_length} cuts off all targets of a sample, so this sample "
                "has no effect"
            )
            warnings.warn(note, stacklevel=2)
        batch = _pad(student, self.student, self.max_length)
        batch |= {"samples": Samples(student_samples, student), "teachers": []}
        for index, texts in enumerate(teacher_samples):
            teacher = self.rows(index + 1, texts)
            alignments = self._align(index, student, teacher)
            side_batch = self._teacher_side(index, teacher, alignments, batch)
            batch["teachers"].append({**side_batch, "samples": Samples(texts, teacher)})
        return batch

    def from_student_ids(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        *,
        teacher_messages: Sequence[Any] | None = None,
        teacher_context: Sequence[Any] | None = None,
    ) -> Batch:
        """Build a batch from rows of student ids, for example in on-policy training.

        The teachers read the same bytes, tokenized with their own vocabulary (`Retokenizer`). Only
        targets are aligned, one answer at a time. `max_length` applies only to the teachers' rows.

        Args:
            input_ids: int64 `[B, T]`, padded on either side.
            attention_mask: `[B, T]`, 0 for padding.
            labels: int64 `[B, T]`, -100 for prompts and padding.
            teacher_messages: for each row, the prompt that the teachers read instead of the
                student's prompt. A prompt is a text, a list of messages, or an object (see
                `teacher_messages` of a sample). None keeps the student's prompt. A row's value can
                also be a list with one prompt per teacher.
            teacher_context: for each row, a text that only the teachers read, before the prompt.

        Raises:
            XtokError: if a teacher cannot spell the bytes or render a conversation.
            ValueError: if shapes differ, or an id does not exist in the student's vocabulary.
        """
        shape = tuple(input_ids.shape)
        if len(shape) != 2 or any(tuple(x.shape) != shape for x in (attention_mask, labels)):
            raise ValueError(
                f"input_ids {list(shape)}, attention_mask {list(attention_mask.shape)} and labels "
                f"{list(labels.shape)}, expected equal shapes [B, T]"
            )
        prompts = self._values_by_teacher("teacher_messages", teacher_messages, shape[0])
        contexts = self._values_by_teacher("teacher_context", teacher_context, shape[0])
        ids, mask, target = (x.cpu().numpy() for x in (input_ids, attention_mask, labels))
        target_mask = (mask != 0) & (target != IGNORED)
        rows = [
            split_parts(row[keep], is_target[keep])
            for row, keep, is_target in zip(ids, mask != 0, target_mask, strict=True)
        ]
        batch: Batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        batch["teachers"] = []
        for index in range(len(self.teachers)):
            teacher_rows = [
                self._teacher_row(index, parts, prompts[n][index], contexts[n][index])
                for n, parts in enumerate(_respell(self._retokenizers[index], rows))
            ]
            alignments = [
                align_targets(self.aligners[index], join_parts(parts), row, self.max_length)
                for parts, row in zip(rows, teacher_rows, strict=True)
            ]
            batch["teachers"].append(self._teacher_side(index, teacher_rows, alignments, batch))
        if (mask[:, :1] == 0).any():
            batch["position_ids"] = ((attention_mask != 0).long().cumsum(1) - 1).clamp(min=0)
        return batch

    def _values_by_teacher(
        self, name: str, values: Sequence[Any] | None, num_rows: int
    ) -> list[list[Any]]:
        if values is not None and len(values) != num_rows:
            raise ValueError(f"{len(values)} {name} for {num_rows} rows")
        return [
            teacher_values(value, len(self.teachers), name, f"row {n}")
            for n, value in enumerate(values or [None] * num_rows)
        ]

    def _logprob_batch(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        if (count := len(self.teachers)) != 1:
            raise ValueError(f"samples with input_ids require one teacher, not {count}")
        for n, row in enumerate(rows):
            check_fields(row, f"sample {n}", "input_ids")
        teacher, realized = zip(*map(read_scored_row, rows), strict=True)
        parts = [split_parts(row.ids, row.is_target) for row in teacher]
        student = [
            join_parts(self._with_bos(self.student, row_parts, is_target=True))
            for row_parts in _respell(Retokenizer(self.pairs[0].reversed), parts)
        ]
        batch = _pad(student, self.student, self.max_length)
        side_batch = self._teacher_side(0, teacher, self._align(0, student, teacher), batch)
        side_batch["realized_logprob"] = stack([row[: self.max_length] for row in realized], np.nan)
        return {**batch, "teachers": [side_batch]}

    def _teacher_side(
        self,
        index: int,
        rows: Sequence[SampleRow],
        alignments: Sequence[FlatAlignment],
        batch: SideBatch,
    ) -> SideBatch:
        self._warn_if_cut(self.teachers[index], rows)
        side_batch = _pad(rows, self.teachers[index], self.max_length)
        masks = (x["attention_mask"].cpu().numpy() != 0 for x in (batch, side_batch))
        arrays = vars(FlatAlignment.joined(alignments).padded(*masks))
        alignment = PaddedAlignment(**{n: torch.from_numpy(x) for n, x in arrays.items()})
        side_batch["alignment"] = alignment
        has_targets = bool((batch["labels"] != IGNORED).any())
        if has_targets and not bool(alignment.pair_valid.any()):
            name = self.teachers[index].vocabulary.model_id
            note = f"no chunk of this batch aligns with {name}, so {name} does not affect the loss"
            warnings.warn(note, stacklevel=3)
        return side_batch

    def _align(
        self, index: int, student: Sequence[SampleRow], teacher: Sequence[SampleRow]
    ) -> list[FlatAlignment]:
        aligner, tokenizers = self.aligners[index], self.pairs[index].tokenizers
        return [
            align_rows(aligner, tokenizers, rows, self.max_length)
            for rows in zip(student, teacher, strict=True)
        ]

    def _teacher_row(
        self, index: int, parts: list[Part], prompt: Any, context: str | None
    ) -> SampleRow:
        teacher = self.teachers[index]
        if prompt is not None:
            answers = dropwhile(lambda part: not part[1], parts)
            parts = [(self._prompt_ids(index, prompt), False), *answers]
        if prompt is None or isinstance(prompt, str):
            parts = self._with_bos(teacher, parts, is_target=False)
        row = join_parts(parts).after_bos(teacher.table)
        if prompt is not None:
            row = row.without_prompt()
        return row.insert_context(teacher.encode(context).ids) if context else row

    def _with_bos(self, tokenizer: Tokenizer, parts: list[Part], *, is_target: bool) -> list[Part]:
        first = next((ids for ids, _ in parts if ids), [])
        bos, _ = tokenizer.table.around(first, bos=self.bos)
        return [(bos, is_target), *parts] if bos else parts

    def _prompt_ids(self, index: int, prompt: Any) -> list[int]:
        teacher = self.teachers[index]
        if isinstance(prompt, str):
            return teacher.encode_batch([prompt])[0]
        with naming_template("teacher_templates"):
            conversation = drop_answer(prompt).render(
                teacher, self.teacher_templates[index], add_generation_prompt=True
            )
        return [*map(int, conversation.ids)]

    def rows(self, number: int, samples: Sequence[SideText | ChatRecord]) -> list[SampleRow]:
        """Return the rows of the student (number 0) or the nth teacher, before truncation."""
        tokenizer = [self.student, *self.teachers][number]
        template = [self.student_template, *self.teacher_templates][number]
        texts = [s for s in samples if isinstance(s, SideText)]
        encoded = iter(tokenizer.encode_batch([s.text for s in texts]))
        contexts = iter(tokenizer.encode_batch([s.context for s in texts]))
        name = "teacher_templates" if number else "student_template"
        rows = []
        for sample in samples:
            if isinstance(sample, SideText):
                inner = next(encoded)
                bos, eos = tokenizer.table.around(inner, bos=self.bos, eos=self.eos)
                ids = np.array([*bos, *inner, *eos], np.int64)
                row = SampleRow(
                    ids, np.ones(len(ids), np.bool_), text=sample.text, num_before=len(bos),
                    own_bos=int(bool({*inner[:1]} & {*tokenizer.table.roles.get("bos", ())})),
                )  # fmt: skip
                rows.append(row.insert_context(next(contexts)))
            else:
                with naming_template(name):
                    chat = sample.render(tokenizer, template)
                for note in chat.notes:
                    warnings.warn(f"{tokenizer.vocabulary.model_id}: {note}", stacklevel=3)
                row = SampleRow(chat.ids.astype(np.int64), chat.assistant_mask, chat)
                if sample.answers is not None:
                    row = row.after_bos(tokenizer.table).without_prompt()
                rows.append(row)
        return rows

    def target_bytes(self, number: int, side: SideBatch) -> torch.Tensor:
        """Return the number of text bytes that each target covers, int64 `[B, T]`, on the CPU.

        `number` is 0 for the student and n for the nth teacher. `side` is this model's part of a
        prepared batch. If the batch contains no texts, a target covers as many bytes as its token
        contains.
        """
        tokenizer, targets = [self.student, *self.teachers][number], side["targets"].cpu()
        sizes = torch.from_numpy(tokenizer.table.lengths)[targets.clamp(min=0)]
        rows = side["samples"].rows if "samples" in side else ()
        for row_sizes, row in zip(sizes, rows, strict=False):
            covered = covered_bytes(tokenizer, row)[row.keep(self.max_length)][1:]
            covered = covered[: len(row_sizes)]
            row_sizes[: len(covered)] = torch.from_numpy(covered)
        return sizes.masked_fill(targets < 0, 0)

    def _warn_if_cut(self, teacher: Tokenizer, rows: Sequence[SampleRow]) -> None:
        end, cut_rows = self.max_length, []
        for index, row in enumerate(rows):
            if row.num_alone and end is not None and len(row.ids) > end:
                has_room = len(row.ids) - row.num_alone < end
                cut_rows.append(f"sample {index}" + " (to nothing)" * (not has_room))
        if cut_rows:
            name = teacher.vocabulary.model_id
            note = f"text that only teacher {name} reads is cut from the left to max_length {end}"
            warnings.warn(f"{note}: {listed(cut_rows)}", stacklevel=4)


def prepare(batch: Batch, device: torch.device | str = "cpu") -> Batch:
    """Shift labels and alignments by one position, and move the batch to a device.

    The logits at position i predict token i + 1, so the shifted values of token i + 1 are at
    position i. Returns a copy of the batch with additional keys (see `SideBatch`).

    >>> batch = xtok.training.prepare(xtok.DistillationCollator("bytes", "bytes")(["hi"]))
    >>> batch["labels"].tolist(), batch["targets"].tolist()
    ([[104, 105]], [[105, -100]])
    """
    prepared: Batch = {**batch, "teachers": [{**side_batch} for side_batch in batch["teachers"]]}
    for side_batch in (prepared, *prepared["teachers"]):
        if "labels" in side_batch:
            side_batch["targets"] = shifted_targets(side_batch)
        if "alignment" in side_batch:
            shifted = shift_to_predictions(side_batch["alignment"])
            side_batch["shifted"] = NumberedAlignment(**vars(shifted))
        if "realized_logprob" in side_batch:
            side_batch["teacher_logprobs"] = predicted(side_batch["realized_logprob"], torch.nan)
    return to_device(prepared, device)


class _TokenizerFile(NamedTuple):
    tokenizer: Tokenizer

    def save_pretrained(self, folder: str | Path) -> None:
        source, name = self.tokenizer.location, self.tokenizer.vocabulary.model_id
        if isinstance(source, Path) and source.is_file():
            shutil.copy(source, folder)
        else:
            sys.stderr.write(f"note: {folder} has no tokenizer; use the tokenizer {name}\n")


def _respell(retokenizer: Retokenizer, rows: Sequence[Sequence[Part]]) -> list[list[Part]]:
    parts = [(ids, not index) for row in rows for index, (ids, _) in enumerate(row)]
    begins = [begins for _, begins in parts]
    new_ids = iter(retokenizer([ids for ids, _ in parts], begins=begins))
    return [[(next(new_ids), is_target) for _, is_target in row] for row in rows]


def _pad(rows: Sequence[SampleRow], tokenizer: Tokenizer, end: int | None) -> Batch:
    roles = tokenizer.table.roles
    pad_id = next((roles[role][0] for role in ("pad", "eos") if roles.get(role)), 0)
    pairs = [(row, row.keep(end)) for row in rows]
    labels = [np.where(row.is_target, row.ids, IGNORED)[positions] for row, positions in pairs]
    return {
        "input_ids": stack([row.ids[positions] for row, positions in pairs], pad_id),
        "attention_mask": stack([np.ones(len(positions), np.int64) for _, positions in pairs], 0),
        "labels": stack(labels, IGNORED),
    }
