"""`NemoTokenAligner`: a replacement for NeMo-RL's `TokenAligner` with the same arguments."""

from __future__ import annotations

from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from xtok.alignment import aligner
from xtok.alignment.aligner import AlignmentBatch, ArrayT
from xtok.errors import XtokError
from xtok.maps.file import table_digests
from xtok.maps.map_arguments import bind_map, read_map
from xtok.tokenizers import load_pair

if TYPE_CHECKING:  # defined only for type checkers, because it contains a type of PyTorch
    from xtok.alignment.aligner import Array


class NemoTokenAligner(aligner.TokenAligner):
    """An `xtok.TokenAligner` with the constructor of NeMo-RL's `TokenAligner`.

    Args:
        student_tokenizer: a fast Hugging Face tokenizer, or another input of `load_tokenizer`.
        teacher_tokenizer: the teacher's tokenizer, in the same form.
        projection_matrix_path: the map for the two tokenizers, or a table in the format of
            NeMo-RL's draft 4177.
        max_comb_len: see `xtok.TokenAligner`.

    Raises:
        XtokError: if the map belongs to other tokenizers.
    """

    def __init__(
        self,
        student_tokenizer: Any,
        teacher_tokenizer: Any,
        projection_matrix_path: str | PathLike[str] | None = None,
        max_comb_len: int = 4,
    ) -> None:
        pair, path = load_pair(student_tokenizer, teacher_tokenizer), projection_matrix_path
        digests = None if path is None else table_digests(path)
        if path is not None and digests is None:
            _, pair = bind_map(read_map(path), pair)
        elif digests and digests != [table.sha256() for table in pair.tables]:
            raise XtokError(
                f"the table {path} belongs to other tokenizers, or the sides are swapped",
                hint='write it again: xtok.spellings(student, teacher).save("NAME.pt")',
            )
        super().__init__(pair, max_comb_len)

    def align(  # type: ignore[override]
        self,
        student_ids: ArrayT,
        teacher_ids: Array,
        *,
        student_offsets: Array | None = None,
        teacher_offsets: Array | None = None,
        student_attention_mask: Array | None = None,
        teacher_attention_mask: Array | None = None,
    ) -> AlignmentBatch[ArrayT]:
        """Align a batch of token ids, like `xtok.TokenAligner.align`.

        The result has only the fields of `AlignmentBatch`, because NeMo-RL's collator copies all
        fields.

        Args:
            student_ids: integers `[B, T_s]`.
            teacher_ids: integers `[B, T_t]`.
            student_offsets: ignored. NeMo-RL's draft 3286 passes character offsets here.
            teacher_offsets: ignored.
            student_attention_mask: `[B, T_s]`, 0 for padding.
            teacher_attention_mask: `[B, T_t]`.
        """
        aligned = super().align(
            student_ids, teacher_ids, student_attention_mask=student_attention_mask,
            teacher_attention_mask=teacher_attention_mask,
        )  # fmt: skip
        return AlignmentBatch(**{f.name: getattr(aligned, f.name) for f in fields(AlignmentBatch)})
