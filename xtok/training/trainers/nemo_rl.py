"""`NemoTokenAligner` in the place of NeMo-RL's `TokenAligner`: it takes the same arguments."""

from __future__ import annotations

from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from xtok.alignment import aligner
from xtok.alignment.aligner import AlignmentBatch
from xtok.maps.map_arguments import as_any_map, bind_map, pair_of_map
from xtok.tokenizers import load_tokenizer, pair

if TYPE_CHECKING:
    from xtok.alignment.aligner import Array


class NemoTokenAligner(aligner.TokenAligner):
    """An `xtok.TokenAligner` as NeMo-RL's `setup` makes one.

    Args:
        student_tokenizer: a fast Hugging Face tokenizer, or a model as `load_tokenizer` takes it.
        teacher_tokenizer: the same for the teacher.
        projection_matrix_path: the map, which must be of these two; of its draft 4177, a table.
        max_comb_len: as in `xtok.TokenAligner`.

    Raises:
        XtokError: if the map is of other tokenizers.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        projection_matrix_path: str | PathLike[str] | None = None,
        max_comb_len: int = 4,
    ) -> None:
        if projection_matrix_path is None:
            both = pair(student_tokenizer, teacher_tokenizer)
        else:
            any_map = as_any_map(projection_matrix_path)
            both = pair_of_map(
                any_map, load_tokenizer(student_tokenizer), load_tokenizer(teacher_tokenizer)
            )
            bind_map(both, any_map)
        super().__init__(both, max_comb_len)

    def align(  # type: ignore[override]
        self,
        student_ids: Array,
        teacher_ids: Array,
        *,
        student_offsets: Array | None = None,
        teacher_offsets: Array | None = None,
        student_attention_mask: Array | None = None,
        teacher_attention_mask: Array | None = None,
    ) -> AlignmentBatch:
        """Align a batch of rows of token ids; see `xtok.TokenAligner.align`.

        Its collator puts every field into the batch, so there are only those that it knows.

        Args:
            student_ids: integers `[B, T_s]`.
            teacher_ids: integers `[B, T_t]`.
            student_offsets: not read: they count characters, and only bytes show where tokens end.
                NeMo-RL's draft 3286 passes those of its tokenizer.
            teacher_offsets: the same.
            student_attention_mask: `[B, T_s]`, 0 where a token is padding.
            teacher_attention_mask: `[B, T_t]`.
        """
        found = super().align(
            student_ids, teacher_ids, student_attention_mask=student_attention_mask,
            teacher_attention_mask=teacher_attention_mask,
        )  # fmt: skip
        return AlignmentBatch(**{f.name: getattr(found, f.name) for f in fields(AlignmentBatch)})
