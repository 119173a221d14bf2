"""Pack the rows of maps for the page's search: columns of bytes, deflated, in base64.

Each column is deflated separately: first the lowest bytes of all numbers, then the next bytes. Long
tokens are cut after the first bytes, and weights are rounded to three digits.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok.building.counting.pair_text import PairText
from xtok.inspection.report import PageData
from xtok.maps.edges import ranks
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES, TokenTable

SHOWN_BYTES = 160
"""Maximum number of bytes of a token on the page."""

MOST_PIECES = 16
"""Maximum number of pieces of a token on the page."""

MOST_ENTRIES = 8
"""Maximum number of entries of a row on the page."""

PageColumns: TypeAlias = dict[str, tuple[int, str]]
"""For each column name: the number of bytes per value, and the base64 text."""


def pack_columns(examined: PageData) -> PageColumns:
    """Pack the tokens, their pieces, and the heaviest entries of each row of the maps."""
    partners = [examined.pair.equal_bytes, examined.pair.reversed.equal_bytes]
    columns = _tokens(examined.pair.tables, partners, examined.text)
    columns |= _pieces(examined.pair, partners)
    for index, m in enumerate(examined.maps):
        entries = _entries(m, partners[0])
        columns |= {f"{name}_{index}": packed(column) for name, column in entries.items()}
    return columns


def cut_sizes(table: TokenTable) -> dict[int, int]:
    """Return the full size in bytes of each token that is cut, by id."""
    return {i: int(table.lengths[i]) for i in np.flatnonzero(table.lengths > SHOWN_BYTES).tolist()}


def packed(numbers: NDArray[Any] | bytes) -> tuple[int, str]:
    """Deflate numbers ≥ 0, lowest bytes first; return the bytes per number, and base64."""
    array = np.frombuffer(numbers, np.uint8) if isinstance(numbers, bytes) else numbers
    largest = int(array.max(initial=0))
    width = next(n for n in (1, 2, 3, 4) if largest < 256**n)
    planes = array.astype("<u4")[:, None].view(np.uint8)[:, :width].T
    data = zlib.compress(planes.tobytes(), 6, wbits=-15)  # omits zlib's header
    return width, base64.b64encode(data).decode()


def _tokens(
    tables: Sequence[TokenTable], partners: Sequence[NDArray[np.int64]], text: PairText | None
) -> PageColumns:
    columns = {"partner": packed(_deltas(partners[0]))}
    for number, (side, table) in enumerate(zip(SIDES, tables, strict=True)):
        names = [token[:SHOWN_BYTES] for token in table.named_tokens]
        if side == "teacher":  # tokens with the bytes of a student token are already on the page
            names = [token if s < 0 else b"" for token, s in zip(names, partners[1], strict=True)]
        columns[f"{side}_sizes"] = packed(np.fromiter(map(len, names), np.int64, len(names)))
        columns[f"{side}_bytes"] = packed(b"".join(names))
        columns[f"{side}_types"] = packed(table.types)
        if text is not None:
            columns[f"{side}_counts"] = packed(text.tokens[number])
    return columns


def _pieces(pair: Pair, partners: Sequence[NDArray[np.int64]]) -> PageColumns:
    columns: PageColumns = {}
    for side, side_pair, partner in zip(SIDES, (pair, pair.reversed), partners, strict=True):
        if side_pair.teacher_tokenizer is None:
            continue
        lengths = side_pair.tables[0].lengths
        ids = np.flatnonzero((partner < 0) & (lengths > 0) & (lengths <= SHOWN_BYTES))
        pieces, counts = side_pair.pieces(ids)
        sizes = np.zeros(len(lengths), np.int64)
        sizes[ids] = np.minimum(counts, MOST_PIECES)
        columns[f"{side}_pieces_sizes"] = packed(sizes)
        rank = ranks(np.repeat(ids, counts))
        columns[f"{side}_pieces"] = packed(pieces[rank < MOST_PIECES])
    return columns


def _entries(m: ProjectionMap, partner: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    use = ranks(m.student_ids) < MOST_ENTRIES
    s, t = m.student_ids[use], m.teacher_ids[use].astype(np.int64)
    is_own = partner[s] == t
    return {
        "kinds": m.row_kind,
        "sizes": np.bincount(s, minlength=m.shape[0]),
        "slots": m.is_slot[use].astype(np.uint8),
        "own": is_own.astype(np.uint8),
        "ids": t[~is_own],
        "weights": weight_codes(m.weights[use]),
    }


def weight_codes(weights: NDArray[Any]) -> NDArray[np.int64]:
    """Round weights to three digits, and encode each weight as 900 * exponent + digits - 100.

    A weight is digits * 10 ** -(exponent + 2), and 1.0 is encoded as 0.
    """
    weights = np.asarray(weights, np.float64).clip(1e-45, 1.0)  # the smallest float32
    exponent = np.ceil(-np.log10(weights) - 1e-9).astype(np.int64)
    digits = np.round(weights * 10.0 ** (exponent + 2)).astype(np.int64)
    is_1000 = digits == 1000
    codes: NDArray[np.int64] = 900 * (exponent - is_1000) + np.where(is_1000, 100, digits) - 100
    return codes


def _deltas(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Encode each id ≥ 0 by its difference d from the preceding id ≥ 0; encode −1 as 0.

    A difference d ≥ 0 becomes 2 * d + 1, and d < 0 becomes -2 * d.
    """
    present = np.flatnonzero(ids >= 0)
    steps = np.diff(ids[present], prepend=-1) - 1
    deltas = np.zeros(len(ids), np.int64)
    deltas[present] = np.where(steps >= 0, 2 * steps + 1, -2 * steps)
    return deltas
