"""Everything that the page of `xtok report` shows of a map, or of two maps of one pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtok import __version__
from xtok.alignment.aligner import TokenAligner
from xtok.config import BuildConfig, Loss
from xtok.counting.texts import find_texts
from xtok.inspection.advice import Advice, Fit, advise, fits
from xtok.inspection.compare import Comparison, compare
from xtok.inspection.evaluate import Evaluation, measure
from xtok.inspection.inspect import Inspection, inspect
from xtok.inspection.pair_facts import Shared, TextCounts, TextFacts, pair_facts
from xtok.inspection.samples import Sample, align_sample, sentences_of
from xtok.inspection.verdict import Finding, MapNumbers, findings
from xtok.inspection.verify import Verification, verify
from xtok.maps import file as mapfile
from xtok.maps.file import MapLike, as_maps
from xtok.maps.pair import of_one_pair, with_vocabularies
from xtok.maps.projection_map import ProjectionMap, RowKind, require_table
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.stages.events import events as make_events
from xtok.tokenizers import Tokenizer
from xtok.vocab.classes import TokenClass, token_classes
from xtok.vocab.table import TokenTable, match_bytes

_EXAMPLES = 6


@dataclass(frozen=True, kw_only=True)
class PairClass:
    """A class of tokens on both sides, whatever the map.

    Attributes:
        token_class: the name of a `TokenClass`, in lower case.
        label: as a person reads it.
        shared: tokens of this class on each side, and student tokens whose bytes the teacher has.
        text_share: of the text's student tokens; None without text.
    """

    token_class: str
    label: str
    shared: Shared
    text_share: float | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a class of tokens: how many, and the first few, escaped."""

    name: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MapClass:
    """A class of tokens in a map.

    Attributes:
        token_class: the name of a `TokenClass`, in lower case.
        label: as a person reads it.
        rows: student tokens of the class: exact, pieces, counted, other, empty.
        columns: teacher tokens of the class: those in rows, and those in none.
    """

    token_class: str
    label: str
    rows: tuple[Part, ...]
    columns: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class MapFacts:
    """One map: what it holds, whether it is in order, and what it is fit for.

    Attributes:
        name: the last component of its path, or `map 1`.
        sha256: of the map as `.safetensors`.
        description: what `inspect` says.
        verification: what `verify` says.
        classes: rows and columns by class of token.
        fits: for each loss, whether the map suits it.
        build_commands: the commands that made it, as far as its history tells.
    """

    name: str
    sha256: str
    description: Inspection
    verification: Verification
    classes: tuple[MapClass, ...]
    fits: tuple[Fit, ...]
    build_commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the page shows.

    Attributes:
        student: model id of the rows.
        teacher: model id of the columns.
        table_sha256: the digests of both token tables, student first.
        advice: the loss, artefact and direction that suit the pair, as `doctor` says it.
        findings: three to six, the worst first.
        maps: one or two.
        vocabulary: byte strings of each side, and those of both.
        classes: tokens by class.
        text: what the text says of the pair; None without text.
        evaluation: the maps measured on the text; None without text.
        comparison: of two maps; None for one.
        samples: sentences in both tokenizations; none without the tokenizers.
        version: of xtok.
    """

    student: str
    teacher: str
    table_sha256: tuple[str, str]
    advice: Advice
    findings: tuple[Finding, ...]
    maps: tuple[MapFacts, ...]
    vocabulary: Shared
    classes: tuple[PairClass, ...]
    text: TextFacts | None
    evaluation: Evaluation | None
    comparison: Comparison | None
    samples: tuple[Sample, ...]
    version: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Examined:
    """A page, and what its search is made of: maps, how often tokens occur, tokenizers."""

    page: Page
    maps: tuple[ProjectionMap, ...]
    counts: TextCounts | None
    tokenizers: tuple[Tokenizer, Tokenizer] | None


def examine(
    maps: MapLike | Sequence[MapLike],
    *,
    texts: Sequence[str | Path] = (),
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    names: Sequence[str] = (),
    field: str = "text",
    num_worst: int = 10,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> Examined:
    """Examine a map, or two of one pair, for its page.

    Args:
        maps: a map or two, or their paths.
        texts: paths and globs of text, as `evaluate` takes them.
        tokenizers: of the rows and of the columns, to spell tokens, sentences and text.
        names: what the page calls the maps.
        field: the field of JSON lines, or column of Parquet, that holds the text.
        num_worst: how many of the most costly rows to list for each map.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        XtokError: if a map carries no tokens and there are no tokenizers, two maps are of different
            pairs, or a text cannot be read.
        ValueError: for text without tokenizers.
    """
    if texts and tokenizers is None:
        raise ValueError("text needs both tokenizers")
    loaded, names = as_maps(maps, names)
    if tokenizers is not None:
        student, teacher = (side.vocabulary for side in tokenizers)
        loaded = [
            with_vocabularies(m, student=student, teacher=teacher, widths=True, name=name)
            for m, name in zip(loaded, names, strict=True)
        ]
    loaded = of_one_pair(loaded, names)
    repeated = {name for name, times in Counter(names).items() if times > 1}
    names = [f"{n} ({i})" if n in repeated else n for i, n in enumerate(names, start=1)]
    pair = _Pair(require_table(loaded[0].student), require_table(loaded[0].teacher))
    counts = evaluation = facts = None
    paths = find_texts(texts) if texts else []
    if tokenizers is not None and texts:
        evaluation, counts = measure(
            loaded, paths, *tokenizers, names=names, field=field, group_by=None, for_loss="p-kl",
            num_worst=num_worst, seed=0, progress=progress, text_progress=text_progress,
        )  # fmt: skip
        facts = evaluation.pair
    elif tokenizers is not None:
        of_pair = make_events(*tokenizers, progress=progress)
        facts = pair_facts(loaded[0].student, loaded[0].teacher, None, of_pair)
    facts = facts or pair_facts(loaded[0].student, loaded[0].teacher)
    numbers = [
        _numbers(m, name, pair, counts, evaluation) for m, name in zip(loaded, names, strict=True)
    ]
    page = Page(
        student=loaded[0].student.model_id,
        teacher=loaded[0].teacher.model_id,
        table_sha256=(pair.rows.sha256(), pair.columns.sha256()),
        advice=advise(facts),
        findings=findings(facts, [(name, n) for name, (n, _) in zip(names, numbers, strict=True)]),
        maps=tuple(
            MapFacts(
                name=name,
                sha256=mapfile.sha256(m),
                description=inspect(m),
                verification=verification,
                classes=_map_classes(m, pair),
                fits=fits(m, facts, failed=n.failed, measures=n.measures, empty_text=n.empty_text),
                build_commands=tuple(_commands(m)),
            )
            for m, name, (n, verification) in zip(loaded, names, numbers, strict=True)
        ),
        vocabulary=facts.vocabulary,
        classes=tuple(pair.shared_by_class(counts)),
        text=facts.text,
        evaluation=evaluation,
        comparison=compare(
            *loaded, names=names, token_counts=None if counts is None else counts.tokens[0]
        )
        if len(loaded) == 2
        else None,
        samples=() if tokenizers is None else _samples(*tokenizers, paths, field),
        version=__version__,
    )
    return Examined(page=page, maps=tuple(loaded), counts=counts, tokenizers=tokenizers)


def _samples(
    student: Tokenizer, teacher: Tokenizer, paths: Sequence[Path], field: str
) -> tuple[Sample, ...]:
    aligner = TokenAligner(student, teacher)
    aligned = (align_sample(aligner, student, teacher, one) for one in sentences_of(paths, field))
    return tuple(sample for sample in aligned if sample is not None)


class _Pair:
    """Two vocabularies, and which tokens of them are the same."""

    def __init__(self, rows: TokenTable, columns: TokenTable) -> None:
        self.rows, self.columns = rows, columns
        same = match_bytes(rows, columns)
        self.partner = np.full(len(rows), -1, np.int64)
        self.partner[list(same)] = list(same.values())
        self.classes = token_classes(rows), token_classes(columns)

    def shared_by_class(self, counts: TextCounts | None) -> list[PairClass]:
        ours, theirs = self.classes
        classes = []
        for member in TokenClass:
            of_class = ours == member
            shared = Shared(
                student=int(of_class.sum()),
                teacher=int((theirs == member).sum()),
                both=int((of_class & (self.partner >= 0)).sum()),
            )
            if member != TokenClass.UNUSED and (shared.student or shared.teacher):
                share = None if counts is None else _share(counts, of_class)
                name = member.name.lower()
                classes.append(
                    PairClass(token_class=name, label=member.label, shared=shared, text_share=share)
                )
        return classes


def _share(counts: TextCounts | None, tokens: NDArray[np.bool_]) -> float:
    """Return the share of the text's student tokens that these are; 0 without text."""
    return 0.0 if counts is None else float(counts.tokens[0][tokens].sum() / counts.tokens[0].sum())


def _numbers(
    m: ProjectionMap,
    name: str,
    pair: _Pair,
    counts: TextCounts | None,
    evaluation: Evaluation | None,
) -> tuple[MapNumbers, Verification]:
    verification = verify(m)
    is_text = pair.rows.lengths > 0
    empty = is_text & (m.row_kind == RowKind.EMPTY)
    exact = is_text & (m.row_kind == RowKind.EXACT)
    slots = m.weights[m.is_slot]
    real = ~m.is_slot
    reached = np.zeros(m.shape[1], np.bool_)
    reached[m.teacher_ids[real]] = True
    numbers = MapNumbers(
        empty=int(empty.sum()),
        empty_text=_share(counts, empty),
        exact=int(exact.sum()),
        slots=len(slots),
        slot_weight=float(slots.mean()) if len(slots) else 0.0,
        unreached=int((~reached & (pair.columns.lengths > 0)).sum()),
        teacher_tokens=len(pair.columns.text_ids),
        failed=verification.failed,
        measures=None
        if evaluation is None
        else [one for one in evaluation.measures if one.name == name][-1],
        lost=0.0 if evaluation is None else evaluation.lost_bytes / max(1, evaluation.num_bytes),
    )
    return numbers, verification


# The parts of a class's bar, and the kinds of rows that they are.
_PARTS = {
    "exact": (RowKind.EXACT, RowKind.ROLE, RowKind.RELAXED),
    "pieces": (RowKind.PIECES,),
    "counted": (RowKind.COUNTED,),
    "other": (RowKind.EMBEDDING, RowKind.MIXED),
    "empty": (RowKind.EMPTY,),
}


def _map_classes(m: ProjectionMap, pair: _Pair) -> tuple[MapClass, ...]:
    part_of_kind = {kind: part for part, kinds in _PARTS.items() for kind in kinds}
    parts = list(_PARTS)
    part_ids = np.array([parts.index(part_of_kind[kind]) for kind in RowKind])
    in_rows = np.zeros(m.shape[1], np.int64)
    in_rows[m.teacher_ids[~m.is_slot]] = 1
    sides = (
        (pair.rows, pair.classes[0], part_ids[m.row_kind], parts),
        (pair.columns, pair.classes[1], 1 - in_rows, ["in rows", "in no row"]),
    )
    classes = []
    for member in TokenClass:
        found = [
            _parts(table, np.flatnonzero(classes_of == member), part, part_names)
            for table, classes_of, part, part_names in sides
        ]
        if member != TokenClass.UNUSED and any(found):
            classes.append(
                MapClass(
                    token_class=member.name.lower(),
                    label=member.label,
                    rows=found[0],
                    columns=found[1],
                )
            )
    return tuple(classes)


def _parts(
    table: TokenTable, ids: NDArray[np.int64], part: NDArray[Any], names: Sequence[str]
) -> tuple[Part, ...]:
    found = []
    for place, name in enumerate(names):
        of_part = ids[part[ids] == place]
        if len(of_part):
            examples = tuple(table.shown(i) for i in of_part[:_EXAMPLES].tolist())
            found.append(Part(name=name, count=len(of_part), examples=examples))
    return tuple(found)


# The commands that made a map


def _commands(m: ProjectionMap) -> list[tuple[str, ...]]:
    """Return the commands that made a map, by its history: one `build`, or one for each stage."""
    stages = [str(step["stage"]) for step in m.history]
    models = ("--student-model", m.student.model_id, "--teacher-model", m.teacher.model_id)
    texts = [str(one["name"]) for step in m.history for one in step.get("texts", ())]
    given = [word for text in texts for word in ("--text", text)]
    built = _build_options(m.history) if stages[:1] == ["multitoken"] else None
    if built is not None:
        return [("xtok", "build", *models, *built, *given)]
    commands = []
    for step in m.history:
        if step["stage"] not in _STAGES:  # a file that was read, a trained map, another program's
            continue
        words = [w for name, v in sorted(step["options"].items()) for w in _flag(name, v)]
        own_texts = [w for one in step.get("texts", ()) for w in ("--text", str(one["name"]))]
        commands.append(("xtok", str(step["stage"]), *words, *own_texts))
    return commands


_STAGES = ("multitoken", "reapply-exact", "sort-cut", "generate", "estimate", "merge")
"""Stages that a command of their name runs."""

_BUILT = (
    ["multitoken", "reapply-exact", "sort-cut"],
    ["multitoken", "sort-cut"],
    ["multitoken", "estimate"],
    ["multitoken", "estimate", "reapply-exact"],
)


def _build_options(history: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the options of the `build` with this history, by its nearest preset; None if none."""
    stages = [str(step["stage"]) for step in history]
    if stages not in _BUILT:
        return None
    options = dict(history[0]["options"])
    options |= {"exact_match": "reapply-exact" in stages}
    options |= history[stages.index("estimate" if "estimate" in stages else "sort-cut")]["options"]
    known = {f.name for f in fields(BuildConfig)}
    losses: tuple[Loss | None, ...] = (None, "p-kl", "gold")
    nearest: list[str] | None = None
    for loss in losses:
        usual = BuildConfig() if loss is None else BuildConfig.for_loss(loss)
        words = [] if loss is None else ["--for", loss]
        for name in sorted(known):
            value = options.get(name, getattr(BuildConfig, name))
            value = tuple(value) if isinstance(value, list) else value
            if value != getattr(usual, name):
                words += _flag(name, value)
        if nearest is None or len(words) < len(nearest):
            nearest = words
    return nearest


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return [] if value is None else [f"--{flag}", str(value)]
