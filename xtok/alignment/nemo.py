"""What NeMo-RL's chat collators call on an aligner, besides `align`.

Names, arguments and fields are those of NeMo-RL's open pull request 3286, read at several states of
its branch; its released version has none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

    from xtok.alignment.aligner import AlignedPair, AlignmentBatch, SymbolTable

CharSpan: TypeAlias = tuple[int, int]

METHODS = ("offset_cluster_decode_fix", "same_tokenizer_identity")
REGIONS = ("reasoning", "close", "answer")


class AlignmentPair(NamedTuple):
    """One chunk of a conversation: the tokens' names, `[start, end)` on both sides, correctness."""

    s_tokens: list[str]
    t_tokens: list[str]
    s_start: int
    s_end: int
    t_start: int
    t_end: int
    is_correct: bool


class NemoChat(ABC):
    """The chat methods of NeMo-RL's `TokenAligner`, over an alignment by bytes.

    Character offsets only tell which tokens belong to which message: how tokens pair up is told by
    their bytes.
    """

    student: SymbolTable
    teacher: SymbolTable
    alignment_method: str

    @abstractmethod
    def pairs(self, student_ids: Any, teacher_ids: Any, alignment: Any = None) -> list[AlignedPair]:
        """Return the chunks of one document."""

    def align_one_offset_per_asst(
        self,
        student_ids: Sequence[int],
        student_offsets: Sequence[CharSpan],
        student_asst_char_spans: Sequence[CharSpan],
        teacher_ids: Sequence[int],
        teacher_offsets: Sequence[CharSpan],
        teacher_asst_char_spans: Sequence[CharSpan],
        student_asst_mask: Sequence[int] | None = None,
        teacher_asst_mask: Sequence[int] | None = None,
        student_alignment_regions: Sequence[Any] | None = None,
        teacher_alignment_regions: Sequence[Any] | None = None,
        student_eot_indices: Sequence[int] | None = None,
        teacher_eot_indices: Sequence[int] | None = None,
        drop_first_content_pair: bool = False,
        included_regions: Collection[str] | None = None,
        *,
        student_answer_parts: Sequence[Any] | None = None,
        teacher_answer_parts: Sequence[Any] | None = None,
        student_rendered_text: str | None = None,
        teacher_rendered_text: str | None = None,
    ) -> list[AlignmentPair]:
        """Align a conversation message by message; NeMo-RL's method of this name.

        Args:
            student_ids: T_s ids of the rendered conversation.
            student_offsets: T_s spans of characters.
            student_asst_char_spans: for each assistant message, its span of characters.
            teacher_ids: as the student's, and so are all of `teacher_…`.
            teacher_offsets: likewise.
            teacher_asst_char_spans: likewise.
            student_asst_mask: T_s numbers, 1 for tokens that may be aligned.
            teacher_asst_mask: likewise.
            student_alignment_regions: for each message, spans by name (`reasoning`, `close`,
                `answer`), which are aligned one by one in place of the whole message.
            teacher_alignment_regions: likewise.
            student_eot_indices: for each message, the token that ends its turn, or −1. By default
                it is the token that begins where the message ends.
            teacher_eot_indices: likewise.
            drop_first_content_pair: leave out the first chunk of each message.
            included_regions: regions to keep, `eot` among them; all by default.
            student_answer_parts: for each message, None or parts of its answer (`span`, `text`),
                aligned one by one; parts of unequal text are left out.
            teacher_answer_parts: likewise.
            student_rendered_text: not needed.
            teacher_rendered_text: not needed.

        Raises:
            ValueError: if the sides have other numbers of messages or parts, a region is on one
                side only, or `alignment_method` is `same_tokenizer_identity` and ids differ.
        """
        del student_rendered_text, teacher_rendered_text
        turns = len(student_asst_char_spans)
        ours, theirs = (
            (spans, [None] * turns if regions is None else regions, parts or [None] * turns, eots)
            for spans, regions, parts, eots in (
                (
                    student_asst_char_spans, student_alignment_regions, student_answer_parts,
                    _turn_ends(student_offsets, student_asst_char_spans, student_eot_indices),
                ),
                (
                    teacher_asst_char_spans, teacher_alignment_regions, teacher_answer_parts,
                    _turn_ends(teacher_offsets, teacher_asst_char_spans, teacher_eot_indices),
                ),
            )
        )  # fmt: skip
        if any(len(values) != turns for values in (*ours, *theirs)):
            raise ValueError(
                f"the student has {turns} assistant messages; the teacher's, or the regions, parts "
                "or ends of turns, are others in number"
            )
        wanted = {*REGIONS, "eot"} if included_regions is None else set(included_regions)
        if not wanted or not wanted <= {*REGIONS, "eot"}:
            raise ValueError(f"included_regions are {sorted(wanted)}: {', '.join(REGIONS)} or eot")
        result: list[AlignmentPair] = []
        for s_turn, t_turn in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
            of_turn: list[AlignmentPair] = []
            for s_span, t_span in _regions(s_turn[:3], t_turn[:3], wanted):
                s_places = _tokens_within(student_offsets, s_span, student_asst_mask)
                t_places = _tokens_within(teacher_offsets, t_span, teacher_asst_mask)
                of_turn += self._pairs_at(student_ids, s_places, teacher_ids, t_places)
            result += of_turn[1 if drop_first_content_pair else 0 :]
            s_end, t_end = s_turn[3], t_turn[3]
            if "eot" in wanted and s_end >= 0 and t_end >= 0:
                result.append(self._turn_end(student_ids, s_end, teacher_ids, t_end))
        return result

    def align_chat(
        self,
        student_ids: torch.Tensor,
        teacher_ids: torch.Tensor,
        *,
        student_offsets: torch.Tensor,
        teacher_offsets: torch.Tensor,
        student_attention_mask: torch.Tensor | None = None,
        teacher_attention_mask: torch.Tensor | None = None,
        drop_first_content_pair: bool = False,
        included_regions: Collection[str] | None = None,
        **of_rows: Any,
    ) -> AlignmentBatch:
        """Align a batch of conversations; NeMo-RL's method of this name.

        Args:
            student_ids: int64 `[B, T_s]`.
            teacher_ids: int64 `[B, T_t]`.
            student_offsets: int64 `[B, T_s, 2]`.
            teacher_offsets: int64 `[B, T_t, 2]`.
            student_attention_mask: `[B, T_s]`, 0 where a token is padding.
            teacher_attention_mask: likewise.
            drop_first_content_pair: as in `align_one_offset_per_asst`.
            included_regions: likewise.
            of_rows: what else `align_one_offset_per_asst` takes, one value per row or None; its
                `…_rendered_text` as `…_rendered_texts`.

        Raises:
            ValueError: as `align_one_offset_per_asst`, with the row.
        """
        rows = []
        for row in range(len(student_ids)):
            options = {
                name.replace("rendered_texts", "rendered_text"): _list(values[row])
                for name, values in of_rows.items()
                if values is not None
            }
            try:
                rows.append(
                    self.align_one_offset_per_asst(
                        student_ids[row].tolist(),
                        student_offsets[row].tolist(),
                        options.pop("student_asst_char_spans"),
                        teacher_ids[row].tolist(),
                        teacher_offsets[row].tolist(),
                        options.pop("teacher_asst_char_spans"),
                        drop_first_content_pair=drop_first_content_pair,
                        included_regions=included_regions,
                        **options,
                    )
                )
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from error
        batch = self._pairs_to_batch(
            rows, b=len(rows), t_s=student_ids.shape[1], t_t=teacher_ids.shape[1]
        )
        self._drop_padding(
            batch,
            student_attention_mask=student_attention_mask,
            teacher_attention_mask=teacher_attention_mask,
        )
        return batch

    @staticmethod
    def _pairs_to_batch(
        per_sample_pairs: Sequence[Sequence[Any]], *, b: int, t_s: int, t_t: int
    ) -> AlignmentBatch:
        """Write the pairs of B rows, which have the fields of `AlignmentPair`, into tensors."""
        import torch

        from xtok.alignment.aligner import AlignmentBatch

        width = max([1, *map(len, per_sample_pairs)])
        batch = AlignmentBatch(
            pair_valid=torch.zeros(b, width, dtype=torch.bool),
            pair_is_correct=torch.zeros(b, width, dtype=torch.bool),
            student_exact_partition_mask=torch.zeros(b, t_s, dtype=torch.bool),
            teacher_exact_partition_mask=torch.zeros(b, t_t, dtype=torch.bool),
            student_chunk_id=torch.full((b, t_s), -1),
            teacher_chunk_id=torch.full((b, t_t), -1),
            num_chunks=torch.tensor([len(pairs) for pairs in per_sample_pairs], dtype=torch.int64),
        )
        for row, pairs in enumerate(per_sample_pairs):
            batch.pair_valid[row, : len(pairs)] = True
            for number, pair in enumerate(pairs):
                batch.pair_is_correct[row, number] = pair.is_correct
                ours, theirs = slice(pair.s_start, pair.s_end), slice(pair.t_start, pair.t_end)
                single = pair.s_end - pair.s_start == pair.t_end - pair.t_start == 1
                if pair.s_start >= 0:
                    batch.student_chunk_id[row, ours] = number
                if pair.t_start >= 0:
                    batch.teacher_chunk_id[row, theirs] = number
                if pair.is_correct and single and min(pair.s_start, pair.t_start) >= 0:
                    batch.student_exact_partition_mask[row, ours] = True
                    batch.teacher_exact_partition_mask[row, theirs] = True
        return batch

    @staticmethod
    def _drop_padding(
        batch: AlignmentBatch, *, student_attention_mask: Any, teacher_attention_mask: Any
    ) -> None:
        """Take padding out of every chunk, in place."""
        for chunk, exact, mask in (
            (batch.student_chunk_id, batch.student_exact_partition_mask, student_attention_mask),
            (batch.teacher_chunk_id, batch.teacher_exact_partition_mask, teacher_attention_mask),
        ):
            if mask is not None:
                chunk[mask == 0] = -1
                exact[mask == 0] = False

    def _pairs_at(
        self,
        student_ids: Sequence[int],
        s_places: list[int],
        teacher_ids: Sequence[int],
        t_places: list[int],
    ) -> list[AlignmentPair]:
        """Align the tokens at some positions of both sides."""
        ours, theirs = [student_ids[i] for i in s_places], [teacher_ids[j] for j in t_places]
        self._check_identity(ours, theirs)
        return [
            self._pair(
                pair.student_ids,
                pair.teacher_ids,
                (s_places[pair.student_tokens[0]], s_places[pair.student_tokens[1] - 1] + 1),
                (t_places[pair.teacher_tokens[0]], t_places[pair.teacher_tokens[1] - 1] + 1),
                pair.is_correct,
            )
            for pair in self.pairs(np.array(ours, np.int64), np.array(theirs, np.int64))
        ]

    def _turn_end(
        self, student_ids: Sequence[int], i: int, teacher_ids: Sequence[int], j: int
    ) -> AlignmentPair:
        """Pair the tokens that end a turn, whatever they are."""
        ours, theirs = [student_ids[i]], [teacher_ids[j]]
        self._check_identity(ours, theirs)
        return self._pair(ours, theirs, (i, i + 1), (j, j + 1), True)

    def _check_identity(self, ours: list[int], theirs: list[int]) -> None:
        if self.alignment_method == "same_tokenizer_identity" and ours != theirs:
            raise ValueError(
                "alignment_method is same_tokenizer_identity, and the ids differ: "
                f"{ours[:8]}, {theirs[:8]}"
            )

    def _pair(
        self,
        student_ids: Sequence[int],
        teacher_ids: Sequence[int],
        ours: tuple[int, int],
        theirs: tuple[int, int],
        is_correct: bool,
    ) -> AlignmentPair:
        s_tokens = [self.student.table.name(i) for i in student_ids]
        t_tokens = [self.teacher.table.name(i) for i in teacher_ids]
        return AlignmentPair(s_tokens, t_tokens, *ours, *theirs, is_correct)


def _regions(ours: Any, theirs: Any, wanted: set[str]) -> Iterator[tuple[CharSpan, CharSpan]]:
    """Return the spans of one message to align, in pairs; a side is span, regions, parts."""
    (s_span, s_regions, s_parts), (t_span, t_regions, t_parts) = ours, theirs
    if (s_regions is None) != (t_regions is None) or (s_parts is None) != (t_parts is None):
        raise ValueError("one side alone has alignment regions, or parts of an answer")
    if s_regions is None:
        yield s_span, t_span
        return
    for name in REGIONS:
        s_region, t_region = s_regions.get(name), t_regions.get(name)
        if (s_region is None) != (t_region is None):
            raise ValueError(f"one side alone has the region {name}")
        if s_region is None or name not in wanted:
            continue
        if name == "answer" and s_parts is not None:
            if len(s_parts) != len(t_parts):
                raise ValueError(
                    f"{len(s_parts)} parts of an answer, {len(t_parts)} of the teacher"
                )
            yield from (
                (s.span, t.span) for s, t in zip(s_parts, t_parts, strict=True) if s.text == t.text
            )
        else:
            yield s_region, t_region


def _tokens_within(
    offsets: Sequence[CharSpan], span: CharSpan, mask: Sequence[int] | None
) -> list[int]:
    """Return the tokens of a span of characters, from the first to the last that is within.

    Between these, tokens without characters count as well: libraries report so for whitespace.
    """
    within = [
        start < end and span[0] <= start and end <= span[1] and (mask is None or mask[i] == 1)
        for i, (start, end) in enumerate(offsets)
    ]
    if not any(within):
        return []
    first, last = within.index(True), len(within) - within[::-1].index(True)
    return [i for i in range(first, last) if within[i] or offsets[i][0] == offsets[i][1]]


def _turn_ends(
    offsets: Sequence[CharSpan], spans: Sequence[CharSpan], given: Sequence[int] | None
) -> Sequence[int]:
    """Return for each message the token that ends its turn, or −1."""
    if given is not None:
        return given
    first = {start: i for i, (start, end) in reversed(list(enumerate(offsets))) if start < end}
    return [first.get(end, -1) for _, end in spans]


def _list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
