"""Train a student on texts and on teachers with other tokenizers, in plain PyTorch.

    python scripts/examples/distill.py --student models/student --teacher models/teacher \
        --map events.safetensors --loss event-kl --texts corpus.jsonl --output runs/teacher

Models are Hugging Face folders or repo ids. Texts are JSON, JSON Lines or Parquet files, with
`text` or `messages` in each row (and optionally `teacher_context` or `teacher_messages`), or plain
text files with one text per paragraph. Runs on a CPU, or on one GPU with `--device cuda
--autocast`. Run the same command again to resume from the last checkpoint; the result equals that
of an uninterrupted run. `log.jsonl` contains one line per step; the student is saved to
`OUTPUT/student`. Progress is printed to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from xtok import ProjectionModule, Tokenizer, XtokError, load_tokenizer, read_samples
from xtok.training import (
    Batch,
    DistillationCollator,
    Head,
    LossTerms,
    Objective,
    audit,
    find_heads,
    logits_of,
    losses,
    make_objective,
    prepare,
    router_loss,
    run,
)

NUMBERS: dict[str, Any] = {
    "steps": 1000, "batch-size": 8, "max-length": 512, "learning-rate": 3e-4, "warmup": 20,
    "embeddings-first": 0,
    "clip": 1.0, "seed": 0, "save-every": 100, "measure-every": 100, "num-workers": 0,
    "temperature": 1.0, "distillation-weight": 1.0, "cross-entropy-weight": 1.0,
}  # fmt: skip
AT_LEAST_1 = {"batch-size", "max-length", "save-every", "measure-every"}


def losses_of(
    student: Any,
    teachers: Sequence[Any],
    heads: Sequence[Head | None],
    batch: Batch,
    objective: Objective,
    how: str,
) -> LossTerms:
    """Run the models; return the loss of a batch and its terms."""
    outputs, sides = run(student, batch, heads[0]), batch["teachers"]
    with torch.no_grad():
        theirs: list[Any] = [
            logits_of(*teacher_inputs)
            for teacher_inputs in zip(teachers, sides, heads[1:], strict=True)
        ]
    if how == "averaged-logits":
        theirs = [averaged_logits(theirs, objective.teacher_weights or [1.0] * len(theirs))]
        objective = replace(objective, losses=objective.losses[:1], teacher_weights=None)
        sides = sides[:1]
    router = router_loss(student, outputs)
    return objective.terms(outputs.logits, theirs, {**batch, "teachers": sides}, router=router)


def averaged_logits(teacher_logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of logits of one tokenizer, cut to the narrowest width."""
    if sum(weights) <= 0:
        raise XtokError("the teachers' weights are all 0", hint="give a --teacher-weight above 0")
    width = min(logits.shape[-1] for logits in teacher_logits)
    mean = torch.zeros((), device=teacher_logits[0].device)
    for logits, weight in zip(teacher_logits, weights, strict=True):
        if weight > 0:  # 0 · −∞ is no number
            mean = mean + logits[..., :width].float() * (weight / sum(weights))
    return mean


def read_texts(paths: Sequence[Path]) -> list[Any]:
    """Return the rows of data files and the paragraphs of plain text files."""
    samples = [sample for _, sample in read_samples(paths)]
    if paths and not samples:
        raise XtokError(
            "the files contain no texts", hint="give --texts FILE with at least one text"
        )
    return samples


def batches(count: int, options: argparse.Namespace, first: int) -> Iterator[list[int]]:
    """Yield the indices of each step's samples, which depend on seed and step only."""
    epoch, order = -1, []
    for step in range(first, options.steps):
        batch = []
        for index in range(step * options.batch_size, (step + 1) * options.batch_size):
            if index // count != epoch:
                epoch = index // count
                generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
                order = torch.randperm(count, generator=generator).tolist()
            batch.append(order[index % count])
        yield batch


@torch.no_grad()
def bits_per_byte(
    student: torch.nn.Module,
    samples: Sequence[Any],
    collate: DistillationCollator,
    batch_size: int,
    head: Head | None = None,
) -> float:
    """Return the student's cross-entropy on texts, in bits per predicted byte."""
    student.eval()
    bits, num_bytes, device = 0.0, 0, next(student.parameters()).device
    for start in range(0, len(samples), batch_size):
        batch = prepare(collate(samples[start : start + batch_size]), device)
        targets = batch["targets"]
        mean = losses.cross_entropy(logits_of(student, batch, head), targets)
        bits += float(mean * (targets >= 0).sum()) / math.log(2)
        num_bytes += int(collate.target_bytes(0, batch).sum())
    student.train()
    return bits / max(1, num_bytes)


def load_model(path: str, tokenizer: Tokenizer, *, from_scratch: bool = False) -> Any:
    """Load a causal language model in float32, or initialize one from its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    width, needed = config.get_text_config().vocab_size, tokenizer.vocabulary.tokenizer_vocab_size
    if width < (needed or 0):
        problem = f"{path} has {width} rows, but its tokenizer has {needed} ids"
        raise XtokError(problem, hint="give the tokenizer of this model")
    if from_scratch:
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def config_of(loss: losses.LossName, options: argparse.Namespace) -> Any:
    """Return the options of a loss."""
    kind = losses.LOSSES[loss].config
    given = {"temperature": options.temperature, "reverse_kl": options.reverse_kl}
    if options.top_k is not None and hasattr(kind, "top_k"):
        given["top_k"] = options.top_k
    return kind(**given)


def objective_of(
    pairs: Sequence[Any], options: argparse.Namespace
) -> tuple[Objective, list[ProjectionModule]]:
    """Return the objective, and with --learn-map the maps to train."""
    maps = iter(options.map)
    objective = make_objective(
        pairs,
        options.loss,
        [next(maps) if losses.LOSSES[name].map else None for name in options.loss],
        config=[config_of(name, options) for name in options.loss],
        teacher_weights=options.teacher_weight,
        combine=losses.CombineConfig(
            distillation_weight=options.distillation_weight,
            cross_entropy_weight=options.cross_entropy_weight,
            dynamic_scaling=options.dynamic_scaling,
        ),
        device=options.device,
    )
    if not options.learn_map:
        return objective, []
    # `make_objective` has checked that each map belongs to its pair. It only accepts fixed maps.
    learned = [ProjectionModule(path, learnable=True).to(options.device) for path in options.map]
    config = config_of("p-kl", options)
    p_kl = [losses.make_loss("p-kl", map=module, config=config) for module in learned]
    return replace(objective, losses=p_kl), learned


def heads_of(
    models: Sequence[Any], objective: Objective, collate: DistillationCollator,
    samples: Sequence[Any], options: argparse.Namespace,
) -> list[Head | None]:  # fmt: skip
    """Return the heads of the models that run from hidden states, and None for the others.

    Also compares some samples with the models' own libraries.
    """
    batch = prepare(collate(samples), options.device)
    student, *per_teacher = objective.hidden_support
    takes = [student, *(takes and options.teachers == "sum" for takes in per_teacher)]
    wanted = False if options.logits else None
    with autocast(options):
        heads, notes = find_heads(models, [batch, *batch["teachers"]], takes, wanted)
        if not options.no_audit:
            audit.audit(models, batch, collate, heads).report()
    if options.autocast and options.device == "cpu" and not fast_in_bfloat16():
        notes.append("this CPU has no bfloat16 instructions: remove --autocast to train faster")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return heads


def autocast(options: argparse.Namespace) -> torch.autocast:
    """Return the context of the models: bfloat16 with --autocast."""
    kind = torch.device(options.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=options.autocast)


def fast_in_bfloat16() -> bool:
    """Whether the CPU has bfloat16 instructions; others convert each number twice."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # of newer versions of PyTorch
    known = ("amx_bf16", "avx512_bf16", "bf16")
    return capabilities is None or any(capabilities().get(name) for name in known)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Return the rate of a step: linear warm-up, then cosine decay to a tenth."""
    if step < options.warmup:
        return float(options.learning_rate * (step + 1) / options.warmup)
    share = (step - options.warmup) / max(1, options.steps - options.warmup)
    return float(options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * share)))


def embeddings_first(model: Any, step: int, num_steps: int) -> None:
    """In the first steps, train only the input embeddings and the head."""
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    outer = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for parameter in model.parameters() if num_steps else ():
        parameter.requires_grad_(step >= num_steps or id(parameter) in outer)


def save_checkpoint(path: Path, step: int, parts: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    random = {"random": torch.get_rng_state(), "cuda_random": torch.cuda.get_rng_state_all()}
    torch.save({**state, **random, "step": step}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(path: Path, parts: dict[str, Any]) -> int:
    """Restore a checkpoint, if one exists; return the next step."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    torch.cuda.set_rng_state_all(state["cuda_random"])
    return int(state["step"])


def read_log(output: Path) -> list[dict[str, float]]:
    """Return the lines of a run's log."""
    log = output / "log.jsonl"
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def measured(lines: Sequence[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Return the steps at which held-out text was measured, and its bits per byte."""
    before = [(0.0, line["bits_before"]) for line in lines[:1] if "bits_before" in line]
    found = [(x["step"] + 1, x["bits_per_byte"]) for x in lines if "bits_per_byte" in x]
    return [step for step, _ in before + found], [bits for _, bits in before + found]


def plot(output: Path, others: Sequence[Path]) -> Path:
    """Plot the losses of a run, and the held-out bits per byte of several; return the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines = read_log(output)
    for name in ("cross_entropy", "distillation"):
        left.plot([line["step"] + 1 for line in lines], [line[name] for line in lines], label=name)
    left.set_title(f"{output.name}: losses on the training texts", fontsize="medium")
    for folder in (output, *others):
        right.plot(*measured(read_log(folder)), marker="o", label=folder.name)
    right.set_title("bits per byte of held-out text", fontsize="medium")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(output / "log.png", metadata={"Software": None})
    return output / "log.png"


def say(line: dict[str, Any], options: argparse.Namespace, seconds: float) -> None:
    """Print the losses of a step to stderr: each measured step, and about twenty per run."""
    step = line["step"] + 1
    names = {"cross_entropy": "cross-entropy", "distillation": "distillation"}
    words = [f"{shown} {line[name]:.3f}" for name, shown in names.items() if line[name]]
    if "bits_per_byte" in line:
        words.append(f"held-out {line['bits_per_byte']:.3f} bits per byte")
    elif step % max(1, options.steps // 20):
        return
    text = f"step {step} of {options.steps}: {', '.join(words)}; {seconds:.1f} s a step"
    print(text, file=sys.stderr, flush=True)


def train(options: argparse.Namespace) -> None:
    """Train, from the last checkpoint if one exists."""
    torch.manual_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(options.student_tokenizer or options.student)
    theirs = [load_tokenizer(name) for name in options.teacher_tokenizer or options.teacher]
    read_alike = {(t.table.sha256(), t.chat_templates.get("default")) for t in theirs}
    if options.teachers == "averaged-logits" and len(read_alike) > 1:
        problem = "--teachers averaged-logits requires one tokenizer and one chat template"
        raise XtokError(problem, hint="use --teachers sum")
    collate = DistillationCollator(
        tokenizer,
        theirs,
        student_template=options.student_chat_template,
        teacher_templates=options.teacher_chat_template,
        max_length=options.max_length,
    )
    samples, held_out = read_texts(options.texts), read_texts(options.held_out)
    student = load_model(options.student, tokenizer, from_scratch=options.from_scratch)
    pairs = zip(options.teacher, theirs, strict=True)
    teachers = [load_model(*pair).to(options.device).eval() for pair in pairs]
    objective, learned = objective_of(collate.pairs, options)
    projections = torch.nn.ModuleList(learned)
    trained = [*student.to(options.device).parameters(), *projections.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=(0.9, 0.95))
    parts = {"student": student, "projections": projections, "optimizer": optimizer}
    checkpoint, log = options.output / "checkpoint.pt", options.output / "log.jsonl"
    first = load_checkpoint(checkpoint, parts)
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(lines[:first]), encoding="utf-8")
    heads = heads_of(
        [student, *teachers], objective, collate, samples[: options.batch_size], options
    )
    data: Any = samples
    loader = DataLoader(
        data, batch_sampler=list(batches(len(samples), options, first)), collate_fn=collate,
        num_workers=options.num_workers,
        generator=torch.Generator(),  # so that the loader draws nothing from the global one
    )  # fmt: skip
    student.train()
    before = {}
    if held_out and not first:
        before["bits_before"] = bits_per_byte(
            student, held_out, collate, options.batch_size, heads[0]
        )
        bits = f"before training: held-out {before['bits_before']:.3f} bits per byte"
        print(bits, file=sys.stderr, flush=True)
    seconds, started = 0.0, time.monotonic()
    for step, raw in enumerate(loader, start=first):
        embeddings_first(student, step, options.embeddings_first)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        batch = prepare(raw, options.device)
        with autocast(options):
            terms = losses_of(student, teachers, heads, batch, objective, options.teachers)
        optimizer.zero_grad(set_to_none=True)
        terms.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.step()
        values = {**terms._asdict(), "norm": norm}
        line = {"step": step, **{name: float(value.detach()) for name, value in values.items()}}
        seconds += time.monotonic() - started
        last = step + 1 == options.steps
        if held_out and (last or (step + 1) % options.measure_every == 0):
            line["bits_per_byte"] = bits_per_byte(
                student, held_out, collate, options.batch_size, heads[0]
            )
        say(line, options, seconds / (step + 1 - first))
        if step == 0:
            line |= before
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if last or (step + 1) % options.save_every == 0:
            save_checkpoint(checkpoint, step + 1, parts)
        started = time.monotonic()
    student.save_pretrained(options.output / "student")
    if tokenizer.library is None:
        name = options.student_tokenizer or options.student
        print(f"note: the student is saved without a tokenizer; use {name}", file=sys.stderr)
    else:
        tokenizer.library.save_pretrained(options.output / "student")
    for number, projection in enumerate(learned):
        projection.to_map().save(options.output / f"map-{number}.safetensors")


def number(kind: type[Any], minimum: float = 0) -> Callable[[str], Any]:
    """Return a function that parses a number, and reports a number below the minimum."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value >= minimum:  # also true for NaN
            raise argparse.ArgumentTypeError(f"{text}, expected at least {minimum}")
        return value

    parse.__name__ = kind.__name__  # argparse prints this name: invalid int value: 'x'
    return parse


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check options that depend on other options; an error names them."""
    for name in ("teacher-tokenizer", "teacher-chat-template", "teacher-weight", "loss"):
        count = len(getattr(options, name.replace("-", "_")) or options.teacher)
        if count != len(options.teacher):
            parser.error(f"{count} of --{name} for {len(options.teacher)} of --teacher")
    if options.learn_map and {*options.loss} != {"p-kl"}:
        parser.error("--learn-map requires --loss p-kl")
    mapped = [name for name in options.loss if losses.LOSSES[name].map]
    if mapped and not options.map:
        kind: Any = losses.LOSSES[mapped[0]].map
        parser.error(f"--loss {mapped[0]} requires {kind.name}: give it as --map")
    if len(options.map) != len(mapped):
        parser.error(f"{len(options.map)} of --map, but {len(mapped)} of the losses use a map")
    try:
        for name in options.loss:
            config_of(name, options)
    except ValueError as error:
        parser.error(str(error))


def check_machine(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check options that depend on the machine: the device, packages and files."""
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if missing := [run for run in options.plot or () if not (run / "log.jsonl").exists()]:
        parser.error(f"--plot {missing[0]}: this folder contains no log.jsonl")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch without CUDA
        parser.error(f"--device {options.device}: {str(error).splitlines()[0]}")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, train, and plot."""
    parser = argparse.ArgumentParser(description="Distil teachers into a student.")
    add = parser.add_argument
    add("--student", required=True, help="folder or repo id of the student")
    add("--from-scratch", action="store_true", help="use only the student's configuration")
    add("--student-tokenizer", help="default: the student's own")
    add("--teacher", action="append", default=[], help="repeatable; none: text alone")
    add("--teacher-tokenizer", action="append", help="one per teacher; default: its own")
    add("--student-chat-template", help="Jinja file or format name; default: the student's own")
    help_text = "Jinja file or format name, one per teacher; default: its own"
    add("--teacher-chat-template", action="append", help=help_text)
    add("--teacher-weight", action="append", type=number(float), help="one per teacher")
    add("--teachers", choices=("sum", "averaged-logits"), default="sum")
    add(
        "--map",
        action="append",
        type=Path,
        default=[],
        help="one per loss that uses a map, in the order of the teachers",
    )
    add("--learn-map", action="store_true", help="also train the maps of p-kl, and save them")
    of_models = [name for name, row in losses.LOSSES.items() if not row.is_stored]
    add(
        "--loss", action="append", choices=of_models, type=lambda name: name.replace("_", "-"),
        help="one, or one per teacher; default: event-kl",
    )  # fmt: skip
    add("--texts", action="append", type=Path, required=True, help="repeatable")
    add("--held-out", action="append", type=Path, default=[], help="texts for bits per byte")
    add("--output", type=Path, required=True, help="folder for checkpoint, log and model")
    add("--top-k", type=int, help="teacher tokens in p-kl and same-tokenizer")
    # `embeddings-first`: steps that train only the embeddings and the head, for a model of
    # `xtok transplant`.
    for name, default in NUMBERS.items():
        parse = number(type(default), minimum=1 if name in AT_LEAST_1 else 0)
        add(f"--{name}", type=parse, default=default, help="default: %(default)s")
    for name in ("reverse-kl", "dynamic-scaling", "autocast"):
        add(f"--{name}", action="store_true")
    add("--no-audit", action="store_true", help="skip the check of the first batch")
    add("--logits", action="store_true", help="use whole logits instead of hidden states")
    help_text = "draw OUTPUT/log.png, with the held-out curves of other runs"
    add("--plot", type=Path, nargs="*", metavar="RUN", help=help_text)
    add("--device", default="cpu")
    options = parser.parse_args(argv)
    options.loss = options.loss or ["event-kl"]
    options.loss *= len(options.teacher) if len(options.loss) == 1 else 1
    check_options(parser, options)
    check_machine(parser, options)
    train(options)
    if options.plot is not None:
        print(plot(options.output, options.plot))
    print(options.output)


def program() -> None:
    """Run `main`. An `XtokError` becomes two lines; other exceptions keep their traceback."""
    try:
        main()
    except XtokError as error:
        options = {"student_template": "student-chat-template"}
        options["teacher_templates"] = "teacher-chat-template"
        hint = error.hint_with(f"--{options.get(error.parameter, error.parameter)}")
        sys.exit(f"error: {error.message}\nhint: {hint}")


if __name__ == "__main__":
    program()
