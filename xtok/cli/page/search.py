"""The rows of maps for the search of the page: columns of bytes, deflated, in base64.

Each column is deflated separately, with its bytes sorted by significance; `page.js` unpacks them.
Tokens are cut to their first bytes, weights to three digits.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtok.maps.edges import ranks
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers.display import percent
from xtok.tokenizers.pairs import SIDES, Pair
from xtok.tokenizers.table import TokenTable

if TYPE_CHECKING:
    from xtok.building.counting.pair_text import PairText
    from xtok.inspection.report import PageData

SHOWN_BYTES = 160
"""Largest number of bytes of a token on the page."""

MOST_PIECES = 16
"""Largest number of pieces of a token on the page."""

_LEAST_SIZE, _SIZE_OF_TOKEN, _SIZE_OF_ROW = 500_000, 2, 5
"""Characters of the search data: base size, per token, and per token and map."""

PageColumns = dict[str, tuple[int, str]]
"""Bytes per number and base64, by name."""


def pack(examined: PageData, max_size: int | None = None) -> tuple[PageColumns, list[str]]:
    """Pack maps into at most `max_size` characters.

    Tokens and the heaviest entry of each row always fit. If space is short, the pieces of tokens
    and then the lightest entries, by weight times occurrences in the text, are left out.

    Returns:
        the columns, and descriptions of the omitted data.
    """
    maps, text = examined.maps, examined.text
    tables = examined.pair.tables
    if max_size is None:
        max_size = _LEAST_SIZE + (_SIZE_OF_TOKEN + _SIZE_OF_ROW * len(maps)) * sum(map(len, tables))
    partners = [examined.pair.equal_bytes, examined.pair.reversed.equal_bytes]
    of_maps = [_SearchEntries(m, None if text is None else text.tokens[0]) for m in maps]

    def entries_of(kept: int) -> PageColumns:
        return {
            f"{name}_{number}": column
            for number, one in enumerate(of_maps)
            for name, column in one.columns(kept, partners[0]).items()
        }

    left_out: list[str] = []
    columns = _tokens(tables, partners, text)
    pieces = _pieces(examined.pair, partners)
    entries = entries_of(0)
    least, room = _size(entries), max_size - _size(columns)
    if _size(pieces) + least <= room:
        columns |= pieces
        room -= _size(pieces)
    else:
        left_out.append("the pieces of tokens")
    kept = max(len(one.order) for one in of_maps)
    entries = entries_of(kept)
    while kept and (size := _size(entries)) > room:  # packed size is nearly linear in entries
        share = (room - least) / max(1, size - least)
        kept = max(0, int(0.98 * share * kept)) if share > 0.01 else 0
        entries = entries_of(kept)
    if any(max(kept, one.num_first) < len(one.order) for one in of_maps):
        weight = max(one.weight_without(kept) for one in of_maps)
        by_text = ", counted by the text" if text else ""
        left_out.append(
            f"the lightest entries of rows, {percent(weight, 2)} of the weight{by_text}"
        )
    return columns | entries, left_out


def cut_sizes(table: TokenTable) -> dict[int, int]:
    """Return the full sizes of the tokens that are cut, by id."""
    return {i: int(table.lengths[i]) for i in np.flatnonzero(table.lengths > SHOWN_BYTES).tolist()}


def _size(columns: PageColumns) -> int:
    return sum(len(name) + len(data) + 16 for name, (_, data) in columns.items())


def packed(numbers: NDArray[Any] | bytes) -> tuple[int, str]:
    """Return the bytes per number, and numbers ≥ 0 as base64, lowest bytes first, deflated."""
    array = np.frombuffer(numbers, np.uint8) if isinstance(numbers, bytes) else numbers
    largest = int(array.max(initial=0))
    width = next(n for n in (1, 2, 3, 4) if largest < 256**n)
    planes = array.astype("<u4")[:, None].view(np.uint8)[:, :width].T
    deflater = zlib.compressobj(6, zlib.DEFLATED, -15)  # without zlib's header
    data = deflater.compress(planes.tobytes()) + deflater.flush()
    return width, base64.b64encode(data).decode()


def _tokens(
    tables: Sequence[TokenTable], partners: Sequence[NDArray[np.int64]], text: PairText | None
) -> PageColumns:
    columns = {"partner": packed(_deltas(partners[0]))}
    for number, (side, table) in enumerate(zip(SIDES, tables, strict=True)):
        shown = [
            (token or table.control_names.get(i, "").encode())[:SHOWN_BYTES]
            for i, token in enumerate(table.tokens())
        ]
        if side == "teacher":  # tokens with the student's bytes are already on the page
            shown = [token if s < 0 else b"" for token, s in zip(shown, partners[1], strict=True)]
        columns[f"{side}_sizes"] = packed(np.fromiter(map(len, shown), np.int64, len(shown)))
        columns[f"{side}_bytes"] = packed(b"".join(shown))
        columns[f"{side}_types"] = packed(table.types)
        if text is not None:
            columns[f"{side}_counts"] = packed(text.tokens[number])
    return columns


def _pieces(pair: Pair, partners: Sequence[NDArray[np.int64]]) -> PageColumns:
    """Pack the pieces of tokens without a partner: the number of pieces, then their ids."""
    columns: PageColumns = {}
    for side, one, partner in zip(SIDES, (pair, pair.reversed), partners, strict=True):
        if one.teacher_tokenizer is None:
            continue
        lengths = one.tables[0].lengths
        ids = np.flatnonzero((partner < 0) & (lengths > 0) & (lengths <= SHOWN_BYTES))
        pieces, counts = one.pieces(ids)
        sizes = np.zeros(len(lengths), np.int64)
        sizes[ids] = np.minimum(counts, MOST_PIECES)
        columns[f"{side}_pieces_sizes"] = packed(sizes)
        place = ranks(np.repeat(ids, counts))
        columns[f"{side}_pieces"] = packed(pieces[place < MOST_PIECES])
    return columns


class _SearchEntries:
    def __init__(self, m: ProjectionMap, counts: NDArray[np.int64] | None) -> None:
        self.map = m
        often = np.ones(m.nnz) if counts is None else counts[m.student_ids] + 0.5
        self.worth = m.weights * often
        is_first = np.diff(m.student_ids, prepend=-1) > 0
        self.order = np.lexsort((-self.worth, ~is_first))
        self.num_first = int(is_first.sum())
        self.worth = m.weights if counts is None else m.weights * counts[m.student_ids]

    def _kept(self, kept: int) -> NDArray[np.bool_]:
        use = np.zeros(self.map.nnz, np.bool_)
        use[self.order[: max(kept, self.num_first)]] = True
        return use

    def weight_without(self, kept: int) -> float:
        total = float(self.worth.sum(dtype=np.float64))
        rest = float(self.worth[~self._kept(kept)].sum(dtype=np.float64))
        return rest / total if total else 0.0

    def columns(self, kept: int, partner: NDArray[np.int64]) -> PageColumns:
        m, use = self.map, self._kept(kept)
        s, t, weights = m.student_ids[use], m.teacher_ids[use].astype(np.int64), m.weights[use]
        is_own = partner[s] == t
        sizes = np.bincount(s, minlength=m.shape[0])
        return {
            "kinds": packed(m.row_kind),
            "sizes": packed(sizes),
            "slots": packed(m.is_slot[use].astype(np.uint8)),
            "own": packed(is_own.astype(np.uint8)),
            "ids": packed(t[~is_own]),
            "weights": packed(weight_codes(weights)),
        }


def weight_codes(weights: NDArray[Any]) -> NDArray[np.int64]:
    """Return weights with three digits as integers: 900 * exponent + digits - 100.

    A weight is digits * 10 ** -(exponent + 2); 1.0 is 0.
    """
    weights = np.asarray(weights, np.float64).clip(1e-45, 1.0)  # the smallest float32
    exponent = np.ceil(-np.log10(weights) - 1e-9).astype(np.int64)
    digits = np.round(weights * 10.0 ** (exponent + 2)).astype(np.int64)
    over = digits == 1000
    codes: NDArray[np.int64] = 900 * (exponent - over) + np.where(over, 100, digits) - 100
    return codes


def _deltas(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids ≥ −1 as folded differences to the preceding id ≥ 0; −1 becomes 0.

    A difference d ≥ 0 becomes 2 * d + 1, and d < 0 becomes -2 * d.
    """
    known = np.flatnonzero(ids >= 0)
    steps = np.diff(ids[known], prepend=-1) - 1
    deltas = np.zeros(len(ids), np.int64)
    deltas[known] = np.where(steps >= 0, 2 * steps + 1, -2 * steps)
    return deltas
