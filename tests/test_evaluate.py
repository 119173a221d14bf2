from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from conftest import Cli
from naive import rows_of
from pyarrow import parquet
from test_estimate import counting, estimate

from xtok.config import BuildConfig, Loss, MultitokenConfig, SortCutConfig
from xtok.errors import XtokError
from xtok.inspection.advice import Ranking
from xtok.inspection.evaluate import Evaluation, evaluate
from xtok.maps.projection_map import ProjectionMap
from xtok.stages.build import build
from xtok.stages.exact import reapply_exact
from xtok.stages.multitoken import multitoken
from xtok.stages.sort_cut import sort_cut
from xtok.tokenizers import Tokenizer

TEXTS = [
    "the cat sat on the mat, and the dog sat on the log.\n",
    "In 2013 there were 201 of them; in 2014 there were 1,024.\n",
    "Der Hund und die Katze. Les chats et les chiens.\n",
    "def f(x):\n    return x + 1\n",
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": t, "lang": "py" if "def" in t else "en"}) for t in TEXTS * 3]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def recipe(byte_level: Tokenizer, digits: Tokenizer) -> ProjectionMap:
    whole = multitoken(byte_level, digits, MultitokenConfig(scale_trick=False))
    return sort_cut(reapply_exact(whole), SortCutConfig(top_k=4))


@pytest.fixture
def on_corpus(byte_level: Tokenizer, digits: Tokenizer, corpus: Path) -> Callable[..., Evaluation]:
    """Evaluate maps of the pair on the corpus."""

    def run(*maps: ProjectionMap, **options: Any) -> Evaluation:
        return evaluate(maps, [corpus], byte_level, digits, **options)

    return run


def starts(tokenizer: Tokenizer, text: str) -> dict[int, int]:
    """Return byte offset to token id, one token after another."""
    [ids] = tokenizer.library_ids([text])
    place, found = 0, {}
    for i in ids:
        found[place] = i
        place += len(tokenizer.table[i])
    return found


def pairs(student: Tokenizer, teacher: Tokenizer) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for text in TEXTS * 3:
        s, t = starts(student, text), starts(teacher, text)
        for place in s.keys() & t.keys():
            counts[s[place], t[place]] += 1
    return counts


def mean_loss(
    rows: dict[int, list[tuple[int, float]]], counts: dict[tuple[int, int], int], width: int
) -> float:
    total = sum(
        n * -log((1 - 1e-3) * dict(rows.get(s, [])).get(t, 0.0) + 1e-3 / width)
        for (s, t), n in counts.items()
    )
    return total / sum(counts.values())


def test_measures_are_those_of_their_definition(
    byte_level: Tokenizer,
    digits: Tokenizer,
    recipe: ProjectionMap,
    on_corpus: Callable[..., Evaluation],
) -> None:
    plain = build(byte_level, digits, BuildConfig(top_k=4))
    [one, two] = on_corpus(plain, recipe).measures
    counts, width = pairs(byte_level, digits), digits.vocabulary.vocab_size
    rows = rows_of(plain)
    total = sum(counts.values())
    assert one.starts == total
    assert one.documents == 12
    assert one.cross_entropy.value == pytest.approx(mean_loss(rows, counts, width), abs=1e-9)
    covered = sum(n for (s, t), n in counts.items() if t in dict(rows.get(s, [])))
    assert one.coverage.value == pytest.approx(covered / total)
    top = sum(n for (s, t), n in counts.items() if rows.get(s) and rows[s][0][0] == t)
    assert one.top_1.value == pytest.approx(top / total)
    best: dict[int, list[tuple[int, float]]] = {}
    for s in {s for s, _ in counts}:
        heaviest = sorted((-n, t) for (x, t), n in counts.items() if x == s)[:4]
        mass = -sum(n for n, _ in heaviest)
        best[s] = [(t, -n / mass) for n, t in heaviest]
    assert one.floor == pytest.approx(mean_loss(best, counts, width), abs=1e-6)
    assert one.recipe == pytest.approx(mean_loss(rows_of(recipe), counts, width), abs=1e-6)
    assert one.slot_weight > 0
    # The recipe is nowhere nearer to the floor than itself.
    assert two.closed is not None
    assert two.closed.value == 0
    assert two.closed.low == two.closed.high == 0
    assert one.closed is not None
    expected = (one.recipe - one.cross_entropy.value) / (one.recipe - one.floor)
    assert one.closed.value == pytest.approx(expected)
    assert one.cross_entropy.low is not None
    assert one.cross_entropy.high is not None
    assert one.cross_entropy.low < one.cross_entropy.value < one.cross_entropy.high


def test_chunks_are_averaged_as_p_kl_does(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    text = "In 2013, 201"
    path = tmp_path / "a.txt"
    path.write_text(text)
    projection = build(byte_level, digits, BuildConfig(scale_trick=False))
    found = evaluate([projection], [path], byte_level, digits).measures[0]
    s, t = starts(byte_level, text), starts(digits, text)
    bounds = [*sorted(s.keys() & t.keys()), len(text)]
    rows, width = rows_of(projection), digits.vocabulary.vocab_size
    losses = []
    for a, b in pairwise(bounds):
        own = [i for place, i in s.items() if a <= place < b]
        others = [i for place, i in t.items() if a <= place < b]
        mean = [sum(dict(rows[i]).get(o, 0.0) for i in own) / len(own) for o in others]
        losses.append(sum(-log((1 - 1e-3) * p + 1e-3 / width) for p in mean) / len(mean))
    assert len(losses) >= 4
    assert found.chunk_cross_entropy.value == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    assert found.cross_entropy.low is None  # one document tells nothing of its spread


def test_recipe_and_floor_are_measured_over_chunks_too(
    byte_level: Tokenizer, digits: Tokenizer, recipe: ProjectionMap, corpus: Path, tmp_path: Path
) -> None:
    plain = build(byte_level, digits, BuildConfig(top_k=4))
    counted = estimate(
        byte_level,
        digits,
        [corpus],
        counting(top_k=4, alpha=1e-6, target="chunk"),
        base=recipe,
    )
    found = evaluate([plain, recipe, counted], [corpus], byte_level, digits, group_by="lang")
    *_, one, two, three = found.measures
    assert two.chunk_recipe == one.chunk_recipe == pytest.approx(two.chunk_cross_entropy.value)
    assert three.chunk_floor == pytest.approx(three.chunk_cross_entropy.value, abs=1e-4)
    assert one.chunk_closed is not None
    expected = (one.chunk_recipe - one.chunk_cross_entropy.value) / (
        one.chunk_recipe - one.chunk_floor
    )
    assert one.chunk_closed.value == pytest.approx(expected)
    [alone] = evaluate([plain], [corpus], byte_level, digits, group_by="lang").measures[-1:]
    assert alone.chunk_floor == one.chunk_floor
    (tmp_path / "py.jsonl").write_text(3 * f"{json.dumps({'text': TEXTS[3]})}\n")
    [py] = evaluate([plain], [tmp_path / "py.jsonl"], byte_level, digits).measures
    [group, *_] = [m for m in found.measures if m.group == "py"]
    assert group.chunk_floor == py.chunk_floor  # counted on these documents alone


def test_maps_are_ranked_by_what_decides_for_a_loss(
    byte_level: Tokenizer,
    digits: Tokenizer,
    recipe: ProjectionMap,
    corpus: Path,
    on_corpus: Callable[..., Evaluation],
) -> None:
    """At starts a map may be better that is worse over chunks."""
    maps = [
        estimate(byte_level, digits, [corpus], counting(alpha=0.01, target=target), base=recipe)
        for target in ("start", "chunk")
    ]

    def ranking(loss: Loss) -> Ranking:
        found = on_corpus(*maps, names=["starts", "chunks"], for_loss=loss).ranking
        assert found is not None
        return found

    p_kl = ranking("p-kl")
    assert (p_kl.names, p_kl.measure) == (("chunks", "starts"), "chunk_cross_entropy")
    assert p_kl.lead is not None
    assert p_kl.lead.low is not None
    assert 0 < p_kl.lead.low < p_kl.lead.value
    assert p_kl.verdict.startswith("For P-KL, chunks is better: ")
    for loss in ("gold", "h-kl"):
        other = ranking(loss)
        assert (other.names, other.measure) == (("starts", "chunks"), "cross_entropy")


def test_maps_that_a_text_cannot_tell_apart(
    recipe: ProjectionMap, on_corpus: Callable[..., Evaluation]
) -> None:
    found = on_corpus(recipe, recipe, names=["a", "a"], for_loss="gold")
    assert [m.name for m in found.measures] == ["a", "a (2)"]
    assert found.ranking is not None
    assert "does not tell a from a (2)" in found.ranking.verdict
    alone = on_corpus(recipe, for_loss="gold").ranking
    assert alone is not None
    assert alone.lead is None
    assert on_corpus(recipe).ranking is None
    with pytest.raises(ValueError, match="'kl'"):
        on_corpus(recipe, for_loss="kl")


def test_counted_map_comes_to_the_floor(
    byte_level: Tokenizer, digits: Tokenizer, recipe: ProjectionMap, corpus: Path
) -> None:
    """A map counted on the very text that is measured, hardly smoothed, is the floor."""
    counted = estimate(byte_level, digits, [corpus], counting(top_k=4, alpha=1e-6), base=recipe)
    [found] = evaluate([counted], [corpus], byte_level, digits).measures
    assert found.cross_entropy.value == pytest.approx(found.floor, abs=1e-4)
    assert found.coverage_of_floor == pytest.approx(1)


def test_a_map_measured_on_its_own_text_is_noted(
    byte_level: Tokenizer, digits: Tokenizer, recipe: ProjectionMap, corpus: Path, tmp_path: Path
) -> None:
    counted = estimate(byte_level, digits, [corpus], counting(alpha=0.01), base=recipe)
    (tmp_path / "copy.jsonl").write_bytes(corpus.read_bytes())
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text().replace("cat", "cow"))
    maps, names = [counted, recipe], ["counted", "recipe"]

    def noted(path: Path) -> list[str]:
        notes = evaluate(maps, path, byte_level, digits, names=names).notes
        return [note.split(",")[0] for note in notes]

    [little] = noted(other)
    mine, again = noted(tmp_path / "copy.jsonl")
    assert again == little
    assert mine.startswith("counted was counted on copy.jsonl")


def test_groups_classes_and_worst_rows(
    recipe: ProjectionMap, on_corpus: Callable[..., Evaluation]
) -> None:
    found = on_corpus(recipe, group_by="lang", num_worst=2)
    assert [(m.group, m.documents) for m in found.measures] == [("en", 9), ("py", 3), ("all", 12)]
    assert sum(m.starts for m in found.measures[:2]) == found.measures[2].starts
    assert sum(c.starts for c in found.classes) == found.measures[2].starts
    assert {"1 digit", "Latin", "line breaks"} <= {c.token_class for c in found.classes}
    first, second = found.worst_rows
    assert first.excess >= second.excess > 0
    assert sum(share for _, share, _ in first.wanted) <= 1 + 1e-9


def test_a_group_may_be_called_all(
    byte_level: Tokenizer, digits: Tokenizer, recipe: ProjectionMap, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    groups = ["all", "en", "en", "all", "en"]
    lines = [json.dumps({"text": TEXTS[0], "lang": lang}) for lang in groups]
    path.write_text("\n".join(lines) + "\n")
    found = evaluate([recipe], [path], byte_level, digits, group_by="lang").measures
    assert [(m.group, m.documents) for m in found] == [("all", 2), ("en", 3), ("all", 5)]


def test_the_same_seed_gives_the_same_intervals(
    recipe: ProjectionMap, on_corpus: Callable[..., Evaluation]
) -> None:
    first, again, other = (on_corpus(recipe, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.measures[0].cross_entropy != other.measures[0].cross_entropy


def test_files_of_one_name_are_groups_of_their_own(
    byte_level: Tokenizer, digits: Tokenizer, recipe: ProjectionMap, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("en/a.txt", "de/a.txt", "b.txt")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("the text\n")
    found = evaluate([recipe], paths, byte_level, digits)
    assert [m.group for m in found.measures] == [*map(str, paths[:2]), "b.txt", "all"]


def test_maps_of_another_pair_and_empty_text_are_errors(
    byte_level: Tokenizer, digits: Tokenizer, recipe: ProjectionMap, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(XtokError, match="other tokens"):
        evaluate([recipe], [corpus], digits, byte_level)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(XtokError, match="0 documents, 0 bytes"):
        evaluate([recipe], [tmp_path / "empty.txt"], byte_level, digits)
    with pytest.raises(ValueError, match="no map"):
        evaluate([], [corpus], byte_level, digits)


def test_progress_goes_through_every_byte_on_disk(
    byte_level: Tokenizer, digits: Tokenizer, recipe: ProjectionMap, corpus: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"  # which is not read byte after byte
    parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=2)
    steps: list[tuple[int, int]] = []

    @contextmanager
    def watching(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
        assert total == path.stat().st_size + corpus.stat().st_size
        yield lambda size, tokens: steps.append((size, tokens))

    evaluate([recipe], [path, corpus], byte_level, digits, text_progress=watching)
    assert sum(size for size, _ in steps) == path.stat().st_size + corpus.stat().st_size
    once = sum(len(ids) for ids in byte_level.library_ids(TEXTS))
    assert sum(tokens for _, tokens in steps) == 4 * once


def models(small: Path) -> list[str | Path]:
    return [
        "--student-model", small / "small-byte-level", "--teacher-model", small / "small-digits",
    ]  # fmt: skip


def test_evaluate_on_the_command_line(
    cli: Cli,
    byte_level: Tokenizer,
    digits: Tokenizer,
    small: Path,
    recipe: ProjectionMap,
    corpus: Path,
    tmp_path: Path,
) -> None:
    recipe.save(tmp_path / "a.safetensors")
    build(byte_level, digits, BuildConfig.for_loss("p-kl")).save(tmp_path / "b.safetensors")
    line = ["evaluate", "a.safetensors", *models(small), "--text", corpus]
    ranked = cli(*line[:2], "b.safetensors", *line[2:], "--for", "p-kl")
    assert ranked.returncode == 0, ranked.stderr
    lines = ranked.stdout.splitlines()
    assert lines[-1].startswith("For P-KL, b.safetensors is better: ")
    assert max(map(len, lines[:-2])) <= 80
    assert ranked.stdout.index("over chunks") < ranked.stdout.index("at starts")
    assert ranked.stdout.index("  map 2 ") < ranked.stdout.index("  map 1 ")
    narrow = cli(*line, env={"COLUMNS": "60"})
    assert "│   map 1" in narrow.stdout
    [measures] = json.loads(cli(*line, "--json", "--min-coverage", "0").stdout)["measures"]
    assert measures["group"] == "corpus.jsonl"
    missed = cli(*line, "--min-coverage", "0.9999", "--max-cross-entropy", "0.0001", "--quiet")
    assert missed.returncode == 3
    coverage, cross_entropy = missed.stderr.splitlines()
    assert coverage.startswith("failed: a.safetensors on corpus.jsonl: coverage 0.")
    assert cross_entropy.endswith("is above 0.0001")
    assert cli(*line[:-1], "nowhere*.txt").returncode == 1
    assert cli(*line, "--max-leak", "0.1").returncode == 2


def test_a_gate_of_nan_is_refused(
    cli: Cli, recipe: ProjectionMap, on_corpus: Callable[..., Evaluation]
) -> None:
    for gate in ("--max-cross-entropy", "--min-coverage", "--max-leak"):
        pair = ("--student-model", "bytes", "--teacher-model", "bytes")
        done = cli("evaluate", "a", "--text", "x", *pair, gate, "nan")
        assert (done.returncode, f"{gate} is nan" in done.stderr) == (2, True)
    with pytest.raises(ValueError, match="max_cross_entropy"):
        on_corpus(recipe).failing(max_cross_entropy=float("nan"))


@pytest.mark.real
def test_the_prior_closes_half_of_the_way_on_real_tokenizers(
    load_real: Callable[[str], Tokenizer], tmp_path: Path
) -> None:
    """On text that no tokenizer has seen: this project's own guides."""
    guides = sorted((Path(__file__).parents[1] / "docs" / "guides").glob("*.md"))
    student, teacher = load_real("llama3.tiktoken"), load_real("mistral-v3.model")
    maps = [
        build(student, teacher, BuildConfig(top_k=8, scale_trick=False)),
        build(student, teacher, BuildConfig.for_loss("p-kl")),
    ]
    recipe, prior = evaluate(maps, guides, student, teacher).measures[-2:]
    assert recipe.closed is not None
    assert abs(recipe.closed.value) < 1e-6
    assert prior.closed is not None
    assert prior.closed.value > 0.3
    assert prior.coverage.value > recipe.coverage.value
