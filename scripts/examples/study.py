"""What does a teacher with another tokenizer gain a student? Train one with each loss and compare.

    python scripts/fetch_models.py
    python scripts/examples/study.py --texts de.train.jsonl.gz --held-out de.valid.jsonl.gz \
        --forgotten en.valid.jsonl.gz --work runs/study --processes 2 --autocast

In each setting and for each seed, students read the same texts in the same order, with the same
learning rate: one with cross-entropy alone, the others with a loss of the teacher beside it. Choose
the first of `--rates` for cross-entropy alone; one seed shows it the others. The teacher reads each
text once: its logits are kept in half precision where the text is read again, else its last hidden
states; and its candidates, projected.

`results.jsonl` in the work folder has a line for each finished run: run the command again to
resume, or with `--report`, also while it runs, for a table of what is there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import distill
import numpy as np
import torch
from numpy.typing import NDArray

import xtok
from xtok.projecting.back_map import BACK_MAP
from xtok.stages.build import map_of_pair
from xtok.stages.events import events_of_pair
from xtok.threads import available_cores
from xtok.training.collator import IGNORED, DistillationCollator, StoredTopK, prepare
from xtok.training.losses import BatchLoss, make_loss
from xtok.training.projected import ProjectedTeacher

DATA = Path(__file__).resolve().parents[2] / "data" / "models"
CHARACTERS = 450  # of a text
SETTINGS = ("scarce", "plenty")  # scarce texts are read several times, plenty of them once
MEASUREMENTS = 8  # of a run, evenly
HELD_OUT, FORGOTTEN = 20, 8  # documents
PROJECTED = ("path-64", "map-64", "path-512")
COUNTED = ("text", "back", "event-text")  # artefacts of the training text; the others are shared
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}

# Losses with what they take: candidates projected along the path or through the map, or a file.
MAIN = (
    ("ce", "none"), ("topk-kl", "path-64"), ("event-kl", "bytes"), ("p-kl", "for-p-kl"),
    ("topk-kl", "map-64"), ("p-kl", "recipe"),
)  # fmt: skip
MORE = (
    ("topk-kl", "path-512"), ("p-kl", "text"),
    ("teacher-to-student-kl", "back"), ("gold", "for-gold"), ("event-kl", "event-text"),
)  # fmt: skip
STAGES = (
    ("scarce", MAIN, 1.0), ("plenty", MAIN[:3], 1.0), ("scarce", MORE, 1.0),
    ("plenty", MAIN[3:] + MORE, 1.0), ("scarce", MAIN[1:4], 0.3), ("plenty", MAIN[1:4], 0.3),
)  # fmt: skip


class Run(NamedTuple):
    """One student: the setting, its loss beside cross-entropy with an artefact and a weight."""

    setting: str
    loss: str
    artefact: str
    weight: float
    seed: int
    rate: float


ITSELF = Run("", "teacher", "none", 0.0, 0, 0.0)  # read, not trained


def plan(settings: Sequence[str], seeds: int, rates: Sequence[float]) -> Iterator[Run]:
    """Yield all runs, those first that the others are compared with."""
    for number, (setting, kinds, weight) in enumerate(STAGES):
        if setting in settings:
            for seed in range(seeds):
                for loss, artefact in kinds:
                    yield Run(setting, loss, artefact, weight, seed, rates[0])
            for rate in rates[1:] if number == 0 else ():
                yield Run(setting, *MAIN[0], weight, 0, rate)


def main() -> None:
    """Choose the rate, train what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    for name in ("texts", "held-out", "forgotten", "work"):
        add(f"--{name}", type=Path, required=True)
    for name, folder in (("student", "smollm2-135m"), ("teacher", "gemma3-270m")):
        add(f"--{name}", default=str(DATA / folder), help="default: %(default)s")
    add("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=100)
    what = "of learning: the first of all runs, the others of one with cross-entropy alone"
    add("--rates", type=float, nargs="+", default=(1e-4, 5e-5, 2e-5), help=what)
    add("--batch-size", type=int, default=4)
    add("--passes", type=int, default=10, help="over the scarce texts")
    add("--processes", type=int, default=1, help="runs at a time")
    add("--device", default="cpu")
    add("--autocast", action="store_true", help="bfloat16, where the processor has it")
    add("--report", action="store_true", help="only show the results so far")
    what = "the loss and the artefact that gains are counted from"
    add("--against", nargs=2, default=MAIN[0], metavar=("LOSS", "ARTEFACT"), help=what)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not args.report:
        train_all(args)
    report(results(args.work), *args.against)


def train_all(args: argparse.Namespace) -> None:
    """Train in order the runs without a result, the next seed prepared meanwhile."""
    threads = max(1, available_cores() // args.processes)
    spawn = multiprocessing.get_context("spawn")
    done = {run for run, _ in results(args.work)}
    missing = [run for run in plan(args.settings, args.seeds, args.rates) if run not in done]
    with spawn.Pool(args.processes, torch.set_num_threads, (threads,)) as pool:
        started = [] if ITSELF in done else [pool.apply_async(measure_teacher, (args,))]
        for _, group in groupby(missing, lambda run: folder_of(args, run)):
            runs = list(group)
            prepare_seed(args, runs[0], [run.artefact for run in runs])
            started += [pool.apply_async(train, (args, run)) for run in runs]
        for one in started:
            one.get()


def results(work: Path) -> list[tuple[Run, dict[str, Any]]]:
    """Return the finished runs."""
    path = work / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(Run(*line["run"]), line) for line in map(json.loads, lines)]


def texts_of(path: Path, seed: int, count: int, *, one_each: bool = False) -> list[str]:
    """Draw texts that begin and end with a line, or one of each document."""
    random = np.random.default_rng(seed)
    drawn: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            parts = cut(json.loads(line)["text"])
            drawn += [parts[random.integers(len(parts))]] if one_each and parts else parts
    return [drawn[i] for i in random.permutation(len(drawn))[:count].tolist()]


def cut(document: str) -> list[str]:
    """Return a document's texts; what is left at its end is no text."""
    parts, part = [], ""
    for line in document.splitlines(keepends=True):
        part += line[:CHARACTERS]
        if len(part) > CHARACTERS * 0.8:
            parts.append(part)
            part = ""
    return parts


@cache
def sides(student: str, teacher: str) -> xtok.Pair:
    """Return the pair."""
    return xtok.pair(student, teacher)


def folder_of(args: argparse.Namespace, run: Run) -> Path:
    """Return the folder of what the runs of a setting and a seed share."""
    folder: Path = args.work / f"{run.setting}.{run.seed}"
    return folder


def saved(args: argparse.Namespace, run: Run) -> Path:
    """Return the file of a run's map or event map, made if it is not there."""
    folder = folder_of(args, run) if run.artefact in COUNTED else args.work
    path: Path = folder / f"{run.artefact}.safetensors"
    if not path.exists():
        pair = sides(args.student, args.teacher)
        artefact(pair, run.artefact, folder_of(args, run) / "texts.jsonl").save(path)
    return path


def prepare_seed(args: argparse.Namespace, run: Run, artefacts: Sequence[str]) -> None:
    """Write what the runs of a seed take and is not there: texts, predictions, artefacts."""
    folder = folder_of(args, run)
    folder.mkdir(exist_ok=True)
    texts = folder / "texts.jsonl"
    if not texts.exists():
        count = args.steps * args.batch_size // (args.passes if run.setting == "scarce" else 1)
        drawn = texts_of(args.texts, run.seed, count)
        texts.write_text("".join(json.dumps({"text": x}) + "\n" for x in drawn), encoding="utf-8")
    taken = dict.fromkeys(x if x in PROJECTED else "teacher" for x in artefacts if x != "none")
    if missing := [name for name in taken if not (folder / f"{name}.pt").exists()]:
        read_once(args, run, missing)
    for name in {*artefacts} - {"none", *PROJECTED}:
        saved(args, run._replace(artefact=name))


def artefact(pair: xtok.Pair, name: str, texts: Path) -> Any:
    """Make a map or an event map; `text` is counted on the training text."""
    if name == "to-project":
        return map_of_pair(pair.reversed, BACK_MAP)
    if name in ("bytes", "event-text"):
        return events_of_pair(pair, texts=[texts] if name == "event-text" else [])
    if name == "recipe":
        return map_of_pair(pair, xtok.BuildConfig(scale_trick=False))
    if name == "back":
        config = xtok.BuildConfig.for_loss("p-kl", target="start")
        return map_of_pair(pair.reversed, config, texts=[texts])
    config = xtok.BuildConfig.for_loss("gold" if name == "for-gold" else "p-kl")
    return map_of_pair(pair, config, texts=[texts] if name == "text" else [])


@torch.no_grad()
def read_once(args: argparse.Namespace, run: Run, names: Sequence[str]) -> None:
    """Let the teacher read each text, after its own bos; keep what it said, or candidates."""
    pair = sides(args.student, args.teacher)
    model = distill.load_model(args.teacher, pair.tokenizers[1]).to(args.device).eval()
    collate = DistillationCollator(*pair.tokenizers, bos=False)
    begin = torch.tensor([pair.tables[1].roles.get("bos", ())[:1]], dtype=torch.long)
    folder = folder_of(args, run)
    back_map = xtok.ProjectionMap.load(saved(args, run._replace(artefact="to-project")))
    projectors = {
        name: ProjectedTeacher(
            pair, back_map, top_k=int(name.split("-")[1]), along_path=name.startswith("path")
        )
        for name in names
        if name != "teacher"
    }
    kept: dict[str, list[Any]] = {name: [] for name in names}
    for text in distill.read_texts([folder / "texts.jsonl"]):
        batch = collate([text])
        [side] = batch["teachers"]
        ids = torch.cat([begin, side["input_ids"]], 1).to(args.device)
        hidden = model.model(input_ids=ids).last_hidden_state[:, begin.shape[1] :]
        logits = model.get_output_embeddings()(hidden).cpu()
        if "teacher" in kept:
            kept["teacher"].append(logits[0].half() if run.setting == "scarce" else hidden[0].cpu())
        for name, projector in projectors.items():
            row = vars(projector(logits, batch, side))
            kept[name].append({key: value[0] for key, value in row.items()})
    for name, rows in kept.items():
        torch.save(rows, folder / f"{name}.tmp")
        (folder / f"{name}.tmp").replace(folder / f"{name}.pt")


class Teacher:
    """What a loss takes of the teacher on a batch: its logits, or stored candidates."""

    def __init__(self, args: argparse.Namespace, run: Run) -> None:
        folder = folder_of(args, run)
        self.rows: list[Any] = []
        self.head: Any = torch.nn.Identity()
        self.loss: BatchLoss | None = None
        name: Any = run.loss
        if name == "topk-kl":
            self.rows = torch.load(folder / f"{run.artefact}.pt")
            self.loss = make_loss(name)
        elif name != "ce":
            self.rows = torch.load(folder / "teacher.pt", mmap=True)
            if run.setting == "plenty":
                pair = sides(args.student, args.teacher)
                model = distill.load_model(args.teacher, pair.tokenizers[1])
                self.head = model.get_output_embeddings().to(args.device)
            module = distill.read_map(name, saved(args, run), learnable=False).to(args.device)
            self.loss = make_loss(name, module=module)

    def __call__(self, logits: Any, batch: dict[str, Any], chosen: Sequence[int]) -> Any:
        """Return the loss of the chosen texts' batch."""
        if self.loss is None:
            return logits.new_zeros(())
        [side] = batch["teachers"]
        rows = [self.rows[i] for i in chosen]
        if isinstance(rows[0], dict):
            stored = padded(rows, batch["labels"] != IGNORED)
            return self.loss(logits, None, batch, {**side, "stored": stored})
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            rows = [row.to(logits.device).float() for row in rows]
            theirs = self.head(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
        return self.loss(logits, theirs, batch, side)


def padded(rows: Sequence[dict[str, Any]], valid: Any) -> StoredTopK:
    """Return the candidates of texts as those of their batch."""
    width = max(row["top_ids"].shape[1] for row in rows)

    def joined(name: str, fill: float) -> Any:
        more = [width - row[name].shape[1] if row[name].ndim > 1 else 0 for row in rows]
        wide = [
            torch.nn.functional.pad(row[name], (0, n), value=fill) if n else row[name]
            for row, n in zip(rows, more, strict=True)
        ]
        stacked = torch.nn.utils.rnn.pad_sequence(wide, batch_first=True, padding_value=fill)
        return stacked.to(valid.device)

    return StoredTopK(
        top_ids=joined("top_ids", 0), top_logprobs=joined("top_logprobs", -math.inf),
        rest_logprob=joined("rest_logprob", -math.inf), valid=valid,
    )  # fmt: skip


def train(args: argparse.Namespace, run: Run) -> None:
    """Train one student; append its line: bits of each document after some steps."""
    torch.manual_seed(run.seed)
    pair = sides(args.student, args.teacher)
    collate = DistillationCollator(*pair.tokenizers, bos=False)
    texts = distill.read_texts([folder_of(args, run) / "texts.jsonl"])
    groups = unseen(args)
    model = distill.load_model(args.student, pair.tokenizers[0]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    teacher = Teacher(args, run)
    of_run = {"seed": run.seed, "learning_rate": run.rate, "warmup": 5}
    options = argparse.Namespace(**{**vars(args), **of_run})
    autocast = partial(
        torch.autocast, torch.device(args.device).type, torch.bfloat16, enabled=args.autocast
    )
    measured_at = sorted({args.steps * i // MEASUREMENTS for i in range(MEASUREMENTS + 1)})
    measured_at = measured_at[run.loss != "ce" :]  # all begin alike
    measured, seconds = [], []
    if 0 in measured_at:
        with autocast():
            measured.append([bits(model, group, collate) for group in groups])
    model.train()
    for step, chosen in enumerate(distill.batches(len(texts), options, 0), start=1):
        start = time.process_time() if args.device == "cpu" else time.perf_counter()
        batch = prepare(collate([texts[i] for i in chosen]), args.device)
        with autocast():
            logits = distill.logits_of(model, batch)
        own = distill.own_loss(logits, batch["targets"]) / (batch["targets"] >= 0).sum()
        loss = own + run.weight * teacher(logits, batch, chosen)
        for group in optimizer.param_groups:
            group["lr"] = distill.learning_rate(step - 1, options)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        end = time.process_time() if args.device == "cpu" else time.perf_counter()
        seconds.append(end - start)
        if step in measured_at:
            with autocast():
                measured.append([bits(model, group, collate) for group in groups])
    line = {"steps": measured_at, "bits": measured, "seconds": float(np.median(seconds))}
    write(args, run, line, groups)


def measure_teacher(args: argparse.Namespace) -> None:
    """Append the teacher's own line: what its student can hope to learn of it."""
    tokenizer = sides(args.student, args.teacher).tokenizers[1]
    model = distill.load_model(args.teacher, tokenizer).to(args.device)
    collate = DistillationCollator(tokenizer, tokenizer, bos=bool(tokenizer.table.roles.get("bos")))
    groups = unseen(args)
    with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.autocast):
        measured = [bits(model, group, collate) for group in groups]
    write(args, ITSELF, {"bits": [measured]}, groups)


def unseen(args: argparse.Namespace) -> list[list[str]]:
    """Return the held-out texts, and those that the student may forget."""
    counts = ((args.held_out, HELD_OUT), (args.forgotten, FORGOTTEN))
    return [texts_of(path, 0, count, one_each=True) for path, count in counts]


def write(
    args: argparse.Namespace, run: Run, line: dict[str, Any], groups: Sequence[Sequence[str]]
) -> None:
    """Append a run's line to the results, with the lengths of the texts that it measured."""
    lengths = [[len(text.encode()) for text in group] for group in groups]
    line = {"run": run, **line, "bytes": lengths}
    with (args.work / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")  # one write, so that lines of two runs do not mix
    print(*run, *(f"{x:.4f}" for x in totals(line)), flush=True)


@torch.no_grad()
def bits(model: Any, texts: Sequence[str], collate: DistillationCollator) -> list[float]:
    """Return the bits of each text, but for its first token."""
    model.eval()
    device = next(model.parameters()).device
    found = []
    for text in texts:
        batch = prepare(collate([text]), device)
        if collate.bos:
            batch["targets"][:, 0] = IGNORED
        own = distill.own_loss(distill.logits_of(model, batch), batch["targets"])
        found.append(float(own) / math.log(2))
    model.train()
    return found


def totals(line: dict[str, Any], group: int = 0) -> list[float]:
    """Return a run's bits per byte after each measured number of steps."""
    return [sum(row[group]) / sum(line["bytes"][group]) for row in line["bits"]]


def report(found: Sequence[tuple[Run, dict[str, Any]]], loss: str, artefact: str) -> None:
    """Print a table for each setting, with what each loss gains over one of its seeds.

    ± is half of a 95 % interval over seeds (Student's t), brackets are one over documents
    (bootstrap), of the mean over seeds.
    """
    lines = dict(found)
    start = math.nan  # all students begin alike, and cross-entropy alone measures it
    for run, line in found:
        if run == ITSELF:
            print(f"the teacher itself: {totals(line)[0]:.3f}, {totals(line, 1)[0]:.3f}")
        elif run.loss == "ce":
            start = totals(line, 1)[0]
            print(run.setting, f"rate {run.rate:g} seed {run.seed}",
                  " ".join(f"{x:.3f}" for x in totals(line)))  # fmt: skip
    kinds = dict.fromkeys(run._replace(seed=0) for run in lines)
    for setting in SETTINGS:
        print(f"\n| {setting}: loss | artefact | weight | seeds | at best | at the end | "
              "gain at best | over documents | gain at the end | over documents | "
              "forgotten | seconds |\n" + "|---" * 12 + "|")  # fmt: skip
        for kind in kinds:
            runs = [run for run in lines if run._replace(seed=0) == kind]
            base = [run._replace(loss=loss, artefact=artefact, weight=1.0) for run in runs]
            if kind.setting != setting or any(run not in lines for run in base):
                continue
            row = [lines[run] for run in runs]
            of = [lines[run] for run in base]
            gains = [gain(row, of, at_end=end) for end in (False, True)]
            shown = [
                kind.loss, kind.artefact, f"{kind.weight:g}", str(len(runs)),
                mean([min(totals(x)) for x in row]), mean([totals(x)[-1] for x in row]),
                *(text for pair in gains for text in pair),
                mean([totals(x, 1)[-1] - start for x in row]),
                f"{np.median([x['seconds'] for x in row]):.2f}",
            ]  # fmt: skip
            print(f"| {' | '.join(shown)} |" + f" rate {kind.rate:g}")


def gain(
    row: Sequence[dict[str, Any]], of: Sequence[dict[str, Any]], *, at_end: bool
) -> tuple[str, str]:
    """Return the bits per byte that runs save against others of their seeds, with intervals."""

    def documents(line: dict[str, Any]) -> NDArray[np.float64]:
        at = -1 if at_end else int(np.argmin(totals(line)))
        return np.array(line["bits"][at][0])

    lengths = np.array(row[0]["bytes"][0])
    saved = np.array([documents(b) - documents(a) for a, b in zip(row, of, strict=True)])
    random = np.random.default_rng(0)
    drawn = random.integers(len(lengths), size=(2000, len(lengths)))
    means = saved.mean(0)[drawn].sum(1) / lengths[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return mean((saved.sum(1) / lengths.sum()).tolist()), f"{low:.3f} to {high:.3f}"


def mean(values: Sequence[float]) -> str:
    """Return a mean, with half of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T_95[min(len(values), 8)] * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
