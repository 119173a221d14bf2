"""Which loss, which artefact, which direction? Train small students with each, from scratch.

    python scripts/examples/map_study.py --corpus FOLDER --work FOLDER [--steps 160] [--seeds 5]

The corpus holds `LANGUAGE.train.jsonl.gz` and `LANGUAGE.valid.jsonl.gz`. Trains two byte-level BPE
tokenizers: one with long tokens, and one with short ones that splits digits. Then a teacher with
each, and through `distill.py`, for each teacher, students with the other tokenizer: one for each
loss, artefact and seed, all with the same budget. Prints a table and draws a plot. The work folder
keeps every result: run it again to resume.
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import xtok
from xtok.vocab.table import common_ids

LANGUAGES = ("en", "de", "zh")  # of the models' text
VOCAB = {"long": 4000, "short": 1600}
TRAINED_ON = {"long": ("en", "de", "zh"), "short": ("en", "fr", "ja")}  # the tokenizers
SIZES = {"student": (96, 2), "teacher": (192, 4)}  # width, layers
SAMPLE_CHARS = 320  # of a training sample; a Chinese one has a third of it
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}

# What is compared: a loss and its artefact; all but the last alone and beside cross-entropy.
KINDS = (
    ("p-kl", "recipe"), ("p-kl", "for-p-kl"), ("p-kl", "chunk-em"),
    ("p-kl", "both-em"), ("event-kl", "bytes"), ("event-kl", "text"), ("event-kl", "coarse"),
    ("event-kl", "shared"), ("teacher-to-student-kl", "back-prior"),
    ("teacher-to-student-kl", "back-text"), ("gold", "recipe"),
)  # fmt: skip
BESIDE_ONLY = ("gold",)


class Run(NamedTuple):
    """One training of a student: which tokenizer it has, its loss, an artefact, and a seed."""

    student: str
    loss: str
    artefact: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.student}.{self.artefact}.{self.loss}.{self.seed}".replace(" ", "")


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
    measures = {student: make_artefacts(args.work, student) for student in VOCAB}
    with multiprocessing.get_context("spawn").Pool(args.processes, initializer=_one_thread) as pool:
        pool.map(_train, [teacher_arguments(name, args) for name in VOCAB], 1)
        jobs = [student_arguments(run, args) for run in runs]
        for number, _ in enumerate(pool.imap_unordered(_train, jobs), start=1):
            print(f"\r{number} of {len(jobs)} runs", end="", flush=True)
    print()
    report(args, measures, runs)


def all_runs(seeds: int) -> list[Run]:
    """Return all trainings, seed by seed."""
    alone = [kind for kind in KINDS if kind[0] not in BESIDE_ONLY]
    kinds = [("ce", "none"), *alone, *((f"{loss} + ce", artefact) for loss, artefact in KINDS)]
    return [Run(student, *kind, s) for s in range(seeds) for student in VOCAB for kind in kinds]


def prepare(corpus: Path, work: Path) -> None:
    """Write samples of all languages, alternating; train both tokenizers; write the models."""
    if (work / "short-teacher").exists():
        return
    for split, per_language in (("train", 4000), ("valid", 150)):
        texts = mixed(corpus, split, LANGUAGES, per_language)
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        (work / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    for name, vocab in VOCAB.items():
        texts = mixed(corpus, "train", TRAINED_ON[name], 4000)
        tokenizer = train_tokenizer(texts, vocab, split_digits=name == "short")
        for model, (width, layers) in SIZES.items():
            write_model(work / f"{name}-{model}", tokenizer, vocab, width, layers)


def mixed(corpus: Path, split: str, languages: Sequence[str], per_language: int) -> list[str]:
    """Return samples of languages in turn."""
    columns = [samples(corpus / f"{x}.{split}.jsonl.gz")[:per_language] for x in languages]
    return [text for row in zip(*columns, strict=False) for text in row]


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


def train_tokenizer(texts: Sequence[str], vocab: int, *, split_digits: bool) -> Any:
    """Train a byte-level BPE tokenizer."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    return make(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")


def write_model(folder: Path, tokenizer: Any, vocab: int, width: int, layers: int) -> None:
    """Write a tokenizer and the configuration of a small Llama."""
    from transformers import LlamaConfig

    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip


def make_artefacts(work: Path, name: str) -> dict[str, str]:
    """Write the maps and event maps of a student; return what `evaluate` measures of each."""
    folder = work / "artefacts" / name
    folder.mkdir(exist_ok=True, parents=True)
    student, teacher = (xtok.load_tokenizer(str(work / f"{n}-{m}")) for n, m in of_pair(name))
    texts, held_out = [work / "train.jsonl"], [work / "valid.jsonl"]

    def counted(*pair: xtok.Tokenizer, **options: Any) -> xtok.ProjectionMap:
        config = xtok.BuildConfig(**{"top_k": 8, "exact_match": False, **options})
        return xtok.build(pair[0], pair[1], config, texts=texts)

    start = xtok.BuildConfig.for_loss("p-kl", target="start")
    maps = {
        "recipe": xtok.build(student, teacher, xtok.BuildConfig(top_k=4, scale_trick=False)),
        "for-p-kl": xtok.build(student, teacher, xtok.BuildConfig.for_loss("p-kl")),
        "chunk-em": counted(student, teacher, target="chunk"),
        "both-em": counted(student, teacher, target="both"),
    }
    back = {
        "back-prior": xtok.build(teacher, student, start),
        "back-text": counted(teacher, student),
    }
    by_bytes = xtok.events(student, teacher)
    leak = xtok.events(student, teacher, texts).history[0]["measures"][1]["leak"]
    events = {
        "bytes": by_bytes,
        "text": xtok.events(student, teacher, texts, xtok.EventsConfig(max_leak=leak / 4)),
        "coarse": xtok.events(student, teacher, texts, xtok.EventsConfig(max_leak=0)),
        "shared": shared_events(by_bytes, student, teacher),
    }
    for artefact, made in (maps | back | events).items():
        made.save(folder / f"{artefact}.safetensors")
    measured = xtok.evaluate(
        list(maps.values()), held_out, student, teacher, names=list(maps)
    ).measures
    words = {m.name: f"{m.chunk_cross_entropy.value:.3f} nats over chunks" for m in measured}
    measured = xtok.evaluate(
        list(back.values()), held_out, teacher, student, names=list(back)
    ).measures
    words |= {m.name: f"{m.cross_entropy.value:.3f} nats at starts" for m in measured}
    leaks = xtok.evaluate(list(events.values()), held_out, student, teacher, names=list(events))
    return words | {
        m.name: f"leak {m.leak:.4f}, {m.kept:.3f} kept"
        for m in leaks.event_measures
    }  # fmt: skip


def shared_events(
    events: xtok.EventMap, student: xtok.Tokenizer, teacher: xtok.Tokenizer
) -> xtok.EventMap:
    """Return the events of a shared vocabulary: one for each token of both sides, and a rest."""
    ours, theirs = common_ids(student.table, teacher.table)
    _, labels = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    partners = np.full(ours.max() + 1, -1)
    partners[theirs[theirs >= 0]] = np.flatnonzero(theirs >= 0)
    return replace(
        events, student_event=labels[: len(ours)].astype(np.int32),
        teacher_event=labels[len(ours) :].astype(np.int32),
        student_link=np.where(ours >= 0, partners[ours], -1).astype(np.int32),
        teacher_link=theirs.astype(np.int32), rest=0, history=(), reports=(),
    )  # fmt: skip


def of_pair(name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the tokenizer and the size of a student, and of its teacher."""
    return (name, "student"), ("short" if name == "long" else "long", "teacher")


def teacher_arguments(name: str, args: argparse.Namespace) -> list[str]:
    """Return the arguments of a teacher's training, on its own tokens."""
    return [
        *arguments_of(f"{name}-teacher", f"trained-{name}", args.teacher_steps, args),
        "--batch-size", "12", "--max-length", "128", "--learning-rate", "2e-3",
        "--save-every", "400",
    ]  # fmt: skip


def student_arguments(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the arguments of one student's training."""
    _, (teacher, _) = of_pair(run.student)
    arguments = [
        *arguments_of(f"{run.student}-student", f"runs/{run.name}", args.steps, args),
        "--seed", str(run.seed), "--batch-size", "8", "--max-length", "96",
        "--learning-rate", "3e-3", "--save-every", str(args.steps),
    ]  # fmt: skip
    if run.loss != "ce":
        arguments += [
            "--teacher", f"{args.work}/trained-{teacher}/student",
            "--teacher-tokenizer", f"{args.work}/{teacher}-teacher",
            "--loss", run.loss.partition(" ")[0],
            "--cross-entropy-weight", "1" if run.loss.endswith("+ ce") else "0",
        ]  # fmt: skip
    if run.artefact != "none":
        file = args.work / "artefacts" / run.student / f"{run.artefact}.safetensors"
        arguments += ["--map", str(file)]
    return arguments


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
    args: argparse.Namespace, measures: dict[str, dict[str, str]], runs: Sequence[Run]
) -> None:
    """Print a table for each student, and draw the plot."""
    bits: dict[tuple[str, str, str], list[float]] = {}  # held-out bits per byte, by seed
    for run in runs:
        at = bits.setdefault((run.student, run.loss, run.artefact), [])
        at.append(last_bits(args.work / "runs" / run.name))
    for student in VOCAB:
        _, (teacher, _) = of_pair(student)
        best = last_bits(args.work / f"trained-{teacher}")
        print(f"\nstudent with {student} tokens, {args.steps} steps; "
              f"teacher with {teacher} ones: {best:.3f} bits per byte")  # fmt: skip
        print(f"{'loss':26} {'artefact':10} {'bits/byte':>13} {'over ce':>14} {'over P-KL':>14}")
        rows = [(summary(values), key) for key, values in bits.items() if key[0] == student]
        for (mean, interval), (_, loss, artefact) in sorted(rows):
            key, base = (student, loss, artefact), "p-kl + ce" if loss.endswith("ce") else "p-kl"
            shown = [
                "{:.3f} ± {:.3f}".format(*summary(np.subtract(bits[other], bits[key])))
                if other != key
                else "–"
                for other in ((student, "ce", "none"), (student, base, "for-p-kl"))
            ]
            says = measures[student].get(artefact, "")
            print(f"{loss:26} {artefact:10} {mean:.3f} ± {interval:.3f} {shown[0]:>14} "
                  f"{shown[1]:>14}  {says}")  # fmt: skip
    draw(args.work, bits)


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


def draw(work: Path, bits: dict[tuple[str, str, str], list[float]]) -> None:
    """Draw bits per byte: a panel for each student, losses alone and beside cross-entropy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, student in zip(panels, VOCAB, strict=True):
        axes.set_title(f"student with {student} tokens")
        axes.axvline(float(np.mean(bits[student, "ce", "none"])), color="C7", label="ce alone")
        for color, end in (("C0", ""), ("C1", " + ce")):
            kinds = [(a, b) for a, b in KINDS if (student, a + end, b) in bits]
            found = [summary(bits[student, a + end, b]) for a, b in kinds]
            names, (means, intervals) = [f"{a}: {b}" for a, b in kinds], zip(*found, strict=True)
            label = "beside ce" if end else "loss alone"
            axes.errorbar(means, names, xerr=intervals, fmt="o", color=color, label=label)
        axes.set_xlabel("held-out bits per byte (lower is better), 95 % over seeds")
    panels[0].invert_yaxis()
    panels[0].legend(loc="lower right")
    figure.savefig(work / "bits-per-byte.png", metadata={"Software": None}, dpi=110)


if __name__ == "__main__":
    main()
