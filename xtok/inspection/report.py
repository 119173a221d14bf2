"""Collect the data for the report page about one map, or two maps of the same pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xtok import __version__
from xtok._lib.progress import Progress, silent
from xtok._lib.shards import Paths
from xtok.alignment.aligner import TextAlignment, TokenAligner, describe_alignment
from xtok.building.counting.pair_text import CountPlan, PairText
from xtok.inspection.advice import Advice, Fit, advise, fits
from xtok.inspection.compare import Comparison, compare_maps
from xtok.inspection.describe import Description, describe
from xtok.inspection.evaluate import Evaluation, measure_maps
from xtok.inspection.measures import MOST_EMPTY, Verdict, empty_share
from xtok.inspection.pair_facts import PairFacts, pair_facts
from xtok.inspection.results import Grade, distinct_names
from xtok.inspection.verify import Verification, verify
from xtok.maps import file as mapfile
from xtok.maps.map_arguments import MapLike, bind_maps
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers.display import listed, percent, plural
from xtok.tokenizers.pairs import Pair

_GRADES: tuple[Grade, ...] = "bad", "usable", "note", "good"

BUILT_IN = (
    ("English", "en", "In 1872 the lighthouse keeper's daughter rowed out to the wreck."),
    ("German", "de", "Die Größe des Leuchtturms überraschte sogar die Küstenschiffer."),
    ("Chinese", "zh", "灯塔站在岩石上，共有201级台阶，晚上可以看到很远的船。"),
    ("Japanese", "ja", "灯台は海の前に立っていて、夜になると光を送ります。"),
    ("Arabic", "ar", "تضيء المنارة البحر كل ليلة، ويراها البحارة من بعيد."),
    ("Russian", "ru", "Маяк стоит на скале и светит кораблям всю ночь."),
    ("Code", "", "def keep(light):\n    return [x for x in light if x['lux'] >= 0.25]\n"),
    ("Digits and emoji", "", "12345678 + 3.14159 = 2024? 🌊⛵ 👩‍🔧 🇩🇪 201 times 👍🏽"),
)
"""Sentences in several scripts, written for xtok, with label, language and text."""


@dataclass(frozen=True)
class Finding:
    """A finding that starts with an important number."""

    grade: Grade
    number: str
    text: str
    section: str  # section of the page that contains the details
    map_number: int | None = None  # 1 or 2: number of the map, if there are two maps


@dataclass(frozen=True, kw_only=True)
class MapReport:
    """Results for one map."""

    name: str
    sha256: str  # sha256 of the map as `.safetensors`
    description: Description
    verification: Verification
    fits: tuple[Fit, ...]
    verdict: Verdict | None  # measures on the text; None without text


@dataclass(frozen=True, kw_only=True)
class AlignedSentence:
    """A sentence with both tokenizations."""

    label: str  # language or kind of the sentence
    language: str  # BCP 47 language tag, for fonts; empty if unknown
    direction: str  # `ltr` or `rtl`
    alignment: TextAlignment


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of the page."""

    pair: PairFacts
    advice: Advice
    findings: tuple[Finding, ...]  # worst finding first
    maps: tuple[MapReport, ...]  # one or two maps
    evaluation: Evaluation | None  # None without text
    comparison: Comparison | None  # None for one map
    sentences: tuple[AlignedSentence, ...]  # empty without tokenizers
    version: str


class PageData(NamedTuple):
    """A report, and the objects with the data for the page's search."""

    report: Report
    maps: tuple[ProjectionMap, ...]
    text: PairText | None
    pair: Pair


def examine(
    maps: MapLike | Sequence[MapLike],
    *,
    texts: Paths = (),
    pair: Pair | None = None,
    names: Sequence[str] = (),
    field: str = "text",
    progress: Progress = silent,
) -> PageData:
    """Collect the contents of the report about one map, or two maps of the same pair.

    Args:
        maps: one or two maps, or their paths.
        texts: paths and globs of text (see `evaluate`).
        pair: the maps' pair. Pieces, sentences and results on `texts` require the pair's
            tokenizers.
        names: names of the maps on the page.
        field: the field or column with the text.
        progress: called for each pass over a vocabulary or the text.

    Raises:
        XtokError: if a map contains no tokens and the tokenizers are missing, if the maps belong to
            different pairs, or if a text cannot be read.
        ValueError: if text is given without tokenizers.
    """
    if texts and (pair is None or pair.teacher_tokenizer is None):
        raise ValueError("texts require a pair with its tokenizers")
    loaded, pair, names = bind_maps(maps, ProjectionMap.of, pair, names)
    named = dict(zip(distinct_names(names), loaded, strict=True))
    evaluation = text = None
    if texts:
        plan = CountPlan(per_document=True)
        text = PairText.read(pair, texts, plan, field=field, progress=progress)
        evaluation = measure_maps(named, pair, text, for_loss="p-kl", progress=progress)
    facts = pair_facts(pair, text, progress=progress)
    verdicts = {} if evaluation is None else {v.name: v for v in evaluation.verdicts}
    reports = [_map_report(name, m, pair, facts, verdicts.get(name)) for name, m in named.items()]
    token_counts = None if text is None else text.tokens[0]
    models = () if pair.teacher_tokenizer is None else pair.tokenizers
    report = Report(
        pair=facts,
        advice=advise(facts, [model.name for model in models], loaded),
        findings=_findings(facts, reports, [empty_share(m, text) for m in loaded]),
        maps=tuple(reports),
        evaluation=evaluation,
        comparison=compare_maps(loaded[0], loaded[1], token_counts) if len(loaded) == 2 else None,
        sentences=() if pair.teacher_tokenizer is None else _aligned_sentences(pair),
        version=__version__,
    )
    return PageData(report=report, maps=tuple(loaded), text=text, pair=pair)


def _map_report(
    name: str, m: ProjectionMap, pair: Pair, facts: PairFacts, verdict: Verdict | None
) -> MapReport:
    verification = verify(m)
    return MapReport(
        name=name,
        sha256=mapfile.sha256(m),
        description=describe(m, classes=True, pair=pair),
        verification=verification,
        fits=fits(m, facts, failed=verification.failed, verdict=verdict),
        verdict=verdict,
    )


def _aligned_sentences(pair: Pair) -> tuple[AlignedSentence, ...]:
    aligner = TokenAligner(pair)
    return tuple(
        AlignedSentence(
            label=label,
            language=language,
            direction="rtl" if language == "ar" else "ltr",
            alignment=describe_alignment(
                aligner, pair, *(tokenizer.library_ids([text])[0] for tokenizer in pair.tokenizers)
            ),
        )
        for label, language, text in BUILT_IN
    )


def _findings(
    pair: PairFacts, maps: Sequence[MapReport], empty: Sequence[float]
) -> tuple[Finding, ...]:
    """Return all findings, worst first; `empty` is each map's share of tokens with empty rows."""
    findings = [*_pair_findings(pair)]
    for n, (m, share) in enumerate(zip(maps, empty, strict=True), start=1):
        map_findings = _empty_rows(m.description, pair, share), _find_unreached(m.description)
        findings += [replace(f, map_number=n if len(maps) > 1 else None) for f in map_findings]
    return tuple(sorted(findings, key=lambda finding: _GRADES.index(finding.grade)))


def _pair_findings(pair: PairFacts) -> Iterator[Finding]:
    same = "of the student's tokens have a teacher token with the same bytes"
    if pair.text is not None:
        share = pair.text.tokens.both / max(1, pair.text.tokens.student)
        same += f"; {percent(share, 0)} of the tokens in the text are equal on both sides"
    yield Finding("note", percent(pair.student_share, 0), f"{same}.", "pair")
    if missing := pair.numbers.only_student:
        numbers = plural(pair.numbers.student, "multi-digit ASCII number")
        words = f"of {numbers} of the student have no exact counterpart"
        if pair.missing_numbers_text is not None:
            words += f"; these numbers are {percent(pair.missing_numbers_text, 2)} of the text"
        yield Finding("note", f"{missing:,}", f"{words}.", "pair")
    if pair.text is not None and (left_out := pair.text.left_out) is not None:
        yield Finding(pair.text.grade, f"{left_out.num_bytes:,}", f"{left_out.reason}.", "quality")


def _empty_rows(d: Description, pair: PairFacts, share: float) -> Finding:
    empty = {c.token_class: c.empty for c in d.coverage or () if c.token_class != "unused"}
    num_special = empty.pop("control", 0)
    num_text = sum(empty.values())
    total = num_text + num_special
    grade: Grade = "bad" if share > MOST_EMPTY else "usable" if num_text else "note"
    in_text = f" ({percent(share, 2)} of the text)" if share and num_text else ""
    counts = f"{num_text:,} of text tokens{in_text}, {num_special:,} of special tokens"
    words = f"of the rows are empty: {counts}"
    if total and pair.roles_alone:
        roles = listed(pair.roles_alone, 4).replace("_", " ")
        words += f"; roles without a counterpart: {roles}"
    if num_text:
        words += "; xtok build fills the rows of all tokens that the teacher can spell"
    return Finding(grade if total else "good", f"{total:,}", f"{words}.", "classes")


def _find_unreached(d: Description) -> Finding:
    text = [c for c in d.coverage or () if c.token_class not in ("control", "unused")]
    unreached = sum(c.teacher_unreached for c in text)
    share = unreached / max(1, sum(c.teacher_ids for c in text))
    number = percent(share, 0) if share >= 0.01 else f"{unreached:,}"
    grade: Grade = "note" if share >= 0.01 else "good"
    words = "of the teacher's tokens are in no row, so the map never predicts them"
    if share >= 0.5 and "counted" not in d.rows_by_kind:
        grade, words = "usable", f"{words}; a counted map predicts more tokens"
    return Finding(grade, number, f"{words}.", "classes")
