"""What a row costs, as the loss that is asked for reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make import byte_ranks

import xtok
from xtok.inspection.evaluate import evaluate


def test_rows_and_classes_are_measured_as_the_loss_reads_them(tmp_path: Path) -> None:
    """P-KL averages a chunk: of `201`, a third on each digit is the best row, and no fault."""
    pair = xtok.pair(
        byte_ranks(tmp_path / "s.tiktoken", "20", "201", digits=3),
        byte_ranks(tmp_path / "t.tiktoken", digits=1),
    )
    (tmp_path / "a.txt").write_text("201 201 201\n" * 20)
    m = xtok.build(pair)
    [row] = m.student_ids_of("201")
    rows = np.flatnonzero(m.student_ids == row)
    assert len(rows) == 3
    weights = m.weights.copy()
    weights[rows] = 1 / 3
    thirds = replace(m, weights=weights)
    by_loss = {
        loss: evaluate(thirds, tmp_path / "a.txt", pair, for_loss=loss) for loss in ("p-kl", "gold")
    }
    worst = {loss: [row.token for row in found.worst_rows] for loss, found in by_loss.items()}
    assert "201" in worst["gold"]
    assert "201" not in worst["p-kl"]
    [digits] = [c for c in by_loss["p-kl"].classes if c.token_class == "3 digits"]
    assert digits.starts == 60
    assert digits.loss == pytest.approx(digits.reference)
    assert [found.by_chunk for found in by_loss.values()] == [True, False]
