"""`report`: the data of the page about one map or two maps of a pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from xtok import __version__
from xtok._lib.progress import Progress, silent
from xtok.building.counting.pair_text import CountPlan, PairText
from xtok.inspection import Grade, distinct_names
from xtok.inspection.advice import Advice, Fit, advise, fits
from xtok.inspection.compare import Comparison, comparison_of
from xtok.inspection.describe import ClassCoverage, Description, describe
from xtok.inspection.evaluate import Evaluation, evaluation_of
from xtok.inspection.measures import MOST_EMPTY, Verdict, empty_share
from xtok.inspection.pair_facts import PairFacts, pair_facts
from xtok.inspection.sentences import AlignedSentence, aligned_sentences
from xtok.inspection.verify import Verification, verify
from xtok.maps import file as mapfile
from xtok.maps.map_arguments import MapLike, bind_maps
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers.display import listed, percent, plural
from xtok.tokenizers.pairs import Pair

_MOST_FINDINGS = 6
_GRADES: tuple[Grade, ...] = "bad", "care", "note", "good"


@dataclass(frozen=True)
class Finding:
    """A remarkable figure, and the rest of its sentence."""

    level: Grade
    number: str
    text: str
    place: str  # the section of the page with details
    map_number: int | None = None  # 1 or 2, for a finding about one of two maps


@dataclass(frozen=True, kw_only=True)
class MapReport:
    """Results for one map."""

    name: str
    sha256: str  # of the map as `.safetensors`
    description: Description
    verification: Verification
    fits: tuple[Fit, ...]
    verdict: Verdict | None  # on the text; None without text


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of the page."""

    pair: PairFacts
    advice: Advice
    findings: tuple[Finding, ...]  # three to six, the worst first
    maps: tuple[MapReport, ...]  # one or two
    evaluation: Evaluation | None  # None without text
    comparison: Comparison | None  # None for one map
    sentences: tuple[AlignedSentence, ...]  # empty without tokenizers
    version: str


class PageData(NamedTuple):
    """A report, and the data for the search of its page."""

    report: Report
    maps: tuple[ProjectionMap, ...]
    text: PairText | None
    pair: Pair


def examine(
    maps: MapLike | Sequence[MapLike],
    *,
    texts: Sequence[str | Path] = (),
    pair: Pair | None = None,
    names: Sequence[str] = (),
    models: tuple[str, str] | None = None,
    field: str = "text",
    progress: Progress = silent,
) -> PageData:
    """Examine one map, or two maps of one pair.

    Args:
        maps: a map or two, or their paths.
        texts: paths and globs of text, as for `evaluate`.
        pair: the maps' pair; its tokenizers are needed for pieces, sentences and text.
        names: names of the maps on the page.
        models: names of the models in the recommended commands; model ids by default.
        field: the field or column that holds the text.
        progress: called for each pass over a vocabulary, and for the text.

    Raises:
        XtokError: if a map contains no tokens and there are no tokenizers, two maps belong to
            different pairs, or a text cannot be read.
        ValueError: for text without tokenizers.
    """
    if texts and (pair is None or pair.teacher_tokenizer is None):
        raise ValueError("text needs a pair with its tokenizers")
    loaded, pair, names = bind_maps(maps, pair, names)
    has_tokenizers = pair.teacher_tokenizer is not None
    names = distinct_names(names)
    evaluation = text = None
    if texts:
        wanted = CountPlan(per_document=True, excerpts=True)
        text = PairText.read(pair, texts, wanted, field=field, progress=progress)
        named = dict(zip(names, loaded, strict=True))
        evaluation = evaluation_of(named, pair, text, for_loss="p-kl", progress=progress)
    facts = pair_facts(pair, text, progress=progress)
    examined = [
        _examine(m, name, pair, facts, evaluation, text)
        for m, name in zip(loaded, names, strict=True)
    ]
    reports, of_maps = zip(*examined, strict=True)
    comparison = None
    if len(loaded) == 2:
        comparison = comparison_of(loaded[0], loaded[1], None if text is None else text.tokens[0])
    report = Report(
        pair=facts,
        advice=advise(facts, models, loaded),
        findings=_worst_first([*_pair_findings(facts)], of_maps),
        maps=reports,
        evaluation=evaluation,
        comparison=comparison,
        sentences=aligned_sentences(pair, text.excerpts if text else ()) if has_tokenizers else (),
        version=__version__,
    )
    return PageData(report=report, maps=tuple(loaded), text=text, pair=pair)


def _examine(
    m: ProjectionMap,
    name: str,
    pair: Pair,
    facts: PairFacts,
    evaluation: Evaluation | None,
    text: PairText | None,
) -> tuple[MapReport, list[Finding]]:
    verdicts = () if evaluation is None else evaluation.verdicts
    verdict = next((one for one in verdicts if one.name == name), None)
    description, verification = describe(m, classes=True, pair=pair), verify(m)
    report = MapReport(
        name=name,
        sha256=mapfile.sha256(m),
        description=description,
        verification=verification,
        fits=fits(m, facts, failed=verification.failed, verdict=verdict),
        verdict=verdict,
    )
    classes = description.coverage or ()
    empty = 0.0 if text is None else empty_share(m, text)
    is_counted = "counted" in description.rows_by_kind
    return report, [
        _empty_rows(classes, facts.roles_alone, empty),
        _unreached(classes, is_counted=is_counted),
    ]


def _worst_first(
    findings: list[Finding], of_maps: Sequence[Sequence[Finding]]
) -> tuple[Finding, ...]:
    """Return the most important findings; a finding about all maps is listed once."""
    for number, own in enumerate(of_maps, start=1):
        findings += [
            one if all(one in other for other in of_maps) else replace(one, map_number=number)
            for one in own
        ]
    by_grade = sorted(dict.fromkeys(findings), key=lambda one: _GRADES.index(one.level))
    return tuple(by_grade[:_MOST_FINDINGS])


def _pair_findings(pair: PairFacts) -> Iterator[Finding]:
    same = "of the student's tokens have a teacher token with the same bytes"
    if pair.text is not None:
        at_place = pair.text.tokens.both / max(1, pair.text.tokens.student)
        same += f"; {percent(at_place, 0)} of the tokens in the text are equal on both sides"
    yield Finding("note", percent(pair.student_share, 0), f"{same}.", "pair")
    missing = pair.numbers.only_student
    if missing:
        words = (
            f"of {plural(pair.numbers.student, 'multi-digit ASCII number')} of the student have no "
        )
        words += "exact counterpart"
        if pair.missing_numbers_text is not None:
            words += f"; they are {percent(pair.missing_numbers_text, 2)} of the text"
        yield Finding("note", f"{missing:,}", f"{words}.", "pair")
    if pair.text is not None and (left_out := pair.text.left_out) is not None:
        yield Finding(pair.text.grade, f"{left_out.num_bytes:,}", f"{left_out.words}.", "quality")


def _empty_rows(
    classes: Sequence[ClassCoverage], roles_alone: Sequence[str], share: float
) -> Finding:
    of_text = sum(one.empty for one in classes if one.token_class not in _NOT_TEXT)
    of_special = sum(one.empty for one in classes if one.token_class == "control")
    total = of_text + of_special
    if not total:
        return Finding("good", "0", "rows of tokens are empty.", "classes")
    level: Grade = "bad" if share > MOST_EMPTY else "care" if of_text else "note"
    in_text = f" ({percent(share, 2)} of the text)" if share and of_text else ""
    words = f"{'row is' if total == 1 else 'rows are'} empty: {of_text:,} of text tokens{in_text}, "
    words += f"{of_special:,} of special tokens"
    if roles_alone:
        roles = listed(roles_alone, 4).replace("_", " ")
        words += f"; roles without a counterpart: {roles}"
    if of_text:
        words += "; xtok build fills the rows of all tokens that the teacher can spell"
    return Finding(level, f"{total:,}", f"{words}.", "classes")


def _unreached(classes: Sequence[ClassCoverage], *, is_counted: bool) -> Finding:
    text = [one for one in classes if one.token_class not in _NOT_TEXT]
    unreached = sum(one.teacher_unreached for one in text)
    share = unreached / max(1, sum(one.teacher_ids for one in text))
    number = percent(share, 0) if share >= 0.01 else f"{unreached:,}"
    words = "of the teacher's tokens are in no row"
    if not unreached:
        return Finding("good", number, f"{words}: the map can predict all of them.", "classes")
    level: Grade = "good" if share < 0.01 else "note"
    words += ": the map never predicts them"
    if share >= 0.5 and not is_counted:
        level, words = "care", f"{words}; a counted map reaches more"
    return Finding(level, number, f"{words}.", "classes")


_NOT_TEXT = ("control", "unused")
