"""The stages that make and refine a map: `multitoken`, `reapply_exact`, `sort_cut`, `merge`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from xtok.matching import (
    beside_slots,
    in_form,
    single_edges,
    special_edges,
    used_options,
    without,
)
from xtok.progress import Progress, silent
from xtok.projection import (
    REORDERED,
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
from xtok.sides import of_one_pair, require_table, with_vocabularies
from xtok.tokens import TokenTable, plural

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

_CHUNK = 16_384  # tokens per call to a tokenizer, so that a progress bar moves


def multitoken(
    student: Tokenizer,
    teacher: Tokenizer,
    config: MultitokenConfig | None = None,
    *,
    initial: ProjectionMap | None = None,
    only: NDArray[np.bool_] | None = None,
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
        only: bool `[V_student]`, the rows to make; the others stay empty. All if None.
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
    if only is None:
        only = np.ones(len(rows), np.bool_)
    spelled, failures = _spelled_edges(student, teacher, rows, columns, config, only, progress)
    special = special_edges(rows, columns, config)
    special = special.take(only[special.student_ids])
    kind = np.zeros(len(rows), np.uint8)
    kind[spelled.student_ids] = RowKind.PIECES
    kind[special.student_ids] = RowKind.ROLE
    parts = [spelled, special]
    step: dict[str, Any] = {"stage": "multitoken", "options": config.options}
    if initial is not None:
        step["initial_sha256"] = mapfile.sha256(initial)
        initial = with_vocabularies(
            initial, student=student.vocabulary, teacher=teacher.vocabulary, widths=True
        )
        earlier = without(initial.edges.take(~initial.is_slot), *ignored)
        parts.insert(0, earlier.normalized())
        both = (initial.row_kind != kind) & (initial.row_kind != 0) & (kind != 0)
        kind = np.where(both, np.uint8(RowKind.MIXED), np.maximum(kind, initial.row_kind))
    edges = sum_duplicates(Edges.concatenate(parts)).normalized()
    filled = np.bincount(edges.student_ids, minlength=len(rows)) > 0
    edges = heaviest(edges, config.top_k - config.scale_trick)
    slot = None
    if config.scale_trick:
        candidates = [i for i in slot_candidates(teacher.table) if i not in ignored[1]]
        edges, slot = _add_slots(edges, candidates, len(rows))
    projection = finished(
        edges,
        student=student.vocabulary,
        teacher=teacher.vocabulary,
        row_kind=np.where(filled, kind, np.uint8(RowKind.EMPTY)),
        scale_slot=slot,
        method="multitoken",
        top_k=config.top_k,
        history=history_with(initial, step),
    )
    failures = [*undecodable_tokens(student, teacher, ignored), *failures]
    notes = [*tokenizer_notes(student, teacher), *map_notes(projection, ignored[0])]
    return reported(projection, stage_report("multitoken", projection, notes, failures))


def _spelled_edges(
    student: Tokenizer,
    teacher: Tokenizer,
    rows: TokenTable,
    columns: TokenTable,
    config: MultitokenConfig,
    only: NDArray[np.bool_],
    progress: Progress,
) -> tuple[Edges, list[str]]:
    """Return the edges that text tokens of the wanted rows have, and what cannot be spelled."""
    if config.weights == "prior":
        from xtok.prior import prior_edges

        edges, unspelled = prior_edges(student, teacher, config.target, progress=progress)
        wanted = set(unspelled) - set(config.ignore_student_ids)
        parts, failures = [edges], _unspelled(teacher, wanted, rows)
    else:
        open_ids = rows.text_ids[only[rows.text_ids]]
        forward, failures = _spell(rows, open_ids, teacher, config.max_pieces, progress)
        parts = [forward]
        if config.reverse_pass:
            all_ids = columns.text_ids
            reverse, more = _spell(columns, all_ids, student, config.max_pieces, progress)
            parts.append(Edges(reverse.teacher_ids, reverse.student_ids, reverse.weights))
            failures += more
    if config.canonicalization == "relaxed":
        parts.append(single_edges(match_relaxed(rows, columns)))
    ignored = config.ignore_student_ids, config.ignore_teacher_ids
    edges = without(Edges.concatenate(parts), *ignored)
    return edges.take(only[edges.student_ids]), failures


def reapply_exact(
    projection: ProjectionMap,
    *,
    special_tokens: SpecialTokens | None = None,
    canonicalization: Canonicalization | None = None,
    student: Tokenizer | None = None,
    teacher: Tokenizer | None = None,
) -> ProjectionMap:
    """Give each student token whose bytes a teacher token has that one entry, of weight 1.

    Special tokens are paired likewise. These rows have no slot; the others stay. With the
    canonicalization `relaxed`, a token without an exact counterpart that has a near-equivalent has
    this one entry, beside its slot. Token form and ignored ids are those the map was made with.

    Args:
        projection: a map that carries both token tables, or whose tokenizers are given.
        special_tokens: as in `MultitokenConfig`; None takes what the map was made with.
        canonicalization: likewise.
        student: the tokenizer of the rows, for a map without tokens, and for display strings, which
            a map does not carry.
        teacher: the tokenizer of the columns, likewise.

    Raises:
        XtokError: if the map carries no token tables, or was made with display strings and the
            tokenizers are not given, or is of other tokenizers.
    """
    projection = with_vocabularies(
        projection,
        student=None if student is None else student.vocabulary,
        teacher=None if teacher is None else teacher.vocabulary,
    )
    rows, columns = require_table(projection.student), require_table(projection.teacher)
    options = used_options(projection)
    options = replace(
        options,
        special_tokens=special_tokens or options.special_tokens,
        canonicalization=canonicalization or options.canonicalization,
    )
    rows = in_form(rows, student, options.token_form, options.ignore_student_ids)
    columns = in_form(columns, teacher, options.token_form, options.ignore_teacher_ids)
    return with_exact(projection, exact_matches(rows, columns, options), options)


@dataclass(frozen=True)
class ExactMatches:
    """The rows that need no spelling, and those that one near-equivalent settles.

    Attributes:
        equal: tokens of equal bytes, weight 1 each.
        special: special tokens; each row sums to 1.
        relaxed: near-equivalents of tokens without an exact counterpart, weight 1 each; these rows
            keep their slot.
        is_exact: bool `[V_student]`, the rows of `equal` and `special`.
    """

    equal: Edges
    special: Edges
    relaxed: Edges
    is_exact: NDArray[np.bool_]


def exact_matches(rows: TokenTable, columns: TokenTable, config: MultitokenConfig) -> ExactMatches:
    """Match the tokens of two tables, which are in the form that they are compared in."""
    equal = single_edges(match_bytes(rows, columns))
    special = special_edges(rows, columns, config)
    relaxed = match_relaxed(rows, columns) if config.canonicalization == "relaxed" else {}
    is_exact = np.zeros(len(rows), np.bool_)
    is_exact[equal.student_ids] = is_exact[special.student_ids] = True
    return ExactMatches(equal, special, single_edges(relaxed), is_exact)


def with_exact(
    projection: ProjectionMap, matches: ExactMatches, config: MultitokenConfig
) -> ProjectionMap:
    """Put matches in the place of a map's own rows.

    Args:
        projection: the map.
        matches: of its two vocabularies.
        config: the options that the matches were made with.
    """
    special = heaviest(matches.special, projection.top_k)
    kind = projection.row_kind.copy()
    kind[matches.equal.student_ids], kind[special.student_ids] = RowKind.EXACT, RowKind.ROLE
    kind[matches.relaxed.student_ids] = RowKind.RELAXED
    replaced = np.zeros(len(kind), np.bool_)
    replaced[matches.relaxed.student_ids] = True
    of_row = projection.student_ids
    kept = ~matches.is_exact[of_row] & (~replaced[of_row] | projection.is_slot)
    others = projection.edges.take(kept)
    relaxed = matches.relaxed._replace(weights=beside_slots(matches.relaxed, others))
    slot = projection.scale_slot
    used: dict[str, str] = {"special_tokens": config.special_tokens}
    if config.canonicalization == "relaxed":
        used["canonicalization"] = "relaxed"
    result = finished(
        Edges.concatenate([relaxed, others, matches.equal, special]),
        student=projection.student,
        teacher=projection.teacher,
        row_kind=kind,
        scale_slot=None if slot is None else np.where(matches.is_exact, np.uint8(0), slot),
        method=projection.method,
        top_k=projection.top_k,
        history=history_with(projection, {"stage": "reapply-exact", "options": used}),
        reports=projection.reports,
    )
    return reported(result, stage_report("reapply-exact", result))


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
                report.counts.get(REORDERED, 0) for report in projection.reports
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


def merge(
    maps: Sequence[ProjectionMap],
    config: MergeConfig | None = None,
    *,
    names: Sequence[str] = (),
) -> ProjectionMap:
    """Add up the rows of several maps of one pair, each map by its weight.

    A row that some maps leave empty is the sum of the others'. What they pin to different tokens is
    no pin. With `fill`, the exact and role rows
    of the first map stay as they are. Slots are left out of the sum; the result has new ones if
    the first map has any.

    Args:
        maps: two or more, the first of which decides about pinned rows and slots.
        config: the options; the defaults if None.
        names: what errors call the maps.

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
    digests = [mapfile.sha256(projection) for projection in maps]
    maps = of_one_pair(maps, names)
    first = maps[0]
    pinned = np.isin(first.row_kind, [RowKind.EXACT, RowKind.ROLE]) & config.fill
    kind = first.row_kind
    parts = []
    for projection, weight in zip(maps, weights, strict=True):
        takes_part = ~(projection.is_slot | pinned[projection.student_ids])
        part = projection.edges.take(takes_part).normalized()
        parts.append(part._replace(weights=part.weights * weight))
        both = (projection.row_kind != kind) & (projection.row_kind != 0) & (kind != 0)
        mixed = np.where(both, np.uint8(RowKind.MIXED), np.maximum(kind, projection.row_kind))
        kind = np.where(pinned, kind, mixed)
    top_k = config.top_k or max(projection.top_k for projection in maps)
    edges = sum_duplicates(Edges.concatenate(parts)).normalized()
    several = np.bincount(edges.student_ids, minlength=len(kind)) > 1
    kind = np.where(several & (kind == RowKind.EXACT), np.uint8(RowKind.MIXED), kind)
    slot = None
    if first.enable_scale_trick:
        if top_k < 2:
            raise XtokError(
                "the first map has scale slots, for which --top-k 1 leaves no room",
                hint="give --top-k 2 or more",
            )
        single = np.isin(kind, [RowKind.EXACT, RowKind.ROLE])[edges.student_ids]
        slotted = heaviest(edges.take(~single), top_k - 1)
        columns = first.teacher.table
        candidates: Iterable[int] = _most_frequent(first.teacher_ids[first.is_slot])
        if columns is not None:
            candidates = slot_candidates(columns)
        slotted, slot = _add_slots(slotted, candidates, first.shape[0])
        edges = Edges.concatenate([heaviest(edges.take(single), top_k), slotted])
    else:
        edges = heaviest(edges, top_k)
    kept = first.edges.take(pinned[first.student_ids])
    options = {"weights": list(weights), "fill": config.fill, "top_k": top_k}
    step = {
        "stage": "merge",
        "options": options,
        "initial_sha256": digests[0],
        "merged_sha256": digests[1:],
    }
    merged = finished(
        Edges.concatenate([edges, kept]),
        student=first.student,
        teacher=first.teacher,
        row_kind=kind,
        scale_slot=slot,
        method=first.method,
        top_k=top_k,
        history=history_with(first, step),
        reports=tuple(report for projection in maps for report in projection.reports),
    )
    filled = int(np.count_nonzero((first.row_kind == 0) & (kind != 0)))
    report = stage_report("merge", merged, slot_notes(merged))
    return reported(
        merged, replace(report, counts={**report.counts, "rows that were empty": filled})
    )


def _spell(
    table: TokenTable,
    ids: NDArray[np.int64],
    tokenizer: Tokenizer,
    max_pieces: int,
    progress: Progress,
) -> tuple[Edges, list[str]]:
    """Segment tokens of a table: edges from the tokens to their first pieces, and failures."""
    all_tokens = table.tokens()
    tokens = [all_tokens[i] for i in ids.tolist()]
    pieces: list[Sequence[int] | None] = []
    with progress(f"spelling in {tokenizer.vocabulary.model_id}", len(tokens)) as advance:
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            pieces += tokenizer.segment_batch(chunk)
            advance(len(chunk))
    failed = [i for i, found in zip(ids.tolist(), pieces, strict=True) if found is None]
    counts = np.fromiter((0 if found is None else len(found) for found in pieces), np.int64)
    flat = np.fromiter(chain.from_iterable(filter(None, pieces)), np.int32, int(counts.sum()))
    owner = np.repeat(np.arange(len(pieces)), counts)
    place = ranks(owner)
    first = place < max_pieces
    decay = FIRST_PIECE_WEIGHT * PIECE_DECAY ** np.arange(max_pieces)
    total = np.concatenate([[1.0], np.cumsum(decay)])
    edges = Edges(
        ids[owner[first]].astype(np.int32),
        flat[first],
        decay[place[first]] / total[np.minimum(counts, max_pieces)[owner[first]]],
    )
    return edges, _unspelled(tokenizer, failed, table)


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


def tokenizer_notes(student: Tokenizer, teacher: Tokenizer) -> list[str]:
    """Return a note on each side's width and where it comes from, and on what changes text."""
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
    edges: Edges, candidates: Iterable[int], num_rows: int
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
    slots = Edges(rows, slot_of_row[rows], np.full(len(rows), SLOT_WEIGHT))
    return Edges.concatenate([edges, slots]).normalized(), (slot_of_row >= 0).astype(np.uint8)


def _most_frequent(ids: NDArray[np.integer[Any]]) -> list[int]:
    """Return the different ids of a list, the most frequent first."""
    different, times = np.unique(ids, return_counts=True)
    return [int(i) for i in different[np.argsort(-times, kind="stable")]]


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
    projection: ProjectionMap,
    notes: Sequence[str] = (),
    failures: Sequence[str] = (),
) -> StageReport:
    """Return the report of a stage that counts the rows of its result by kind."""
    found = np.bincount(projection.row_kind, minlength=len(RowKind)).tolist()
    words = dict(_IN_WORDS)
    if any(step["options"].get("weights") == "prior" for step in projection.history):
        words[RowKind.PIECES] = "counted on synthetic text"
    counts = {f"rows {words[k]}": found[k] for k in RowKind if found[k]}
    return StageReport(stage, counts, tuple(notes), tuple(failures))


def reported(projection: ProjectionMap, report: StageReport) -> ProjectionMap:
    """Return a map with one more report."""
    return replace(projection, reports=(*projection.reports, report))


def map_notes(projection: ProjectionMap, ignored: Collection[int] = ()) -> list[str]:
    """Return what deserves a look in a finished map: its scale slots, rows that are empty.

    Rows of `ignored` ids were asked to be empty.
    """
    return [*slot_notes(projection), *_empty_row_notes(projection, ignored)]


def slot_notes(projection: ProjectionMap) -> list[str]:
    """Return a note on rows that have no scale slot, and one on the ids that serve as slots."""
    if projection.scale_slot is None:
        return []
    notes = []
    needs_none = [RowKind.EMPTY, RowKind.EXACT, RowKind.ROLE]
    lacking = (projection.scale_slot == 0) & ~np.isin(projection.row_kind, needs_none)
    if lacking.any():
        notes.append(
            f"{plural(int(lacking.sum()), 'row')} without a scale slot: no teacher id is free of "
            "meaning"
        )
    if projection.is_slot.any():
        most_first = _most_frequent(projection.teacher_ids[projection.is_slot])
        notes.append(f"scale slots on {_some(most_first, projection.teacher.table, 'teacher id')}")
    return notes


def _empty_row_notes(projection: ProjectionMap, ignored: Collection[int]) -> list[str]:
    """Return a note on text rows, and one on special tokens, that are left empty."""
    table, kind = require_table(projection.student), projection.row_kind
    text = [i for i in table.text_ids.tolist() if not kind[i] and i not in ignored]
    special = [i for i in table.control_names if not kind[i] and i not in ignored]
    notes = [f"empty rows: {_some(text, table)}"] if text else []
    if special:
        notes.append(f"no counterpart for {_some(special, table, 'special token')}")
    return notes


def _some(ids: list[int], table: TokenTable | None, what: str = "token") -> str:
    """Count ids in words, with the first few as examples."""
    examples = ", ".join(
        str(i) + ("" if table is None else f" '{table.shown(i)}'") for i in ids[:3]
    )
    more = ", …" if len(ids) > 3 else ""
    return f"{plural(len(ids), what)}: {examples}{more}"
