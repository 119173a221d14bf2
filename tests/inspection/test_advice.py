"""Facts and advice about a pair are the same in every command."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from checks import not_none
from conftest import Load
from make_tokenizers import byte_ranks

import xtok
from xtok.building.counting.aligned import Difference
from xtok.building.counting.pair_text import LeftOut, PairText
from xtok.config import BuildConfig
from xtok.inspection.advice import advise, fits
from xtok.inspection.doctor import doctor
from xtok.inspection.measures import Verdict
from xtok.inspection.pair_facts import PairFacts, SharedCounts, TextFacts, pair_facts
from xtok.inspection.report import examine
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

TEXT = TextFacts(
    files=("a",),
    num_bytes=9,
    tokens=SharedCounts(student=3, teacher=3, both=1),
    partner_shares=(1 / 3, 1 / 3),
    boundaries=3,
    leak=0.3,
    bits=(1.0, 1.0),
    num_events=2,
    event_leak=0.06,
    event_kept=1.0,
    conditional_entropy=(0.5, 0.25),
    left_out=None,
)


def facts_of(student: Tokenizer, teacher: Tokenizer) -> PairFacts:
    return pair_facts(xtok.load_pair(student, teacher))


def test_facts_of_two_vocabularies(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "20", "201", "202", "ab", "   ")
    teacher = byte_ranks(tmp_path / "t.tiktoken", "20", "ab", "cd", digits=1)
    facts = facts_of(student, teacher)
    assert facts.vocabulary == SharedCounts(student=261, teacher=259, both=258)
    assert (facts.shared, facts.student_share) == (258, 258 / 261)
    assert facts.numbers == SharedCounts(student=3, teacher=1, both=1)
    assert not facts.same
    assert facts_of(student, student).same


def test_roles_that_a_single_side_has(digits: Tokenizer, sentencepiece: Tokenizer) -> None:
    facts = facts_of(digits, sentencepiece)
    assert "turn_start" in facts.roles_alone
    assert "eos" not in facts.roles_alone


def test_text_by_hand(tmp_path: Path) -> None:
    """In `ab ab a`, two of five boundaries belong to a token that is missing from the teacher."""
    student = byte_ranks(tmp_path / "s.tiktoken", "ab")
    teacher = byte_ranks(tmp_path / "t.tiktoken", "zz")
    (tmp_path / "a.txt").write_text("ab ab a", encoding="utf-8")
    pair = xtok.load_pair(student, teacher)
    text = not_none(pair_facts(pair, PairText.read(pair, tmp_path / "a.txt")).text)
    # Student: ab, space, ab, space, a; the teacher has seven tokens, five of them at boundaries.
    assert text.tokens == SharedCounts(student=5, teacher=7, both=3)
    assert text.boundaries == 5
    # at these boundaries, the teacher's a has no counterpart
    assert text.leak == pytest.approx(2 / 5)
    two_two_one = -(2 * 0.4 * math.log2(0.4) + 0.2 * math.log2(0.2))
    three_two = -(0.6 * math.log2(0.6) + 0.4 * math.log2(0.4))
    assert text.bits == pytest.approx((two_two_one, three_two))
    assert text.conditional_entropy == pytest.approx((0.0, two_two_one - three_two))


@pytest.mark.parametrize("conditional_entropy", [(0.25, 0.5), (0.5, 0.25)])
def test_p_kl_is_recommended_for_any_conditional_entropy(
    pair: Pair, conditional_entropy: tuple[float, float]
) -> None:
    facts = replace(pair_facts(pair), text=replace(TEXT, conditional_entropy=conditional_entropy))
    advice = advise(facts, ("s", "t"))
    assert (advice.loss, advice.map_loss) == ("event KL", "P-KL")
    events, build = advice.commands
    assert events == ("xtok", "events", "s", "t")
    assert build == ("xtok", "build", "s", "t", "--for", "p-kl")
    without = advise(pair_facts(pair))
    assert (without.loss, without.map_loss) == ("event KL", "P-KL")
    assert (
        without.sentence == "Use event KL, or P-KL if your trainer only supports projection maps."
    )
    begin = f"{without.sentence} On "
    assert advice.sentence.startswith(f"{begin}this text, ")
    lost = LeftOut(num_bytes=90, share=0.9, documents=1, first=Difference("zh", "a", "b"))
    partly = advise(replace(facts, text=replace(not_none(facts.text), left_out=lost)), ("s", "t"))
    assert partly.sentence.startswith(
        f"{begin}the 10.0% of this text for which both sides have the same bytes, "
    )


def test_report_and_doctor_give_the_same_advice(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    """One side has tokens of up to three digits; the other has one token per digit."""
    sides = byte_level, digits
    m, text = xtok.build(*sides), tmp_path / "text.txt"
    text.write_text("1 20 30 12 " * 40, encoding="utf-8")
    assert examine(m).report.advice.sentence == not_none(doctor(*sides).advice).sentence
    by_text = not_none(doctor(*sides, text).advice)
    page = examine(m, texts=[text], pair=xtok.load_pair(*sides)).report
    assert page.advice.sentence == by_text.sentence


def test_grades_of_a_map_for_each_loss(tmp_path: Path) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "20", "201", "202", "ab")
    teacher = byte_ranks(tmp_path / "t.tiktoken", "20", "ab", "cd", digits=1)
    pair = facts_of(student, teacher)

    def grades(config: BuildConfig, **more: object) -> list[str]:
        m = xtok.build(student, teacher, config)
        return [fit.grade for fit in fits(m, more.pop("pair", pair), **more)]  # type: ignore[arg-type]

    usable = ["usable", "usable", "usable", "good"]  # 2 of 3 numbers have no counterpart
    assert grades(BuildConfig()) == grades(BuildConfig.for_loss("gold")) == usable
    assert grades(BuildConfig.for_loss("p-kl"))[:2] == ["good", "bad"]
    for grade in ("good", "usable", "bad"):
        verdict = Verdict(name="m", grade=grade, reason="the reason", numbers="")
        assert grades(BuildConfig.for_loss("p-kl"), verdict=verdict)[0] == grade
    assert grades(BuildConfig(), failed=["rows"])[:3] == ["bad"] * 3
    few = replace(pair, numbers=SharedCounts(student=3, teacher=1, both=3))
    assert grades(BuildConfig(), pair=few)[1:3] == ["note", "note"]  # a text is needed for a grade
    assert grades(BuildConfig(), pair=replace(few, text=TEXT))[1] == "usable"
    [*_, event_kl] = fits(xtok.build(student, teacher), replace(pair, text=TEXT))
    assert event_kl.grade == "bad"  # as in `evaluate`
    assert event_kl.why.endswith(
        " 2 events leak at 6.0% of the boundaries and keep 100% of the bits."
    )
    little = replace(few, text=replace(TEXT, leak=0.01, event_leak=0.02))
    assert grades(BuildConfig(), pair=little)[1:] == ["good", "good", "good"]
    assert (
        grades(BuildConfig(), pair=replace(few, text=replace(TEXT, event_leak=0.03)))[3] == "usable"
    )


def test_map_worse_than_the_recipe_is_not_graded_good(tmp_path: Path) -> None:
    """Both sides spell this text in the same way, so the recipe equals the best map."""
    student = byte_ranks(tmp_path / "s.tiktoken", "ab")
    teacher = byte_ranks(tmp_path / "t.tiktoken", "ab", "abz")
    (tmp_path / "a.txt").write_text("ab c " * 40, encoding="utf-8")
    pair = xtok.load_pair(student, teacher)
    good = xtok.build(student, teacher, for_loss="p-kl", texts=tmp_path / "a.txt")
    bad = replace(good, teacher_ids=(good.teacher_ids + 1) % 258)
    for m, grade, words in (
        (good, "good", "close to the best map"),
        (bad, "bad", "worse than X-Token's"),
    ):
        report = examine(m, texts=[tmp_path / "a.txt"], pair=pair).report
        [fit] = [fit for fit in report.maps[0].fits if fit.loss == "p-kl"]
        verdict = not_none(report.maps[0].verdict)
        assert (fit.grade, verdict.grade) == (grade, grade)
        assert words in verdict.reason
        assert words in fit.why


def test_the_recommended_loss_needs_no_command_for_an_existing_map(pair: Pair) -> None:
    """Existing P-KL maps are not recommended again; only events need a command."""
    for_p_kl, plain = (xtok.build(*pair.tokenizers, for_loss=loss) for loss in ("p-kl", None))
    for sides in (None, pair):
        report = examine(for_p_kl, pair=sides).report
        grades = {fit.loss: fit.grade for fit in report.maps[0].fits}
        assert (grades["event-kl"], grades["p-kl"]) == ("good", "good")
        assert [command[1] for command in report.advice.commands] == ["events"]
    assert [command[1] for command in examine(plain).report.advice.commands] == ["events", "build"]


@pytest.mark.real
def test_a_real_pair(load_real: Load) -> None:
    pair = facts_of(load_real("llama3.tiktoken"), load_real("qwen.tiktoken"))
    assert pair.vocabulary.both == pair.shared == 109_566
    assert pair.numbers == SharedCounts(student=1_100, teacher=0, both=0)
