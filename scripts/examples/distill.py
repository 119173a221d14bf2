"""Train a student on texts and on one or more teachers with other tokenizers; plain PyTorch.

    python scripts/examples/distill.py --student models/student --teacher models/teacher \
        --map student_to_teacher.safetensors --loss p-kl --texts corpus.jsonl --output runs/p-kl

Student and teachers are Hugging Face folders or repo ids, with tokenizers in them or given apart;
with `--from-scratch`, only the student's configuration is taken. Texts are `.jsonl` files, one
object with `text` or `messages` a line, or plain files, a text in each paragraph. It runs on a CPU,
or on one GPU with `--device cuda --autocast`. Called again with the same `--output`, it goes on
from the last checkpoint, and ends where an uninterrupted run ends. `log.jsonl` has a line per step;
`--plot` draws it. The student is left in `OUTPUT/student`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from xtok.errors import XtokError
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.training import losses
from xtok.training.collator import DistillationCollator, prepare
from xtok.training.module import ProjectionModule

NUMBERS: tuple[tuple[str, Any, Any], ...] = (
    ("steps", int, 1000),
    ("batch-size", int, 8),
    ("max-length", int, 512),
    ("learning-rate", float, 3e-4),
    ("warmup", int, 20),
    ("clip", float, 1.0),
    ("seed", int, 0),
    ("save-every", int, 100),
    ("num-workers", int, 0),
    ("temperature", float, 1.0),
    ("top-k", int, None),
    ("distillation-weight", float, 1.0),
    ("cross-entropy-weight", float, 1.0),
)


def distillation(
    logits: Tensor,
    teacher_logits: Sequence[Tensor],
    batch: dict[str, Any],
    functions: Sequence[losses.BatchLoss],
    options: argparse.Namespace,
) -> Tensor:
    """Return the distillation loss from all teachers."""
    sides, weights = batch["teachers"], options.teacher_weight
    if options.teachers == "averaged-logits":
        mean = losses.averaged_logits(teacher_logits, weights)
        return functions[0](logits, mean, batch, sides[0])
    if options.teachers == "selected":
        best = losses.select_teacher(teacher_logits, [side["targets"] for side in sides])
        return functions[best](logits, teacher_logits[best], batch, sides[best])
    found = [
        function(logits, teacher, batch, side)
        for function, teacher, side in zip(functions, teacher_logits, sides, strict=True)
    ]
    return losses.sum_teachers(found, weights)


def logits_of(model: torch.nn.Module, side: dict[str, Any]) -> Tensor:
    """Run a model on its side of a batch."""
    found = model(input_ids=side["input_ids"], attention_mask=side["attention_mask"])
    logits: Tensor = found.logits
    return logits


def own_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of the next tokens."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def read_texts(paths: Sequence[Path]) -> list[Any]:
    """Return the samples of `.jsonl` files, and the paragraphs of others."""
    samples: list[Any] = []
    for path in paths:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            samples += [json.loads(line) for line in content.split("\n") if line.strip()]
        else:
            samples += [text for text in content.split("\n\n") if text.strip()]
    if paths and not samples:
        raise XtokError("there are no texts", hint="give --texts FILE, with something in it")
    return samples


def batches(count: int, options: argparse.Namespace, first: int) -> Iterator[list[int]]:
    """Go through the samples in an order that hangs on the seed and the step alone."""
    epoch, order = -1, []
    for step in range(first, options.steps):
        batch = []
        for place in range(step * options.batch_size, (step + 1) * options.batch_size):
            if place // count != epoch:
                epoch = place // count
                generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
                order = torch.randperm(count, generator=generator).tolist()
            batch.append(order[place % count])
        yield batch


@torch.no_grad()
def bits_per_byte(
    student: torch.nn.Module, samples: Sequence[Any], collate: DistillationCollator, batch_size: int
) -> float:
    """Return the student's cross-entropy on texts, in bits per byte of what it predicts."""
    student.eval()
    bits, num_bytes, device = 0.0, 0, next(student.parameters()).device
    lengths = torch.from_numpy(collate.student.table.lengths).to(device)
    for start in range(0, len(samples), batch_size):
        batch = prepare(collate(samples[start : start + batch_size]), device)
        targets = batch["targets"]
        bits += float(own_loss(logits_of(student, batch), targets)) / math.log(2)
        num_bytes += int(lengths[targets[targets >= 0]].sum())
    student.train()
    return bits / max(1, num_bytes)


def load_model(path: str, tokenizer: Tokenizer, *, from_scratch: bool = False) -> Any:
    """Load a causal language model in float32, or make one of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    width, needed = config.get_text_config().vocab_size, tokenizer.vocabulary.tokenizer_vocab_size
    if width < (needed or 0):
        what = f"{path} is {width} wide, and its tokenizer has {needed} ids"
        raise XtokError(what, hint="give the tokenizer of this model")
    if from_scratch:
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Return the rate of a step: a linear rise, then half a cosine down to a tenth."""
    if step < options.warmup:
        return float(options.learning_rate * (step + 1) / options.warmup)
    share = (step - options.warmup) / max(1, options.steps - options.warmup)
    return float(options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * share)))


def save_checkpoint(path: Path, step: int, parts: dict[str, Any]) -> None:
    """Write a checkpoint under another name and rename it, so that there is never half of one."""
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    state |= {"step": step, "random": torch.get_rng_state()}
    state["cuda_random"] = torch.cuda.get_rng_state_all()  # none without a GPU
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(path: Path, parts: dict[str, Any]) -> int:
    """Take up a checkpoint if there is one, and return the next step."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    torch.cuda.set_rng_state_all(state["cuda_random"])
    return int(state["step"])


def plot(log: Path) -> Path:
    """Draw a log's losses into a .png beside it, and return its path."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in ("cross_entropy", "distillation", "bits_per_byte"):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=name.replace("_", " "))
    axes.set_xlabel("step")
    axes.legend()
    figure.savefig(log.with_suffix(".png"), metadata={"Software": None})
    return log.with_suffix(".png")


def train(options: argparse.Namespace) -> None:
    """Train, from the last checkpoint on if there is one."""
    torch.manual_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.student_tokenizer or options.student)
    theirs = [load_tokenizer(name) for name in options.teacher_tokenizer or options.teacher]
    if options.teachers == "averaged-logits" and len({t.table.sha256() for t in theirs}) > 1:
        raise XtokError("averaged logits need one tokenizer", hint="give --teachers sum")
    collate = DistillationCollator(tokenizer, theirs, max_length=options.max_length)
    samples, held_out = read_texts(options.texts), read_texts(options.held_out)
    student = load_model(options.student, tokenizer, from_scratch=options.from_scratch)
    pairs = zip(options.teacher, theirs, strict=True)
    teachers = [load_model(*pair).to(options.device).eval() for pair in pairs]
    maps: list[Any] = [ProjectionModule(path, learnable=options.learn_map) for path in options.map]
    projections = torch.nn.ModuleList(maps).to(options.device)
    names = options.loss or ["p-kl"]
    names *= len(teachers) if len(names) == 1 else 1
    functions = [
        losses.make_loss(
            name, module=module, student=tokenizer, teacher=teacher, top_k=options.top_k,
            temperature=options.temperature, reverse_kl=options.reverse_kl,
        )
        for name, module, teacher in zip(names, maps or [None] * len(names), theirs, strict=True)
    ]  # fmt: skip
    trained = [p for part in (student.to(options.device), projections) for p in part.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=(0.9, 0.95))
    parts = {"student": student, "projections": projections, "optimizer": optimizer}
    first = load_checkpoint(options.output / "checkpoint.pt", parts)
    log = options.output / "log.jsonl"
    kept = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(kept[:first]), encoding="utf-8")
    combined = losses.CombineConfig(
        distillation_weight=options.distillation_weight,
        cross_entropy_weight=options.cross_entropy_weight,
        dynamic_scaling=options.dynamic_scaling,
    )
    order = list(batches(len(samples), options, first))
    data: Any = samples
    loader = DataLoader(
        data, batch_sampler=order, collate_fn=collate, num_workers=options.num_workers,
        generator=torch.Generator(),  # so that the loader draws nothing from the global one
    )  # fmt: skip
    student.train()
    for step, raw in enumerate(loader, start=first):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        batch = prepare(raw, options.device)
        kind = torch.device(options.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=options.autocast):
            logits = logits_of(student, batch)
            own = own_loss(logits, batch["targets"]) / (batch["targets"] >= 0).sum().clamp(min=1)
            kd = torch.zeros((), device=own.device)
            if teachers:
                sides = zip(teachers, batch["teachers"], strict=True)
                with torch.no_grad():
                    found = [logits_of(*pair) for pair in sides]
                kd = distillation(logits, found, batch, functions, options)
            loss = losses.combine(kd, own, combined) if teachers else own
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.step()
        line = {"step": step, "loss": loss, "cross_entropy": own, "distillation": kd, "norm": norm}
        line = {name: float(torch.as_tensor(value).detach()) for name, value in line.items()}
        last = step + 1 == options.steps
        if held_out and (last or (step + 1) % options.save_every == 0):
            line["bits_per_byte"] = bits_per_byte(student, held_out, collate, options.batch_size)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "step": step}) + "\n")
        if last or (step + 1) % options.save_every == 0:
            save_checkpoint(options.output / "checkpoint.pt", step + 1, parts)
    student.save_pretrained(options.output / "student")
    for number, projection in enumerate(maps if options.learn_map else ()):
        projection.to_map().save(options.output / f"map-{number}.safetensors")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, train, and plot."""
    parser = argparse.ArgumentParser(description="Distil teachers into a student.")
    add = parser.add_argument
    add("--student", required=True, help="folder or repo id of the student")
    add("--from-scratch", action="store_true", help="take only the student's configuration")
    add("--student-tokenizer", help="by default the student's own")
    add("--teacher", action="append", default=[], help="repeatable; none: cross-entropy alone")
    add("--teacher-tokenizer", action="append", help="one per teacher; by default its own")
    add("--teacher-weight", action="append", type=float, help="one per teacher")
    add("--teachers", choices=("sum", "averaged-logits", "selected"), default="sum")
    add("--map", action="append", type=Path, default=[], help="one per teacher")
    add("--learn-map", action="store_true", help="train the maps as well, and save them")
    add("--loss", action="append", choices=get_args(losses.LossName), help="one, or one a teacher")
    add("--texts", action="append", type=Path, required=True, help="repeatable")
    add("--held-out", action="append", type=Path, default=[], help="for bits per byte")
    add("--output", type=Path, required=True, help="folder of checkpoint, log and model")
    for name, kind, default in NUMBERS:
        add(f"--{name}", type=kind, default=default)
    for name in ("reverse-kl", "dynamic-scaling", "autocast", "plot"):
        add(f"--{name}", action="store_true")
    add("--device", default="cpu")
    options = parser.parse_args(argv)
    for name in ("teacher-tokenizer", "teacher-weight", "map", "loss"):
        given = len(getattr(options, name.replace("-", "_")) or options.teacher)
        if given != len(options.teacher) and (name, given) != ("loss", 1):
            parser.error(f"{given} of --{name} for {len(options.teacher)} of --teacher")
    train(options)
    if options.plot:
        print(plot(options.output / "log.jsonl"))
    print(options.output)


if __name__ == "__main__":
    main()
