"""Measures of maps on text equal plain loops over the definitions of the measures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest
from checks import fails, fits_80_columns, not_none, printed_json, works
from conftest import ROOT, Cli, Load
from make_tokenizers import byte_ranks
from naive import map_rows

import xtok
from xtok.building.build import build
from xtok.building.counting.pair_text import CountPlan, PairText
from xtok.building.exact import reapply_exact
from xtok.building.multitoken import multitoken
from xtok.building.sort_cut import sort_cut
from xtok.cli.tables.quality import print_evaluation
from xtok.config import BuildConfig, MultitokenConfig, SortCutConfig, Target
from xtok.inspection.bootstrap import Interval
from xtok.inspection.evaluate import Evaluation, evaluate, measure_maps
from xtok.inspection.measures import (
    EventMapMeasures,
    MapLosses,
    MapMeasures,
    event_verdict,
    map_verdict,
)
from xtok.loss_names import BuildLoss
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

TEXTS = [
    "the cat sat on the mat, and the dog sat on the log.\n",
    "In 2013 there were 201 of them; in 2014 there were 1,024.\n",
    "Der Hund und die Katze. Les chats et les chiens.\n",
    "def f(x):\n    return x + 1\n",
]
Maps = dict[str, ProjectionMap]
PER_DOCUMENT = CountPlan(per_document=True)


def write_texts(path: Path, documents: Sequence[tuple[str, str]]) -> Path:
    lines = [json.dumps({"text": text, "lang": lang}) + "\n" for text, lang in documents]
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def counted_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [(text, "py" if "def" in text else "en") for text in TEXTS * 3]
    return write_texts(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents)


@pytest.fixture(scope="module")
def maps(pair: Pair, counted_corpus: Path) -> Maps:
    """The recipe, and maps counted on the corpus with normal and with very little smoothing."""
    whole = multitoken(pair, MultitokenConfig(scale_trick=False))
    recipe = sort_cut(reapply_exact(whole), SortCutConfig(top_k=4))

    def counted(alpha: float, top_k: int = 8, target: Target = "start") -> ProjectionMap:
        config = BuildConfig(top_k=top_k, exact_match=False, target=target)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("xtok.building.counted.choose_alpha", lambda *_: alpha)
            return build(*pair.tokenizers, config, texts=counted_corpus, initial=recipe)

    return {
        "plain": build(*pair.tokenizers, BuildConfig(top_k=4)),
        "recipe": recipe,
        "starts": counted(0.01),
        "chunks": counted(0.01, target="chunk"),
        "best at starts": counted(1e-6, 4),
        "best over chunks": counted(1e-6, 4, "chunk"),
    }


@pytest.fixture(scope="module")
def text(pair: Pair, counted_corpus: Path) -> PairText:
    lines = counted_corpus.read_text().splitlines(keepends=True)
    paths = [counted_corpus.with_name(f"{lang}.jsonl") for lang in ("en", "py")]
    for path in paths:
        path.write_text("".join(line for line in lines if f'"{path.stem}"' in line))
    return PairText.read(pair, paths, PER_DOCUMENT)


@pytest.fixture(scope="module")
def evaluation(maps: Maps, pair: Pair, text: PairText) -> Evaluation:
    return measure_maps(maps, pair, text)


@pytest.fixture(scope="module")
def on_all(evaluation: Evaluation) -> dict[str, MapMeasures]:
    """Return the measures over all text."""
    return {m.name: m for m in evaluation.measures if m.group == "all"}


def starts(tokenizer: Tokenizer, text: str) -> dict[int, int]:
    """Return a dict from the byte offset to the token id, for consecutive tokens."""
    [ids] = tokenizer.library_ids([text])
    offset, tokens = 0, {}
    for i in ids:
        tokens[offset] = i
        offset += len(tokenizer.table[i])
    return tokens


def mean_loss(
    rows: dict[int, list[tuple[int, float]]], counts: dict[tuple[int, int], int], width: int
) -> float:
    total = sum(
        n * -log((1 - 1e-3) * dict(rows.get(s, [])).get(t, 0.0) + 1e-3 / width)
        for (s, t), n in counts.items()
    )
    return total / sum(counts.values())


def test_measures_match_their_definition(
    pair: Pair, maps: Maps, on_all: dict[str, MapMeasures]
) -> None:
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for document in TEXTS * 3:
        student, teacher = (starts(side, document) for side in pair.tokenizers)
        for offset in student.keys() & teacher.keys():
            counts[student[offset], teacher[offset]] += 1
    plain, recipe_measures, width = on_all["plain"], on_all["recipe"], maps["plain"].shape[1]
    rows, total = map_rows(maps["plain"]), sum(counts.values())
    assert (plain.starts, plain.documents) == (total, 12)
    assert plain.at_starts.cross_entropy.value == pytest.approx(
        mean_loss(rows, counts, width), abs=1e-9
    )
    covered = sum(n for (s, t), n in counts.items() if t in dict(rows.get(s, [])))
    assert plain.coverage == pytest.approx(covered / total)
    top = sum(n for (s, t), n in counts.items() if rows.get(s) and rows[s][0][0] == t)
    assert plain.top_1 == pytest.approx(top / total)
    best: dict[int, list[tuple[int, float]]] = {}
    for s in {s for s, _ in counts}:
        heaviest = sorted((-n, t) for (x, t), n in counts.items() if x == s)[:4]
        mass = -sum(n for n, _ in heaviest)
        best[s] = [(t, -n / mass) for n, t in heaviest]
    assert plain.at_starts.floor == pytest.approx(mean_loss(best, counts, width), abs=1e-6)
    recipe = mean_loss(map_rows(maps["recipe"]), counts, width)
    assert plain.at_starts.recipe == pytest.approx(recipe, abs=1e-6)
    # The recipe closes 0 % of the distance between the recipe and the floor.
    assert recipe_measures.at_starts.closed == 0
    measured = plain.at_starts.cross_entropy
    closed = (plain.at_starts.recipe - measured.value) / (
        plain.at_starts.recipe - plain.at_starts.floor
    )
    assert not_none(plain.at_starts.closed) == pytest.approx(closed)
    assert not_none(measured.low) < measured.value < not_none(measured.high)


def test_chunks_are_averaged_as_p_kl_does(pair: Pair, maps: Maps, tmp_path: Path) -> None:
    text = "In 2013, 201"
    (tmp_path / "a.txt").write_text(text)
    [measures] = evaluate(pair, maps["recipe"], tmp_path / "a.txt").measures
    s, t = (starts(side, text) for side in pair.tokenizers)
    rows, width = map_rows(maps["recipe"]), maps["recipe"].shape[1]
    losses = []
    for a, b in pairwise([*sorted(s.keys() & t.keys()), len(text)]):
        own = [i for offset, i in s.items() if a <= offset < b]
        others = [i for offset, i in t.items() if a <= offset < b]
        mean = [sum(dict(rows[i]).get(o, 0.0) for i in own) / len(own) for o in others]
        losses.append(sum(-log((1 - 1e-3) * p + 1e-3 / width) for p in mean) / len(mean))
    assert len(losses) >= 4
    assert measures.over_chunks.cross_entropy.value == pytest.approx(
        sum(losses) / len(losses), abs=1e-6
    )
    # a single document gives no confidence interval
    assert measures.at_starts.cross_entropy.low is None


def test_recipe_and_floor_equal_those_of_real_maps(
    pair: Pair, maps: Maps, evaluation: Evaluation, on_all: dict[str, MapMeasures], tmp_path: Path
) -> None:
    """The floor is a map counted on the measured text itself, almost without smoothing."""
    plain, recipe = on_all["plain"], on_all["recipe"]
    assert plain.over_chunks.recipe == recipe.over_chunks.recipe
    assert plain.over_chunks.recipe == pytest.approx(recipe.over_chunks.cross_entropy.value)
    at_starts, over_chunks = on_all["best at starts"], on_all["best over chunks"]
    best = at_starts.at_starts
    assert best.cross_entropy.value == pytest.approx(best.floor, abs=1e-4)
    assert over_chunks.over_chunks.cross_entropy.value == pytest.approx(
        plain.over_chunks.floor, abs=1e-4
    )
    gained = plain.over_chunks.recipe - plain.over_chunks.cross_entropy.value
    closed = gained / (plain.over_chunks.recipe - plain.over_chunks.floor)
    assert not_none(plain.over_chunks.closed) == pytest.approx(closed)
    python = write_texts(tmp_path / "py.jsonl", [(TEXTS[3], "py")] * 3)
    [alone] = evaluate(pair, maps["plain"], python).measures
    [group] = [m for m in evaluation.measures if (m.group, m.name) == ("py.jsonl", "plain")]
    # The same documents; only the order of the sums differs.
    assert group.over_chunks.floor == pytest.approx(alone.over_chunks.floor, rel=1e-12)


def test_groups_classes_and_worst_rows(evaluation: Evaluation) -> None:
    measures = [m for m in evaluation.measures if m.name == "recipe"]
    assert [(m.group, m.documents) for m in measures] == [
        ("en.jsonl", 9),
        ("py.jsonl", 3),
        ("all", 12),
    ]
    assert sum(m.starts for m in measures[:2]) == measures[2].starts
    classes = {c.token_class: c for c in evaluation.classes if c.name == "recipe"}
    assert sum(c.starts for c in classes.values()) == measures[2].starts
    assert {"digits_1", "latin", "line_breaks"} <= classes.keys()
    loss = sum(c.starts * c.loss for c in classes.values()) / measures[2].starts
    assert loss == pytest.approx(measures[2].at_starts.cross_entropy.value)
    first, second = [row for row in evaluation.worst_rows if row.name == "recipe"][:2]
    assert first.excess >= second.excess > 0
    assert sum(share for _, share, _ in first.wanted) <= 1 + 1e-9


def test_rows_and_classes_are_measured_for_the_loss(tmp_path: Path) -> None:
    """P-KL averages a chunk, so the best row of `201` has a third on each digit."""
    both = xtok.load_pair(
        byte_ranks(tmp_path / "s.tiktoken", "20", "201", digits=3),
        byte_ranks(tmp_path / "t.tiktoken", digits=1),
    )
    (tmp_path / "a.txt").write_text("201 201 201\n" * 20)
    m = xtok.build(*both.tokenizers)
    is_201 = m.student_ids == m.student.ids_of("201")
    assert is_201.sum() == 3
    thirds = replace(m, weights=np.where(is_201, np.float32(1 / 3), m.weights))
    by_loss = {
        loss: evaluate(both, thirds, tmp_path / "a.txt", for_loss=loss) for loss in ("p-kl", "gold")
    }
    worst = {loss: [row.token for row in result.worst_rows] for loss, result in by_loss.items()}
    assert "201" in worst["gold"]
    assert "201" not in worst["p-kl"]
    [digits] = [c for c in by_loss["p-kl"].classes if c.token_class == "digits_3"]
    assert digits.starts == 60
    assert digits.loss == pytest.approx(digits.reference)
    assert [result.by_chunk for result in by_loss.values()] == [True, False]


def test_maps_are_ranked_by_the_measure_of_the_loss(pair: Pair, maps: Maps, text: PairText) -> None:
    """The map that is better at starts is worse over chunks."""
    two = {name: maps[name] for name in ("starts", "chunks")}
    losses: tuple[BuildLoss, ...] = "p-kl", "gold", "h-kl"
    evaluations = [measure_maps(two, pair, text, for_loss=loss) for loss in losses]
    rankings = [not_none(result.ranking) for result in evaluations]
    by_starts = "starts", "chunks"
    assert [ranking.names for ranking in rankings] == [("chunks", "starts"), by_starts, by_starts]
    lead = not_none(rankings[0].lead)
    assert 0 < not_none(lead.low) < lead.value
    assert rankings[0].sentence.startswith("For P-KL, chunks is better: ")


def test_maps_with_equal_measures_are_not_ranked(
    pair: Pair, maps: Maps, counted_corpus: Path, tmp_path: Path
) -> None:
    recipe = maps["recipe"]
    result = evaluate(pair, [recipe] * 2, counted_corpus, names=["a", "a"], for_loss="gold")
    assert [m.name for m in result.measures] == ["a", "a (2)"]
    assert "no difference between a and a (2)" in not_none(result.ranking).sentence
    (tmp_path / "a.txt").write_text(TEXTS[0])  # one document
    result = evaluate(pair, [recipe] * 2, tmp_path / "a.txt", names=["a", "a"], for_loss="gold")
    assert "no difference between a and a (2)" in not_none(result.ranking).sentence
    measured = {"a": recipe}, pair, PairText.read(pair, counted_corpus, PER_DOCUMENT)
    assert not_none(measure_maps(*measured, for_loss="gold").ranking).lead is None
    with pytest.raises(ValueError, match="'kl'"):
        measure_maps(*measured, for_loss="kl")  # type: ignore[arg-type]
    first, again = measure_maps(*measured), measure_maps(*measured)
    assert first == again
    assert first.ranking is None


def test_a_map_measured_on_its_own_text_is_noted(
    pair: Pair, maps: Maps, counted_corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "copy.jsonl").write_bytes(counted_corpus.read_bytes())
    (tmp_path / "other.jsonl").write_text(counted_corpus.read_text().replace("cat", "cow"))
    own = [maps["starts"], maps["recipe"]]
    [little], (mine, again) = (
        evaluate(pair, own, tmp_path / name, names=["counted", "recipe"]).notes
        for name in ("other.jsonl", "copy.jsonl")
    )
    assert again == little
    assert mine.startswith("counted was counted on copy.jsonl")


def test_names_of_groups(pair: Pair, maps: Maps, tmp_path: Path) -> None:
    """Files with the same name are separate groups, and a group can have the name `all`.

    A group without a shared boundary has no values, and its documents do not affect the intervals.
    """
    paths = [tmp_path / name for name in ("en/a.txt", "de/a.txt", "b.txt")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("the text\n")
    measures = evaluate(pair, maps["recipe"], paths).measures
    assert [m.group for m in measures] == [*map(str, paths[:2]), "b.txt", "all"]
    named_all = paths[0].rename(tmp_path / "all")
    measures = evaluate(pair, maps["recipe"], [named_all, paths[2]]).measures
    assert [m.group for m in measures] == ["all (2)", "b.txt", "all"]
    (tmp_path / "empty.txt").write_text("")
    result = evaluate(pair, maps["recipe"], [paths[2], tmp_path / "empty.txt"])
    assert [(m.group, m.documents) for m in result.measures] == [("b.txt", 1)]
    assert result.measures[0].at_starts.cross_entropy.low is None


def test_evaluate_without_a_map_is_an_error(pair: Pair, counted_corpus: Path) -> None:
    with pytest.raises(ValueError, match="no map"):
        evaluate(pair, [], counted_corpus)


def test_small_and_large_values_are_not_rounded_to_0_or_1(
    evaluation: Evaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    most = 0.999_96
    measures = tuple(
        replace(m, coverage=most, top_1=most) for m in evaluation.measures if m.group == "en.jsonl"
    )
    rows = [replace(row, excess=1e-6) for row in evaluation.worst_rows]
    nearly = replace(evaluation, measures=measures, worst_rows=tuple(rows))
    first, *others = evaluation.classes  # the floor depends on the cut of each map
    print_evaluation(replace(nearly, classes=(replace(first, reference=9.0), *others)))
    output = capsys.readouterr().out
    assert ">99.99% │ >99.9% │" in output
    assert "<0.0001" in output
    assert "floor of 1 ┃" in output


def test_evaluate_on_the_command_line(
    cli: Cli, pair: Pair, small: Path, maps: Maps, counted_corpus: Path, tmp_path: Path
) -> None:
    maps["recipe"].save(tmp_path / "a.safetensors")
    build(*pair.tokenizers, BuildConfig.for_loss("p-kl")).save(tmp_path / "b.safetensors")
    models = ["-s", small / "small-byte-level", "-t", small / "small-digits"]
    line = ["evaluate", "a.safetensors", *models, "--text", counted_corpus]
    ranked = works(cli(*line[:2], "b.safetensors", *line[2:], "--for", "p-kl"))
    *lines, _, last = ranked.stdout.splitlines()
    assert last.startswith("For P-KL, b.safetensors is better: ")
    assert fits_80_columns("\n".join(lines))
    assert ranked.stdout.index("over chunks") < ranked.stdout.index("at starts")
    assert ranked.stdout.index("  map 2 ") < ranked.stdout.index("  map 1 ")
    assert "│   map 1" in cli(*line, env={"COLUMNS": "60"}).stdout
    judged = printed_json(cli(*line, "--json", "--quiet"))
    assert judged["measures"][0]["group"] == "corpus.jsonl"
    [verdict] = judged["verdicts"]
    output = " ".join(works(cli(*line)).stdout.split())
    words = "a.safetensors is {grade}: {reason} ({numbers})"
    assert output.endswith(words.format_map(verdict))
    fails(cli("evaluate", "none.safetensors", *line[2:]), "none.safetensors")


def measured(**closed: float | None) -> MapMeasures:
    views = {
        view: MapLosses(
            cross_entropy=Interval(value=1.0), floor=0.5, recipe=1.0, closed=closed.get(view, 0.0)
        )
        for view in ("at_starts", "over_chunks")
    }
    return MapMeasures(
        name="m", group="all", documents=2, starts=9, coverage=0.97, top_1=0.9, **views
    )


@pytest.mark.parametrize(
    ("figures", "loss", "empty", "grade", "words"),
    [
        ({"over_chunks": 0.7}, "p-kl", 0, "good", "m is good: the map closes 70% of the gap"),
        ({"over_chunks": 0.3}, "p-kl", 0, "usable", "m is usable: the map closes 30% of the gap"),
        ({"over_chunks": -0.15}, "p-kl", 0, "usable", "m is usable: the map is about as good as"),
        (
            {"over_chunks": -0.3},
            "p-kl",
            0,
            "bad",
            "m is bad: the map predicts the teacher's",
        ),
        (
            {"over_chunks": 0.7},
            "p-kl",
            0.02,
            "bad",
            "m is bad: 2.0% of the text's tokens",
        ),
        (
            {"at_starts": 0.01},
            "gold",
            0,
            "good",
            "as well as the recipe (gold: 1.000 nats at",
        ),
        ({"at_starts": -0.3}, "h-kl", 0, "bad", "worse than X-Token's recipe (H-KL: "),
    ],
)
def test_the_verdict_of_a_map(
    figures: dict[str, float], loss: BuildLoss, empty: float, grade: str, words: str
) -> None:
    verdict = map_verdict(measured(**figures), loss, empty)
    assert verdict.grade == grade
    assert words in str(verdict)
    assert "coverage 97.0%" in str(verdict)


def test_the_verdict_where_the_recipe_is_the_best_map() -> None:
    near = measured(over_chunks=None)
    assert map_verdict(near).grade == "good"
    losses = replace(near.over_chunks, cross_entropy=Interval(value=1.03))
    worse = replace(near, over_chunks=losses)
    assert map_verdict(worse).grade == "bad"


@pytest.mark.parametrize(("leak", "grade"), [(0.017, "good"), (0.03, "usable"), (0.06, "bad")])
def test_the_verdict_of_an_event_map(leak: float, grade: str) -> None:
    m = EventMapMeasures(
        name="e", group="all", documents=1, starts=9, leak=leak, shared_leak=0.1, student_bits=5,
        teacher_bits=5, student_token_bits=6, teacher_token_bits=6, kept=0.98,
    )  # fmt: skip
    verdict = event_verdict(m)
    assert verdict.grade == grade
    assert f"the map leaks at {leak:.2%} of the shared boundaries" in str(verdict)
    assert "keeps 98.0% of the bits" in str(verdict)


@pytest.mark.real
def test_the_prior_closes_half_of_the_way_on_real_tokenizers(
    load_real: Load, tmp_path: Path
) -> None:
    """The text is this project's guides, which no tokenizer was trained on."""
    guides = sorted((ROOT / "docs" / "guides").glob("*.md"))
    text = write_texts(tmp_path / "guides.jsonl", [(guide.read_text(), "en") for guide in guides])
    pair = xtok.load_pair(load_real("llama3.tiktoken"), load_real("mistral-v3.model"))
    prior = build(*pair.tokenizers, BuildConfig.for_loss("p-kl"))
    [measures] = evaluate(pair, prior, text).measures
    assert not_none(measures.over_chunks.closed) > 0.5  # 0.54, and 0.29 at starts
    assert not_none(measures.at_starts.closed) > 0.25
