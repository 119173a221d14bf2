"""Does a better map make a better student? Train small students with every map and loss.

    python scripts/examples/map_study.py --corpus FOLDER --work FOLDER [--steps 160] [--seeds 5]

The corpus holds `LANGUAGE.train.jsonl.gz` and `LANGUAGE.valid.jsonl.gz`. Trains two byte-level BPE
tokenizers of different sizes, one of which splits digits, then one teacher, then through
`distill.py` a student for each map, loss and seed, all with the same budget. Prints a table and
draws two plots. The work folder keeps every result: run it again to resume.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

import xtok
from xtok.config import SLOT_WEIGHT, Target
from xtok.maps.edges import Edges
from xtok.maps.projection_map import RowKind
from xtok.maps.results import finished

LANGUAGES = ("en", "de", "zh")
STUDENT_VOCAB, TEACHER_VOCAB = 4000, 1600
SAMPLE_CHARS = 320  # of a training sample; a Chinese one has a third of it
COMPARED = ("p-kl", "p-kl + ce")
MEASURES = ("cross_entropy", "chunk_cross_entropy")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


class Run(NamedTuple):
    """One training: a map (or none), a loss, and a seed."""

    map: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.map}.{self.loss}.{self.seed}".replace(" ", "")


def main() -> None:
    """Prepare, train what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("corpus", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("steps", 160), ("teacher-steps", 800), ("seeds", 5), ("processes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.corpus, args.work)
    runs = all_runs(args.seeds)
    with multiprocessing.get_context("spawn").Pool(args.processes, initializer=_one_thread) as pool:
        pool.apply(_train, (teacher_arguments(args),))
        measures = make_maps(args.work)
        jobs = [student_arguments(run, args) for run in runs]
        for number, _ in enumerate(pool.imap_unordered(_train, jobs), start=1):
            print(f"\r{number} of {len(jobs)} runs", end="", flush=True)
    print()
    report(args.work, measures, runs, args.steps)


def all_runs(seeds: int) -> list[Run]:
    """Return all trainings, the most important first."""
    maps = ["recipe", "slot", "prior-start", "prior-both", "start", "chunk", "both"]
    kinds = [("none", "ce"), *((m, "p-kl") for m in maps), *((m, "p-kl + ce") for m in maps)]
    kinds += [("learned", "p-kl + ce"), ("recipe", "gold + ce"), ("recipe", "h-kl + ce")]
    kinds += [("pinned", "h-kl + ce"), ("none", "uld + ce")]
    return [Run(*kind, seed) for seed in range(seeds) for kind in kinds]


def prepare(corpus: Path, work: Path) -> None:
    """Write samples of all languages, alternating; train both tokenizers; write the models."""
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
    parts: list[str] = []
    limit = SAMPLE_CHARS // 3 if path.name.startswith("zh") else SAMPLE_CHARS
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            part = ""
            for row in json.loads(line)["text"].splitlines(keepends=True):
                if part and len(part) + len(row) > limit:
                    parts.append(part)
                    part = ""
                part += row[: 2 * limit]
    return parts


def write_model(
    folder: Path, texts: Sequence[str], vocab: int, width: int, layers: int, *, split_digits: bool
) -> None:
    """Write a byte-level BPE tokenizer trained on texts, and the configuration of a small Llama."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    rust = Rust(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    rust.pre_tokenizer = pre_tokenizers.Sequence(steps)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    rust.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip


def make_maps(work: Path) -> dict[str, dict[str, float]]:
    """Write the maps; return what `evaluate` measures of each on the held-out text."""
    folder = work / "maps"
    folder.mkdir(exist_ok=True)
    student, teacher = (xtok.load_tokenizer(str(work / side)) for side in ("student", "teacher"))
    texts = [work / "train.jsonl"]
    configs = {
        "recipe": xtok.BuildConfig(top_k=4, scale_trick=False),
        "prior-start": xtok.BuildConfig.for_loss("p-kl", target="start"),
        "prior-both": xtok.BuildConfig.for_loss("p-kl"),
        "pinned": xtok.BuildConfig.for_loss("h-kl"),
    }
    maps = {name: xtok.build(student, teacher, config) for name, config in configs.items()}
    maps["slot"] = with_arbitrary_slots(student, teacher)
    for target in get_args(Target):
        maps[target] = xtok.estimate(student, teacher, texts, xtok.EstimateConfig(target=target))
    maps["learned"] = maps["prior-both"]  # where learning starts
    for name, projection in maps.items():
        projection.save(folder / f"{name}.safetensors")
    held_out, all_maps = [work / "valid.jsonl"], list(maps.values())
    evaluation = xtok.evaluate(all_maps, held_out, student, teacher, names=list(maps))
    return {m.name: {key: getattr(m, key).value for key in MEASURES} for m in evaluation.measures}


def with_arbitrary_slots(student: xtok.Tokenizer, teacher: xtok.Tokenizer) -> xtok.ProjectionMap:
    """Return the recipe with the slot as NeMo-RL places it: on an arbitrary id.

    Rows that are not exact keep 3 entries and get a fourth of weight 0.2 on an unrelated id.
    """
    recipe = xtok.build(student, teacher, xtok.BuildConfig(top_k=3, scale_trick=False))
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


def teacher_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments of the teacher's training, on its own tokens."""
    return [
        *arguments_of("teacher", "trained-teacher", args.teacher_steps, args),
        "--batch-size", "12", "--max-length", "128", "--learning-rate", "2e-3",
        "--save-every", "250",
    ]  # fmt: skip


def student_arguments(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the arguments of one student's training."""
    arguments = [
        *arguments_of("student", f"runs/{run.name}", args.steps, args), "--seed", str(run.seed),
        "--batch-size", "8", "--max-length", "64", "--learning-rate", "3e-3",
        "--save-every", str(args.steps),
    ]  # fmt: skip
    if run.loss != "ce":
        arguments += [
            "--teacher", f"{args.work}/trained-teacher/student",
            "--teacher-tokenizer", f"{args.work}/teacher", "--loss", run.loss.partition(" ")[0],
            "--cross-entropy-weight", "1" if run.loss.endswith("+ ce") else "0",
        ]  # fmt: skip
    if run.map != "none":
        arguments += ["--map", f"{args.work}/maps/{run.map}.safetensors"]
    return [*arguments, "--learn-map"] if run.map == "learned" else arguments


def arguments_of(model: str, output: str, steps: int, args: argparse.Namespace) -> list[str]:
    """Return the arguments that all trainings have."""
    return [
        "--student", f"{args.work}/{model}", "--from-scratch", "--steps", str(steps),
        "--texts", f"{args.work}/train.jsonl", "--held-out", f"{args.work}/valid.jsonl",
        "--output", f"{args.work}/{output}", "--device", args.device,
    ]  # fmt: skip


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _train(arguments: list[str]) -> None:
    import distill

    output = Path(arguments[arguments.index("--output") + 1])
    if not (output / "student").exists():
        distill.main(arguments)


def report(
    work: Path, measures: dict[str, dict[str, float]], runs: Sequence[Run], steps: int
) -> None:
    """Print the table and the comparisons, and draw the plots."""
    bits: dict[tuple[str, str], list[float]] = {}  # held-out bits per byte, by seed
    for run in runs:
        bits.setdefault((run.map, run.loss), []).append(last_bits(work / "runs" / run.name))

    def gain(better: tuple[str, str], worse: tuple[str, str]) -> tuple[float, float]:
        return summary(np.subtract(bits[worse], bits[better]))

    rows: list[dict[str, Any]] = [
        {"map": name, "loss": loss, "bits": summary(bits[name, loss]),
         "gain": gain((name, loss), ("none", "ce")), **measures.get(name, {})}
        for name, loss in bits
    ]  # fmt: skip
    teacher = last_bits(work / "trained-teacher")
    print(f"teacher: {teacher:.3f} bits per byte; students: {steps} steps")
    print(f"{'loss':10} {'map':11} {'bits/byte':>15} {'gain over ce':>17} {'over recipe':>16}"
          "  start  chunk")  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["loss"], row["bits"])):
        name, loss = row["map"], row["loss"]
        over = gain((name, loss), ("recipe", loss)) if loss in COMPARED else None
        best = "{:.3f} ± {:.3f}".format(*over) if over else "–"
        measured = " ".join(f"{row[k]:6.3f}" if k in row else "     –" for k in MEASURES)
        bits_shown, gain_shown = ("{:.3f} ± {:.3f}".format(*row[key]) for key in ("bits", "gain"))
        print(f"{loss:10} {name:11} {bits_shown:>15} {gain_shown:>17} {best:>16} {measured}")
    for loss in COMPARED:
        for name, other in (("prior-both", "prior-start"), ("both", "start")):
            mean, interval = gain((name, loss), (other, loss))
            print(f"{loss}: {name} over {other} {mean:.3f} ± {interval:.3f}")
    for loss in COMPARED:
        own = [row for row in rows if row["loss"] == loss and row["map"] != "learned"]
        for key in MEASURES:  # Spearman's, ties in order
            columns = [row[key] for row in own], [row["bits"][0] for row in own]
            ranks = [np.argsort(np.argsort(column)) for column in columns]
            correlation = np.asarray(np.corrcoef(ranks))[0, 1]
            print(f"rank correlation of bits per byte with {loss}, {key}: {correlation:.2f}")
    draw(work, rows)


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
    for row in sorted(rows, key=lambda row: row["bits"], reverse=True):
        mean, interval = row["bits"]
        axes.errorbar([mean], [f"{row['loss']}: {row['map']}"], xerr=[interval], fmt="oC0")
    axes.set_xlabel("held-out bits per byte (lower is better), 95 % interval over seeds")
    figure.savefig(work / "bits-per-byte.png", metadata={"Software": None}, dpi=110)
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{COMPARED[0]} in blue, {COMPARED[1]} in orange")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key in zip(panels, MEASURES, strict=True):
        for row in rows:
            if row["loss"] in COMPARED and row["map"] != "learned":
                color, (mean, interval) = f"C{COMPARED.index(row['loss'])}", row["gain"]
                axes.errorbar([row[key]], [mean], yerr=[interval], fmt=f"o{color}")
                axes.annotate(row["map"], (row[key], mean), color=color)
        axes.set_xlabel(f"map's {key.replace('_', ' ')} on held-out text, nats")
    panels[0].set_ylabel("gain over cross-entropy alone, bits/byte")
    figure.savefig(work / "gain-by-measure.png", metadata={"Software": None}, dpi=110)


if __name__ == "__main__":
    main()
