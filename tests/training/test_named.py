"""The table of losses: what each takes, and which options it has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from make import GOOD, alignment, built

import xtok
from xtok import DistillationCollator, ProjectionModule, XtokError
from xtok.pairs import Pair
from xtok.stages.spellings import spellings_of_pair
from xtok.training.collator import prepare
from xtok.training.losses import ALMConfig, CSDConfig, PKLConfig, event_index, spelling_index
from xtok.training.losses.named import EVENTS, LOSSES, MAP, SPELLINGS, LossName, make_loss


def test_the_table() -> None:
    assert set(LOSSES) == {*get_args(LossName)}
    assert {name for name, row in LOSSES.items() if row.artefact is EVENTS} == {"event-kl"}
    assert {name for name, row in LOSSES.items() if row.artefact is SPELLINGS} == {"csd"}
    assert {name for name, row in LOSSES.items() if row.is_stored} == {"topk-kl"}
    for name, row in LOSSES.items():
        if row.artefact:
            with pytest.raises(XtokError, match=f"{name} needs {row.artefact.name}"):
                make_loss(name)
    # 3 of 4 tokens are targets that something predicts, in 2 chunks; of one the first is not.
    aligned = alignment([[0, 0, 1, -1]], [[0, 1, -1]])
    batch = {"targets": torch.tensor([[5, 5, 5, -100]])}
    side = {"shifted": aligned, "stored": SimpleNamespace(valid=torch.tensor([[0, 1, 1, 1, 1]]))}
    counts = {
        name: make_loss(name).count(batch, side) for name in ("alm", "same-tokenizer", "topk-kl")
    }
    assert counts == {"alm": 1, "same-tokenizer": 3, "topk-kl": 4}
    with pytest.raises(ValueError, match="the loss is 'kl', and must be one of p-kl, event-kl"):
        make_loss("kl")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("topk-kl", {"temperature": 2}, "temperature"),
        ("topk-kl", {"reverse_kl": True, "top_k": 1}, "reverse_kl, top_k"),
        ("gold", {"top_k": 1, "temperature": 2}, "top_k"),
    ],
)
def test_options_that_a_loss_has_not(name: Any, options: Any, missing: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no {missing}$"):
        make_loss(
            name, module=ProjectionModule(GOOD) if LOSSES[name].artefact is MAP else None, **options
        )


def test_a_config_in_place_of_options() -> None:
    """CSD halves what is not 1:1; every config is its loss's own."""
    from test_csd import batch as csd_batch
    from test_csd import spellings

    both = [[0], [0, 1], [0, 0]], [[0], []]
    index = spelling_index(spellings(*both))
    student, teacher, targets, aligned = csd_batch([[([1], [0, 1])]])
    batch, side = {"targets": targets[0]}, {"targets": targets[1], "shifted": aligned}
    whole, half = (
        make_loss("csd", module=index, config=CSDConfig(beta=beta)) for beta in (1.0, 0.5)
    )
    assert whole.count(batch, side) == 1
    expected = float(whole(student, teacher, batch, side).detach()) / 2
    assert float(half(student, teacher, batch, side).detach()) == pytest.approx(expected)
    for options in ({"config": CSDConfig()}, {"config": ALMConfig(), "reverse_kl": True}):
        with pytest.raises(ValueError, match="alm takes ALMConfig, without other options"):
            make_loss("alm", **options)
    with pytest.raises(ValueError, match="topk-kl takes no config"):
        make_loss("topk-kl", config=ALMConfig())


@pytest.mark.filterwarnings("ignore:this map is not made for P-KL")
@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("same-tokenizer", "topk-kl")])
def test_the_count_of_exact_chunks_is_what_the_loss_is_the_mean_of(
    name: LossName, pair: Pair
) -> None:
    """So that batches of one row add up to a batch of all of them."""
    row, (student, teacher) = LOSSES[name], pair.tokenizers
    module: Any = None
    if row.artefact is SPELLINGS:
        module = spelling_index(spellings_of_pair(pair))
    elif row.artefact is EVENTS:
        module = event_index(xtok.events(student, teacher))
    elif row.artefact is MAP:
        module = ProjectionModule(built(student, teacher))
    options = {"top_k": None} if row.config is PKLConfig else {}
    strict, all_chunks = (
        make_loss(name, module=module, config=row.config(exact_token_match_only=only, **options))
        for only in (True, False)
    )
    texts = ["The keeper lit 201 lamps, día tras día.", "High water at 6:12.", "Fog and ashes"]
    batch = prepare(DistillationCollator(student, teacher)(texts))
    [side] = batch["teachers"]
    torch.manual_seed(0)
    valid = side["shifted"].pair_valid
    correct = valid & (torch.rand(valid.shape) < 0.5)
    aligned = replace(side["shifted"], pair_is_correct=correct)
    logits = [
        torch.randn(*part["targets"].shape, width, dtype=torch.float64)
        for part, width in zip((batch, side), pair.shape, strict=True)
    ]

    def total(rows: slice) -> tuple[float, int]:
        part = type(aligned)(**{name: value[rows] for name, value in vars(aligned).items()})
        of_side = {"targets": side["targets"][rows], "shifted": part}
        args = {"targets": batch["targets"][rows]}, of_side
        count = strict.count(*args)
        assert count < all_chunks.count(*args)
        return count * float(strict(logits[0][rows], logits[1][rows], *args)), count

    of_rows = [total(slice(n, n + 1)) for n in range(len(texts))]
    expected, count = total(slice(None))
    assert count == sum(n for _, n in of_rows) > 5
    assert sum(of_row for of_row, _ in of_rows) == pytest.approx(expected)
