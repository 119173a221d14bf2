"""A map as a PyTorch module, frozen or learnable."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike

import numpy as np
import torch
from torch import Tensor, nn

from xtok._lib.ragged import offsets_of
from xtok.maps.edges import Edges, map_order
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.training.sparse import check_width, project_sparse, work_dtype


class ProjectionModule(nn.Module):
    """Projects student probabilities `[..., V_student]` to teacher probabilities with a map.

    If the module is learnable, the weights of each row are the softmax of parameters. The map's
    weights initialize the parameters. The weight of a scale slot is the sigmoid of its parameter,
    and the other entries of the row share the remaining weight. Each row sums to 1, so the weight
    of an entry never changes if its row has no other entry.

    >>> import torch
    >>> module = xtok.ProjectionModule(xtok.build("bytes", "bytes"))
    >>> module(torch.full((256,), 1 / 256)).shape
    torch.Size([256])

    Args:
        projection: a map, or the path of its file.
        learnable: train the weights.

    Raises:
        ValueError: if the map fails `ProjectionMap.check`.
        XtokError: if the map's file does not record a width.
    """

    # Entries are sorted by teacher id, then by student id. Column t consists of the entries
    # offsets[t] to offsets[t + 1].
    student_ids: Tensor  # int64 [nnz]
    teacher_ids: Tensor  # int64 [nnz]
    offsets: Tensor  # int64 [V_teacher + 1]
    is_slot: Tensor  # bool [nnz], scale slots; a slot is never the only entry of its row
    weights: Tensor  # float32 [nnz], weights of the map, unchanged by training
    logits: nn.Parameter | None  # float32 [nnz], parameters of a learnable module

    def __init__(
        self, projection: ProjectionMap | str | PathLike[str], *, learnable: bool = False
    ) -> None:
        super().__init__()
        projection = ProjectionMap.of(projection)
        projection.check()
        projection.require_widths()
        self.map = projection
        order = np.lexsort((projection.student_ids, projection.teacher_ids))
        num_columns = projection.shape[1]
        offsets = offsets_of(np.bincount(projection.teacher_ids, minlength=num_columns))
        for name, array in (
            ("student_ids", projection.student_ids[order].astype(np.int64)),
            ("teacher_ids", projection.teacher_ids[order].astype(np.int64)),
            ("offsets", offsets),
            ("is_slot", projection.is_slot[order]),
            ("weights", projection.weights[order]),
        ):
            self.register_buffer(name, torch.from_numpy(np.array(array)))
        slot_logits = torch.logit(self.weights.double(), eps=1e-12)
        logits = torch.where(self.is_slot, slot_logits, self.weights.double().log()).float()
        self.logits = nn.Parameter(logits) if learnable else None

    @property
    def shape(self) -> tuple[int, int]:
        """`(V_student, V_teacher)`."""
        return self.map.shape

    @property
    def learnable(self) -> bool:
        """Whether the weights are trained."""
        return self.logits is not None

    def entry_weights(self) -> Tensor:
        """Return the current weights, float32 `[nnz]`. Gradients require a learnable module."""
        if self.logits is None:
            return self.weights
        num_rows = self.shape[0]
        with torch.autocast(self.logits.device.type, enabled=False):
            logits = self.logits.float()
            nothing = torch.zeros(num_rows, device=logits.device)
            # Above a logit of 17, float32 rounds the sigmoid to 1, so no weight would be left for
            # the other entries.
            slot = torch.where(self.is_slot, torch.sigmoid(logits).clamp(max=1 - 2**-24), 0.0)
            remaining = 1 - nothing.index_add(0, self.student_ids, slot)
            other_logits = logits.masked_fill(self.is_slot, -torch.inf)
            largest = torch.full_like(nothing, -torch.inf)
            largest = largest.scatter_reduce(0, self.student_ids, other_logits.detach(), "amax")
            powers = (other_logits - largest[self.student_ids]).exp()
            sums = nothing.index_add(0, self.student_ids, powers)
            shares = powers / sums[self.student_ids] * remaining[self.student_ids]
            return torch.where(self.is_slot, slot, shares)

    def forward(self, student_probs: Tensor) -> Tensor:
        """Project student probabilities to the teacher's vocabulary.

        Args:
            student_probs: `[..., V_s]`; columns beyond the map's width are ignored.

        Returns:
            `[..., V_teacher]`, float32 even under autocast, or float64 for float64 inputs.

        Raises:
            XtokError: if the probabilities are narrower than the map.
        """
        check_width("student", student_probs.shape[-1], self.shape[0])
        flat = student_probs.reshape(-1, student_probs.shape[-1]).to(work_dtype(student_probs))
        weights = self.entry_weights().to(flat.dtype)
        projected = project_sparse(flat, self.student_ids, self.offsets[:-1], weights)
        return projected.reshape(*student_probs.shape[:-1], self.shape[1])

    def to_map(self) -> ProjectionMap:
        """Return a map with the current weights. Entries with weight 0 are removed.

        A learnable module adds a step `learn` to the map's history. Changed rows get the kind
        MIXED.
        """
        if self.logits is None:
            return self.map
        with torch.no_grad():
            weights = self.entry_weights().float().cpu().numpy()
        s, t = (x.cpu().numpy().astype(np.int32) for x in (self.student_ids, self.teacher_ids))
        edges, is_slot = Edges(s, t, weights), self.is_slot.cpu().numpy()
        changed = ~np.isclose(weights, self.weights.float().cpu().numpy(), rtol=1e-5, atol=1e-7)
        kind, scale_slot = self.map.row_kind.copy(), self.map.scale_slot
        kind[edges.student_ids[changed]] = RowKind.MIXED
        keep = weights > 0
        if scale_slot is not None:
            scale_slot = scale_slot.copy()
            scale_slot[edges.student_ids[is_slot & ~keep]] = 0
        edges, is_slot = edges.take(keep), is_slot[keep]
        edges = edges.take(map_order(edges, is_slot))
        learned = self.map.after("learn", {})
        return replace(learned, **edges._asdict(), row_kind=kind, scale_slot=scale_slot, reports=())

    def extra_repr(self) -> str:
        """Return the module's description for `print`."""
        rows, columns = self.shape
        return f"{rows} → {columns}, nnz={len(self.weights)}, learnable={self.learnable}"
