"""Text that is counted for hours: checkpoints, Ctrl-C, and clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from xtok import report
from xtok.cli.command import deferred_interrupt

if TYPE_CHECKING:
    from xtok.cli.options import Models
    from xtok.counting.pair_text import PairText, Wanted
    from xtok.counting.ray import TokenizerSource
    from xtok.maps.events import EventMap
    from xtok.maps.projection_map import ProjectionMap
    from xtok.vocab.pair import Pair

M = TypeVar("M", bound="ProjectionMap | EventMap")


def checkpoint_of(output: Path) -> Path:
    """Return where the counts of a map are saved: beside it."""
    return output.with_name(f"{output.name}.checkpoint")


def read_here(
    pair: Pair,
    texts: Sequence[str],
    wanted: Wanted,
    *,
    field: str,
    output: Path,
) -> PairText:
    """Read text on this machine; an interruption waits for the next batch, and saves the counts."""
    from xtok.counting.pair_text import PairText

    checkpoint = checkpoint_of(output)

    def resumed(share: float) -> None:
        report.print_notes([f"resuming at {share:.0%} of the text, from {checkpoint}"])

    with deferred_interrupt() as is_interrupted:
        return PairText.read(
            pair, texts, wanted, field=field, checkpoint=checkpoint,
            progress=report.text_progress_bar, resumed=resumed, stopping=is_interrupted,
        )  # fmt: skip


def sources_of(models: Models, pair: Pair) -> list[TokenizerSource]:
    """Return what the nodes of a cluster load the tokenizers of a pair from."""
    from xtok.counting.ray import TokenizerSource

    return [
        TokenizerSource(model=model, vocab_size=width, trust_remote_code=models.trust_remote_code)
        for model, width in zip(models.both(), pair.shape, strict=True)
    ]


def write_counted(make: Callable[[], M], path: Path) -> M:
    """Make a map and write it, then remove the checkpoint of its counts.

    An interruption before that tells where the counts are; one while it is written waits. Without
    a checkpoint, an interruption leaves nothing.
    """
    checkpoint = checkpoint_of(path)
    try:
        result = make()
        with deferred_interrupt() if checkpoint.exists() else nullcontext():
            result.save(path)
            checkpoint.unlink(missing_ok=True)
    except KeyboardInterrupt:
        if not checkpoint.exists():
            raise
        message = f"counts saved in {checkpoint}; run the same command again to go on"
        raise KeyboardInterrupt(message) from None
    return result
