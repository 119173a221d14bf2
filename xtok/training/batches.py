"""Types of a batch, and functions that shift and slice its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from xtok.alignment.aligner import PaddedAlignment, ShiftedAlignment
from xtok.conversation.files import ChatRecord
from xtok.conversation.teacher_side import SideText
from xtok.training.rows import IGNORED, map_tensors
from xtok.training.samples import SampleRow


@dataclass(frozen=True)
class Samples:
    """The texts and conversations of one side of a batch.

    `Trainer` does not preserve named tuples in a batch, so this is a dataclass.
    """

    sources: Sequence[SideText | ChatRecord]
    rows: Sequence[SampleRow]  # before truncation to `max_length`


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTopK:
    """Stored predictions for the tokens of a padded batch, for `topk_kl`."""

    top_ids: torch.Tensor  # int64 [B, T, K], student ids
    top_logprobs: torch.Tensor  # float32 [B, T, K]; −∞ for unused entries
    rest_logprob: torch.Tensor  # float32 [B, T]; −∞ if the candidates sum to 1
    valid: torch.Tensor  # bool [B, T], whether a token contributes to the loss


class SideBatch(TypedDict, total=False):
    """The part of a batch that one model reads: B rows of T tokens.

    In a collator's batch, position i contains the values of token i. `prepare` adds shifted values
    for the losses: their position i contains the value of token i + 1.
    """

    input_ids: torch.Tensor
    """int64 `[B, T]`."""

    attention_mask: torch.Tensor
    """int64 `[B, T]`, 0 at padding."""

    labels: torch.Tensor
    """int64 `[B, T]`: the ids of targets, -100 for all other tokens."""

    position_ids: torch.Tensor
    """int64 `[B, T]`, only if rows are padded on the left."""

    samples: Samples
    """The texts and conversations, unless the batch was made from ids."""

    alignment: PaddedAlignment[torch.Tensor]
    """Only for teachers: the alignment of the student's tokens with this teacher's tokens."""

    realized_logprob: torch.Tensor
    """float32 `[B, T]`, only for `alm` with stored log-probabilities: NaN for unknown values."""

    stored: StoredTopK
    """Predictions from a `TopKCollator`, not shifted. The teacher then has no other keys."""

    targets: torch.Tensor
    """int64 `[B, T]`, from `prepare`: the shifted labels, -100 at padding."""

    shifted: ShiftedAlignment[torch.Tensor]
    """From `prepare`: the result of `shift_to_predictions(alignment)`."""

    teacher_logprobs: torch.Tensor
    """float32 `[B, T]`, from `prepare`: the shifted `realized_logprob`."""

    target_bytes: torch.Tensor
    """int64 `[B, T]`, only during `audit`: the number of text bytes that each target covers."""


class Batch(SideBatch, total=False):
    """A batch: the student's side, and a side for each teacher.

    Trainers add `count`, `totals` and `step_losses`, which `Objective.terms` uses.
    """

    teachers: list[SideBatch]
    """One side per teacher."""

    count: torch.Tensor
    """int64 `[1 + teachers]`: the number of targets, then the number of terms of each loss."""

    totals: torch.Tensor
    """int64 `[1 + teachers]`: the sums of `count` over the optimizer step."""

    step_losses: tuple[torch.Tensor, torch.Tensor]
    """Scalars: the distillation loss and the cross-entropy of the optimizer step."""


def slice_rows(batch: Batch, num_rows: int) -> Batch:
    """Return the first rows of a collator's batch. Prepared batches are not supported."""
    part: Batch = map_tensors(batch, lambda tensor: tensor[:num_rows])
    for side_batch in (part, *part["teachers"]):
        if "samples" in side_batch:
            samples = side_batch["samples"]
            side_batch["samples"] = Samples(samples.sources[:num_rows], samples.rows[:num_rows])
    return part


def shifted_targets(side_batch: SideBatch) -> torch.Tensor:
    """Return the label of the next token at each position, int64 `[B, T]`; -100 at padding."""
    return predicted(side_batch["labels"]).masked_fill(side_batch["attention_mask"] == 0, IGNORED)


def predicted(ids: torch.Tensor, fill: float = IGNORED) -> torch.Tensor:
    """Shift ids, labels or masks `[B, T]` by one: position i gets the value at i + 1."""
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=fill)
