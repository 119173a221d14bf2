"""The stages that make and refine a map: `multitoken`, `reapply_exact`, `sort_cut`, `merge`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok import mapfile
from xtok._version import __version__
from xtok.canonical import (
    match_bytes,
    match_relaxed,
    slot_candidates,
)
from xtok.config import (
    FIRST_PIECE_WEIGHT,
    PIECE_DECAY,
    SLOT_WEIGHT,
    Canonicalization,
    MergeConfig,
    MultitokenConfig,
    SortCutConfig,
    SpecialTokens,
)
from xtok.errors import XtokError
from xtok.matching import beside_slots, in_form, pins, special_edges, used_options, without
from xtok.progress import Progress, silent
from xtok.projection import (
    Edges,
    ProjectionMap,
    RowKind,
    StageReport,
    heaviest,
    in_map_order,
    ranks,
    row_starts,
    sum_duplicates,
)
from xtok.sides import require_same_pair, require_table, with_vocabularies
from xtok.tokens import TokenTable, Vocabulary, plural

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

_CHUNK = 16_384  # tokens per call to a tokenizer, so that a progress bar moves


def multitoken(
    student: Tokenizer,
    teacher: Tokenizer,
    config: MultitokenConfig | None = None,
    *,
    initial: ProjectionMap | None = None,
    spared: Collection[int] = (),
    progress: Progress = silent,
) -> ProjectionMap:
    """Map each student token to the teacher tokens that spell it, and the other way round.

    Forward, a student token's bytes are segmented by the teacher's tokenizer; its first
    `max_pieces` pieces have the weights 0.9·0.1^i, normalized. In reverse, each teacher token is
    segmented by the student's, and its weights are added into (student piece, teacher token).
    Rows are normalized, cut, and given a scale slot, as X-Token does (arXiv 2605.21699).

    Args:
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        config: the options; the defaults if None.
        initial: a map of the same pair whose weights (but for slots) are added in.
        spared: student ids with bytes whose rows are left empty, for `reapply_exact` to fill: most
            tokens of related vocabularies, which need not be spelled then.
        progress: called for each pass over a vocabulary.

    Raises:
        XtokError: if `initial` is of other tokenizers.
    """
    config = config or MultitokenConfig()
    ignored = config.ignore_student_ids, config.ignore_teacher_ids
    _check_ignored("student", student, ignored[0])
    _check_ignored("teacher", teacher, ignored[1])
    rows = student.table_as(config.token_form, ignore=ignored[0])
    columns = teacher.table_as(config.token_form, ignore=ignored[1])
    notes = _side_notes(student, teacher)
    failures = undecodable_tokens(student, teacher, ignored)
    kind = np.zeros(len(rows), np.uint8)
    kind[list(spared)] = RowKind.PIECES
    open_rows = kind == RowKind.EMPTY
    if config.weights == "prior":
        unspelled: list[int] = []
        from xtok.prior import prior_edges

        parts = [
            prior_edges(student, teacher, config.target, unspelled=unspelled, progress=progress)
        ]
        failures += _unspelled(teacher, set(unspelled) - set(ignored[0]), rows)
    else:
        wanted = rows.text_ids[open_rows[rows.text_ids]]
        parts = [_spell(rows, wanted, teacher, config.max_pieces, progress, failures)]
        if config.reverse_pass:
            others = columns.text_ids
            t, s, w = _spell(columns, others, student, config.max_pieces, progress, failures)
            parts.append(Edges(s, t, w))
    if config.canonicalization == "relaxed":
        parts.append(pins(match_relaxed(rows, columns)))
    parts = [without(part, *ignored) for part in parts]
    if spared:
        parts = [part.take(open_rows[part.student_ids]) for part in parts]
    for part in parts:
        kind[part.student_ids] = RowKind.PIECES
    parts.append(special_edges(rows, columns, config))
    kind[parts[-1].student_ids] = RowKind.ROLE
    step: dict[str, Any] = {"stage": "multitoken", "options": config.options}
    if initial is not None:
        require_same_pair(initial, student.vocabulary, teacher.vocabulary)
        earlier = without(initial.edges.take(~initial.is_slot), *ignored)
        parts.insert(0, earlier.normalized())
        both = (initial.row_kind != kind) & (initial.row_kind != 0) & (kind != 0)
        kind = np.where(both, np.uint8(RowKind.MIXED), np.maximum(kind, initial.row_kind))
        step["initial_sha256"] = mapfile.sha256(initial)
    edges = sum_duplicates(Edges.concatenate(parts)).normalized()
    filled = np.bincount(edges.student_ids, minlength=len(rows)) > 0
    kind[~filled & open_rows] = RowKind.EMPTY
    edges = heaviest(edges, config.top_k - config.scale_trick)
    slot = None
    if config.scale_trick:
        candidates = [i for i in slot_candidates(teacher.table) if i not in ignored[1]]
        edges, slot = _add_slots(edges, candidates, teacher.table, len(rows), notes)
    notes += _empty_row_notes(student.vocabulary, kind, ignored[0])
    history = history_with(initial, step)
    return finished(
        edges,
        student=student.vocabulary,
        teacher=teacher.vocabulary,
        row_kind=np.where(filled, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=slot,
        method="multitoken",
        top_k=config.top_k,
        history=history,
        reports=(stage_report("multitoken", kind, notes, failures, history=history),),
    )


def reapply_exact(
    projection: ProjectionMap,
    *,
    special_tokens: SpecialTokens | None = None,
    canonicalization: Canonicalization | None = None,
    student: Tokenizer | None = None,
    teacher: Tokenizer | None = None,
    same_bytes: Mapping[int, int] | None = None,
) -> ProjectionMap:
    """Give each student token whose bytes a teacher token has that one entry, of weight 1.

    Special tokens are paired likewise. These rows have no slot; the others stay. With the
    canonicalization `relaxed`, a token without an exact counterpart that has a near-equivalent has
    this one entry, beside its slot. Token form and ignored ids are those the map was made with.

    Args:
        projection: a map that carries both token tables.
        special_tokens: as in `MultitokenConfig`; None takes what the map was made with.
        canonicalization: likewise.
        student: the tokenizer of the rows, for display strings, which a map does not carry.
        teacher: the tokenizer of the columns, likewise.
        same_bytes: what `canonical.match_bytes` finds, where it is known already.

    Raises:
        XtokError: if the map carries no token tables, or was made with display strings and the
            tokenizers are not given.
    """
    rows, columns = require_table(projection.student), require_table(projection.teacher)
    options = used_options(projection)
    options = replace(
        options,
        special_tokens=special_tokens or options.special_tokens,
        canonicalization=canonicalization or options.canonicalization,
    )
    ignored = options.ignore_student_ids, options.ignore_teacher_ids
    rows = in_form(rows, student, options.token_form, ignored[0])
    columns = in_form(columns, teacher, options.token_form, ignored[1])
    exact = pins(match_bytes(rows, columns) if same_bytes is None else same_bytes)
    special = heaviest(special_edges(rows, columns, options), projection.top_k)
    relaxed = pins(match_relaxed(rows, columns) if options.canonicalization == "relaxed" else {})
    kind = projection.row_kind.copy()
    kind[exact.student_ids], kind[special.student_ids] = RowKind.EXACT, RowKind.ROLE
    kind[relaxed.student_ids] = RowKind.RELAXED
    pinned, beside = np.zeros((2, len(rows)), np.bool_)
    pinned[exact.student_ids] = pinned[special.student_ids] = True
    beside[relaxed.student_ids] = True
    of_row = projection.student_ids
    others = projection.edges.take(~pinned[of_row] & (~beside[of_row] | projection.is_slot))
    slot = projection.scale_slot
    slotted = relaxed._replace(weights=beside_slots(relaxed, others))
    used: dict[str, str] = {"special_tokens": options.special_tokens}
    if options.canonicalization == "relaxed":
        used["canonicalization"] = "relaxed"
    history = history_with(projection, {"stage": "reapply-exact", "options": used})
    report = stage_report("reapply-exact", kind, [], history=history)
    return finished(
        Edges.concatenate([slotted, others, exact, special]),
        student=projection.student,
        teacher=projection.teacher,
        row_kind=kind,
        scale_slot=None if slot is None else np.where(pinned, np.uint8(0), slot),
        method=projection.method,
        top_k=projection.top_k,
        history=history,
        reports=(*projection.reports, report),
    )


def sort_cut(projection: ProjectionMap, config: SortCutConfig | None = None) -> ProjectionMap:
    """Cut each row to its `top_k` heaviest entries and normalize what is left; a slot stays last.

    The slot is one of the `top_k`. Rows that are not cut stay as they are, bit for bit.

    Raises:
        XtokError: if nothing but the slot would be left of a row.
    """
    config = config or SortCutConfig()
    if projection.enable_scale_trick and config.top_k < 2:
        raise XtokError(
            "--top-k 1 leaves no entry beside the scale slot",
            hint="give --top-k 2 or more, or build the map with --no-scale-trick",
        )
    starts = row_starts(projection.student_ids)
    sizes = np.diff(starts, append=projection.nnz)
    kept = np.minimum(sizes, config.top_k)
    ends = np.cumsum(kept)
    places = np.arange(int(kept.sum())) + np.repeat(starts - (ends - kept), kept)
    if projection.scale_slot is not None:  # a row's last entry is kept instead of the next best
        has_slot = projection.scale_slot[projection.student_ids[starts]] == 1
        places[ends[has_slot] - 1] = (starts + sizes)[has_slot] - 1
    edges = projection.edges.take(places)
    is_cut = np.zeros(projection.shape[0], np.bool_)
    is_cut[projection.student_ids[starts]] = kept < sizes
    dropped = np.ones(projection.nnz, np.bool_)
    dropped[places] = False
    weights = np.where(is_cut[edges.student_ids], edges.normalized().weights, edges.weights)
    mass = float(projection.weights[dropped].sum(dtype=np.float64))
    report = StageReport(
        "sort-cut",
        {
            "rows cut": int(is_cut.sum()),
            "entries cut": projection.nnz - len(places),
            "mean mass cut per row": mass / max(1, int(np.count_nonzero(projection.row_kind))),
            "rows whose order changed": sum(
                report.counts.get("rows reordered", 0) for report in projection.reports
            ),
        },
    )
    return finished(
        edges._replace(weights=weights),
        student=projection.student,
        teacher=projection.teacher,
        row_kind=projection.row_kind,
        scale_slot=projection.scale_slot,
        method=projection.method,
        top_k=config.top_k,
        history=history_with(projection, {"stage": "sort-cut", "options": asdict(config)}),
        reports=(*projection.reports, report),
    )


def merge(maps: Sequence[ProjectionMap], config: MergeConfig | None = None) -> ProjectionMap:
    """Add up the rows of several maps of one pair, each map by its weight.

    A row that some maps leave empty is the sum of the others'. What they pin to different tokens is
    no pin. With `fill`, the exact and role rows
    of the first map stay as they are. Slots are left out of the sum; the result has new ones if
    the first map has any.

    Args:
        maps: two or more, the first of which decides about pinned rows and slots.
        config: the options; the defaults if None.

    Raises:
        XtokError: if the maps are of different tokenizers, or their number is not that of weights.
    """
    config = config or MergeConfig()
    if len(maps) < 2:
        raise XtokError("there is only one map to merge", hint="give two or more maps")
    weights = config.weights or (1.0,) * len(maps)
    if len(weights) != len(maps):
        raise XtokError(
            f"there are {len(maps)} maps and {plural(len(weights), 'weight')}",
            hint=f"give one weight per map: --weights {','.join(['1'] * len(maps))}",
        )
    first = maps[0]
    for other in maps[1:]:
        sides = {"student": other.student, "teacher": other.teacher}
        first = with_vocabularies(first, **sides, widths=True)
    pinned = np.isin(first.row_kind, [RowKind.EXACT, RowKind.ROLE]) & config.fill
    kind = first.row_kind
    parts = []
    for projection, weight in zip(maps, weights, strict=True):
        takes_part = ~(projection.is_slot | pinned[projection.student_ids])
        part = projection.edges.take(takes_part).normalized()
        parts.append(part._replace(weights=part.weights * weight))
        both = (projection.row_kind != kind) & (projection.row_kind != 0) & (kind != 0)
        merged = np.where(both, np.uint8(RowKind.MIXED), np.maximum(kind, projection.row_kind))
        kind = np.where(pinned, kind, merged)
    notes: list[str] = []
    top_k = config.top_k or max(projection.top_k for projection in maps)
    edges = sum_duplicates(Edges.concatenate(parts)).normalized()
    several = np.bincount(edges.student_ids, minlength=len(kind)) > 1
    kind = np.where(several & (kind == RowKind.EXACT), np.uint8(RowKind.MIXED), kind)
    slot = None
    if first.enable_scale_trick:
        if first.teacher.table is None or top_k < 2:
            raise XtokError(
                "the first map has scale slots, and its rows can have no new ones"
                + (": --top-k 1 leaves no room" if top_k < 2 else ": it carries no tokens"),
                hint="give --top-k 2 or more, and first a map that xtok made",
            )
        single = np.isin(kind, [RowKind.EXACT, RowKind.ROLE])[edges.student_ids]
        slotted = heaviest(edges.take(~single), top_k - 1)
        columns = first.teacher.table
        candidates = slot_candidates(columns)
        slotted, slot = _add_slots(slotted, candidates, columns, first.shape[0], notes)
        edges = Edges.concatenate([heaviest(edges.take(single), top_k), slotted])
    else:
        edges = heaviest(edges, top_k)
    kept = first.edges.take(pinned[first.student_ids])
    filled = int(np.count_nonzero((first.row_kind == 0) & (kind != 0)))
    report = stage_report("merge", kind, notes)
    options = {"weights": list(weights), "fill": config.fill, "top_k": top_k}
    step = {
        "stage": "merge",
        "options": options,
        "initial_sha256": mapfile.sha256(maps[0]),
        "merged_sha256": [mapfile.sha256(projection) for projection in maps[1:]],
    }
    return finished(
        Edges.concatenate([edges, kept]),
        student=first.student,
        teacher=first.teacher,
        row_kind=kind,
        scale_slot=slot,
        method=first.method,
        top_k=top_k,
        history=history_with(first, step),
        reports=(
            *(report for projection in maps for report in projection.reports),
            replace(report, counts={**report.counts, "rows that were empty": filled}),
        ),
    )


def _spell(
    table: TokenTable,
    ids: NDArray[np.int64],
    tokenizer: Tokenizer,
    max_pieces: int,
    progress: Progress,
    failures: list[str],
) -> Edges:
    """Segment tokens of a table; edges from the tokens to their first pieces."""
    all_tokens = table.tokens()
    tokens = [all_tokens[i] for i in ids.tolist()]
    pieces: list[Sequence[int] | None] = []
    with progress(f"spelling in {tokenizer.vocabulary.model_id}", len(tokens)) as advance:
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            pieces += tokenizer.segment_batch(chunk)
            advance(len(chunk))
    failed = [i for i, found in zip(ids.tolist(), pieces, strict=True) if found is None]
    failures += _unspelled(tokenizer, failed, table)
    counts = np.fromiter((0 if found is None else len(found) for found in pieces), np.int64)
    flat = np.fromiter(chain.from_iterable(filter(None, pieces)), np.int32, int(counts.sum()))
    owner = np.repeat(np.arange(len(pieces)), counts)
    place = ranks(owner)
    first = place < max_pieces
    decay = FIRST_PIECE_WEIGHT * PIECE_DECAY ** np.arange(max_pieces)
    total = np.concatenate([[1.0], np.cumsum(decay)])
    return Edges(
        ids[owner[first]].astype(np.int32),
        flat[first],
        decay[place[first]] / total[np.minimum(counts, max_pieces)[owner[first]]],
    )


def _unspelled(tokenizer: Tokenizer, ids: Collection[int], table: TokenTable) -> list[str]:
    model_id = tokenizer.vocabulary.model_id
    return [f"{model_id} cannot spell {_some(sorted(ids), table)}"] if ids else []


def _check_ignored(side: str, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    width = tokenizer.vocabulary.vocab_size
    if ids and max(ids) >= width:
        raise XtokError(
            f"there is no {side} id {max(ids)} to ignore: "
            f"{tokenizer.vocabulary.model_id} is {width} wide",
            hint=f"give ids from 0 to {width - 1} with --ignore-{side}-ids",
        )


def _side_notes(student: Tokenizer, teacher: Tokenizer) -> list[str]:
    """Return for each side its width, where that comes from, and what changes text."""
    notes = []
    for side, tokenizer in (("student", student), ("teacher", teacher)):
        vocabulary = tokenizer.vocabulary
        notes.append(
            f"{side} {vocabulary.model_id}: {vocabulary.vocab_size:,} ids wide "
            f"(from the {vocabulary.width_source})"
        )
        notes += [
            f"{vocabulary.model_id} changes text: {change.normalizer}: {change.changes}"
            for change in tokenizer.text_changes
        ]
    return notes


def undecodable_tokens(
    student: Tokenizer,
    teacher: Tokenizer,
    ignored: tuple[Collection[int], Collection[int]] = ((), ()),
) -> list[str]:
    """Return a sentence for each side that has ids that should stand for text and do not."""
    failures = []
    sides = zip(("student", "teacher"), (student, teacher), ignored, strict=True)
    for side, tokenizer, left_out in sides:
        undecodable = [i for i in tokenizer.report.undecodable if i not in left_out]
        if undecodable:
            what = _some(undecodable, tokenizer.table, "id")
            failures.append(f"{side} {tokenizer.vocabulary.model_id}: no bytes behind {what}")
    return failures


def require_complete(projection: ProjectionMap) -> None:
    """Check that no stage of this process met a token that it could not decode or spell.

    Raises:
        XtokError: naming the first few.
    """
    failures = [failure for report in projection.reports for failure in report.failures]
    if failures:
        raise XtokError(
            "; ".join(failures),
            hint="leave out --strict to do without them: their rows and columns stay empty",
        )


def _add_slots(
    edges: Edges,
    candidates: Iterable[int],
    columns: TokenTable,
    num_rows: int,
    notes: list[str],
) -> tuple[Edges, NDArray[np.uint8]]:
    """Give each non-empty row a scale slot: the first candidate that the row does not have."""
    slot_of_row = np.full(num_rows, -1)
    waiting = np.zeros(num_rows, np.bool_)
    waiting[edges.student_ids] = True
    for candidate in candidates:
        free = waiting.copy()
        free[edges.student_ids[edges.teacher_ids == candidate]] = False
        slot_of_row[free] = candidate
        waiting &= ~free
        if not waiting.any():
            break
    rows = np.flatnonzero(slot_of_row >= 0)
    notes += _slot_notes(int(waiting.sum()), slot_of_row[rows], columns)
    slots = Edges(rows, slot_of_row[rows], np.full(len(rows), SLOT_WEIGHT))
    return Edges.concatenate([edges, slots]).normalized(), (slot_of_row >= 0).astype(np.uint8)


def _slot_notes(without: int, slots: NDArray[Any], columns: TokenTable) -> list[str]:
    """Return notes on rows without a slot, and on the teacher ids of the others' slots."""
    notes = []
    if without:
        notes.append(
            f"{plural(without, 'row')} without a scale slot: no teacher id is free of meaning"
        )
    if len(slots):
        taken, times = np.unique(slots, return_counts=True)
        most_first = taken[np.argsort(-times, kind="stable")].tolist()
        notes.append(f"scale slots on {_some(most_first, columns, 'teacher id')}")
    return notes


def finished_report(
    stage: str,
    projection: ProjectionMap,
    student: Tokenizer,
    teacher: Tokenizer,
    ignored: Collection[int] = (),
) -> StageReport:
    """Return one report for what several stages made: rows and notes of the finished map alone.

    Args:
        stage: the report's name.
        projection: the map, with the stages' reports, whose failures are kept.
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        ignored: rows that were asked to stay empty.
    """
    kind = projection.row_kind
    notes = _side_notes(student, teacher)
    if projection.scale_slot is not None:
        pinned = np.isin(kind, [RowKind.EMPTY, RowKind.EXACT, RowKind.ROLE])
        without = int(np.count_nonzero(~pinned & (projection.scale_slot == 0)))
        slots = projection.teacher_ids[projection.is_slot]
        notes += _slot_notes(without, slots, teacher.table)
    notes += _empty_row_notes(student.vocabulary, kind, ignored)
    failures = [failure for report in projection.reports for failure in report.failures]
    return stage_report(stage, kind, notes, failures, history=projection.history)


def finished(edges: Edges, *, scale_slot: NDArray[np.uint8] | None, **fields: Any) -> ProjectionMap:
    """Round the weights to float32, sort the rows, and put slots (a row's last edge) behind."""
    edges = edges._replace(weights=edges.weights.astype(np.float32, copy=False))
    last = np.zeros(len(edges.weights), np.bool_)
    if scale_slot is not None:
        final = np.zeros(len(scale_slot), np.int64)
        np.maximum.at(final, edges.student_ids, np.arange(len(last)))
        last[final[scale_slot == 1]] = True
    keep = edges.weights > 0  # a piece's weight may be too small for float32
    if not keep.all():
        edges, last = edges.take(keep), last[keep]
    edges = in_map_order(edges, last)
    return ProjectionMap(
        student_ids=edges.student_ids.astype(np.int32, copy=False),
        teacher_ids=edges.teacher_ids.astype(np.int32, copy=False),
        weights=edges.weights,
        scale_slot=scale_slot,
        **fields,
    )


def history_with(
    before: ProjectionMap | None, step: dict[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """Return a map's history, none if there is no map, with one more step, by this version."""
    done = () if before is None else tuple(before.history)
    return (*done, {**step, "xtok_version": __version__})


_IN_WORDS = {
    RowKind.EMPTY: "empty",
    RowKind.EXACT: "exact",
    RowKind.PIECES: "from pieces",
    RowKind.ROLE: "by role",
    RowKind.EMBEDDING: "by embedding",
    RowKind.COUNTED: "counted on the text",
    RowKind.MIXED: "mixed",
    RowKind.RELAXED: "relaxed",
}


def stage_report(
    stage: str,
    kind: NDArray[np.uint8],
    notes: Sequence[str],
    failures: Sequence[str] = (),
    *,
    history: Iterable[Mapping[str, Any]] = (),
) -> StageReport:
    """Return the report of a stage that counts the rows of its result by kind.

    The history of the map tells whether its pieces were counted on synthetic text.
    """
    found = np.bincount(kind, minlength=len(RowKind)).tolist()
    words = dict(_IN_WORDS)
    if any(step["options"].get("weights") == "prior" for step in history):
        words[RowKind.PIECES] = "counted on synthetic text"
    counts = {f"rows {words[k]}": found[k] for k in RowKind if found[k]}
    return StageReport(stage, counts, tuple(notes), tuple(failures))


def _empty_row_notes(
    student: Vocabulary, kind: NDArray[np.uint8], ignored: Collection[int] = ()
) -> list[str]:
    """Return a note on text rows, and one on special tokens, that stay empty unasked."""
    table = require_table(student)
    text = [i for i in table.text_ids.tolist() if not kind[i] and i not in ignored]
    special = [i for i in table.control_names if not kind[i] and i not in ignored]
    notes = [f"empty rows: {_some(text, table)}"] if text else []
    if special:
        notes.append(f"no counterpart for {_some(special, table, 'special token')}")
    return notes


def _some(ids: list[int], table: TokenTable, what: str = "token") -> str:
    """Count ids in words, with the first few as examples."""
    examples = ", ".join(f"{i} '{table.shown(i)}'" for i in ids[:3])
    more = ", …" if len(ids) > 3 else ""
    return f"{plural(len(ids), what)}: {examples}{more}"
