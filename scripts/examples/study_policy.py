"""The study's on-policy runs: the student writes, and a running teacher scores it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import distill
import torch
from study_data import Run, Teacher, autocast, beginning, sides

from xtok.training import IGNORED, Batch, DistillationCollator, SideBatch, logits_of, prepare
from xtok.training.losses import cross_entropy

NEW_TOKENS = 32  # that the student writes


class OnPolicy(Teacher):
    """A loss on the student's continuations of texts, plus cross-entropy on the texts."""

    def __init__(
        self, args: argparse.Namespace, run: Run, student: Any, texts: Sequence[dict[str, str]]
    ) -> None:
        super().__init__(args, run._replace(text=0.0))
        tokenizers = sides(args.student, args.teacher).tokenizers
        self.teacher = distill.load_model(args.teacher, tokenizers[1]).to(args.device).eval()
        self.collate = DistillationCollator(*tokenizers)  # the teacher begins with its bos token
        self.args, self.student, self.texts, self.weight = args, student, texts, run.text

    def loss(self, logits: Any, batch: Batch, chosen: Sequence[int]) -> Any:
        """Return the loss on new continuations, plus the cross-entropy of the whole texts."""
        written = self.written([beginning(self.texts[i]["text"]) for i in chosen])
        with autocast(self.args):
            of_written = logits_of(self.student, written)
        own = cross_entropy(logits, batch["targets"])
        return self.weight * own + super().loss(of_written, written, chosen)

    @torch.no_grad()
    def written(self, beginnings: Sequence[str]) -> Batch:
        """Return the batch of sampled continuations, up to the end of text."""
        ids = [torch.from_numpy(self.collate.student.encode(text).ids) for text in beginnings]
        given = torch.nn.utils.rnn.pad_sequence(ids, True, -1, "left").long().to(self.args.device)
        ends = list(self.collate.student.table.roles.get("eos", ()))
        self.student.eval()
        with autocast(self.args):
            made = self.student.generate(
                given.clamp(min=0), attention_mask=(given >= 0).long(), max_new_tokens=NEW_TOKENS,
                do_sample=True, top_k=0, eos_token_id=ends, pad_token_id=0,
            )  # fmt: skip
        self.student.train()
        is_new = torch.arange(made.shape[1], device=made.device) >= given.shape[1]
        ended = torch.isin(made, made.new_tensor(ends)) & is_new
        is_new = is_new & (ended.cumsum(1) == 0)
        mask = is_new | torch.nn.functional.pad(given >= 0, (0, made.shape[1] - given.shape[1]))
        labels = torch.where(is_new, made, IGNORED)
        return prepare(self.collate.from_student_ids(made, mask.long(), labels), self.args.device)

    @torch.no_grad()
    def said(self, batch: Batch, chosen: Sequence[int]) -> tuple[Any, SideBatch]:
        """Return the teacher's logits of a batch, and its side."""
        [side] = batch["teachers"]
        with autocast(self.args):
            return logits_of(self.teacher, side), side
