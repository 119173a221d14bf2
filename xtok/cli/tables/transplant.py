"""`transplant` as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xtok.cli.tables._tables import new_table, print_all

if TYPE_CHECKING:
    from xtok.training.transplant import Transplant


def print_transplant(done: Transplant) -> None:
    """Print the origin of the new rows, and both models' bits per byte."""
    counts = {
        "copied, tokens of both tokenizers": done.copied,
        "copied, special tokens by role": done.roles,
        "composed of other rows": done.composed,
        "mean row, tokens without pieces": done.empty,
        "mean row, padding": done.padding,
    }
    rows = [(label, f"{count:,}") for label, count in counts.items() if count]
    rows.append(("all rows", f"{done.vocab_size:,} (before: {done.old_vocab_size:,})"))
    if done.bits_before is not None and done.bits_after is not None:
        rows.append(
            ("bits per byte of text", f"{done.bits_after:.3f} (before: {done.bits_before:.3f})")
        )
    print_all([new_table("rows of the new model", "", rows=rows, right=(1,))])
