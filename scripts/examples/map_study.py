"""Which loss, which artefact, which direction? Train small students with each, from scratch.

    python scripts/examples/map_study.py --corpus FOLDER --work FOLDER [--steps 80] [--seeds 5]

The corpus holds `LANGUAGE.train.jsonl.gz` and `LANGUAGE.valid.jsonl.gz`. Trains two byte-level BPE
tokenizers: one with long tokens, and one with short ones that splits digits. Then, with
`distill.py`, a teacher with each. Then, for each teacher and seed, students with the other
tokenizer, side by side on the same batches: one for each loss and artefact, all with the same
budget. A teacher reads each batch once, and it is projected once. Prints a table and draws a plot.
The work folder keeps the results of each seed: run it again to resume.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import xtok
from xtok.projecting.back_map import BACK_MAP

LANGUAGES = ("en", "de", "zh")  # of the models' text
VOCAB = {"long": 4000, "short": 1600}
TRAINED_ON = {"long": ("en", "de", "zh"), "short": ("en", "fr", "ja")}  # the tokenizers
SIZES = {"student": (96, 2), "teacher": (192, 4)}  # width, layers
SAMPLE_CHARS = 320  # of a training sample; a Chinese one has a third of it
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}

# What is compared: a loss and its artefact, beside cross-entropy and alone. Top-k KL takes so many
# of the teacher's candidates, through the map or along the path.
KINDS = (
    ("event-kl", "text"), ("event-kl", "bytes"), ("p-kl", "for-p-kl"), ("p-kl", "both-em"),
    ("p-kl", "recipe"), ("teacher-to-student-kl", "back-text"),
    ("teacher-to-student-kl", "back-prior"), ("topk-kl", "path-16"), ("topk-kl", "path-64"),
    ("topk-kl", "path-512"), ("topk-kl", "map-16"), ("topk-kl", "map-64"), ("topk-kl", "map-512"),
    ("gold", "recipe"),
)  # fmt: skip
BESIDE_ONLY = {"path-16", "path-512", "map-16", "map-512"}, {"gold"}  # artefacts, losses
Kind = tuple[str, str]


def main() -> None:
    """Prepare, train what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("corpus", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("steps", 80), ("teacher-steps", 800), ("seeds", 5), ("processes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--artefacts", nargs="+", default=[a for _, a in KINDS], help="some of all")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    prepare(args.corpus, args.work)
    measures = {student: make_artefacts(args.work, student) for student in VOCAB}
    with multiprocessing.get_context("spawn").Pool(args.processes, initializer=_one_thread) as pool:
        pool.map(partial(train_teacher, args), VOCAB, 1)
        jobs = [(args, student, seed) for seed in range(args.seeds) for student in VOCAB]
        for number, _ in enumerate(pool.imap_unordered(_train_students, jobs), start=1):
            print(f"\r{number} of {len(jobs)} groups of students", end="", flush=True)
    print()
    report(args, measures)


def all_kinds(artefacts: Sequence[str]) -> list[Kind]:
    """Return the losses, with their artefacts, that each group of students has."""
    kinds = [kind for kind in KINDS if kind[1] in artefacts]
    alone = [(a, b) for a, b in kinds if b not in BESIDE_ONLY[0] and a not in BESIDE_ONLY[1]]
    return [("ce", "none"), *alone, *((f"{loss} + ce", artefact) for loss, artefact in kinds)]


def prepare(corpus: Path, work: Path) -> None:
    """Write samples of all languages, alternating; train both tokenizers; write the models."""
    if (work / "short-teacher").exists():
        return
    for split, per_language in (("train", 4000), ("valid", 30)):
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
        "both-em": counted(student, teacher, target="both"),
    }
    back = {
        "back-prior": xtok.build(teacher, student, start),
        "back-text": counted(teacher, student),
    }
    xtok.build(teacher, student, BACK_MAP).save(folder / "to-project.safetensors")
    leak = xtok.events(student, teacher, texts).history[0]["measures"][1]["leak"]
    events = {
        "bytes": xtok.events(student, teacher),
        "text": xtok.events(student, teacher, texts, xtok.EventsConfig(max_leak=leak / 4)),
    }
    for artefact, made in (maps | back | events).items():
        made.save(folder / f"{artefact}.safetensors")
    measured = xtok.evaluate(
        xtok.pair(student, teacher), list(maps.values()), held_out, names=list(maps)
    ).measures
    words = {m.name: f"{m.chunk_cross_entropy.value:.3f} nats over chunks" for m in measured}
    measured = xtok.evaluate(
        xtok.pair(teacher, student), list(back.values()), held_out, names=list(back)
    ).measures
    words |= {m.name: f"{m.cross_entropy.value:.3f} nats at starts" for m in measured}
    leaks = xtok.evaluate(
        xtok.pair(student, teacher), list(events.values()), held_out, names=list(events)
    )
    return words | {
        m.name: f"leak {m.leak:.4f}, {m.kept:.3f} kept"
        for m in leaks.event_measures
    }  # fmt: skip


def of_pair(name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the tokenizer and the size of a student, and of its teacher."""
    return (name, "student"), ("short" if name == "long" else "long", "teacher")


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def train_teacher(args: argparse.Namespace, name: str) -> None:
    """Train a teacher on its own tokens."""
    import distill

    output = args.work / f"trained-{name}"
    if not (output / "student").exists():
        distill.main([
            "--student", f"{args.work}/{name}-teacher", "--from-scratch",
            "--steps", str(args.teacher_steps), "--texts", f"{args.work}/train.jsonl",
            "--held-out", f"{args.work}/valid.jsonl", "--output", str(output),
            "--device", args.device, "--batch-size", "12", "--max-length", "128",
            "--learning-rate", "2e-3", "--save-every", "400",
        ])  # fmt: skip


def _train_students(job: tuple[argparse.Namespace, str, int]) -> None:
    args, student, seed = job
    output = results_of(args, student, seed)
    if not output.exists():
        bits = train_students(args, student, seed)
        output.parent.mkdir(exist_ok=True)
        lines = [json.dumps([*kind, value]) + "\n" for kind, value in bits.items()]
        output.write_text("".join(lines), encoding="utf-8")


def results_of(args: argparse.Namespace, student: str, seed: int) -> Path:
    """Return the file of a group's results: of each kind, the held-out bits per byte."""
    path: Path = args.work / "results" / f"{student}.{seed}.jsonl"
    return path


class Learner(NamedTuple):
    """One student of a group."""

    model: Any
    optimizer: Any
    loss: Any  # a `BatchLoss`, or None
    own_weight: float  # of cross-entropy


def train_students(args: argparse.Namespace, name: str, seed: int) -> dict[Kind, float]:
    """Train a group side by side on the batches of a seed; return held-out bits per byte."""
    import distill
    import torch

    from xtok.training.collator import DistillationCollator, prepare

    (name, size), (other, of_teacher) = of_pair(name)
    sides = [
        xtok.load_tokenizer(f"{args.work}/{n}") for n in (f"{name}-{size}", f"{other}-{of_teacher}")
    ]
    collate = DistillationCollator(*sides, max_length=96)
    samples = distill.read_texts([args.work / "train.jsonl"])
    held_out = distill.read_texts([args.work / "valid.jsonl"])
    teacher = distill.load_model(f"{args.work}/trained-{other}/student", sides[1])
    teacher.to(args.device).eval()
    made = losses_of(args.work / "artefacts" / name, sides, args.device)
    options = argparse.Namespace(
        steps=args.steps, batch_size=4, seed=seed, learning_rate=3e-3, warmup=20
    )
    learners = {}
    for kind in all_kinds(args.artefacts):
        torch.manual_seed(seed)
        model = distill.load_model(f"{args.work}/{name}-{size}", sides[0], from_scratch=True)
        optimizer = torch.optim.AdamW(model.to(args.device).parameters(), betas=(0.9, 0.95))
        loss, beside, _ = kind[0].partition(" + ce")
        learners[kind] = Learner(
            model.train(),
            optimizer,
            made.get((loss, kind[1])),
            1.0 if beside or loss == "ce" else 0.0,
        )
    for step, chosen in enumerate(distill.batches(len(samples), options, 0)):
        batch = prepare(collate([samples[i] for i in chosen]), args.device)
        side = batch["teachers"][0]
        with torch.no_grad():
            theirs = distill.logits_of(teacher, side)
        side["projected"] = {}
        for learner in learners.values():
            logits = distill.logits_of(learner.model, batch)
            own = distill.own_loss(logits, batch["targets"]) / (batch["targets"] >= 0).sum()
            total = learner.own_weight * own
            if learner.loss is not None:
                total = total + learner.loss(logits, theirs, batch, side)
            for group in learner.optimizer.param_groups:
                group["lr"] = distill.learning_rate(step, options)
            learner.optimizer.zero_grad(set_to_none=True)
            total.backward()
            torch.nn.utils.clip_grad_norm_(learner.model.parameters(), 1.0)
            learner.optimizer.step()
    return {
        kind: distill.bits_per_byte(learner.model, held_out, collate, options.batch_size)
        for kind, learner in learners.items()
    }


def losses_of(folder: Path, sides: Sequence[xtok.Tokenizer], device: str) -> dict[Kind, Any]:
    """Return the loss of each kind."""
    from distill import read_map

    from xtok.training.losses import BatchLoss, make_loss, topk_kl
    from xtok.training.projected import ProjectedTeacher

    def projected(artefact: str) -> BatchLoss:
        way, _, top_k = artefact.partition("-")
        back_map = xtok.ProjectionMap.load(folder / "to-project.safetensors")
        student, teacher = sides
        of_teacher = ProjectedTeacher(
            xtok.pair(student, teacher), back_map,
            top_k=int(top_k), num_threads=1, along_path=way == "path",
        )  # fmt: skip

        def mean(logits: Any, theirs: Any, batch: Any, side: Any) -> Any:
            if artefact not in side["projected"]:  # for the first student of a batch
                side["projected"][artefact] = of_teacher(theirs, batch, side)
            return topk_kl(logits, **vars(side["projected"][artefact]))

        return BatchLoss(mean, of_teacher.loss.count)

    made: dict[Kind, Any] = {}
    for name, artefact in KINDS:
        if name == "topk-kl":
            made[name, artefact] = projected(artefact)
            continue
        loss: Any = name
        module = read_map(loss, folder / f"{artefact}.safetensors", learnable=False).to(device)
        made[name, artefact] = make_loss(loss, module=module)
    return made


def report(args: argparse.Namespace, measures: dict[str, dict[str, str]]) -> None:
    """Print a table for each student, and draw the plot."""
    bits: dict[tuple[str, str, str], list[float]] = {}  # held-out bits per byte, by seed
    for seed in range(args.seeds):
        for student in VOCAB:
            lines = results_of(args, student, seed).read_text(encoding="utf-8").splitlines()
            for loss, artefact, value in map(json.loads, lines):
                bits.setdefault((student, loss, artefact), []).append(value)
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
                if other != key and other in bits
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
