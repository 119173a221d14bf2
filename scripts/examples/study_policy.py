"""A study's runs on policy: the student writes, and a teacher that runs beside it reads that."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import distill
import torch
from study_data import Run, Teacher, autocast, beginning, sides

from xtok.training.collator import DistillationCollator, prepare
from xtok.training.heads import logits_of
from xtok.training.losses import cross_entropy
from xtok.training.rows import IGNORED

NEW_TOKENS = 32  # that the student writes


class OnPolicy(Teacher):
    """A loss on what the student writes on from texts' beginnings, beside cross-entropy on them."""

    def __init__(
        self, args: argparse.Namespace, run: Run, student: Any, collate: DistillationCollator,
        texts: Sequence[dict[str, str]],
    ) -> None:  # fmt: skip
        super().__init__(args, run._replace(text=0.0))
        tokenizer = sides(args.student, args.teacher).tokenizers[1]
        self.teacher = distill.load_model(args.teacher, tokenizer).to(args.device).eval()
        self.bos = () if collate.bos else tokenizer.table.roles.get("bos", ())[:1]
        self.args, self.student, self.collate, self.texts = args, student, collate, texts
        self.weight = run.text

    def loss(self, logits: Any, batch: dict[str, Any], chosen: Sequence[int]) -> Any:
        """Return the loss on what the student writes now, with the cross-entropy of whole texts."""
        written = self.written([beginning(self.texts[i]["text"]) for i in chosen])
        with autocast(self.args):
            of_written = logits_of(self.student, written)
        own = cross_entropy(logits, batch["targets"])
        return self.weight * own + super().loss(of_written, written, chosen)

    @torch.no_grad()
    def written(self, beginnings: Sequence[str]) -> dict[str, Any]:
        """Return the batch of what the student samples, up to what ends a text."""
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
    def said(self, batch: dict[str, Any], chosen: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Return the teacher's logits of a batch, after its own bos token; and its side."""
        [side] = batch["teachers"]
        more = len(self.bos), 0
        ids = torch.nn.functional.pad(side["input_ids"], more, value=sum(self.bos))
        mask = torch.nn.functional.pad(side["attention_mask"], more, value=1)
        with autocast(self.args):
            logits = self.teacher(input_ids=ids, attention_mask=mask).logits
        return logits[:, len(self.bos) :], side
