"""Transformers as installed: `AutoTokenizer` beside xtok's readers that do without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import hub_folders

from peer_checks import report
from peer_checks.report import Check, Checks

PEER = "Transformers"
TEXTS = [report.text_of(language) for language in (*report.LANGUAGES, "french", "python", "emoji")]
ODD = ["cafe\u0301 <think>a</think>  b\r\n\tc", "\u00a0 \u2028x", "ﬁ ２０１ Å Ａ", "  ", "a\x00b"]


def installed(work: Path) -> Checks:
    """Yield a line for each model folder."""
    for name in hub_folders.NAMES:
        yield from report.guarded(name, partial(_reader, name, work))


def _reader(name: str, work: Path) -> Checks:
    theirs, ours = report.auto_tokenizer(name, work), report.own_tokenizer(name, work)
    ids = spans = 0
    for text in TEXTS + ODD:
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        encoding = ours.encode(text)
        ids += encoding.ids.tolist() == expected["input_ids"]
        spans += _spans_agree(text, encoding.bounds.tolist(), expected["offset_mapping"])
    total = len(TEXTS + ODD)
    figure = f"ids of {ids} and offsets of {spans} of {total} texts"
    yield Check(f"`AutoTokenizer`, {name}", figure, holds=ids == total)


def _spans_agree(text: str, bounds: list[int], offsets: list[tuple[int, int]]) -> bool:
    """Tell whether each token's bytes lie within the characters that the library names."""
    starts = [0]
    for character in text:
        starts.append(starts[-1] + len(character.encode()))
    return len(bounds) == len(offsets) + 1 and all(
        starts[first] <= bounds[i] and bounds[i + 1] <= starts[last]
        for i, (first, last) in enumerate(offsets)
        if first < last
    )
