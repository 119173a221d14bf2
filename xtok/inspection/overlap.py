"""`overlap`: how much of their vocabularies tokenizers share, by bytes, and by what texts hold."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xtok.counting.encode import available_cores, batches
from xtok.counting.texts import ShardReader, find_texts, shards
from xtok.errors import XtokError, install_hint
from xtok.io import check_output, write
from xtok.progress import TextProgress, silent_texts
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizers

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class TextOverlap:
    """What tokenizers share of the tokens of a text, each token counted as often as it occurs.

    Attributes:
        num_documents: how many documents were read.
        num_bytes: their bytes in UTF-8.
        num_tokens: how many tokens each tokenizer makes of them.
        shares: `[N][N]`, the share of the row's tokens that the column has. With the row as the
            draft model of speculative decoding, and the column as its target, the target could
            accept no more than so much of what the draft writes.
    """

    num_documents: int
    num_bytes: int
    num_tokens: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The vocabularies that N tokenizers share, in the order given.

    Attributes:
        model_ids: the tokenizers.
        sizes: how many different byte strings each has; control tokens have none.
        counts: `[N][N]`, byte strings that both have; the sizes on the diagonal.
        shares: `[N][N]`, counts over the size of the row's tokenizer: as a student, so much of it
            is in the column's.
        text: the same, weighted by a text, if there is one.
    """

    model_ids: tuple[str, ...]
    sizes: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]
    text: TextOverlap | None = None


def overlap(
    models: ModelLike | Sequence[ModelLike],
    texts: str | Path | Sequence[str | Path] = (),
    *,
    field: str = "text",
    progress: TextProgress = silent_texts,
) -> Overlap:
    """Count the byte strings that each two tokenizers share, and weigh them by text.

    Args:
        models: as `doctor` takes them.
        texts: a path or glob of text, or several, as `estimate` takes them.
        field: the field or column that holds the text.
        progress: called for the text.

    Raises:
        XtokError: if a text cannot be read, or there is nothing in it.
    """
    paths = find_texts(texts) if texts else []
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
        text=_overlap_on(paths, tokenizers, vocabularies, field, progress) if paths else None,
    )


def _overlap_on(
    paths: Sequence[Path],
    tokenizers: Sequence[Tokenizer],
    vocabularies: Sequence[set[bytes]],
    field: str,
    progress: TextProgress,
) -> TextOverlap:
    """Count each tokenizer's tokens on texts, and how many of them the others have."""
    counts: list[NDArray[np.int64]] = [np.zeros(len(one.table), np.int64) for one in tokenizers]
    num_documents = num_bytes = 0
    parts = list(chain.from_iterable(shards(path, field) for path in paths))
    with (
        progress("reading the text", sum(part.size for part in parts)) as advance,
        ThreadPoolExecutor(available_cores()) as pool,
    ):
        for part in parts:
            before = 0
            for documents in batches(reader := ShardReader(part)):
                num_documents += len(documents)
                num_bytes += sum(len(text.encode()) for text in documents)
                found = list(pool.map(_token_counts, tokenizers, [documents] * len(tokenizers)))
                for total, new in zip(counts, found, strict=True):
                    total += new
                advance(min(reader.consumed, part.size) - before, int(found[0].sum()))
                before = min(reader.consumed, part.size)
            advance(part.size - before, 0)
    num_tokens = [int(total.sum()) for total in counts]
    if not all(num_tokens):
        name = tokenizers[num_tokens.index(0)].vocabulary.model_id
        raise XtokError(
            f"{name} makes no tokens of {num_documents:,} documents, {num_bytes:,} bytes of text",
            hint="give text that is not empty, and tokenizers that encode text",
        )
    shares = tuple(
        tuple(_share(one, total, them) for them in vocabularies)
        for one, total in zip(tokenizers, counts, strict=True)
    )
    return TextOverlap(
        num_documents=num_documents,
        num_bytes=num_bytes,
        num_tokens=tuple(num_tokens),
        shares=shares,
    )


def _token_counts(tokenizer: Tokenizer, documents: Sequence[str]) -> NDArray[np.int64]:
    """Return how often each id occurs, int64 `[V]`; control tokens in a text are plain text."""
    ids = np.concatenate([np.zeros(0, np.int32), *tokenizer.library_arrays(documents)])
    return np.bincount(ids, minlength=len(tokenizer.table))


def _share(tokenizer: Tokenizer, counts: NDArray[np.int64], vocabulary: set[bytes]) -> float:
    """Return the share of counted tokens that a vocabulary has."""
    shared = [i for i in np.flatnonzero(counts).tolist() if tokenizer.table[i] in vocabulary]
    return int(counts[shared].sum()) / int(counts.sum())


def overlap_csv(matrix: Overlap) -> str:
    """Return one line per ordered pair: both models, their sizes, the count, the model's share.

    With a text, two more columns: the model's tokens on it, and the share of these.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    weighted = matrix.text
    more = [] if weighted is None else ["text_tokens", "text_share"]
    writer.writerow(["model", "other", "size", "other_size", "shared", "share", *more])
    for i, model in enumerate(matrix.model_ids):
        for j, other in enumerate(matrix.model_ids):
            sizes = matrix.sizes[i], matrix.sizes[j]
            share = f"{matrix.shares[i][j]:.6f}"
            if weighted is not None:
                more = [f"{weighted.num_tokens[i]}", f"{weighted.shares[i][j]:.6f}"]
            writer.writerow([model, other, *sizes, matrix.counts[i][j], share, *more])
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

    With a text, the shares are those of its tokens.

    Raises:
        OutputError: if it cannot be written.
    """
    from matplotlib.figure import Figure

    n = len(matrix.model_ids)
    side = max(4.0, 1.0 + 1.1 * n)
    figure = Figure(figsize=(side + 1.5, side), layout="constrained")
    axes = figure.add_subplot()
    shares = matrix.shares if matrix.text is None else matrix.text.shares
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis")
    names = [name.replace("$", r"\$") for name in matrix.model_ids]  # no formulas
    axes.set_xticks(range(n), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(n), names)
    for i in range(n):
        for j in range(n):
            share, count = shares[i][j], matrix.counts[i][j]
            text = f"{count:,}" if i == j else f"{share:.0%}\n{count:,}"
            color = "black" if share > 0.6 else "white"
            axes.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
    on_text = "" if matrix.text is None else " on the text"
    axes.set_title(f"Share of the row's tokens{on_text} that the column's tokenizer has")
    axes.set_ylabel("student")
    axes.set_xlabel("teacher")
    figure.colorbar(image, ax=axes, shrink=0.8)
    image_file = BytesIO()
    figure.savefig(image_file, dpi=150, format=path.suffix[1:])
    write(check_output(path, PLOT_SUFFIXES, "plot"), [image_file.getbuffer()])
