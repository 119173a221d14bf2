"""Measure the gain from a teacher with another tokenizer: train a student with each loss.

    python scripts/fetch_models.py
    python scripts/examples/study.py --texts de.train.jsonl.gz --held-out de.valid.jsonl.gz \
        --forgotten en.valid.jsonl.gz --work runs/study --processes 2 --autocast

In each setting and for each seed, all students read the same texts in the same order, with the same
learning rate: one with cross-entropy alone, the others with an additional loss from a teacher. The
first of `--rates` is used for all runs; one seed of cross-entropy alone also runs with the others.
A teacher reads each text once. Its logits are stored in half precision if the text is repeated,
otherwise its last hidden states; its candidates are stored projected.

`--settings healing` uses another student and other texts: first cut the student with `prune.py
data/models/smollm2-135m data/models/smollm2-135m-pruned`, and pass English texts and a separate
`--work`. `--settings reversed` trains a student with longer tokens: `prune.py
data/models/gemma3-270m data/models/gemma3-270m-pruned --layers 0 1 5 9 13 17`. `--settings policy`
trains a healed student (stored with `--save`) on its own text: pass it as `--student`, with
`--seeds 1` and `--steps 50`.

`results.jsonl` in the work folder contains one line per finished run. Run the command again to
resume, or with `--report` for a table of the finished runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import distill
import numpy as np
import torch
from numpy.typing import NDArray
from study_data import (
    ON_POLICY,
    OWN,
    REVERSE,
    STRICT,
    WRITTEN,
    Run,
    Teacher,
    autocast,
    before,
    collator,
    folder_of,
    prepare_seed,
    rows_of,
    seconds,
    sides,
    texts_read,
)
from study_policy import OnPolicy

from xtok._lib.threads import available_cores
from xtok.training import (
    IGNORED,
    DistillationCollator,
    find_heads,
    logits_of,
    losses,
    prepare,
)

DATA = Path(__file__).resolve().parents[2] / "data" / "models"
MEASUREMENTS = 8  # of a run, evenly
HELD_OUT, FORGOTTEN = 20, 8  # documents
Texts = Callable[[dict[str, Any]], NDArray[np.float64]]  # the bits of a run's texts
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}


class Setting(NamedTuple):
    """The student, the learning rates (the first for all runs) and the teachers of a setting."""

    student: str
    rates: tuple[float, ...]
    teacher: str = "gemma3-270m"
    own_teacher: str = "smollm2-135m"  # with the student's tokenizer


SETTINGS = {
    "scarce": Setting("smollm2-135m", (1e-4, 5e-5, 2e-5)),  # texts are read several times
    "plenty": Setting("smollm2-135m", (1e-4, 5e-5, 2e-5)),  # once
    "healing": Setting("smollm2-135m-pruned", (2e-3, 1e-3, 5e-4)),  # once
    "reversed": Setting(
        "gemma3-270m-pruned", (5e-4, 1e-3, 2.5e-4), "smollm2-135m", "gemma3-270m"
    ),  # once
    "policy": Setting("smollm2-135m-healed", (1e-4, 2e-4, 5e-5)),  # once, other texts than before
}


class Row(NamedTuple):
    """A kind of student: distillation loss, artefact, both weights, number of steps."""

    loss: str
    artefact: str = "none"  # a map or events, how a teacher's candidates are projected, a teacher
    weight: float = 1.0
    text: float = 1.0  # of cross-entropy
    length: float = 1.0  # of the run, in `--steps`
    reads: int = 0  # characters before each text
    how: str = ""  # a way of the loss


CE = Row("ce")
EVENTS, STORED = Row("event-kl", "bytes"), Row("topk-kl", "path-64")
BY_MAP = Row("topk-kl", "map-64")  # not along the path
MADE_FOR, RECIPE = Row("p-kl", "for-p-kl"), Row("p-kl", "recipe")
DAMAGED = (Row("p-kl", "damaged-0.1"), Row("p-kl", "damaged-1.0"))  # shares of the rows
MORE = (
    Row("topk-kl", "path-512"), Row("p-kl", "text"), Row("gold", "for-gold"),
)  # fmt: skip
CSD, OF_OWN = Row("csd", "spellings"), Row("same-tokenizer", OWN)
COMPLETED = (CSD, Row("alm"), Row("alm", "root-100"))
LIGHT_ALM = tuple(
    Row("alm", how, weight)
    for how in ("none", "root-100", "words")
    for weight in (0.1, 0.01)
)  # fmt: skip
SMOOTHED = Row("label-smoothing", weight=0.1)
# Runs of equal time: text alone, event KL, stored candidates.
LONGER = tuple(
    row._replace(length=length)
    for row, lengths in ((CE, (1.9, 3.6)), (EVENTS, (1.9,)), (STORED, (1.6, 3.0)))
    for length in lengths
)
TUNED = (EVENTS, CSD, OF_OWN, MADE_FOR)  # also with the other rates
BOTH_ENDS = Row("event-kl+csd", "bytes+spellings")  # of chunks: the first token, and the last
LIGHTER = tuple(row._replace(weight=0.3) for row in (STORED, EVENTS, MADE_FOR))
# A teacher, and a student, with the preceding text as context.
INFORMED = (*(row._replace(reads=1000) for row in (EVENTS, STORED)), CE._replace(reads=1000))
READINGS = tuple(EVENTS._replace(reads=reads) for reads in (300, 3000))
# Shared positions alone: chunks of one token on either side.
STRICT_ROWS = tuple(
    row._replace(how=how)
    for how in (STRICT, f"{STRICT}, {REVERSE}", REVERSE)
    for row in (EVENTS, CSD)
)
WRITES = tuple(
    row._replace(how=", ".join((ON_POLICY, *how)))
    for how in ((), (STRICT,), (REVERSE,), (STRICT, REVERSE))
    for row in (EVENTS, CSD)
)
STAGES: tuple[tuple[str, Sequence[Row]], ...] = (
    ("healing", (CE, EVENTS, STORED, *INFORMED)),
    ("scarce", (CE, EVENTS, STORED, *INFORMED)),
    ("healing", (CSD, *STRICT_ROWS)),
    ("healing", (CE, EVENTS, OF_OWN, *COMPLETED, STORED, MADE_FOR)),
    ("reversed", (CE, EVENTS, OF_OWN, CSD, STORED, BY_MAP, Row("topk-kl", "first-64"), MADE_FOR)),
    ("scarce", (CE, STORED, EVENTS, MADE_FOR, BY_MAP, RECIPE)),
    ("plenty", (CE, STORED, EVENTS)),
    ("healing", LONGER),
    ("healing", LIGHT_ALM),
    ("healing", (SMOOTHED, Row("event-kl", "exchanged"), CE._replace(text=2.0))),
    ("healing", (BOTH_ENDS, *DAMAGED, RECIPE, Row("p-kl", "text"))),
    (
        "healing",
        [row._replace(weight=w) for row in (EVENTS, STORED) for w in (0.3, 3.0)]
        + [EVENTS._replace(text=0.0), Row("gold", "for-gold")],
    ),
    ("scarce", (OF_OWN, SMOOTHED, Row("ce", WRITTEN))),
    ("scarce", MORE),
    ("plenty", (MADE_FOR, BY_MAP, RECIPE, *MORE)),
    ("scarce", LIGHTER),
    ("plenty", LIGHTER),
    ("policy", (CE, EVENTS, *WRITES)),
)

ITSELF = Run("", "teacher", "none", 0.0, 0.0, 0, 0.0)  # read, not trained
ITSELF_AFTER = tuple(ITSELF._replace(reads=reads) for reads in (0, 300, 1000, 3000))
ITS_OWN = ITSELF._replace(artefact=OWN)  # the teacher with the student's tokenizer


def plan(settings: Sequence[str], seeds: int, rates: Sequence[float] = ()) -> Iterator[Run]:
    """Yield all runs, those first that the others are compared with."""
    begun = set()
    for setting, rows in STAGES:
        if setting in settings:
            first, *others = rates or SETTINGS[setting].rates
            for seed in range(seeds):
                for row in rows:
                    yield run_of(setting, row, seed, first)
            if setting not in begun:
                yield from (run_of(setting, CE, 0, rate) for rate in others)
            begun.add(setting)
    if "healing" in settings:
        first, *others = rates or SETTINGS["healing"].rates
        yield from (run_of("healing", row, 0, first) for row in READINGS)
        for rate in others:
            yield from (run_of("healing", row, 0, rate) for row in TUNED)


def run_of(setting: str, row: Row, seed: int, rate: float) -> Run:
    """Return the run of a row."""
    return Run(setting, *row[:4], seed, rate, *row[4:])


def main(argv: Sequence[str] | None = None) -> None:
    """Train the missing runs, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    for name in ("texts", "held-out", "forgotten", "work"):
        add(f"--{name}", type=Path, required=True)
    add("--settings", nargs="+", choices=SETTINGS, default=("scarce", "plenty"))
    add("--student", help="default: the setting's student")
    add("--teacher", help="default: the setting's")
    add("--own-teacher", help="control with the student's tokenizer; default: the setting's")
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=100)
    note = "learning rates: the first for all runs, the others for cross-entropy alone"
    add("--rates", type=float, nargs="+", default=(), help=note)
    add("--batch-size", type=int, default=4)
    add("--passes", type=int, default=10, help="passes over the scarce texts")
    note = "number of texts to repeat (default: each once, scarce texts --passes times)"
    add("--count", type=int, help=note)
    add("--processes", type=int, default=1, help="number of parallel runs")
    add("--device", default="cpu")
    add("--autocast", action="store_true", help="bfloat16, if the processor supports it")
    add("--save", action="store_true", help="save the students of the first seed, in bfloat16")
    add("--report", action="store_true", help="only print the results so far")
    add("--plot", type=Path, help="plot runs over seconds into this .png or .svg file")
    note = "reference loss and artefact of the gains"
    add("--against", nargs=2, default=CE[:2], metavar=("LOSS", "ARTEFACT"), help=note)
    args = parser.parse_args(argv)
    models = {
        (of.student, of.teacher, of.own_teacher) for of in map(SETTINGS.__getitem__, args.settings)
    }
    if len(models) > 1:
        which = "healing, reversed and policy"
        parser.error(f"{which} have other students: a command and a --work for each")
    for name, model in zip(("student", "teacher", "own_teacher"), models.pop(), strict=True):
        setattr(args, name, getattr(args, name) or str(DATA / model))
    args.work.mkdir(parents=True, exist_ok=True)
    if not args.report:
        train_all(args, list(dict.fromkeys(plan(args.settings, args.seeds, args.rates))))
    found = results(args.work)
    report(found, *args.against)
    report_seconds(dict(found), *args.against)
    report_rates(dict(found), *args.against)
    if args.plot:
        plot(found, args.plot)


def train_all(args: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Train in order the runs without a result, the next seed prepared meanwhile."""
    threads = max(1, available_cores() // args.processes)
    spawn = multiprocessing.get_context("spawn")
    done = {run for run, _ in results(args.work)}
    with spawn.Pool(args.processes, torch.set_num_threads, (threads,)) as pool:
        read = [which for which in (*ITSELF_AFTER, ITS_OWN) if which not in done]
        started = [pool.apply_async(measure_teacher, (args, which)) for which in read]
        for _, group in groupby(runs, lambda run: folder_of(args, run)):
            missing = [run for run in group if run not in done]
            if missing:
                prepare_seed(args, missing)
            started += [pool.apply_async(train, (args, run)) for run in missing]
        for one in started:
            one.get()


def results(work: Path) -> list[tuple[Run, dict[str, Any]]]:
    """Return the finished runs."""
    path = work / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(Run(*line["run"]), line) for line in map(json.loads, lines)]


def train(args: argparse.Namespace, run: Run) -> None:
    """Train one student; append its line: bits of each document after some steps."""
    torch.manual_seed(run.seed)
    pair, steps = sides(args.student, args.teacher), round(args.steps * run.length)
    collate = collator(args, own=run.artefact == OWN)
    texts = texts_read(args, run)[: None if run.setting == "scarce" else steps * args.batch_size]
    groups = unseen(args)
    model = distill.load_model(args.student, pair.tokenizers[0]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    on_policy = ON_POLICY in run.how
    teacher = OnPolicy(args, run, model, texts) if on_policy else Teacher(args, run)
    head = None
    of_run = {"seed": run.seed, "learning_rate": run.rate, "warmup": 5, "steps": steps}
    options = argparse.Namespace(**{**vars(args), **of_run})
    measured_at = sorted({steps * i // MEASUREMENTS for i in range(MEASUREMENTS + 1)})
    measured_at = measured_at[run.loss != "ce" :]  # all begin alike
    measured, of_steps = [], []
    if 0 in measured_at:
        with autocast(args):
            measured.append([bits(model, group, collate) for group in groups])
    model.train()
    for step, chosen in enumerate(distill.batches(len(texts), options, 0), start=1):
        start = seconds(args)
        batch = prepare(collate([texts[i] for i in chosen]), args.device)
        if step == 1 and teacher.takes_hidden:
            [head], _ = find_heads([model], [batch], [True])
        with autocast(args):
            logits = logits_of(model, batch, head)
        loss = teacher.loss(logits, batch, chosen)
        for group in optimizer.param_groups:
            group["lr"] = distill.learning_rate(step - 1, options)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        of_steps.append(seconds(args) - start)
        if step in measured_at:
            some = groups if step == steps else groups[:1]  # the others at the end
            with autocast(args):
                measured.append([bits(model, group, collate) for group in some])
    line = {"steps": measured_at, "bits": measured, "seconds": float(np.median(of_steps))}
    line["teacher_seconds"] = teacher.seconds * len(texts)  # to read them once
    with autocast(args):
        line["words"] = words_found(model, groups[0], collate)
    if args.save and run.seed == 0:
        from transformers import AutoTokenizer

        folder = args.work / "students" / "-".join(map(str, run))
        model.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(args.student).save_pretrained(folder)
    write(args, run, line, groups)


def measure_teacher(args: argparse.Namespace, which: Run) -> None:
    """Append the line of a teacher: its own bits per byte."""
    own = which.artefact == OWN
    tokenizer = sides(args.student, args.teacher).tokenizers[not own]
    path = args.own_teacher if own else args.teacher
    model = distill.load_model(path, tokenizer).to(args.device)
    bos = collator(args).bos or (not own and bool(tokenizer.table.roles.get("bos")))
    collate = DistillationCollator(tokenizer, tokenizer, bos=bos)
    groups = unseen(args)
    read = [[before(row, which.reads) for row in group] for group in rows_unseen(args)]
    with autocast(args):
        measured = [bits(model, *group) for group in zip(groups, [collate] * 3, read, strict=True)]
        words = words_found(model, groups[0], collate)
    write(args, which, {"bits": [measured], "words": words}, groups)


def unseen(args: argparse.Namespace) -> list[list[str]]:
    """Return the texts of `rows_unseen`."""
    return [[row["text"] for row in group] for group in rows_unseen(args)]


def rows_unseen(args: argparse.Namespace) -> list[list[dict[str, str]]]:
    """Return the held-out texts, the texts that the student may forget, and texts to choose a rate.

    The last group comes from the held-out documents, and contains no held-out text.
    """
    counts = ((args.held_out, HELD_OUT), (args.forgotten, FORGOTTEN))
    held_out, forgotten = (rows_of(path, 0, count, one_each=True) for path, count in counts)
    others = rows_of(args.held_out, 1, 2 * HELD_OUT)
    return [held_out, forgotten, [text for text in others if text not in held_out][:HELD_OUT]]


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
def bits(
    model: Any, texts: Sequence[str], collate: DistillationCollator, read: Sequence[str] = ()
) -> list[float]:
    """Return the bits of each text without its first token, given the preceding text."""
    model.eval()
    device = next(model.parameters()).device
    found = []
    for text, context in zip(texts, read or [""] * len(texts), strict=True):
        batch: Any = prepare(collate([text]), device)
        first = int(collate.bos)
        batch["targets"][:, :first] = IGNORED
        ids = torch.from_numpy(collate.student.encode(context).ids)[None].to(device)
        for name, values in (
            ("input_ids", ids), ("attention_mask", torch.ones_like(ids)),
            ("targets", torch.full_like(ids, IGNORED)),
        ):  # fmt: skip
            old = batch[name]
            batch[name] = torch.cat([old[:, :first], values.to(old.dtype), old[:, first:]], 1)
        own = losses.cross_entropy(logits_of(model, batch), batch["targets"])
        found.append(float(own * (batch["targets"] >= 0).sum()) / math.log(2))
    model.train()
    return found


@torch.no_grad()
def words_found(model: Any, texts: Sequence[str], collate: DistillationCollator) -> tuple[int, int]:
    """Return the number of words that a model would write, and the number of all words.

    A word begins with white space. It counts if each of its tokens is the most probable token.
    """
    model.eval()
    device = next(model.parameters()).device
    found = total = 0
    tokens = collate.student.table.tokens()
    for text in texts:
        batch = prepare(collate([text]), device)
        targets = batch["targets"][0]
        logits: Any = logits_of(model, batch)
        right = (logits[0].argmax(-1) == targets).cpu().tolist()
        words: list[list[bool]] = []
        for token, is_right in zip(targets.tolist(), right, strict=True):
            if token >= 0 and tokens[token][:1].isspace():
                words.append([])
            if token >= 0 and words:  # text before the first space is not a word
                words[-1].append(is_right)
        found += sum(map(all, words))
        total += len(words)
    model.train()
    return found, total


def totals(line: dict[str, Any], group: int = 0) -> list[float]:
    """Return a run's bits per byte at each of its measurements."""
    of_group = [row[group] for row in line["bits"] if len(row) > group]
    return [sum(found) / sum(line["bytes"][group]) for found in of_group]


def report(found: Sequence[tuple[Run, dict[str, Any]]], loss: str, artefact: str) -> None:
    """Print a table for each setting, with the gain of each loss over a reference of the same seed.

    ± is half of a 95 % interval over seeds (Student's t). The next column is an interval over
    documents (bootstrap) of the mean over seeds. *All texts* includes the texts to choose a rate,
    at the end. *Kept* is the share of the final gain of a teacher with the student's tokenizer, for
    the seeds of both.
    """
    lines = dict(found)
    start = math.nan  # all students begin alike, and cross-entropy alone measures it
    for run, line in found:
        if not run.setting:
            read = f" after {run.reads} characters" if run.reads else ""
            of_groups = ", ".join(f"{totals(line, group)[0]:.3f}" for group in range(3))
            print(f"the teacher {run.artefact}{read}: {of_groups}")
        elif run.loss == "ce":
            start = totals(line, 1)[0]
            print(run.setting, run.artefact, *named(run), f"rate {run.rate:g} seed {run.seed}",
                  f"steps {line['steps'][-1]}:", " ".join(f"{x:.3f}" for x in totals(line)),
                  *(f"to choose by: {x:.3f}" for x in totals(line, 2)))  # fmt: skip
    kinds = dict.fromkeys(run._replace(seed=0) for run in lines)
    for setting in dict.fromkeys(kind.setting for kind in kinds if kind.setting):
        print(f"\n| {setting}: loss | artefact | weight | text | seeds | at best | at the end | "
              "gain at best | over documents | gain at the end | over documents | kept | "
              "forgotten | words | to choose by | seconds | length | on all texts | "
              "over documents |\n"
              + "|---" * 19 + "|")  # fmt: skip
        for kind in kinds:
            runs = [run for run in lines if run._replace(seed=0) == kind]
            base = [Run(setting, loss, artefact, 1.0, 1.0, run.seed, run.rate) for run in runs]
            if kind.setting != setting or any(run not in lines for run in base):
                continue
            row = [lines[run] for run in runs]
            of = [lines[run] for run in base]
            best, end, of_all = (gain(row, of, texts) for texts in (at_best, at_end, all_at_end))
            shown = [
                kind.loss, " ".join((kind.artefact, *named(kind))), f"{kind.weight:g}",
                f"{kind.text:g}", str(len(runs)),
                mean([min(totals(x)) for x in row]), mean([totals(x)[-1] for x in row]),
                *best, *end, kept(lines, runs, base),
                mean([totals(x, 1)[-1] - start for x in row]),
                mean([x["words"][0] / x["words"][1] for x in row if "words" in x] or [math.nan]),
                mean([(totals(x, 2) or [math.nan])[-1] for x in row]),
                f"{np.median([x['seconds'] for x in row]):.2f}", f"{kind.length:g}", *of_all,
            ]  # fmt: skip
            print(f"| {' | '.join(shown)} |" + f" rate {kind.rate:g}")


def kind_of(run: Row | Run) -> tuple[Any, ...]:
    """Return the properties of a kind of student: loss, artefact, context, variant."""
    return run.loss, run.artefact, run.reads, run.how


def named(run: Run) -> list[str]:
    """Return the labels of a run in a table, in addition to its loss and artefact."""
    return [f"after {run.reads} characters"] * (run.reads > 0) + [run.how] * bool(run.how)


def report_seconds(lines: dict[Run, dict[str, Any]], loss: str, artefact: str) -> None:
    """Print runs by their seconds, on all texts of the held-out documents.

    The texts are the held-out texts and the texts to choose a rate. Each run is compared with the
    runs of a reference loss with the same seed and rate. *Kept*: see `report`. Brackets contain
    intervals over texts.
    """
    measured = [run for run in lines if run.setting and len(lines[run]["bytes"]) > 2]
    for base in [run for run in measured if run[1:5] == (loss, artefact, 1.0, 1.0)]:
        like = base.setting, base.seed, base.rate
        own = base._replace(loss="same-tokenizer", artefact=OWN)
        for run in [run for run in measured if (run.setting, run.seed, run.rate) == like]:
            line, of = lines[run], lines[base]
            read = line.get("teacher_seconds", 0)
            lengths = np.array(line["bytes"][0] + line["bytes"][2])
            saved = all_at_end(of) - all_at_end(line)
            low, high = interval(saved, lengths)
            share = ""
            if own in lines and len({own, run, base}) == 3 and run.length == base.length:
                of_own = all_at_end(of) - all_at_end(lines[own])
                share = "; kept {:.2f} ({:.2f} to {:.2f})".format(
                    saved.sum() / of_own.sum(), *interval(saved, of_own)
                )
            print(
                f"{' '.join((run.loss, run.artefact, *named(run)))} {run.weight:g} "
                f"{line['steps'][-1]} steps, "
                f"{line['seconds'] * line['steps'][-1]:.0f} s"
                f"{f' and the teacher {read:.0f} s' if read else ''}: "
                f"{all_at_end(line).sum() / lengths.sum():.3f}, "
                f"{saved.sum() / lengths.sum():.3f} ({low:.3f} to {high:.3f}) better than "
                f"{of['steps'][-1]} steps of {loss} {artefact} (seed {run.seed}, rate {run.rate:g})"
                + share
            )


def report_rates(lines: dict[Run, dict[str, Any]], loss: str, artefact: str) -> None:
    """Print runs at their best rates, chosen on separate texts.

    Each run is compared on the held-out texts with the reference loss at its own best rate, for the
    same seed and length. Brackets contain intervals over texts.
    """
    rates: dict[Run, list[Run]] = {}
    for run in lines:
        if run.setting and len(lines[run]["bytes"]) > 2:
            rates.setdefault(run._replace(rate=0.0), []).append(run)
    tuned = {
        kind: min(runs, key=lambda run: totals(lines[run], 2)[-1])
        for kind, runs in rates.items()
        if len(runs) > 1
    }
    for kind, run in tuned.items():
        base = tuned.get(kind._replace(loss=loss, artefact=artefact, weight=1.0, text=1.0))
        if base is not None and base != run:
            saved, between = gain([lines[run]], [lines[base]], at_end)
            print(
                f"{run.loss} {run.artefact} {run.weight:g} {lines[run]['steps'][-1]} steps "
                f"at its best rate {run.rate:g}: {saved} ({between}) better than {loss} {artefact} "
                f"at its best rate {base.rate:g} (seed {run.seed})"
            )


def plot(found: Sequence[tuple[Run, dict[str, Any]]], path: Path) -> None:
    """Plot the bits per byte of held-out text over the seconds of a run.

    Shows runs with weights of 1 and the seed and rate of the first run. A dashed line includes the
    seconds in which the teacher read the texts.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    kinds = [kind_of(row) for row in (CE, EVENTS, STORED, *INFORMED, CSD, OF_OWN, MADE_FOR)]
    first = next((run for run, _ in found if run.loss == "ce"), None)
    shown = [
        (kinds.index(kind_of(run)), run.length, run, line)
        for run, line in found
        if kind_of(run) in kinds and first and run[3:7] == (1.0, 1.0, first.seed, first.rate)
    ]
    for kind, _, run, line in sorted(shown, key=lambda of_run: of_run[:2]):
        colour = f"C{kind}"
        steps, bits_per_byte = line["steps"][-MEASUREMENTS:], totals(line)[-MEASUREMENTS:]
        times = np.array(steps) * line["seconds"]
        name = ", ".join((run.loss, *named(run), f"{steps[-1]} steps"))
        axes.plot(times, bits_per_byte, colour, marker=".", label=name)
        if read := line.get("teacher_seconds"):
            axes.plot(times + read, bits_per_byte, colour, linestyle="--")
    axes.set_xlabel("processor seconds of training; dashed: and of the teacher, once")
    axes.set_ylabel("bits per byte of held-out text")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, metadata={"Title": "Bits per byte over seconds"})


def at_best(line: dict[str, Any]) -> NDArray[np.float64]:
    """Return the bits of each held-out text at a run's best measurement."""
    return np.array(line["bits"][int(np.argmin(totals(line)))][0])


def at_end(line: dict[str, Any]) -> NDArray[np.float64]:
    """Return the bits of each held-out text after a run."""
    return np.array(line["bits"][-1][0])


def all_at_end(line: dict[str, Any]) -> NDArray[np.float64]:
    """Return the bits of each text of the held-out documents after a run, none of them read."""
    return np.concatenate(line["bits"][-1][::2])  # held out, and to choose by; not the forgotten


def gain(row: Sequence[dict[str, Any]], of: Sequence[dict[str, Any]], texts: Texts) -> list[str]:
    """Return the bits per byte that runs save against others of their seeds, with intervals."""
    saved = saved_bits(row, of, texts)
    lengths = np.concatenate(row[0]["bytes"][::2])[: saved.shape[1]]
    low, high = interval(saved.mean(0), lengths)
    return [mean((saved.sum(1) / lengths.sum()).tolist()), f"{low:.3f} to {high:.3f}"]


def saved_bits(
    row: Sequence[dict[str, Any]], of: Sequence[dict[str, Any]], texts: Texts
) -> NDArray[np.float64]:
    """Return the bits that runs save against others of their seeds, `[runs, texts]`."""
    return np.array([texts(b) - texts(a) for a, b in zip(row, of, strict=True)])


def interval(above: NDArray[Any], below: NDArray[Any]) -> tuple[float, float]:
    """Return the 95 % interval, over documents by bootstrap, of a ratio of their sums."""
    drawn = np.random.default_rng(0).integers(len(above), size=(2000, len(above)))
    low, high = np.quantile(above[drawn].sum(1) / below[drawn].sum(1), (0.025, 0.975)).tolist()
    return low, high


def kept(lines: dict[Run, dict[str, Any]], runs: Sequence[Run], base: Sequence[Run]) -> str:
    """Return the share that runs keep of the gain of the teacher with the student's tokenizer."""
    own = [run._replace(loss="same-tokenizer", artefact=OWN) for run in base]
    parts = zip(runs, own, base, strict=True)
    both = [
        [lines[run] for run in part] for part in parts if part[1] in lines and part[1] != part[2]
    ]
    if not both:
        return ""
    ours, theirs, of = zip(*both, strict=True)
    gains = [saved_bits(row, of, at_end).mean(0) for row in (ours, theirs)]
    low, high = interval(gains[0], gains[1])
    return f"{gains[0].sum() / gains[1].sum():.2f} ({low:.2f} to {high:.2f})"


def mean(values: Sequence[float]) -> str:
    """Return a mean, with half of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T_95[min(len(values), 8)] * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
