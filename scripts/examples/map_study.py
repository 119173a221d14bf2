"""Does a better map make a better student? Train small students with every map and loss.

    python scripts/examples/map_study.py --corpus FOLDER --work FOLDER [--steps 160] [--seeds 5]

The corpus holds `LANGUAGE.train.jsonl.gz` and `LANGUAGE.valid.jsonl.gz`. Two byte-level BPE
tokenizers of different sizes, which split digits differently, are trained on it, then one teacher;
then students of another tokenizer, all with the same budget, for each map, loss and seed, through
`distill.py`. Everything is kept in the work folder: called again, it goes on where it was stopped.
Results: `results.json`, a table on stdout, and two plots.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from xtok import (
    BuildConfig,
    EstimateConfig,
    ProjectionMap,
    build,
    estimate,
    evaluate,
    load_tokenizer,
)
from xtok.config import SLOT_WEIGHT, Target
from xtok.maps.edges import Edges
from xtok.maps.projection_map import RowKind
from xtok.maps.results import finished
from xtok.tokenizers import Tokenizer

LANGUAGES = ("en", "de", "zh")
STUDENT_VOCAB, TEACHER_VOCAB = 4000, 1600
SAMPLE_CHARS = 320  # of a training sample; a Chinese one has a third of it
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


@dataclass(frozen=True)
class Run:
    """One training: a map (or none), a loss, and a seed."""

    map: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.map}.{self.loss}.{self.seed}".replace(" ", "")


def main() -> None:
    """Prepare, train everything that is not there yet, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--teacher-steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.corpus, args.work)
    pool = multiprocessing.get_context("spawn").Pool(args.processes, initializer=_one_thread)
    with pool:
        teacher = train_teacher(args)
        pool.apply(_train, (teacher,))
        measures = make_maps(args.work)
        jobs = [student_arguments(run, args) for run in runs(args.seeds)]
        for number, _ in enumerate(pool.imap_unordered(_train, jobs), start=1):
            print(f"\r{number} of {len(jobs)} runs", end="", flush=True)
    print()
    report(args.work, measures, runs(args.seeds), args.steps)


def runs(seeds: int) -> list[Run]:
    """Return all trainings, those that matter most first."""
    maps = ["recipe", "slot", "prior-start", "prior-both", "start", "chunk", "both"]
    kinds = [("none", "ce"), *((m, "p-kl") for m in maps), *((m, "p-kl + ce") for m in maps)]
    kinds += [("learned", "p-kl + ce")]
    kinds += [("recipe", "gold + ce"), ("recipe", "h-kl + ce"), ("pinned", "h-kl + ce")]
    kinds += [("none", "uld + ce")]
    return [Run(m, loss, seed) for seed in range(seeds) for m, loss in kinds]


def prepare(corpus: Path, work: Path) -> None:
    """Write samples of all languages in turn, train both tokenizers, and write the models."""
    if (work / "teacher").exists():
        return
    for split, per_language in (("train", 4000), ("valid", 150)):
        columns = [samples(corpus / f"{x}.{split}.jsonl.gz")[:per_language] for x in LANGUAGES]
        rows = zip(*columns, strict=False)
        lines = [json.dumps({"text": text}, ensure_ascii=False) for row in rows for text in row]
        (work / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = [json.loads(line)["text"] for line in (work / "train.jsonl").open(encoding="utf-8")]
    sizes = {"student": (STUDENT_VOCAB, 96, 2), "teacher": (TEACHER_VOCAB, 192, 4)}
    for side, (vocab, width, layers) in sizes.items():
        write_model(work / side, texts, vocab, width, layers, split_digits=side == "teacher")


def samples(path: Path) -> list[str]:
    """Cut the documents of a file into samples at line ends."""
    found: list[str] = []
    limit = SAMPLE_CHARS // 3 if path.name.startswith("zh") else SAMPLE_CHARS
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            part = ""
            for row in json.loads(line)["text"].splitlines(keepends=True):
                if part and len(part) + len(row) > limit:
                    found.append(part)
                    part = ""
                part += row[: 2 * limit]
    return found


def write_model(
    folder: Path, texts: Sequence[str], vocab: int, width: int, layers: int, *, split_digits: bool
) -> None:
    """Train a byte-level BPE tokenizer, and write it with a small Llama's configuration."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    rust = Rust(models.BPE())
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    rust.pre_tokenizer = pre_tokenizers.Sequence(parts)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet,
            show_progress=False,
        ),
    )  # fmt: skip
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip


def train_teacher(args: argparse.Namespace) -> list[str]:
    """Return the arguments of the teacher's training, on its own tokens."""
    return [
        "--student", f"{args.work}/teacher", "--from-scratch",
        "--texts", f"{args.work}/train.jsonl", "--held-out", f"{args.work}/valid.jsonl",
        "--output", f"{args.work}/trained-teacher", "--steps", str(args.teacher_steps),
        "--batch-size", "12", "--max-length", "128", "--learning-rate", "2e-3",
        "--save-every", "250", "--device", args.device,
    ]  # fmt: skip


def make_maps(work: Path) -> dict[str, dict[str, float]]:
    """Write the maps, and return what `evaluate` measures of each on the held-out text."""
    folder = work / "maps"
    folder.mkdir(exist_ok=True)
    student, teacher = (load_tokenizer(str(work / side)) for side in ("student", "teacher"))
    texts = [work / "train.jsonl"]
    maps = {
        "recipe": build(student, teacher, BuildConfig(top_k=4, scale_trick=False)),
        "slot": with_arbitrary_slots(student, teacher),
        "prior-start": build(student, teacher, BuildConfig.for_loss("p-kl", target="start")),
        "prior-both": build(student, teacher, BuildConfig.for_loss("p-kl")),
        "pinned": build(student, teacher, BuildConfig.for_loss("h-kl")),
    }
    for target in get_args(Target):
        maps[target] = estimate(student, teacher, texts, EstimateConfig(target=target))
    maps["learned"] = maps["prior-both"]  # where the learning begins
    for name, projection in maps.items():
        projection.save(folder / f"{name}.safetensors")
    found = evaluate(
        list(maps.values()), [work / "valid.jsonl"], student, teacher, names=list(maps)
    )
    return {
        m.name: {
            "cross_entropy": m.cross_entropy.value,
            "chunk_cross_entropy": m.chunk_cross_entropy.value,
            "coverage": m.coverage.value,
            "closed": m.closed.value if m.closed else math.nan,
        }
        for m in found.measures
    }


def with_arbitrary_slots(student: Tokenizer, teacher: Tokenizer) -> ProjectionMap:
    """Return the recipe at 4 entries with the slot as NeMo-RL places it: on an arbitrary id.

    Rows that are not exact are cut to 3 entries and get a fourth of weight 0.2 on an id that has
    nothing to do with them.
    """
    recipe = build(student, teacher, BuildConfig(top_k=3, scale_trick=False))
    rows = np.flatnonzero(~np.isin(recipe.row_kind, [RowKind.EXACT, RowKind.ROLE, RowKind.EMPTY]))
    columns = np.random.default_rng(0).integers(0, recipe.shape[1], len(rows))
    taken = set(zip(recipe.student_ids.tolist(), recipe.teacher_ids.tolist(), strict=True))
    free = np.array([(s, t) not in taken for s, t in zip(rows.tolist(), columns, strict=True)])
    slots = Edges(rows[free], columns[free], np.full(int(free.sum()), SLOT_WEIGHT))
    flags = np.zeros(recipe.shape[0], np.uint8)
    flags[rows[free]] = 1
    made = finished(
        Edges.concatenate([recipe.edges, slots]).normalized(),
        student=recipe.student, teacher=recipe.teacher, row_kind=recipe.row_kind,
        scale_slot=flags, method="multitoken", top_k=4, history=recipe.history,
    )  # fmt: skip
    return replace(made, reports=())


def student_arguments(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the arguments of one student's training."""
    work = args.work
    found = [
        "--student", f"{work}/student", "--from-scratch", "--seed", str(run.seed),
        "--texts", f"{work}/train.jsonl", "--held-out", f"{work}/valid.jsonl",
        "--output", f"{work}/runs/{run.name}", "--steps", str(args.steps),
        "--batch-size", "8", "--max-length", "64", "--learning-rate", "3e-3",
        "--save-every", str(args.steps), "--device", args.device,
    ]  # fmt: skip
    if run.loss != "ce":
        found += ["--teacher", f"{work}/trained-teacher/student"]
        found += ["--teacher-tokenizer", f"{work}/teacher", "--loss", run.loss.partition(" ")[0]]
        found += ["--cross-entropy-weight", "1" if run.loss.endswith("+ ce") else "0"]
    if run.map != "none":
        found += ["--map", f"{work}/maps/{run.map}.safetensors"]
    if run.map == "learned":
        found += ["--learn-map"]
    return found


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _train(arguments: list[str]) -> None:
    import distill

    output = Path(arguments[arguments.index("--output") + 1])
    if not (output / "student").exists():
        distill.main(arguments)


def report(
    work: Path, measures: dict[str, dict[str, float]], all_runs: list[Run], steps: int
) -> None:
    """Print the table, write JSON, and draw."""
    bits: dict[tuple[str, str], list[float]] = {}  # held-out bits per byte, in the order of seeds
    for run in all_runs:
        bits.setdefault((run.map, run.loss), []).append(last_bits(work / "runs" / run.name))

    def gain(better: tuple[str, str], worse: tuple[str, str]) -> tuple[float, float]:
        return summary(np.subtract(bits[worse], bits[better]))

    rows: list[dict[str, Any]] = []
    for name, loss in bits:
        row = dict(zip(("mean", "interval"), summary(bits[name, loss]), strict=True))
        row |= zip(("gain", "gain_interval"), gain((name, loss), ("none", "ce")), strict=True)
        if loss in COMPARED:
            over = gain((name, loss), ("recipe", loss))
            row |= zip(("better", "better_interval"), over, strict=True)
        row |= measures.get(name, {})
        rows.append({"map": name, "loss": loss, "bits": bits[name, loss], **row})
    teacher = last_bits(work / "trained-teacher")
    print(f"teacher: {teacher:.3f} bits per byte; students: {steps} steps")
    print(
        f"{'loss':10} {'map':11} {'bits/byte':>15} {'gain over ce':>17} {'over recipe':>16}"
        "  start  chunk"
    )
    for r in sorted(rows, key=lambda r: (r["loss"], r["mean"])):
        ce = " ".join(f"{r[k]:6.3f}" if k in r else "     –" for k in MEASURES)
        best = f"{r['better']:.3f} ± {r['better_interval']:.3f}" if "better" in r else "–"
        print(
            f"{r['loss']:10} {r['map']:11} {r['mean']:7.3f} ± {r['interval']:.3f}"
            f" {r['gain']:9.3f} ± {r['gain_interval']:.3f} {best:>16} {ce}"
        )
    correlations = {}
    for loss in COMPARED:
        for name, other in (("prior-both", "prior-start"), ("both", "start")):
            mean, interval = gain((name, loss), (other, loss))
            print(f"{loss}: {name} over {other} {mean:.3f} ± {interval:.3f}")
        own = [r for r in rows if r["loss"] == loss and r["map"] != "learned"]
        for key in MEASURES:  # Spearman's, ties in order
            ranks = [np.argsort(np.argsort([r[k] for r in own])) for k in (key, "mean")]
            correlations[f"{loss}, {key}"] = float(np.asarray(np.corrcoef(ranks))[0, 1])
    for name, value in correlations.items():
        print(f"rank correlation of bits per byte with {name}: {value:.2f}")
    results = {"teacher": teacher, "rows": rows, "correlations": correlations}
    (work / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(work, rows)


COMPARED = ("p-kl", "p-kl + ce")
MEASURES = ("cross_entropy", "chunk_cross_entropy")


def last_bits(folder: Path) -> float:
    """Return a finished training's held-out bits per byte."""
    last = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return float(json.loads(last)["bits_per_byte"])


def summary(values: Sequence[float] | NDArray[Any]) -> tuple[float, float]:
    """Return a mean and half of its 95 % confidence interval (Student's t)."""
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), T_95[min(len(values), 10)] * error


def draw(work: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw bits per byte by map and loss, and gains against the maps' cross-entropies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for r in sorted(rows, key=lambda r: -r["mean"]):
        axes.errorbar([r["mean"]], [f"{r['loss']}: {r['map']}"], xerr=[r["interval"]], fmt="oC0")
    axes.set_xlabel("held-out bits per byte (lower is better), 95 % interval over seeds")
    figure.savefig(work / "bits-per-byte.png", metadata={"Software": None}, dpi=110)
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{COMPARED[0]} in blue, {COMPARED[1]} in orange")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key in zip(panels, MEASURES, strict=True):
        for r in rows:
            if r["loss"] in COMPARED and r["map"] != "learned":
                color = f"C{COMPARED.index(r['loss'])}"
                axes.errorbar([r[key]], [r["gain"]], yerr=[r["gain_interval"]], fmt=f"o{color}")
                axes.annotate(r["map"], (r[key], r["gain"]), color=color)
        axes.set_xlabel(f"map's {key.replace('_', ' ')} on held-out text, nats")
    panels[0].set_ylabel("gain over cross-entropy alone, bits/byte")
    figure.savefig(work / "gain-by-measure.png", metadata={"Software": None}, dpi=110)


if __name__ == "__main__":
    main()
