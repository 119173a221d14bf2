"""Generate synthetic text from two vocabularies, and count pairs of tokens on this text.

Byte-pair encoding orders tokens by frequency (Sennrich et al., ACL 2016). In synthetic text, the
kinds of tokens (word, continuation, number, white space, …) form a Markov chain, and the tokens of
each kind follow Zipf's law. To continue a word, the generator usually finds a token that contains
the word's last letters, and appends the rest of this token.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import compress, count, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from xtok._lib.progress import Progress, silent
from xtok.alignment.aligner import TokenAligner
from xtok.building.counting.aligned import align_texts
from xtok.building.counting.counts import Counts, MapRows, Tally, count_unit, pair_edges
from xtok.building.counting.encode import TextEncoder
from xtok.building.spellings import partners_or_pieces
from xtok.config import Target
from xtok.conversation.texts import TextBatch
from xtok.maps.edges import Edges, ranks, sum_duplicates
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import TokenTable, TokenType


class TextKind(IntEnum):
    """Kind of a token in synthetic text."""

    WORD = 0  # a space, then letters
    CONTINUATION = 1  # letters only
    UNSPACED = 2  # a script without spaces between words
    NUMBER = 3
    SPACE = 4
    SYMBOL = 5


# Transition probabilities between kinds, in languages with spaces (English, French, German, Python)
# and without spaces (Chinese, Japanese). `scripts/benchmark.py synthetic` prints the same values
# within 0.03.
_SPACED = [
    [0.561, 0.192, 0.000, 0.006, 0.073, 0.168],
    [0.263, 0.375, 0.000, 0.023, 0.070, 0.270],
    [0.561, 0.192, 0.000, 0.006, 0.073, 0.168],
    [0.053, 0.103, 0.000, 0.305, 0.177, 0.362],
    [0.196, 0.433, 0.000, 0.136, 0.104, 0.130],
    [0.209, 0.377, 0.000, 0.077, 0.157, 0.180],
]
_UNSPACED = [
    [0.484, 0.159, 0.030, 0.016, 0.113, 0.198],
    [0.123, 0.261, 0.039, 0.026, 0.183, 0.367],
    [0.021, 0.005, 0.825, 0.002, 0.038, 0.108],
    [0.044, 0.113, 0.042, 0.275, 0.207, 0.318],
    [0.045, 0.230, 0.415, 0.119, 0.058, 0.133],
    [0.078, 0.308, 0.194, 0.087, 0.147, 0.186],
]

# The following values were chosen by hand: `_SHARE_UNSPACED`, `_SINGLE_SHARE`, `_LOOK_UP`,
# `_SERVES`, and the numbers in `_draw_scripts`, `_draw_tokens`, `_number_weights`, `_space_weights`
# and `_STANDARDS`. `scripts/benchmark.py chunks` measures the resulting maps. No script measures
# the effect of a single value.
_SHARE_UNSPACED = 0.33  # share of texts in scripts without spaces

# Shift and exponent: a token's weight within its kind is 1 / (rank + shift) ** exponent. The
# weights are slightly more uniform than the weights that `scripts/benchmark.py synthetic` fits to
# text, so that rare tokens are counted often enough.
_ZIPF = {
    TextKind.WORD: (1.0, 0.9),
    TextKind.CONTINUATION: (5.0, 0.8),
    TextKind.UNSPACED: (10.0, 0.7),
    TextKind.SYMBOL: (10.0, 0.95),
}
# Share of single ASCII characters in the weight of their kind
_SINGLE_SHARE = {TextKind.CONTINUATION: 0.16, TextKind.SYMBOL: 0.3}

_CONTEXT = 6  # a look-up compares the last 2 to 6 bytes
_LOOK_UP, _SERVES = 0.7, 0.75  # probability of a look-up, and of using a matching context
_TOKENS_PER_TEXT = 24
_LONGEST_TOKEN = 1024  # longer tokens would fill the texts; Claude 2 has a token of 1,024 bytes
PREFIXES_PER_ROW = 32
_GOLDEN = 0.6180339887498949
_TEXTS_AT_ONCE = 12_500
_PER_DOCUMENT = 25  # number of texts per document; encoding few documents is faster

NUM_TEXTS = 50_000
# If the sides share less than half of all tokens, more chunks have several tokens, so counts vary
# more (`scripts/benchmark.py chunks`).
MANY_TEXTS = 150_000

# Pseudo-count of a token's first piece, or of all its pieces together
FIRST_PIECE = 1 / 3

# Sum of the pseudo-counts of the pairs from `prefixes` in each row
FALLBACK = 0.02

Integers: TypeAlias = NDArray[np.int64]
Pool: TypeAlias = tuple[Integers, NDArray[np.float64]]  # tokens and their cumulative weights


def synthetic_edges(
    pair: Pair,
    target: Target = "start",
    *,
    num_texts: int | None = None,
    progress: Progress = silent,
) -> tuple[Edges, list[int]]:
    """Count pairs of tokens on synthetic text.

    The pairs from `prefixes` get pseudo-counts. For the targets `start` and `both`, the first piece
    of each student token also gets a pseudo-count. For `chunk` and `both`, all pieces get
    pseudo-counts, in both directions. By default, `num_texts` is twice the number of ids, but at
    most `NUM_TEXTS` or `MANY_TEXTS`. The edges can contain a pair several times. The second result
    contains the student ids without a spelling.
    """
    student, teacher = pair.tokenizers
    counts = _count(pair, target, num_texts, progress)

    def occurrences(predicted: MapRows | None = None) -> Edges:
        keys, amounts = counts.pairs(predicted)
        return pair_edges(keys, amounts / count_unit(target))

    pieces = _pieces(pair)
    unspelled: list[int] = np.setdiff1d(student.table.text_ids, pieces.student_ids).tolist()
    parts: list[Edges] = []
    if target in ("start", "both"):
        first = pieces.take(ranks(pieces.student_ids) == 0)
        parts.append(first._replace(weights=np.full(len(first.weights), FIRST_PIECE)))
    if target in ("chunk", "both"):
        t, s, weights = _pieces(pair.reversed)
        parts += [pieces, Edges(s, t, weights)]
    parts.append(prefixes(student.table.canonical_ids(), teacher.table.canonical_ids()))
    predicted = None
    if target != "start":
        equal_shares = sum_duplicates(Edges.concatenate([occurrences(), *parts]))
        predicted = MapRows.of(equal_shares.normalized(), len(student.table))
    return Edges.concatenate([occurrences(predicted), *parts]), unspelled


def _count(pair: Pair, target: Target, num_texts: int | None, progress: Progress) -> Counts:
    tables = [tokenizer.table for tokenizer in pair.tokenizers]
    if num_texts is None:
        student, teacher = (table.canonical_ids().keys() for table in tables)
        most = NUM_TEXTS if len(student & teacher) > len(student ^ teacher) else MANY_TEXTS
        num_texts = min(most, 2 * sum(map(len, tables)))
    source = SyntheticSource(tables)
    tally, aligner = Tally(target), TokenAligner(pair)

    def batches(num_texts: int) -> Iterator[TextBatch]:
        for start in range(0, num_texts, _TEXTS_AT_ONCE):
            end = min(start + _TEXTS_AT_ONCE, num_texts)
            texts = source.texts(end - start)
            parts = [texts[i : i + _PER_DOCUMENT] for i in range(0, len(texts), _PER_DOCUMENT)]
            yield TextBatch(list(map("".join, parts)), "", end)

    with (
        TextEncoder(*pair.tokenizers) as encoder,
        progress("counting synthetic texts", num_texts) as advance,
    ):
        encoded = encoder.read(batches(num_texts), num_texts, lambda size, _: advance(size))
        for _, sides in encoded:
            tally.add(align_texts(aligner, *sides))
    return tally.counts()


def _pieces(pair: Pair) -> Edges:
    """Return edges with equal weights from each student token to its pieces."""
    pieces, counts = partners_or_pieces(pair, pair.equal_bytes, pair.tables[0].text_ids)
    student_ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return Edges(student_ids, pieces, FIRST_PIECE / counts[student_ids])


def prefixes(student: Mapping[bytes, int], teacher: Mapping[bytes, int]) -> Edges:
    """Return edges between tokens if one is a prefix of the other; weights follow Zipf's law.

    Each row keeps `PREFIXES_PER_ROW` edges; edges to the shortest prefixes of its token come first.
    """
    tokens = sorted(student.keys() | teacher.keys())
    # [tokens], row and column of each token, or −1
    row, column = (
        np.array([id_of.get(t, -1) for t in tokens], np.int64) for id_of in (student, teacher)
    )
    order = np.zeros(max(teacher.values(), default=0) + 1, np.int64)  # rank of each column
    order[list(teacher.values())] = np.arange(len(teacher))
    longer = np.arange(len(tokens))
    shorter, before = longer, _longest_beginnings(tokens)
    pairs = []
    for depth in count():  # pairs of tokens with themselves, then with shorter and shorter prefixes
        forward = (row[longer] >= 0) & (column[shorter] >= 0)
        rank = np.full(int(forward.sum()), -1 - depth)
        pairs.append((row[longer[forward]], column[shorter[forward]], rank))
        if depth:
            reverse = (row[shorter] >= 0) & (column[longer] >= 0)
            t = longer[reverse]
            pairs.append((row[shorter[reverse]], column[t], order[column[t]]))
        more = before[shorter] >= 0
        longer, shorter = longer[more], before[shorter[more]]
        if not len(longer):
            break
    s_ids, t_ids, rank = map(np.concatenate, zip(*pairs, strict=True))
    first = np.argsort((s_ids << 32) + rank)  # unique keys
    first = first[ranks(s_ids[first]) < PREFIXES_PER_ROW]
    s_ids, t_ids = s_ids[first].astype(np.int32), t_ids[first].astype(np.int32)
    edges = Edges(s_ids, t_ids, 1 / (t_ids + 1000.0)).normalized()
    return edges._replace(weights=FALLBACK * edges.weights)


def _longest_beginnings(tokens: Sequence[bytes]) -> Integers:
    """Return the index of each sorted token's longest proper prefix, or −1."""
    longest: list[int] = []
    open_ids: list[int] = []  # indices of the current token's prefixes
    for index, token in enumerate(tokens):
        while open_ids and not token.startswith(tokens[open_ids[-1]]):
            open_ids.pop()
        longest.append(open_ids[-1] if open_ids else -1)
        open_ids.append(index)
    return np.array(longest, np.int64)


class _EvenNumbers:
    """Quasi-random numbers in [0, 1). Random numbers would require more texts.

    Each kind of decision uses the multiples of the golden ratio, modulo 1. The numbers are assigned
    in the order of the *causes*, the integers on which the decision depends (array-RQMC: L'Ecuyer,
    Lécot and Tuffin, Operations Research 56(4), 2008).
    """

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._next: dict[object, float] = {}

    def in_any_order(self, decision: object, num_draws: int) -> NDArray[np.float64]:
        """Return numbers for a decision, assigned in random order."""
        return self(decision, self._rng.permutation(num_draws))

    def __call__(self, decision: object, causes: Integers) -> NDArray[np.float64]:
        """Return one number in [0, 1) for each element of `causes`."""
        first = self._next.get(decision)
        if first is None:
            first = self._rng.random()
        sequence = first + _GOLDEN * np.arange(len(causes) + 1)
        sequence -= np.floor(sequence)
        self._next[decision] = float(sequence[-1])
        draws = np.empty(len(causes))
        bits = len(causes).bit_length()  # sorting causes and indices as one integer is faster
        order = np.sort(causes << bits | np.arange(len(causes))) & (1 << bits) - 1
        draws[order] = sequence[:-1]
        return draws


class SyntheticSource:
    """Source of synthetic text: weighted tokens of each kind, and continuations of words."""

    def __init__(self, tables: Sequence[TokenTable]) -> None:
        self.draw = _EvenNumbers()
        parts = [part for table in tables for part in _tokens_by_kind(table)]
        for kind, fixed in (
            (TextKind.NUMBER, _number_weights()),
            (TextKind.SPACE, _space_weights()),
            (TextKind.UNSPACED, _characters()),
        ):
            parts.append((kind, [t.encode() for t in fixed], np.array(list(fixed.values()))))
        tokens = [token for _, members, _ in parts for token in members]
        self.weights = np.concatenate([weights for _, _, weights in parts])
        pools = [
            _script(token) if kind == TextKind.UNSPACED else kind
            for kind, members, _ in parts
            for token in members
        ]
        pool_of = np.array(pools)
        self.pools: dict[int, Pool] = {}
        for pool in np.unique(pool_of).tolist():
            ids = np.flatnonzero(pool_of == pool)
            self.pools[pool] = ids, np.cumsum(self.weights[ids])
        padded = np.frombuffer(bytes(8) + b"".join(tokens), np.uint8)
        self.data = padded[8:]
        # The eight bytes before each position; the last byte is the most significant
        self.last_bytes = np.ndarray(len(self.data) + 1, "<u8", padded, strides=(1,))
        self.ends = np.cumsum([len(token) for token in tokens], dtype=np.int32)
        self.starts = np.append(np.int32(0), self.ends[:-1])
        self._index(pool_of)

    def _index(self, pool_of: Integers) -> None:
        """Sort the positions of letters in tokens by the preceding bytes, last byte first."""
        ids = np.arange(len(self.ends), dtype=np.int32)
        token_at = np.repeat(ids, self.ends - self.starts)
        lower = self.data | 32
        begins_letter = (self.data >= 0xC0) | ((lower >= ord("a")) & (lower <= ord("z")))
        spelled = np.isin(pool_of, [TextKind.WORD, TextKind.CONTINUATION, TextKind.SYMBOL])
        offsets = np.flatnonzero(begins_letter & spelled[token_at]).astype(np.int32)
        token_at = token_at[offsets]
        behind = offsets - self.starts[token_at]
        keys = np.zeros(len(offsets), np.int64)
        for back in range(1, _CONTEXT + 1):
            keys = keys << 8 | np.where(behind >= back, self.data[offsets - back], 0)
        order = np.argsort(keys, kind="stable")
        order = order[behind[order] >= 2]
        self.keys = np.append(keys[order], np.iinfo(np.int64).max)  # greater than all contexts
        self.offsets, token_at = offsets[order], token_at[order]
        self.token_ends = self.ends[token_at]
        self.cumulated = np.append(0.0, np.cumsum(self.weights[token_at]))

    def texts(self, num_texts: int) -> list[str]:
        """Draw `num_texts` texts."""
        starts, stops = self._spans(num_texts)
        lengths = stops - starts
        ends = np.cumsum(lengths.sum(axis=1))
        # [tokens], offset from a token's position in the text to its position in the data
        shifts = (starts.ravel() - np.append(0, np.cumsum(lengths)[:-1])).astype(np.int32)
        offsets = np.arange(ends[-1], dtype=np.int32) + np.repeat(shifts, lengths.ravel())
        drawn = self.data[offsets].tobytes()
        return [
            drawn[start:stop].decode("utf-8", "ignore")
            for start, stop in pairwise([0, *ends.tolist()])
        ]

    def _spans(self, num_texts: int) -> tuple[Integers, Integers]:
        """Draw texts of 24 tokens; return the tokens' starts and ends in `data`, `[texts, 24]`."""
        unspaced = self.draw.in_any_order("unspaced", num_texts) < _SHARE_UNSPACED
        script = self._draw_scripts(num_texts)
        # Cumulative transition probabilities after each kind, in texts with and without spaces
        chain = np.cumsum([_SPACED, _UNSPACED], 2)[:, :, :-1].reshape(2 * len(TextKind), -1).T
        kind = np.where(unspaced, TextKind.UNSPACED, TextKind.WORD)
        indented = np.zeros(num_texts, np.bool_)
        # The last bytes of each text in reverse order, and their number
        tail, tail_length = np.zeros((2, num_texts), np.int64)
        starts, stops = np.zeros((2, num_texts, _TOKENS_PER_TEXT), np.int64)
        start = np.zeros(num_texts, np.int64)
        for step in range(_TOKENS_PER_TEXT):
            before, last = kind, start
            if step:
                draws = self.draw("kind", 2 * last + unspaced)
                kind = (draws > chain[:, before + len(TextKind) * unspaced]).sum(0)
                kind[indented & (kind == TextKind.SPACE)] = TextKind.WORD
            start, stop = self._draw_tokens(kind, script, last)
            if step:
                rows = np.flatnonzero(
                    (kind == TextKind.CONTINUATION) & (before <= TextKind.CONTINUATION)
                )
                rows = rows[self.draw("look up", last[rows]) < _LOOK_UP]
                self._continue_words(rows, tail, tail_length, start, stop)
            starts[:, step], stops[:, step] = start, stop
            length = np.minimum(stop - start, _CONTEXT)
            bits = 8 * (_CONTEXT - length)  # number of bits of the tail to keep
            before_stop = (self.last_bytes[stop] >> 64 - 8 * _CONTEXT).astype(np.int64)
            tail = before_stop >> bits << bits | tail >> 8 * length
            tail_length = np.minimum(tail_length + length, _CONTEXT)
            indented = (kind == TextKind.SPACE) & (tail >> 8 * (_CONTEXT - 1) == ord(" "))
        return starts, stops

    def _draw_scripts(self, num_texts: int) -> Integers:
        language = self.draw.in_any_order("language", num_texts)
        others = [pool for pool in self.pools if pool > _HAN]
        mass = np.cumsum([self.pools[s][1][-1] for s in others])
        draws = self.draw.in_any_order("script", num_texts)
        index = np.searchsorted(mass, draws * mass[-1], side="right").clip(0, len(others) - 1)
        script = np.where(language < 0.45, _HAN, _JAPANESE)
        return np.where(language > 0.8, np.array(others)[index], script)

    def _draw_tokens(
        self, kind: Integers, script: Integers, last: Integers
    ) -> tuple[Integers, Integers]:
        """Draw a token of the given kind for each text; return the token's start and end in `data`.

        `last` is the start of each text's previous token in `data`.
        """
        start, stop = np.zeros((2, len(kind)), np.int64)
        kana = self.draw("kana", last) < 0.6
        script = np.where(script == _JAPANESE, np.where(kana, _KANA, _HAN), script)
        pools = np.where(kind == TextKind.UNSPACED, script, kind)
        for pool in sorted(self.pools.keys() & pools.tolist()):
            ids, cumulated = self.pools[pool]
            rows = np.flatnonzero(pools == pool)
            goal = self.draw(pool, last[rows]) * cumulated[-1]
            order = np.argsort(goal)  # sorted look-ups use the processor's cache better
            rows, goal = rows[order], goal[order]
            tokens = ids[np.searchsorted(cumulated, goal, "right").clip(0, len(ids) - 1)]
            start[rows], stop[rows] = self.starts[tokens], self.ends[tokens]
        return start, stop

    def _continue_words(
        self, rows: Integers, tail: Integers, tail_length: Integers, start: Integers, stop: Integers
    ) -> None:
        """Replace drawn tokens in place by text that follows the same letters in other tokens."""
        rows = rows[np.argsort(tail[rows], kind="stable")]  # sorted, for the processor's cache
        for length in range(_CONTEXT, 1, -1):
            bits = 8 * (_CONTEXT - length)
            context = tail[rows] >> bits
            low = np.searchsorted(self.keys, context << bits)
            serves = self.keys[low] >> bits == context
            serves &= tail_length[rows] >= length
            serves &= self.draw(("serves", length), context) < _SERVES
            low, chosen = low[serves], rows[serves]
            high = np.searchsorted(self.keys, context[serves] + 1 << bits)
            below, above = self.cumulated[low], self.cumulated[high]
            goal = below + self.draw(("continuation", length), low) * (above - below)
            drawn = (np.searchsorted(self.cumulated, goal, side="right") - 1).clip(low, high - 1)
            start[chosen], stop[chosen] = self.offsets[drawn], self.token_ends[drawn]
            rows = rows[~serves]


# Scripts of unspaced tokens, numbered after the kinds. Unlike the classes of `tokenizers.classes`,
# scripts are defined by fixed code points, because maps must not change with a new version of
# Unicode.
_JAPANESE, _KANA, _HAN, _OTHERS = range(len(TextKind), len(TextKind) + 4)
_UNSPACED_BLOCKS = re.compile("[\u0e00-\u10ff\u2e80-\ud7a3\uf900-\ufaff\U00020000-\U00031fff]+")


def text_kind(token: bytes) -> TextKind | None:
    """Return the kind of a token, or None if the token is not valid text."""
    text = token.decode("utf-8", "ignore")
    if not text or text.encode() != token:
        return None
    body = text.removeprefix(" ")
    if text.isspace():
        return TextKind.SPACE
    if body.isdigit():
        return TextKind.NUMBER
    if not text.isascii() and any(c.isalpha() for c in "".join(_UNSPACED_BLOCKS.findall(text))):
        return TextKind.UNSPACED
    if body.isalpha() or all(c.isalpha() or unicodedata.combining(c) for c in body):
        return TextKind.WORD if text[0] == " " else TextKind.CONTINUATION
    return TextKind.SYMBOL


def _tokens_by_kind(table: TokenTable) -> list[tuple[TextKind, list[bytes], NDArray[np.float64]]]:
    by_kind: dict[TextKind | None, list[bytes]] = {kind: [] for kind in _ZIPF}
    # USER_DEFINED tokens are markup, so their rank is unrelated to their frequency.
    normal = np.isin(table.types, [TokenType.NORMAL, TokenType.BYTE]).tolist()
    for token in compress(table.tokens(), normal):
        is_drawn = len(token) <= _LONGEST_TOKEN and b"\r" not in token
        if is_drawn and (kind := text_kind(token)) in by_kind:
            by_kind[kind].append(token)
    return [(kind, by_kind[kind], _zipf(kind, by_kind[kind])) for kind in _ZIPF]


def _script(token: bytes) -> int:
    for char in token.decode():
        code = ord(char)
        if 0x3040 <= code < 0x3100:
            return _KANA
        if 0x3400 <= code < 0xA000 or code >= 0x20000:
            return _HAN
        if code >= 0xE00 and char.isalpha():
            return _OTHERS + (0xAC if 0xAC00 <= code < 0xD7A4 else code >> 8)
    return _OTHERS


def _zipf(kind: TextKind, tokens: Sequence[bytes]) -> NDArray[np.float64]:
    """Weight tokens by rank, and single ASCII characters by their frequency in other tokens."""
    shift, exponent = _ZIPF[kind]
    lengths = np.array([len(token) for token in tokens], np.int64)
    single = lengths == 1
    weights = np.asarray((np.cumsum(~single) + shift) ** -exponent, np.float64)
    if kind not in _SINGLE_SHARE or not single.any() or single.all():
        weights /= max(weights.sum(), 1.0)
        return weights
    weights[single] = 0
    weights /= weights.sum()
    data = np.frombuffer(b"".join(tokens), np.uint8)
    within = np.bincount(data, np.repeat(weights, lengths), 256)
    share = np.zeros(len(tokens))
    share[single] = within[data[np.cumsum(lengths)[single] - 1]] + 1e-6
    share *= _SINGLE_SHARE[kind] / share.sum()
    weights *= 1 - _SINGLE_SHARE[kind]
    weights += share
    return weights


def _number_weights() -> dict[str, float]:
    weights = {str(n): 1 / n for n in range(1, 10)} | {str(n): 0.6 / n for n in range(10, 100)}
    weights |= {str(n): 0.3 / n for n in range(100, 1000)}
    weights |= {str(n): 0.2 / 700 for n in range(1000, 10000, 13)}
    weights |= {f"0{n}": 0.03 for n in range(1, 10)}
    extra = {str(n): 0.7 / 40 if n >= 1990 else 0.1 / 90 for n in range(1900, 2030)}
    extra |= {"0": 0.6, "00": 0.08, "000": 0.06, "10": 0.1, "20": 0.05, "100": 0.05, "1000": 0.03}
    extra |= {"200": 0.03, "999": 0.01, "255": 0.03, "16": 0.04, "32": 0.04, "64": 0.04}
    extra |= {"128": 0.02, "256": 0.03, "512": 0.02, "1024": 0.02, "4096": 0.01}
    for number, weight in extra.items():
        weights[number] = weights.get(number, 0.0) + weight
    return weights


def _space_weights() -> dict[str, float]:
    weights = {"\n": 0.4, "\n\n": 0.12, "\n\n\n": 0.01, "\t": 0.05, "\t\t": 0.02, "\n\t": 0.01}
    weights |= {" ": 0.1, "\r\n": 0.005}
    runs = {" " * n: 0.03 * (4 if n % 4 in (0, 3) else 1) / n for n in range(2, 25)}
    return weights | runs


# Rows of the common characters in the 94 × 94 tables of national standards: the first levels of GB
# 2312 and JIS X 0208, and the Korean syllables of KS X 1001. Kana are added below.
_STANDARDS = (("gb2312", 16, 56, 0.1), ("euc_jp", 16, 48, 0.1), ("euc_kr", 16, 41, 0.1))
_KANA_SHARE = 0.1


def _characters() -> dict[str, float]:
    weights: dict[str, float] = defaultdict(float)
    for codec, first, end, share in _STANDARDS:
        cells = [(row, cell) for row in range(first, end) for cell in range(1, 95)]
        decoded = [bytes([0xA0 + r, 0xA0 + c]).decode(codec, "ignore") for r, c in cells]
        characters = [c for c in decoded if len(c) == 1]
        for c in characters:
            weights[c] += share / len(characters)
    kana = [chr(code) for code in (*range(0x3041, 0x3094), *range(0x30A1, 0x30F5), 0x30FC)]
    return weights | dict.fromkeys(kana, _KANA_SHARE / len(kana))
