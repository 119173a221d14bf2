"""The table of losses: their inputs and options."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from csd_inputs import csd_batch, spelling_map
from loss_inputs import alignment, loss_map
from make_maps import built

import xtok
from xtok import DistillationCollator, ProjectionModule, XtokError, losses
from xtok.alignment.aligner import ShiftedAlignment
from xtok.loss_names import LOSS_INFO, BuildLoss, EventLoss, LossName
from xtok.tokenizers.pairs import Pair
from xtok.training.batches import Batch, SideBatch
from xtok.training.collator import prepare
from xtok.training.losses import ALMConfig, CSDConfig, PKLConfig, event_index, spelling_index
from xtok.training.losses.registry import (
    LOSSES,
    loss_spec,
    make_loss,
)
from xtok.training.objective import make_objective


def test_the_table_has_every_loss_with_its_kind_of_map() -> None:
    assert set(LOSSES) == set(LOSS_INFO) == {*get_args(LossName)}
    assert {n for n, info in LOSS_INFO.items() if info.map == "map"} == {*get_args(BuildLoss)}
    event_losses = {n for n, info in LOSS_INFO.items() if info.map in ("events", "spellings")}
    assert event_losses == {*get_args(EventLoss)}
    assert {name for name, row in LOSSES.items() if row.is_stored} == {"topk-kl"}
    for name, row in LOSSES.items():
        if row.map:
            with pytest.raises(XtokError, match=f"{name} requires {row.map.name}"):
                make_loss(name)
    # 3 of 4 tokens are predicted targets, in 2 chunks; the first token of one chunk has no
    # prediction.
    aligned = alignment([[0, 0, 1, -1]], [[0, 1, -1]])
    batch: Batch = {"targets": torch.tensor([[5, 5, 5, -100]])}
    stored: Any = SimpleNamespace(valid=torch.tensor([[0, 1, 1, 1, 1]]))
    side: SideBatch = {"shifted": aligned, "stored": stored}
    counts = {
        name: make_loss(name).count(batch, side) for name in ("alm", "same-tokenizer", "topk-kl")
    }
    assert counts == {"alm": 1, "same-tokenizer": 1, "topk-kl": 4}
    with pytest.raises(ValueError, match="loss is 'kl', expected one of"):
        make_loss("kl")  # type: ignore[arg-type]


def test_one_map_serves_losses_with_and_without_a_map(pair: Pair) -> None:
    projection = built(*pair.tokenizers)
    two_losses = make_objective([pair] * 2, ["alm", "gold"], projection).losses
    assert [loss.map is None for loss in two_losses] == [True, False]  # type: ignore[attr-defined]
    assert len(make_objective([pair] * 2, "alm", [None, None]).losses) == 2
    assert make_objective([], "alm", projection).losses == []


def test_config_is_passed_to_its_loss() -> None:
    """CSD halves the loss of chunks that are not 1:1."""
    both = [[0], [0, 1], [0, 0]], [[0], []]
    index = spelling_index(spelling_map(*both))
    student, teacher, targets, aligned = csd_batch([[([1], [0, 1])]])
    batch: Batch = {"targets": targets[0]}
    side: SideBatch = {"targets": targets[1], "shifted": aligned}
    whole, half = (make_loss("csd", map=index, config=CSDConfig(beta=beta)) for beta in (1.0, 0.5))
    assert whole.count(batch, side) == 1
    expected = float(whole(student, teacher, batch, side).detach()) / 2
    assert float(half(student, teacher, batch, side).detach()) == pytest.approx(expected)
    with pytest.raises(ValueError, match="ALMConfig, not CSDConfig"):
        make_loss("alm", config=CSDConfig())
    with pytest.raises(ValueError, match=r"topk-kl .*ALMConfig"):
        make_loss("topk-kl", config=ALMConfig())


@pytest.mark.filterwarnings("ignore:this map is not made for P-KL")
@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("same-tokenizer", "topk-kl")])
def test_the_loss_is_the_mean_over_exact_chunks(name: LossName, pair: Pair) -> None:
    """Therefore, batches of one row sum to a batch of all rows."""
    row, (student, teacher) = LOSSES[name], pair.tokenizers
    module = loss_map(name, pair)
    options = {"top_k": None} if row.config is PKLConfig else {}
    strict, all_chunks = (
        make_loss(name, map=module, config=row.config(exact_token_match_only=only, **options))
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
        row_fields = {f.name: getattr(aligned, f.name)[rows] for f in fields(ShiftedAlignment)}
        part = ShiftedAlignment(**row_fields)
        side_rows: SideBatch = {"targets": side["targets"][rows], "shifted": part}
        batch_rows: Batch = {"targets": batch["targets"][rows]}
        count = strict.count(batch_rows, side_rows)
        assert count < all_chunks.count(batch_rows, side_rows)
        mean = strict(logits[0][rows], logits[1][rows], batch_rows, side_rows)
        return count * float(mean), count

    totals = [total(slice(n, n + 1)) for n in range(len(texts))]
    expected, count = total(slice(None))
    assert count == sum(n for _, n in totals) > 5
    assert sum(row_total for row_total, _ in totals) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["p-kl", "event-kl", "csd", "alm", "gold"])
@pytest.mark.parametrize("prompt", [0, 3])
@pytest.mark.filterwarnings("ignore:this map is not made for P-KL")
def test_padding_on_the_left_is_as_on_the_right(name: LossName, prompt: int, pair: Pair) -> None:
    """Chunks, loss and gradients are the same; predictions of padding are ignored."""
    student, teacher = pair.tokenizers
    collate = DistillationCollator(student, teacher, bos=False)
    loss = make_loss(name, map=loss_map(name, pair))
    texts = ["The keeper lit 201 lamps, día tras día.", "at 6:12.", "Fog"]
    rows = [student.segment(text.encode()) for text in texts]
    width = 4 + max(map(len, rows))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(len(row), pair.shape[0], generator=generator).double() for row in rows]
    counts, values, gradients = [], [], []
    teacher_logits = torch.Tensor()
    for left in (False, True):
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        labels = torch.full_like(ids, -100)
        logits = torch.full((len(rows), width, pair.shape[0]), 1e4, dtype=torch.float64)
        positions = []
        for number, (row, row_values) in enumerate(zip(rows, inputs, strict=True)):
            begin = width - len(row) if left else 0
            here = slice(begin, begin + len(row))
            ids[number, here], mask[number, here] = torch.tensor(row), 1
            labels[number, here] = torch.tensor(row)
            labels[number, begin : begin + prompt] = -100
            logits[number, here] = row_values
            positions.append(here)
        logits[mask == 0, 5] = -1e4
        logits.requires_grad_()
        batch = prepare(collate.from_student_ids(ids, mask, labels))
        [side] = batch["teachers"]
        if not left:
            shape = (*side["input_ids"].shape, pair.shape[1])
            teacher_logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = loss(logits, teacher_logits, batch, side)
        (gradient,) = torch.autograd.grad(value, logits)
        assert not gradient[mask == 0].any()
        counts.append(loss.count(batch, side))
        values.append(float(value.detach()))
        gradients.append(torch.cat([gradient[n, at] for n, at in enumerate(positions)]))
    assert counts[0] == counts[1] > 5
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)


def test_losses_refuse_arguments_of_other_types(pair: Pair, tmp_path: Path) -> None:
    """The error for an alignment of tokens, an event map or a path names the expected type."""
    student, teacher = pair.tokenizers
    untyped: Any = losses  # type checkers report these calls, too
    batch = DistillationCollator(student, teacher)(["High water at 6:12."])
    [side] = prepare(batch)["teachers"]
    events, spellings = xtok.events(student, teacher), xtok.spellings(pair)
    logits = [torch.zeros(*inputs["input_ids"].shape, width)
              for inputs, width in zip((batch, side), pair.shape, strict=True)]  # fmt: skip
    targets, m = (batch["input_ids"], side["input_ids"]), built(student, teacher)
    index, unshifted = event_index(events), batch["teachers"][0]["alignment"]
    with pytest.raises(ValueError, match="shift_to_predictions"):
        untyped.event_kl(*logits, index, unshifted)
    with pytest.raises(ValueError, match="shift_to_predictions"):
        untyped.count_chunks(unshifted)
    for wrong in (events, tmp_path / "events.safetensors", "events.safetensors", None, m):
        with pytest.raises(ValueError, match=r"of type EventIndex"):
            untyped.event_kl(*logits, wrong, side["shifted"])
    with pytest.raises(ValueError, match=r"of type SpellingIndex"):
        untyped.csd(*logits, spellings, targets, side["shifted"])
    with pytest.raises(ValueError, match=r"of type ProjectionModule"):
        untyped.p_kl(*logits, m, side["shifted"])
    with pytest.raises(ValueError, match=r"of type ExactPairs"):
        untyped.gold(*logits, ProjectionModule(m), side["shifted"])
    with pytest.raises(XtokError, match="an event map"):
        make_loss("event-kl", map=m)


def test_both_spellings_of_a_name(pair: Pair) -> None:
    for name in LOSSES:
        assert loss_spec(name.replace("-", "_")) is LOSSES[name]  # type: ignore[arg-type]
    with pytest.raises(XtokError, match="an event map"):
        make_loss("event_kl")  # type: ignore[arg-type]
    assert xtok.BuildConfig.for_loss("p_kl") == xtok.BuildConfig.for_loss("p-kl")  # type: ignore[arg-type]
    event_map: Any = xtok.get_map(*pair.tokenizers, for_loss="event_kl")  # type: ignore[call-overload]
    assert event_map.num_events == xtok.events(*pair.tokenizers).num_events
