"""The table of losses: what each takes, and which options it has."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from make import GOOD

from xtok import ProjectionModule, XtokError
from xtok.training.losses.named import EVENTS, LOSSES, MAP, LossName, make_loss


def test_the_table() -> None:
    assert set(LOSSES) == {*get_args(LossName)}
    assert {name for name, row in LOSSES.items() if row.artefact is EVENTS} == {"event-kl"}
    assert {name for name, row in LOSSES.items() if row.to_student} == {"teacher-to-student-kl"}
    assert {name for name, row in LOSSES.items() if row.is_stored} == {"topk-kl"}
    for name, row in LOSSES.items():
        if row.artefact:
            with pytest.raises(XtokError, match=f"{name} needs {row.artefact.name}"):
                make_loss(name)
        else:
            assert make_loss(name).count is row.count
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
