"""A running teacher's predictions along the path, in the student's tokens, for `topk_kl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtok import Pair, ProjectionMap, TopK
from xtok._lib.ragged import offsets_of
from xtok.teachers.projector import Projector
from xtok.training import IGNORED, StoredTopK, pad_candidates
from xtok.training.losses import CustomLoss, topk_kl
from xtok.training.sparse import check_width

BLOCK = 16  # positions at once: a block of 262,144 logits each stays near the processor


class ProjectedTeacher:
    """Projects a teacher's logits on a batch, as `xtok project` does for stored predictions.

    Trainers use its `topk_kl` as `losses=ProjectedTeacher(…).loss`. Every target counts; a target
    without a prediction adds 0. The projection has no gradient and runs on the CPU.

    Args:
        pair: the student and the teacher, with their tokenizers.
        back_map: map from the teacher (rows) to the student (columns).
        top_k: maximum number of candidates per position, for both models.
        num_threads: threads of the projection; one per available core if None.
        along_path: see `Projector`.

    Raises:
        ValueError: if the map does not belong to the pair.
    """

    def __init__(
        self,
        pair: Pair,
        back_map: ProjectionMap,
        *,
        top_k: int = 64,
        num_threads: int | None = None,
        along_path: bool = True,
    ) -> None:
        self.projector = Projector(pair, back_map, num_threads, along_path=along_path)
        self.width, self.top_k = pair.shape[1], top_k
        self.loss = CustomLoss(self._mean, lambda batch, _: int((batch["targets"] >= 0).sum()))

    def _mean(self, logits: Tensor, theirs: Any, batch: Any, side: Any) -> Tensor:
        return topk_kl(logits, **vars(self(theirs, batch, side)))

    @torch.no_grad()
    def __call__(
        self, teacher_logits: Tensor, batch: Mapping[str, Any], side: Mapping[str, Any]
    ) -> StoredTopK:
        """Return the predictions for the student's tokens of a batch, on the logits' device.

        Args:
            teacher_logits: `[B, T_t, V]`; columns beyond the teacher's width are ignored.
            batch: a `DistillationCollator`'s.
            side: the teacher's part of it.

        Raises:
            XtokError: if the logits are narrower than the teacher's tokens.
        """
        check_width("teacher", teacher_logits.shape[-1], self.width)
        mask = batch["attention_mask"].cpu() != 0
        ids = batch["input_ids"].cpu()[mask].numpy().astype(np.int32)
        candidates = self._top_k(teacher_logits, side["input_ids"], side["attention_mask"] != 0)
        out = self.projector.project(candidates, ids, offsets_of(mask.sum(1).numpy()), self.top_k)
        sizes = np.diff(out.starts)
        width = max(1, int(sizes.max(initial=0)))
        top_ids, top_logprobs = pad_candidates(sizes, out.ids, out.logprobs, width)
        rest = np.nan_to_num(out.rest_logprob, nan=0.0, neginf=-np.inf)

        def in_batch(values: Any, fill: float) -> Tensor:
            flat = torch.from_numpy(values)
            padded = flat.new_full((*mask.shape, *flat.shape[1:]), fill)
            padded[mask] = flat
            return padded.to(teacher_logits.device)

        return StoredTopK(
            top_ids=in_batch(top_ids, 0), top_logprobs=in_batch(top_logprobs, -np.inf),
            rest_logprob=in_batch(rest, -np.inf), valid=batch["labels"] != IGNORED,
        )  # fmt: skip

    def _top_k(self, logits: Tensor, input_ids: Tensor, mask: Tensor) -> TopK:
        """Return the best candidates for each token of rows; none for their first tokens."""
        rows, columns = mask.nonzero(as_tuple=True)
        tokens = input_ids[mask]
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        predicted = (~is_first).nonzero()[:, 0]
        ids, values, rests, own = [], [], [], []
        for positions in predicted.split(BLOCK):
            picked = logits[rows[positions - 1], columns[positions - 1]][:, : self.width].float()
            best = picked.topk(min(self.top_k, self.width)).indices.sort(1).values
            of_best, order = picked.gather(1, best).sort(dim=1, descending=True, stable=True)
            ids.append(best.gather(1, order))
            # The rest is what is left of the same sum: no log-softmax of the whole row, whose
            # float32 sum is off by 3e-5 at 262,144 ids, and takes 1.7 times as long.
            exp = (picked - of_best[:, :1]).exp_()
            total = exp.sum(1, dtype=torch.float64)
            left_out = total - exp.gather(1, best).sum(1, dtype=torch.float64)
            norm = (of_best[:, 0] + total.log())[:, None]
            values.append((of_best - norm).float())
            own.append((picked.gather(1, tokens[positions, None]) - norm)[:, 0].float())
            rests.append((left_out.clamp(min=0).log() - total.log()).float())
        rest, realized = np.full((2, len(tokens)), np.nan, np.float32)
        sizes = np.zeros(len(tokens), np.int64)
        kept = torch.cat(values) > -torch.inf
        for array, parts in ((sizes, [kept.sum(1)]), (rest, rests), (realized, own)):
            array[predicted.cpu().numpy()] = torch.cat(parts).cpu().numpy()
        bounds = offsets_of(mask.sum(1).cpu().numpy())
        return TopK(
            tokens.cpu().numpy().astype(np.int32), bounds, offsets_of(sizes),
            torch.cat(ids)[kept].cpu().numpy().astype(np.int32),
            torch.cat(values)[kept].cpu().numpy(), rest, realized,
        )  # fmt: skip
