"""Counting on text, which takes hours: checkpoints, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtok import report
from xtok.cli.command import deferred_interrupt

if TYPE_CHECKING:
    from xtok.cli.options import Models
    from xtok.counting.counts import CountedText, CountingPlan
    from xtok.tokenizers import Tokenizer


def checkpoint_of(output: Path) -> Path:
    """Return where counts are saved if no other place is given: beside the map."""
    return output.with_name(f"{output.name}.checkpoint")


@contextmanager
def counting_here(
    student: Tokenizer, teacher: Tokenizer, checkpoint: Path
) -> Iterator[Callable[[CountingPlan], CountedText]]:
    """Yield what counts a plan on this machine; at the end, remove the checkpoint.

    So the map is to be written within. An interruption waits for the next batch, saves the counts,
    and says where they are.
    """
    from xtok.counting.counts import count_text

    def count(plan: CountingPlan) -> CountedText:
        with deferred_interrupt() as is_interrupted:
            return count_text(
                plan,
                student,
                teacher,
                checkpoint=checkpoint,
                progress=report.text_progress_bar,
                resumed=resumed,
                stopping=is_interrupted,
            )

    def resumed(share: float) -> None:
        report.print_notes([f"resuming at {share:.0%} of the text, from {checkpoint}"])

    try:
        yield count
    except KeyboardInterrupt:
        if not checkpoint.exists():
            raise
        message = f"counts saved in {checkpoint}; run the same command again to go on"
        raise KeyboardInterrupt(message) from None
    checkpoint.unlink(missing_ok=True)


@contextmanager
def counting_on_ray(
    models: Models, student: Tokenizer, teacher: Tokenizer, address: str
) -> Iterator[Callable[[CountingPlan], CountedText]]:
    """Yield what counts a plan on a Ray cluster, whose nodes load the tokenizers themselves."""
    from xtok.counting.ray import count_on_ray

    sources = on_ray(models, student, teacher)
    yield partial(count_on_ray, address=address, progress=report.text_progress_bar, **sources)


def on_ray(models: Models, student: Tokenizer, teacher: Tokenizer) -> dict[str, Any]:
    """Return what the nodes of a Ray cluster load the tokenizers from, by parameter."""
    from xtok.counting.ray import TokenizerSource

    return {
        side: TokenizerSource(
            **{**models.loading(side), "vocab_size": tokenizer.vocabulary.vocab_size}
        )
        for side, tokenizer in (("student", student), ("teacher", teacher))
    }
