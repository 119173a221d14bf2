"""Print the quality of typical maps as a Markdown table: the values behind the verdict of a map.

    python scripts/map_values.py TEXT...   # text that no map was counted on, such as data/corpus

Builds twenty maps and six event maps of the tokenizers in data/tokenizers (see
scripts/fetch_tokenizers.py) and measures all maps of a pair in one pass over the text.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import xtok
from xtok.config import BuildConfig
from xtok.inspection.evaluate import Evaluation

TOKENIZERS = Path(__file__).resolve().parents[1] / "data" / "tokenizers"
PAIRS = {
    "Llama 3 → Qwen": ("llama3.tiktoken", "qwen.tiktoken"),
    "Qwen → Llama 3": ("qwen.tiktoken", "llama3.tiktoken"),
    "Claude 2 → Mistral v3": ("claude-2", "mistral-v3.model"),
    "Mistral v3 → Tekken": ("mistral-v3.model", "tekken.json"),
    "DeepSeek v3 → Qwen": ("deepseek-v3", "qwen.tiktoken"),
    "Mistral v3 → v1": ("mistral-v3.model", "mistral-v1.model"),
}
RECIPES: dict[str, dict[str, Any]] = {
    "": {},
    "--top-k 8 --no-scale-trick": {"top_k": 8, "scale_trick": False},
    "--for p-kl": {"for_loss": "p-kl"},
    "--for gold": {"for_loss": "gold"},
    "--max-pieces 2 --top-k 3 --no-exact-match": {
        "max_pieces": 2, "top_k": 3, "exact_match": False,
    },
    "--canonicalization relaxed": {"canonicalization": "relaxed"},
    "--special-tokens fuzzy --no-reverse-pass": {
        "special_tokens": "fuzzy", "reverse_pass": False,
    },
    "--token-form text": {"token_form": "text"},
    "--special-tokens off": {"special_tokens": "off"},
}  # fmt: skip
FURTHER = {
    "Llama 3 → Qwen": ("--for p-kl", "--for gold", "--max-pieces 2 --top-k 3 --no-exact-match",
                       "--canonicalization relaxed"),
    "Claude 2 → Mistral v3": ("--special-tokens fuzzy --no-reverse-pass", "--token-form text"),
    "Mistral v3 → Tekken": ("--for p-kl",),
    "Mistral v3 → v1": ("--special-tokens off",),
}  # fmt: skip

HEADS = (
    "pair", "map", "nats over chunks", "recipe", "floor", "closed", "closed at starts", "coverage",
    "top-1", "empty rows",
)  # fmt: skip


def build(pair: xtok.Pair, options: dict[str, Any]) -> xtok.ProjectionMap:
    """Build the map of one row."""
    if "for_loss" in options:
        return xtok.build(pair, for_loss=options["for_loss"])
    return xtok.build(pair, config=replace(BuildConfig(), **options))


def rows(pair_name: str, texts: list[str]) -> list[str]:
    """Measure the maps and the event map of a pair."""
    pair = xtok.load_pair(*(TOKENIZERS / name for name in PAIRS[pair_name]))
    recipes = ("", "--top-k 8 --no-scale-trick", *FURTHER.get(pair_name, ()))
    maps = [build(pair, RECIPES[recipe]) for recipe in recipes]
    names = [f"build {recipe}".strip() for recipe in recipes]
    measured: Evaluation = xtok.evaluate(pair, maps, texts, names=names)
    event_map = xtok.evaluate(pair, xtok.events(pair), texts).event_measures[-1]
    lines = []
    for name, m in zip(names, maps, strict=True):
        one = [each for each in measured.measures if each.name == name][-1]
        closed, at_starts = (
            "–" if losses.closed is None else f"{losses.closed:.2f}"
            for losses in (one.over_chunks, one.at_starts)
        )
        lines.append(
            f"| {pair_name} | `{name}` | {one.over_chunks.cross_entropy.value:.3f} | "
            f"{one.over_chunks.recipe:.3f} | {one.over_chunks.floor:.3f} | {closed} | "
            f"{at_starts} | {one.coverage:.2%} | {one.top_1:.1%} | "
            f"{(m.entries_per_row == 0).sum():,} |"
        )
    lines.append(
        f"| {pair_name} | `events` | leak {event_map.leak:.2%} | | | | | kept "
        f"{event_map.kept:.1%} | | |"
    )
    return lines


def main() -> None:
    """Print a row for each map."""
    print(f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", sep="\n")
    for name in PAIRS:
        print(*rows(name, sys.argv[1:]), sep="\n", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    main()
