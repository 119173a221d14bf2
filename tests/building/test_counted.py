"""Maps counted on text: the formula, EM, and the command."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
from checks import fails
from command_lines import write_documents
from conftest import Cli
from make_maps import NO_SLOT
from make_tokenizers import token

from xtok.building.build import build
from xtok.building.counting.smoothing import ALPHAS
from xtok.building.exact import find_matches, reapply_exact, used_options
from xtok.building.multitoken import multitoken
from xtok.config import BuildConfig, MultitokenConfig, SpecialTokens, Target
from xtok.errors import XtokError
from xtok.maps import file as mapfile
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers.pairs import Pair

pytestmark = pytest.mark.usefixtures("few_synthetic_texts")


@pytest.fixture(scope="module")
def base(pair: Pair) -> ProjectionMap:
    return multitoken(pair, config=MultitokenConfig(scale_trick=False))


def counting(**options: Any) -> BuildConfig:
    """The options of a map counted on text, without exact rows."""
    return BuildConfig(**{"top_k": 8, "exact_match": False, **options})


def counted_map(
    pair: Pair,
    texts: Sequence[Path],
    config: BuildConfig | None = None,
    base: ProjectionMap | None = None,
) -> ProjectionMap:
    """Count a map on text; by default, without exact rows."""
    return build(pair, config=config or counting(), texts=texts, initial=base)


def ids(pair: Pair, student: bytes, teacher: bytes) -> tuple[int, int]:
    ours, theirs = pair.tokenizers
    return token(ours, student), token(theirs, teacher)


def weight(projection: ProjectionMap, s: int, t: int) -> float:
    return dict(naive.map_rows(projection)[s]).get(t, 0.0)


@pytest.mark.parametrize("target", ["start", "chunk", "both"])
def test_weight_of_an_occurrence_for_each_target(
    pair: Pair, base: ProjectionMap, tmp_path: Path, target: Target
) -> None:
    """Depending on the target, a shared token counts at its start, as a chunk, or twice."""
    path = write_documents(tmp_path / "a.jsonl", ["e"] * 3)
    s, t = ids(pair, b"e", b"e")
    config = counting(target=target, top_k=pair.shape[1])  # cuts no entry
    projection = counted_map(pair, [path], config, base)
    seen = 6 if target == "both" else 3
    alpha = projection.history[-1]["options"]["alpha"]
    expected = (seen + alpha * weight(base, s, t)) / (seen + alpha)
    assert weight(projection, s, t) == pytest.approx(expected, abs=1e-7)
    assert projection.history[-1]["options"]["target"] == target


def test_an_em_step_shares_a_chunk_as_the_map_predicts(
    pair: Pair, base: ProjectionMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`2` and `0` first have half of the chunk `20` each; the chunks `0` lower the second."""
    path = write_documents(tmp_path / "a.jsonl", ["20", "0", "0", "0"])
    monkeypatch.setattr("xtok.building.counted.choose_alpha", lambda *_: 1e-6)
    m = counted_map(pair, [path], counting(target="chunk"), base)
    weights_20 = [weight(m, *ids(pair, digit, b"20")) for digit in (b"2", b"0")]
    # At first W[2, 20] = 1 and W[0, 20] = 0.5 / 3.5, so `2` gets 1 / (1 + 1 / 7) of the chunk.
    assert weights_20 == pytest.approx([1, (1 / 8) / (3 + 1 / 8)], rel=1e-4)


def test_the_whole_formula_in_a_file(pair: Pair, base: ProjectionMap, tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["201", "20", "20"])
    projection = counted_map(pair, [path], counting(top_k=3), base)
    two, e = token(pair.tokenizers[0], b"2"), token(pair.tokenizers[0], b"e")
    weights = Counter({t: 4 * w for t, w in naive.map_rows(base)[two]})
    for name in (b"201", b"20", b"20"):
        weights[token(pair.tokenizers[1], name)] += 1
    expected = naive.heaviest(naive.normalized(dict(weights)), 3)
    assert dict(naive.map_rows(projection)[two]) == pytest.approx(expected, abs=1e-7)
    cut = naive.heaviest(dict(naive.map_rows(base)[e]), 3)
    assert dict(naive.map_rows(projection)[e]) == pytest.approx(cut, abs=1e-7)
    assert (projection.row_kind[two], projection.row_kind[e]) == (RowKind.COUNTED, base.row_kind[e])
    assert projection.top_k == 3
    last = projection.history[-1]
    assert (projection.method, last["stage"]) == ("count", "count")
    assert last["options"] == {"top_k": 3, "target": "start", "alpha": 4}
    assert last["initial_sha256"] == mapfile.sha256(base)


def test_alpha_is_not_chosen_on_the_only_document(
    pair: Pair, base: ProjectionMap, tmp_path: Path
) -> None:
    """The only document is held out, so no document remains for the counts."""
    path = write_documents(tmp_path / "a.jsonl", ["In 6 steps to the lamp."])
    projection = counted_map(pair, [path], base=base)
    assert projection.history[-1]["options"]["alpha"] == 4
    assert (
        "alpha 4 (the default, because the text has too few documents to choose alpha)"
        in projection.reports[-1].notes
    )


def test_exact_rows_and_slots(pair: Pair, base: ProjectionMap, corpus: Path) -> None:
    loose = counted_map(pair, [corpus], counting(), base)
    exact = counted_map(pair, [corpus], counting(exact_match=True), base)
    s, t = ids(pair, b"2", b"2")
    assert len(naive.map_rows(loose)[s]) > 1
    assert naive.map_rows(exact)[s] == [(t, 1.0)]
    assert [step["stage"] for step in exact.history] == ["multitoken", "count", "reapply-exact"]
    with_slot = multitoken(pair, config=MultitokenConfig(scale_trick=True))
    assert with_slot.enable_scale_trick
    projection = counted_map(pair, [corpus], counting(), with_slot)
    assert not projection.enable_scale_trick
    assert projection.edges.student_ids.tolist() == loose.edges.student_ids.tolist()


@pytest.mark.parametrize("target", ["start", "both"])
@pytest.mark.parametrize("exact_match", [False, True])
def test_ignored_ids_are_not_counted(
    pair: Pair, base: ProjectionMap, corpus: Path, target: Target, exact_match: bool
) -> None:
    """Rows of the initial map, and rows that become exact later, do not contain them either."""
    (s, _), (_, t) = ids(pair, b"2", b"2"), ids(pair, b"e", b"e")
    config = counting(
        target=target, exact_match=exact_match, ignore_student_ids=(s,), ignore_teacher_ids=(t,)
    )
    for initial in (None, base):
        projection = counted_map(pair, [corpus], config, initial)
        projection.check()
        for checked in (projection, reapply_exact(projection)):
            assert checked.row_kind[s] == RowKind.EMPTY
            assert not (checked.teacher_ids == t).any()
    assert (base.row_kind[s], (base.teacher_ids == t).any()) == (RowKind.PIECES, True)


@pytest.mark.parametrize("special_tokens", ["roles", "fuzzy", "off"])
@pytest.mark.parametrize("initial_special", ["roles", "fuzzy", "off"])
def test_options_of_an_initial_map_apply_where_the_config_has_defaults(
    pair: Pair, corpus: Path, special_tokens: SpecialTokens, initial_special: SpecialTokens
) -> None:
    """The recipe and the history record them, so later stages match in the same way."""
    (s, _), (_, t) = ids(pair, b"2", b"2"), ids(pair, b"e", b"e")
    initial_config = replace(
        NO_SLOT, special_tokens=initial_special, canonicalization="relaxed", token_form="text",
        ignore_student_ids=(s,), ignore_teacher_ids=(t,),
    )  # fmt: skip
    config = counting(exact_match=True, special_tokens=special_tokens)
    projection = counted_map(pair, [corpus], config, multitoken(pair, initial_config))
    used = initial_special if special_tokens == "roles" else special_tokens  # the default is roles
    options = replace(initial_config, special_tokens=used)
    assert replace(used_options(projection), scale_trick=False) == options
    assert projection.recipe is not None
    recorded = projection.recipe["options"]
    assert (recorded["special_tokens"], recorded["ignore_student_ids"]) == (used, [s])
    special = find_matches(pair, initial_config if used == "off" else options).special
    assert np.flatnonzero(projection.row_kind == RowKind.ROLE).tolist() == [*special.student_ids]
    assert projection.row_kind[s] == RowKind.EMPTY


def test_a_base_of_another_pair_is_refused_before_the_text_is_read(
    to_pieces: Pair, base: ProjectionMap, tmp_path: Path
) -> None:
    with pytest.raises(XtokError, match="teacher"):
        counted_map(to_pieces, [tmp_path / "missing.txt"], base=base)


@pytest.mark.parametrize(("loss", "is_exact"), [("p-kl", False), ("gold", True), ("h-kl", True)])
def test_build_for_a_loss(pair: Pair, loss: str, is_exact: bool) -> None:
    config = BuildConfig.for_loss(loss)  # type: ignore[arg-type]
    assert (config.weights, config.top_k, config.scale_trick) == ("synthetic", 8, False)
    assert config.target == ("both" if loss == "p-kl" else "start")
    projection = build(pair, config=config)
    matches = [ids(pair, b"2", b"2"), ids(pair, b"e", b"e")]
    assert all(naive.map_rows(projection)[s] == [(t, 1.0)] for s, t in matches) == is_exact
    assert max(len(row) for row in naive.map_rows(projection).values()) <= 8
    assert not projection.enable_scale_trick


def test_build_counts_on_text(pair: Pair, corpus: Path) -> None:
    projection = build(pair, config=BuildConfig.for_loss("p-kl"), texts=[corpus])
    assert [step["stage"] for step in projection.history] == ["count", "count"]
    own = counted_map(pair, [corpus], counting(target="both"))
    assert mapfile.sha256(projection) == mapfile.sha256(own)
    assert BuildConfig.for_loss("p-kl", target="chunk").target == "chunk"
    assert BuildConfig.for_loss("p-kl", weights="decay").target == "start"
    with pytest.raises(ValueError, match="requires weights='synthetic'"):
        build(pair, config=counting(target="both"))


# The command


def test_the_command_records_its_text(
    cli: Cli, small: Path, corpus: Path, base: ProjectionMap, tmp_path: Path
) -> None:
    base.save(tmp_path / "base.safetensors")
    result = cli(
        "build", small / "small-byte-level", small / "small-digits", "--text", corpus,
        "--no-exact-match", "--output", "map.safetensors",
        "--initial-projection-path", "base.safetensors",
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "map.safetensors\n"), result.stderr
    assert "120 documents" in result.stderr
    history = ProjectionMap.load(tmp_path / "map.safetensors").history
    step, content = history[-1], corpus.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    text = {"name": "a.jsonl", "size": len(content), "sha256": sha256}
    assert step["texts"] == [text]
    assert step["counted"]["documents"] == 120
    assert step["counted"]["student_tokens"] > step["counted"]["starts"] > 0
    assert step["options"]["alpha"] in ALPHAS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base.safetensors", "map.safetensors"]
    assert str(corpus.parent) not in json.dumps(history)


def test_texts_are_checked_before_the_models(cli: Cli, tmp_path: Path) -> None:
    pair = ("missing-student", "missing-teacher")
    fails(cli("build", *pair, "--text", "none-*.txt"), "none-*.txt")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    fails(cli("build", *pair, "--text", "a.txt"), "a.txt is not UTF-8")
    (tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}\n')
    models = ["-s", "missing-student", "-t", "missing-teacher"]
    for command in (
        ("build", *pair), ("doctor", *pair), ("evaluate", "a.map", *models),
        ("report", "a.map", *models), ("inspect", "a.map", "--against", "b.map", *models[:2]),
    ):  # fmt: skip
        fails(cli(*command, "--text", "a.jsonl"), "line 1: the row has no field", "--field")
