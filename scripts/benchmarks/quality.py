"""How good maps and event maps are on text that they were not counted on."""

from __future__ import annotations

import sysconfig
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

import xtok
from benchmarks.harness import Row, chosen, tokenizer
from xtok import ProjectionMap
from xtok.maps.records import RowKind

PAIRS = (
    ("llama3", "qwen"), ("llama3", "mistral-v3"), ("llama3", "tekken"), ("qwen", "llama3"),
    ("deepseek-v3", "qwen"), ("claude-2", "mistral-v3"),
)  # fmt: skip
EVENT_PAIRS = (
    ("llama3", "qwen"), ("mistral-v3", "qwen"), ("llama3", "mistral-v3"), ("llama3", "tekken"),
)  # fmt: skip
COUNTED = ("de", "en", "python", "zh")  # the other languages are not counted on
OPTIONS = {
    "(none)": xtok.BuildConfig(),
    "--canonicalization relaxed": xtok.BuildConfig(canonicalization="relaxed"),
    "--special-tokens fuzzy": xtok.BuildConfig(special_tokens="fuzzy"),
    "--token-form text": xtok.BuildConfig(token_form="text"),
    "--token-form raw": xtok.BuildConfig(token_form="raw"),
}


def options_of_build(options: Namespace) -> Iterator[Row]:
    """Count each option's rows; measure its map on source of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = sorted(folder.glob("*.py"))[: max(1, int(100 * options.size))]
    for label, pair in chosen((PAIRS[0], PAIRS[1], PAIRS[5]), options):
        sides = tokenizer(pair[0]), tokenizer(pair[1])
        maps = {option: xtok.build(*sides, config) for option, config in OPTIONS.items()}
        found = xtok.evaluate(xtok.load_pair(*sides), [*maps.values()], texts, names=[*maps])
        measures = {m.name: m for m in found.measures}  # the last group is all text
        for option, made in maps.items():
            kinds = np.bincount(made.row_kind, minlength=max(RowKind) + 1)
            yield {
                "pair": label, "option": option,
                "exact": int(kinds[RowKind.EXACT]), "of other bytes": other_bytes(made),
                "relaxed": int(kinds[RowKind.RELAXED]), "special": int(kinds[RowKind.ROLE]),
                "over chunks": measures[option].over_chunks.cross_entropy.value,
            }  # fmt: skip


def other_bytes(m: ProjectionMap) -> int:
    """Return how many exact rows pair tokens with different bytes."""
    ours, theirs = (side.table.tokens() if side.table else [] for side in (m.student, m.teacher))
    exact = m.row_kind[m.student_ids] == RowKind.EXACT
    pairs = zip(m.student_ids[exact].tolist(), m.teacher_ids[exact].tolist(), strict=True)
    return sum(ours[s] != theirs[t] for s, t in pairs)


def corpus(options: Namespace) -> tuple[list[Path], list[Path]]:
    """Return the files to count, and those to measure."""
    if options.corpus is None:
        raise SystemExit("error: this case needs --corpus")
    counted = [options.corpus / f"{language}.train.jsonl.gz" for language in COUNTED]
    return counted, sorted(options.corpus.glob("*.valid.jsonl.gz"))


class Value(NamedTuple):
    """Cross-entropy of a map on one language, in nats."""

    pair: str
    map: str
    language: str
    over_chunks: float
    at_starts: float
    gain: float  # ratio of the recipe's value over chunks to this value

    def __str__(self) -> str:
        return f"{self.over_chunks:.3f} ({self.at_starts:.3f})"


def chunks(options: Namespace) -> Iterator[Row]:
    """Measure maps for P-KL on each language, over chunks, and in brackets at boundaries.

    The last rows are means over pairs and languages, with the smallest gain; `floor` is the map
    counted on the measured text.
    """
    texts, held_out = corpus(options)
    config = xtok.BuildConfig.for_loss("p-kl")
    configs: dict[str, tuple[xtok.BuildConfig, list[Path]]] = {
        "recipe": (xtok.BuildConfig(top_k=8, scale_trick=False), []),
        "--for p-kl": (config, []),
        "--for p-kl --text": (config, texts),
        "--for p-kl --target chunk --text": (replace(config, target="chunk"), texts),
    }
    values: list[Value] = []
    for label, pair in chosen(PAIRS, options):
        sides = tokenizer(pair[0]), tokenizer(pair[1])
        maps = {name: xtok.build(*sides, one, texts=on) for name, (one, on) in configs.items()}
        if options.embedding_model is not None:
            near = xtok.GenerateConfig(top_k=8)
            maps["embeddings"] = xtok.generate(
                xtok.load_pair(*sides), options.embedding_model, near
            )
        found = xtok.evaluate(xtok.load_pair(*sides), [*maps.values()], held_out, names=[*maps])
        for m in found.measures[: -len(maps)]:  # the last group is all text
            of = label, m.name, m.group.partition(".")[0]
            chunks, starts = m.over_chunks, m.at_starts
            here, floor = chunks.cross_entropy.value, chunks.floor
            values.append(Value(*of, here, starts.cross_entropy.value, chunks.recipe / here))
            if m.name == "recipe":
                gain = chunks.recipe / floor
                values.append(Value(label, "floor", of[2], floor, starts.floor, gain))
        for name in [*maps, "floor"]:
            own = {v.language: str(v) for v in values if (v.pair, v.map) == (label, name)}
            yield {"pair": label, "map": name, **own}
    for name in dict.fromkeys(v.map for v in values):
        row: Row = {"map": name}
        for group in ("counted", "other"):
            these = [
                v
                for v in values
                if v.map == name and (v.language in COUNTED) == (group == "counted")
            ]
            over, at = fmean(v.over_chunks for v in these), fmean(v.at_starts for v in these)
            mean = f"{over:.3f} ({at:.3f})"
            row |= {f"{group} languages": mean, f"least gain, {group}": min(v.gain for v in these)}
        yield row | {"mean gain": fmean(v.gain for v in values if v.map == name)}


def events(options: Namespace) -> Iterator[Row]:
    """Make event maps: their leak over languages, the least kept share."""
    _, held_out = corpus(options)
    for label, pair in chosen(EVENT_PAIRS, options):
        sides = tokenizer(pair[0]), tokenizer(pair[1])
        start = time.perf_counter()
        made = xtok.events(*sides)
        seconds = time.perf_counter() - start
        groups = xtok.evaluate(xtok.load_pair(*sides), made, held_out).event_measures[:-1]
        yield {
            "pair": label,
            "s": seconds,
            "a shared vocabulary": span(m.shared_leak for m in groups),
            "events": span(m.leak for m in groups),
            "kept": min(m.kept for m in groups),
        }


def span(leaks: Iterable[float]) -> str:
    """Return the least and the most, in percent."""
    least, *_, most = sorted(leaks)
    return f"{least:.1%} to {most:.1%}"
