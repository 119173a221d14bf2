"""Sentences in both tokenizations, for the page of `xtok report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from xtok.alignment.aligner import TextAlignment, TokenAligner, describe_alignment
from xtok.tokenizers.pairs import Pair


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
"""Sentences of several scripts; written for xtok."""


@dataclass(frozen=True, kw_only=True)
class AlignedSentence:
    """A sentence in both tokenizations."""

    label: str  # its language or kind
    language: str  # BCP 47, for fonts; empty if unknown
    direction: str  # `ltr` or `rtl`
    alignment: TextAlignment


def aligned_sentences(pair: Pair) -> tuple[AlignedSentence, ...]:
    """Align the built-in sentences."""
    aligner = TokenAligner(pair)
    return tuple(
        AlignedSentence(
            label=label,
            language=language,
            direction="rtl" if language == "ar" else "ltr",
            alignment=describe_alignment(
                aligner, pair, *(side.library_ids([text])[0] for side in pair.tokenizers)
            ),
        )
        for label, language, text in BUILT_IN
    )
