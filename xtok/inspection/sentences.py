"""Sentences in both tokenizations, for the page of `xtok report`."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from xtok.alignment.aligner import TextAlignment, TokenAligner, describe_alignment
from xtok.tokenizers.classes import script_of
from xtok.tokenizers.pairs import Pair

_WIDTHS = range(32, 141)
"""Widths of a sentence; East Asian characters count twice."""
_MOST = 12


class Sentence(NamedTuple):
    """A sentence with its label, and its language for fonts (`""` if unknown)."""

    label: str
    language: str
    text: str


BUILT_IN = (
    Sentence("English", "en", "In 1872 the lighthouse keeper's daughter rowed out to the wreck."),
    Sentence("German", "de", "Die Größe des Leuchtturms überraschte sogar die Küstenschiffer."),
    Sentence("Chinese", "zh", "灯塔站在岩石上，共有201级台阶，晚上可以看到很远的船。"),
    Sentence("Japanese", "ja", "灯台は海の前に立っていて、夜になると光を送ります。"),
    Sentence("Arabic", "ar", "تضيء المنارة البحر كل ليلة، ويراها البحارة من بعيد."),
    Sentence("Russian", "ru", "Маяк стоит на скале и светит кораблям всю ночь."),
    Sentence("Code", "", "def keep(light):\n    return [x for x in light if x['lux'] >= 0.25]\n"),
    Sentence("Digits and emoji", "", "12345678 + 3.14159 = 2024? 🌊⛵ 👩‍🔧 🇩🇪 201 times 👍🏽"),
)
"""Sentences for pages without text; written for xtok."""


@dataclass(frozen=True, kw_only=True)
class AlignedSentence:
    """A sentence in both tokenizations."""

    label: str  # its language, script and file, or kind
    language: str  # BCP 47, for fonts; empty if unknown
    direction: str  # `ltr` or `rtl`
    alignment: TextAlignment


def aligned_sentences(
    pair: Pair, excerpts: Iterable[tuple[str, str]]
) -> tuple[AlignedSentence, ...]:
    """Align sentences of each script and file of a text, or built-in sentences."""
    aligner = TokenAligner(pair)
    sentences = []
    for label, language, text in pick_sentences(excerpts):
        ids = (side.library_ids([text])[0] for side in pair.tokenizers)
        directions = Counter(map(unicodedata.bidirectional, text))
        is_rtl = directions["R"] + directions["AL"] > directions["L"]
        sentences.append(
            AlignedSentence(
                label=label,
                language=language,
                direction="rtl" if is_rtl else "ltr",
                alignment=describe_alignment(aligner, pair, *ids),
            )
        )
    return tuple(sentences)


def pick_sentences(documents: Iterable[tuple[str, str]]) -> tuple[Sentence, ...]:
    """Pick at most 12 sentences, one per script and file; otherwise return built-in sentences.

    The documents, or their middles, come with the names of their files.
    """
    picked: dict[str, Sentence] = {}
    for document, file in documents:
        for text in _sentences(document):
            if script := _script(text):
                label = f"{script}, {file}"
                picked.setdefault(label, Sentence(label, _LANGUAGES.get(script, ""), text))
    return tuple(picked.values())[:_MOST] or BUILT_IN


_ENDS = (re.compile(r"(?<=[.!?؟])\s+|(?<=[。！？])|\n\s*\n"), re.compile(r"\n"))


def _sentences(text: str) -> Iterator[str]:
    """Yield sentences, then lines, without the first of each, which may be incomplete."""
    for part in chain.from_iterable(end.split(text)[1:] for end in _ENDS):
        sentence = part.strip()
        letters = sum(map(str.isalpha, sentence))
        width = len(sentence) + sum(char >= "\u1100" for char in sentence)
        if width in _WIDTHS and letters > 0.6 * len(sentence):
            yield sentence


_LANGUAGES = {"Han": "zh", "Japanese": "ja", "Hangul": "ko", "Arabic": "ar", "Hebrew": "he"}


def _script(text: str) -> str:
    scripts = Counter(filter(None, map(script_of, filter(str.isalpha, text))))
    if 10 * scripts["KANA"] >= scripts.total() > 0:
        return "Japanese"
    return scripts.most_common(1)[0][0].title() if scripts else ""
