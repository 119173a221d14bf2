"""Compare the first rows of data with the models' libraries, and check the alignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok._lib.shards import Paths
from xtok.alignment.aligner import FlatAlignment, TokenAligner
from xtok.alignment.chats import align_rendered
from xtok.alignment.sequences import filled
from xtok.conversation import Conversation
from xtok.conversation.files import ChatRecord, chat_record
from xtok.conversation.formats import PromptFormat
from xtok.conversation.leaves import WEIGHT_KEYS
from xtok.conversation.rendering import BEGINS_IN_PROMPT, BLOCK_IN_PROMPT, find_template
from xtok.conversation.teacher_side import SideText, teacher_chats
from xtok.conversation.templates import has_generation_blocks, is_missing
from xtok.conversation.texts import check_texts, read_samples
from xtok.errors import XtokError, naming_template
from xtok.inspection.results import Check, Result
from xtok.tokenizers import Tokenizer, library_differences
from xtok.tokenizers.display import escape, percent, plural, quoted
from xtok.tokenizers.library import ids_apart
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES

ENOUGH = 0.5
"""Minimum share of targets in chunks, and of chunks with equal bytes. Pairs in the tests have 0.9
or more. Pairs with an uncased or Unicode-normalizing tokenizer have less."""

NUM_ROWS = 64
"""Number of rows of a file that `doctor` compares with the libraries."""

NUM_CHUNKS = 256
"""Number of chunks of a batch that are decoded on both sides."""

_SHOWN = 3


@dataclass
class SideReport:
    """Comparison of one side's training rows with the tokenizer's library."""

    differences: list[str]
    is_compared: bool  # False if no library supports the format
    num_texts: int
    num_chats: int
    rendered: list[Conversation]  # conversations that the template accepts

    @property
    def findings(self) -> Iterator[Result]:
        """The first differences, and the number of other differences."""
        yield from (("warning", difference) for difference in self.differences[:_SHOWN])
        if others := self.differences[_SHOWN:]:
            yield "warning", f"{len(others)} more like these"


def compare_side(
    tokenizer: Tokenizer,
    samples: Sequence[SideText | ChatRecord],
    *,
    template: str | Path | None = None,
    rows: Sequence[Sequence[int]] | None = None,
) -> SideReport:
    """Compare one model's roles, ids and masks with `AutoTokenizer` and `apply_chat_template`.

    Some targets of the library may be missing in xtok's masks: tokens that span the end of the
    prompt, and messages with weight 0. Texts with a context are skipped. `rows` contains the ids of
    each sample in a batch; by default, xtok encodes the samples.
    """
    texts = {n: s.text for n, s in enumerate(samples) if isinstance(s, SideText) and not s.context}
    chats = [sample for sample in samples if isinstance(sample, ChatRecord)]
    library = tokenizer.library
    if chats and isinstance(find_template(tokenizer, template), PromptFormat):
        library = None
    differences = library_differences(
        tokenizer, [*texts.values()], None if rows is None else [rows[n] for n in texts]
    )
    report = SideReport(differences, library is not None, len(texts), len(chats), [])
    for index, chat in enumerate(chats):
        try:
            report.rendered.append(chat.render(tokenizer, template))
            if library is not None:
                expected = _by_library(library, tokenizer, template, chat)
                differences += _chat_differences(index, report.rendered[-1], chat, expected)
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
            return_assistant_tokens_mask=has_generation_blocks(str(chosen)),
            **{"tools": chat.tools or None, **chat.variables},
        )
    except Exception as error:  # raised by the template, or for unsupported data
        raise XtokError(
            f"apply_chat_template of {type(library).__name__} failed: {error}",
            hint="write the conversation in the form that Transformers expects",
        ) from error
    return rendered


def _chat_differences(
    index: int, conversation: Conversation, chat: ChatRecord, expected: Mapping[str, Any]
) -> Iterator[str]:
    ids, mask = conversation.ids.tolist(), conversation.assistant_mask
    if ids != expected["input_ids"]:
        yield f"conversation {index} is {ids_apart(ids, expected['input_ids'])}"
        return
    masks = np.array(expected.get("assistant_masks", mask), np.bool_)
    may_lack = {BEGINS_IN_PROMPT, BLOCK_IN_PROMPT} & {*conversation.notes} or any(
        name in message for message in chat.messages for name in WEIGHT_KEYS
    )
    if (mask & ~masks).any() if may_lack else (mask != masks).any():
        difference = ids_apart(conversation.ids[mask].tolist(), conversation.ids[masks].tolist())
        yield f"the targets of conversation {index} are {difference}"


def alignment_findings(
    tokenizers: tuple[Tokenizer, Tokenizer],
    labels: NDArray[Any],
    ids: Sequence[NDArray[Any]],
    alignment: Mapping[str, NDArray[Any]],
) -> Iterator[Result]:
    """Count a batch's aligned targets and chunks, and decode some of the chunks.

    `labels`, `[B, T_s]`, are the student's labels before the shift; values below 0 are not targets.
    `ids` are the student's ids `[B, T_s]` and the teacher's ids `[B, T_t]`. `alignment` contains
    the arrays of a `PaddedAlignment`.
    """
    chunk, valid = alignment["student_chunk_id"], alignment["pair_valid"]
    equal = valid & alignment["pair_is_correct"]
    is_aligned = (chunk >= 0) & np.take_along_axis(valid, np.maximum(chunk, 0), axis=1)
    masks = [alignment[f"{side}_kept"] for side in SIDES]
    firsts = [mask & (mask.cumsum(1) == 1) for mask in masks]
    is_bos = [
        np.isin(mask, token_ids(tokenizer, "bos")) & first
        for mask, tokenizer, first in zip((labels, ids[1]), tokenizers, firsts, strict=True)
    ]
    begins = is_bos[0] & is_bos[1].any(1, keepdims=True)
    is_target = (labels >= 0) & ~firsts[0]  # no position predicts the first token
    ends = np.isin(labels, token_ids(tokenizers[0], "eos", "turn_end")) & is_target
    (targets, targets_in), (num_ends, ends_in), (num_bos, bos_in) = (
        (int(x.sum()), int((x & is_aligned).sum())) for x in (is_target, ends, begins)
    )
    if not targets:
        yield "warning", "the rows have no targets, so the student learns nothing from them"
        return
    num_equal, chunks = int(equal.sum()), int(valid.sum())
    side_chunks = chunk, alignment["teacher_chunk_id"]
    decoded = [*_decode_chunks(tokenizers, ids, side_chunks, np.argwhere(equal))]
    moved = [f"{a} and {b}" for a, b in decoded if a != b]
    differences = []
    if targets_in < ENOUGH * targets:
        differences.append(f"{targets_in} of {targets} targets are aligned with the teacher")
    if num_equal < ENOUGH * chunks:
        differences.append(f"{num_equal} of {chunks} chunks have the same bytes on both sides")
    if bos_in < num_bos:
        differences.append(f"{bos_in} of {plural(num_bos, 'bos token')} are in a chunk")
    if moved:
        differences.append(
            f"{len(moved)} of {len(decoded)} chunks that are marked as equal have other bytes on "
            f"the teacher's side, such as {moved[0]}: the ids or the alignment belong to other "
            "rows, or their positions were shifted"
        )
    yield from (("warning", difference) for difference in differences)
    if not differences:
        shares = percent(targets_in / targets), percent(num_equal / max(1, chunks))
        yield "ok", f"{shares[0]} of the targets are in a chunk ({shares[1]} of equal bytes)"
    if ends_in < ENOUGH * num_ends:
        yield (
            "note",
            f"{ends_in} of {num_ends} ends of turns or texts are in a chunk; the distillation loss "
            "does not teach the student to stop, but the cross-entropy does",
        )


def _decode_chunks(
    tokenizers: tuple[Tokenizer, Tokenizer],
    ids: Sequence[NDArray[Any]],
    chunk_ids: Sequence[NDArray[Any]],
    chunks: NDArray[np.int64],
) -> Iterator[tuple[str, ...]]:
    """Yield the texts of some chunks on both sides. `chunks` is `[N, 2]`: row and chunk id."""
    for row, chunk_id in chunks[:: -(-len(chunks) // NUM_CHUNKS) or 1]:
        side_ids = [x[row][c[row] == chunk_id] for x, c in zip(ids, chunk_ids, strict=True)]
        sides = [*zip((t.table for t in tokenizers), side_ids, strict=True)]
        if all((table.lengths[chunk] > 0).all() for table, chunk in sides):
            yield tuple(quoted(escape(table.spell(chunk))) for table, chunk in sides)


def token_ids(tokenizer: Tokenizer | None, *roles: str) -> list[int]:
    """Return a tokenizer's ids that have at least one of the given roles."""
    by_role = {} if tokenizer is None else tokenizer.table.roles
    return [i for role in roles for i in by_role.get(role, ())]


def first_rows(texts: Paths, field: str = "text") -> list[SideText | ChatRecord]:
    """Read the first rows of files with texts or conversations."""
    rows: list[SideText | ChatRecord] = []
    for location, value in islice(read_samples(texts), NUM_ROWS):
        text = value.get(field) if isinstance(value, Mapping) else value
        if isinstance(text, str):
            rows.append(SideText(text))
        elif isinstance(value, Mapping) and "messages" not in value:
            check_texts(texts, field)  # ignores nulls; the error names the fields in the file
        else:
            rows.append(chat_record(value, location))
    return rows


def row_checks(
    pair: Pair,
    rows: Sequence[SideText | ChatRecord],
    templates: Sequence[str | Path | None] = (None, None),
) -> Iterator[Check]:
    """Compare the ids of the first rows with the models' libraries, and check the alignment.

    No model is needed.
    """
    sides = {(t, x): s for s, t, x in zip(SIDES, pair.tokenizers, templates, strict=True)}
    for (tokenizer, template), side in sides.items():
        with naming_template(f"{side}_template"):
            report = compare_side(tokenizer, rows, template=template)
        yield from _side_checks(f"first rows, {tokenizer.vocabulary.model_id}", report)
    chats = [row for row in rows if isinstance(row, ChatRecord)]
    yield from _extra_check(pair.tokenizers[1], chats, templates[1])
    for level, message in _aligned_rows(pair, rows, templates):
        yield Check("first rows, aligned", level, message)


def _side_checks(name: str, report: SideReport) -> Iterator[Check]:
    notes = Counter(note for chat in report.rendered for note in chat.notes)
    for note, count in notes.items():
        yield Check(name, "note", f"{count:,} of {report.num_chats:,}: {note}")
    yield from (Check(name, *finding) for finding in report.findings)
    if report.differences:
        return
    counted = [plural(report.num_texts, "text")] if report.num_texts else []
    if report.num_chats:
        is_target = np.concatenate([chat.assistant_mask for chat in report.rendered])
        roles = Counter(span.role for chat in report.rendered for span in chat.message_spans)
        counted.append(plural(report.num_chats, "conversation"))
        counted += [plural(n, "message") + f" of {role}" for role, n in roles.items()]
        counted.append(f"{is_target.sum():,} of {len(is_target):,} tokens are targets")
    same = "equal to the library's" if report.is_compared else "not compared (no library)"
    yield Check(name, "ok" if report.is_compared else "note", f"{', '.join(counted)}: {same}")


def _extra_check(
    teacher: Tokenizer, chats: Sequence[ChatRecord], template: str | Path | None
) -> Iterator[Check]:
    name, sizes = "teacher_messages", []
    for chat in chats:
        if is_missing(chat.teacher_messages):
            continue
        try:
            sides = chat, *teacher_chats(chat, 1)
            sizes.append([len(side_chat.render(teacher, template).ids) for side_chat in sides])
        except XtokError as error:
            yield Check(name, "warning", error.message)
    if sizes:
        usual, own = map(sum, zip(*sizes, strict=True))
        message = f"{len(sizes):,} of {plural(len(chats), 'conversation')} have {name}; there, "
        yield Check(
            name, "ok", f"{message}the teacher reads {own / usual:.1f} times as many tokens"
        )


def _aligned_rows(
    pair: Pair, rows: Sequence[SideText | ChatRecord], templates: Sequence[str | Path | None]
) -> Iterator[Result]:
    aligner, sides, masks, alignments = TokenAligner(pair), [], [], []
    for row in rows:
        with suppress(XtokError):
            if isinstance(row, SideText):
                side_ids = [tokenizer.encode(row.text).ids for tokenizer in pair.tokenizers]
                alignments.append(aligner.align_document(*side_ids))
                masks.append(np.ones(len(side_ids[0]), np.bool_))
            else:
                student, teacher = map(row.render, pair.tokenizers, templates)
                side_ids = [student.ids, teacher.ids]
                alignments.append(align_rendered(aligner, student, teacher))
                masks.append(student.assistant_mask)
            sides.append(side_ids)
    if not sides:
        return
    ids, kept = zip(*(_pad(side_ids) for side_ids in zip(*sides, strict=True)), strict=True)
    is_target, _ = _pad(masks)
    padded = FlatAlignment.joined(alignments).padded(*kept)
    labels = np.where(is_target != 0, ids[0], -100)
    yield from alignment_findings(pair.tokenizers, labels, ids, vars(padded))


def _pad(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    lengths = np.array([*map(len, rows)])
    mask = np.arange(lengths.max()) < lengths[:, None]
    return filled(mask, np.concatenate(rows).astype(np.int64), 0), mask
