"""Measure maps on text: without a corpus, counted on one, and with a language left out.

    python scripts/benchmark_quality.py --corpus FOLDER [--reference FILE.npz] [--json FILE]
                                        [--embedding-model MODEL] [--only PAIR]

The folder holds `LANGUAGE.train.jsonl.gz` for counting and `LANGUAGE.valid.jsonl.gz` for
measuring. `closed` is the share of the way from X-Token's recipe to the best map in hindsight; for
`hindsight`, one map is counted on the measured text of all languages together: no single map can
do better on all of them at once. The reference is NeMo-RL's map of the last pair, as arrays
`indices` and `weights`. With an embedding model, its map is measured as well: alone, and with a
tenth of the weight beside the recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xtok import ProjectionMap, Tokenizer, generate, load_tokenizer, mapfile, merge
from xtok.config import (
    BuildConfig,
    EstimateConfig,
    GenerateConfig,
    MergeConfig,
    MultitokenConfig,
    SortCutConfig,
    Target,
)
from xtok.counting import CountedText, count_text, map_of_counts, merge_counts, plan_counting
from xtok.pipeline import build
from xtok.quality import evaluate
from xtok.sides import with_vocabularies
from xtok.stages import multitoken, sort_cut

PAIRS = (
    ("llama3.tiktoken", "qwen.tiktoken"),
    ("llama3.tiktoken", "mistral-v3.model"),
    ("llama3.tiktoken", "tekken.json"),
    ("qwen.tiktoken", "llama3.tiktoken"),
    ("deepseek-v3", "qwen.tiktoken"),
    ("claude-2", "mistral-v3.model"),
)
CUTS = (4, 8)


def main() -> None:
    """Measure every pair, print tables, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizers", type=Path, default=Path("data/tokenizers"))
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--embedding-model", help="as `generate` takes it")
    parser.add_argument("--only", default="", help="the pairs whose names contain this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    languages = sorted(p.name.partition(".")[0] for p in args.corpus.glob("*.valid.jsonl.gz"))
    results: list[dict[str, Any]] = []
    for student_name, teacher_name in PAIRS:
        if args.only not in f"{student_name} → {teacher_name}":
            continue
        student = load_tokenizer(str(args.tokenizers / student_name))
        teacher = load_tokenizer(str(args.tokenizers / teacher_name))
        reference = args.reference if student_name == "claude-2" else None
        found = measure(student, teacher, args.corpus, languages, reference, args.embedding_model)
        for row in found:
            row["pair"] = f"{student_name} → {teacher_name}"
        results += found
        print_pair(f"{student_name} → {teacher_name}", found, languages)
    print_means(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(
    student: Tokenizer,
    teacher: Tokenizer,
    corpus: Path,
    languages: list[str],
    reference: Path | None,
    embedding_model: str | None,
) -> list[dict[str, Any]]:
    """Return a row for each map, cut and language."""
    options = MultitokenConfig(weights="prior", scale_trick=False)
    base = multitoken(student, teacher, options)
    base_both = multitoken(student, teacher, replace(options, target="both"))
    trained = {lang: counts(student, teacher, corpus, f"{lang}.train") for lang in languages}
    both = [counts(student, teacher, corpus, f"{lang}.train", "both") for lang in languages]
    measured = {lang: counts(student, teacher, corpus, f"{lang}.valid") for lang in languages}
    meaning = None
    if embedding_model is not None:
        meaning = generate(student, teacher, embedding_model, GenerateConfig(top_k=max(CUTS)))
    rows: list[dict[str, Any]] = []
    for k in CUTS:
        config = EstimateConfig(top_k=k)

        def counted(
            parts: list[CountedText], alpha: float | None = None, target: Target = "start"
        ) -> ProjectionMap:
            chosen = replace(config, alpha=alpha, target=target)  # noqa: B023
            text = corpus / f"{languages[0]}.valid.jsonl.gz"
            plan = plan_counting(student, teacher, [text], chosen)
            initial = base if target == "start" else base_both
            return map_of_counts(merge_counts(parts), initial, plan, chosen)

        maps = {
            "build": build(student, teacher, BuildConfig(top_k=k)),
            "recipe": build(student, teacher, BuildConfig(top_k=k, scale_trick=False)),
            "no corpus": sort_cut(base, SortCutConfig(top_k=k)),
            "for p-kl": build(student, teacher, BuildConfig.for_loss("p-kl", top_k=k)),
            "counted": counted(list(trained.values())),
            "counted both": counted(both, target="both"),
            "hindsight": counted(list(measured.values()), alpha=1e-3),
        }
        if meaning is not None:
            beside = MergeConfig(weights=(0.9, 0.1), fill=True, top_k=k)
            maps["embeddings"] = sort_cut(meaning, SortCutConfig(top_k=k))
            maps["with embeddings"] = merge([maps["recipe"], meaning], beside)
        if reference is not None and k == 4:
            maps["NeMo-RL"] = nemo(reference, base)
        without = {
            f"without {lang}": counted([c for x, c in trained.items() if x != lang])
            for lang in languages
        }
        everything = {**maps, **without}
        texts = [corpus / f"{lang}.valid.jsonl.gz" for lang in languages]
        found = evaluate(
            list(everything.values()), texts, student, teacher, names=list(everything), num_worst=0
        )
        rows += [
            {
                "map": m.name.partition(" ")[0] if m.name in without else m.name,
                "k": k,
                "language": m.group.partition(".")[0],
                "recipe": m.recipe,
                "floor": m.floor,
                "cross_entropy": m.cross_entropy.value,
                "chunk_cross_entropy": m.chunk_cross_entropy.value,
                "closed": m.closed and m.closed.value,
                "interval": m.closed and [m.closed.low, m.closed.high],
                "coverage_of_floor": m.coverage_of_floor,
            }
            for m in found.measures
            if m.group != "all"
            and (m.name not in without or m.name == f"without {m.group.partition('.')[0]}")
        ]
    return rows


def counts(
    student: Tokenizer, teacher: Tokenizer, corpus: Path, name: str, target: Target = "start"
) -> CountedText:
    """Count one file."""
    config = EstimateConfig(target=target)
    plan = plan_counting(student, teacher, [corpus / f"{name}.jsonl.gz"], config)
    return count_text(plan, student, teacher)


def nemo(path: Path, like: ProjectionMap) -> ProjectionMap:
    """Read NeMo-RL's map of a pair from padded arrays, by way of its own file layout."""
    import torch

    with np.load(path) as arrays, tempfile.TemporaryDirectory() as folder:
        tensors = {
            "indices": torch.from_numpy(arrays["indices"].astype(np.int64)),
            "likelihoods": torch.from_numpy(arrays["weights"].astype(np.float32)),
            "enable_scale_trick": True,
        }
        torch.save(tensors, f"{folder}/map.pt")
        rows, columns = like.shape
        found = mapfile.load(
            f"{folder}/map.pt", student_vocab_size=rows, teacher_vocab_size=columns
        )
    return with_vocabularies(found, student=like.student, teacher=like.teacher)


def print_pair(pair: str, rows: list[dict[str, Any]], languages: list[str]) -> None:
    """Print `closed` by language, and the least coverage relative to the floor's."""
    print(f"\n{pair}: closed (– where recipe and floor are closer than 0.02 nats)")
    print(f"{'map':16} {'k':>2}", *(f"{lang:>7}" for lang in languages), " coverage/floor's")
    for k in CUTS:
        for name in dict.fromkeys(r["map"] for r in rows):
            own = [r for r in rows if r["map"] == name and r["k"] == k]
            if own:
                cells = ["–" if r["closed"] is None else f"{r['closed']:.2f}" for r in own]
                least = min(r["coverage_of_floor"] for r in own)
                print(f"{name:16} {k:2}", *(f"{c:>7}" for c in cells), f" ≥ {least:.4f}")


def print_means(rows: list[dict[str, Any]]) -> None:
    """Print means over all pairs and languages."""
    print(
        "\nall pairs: closed, mean and least; least coverage of the floor's; mean cross-entropy at "
        "starts and over chunks"
    )
    for k in CUTS:
        for name in dict.fromkeys(r["map"] for r in rows):
            own = [r for r in rows if r["map"] == name and r["k"] == k]
            closed = [r["closed"] for r in own if r["closed"] is not None]
            if closed:
                least = min(r["coverage_of_floor"] for r in own)
                mean = math.fsum(closed) / len(closed)
                starts, chunks = (
                    math.fsum(r[key] for r in own) / len(own)
                    for key in ("cross_entropy", "chunk_cross_entropy")
                )
                print(
                    f"{name:16} k={k} {mean:6.3f} {min(closed):6.2f}   {least:.4f}"
                    f"   {starts:.3f} {chunks:.3f}"
                )


if __name__ == "__main__":
    main()
