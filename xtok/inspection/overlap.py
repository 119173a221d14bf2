"""`overlap`: how much of their vocabularies tokenizers share, by bytes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path

from xtok.errors import XtokError, install_hint
from xtok.io import check_output, write
from xtok.tokenizers import ModelLike, as_tokenizers

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The vocabularies that N tokenizers share, in the order given.

    Attributes:
        model_ids: the tokenizers.
        sizes: how many different byte strings each has; control tokens have none.
        counts: `[N][N]`, byte strings that both have; the sizes on the diagonal.
        shares: `[N][N]`, counts over the size of the row's tokenizer: as a student, so much of it
            is in the column's.
    """

    model_ids: tuple[str, ...]
    sizes: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]


def overlap(models: ModelLike | Sequence[ModelLike]) -> Overlap:
    """Count the byte strings that each two tokenizers share; models are as `doctor` takes them."""
    tokenizers = as_tokenizers(models)
    vocabularies = [set(filter(None, one.table.tokens())) for one in tokenizers]
    sizes = [len(tokens) for tokens in vocabularies]
    counts = [[0] * len(sizes) for _ in sizes]
    for i, tokens in enumerate(vocabularies):
        counts[i][i] = sizes[i]
        for j in range(i):
            counts[i][j] = counts[j][i] = len(tokens & vocabularies[j])
    return Overlap(
        model_ids=tuple(one.vocabulary.model_id for one in tokenizers),
        sizes=tuple(sizes),
        counts=tuple(map(tuple, counts)),
        shares=tuple(
            tuple(n / max(1, size) for n in row) for size, row in zip(sizes, counts, strict=True)
        ),
    )


def overlap_csv(matrix: Overlap) -> str:
    """Return one line per ordered pair: both models, their sizes, the count, the model's share."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "other", "size", "other_size", "shared", "share"])
    for i, model in enumerate(matrix.model_ids):
        for j, other in enumerate(matrix.model_ids):
            sizes = matrix.sizes[i], matrix.sizes[j]
            share = f"{matrix.shares[i][j]:.6f}"
            writer.writerow([model, other, *sizes, matrix.counts[i][j], share])
    return text.getvalue()


def check_plot(path: Path) -> None:
    """Check that a plot can be made and written, before anything costs time.

    Raises:
        XtokError: if the name has another ending, it cannot be written, or matplotlib is missing.
    """
    check_output(path, PLOT_SUFFIXES, "plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise XtokError("a plot needs matplotlib", hint=install_hint("matplotlib")) from error


def plot_overlap(matrix: Overlap, path: Path) -> None:
    """Draw the matrix: shares of the row's tokens as colours, shares and counts as numbers.

    Raises:
        OutputError: if it cannot be written.
    """
    from matplotlib.figure import Figure

    n = len(matrix.model_ids)
    side = max(4.0, 1.0 + 1.1 * n)
    figure = Figure(figsize=(side + 1.5, side), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(matrix.shares, vmin=0, vmax=1, cmap="viridis")
    names = [name.replace("$", r"\$") for name in matrix.model_ids]  # no formulas
    axes.set_xticks(range(n), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(n), names)
    for i in range(n):
        for j in range(n):
            share, count = matrix.shares[i][j], matrix.counts[i][j]
            text = f"{count:,}" if i == j else f"{share:.0%}\n{count:,}"
            color = "black" if share > 0.6 else "white"
            axes.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
    axes.set_title("Share of the row's tokens that the column's tokenizer has")
    axes.set_ylabel("student")
    axes.set_xlabel("teacher")
    figure.colorbar(image, ax=axes, shrink=0.8)
    image_file = BytesIO()
    figure.savefig(image_file, dpi=150, format=path.suffix[1:])
    write(check_output(path, PLOT_SUFFIXES, "plot"), [image_file.getbuffer()])
