"""How good maps are on text: options of `build`, and maps with and without a corpus.

`closed` is the share of the way from X-Token's recipe to the best map in hindsight, per language.
*hindsight* is one map counted on the measured text of all languages; no other map is better on all
of them at once. *without* is counted on all languages but the measured one.
"""

from __future__ import annotations

import sysconfig
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

import xtok
from benchmarks.harness import Row, chosen, tokenizer
from xtok import ProjectionMap, Tokenizer
from xtok.config import Target
from xtok.counting.pair_text import PairText, Wanted, merged_texts
from xtok.maps.projection_map import RowKind
from xtok.stages.counted import map_of_counts
from xtok.vocab.pair import Pair

PAIRS = (
    ("llama3", "qwen"), ("llama3", "mistral-v3"), ("llama3", "tekken"), ("qwen", "llama3"),
    ("deepseek-v3", "qwen"), ("claude-2", "mistral-v3"),
)  # fmt: skip
CUTS = (4, 8)
OPTIONS = {
    "(none)": xtok.BuildConfig(),
    "--for p-kl": xtok.BuildConfig.for_loss("p-kl"),
    "--canonicalization relaxed": xtok.BuildConfig(canonicalization="relaxed"),
    "--special-tokens fuzzy": xtok.BuildConfig(special_tokens="fuzzy"),
    "fuzzy, NeMo-RL's 0.3 and 32": xtok.BuildConfig(
        special_tokens="fuzzy", fuzzy_threshold=0.3, fuzzy_top_k=32
    ),
    "--token-form text": xtok.BuildConfig(token_form="text"),
    "--token-form raw": xtok.BuildConfig(token_form="raw"),
}


def options_of_build(options: Namespace) -> Iterator[Row]:
    """Count each option's rows, those that differ from the default's, and their effect on text.

    The text is the source of Python's standard library. Of the shared token boundaries: the share
    in rows that differ, and the mean weight that these rows give the teacher's token, by default
    and with the option.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = source[: int(4_000_000 * min(1, options.size))].decode("utf-8", "ignore").encode()
    for label, pair in chosen((PAIRS[0], PAIRS[1], PAIRS[5]), options):
        student, teacher = (tokenizer(name) for name in pair)
        starts = shared_boundaries(student, teacher, text)
        plain = xtok.build(student, teacher)
        for option, config in OPTIONS.items():
            start = time.perf_counter()
            made = xtok.build(student, teacher, config)
            taken = time.perf_counter() - start
            changed = np.unique((abs(matrix(plain) - matrix(made)) > 1e-5).nonzero()[0])
            here = starts[:, np.isin(starts[0], changed)]
            yield {
                "pair": label,
                "option": option,
                "exact": count(made, RowKind.EXACT),
                "of other bytes": other_bytes(made),
                "relaxed": count(made, RowKind.RELAXED),
                "special": count(made, RowKind.ROLE),
                "s": taken,
                "rows differ": len(changed),
                "of the text": f"{here.shape[1] / starts.shape[1]:.3%}",
                "weight by default": mean_weight(plain, here),
                "with it": mean_weight(made, here),
            }


def count(m: ProjectionMap, kind: RowKind) -> int:
    """Return how many rows are of a kind."""
    return int(np.count_nonzero(m.row_kind == kind))


def other_bytes(m: ProjectionMap) -> int:
    """Return how many exact rows pair tokens with different bytes."""
    if m.student.table is None or m.teacher.table is None:
        raise ValueError("the map has no tokens")
    ours, theirs = m.student.table.tokens(), m.teacher.table.tokens()
    exact = m.row_kind[m.student_ids] == RowKind.EXACT
    pairs = zip(m.student_ids[exact].tolist(), m.teacher_ids[exact].tolist(), strict=True)
    return sum(ours[s] != theirs[t] for s, t in pairs)


def shared_boundaries(student: Tokenizer, teacher: Tokenizer, text: bytes) -> NDArray[np.int64]:
    """Return the student's and the teacher's token wherever both begin at one byte, `[2, n]`."""
    ids = [np.array(side.segment(text)) for side in (student, teacher)]
    lengths = [side.table.lengths[i] for side, i in zip((student, teacher), ids, strict=True)]
    _, ours, theirs = np.intersect1d(*(np.cumsum(n) - n for n in lengths), return_indices=True)
    return np.stack([ids[0][ours], ids[1][theirs]])


def matrix(m: ProjectionMap) -> csr_array:
    """Return a map as a sparse matrix."""
    return csr_array((m.weights, (m.student_ids, m.teacher_ids)), shape=m.shape)


def mean_weight(m: ProjectionMap, pairs: NDArray[np.int64]) -> float:
    """Return the mean weight of pairs of tokens, `[2, n]`."""
    return float(matrix(m)[pairs[0], pairs[1]].mean()) if pairs.size else 0.0


def quality(options: Namespace) -> Iterator[Row]:
    """Measure every pair, map, cut and language, then the means."""
    if options.corpus is None:
        raise SystemExit("error: quality needs --corpus")
    all_rows = []
    for label, pair in chosen(PAIRS, options):
        for row in measure(tokenizer(pair[0]), tokenizer(pair[1]), pair, options):
            all_rows.append({"pair": label, **row})
            yield all_rows[-1]
    for label in [*dict.fromkeys(row["pair"] for row in all_rows), "all"]:
        for name, k in dict.fromkeys((row["map"], row["k"]) for row in all_rows):
            own = [r for r in all_rows if (r["map"], r["k"]) == (name, k)]
            own = [r for r in own if label in ("all", r["pair"])]
            closed = [r["closed"] for r in own if r["closed"] is not None]
            if closed:
                yield {
                    "pairs": label, "map": name, "k": k, "mean closed": fmean(closed),
                    "least": min(closed), "least coverage": min(r["coverage"] for r in own),
                    "mean at starts": fmean(r["at starts"] for r in own),
                    "mean over chunks": fmean(r["over chunks"] for r in own),
                }  # fmt: skip


def measure(
    student: Tokenizer, teacher: Tokenizer, pair: tuple[str, str], options: Namespace
) -> Iterator[Row]:
    """Yield a row for each map, cut and language of a pair."""
    texts = sorted(options.corpus.glob("*.valid.jsonl.gz"))
    languages = [path.name.partition(".")[0] for path in texts]

    def counts(language: str, split: str, target: Target = "start") -> PairText:
        path = options.corpus / f"{language}.{split}.jsonl.gz"
        both = xtok.pair(student, teacher)
        return PairText.read(both, path, Wanted(target=target, hold_out=True))

    config = xtok.MultitokenConfig(weights="prior", scale_trick=False)
    targets: tuple[Target, ...] = ("start", "both")
    base = {t: xtok.multitoken(student, teacher, replace(config, target=t)) for t in targets}
    trained = {language: counts(language, "train") for language in languages}
    both = [counts(language, "train", "both") for language in languages]
    measured = [counts(language, "valid") for language in languages]
    embedded = None
    if options.embedding_model is not None:
        most = xtok.GenerateConfig(top_k=max(CUTS))
        embedded = xtok.generate(student, teacher, options.embedding_model, most)
    for k in CUTS:

        def counted(
            parts: list[PairText], alpha: float | None = None, target: Target = "start"
        ) -> ProjectionMap:
            config = xtok.BuildConfig(top_k=k, alpha=alpha, target=target)  # noqa: B023
            return map_of_counts(merged_texts(parts), base[target], config)

        maps = {
            "build": xtok.build(student, teacher, xtok.BuildConfig(top_k=k)),
            "recipe": xtok.build(student, teacher, xtok.BuildConfig(top_k=k, scale_trick=False)),
            "no corpus": xtok.sort_cut(base["start"], xtok.SortCutConfig(top_k=k)),
            "for p-kl": xtok.build(student, teacher, xtok.BuildConfig.for_loss("p-kl", top_k=k)),
            "counted": counted(list(trained.values())),
            "counted both": counted(both, target="both"),
            "hindsight": counted(measured, alpha=1e-3),
        }
        if embedded is not None:
            maps["embeddings"] = xtok.sort_cut(embedded, xtok.SortCutConfig(top_k=k))
        if options.reference is not None and k == 4 and pair == PAIRS[-1]:
            rows, columns = base["start"].shape
            theirs = ProjectionMap.load(
                options.reference, student_vocab_size=rows, teacher_vocab_size=columns
            )
            maps["NeMo-RL"] = Pair.of(base["start"]).admit(theirs)
        for left_out in languages:
            parts = [part for language, part in trained.items() if language != left_out]
            maps[f"without {left_out}"] = counted(parts)
        names = list(maps)
        for m in xtok.evaluate(
            list(maps.values()), texts, student, teacher, names=names, num_worst=0
        ).measures:
            language = m.group.partition(".")[0]
            name, _, left_out = m.name.partition("without ")
            if language in languages and left_out in ("", language):
                yield {
                    "map": name or "without", "k": k, "language": language,
                    "closed": m.closed and m.closed.value, "coverage": m.coverage.value,
                    "at starts": m.cross_entropy.value, "over chunks": m.chunk_cross_entropy.value,
                }  # fmt: skip


COUNTED = ("de", "en", "python", "zh")  # the other languages are not counted on


def chunks(options: Namespace) -> Iterator[Row]:
    """Measure maps for P-KL over chunks, with and without text, per language.

    `floor` is the map counted on the measured text itself; `gain` is the recipe's cross-entropy
    over the map's. In brackets: at shared token boundaries.
    """
    if options.corpus is None:
        raise SystemExit("error: chunks needs --corpus")
    texts = [options.corpus / f"{language}.train.jsonl.gz" for language in COUNTED]
    held_out = sorted(options.corpus.glob("*.valid.jsonl.gz"))
    for label, pair in chosen(PAIRS, options):
        student, teacher = (tokenizer(name) for name in pair)
        maps = {
            "recipe": xtok.build(student, teacher, xtok.BuildConfig(top_k=8, scale_trick=False))
        }
        taken = {}
        config = xtok.BuildConfig.for_loss("p-kl")
        alone = replace(config, target="chunk")
        for name, given, on in (
            ("for p-kl", config, []),
            ("with text", config, texts),
            ("chunks alone", alone, texts),
        ):
            start = time.perf_counter()
            maps[name] = xtok.build(student, teacher, given, texts=on)
            taken[name] = time.perf_counter() - start
        found = xtok.evaluate(
            list(maps.values()), held_out, student, teacher, names=list(maps), num_worst=0
        )
        values = {(m.name, m.group.partition(".")[0]): m for m in found.measures}
        languages = [path.name.partition(".")[0] for path in held_out]
        for name in maps:
            row: Row = {"pair": label, "map": name, "s": taken.get(name)}
            for language in languages:
                m = values[name, language]
                row[language] = f"{m.chunk_cross_entropy.value:.3f} ({m.cross_entropy.value:.3f})"
            gains = [
                values["recipe", x].chunk_cross_entropy.value
                / values[name, x].chunk_cross_entropy.value
                for x in languages
            ]
            gain_on = dict(zip(languages, gains, strict=True))
            row["least gain, counted"] = min(gain_on[x] for x in COUNTED)
            row["mean, counted"] = fmean(gain_on[x] for x in COUNTED)
            row["least gain, others"] = min(gain_on[x] for x in languages if x not in COUNTED)
            yield row
        floors = {x: f"{values['recipe', x].chunk_floor:.3f}" for x in languages}
        yield {"pair": label, "map": "floor", **floors}
