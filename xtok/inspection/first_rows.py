"""The first rows of a run's data, compared with the models' libraries, and their alignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok._lib.shards import Paths
from xtok.alignment.aligner import AlignmentBatch, TokenAligner
from xtok.alignment.chats import align_rendered
from xtok.building.counting.texts import check_texts, read_samples
from xtok.conversation import BEGINS_IN_PROMPT, BLOCK_IN_PROMPT, Conversation, find_template
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.formats import PromptFormat
from xtok.conversation.leaves import WEIGHTS
from xtok.conversation.teacher_side import SideChat, SideText, teachers_chats
from xtok.conversation.templates import has_generation, is_missing
from xtok.errors import XtokError
from xtok.inspection import Check
from xtok.tokenizers import Tokenizer, library_differences
from xtok.tokenizers.display import escape, percent, plural, quoted
from xtok.tokenizers.library import ids_apart
from xtok.tokenizers.pairs import Pair

ENOUGH = 0.5
"""Minimum share of targets in chunks, and of chunks with equal bytes. Pairs of the tests have 0.9
and more; pairs with an uncased or Unicode-normalizing tokenizer have less."""

NUM_ROWS = 64
"""Rows of a file that `doctor` compares with the libraries."""

NUM_CHUNKS = 256
"""Chunks of a batch that are decoded on both sides."""

_SHOWN = 3


@dataclass
class SideReport:
    """Rows as one side renders them for training, compared with the tokenizer's library."""

    differences: list[str]
    is_compared: bool  # False without a library, or for a format that no library has
    num_texts: int
    num_chats: int
    num_tokens: int = 0  # of the conversations
    num_targets: int = 0
    roles: Counter[str] = field(default_factory=Counter)  # messages of each role
    notes: Counter[str] = field(default_factory=Counter)  # conversations with each note

    def rendered(
        self, chat: ChatRecord, tokenizer: Tokenizer, template: str | Path | None
    ) -> Conversation:
        """Render a conversation, and count its tokens, messages and notes."""
        shown = chat.render(tokenizer, template)
        self.num_tokens += len(shown.ids)
        self.num_targets += int(shown.assistant_mask.sum())
        self.roles.update(span.role for span in shown.message_spans)
        self.notes.update(shown.notes)
        return shown

    @property
    def shown(self) -> list[str]:
        """The first differences, and the number of the others."""
        more = len(self.differences) - _SHOWN
        rest = [f"{more} more like these"] if more > 0 else []
        return [*self.differences[:_SHOWN], *rest]


def compare_side(
    tokenizer: Tokenizer,
    samples: Sequence[SideText | SideChat],
    *,
    template: str | Path | None = None,
    rows: Sequence[Sequence[int]] | None = None,
) -> SideReport:
    """Compare roles, ids and masks of one side with `AutoTokenizer` and `apply_chat_template`.

    Masks may lack targets of the library for tokens that span the prompt and messages of weight 0.

    Args:
        tokenizer: the tokenizer of this side.
        samples: its texts and conversations; texts with a context are skipped.
        template: the side's chat template, if it is not the tokenizer's own.
        rows: the ids of each sample in a batch; by default those that xtok encodes.

    Raises:
        XtokError: if a chat template is missing.
    """
    texts = {n: s.text for n, s in enumerate(samples) if isinstance(s, SideText) and not s.context}
    chats = [sample.chat for sample in samples if isinstance(sample, SideChat)]
    library = tokenizer.library
    if chats and isinstance(find_template(tokenizer, template), PromptFormat):
        library = None
    differences = library_differences(
        tokenizer, [*texts.values()], None if rows is None else [rows[n] for n in texts]
    )
    report = SideReport(differences, library is not None, len(texts), len(chats))
    for number, chat in enumerate(chats):
        try:
            shown = report.rendered(chat, tokenizer, template)
            if library is not None:
                theirs = _by_library(library, tokenizer, template, chat)
                differences += _chat_differences(number, shown, chat, theirs)
        except XtokError as error:
            if error.message not in differences:
                differences.append(error.message)
    return report


def _by_library(
    library: Any, tokenizer: Tokenizer, template: str | Path | None, chat: ChatRecord
) -> dict[str, Any]:
    chosen = find_template(tokenizer, template, tools=bool(chat.tools))
    try:
        rendered: dict[str, Any] = library.apply_chat_template(
            chat.messages,
            chat_template=None if template is None else chosen,
            return_dict=True,
            return_assistant_tokens_mask=has_generation(str(chosen)),
            **{"tools": chat.tools or None, **chat.variables},
        )
    except Exception as error:  # of the template, or for data that Transformers does not support
        raise XtokError(
            f"apply_chat_template of {type(library).__name__} raises: {error}",
            hint="write the conversation as Transformers takes it",
        ) from error
    return rendered


def _chat_differences(
    number: int, shown: Conversation, chat: ChatRecord, theirs: Mapping[str, Any]
) -> Iterator[str]:
    ids, ours = shown.ids.tolist(), shown.assistant_mask
    if ids != theirs["input_ids"]:
        yield f"conversation {number} is {ids_apart(ids, theirs['input_ids'])}"
        return
    masks = np.array(theirs.get("assistant_masks", ours), np.bool_)
    may_lack = {BEGINS_IN_PROMPT, BLOCK_IN_PROMPT} & {*shown.notes} or any(
        name in message for message in chat.messages for name in WEIGHTS
    )
    if (ours & ~masks).any() if may_lack else (ours != masks).any():
        both = ids_apart(shown.ids[ours].tolist(), shown.ids[masks].tolist())
        yield f"the targets of conversation {number} are {both}"


class Aligned(NamedTuple):
    """Counts of targets and chunks of a student and one teacher."""

    targets: int  # of the student, without the first token of a row, which nothing predicts
    in_chunks: int  # of these
    chunks: int
    equal: int  # of these, with the same bytes on both sides, or special tokens of one role
    ends: int  # targets that end a turn or a text
    ends_in_chunks: int
    begins: int  # rows that begin with a bos token on both sides, a target on the student's
    begins_in_chunks: int
    decoded: int  # chunks of `equal` that were decoded
    moved: tuple[str, ...]  # texts of both sides, for chunks with different bytes

    @classmethod
    def total(cls, parts: Sequence[Aligned]) -> Aligned:
        """Return the counts of several batches together."""
        return cls(*(sum(values[1:], values[0]) for values in zip(*parts, strict=True)))

    @property
    def share(self) -> float:
        """The share of the targets that are in a chunk."""
        return self.in_chunks / max(1, self.targets)

    def differences(self) -> Iterator[str]:
        """Yield the faults of the alignment."""
        if not self.targets:
            yield "the rows have no targets, so the student learns nothing from them"
            return
        if self.share < ENOUGH:
            yield f"{self.in_chunks} of {self.targets} targets are in a chunk with the teacher"
        if self.equal < ENOUGH * self.chunks:
            yield f"{self.equal} of {self.chunks} chunks have the same bytes on both sides"
        if self.begins_in_chunks < self.begins:
            yield f"{self.begins_in_chunks} of {plural(self.begins, 'bos token')} are in a chunk"
        if self.moved:
            yield (
                f"{len(self.moved)} of {self.decoded} chunks that are marked as equal have other "
                f"bytes on the teacher's side, such as {self.moved[0]}: the ids or the alignment "
                "belong to other rows, or were moved"
            )

    def notes(self) -> Iterator[str]:
        """Yield limits of the distillation loss alone."""
        if self.ends_in_chunks < ENOUGH * self.ends:
            yield (
                f"{self.ends_in_chunks} of {self.ends} ends of turns or texts are in a chunk: with "
                "the distillation loss alone, the student does not learn to stop (the "
                "cross-entropy has these targets)"
            )


def aligned(
    tokenizers: tuple[Tokenizer, Tokenizer],
    labels: NDArray[Any],
    ids: tuple[NDArray[Any], NDArray[Any]],
    alignment: AlignmentBatch,
) -> Aligned:
    """Count aligned targets and chunks in a batch, and decode a sample of its chunks.

    Args:
        tokenizers: the student's and the teacher's.
        labels: the student's, of the tokens themselves, `[B, T_s]`; below 0 for no target.
        ids: of both sides, `[B, T_s]` and `[B, T_t]`.
        alignment: a `PaddedAlignment` of arrays.
    """
    arrays = {name: np.asarray(value) for name, value in vars(alignment).items()}
    chunk, valid = arrays["student_chunk_id"], arrays["pair_valid"]
    equal = valid & arrays["pair_is_correct"]
    inside = (chunk >= 0) & np.take_along_axis(valid, np.maximum(chunk, 0), axis=1)
    firsts = [_first_tokens(arrays[f"{side}_kept"]) for side in ("student", "teacher")]
    is_bos = [
        np.isin(of_side, token_ids(tokenizer, "bos")) & first
        for of_side, tokenizer, first in zip((labels, ids[1]), tokenizers, firsts, strict=True)
    ]
    begins = is_bos[0] & is_bos[1].any(1, keepdims=True)
    is_target = (labels >= 0) & ~firsts[0]
    ends = np.isin(labels, token_ids(tokenizers[0], "eos", "turn_end")) & is_target
    counted = is_target, valid, equal, ends, begins
    targets, chunks, num_equal, num_ends, num_begins = (int(x.sum()) for x in counted)
    in_chunks, ends_in, begins_in = (int((x & inside).sum()) for x in (is_target, ends, begins))
    both = chunk, arrays["teacher_chunk_id"]
    decoded = [*_decoded(tokenizers, ids, both, np.argwhere(equal))]
    moved = tuple(f"{a} and {b}" for a, b in decoded if a != b)
    return Aligned(
        targets, in_chunks, chunks, num_equal, num_ends, ends_in, num_begins, begins_in,
        len(decoded), moved,
    )  # fmt: skip


def _first_tokens(kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    firsts: NDArray[np.bool_] = kept & (kept.cumsum(1) == 1)
    return firsts


def _decoded(
    tokenizers: tuple[Tokenizer, Tokenizer],
    ids: tuple[NDArray[Any], NDArray[Any]],
    chunk_ids: tuple[NDArray[Any], NDArray[Any]],
    chunks: NDArray[np.int64],
) -> Iterator[tuple[str, str]]:
    """Yield the texts of both sides for a sample of `chunks` (row, number), `[N, 2]`."""
    for row, number in chunks[:: -(-len(chunks) // NUM_CHUNKS) or 1]:
        of_sides = [x[row][c[row] == number] for x, c in zip(ids, chunk_ids, strict=True)]
        sides = [*zip(tokenizers, of_sides, strict=True)]
        if all((t.table.lengths[of_side] > 0).all() for t, of_side in sides):
            tokens = [[t.table.tokens()[i] for i in of_side] for t, of_side in sides]
            student, teacher = (quoted(escape(b"".join(of_side))) for of_side in tokens)
            yield student, teacher


def token_ids(tokenizer: Tokenizer, *roles: str) -> list[int]:
    """Return the ids of a tokenizer that have one of these roles."""
    return [i for role in roles for i in tokenizer.table.roles.get(role, ())]


def first_rows(texts: Paths, field: str = "text") -> list[SideText | SideChat]:
    """Read the first rows of files of texts or conversations.

    Raises:
        XtokError: if a file cannot be read, or a row has neither the field nor `messages`.
    """
    rows: list[SideText | SideChat] = []
    for place, value in islice(read_samples(texts), NUM_ROWS):
        text = value.get(field) if isinstance(value, Mapping) else value
        if isinstance(text, str):
            rows.append(SideText(text))
        elif isinstance(value, Mapping) and "messages" not in value:
            check_texts(texts, field)  # the error names the fields of the file; skips nulls
        else:
            rows.append(SideChat(chat_record(value, place)))
    return rows


def row_checks(
    pair: Pair,
    rows: Sequence[SideText | SideChat],
    templates: Sequence[str | Path | None] = (None, None),
) -> Iterator[Check]:
    """Check rows without a model: each side against its library, then the alignment."""
    for tokenizer, template in dict.fromkeys(zip(pair.tokenizers, templates, strict=True)):
        report = compare_side(tokenizer, rows, template=template)
        yield from _side_checks(f"first rows, {tokenizer.vocabulary.model_id}", report)
    chats = [row.chat for row in rows if isinstance(row, SideChat)]
    yield from _teachers_own(pair.tokenizers[1], chats, templates[1])
    parts = [*_aligned_rows(pair, rows, templates)]
    if not parts:
        return
    counts, name = Aligned.total(parts), "first rows, aligned"
    differences = [*counts.differences()]
    yield from (Check(name, "warning", line) for line in differences)
    yield from (Check(name, "note", line) for line in counts.notes())
    if not differences:
        shares = [percent(counts.share), percent(counts.equal / max(1, counts.chunks))]
        message = f"{shares[0]} of the targets are in a chunk, {shares[1]} of these of equal bytes"
        yield Check(name, "ok", message)


def _side_checks(name: str, report: SideReport) -> Iterator[Check]:
    for note, count in report.notes.items():
        yield Check(name, "note", f"{count:,} of {report.num_chats:,}: {note}")
    yield from (Check(name, "warning", line) for line in report.differences[:_SHOWN])
    if report.differences:
        return
    counted = [plural(report.num_texts, "text")] if report.num_texts else []
    if report.num_chats:
        counted.append(plural(report.num_chats, "conversation"))
        counted += [plural(n, "message") + f" of {role}" for role, n in report.roles.items()]
        counted.append(f"{report.num_targets:,} of {report.num_tokens:,} tokens are targets")
    same = "equal to the library's" if report.is_compared else "not compared, without a library"
    yield Check(name, "ok" if report.is_compared else "note", f"{', '.join(counted)}: {same}")


def _teachers_own(
    teacher: Tokenizer, chats: Sequence[ChatRecord], template: str | Path | None
) -> Iterator[Check]:
    name, sizes = "teacher_messages", []
    for chat in chats:
        if is_missing(chat.teacher_messages):
            continue
        try:
            sides = SideChat(chat), *teachers_chats(chat, 1)
            sizes.append([len(side.render(teacher, template).ids) for side in sides])
        except XtokError as error:
            yield Check(name, "warning", error.message)
    if sizes:
        usual, own = map(sum, zip(*sizes, strict=True))
        message = f"{len(sizes):,} of {plural(len(chats), 'conversation')} have them, with which "
        yield Check(
            name, "ok", f"{message}the teacher reads {own / usual:.1f} times as many tokens there"
        )


def _aligned_rows(
    pair: Pair, rows: Sequence[SideText | SideChat], templates: Sequence[str | Path | None]
) -> Iterator[Aligned]:
    aligner = TokenAligner(pair)
    for row in rows:
        with suppress(XtokError):
            if isinstance(row, SideText):
                sides = [tokenizer.encode(row.text).ids for tokenizer in pair.tokenizers]
                flat, mask = aligner.align_document(*sides), np.ones(len(sides[0]), np.bool_)
            else:
                ours, theirs = map(row.render, pair.tokenizers, templates)
                sides, mask = [ours.ids, theirs.ids], ours.assistant_mask
                flat = align_rendered(aligner, ours, theirs)
            padded = flat.padded(*(np.ones((1, len(ids)), np.bool_) for ids in sides))
            labels = np.where(mask, sides[0], -100)
            yield aligned(pair.tokenizers, labels[None], (sides[0][None], sides[1][None]), padded)
