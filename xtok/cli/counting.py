"""Counting on text, which takes hours: checkpoints, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xtok.cli.command import deferred_interrupt

if TYPE_CHECKING:
    from xtok.counting.counts import CountedText, CountingPlan
    from xtok.tokenizers import Tokenizer


def checkpoint_of(output: Path) -> Path:
    """Return where counts are saved if no other place is given: beside the map."""
    return output.with_name(f"{output.name}.checkpoint")


def count_here(
    plan: CountingPlan, *, student: Tokenizer, teacher: Tokenizer, checkpoint: Path
) -> CountedText:
    """Count a plan on this machine; an interruption waits for the next batch, and saves counts."""
    from xtok import report
    from xtok.counting import counts as counting

    def resumed(share: float) -> None:
        report.print_notes([f"resuming at {share:.0%} of the text, from {checkpoint}"])

    with deferred_interrupt() as is_interrupted:
        return counting.count_text(
            plan,
            student,
            teacher,
            checkpoint=checkpoint,
            progress=report.text_progress_bar,
            resumed=resumed,
            stopping=is_interrupted,
        )


@contextmanager
def keeping(checkpoint: Path | None) -> Iterator[None]:
    """Remove a checkpoint at the end, when the map is written; say where it is if interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        if checkpoint is None or not checkpoint.exists():
            raise
        message = f"counts saved in {checkpoint}; run the same command again to go on"
        raise KeyboardInterrupt(message) from None
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
