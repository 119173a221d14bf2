"""What the nodes of a cluster load tokenizers from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtok.cli.options import Models
    from xtok.counting.ray import TokenizerSource
    from xtok.vocab.pair import Pair


def sources_of(models: Models, pair: Pair) -> list[TokenizerSource]:
    """Return what the nodes of a cluster load the tokenizers of a pair from."""
    from xtok.counting.ray import TokenizerSource

    return [
        TokenizerSource(model=model, vocab_size=width, trust_remote_code=models.trust_remote_code)
        for model, width in zip(models.both(), pair.shape, strict=True)
    ]
