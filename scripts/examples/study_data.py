"""Data that the runs of a study share: texts, maps, events and teachers' predictions."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import distill
import numpy as np
import torch
from projected import ProjectedTeacher

import xtok
from xtok.config import BACK_MAP
from xtok.training import IGNORED, Batch, DistillationCollator, Objective, SideBatch, StoredTopK
from xtok.training.losses import (
    LOSSES,
    BatchLoss,
    CombineConfig,
    HiddenLogits,
    combine,
    cross_entropy,
    make_loss,
)

CHARACTERS = 450  # of a text
BEFORE = 3000  # characters of the document before a text that are kept, for teachers that read them
BEGINNING = 100  # characters that a model writes on from
PROJECTED = ("path-64", "map-64", "path-512", "first-64")  # the last without counting
FIRST_PIECES = xtok.BuildConfig(max_pieces=1, reverse_pass=False, scale_trick=False)
COUNTED = ("text",)  # artefacts of the training text; the others are shared
ROOTS = {"root-100": 100.0}  # of likelihoods, for ALM: the temperature
WORDS = "words"  # for ALM: chunks of whole words, behind which neither tokenizer writes on
LONGEST = {"healing": 3.6}  # runs, in `--steps`
READ = {"policy": 400}  # texts of a seed that the student has read before
STRICT, REVERSE = "strict", "reverse"  # ways of a loss: chunks of one token a side; the other KL
ON_POLICY = "on policy"  # another: it compares what the student writes on from texts' beginnings
OWN = "own"  # the teacher with the student's tokenizer
WRITTEN = "written"  # no artefact: texts that the teacher wrote, read beside the others


class Run(NamedTuple):
    """One student: setting, loss with its artefact, and the weights of loss and cross-entropy."""

    setting: str
    loss: str
    artefact: str
    weight: float
    text: float
    seed: int
    rate: float
    length: float = 1.0  # in `--steps`
    reads: int = 0  # characters before each text, for the teacher; without one, the student's own
    how: str = ""  # some of STRICT, REVERSE, ON_POLICY: a way of the loss


@cache
def begins_with_bos(model: str) -> bool:
    """Whether a model's tokenizer puts a token before each text."""
    from transformers import AutoTokenizer

    return bool(AutoTokenizer.from_pretrained(model)("").input_ids)


def collator(args: argparse.Namespace, *, own: bool = False) -> DistillationCollator:
    """Return the collator; texts begin with bos if the student's tokenizer adds it.

    With `own`, the teacher has the student's tokenizer.
    """
    student, teacher = sides(args.student, args.teacher).tokenizers
    bos = begins_with_bos(args.student)
    return DistillationCollator(student, student if own else teacher, bos=bos)


@cache
def sides(student: str, teacher: str) -> xtok.Pair:
    """Return the pair."""
    return xtok.load_pair(student, teacher)


def texts_of(path: Path, seed: int, count: int, *, one_each: bool = False) -> list[str]:
    """Return the texts of `rows_of`."""
    return [row["text"] for row in rows_of(path, seed, count, one_each=one_each)]


def rows_of(path: Path, seed: int, count: int, *, one_each: bool = False) -> list[dict[str, str]]:
    """Draw texts of whole lines, or one per document, with the preceding text."""
    random = np.random.default_rng(seed)
    drawn: list[dict[str, str]] = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            parts = cut(json.loads(line)["text"])
            drawn += [parts[random.integers(len(parts))]] if one_each and parts else parts
    return [drawn[i] for i in random.permutation(len(drawn))[:count].tolist()]


def cut(document: str) -> list[dict[str, str]]:
    """Return the texts of a document with their preceding text, without an incomplete last text."""
    parts, part, before = [], "", ""
    for line in document.splitlines(keepends=True):
        part += line[:CHARACTERS]
        if len(part) > CHARACTERS * 0.8:
            parts.append({"text": part, "teacher_context": before})
            before, part = (before + part)[-BEFORE:], ""
    return parts


def beginning(text: str) -> str:
    """Return a prompt: whole words of a text's beginning."""
    return text[:BEGINNING].rsplit(maxsplit=1)[0]


def autocast(args: argparse.Namespace) -> torch.autocast:
    """Return the context of the models: bfloat16 with --autocast."""
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.autocast)


def folder_of(args: argparse.Namespace, run: Run) -> Path:
    """Return the folder that the runs of a setting and a seed share."""
    folder: Path = args.work / f"{run.setting}.{run.seed}"
    return folder


def parts(run: Run) -> list[Run]:
    """Return a run for each of its losses: `event-kl+csd` is the mean of two."""
    both = zip(run.loss.split("+"), run.artefact.split("+"), strict=True)
    return [run._replace(loss=loss, artefact=artefact) for loss, artefact in both]


def texts_read(args: argparse.Namespace, run: Run) -> list[Any]:
    """Return the texts that a run reads."""
    names = ["texts", WRITTEN] if run.artefact == WRITTEN else ["texts"]
    rows = distill.read_texts([folder_of(args, run) / f"{name}.jsonl" for name in names])
    reads = run.reads if run.loss == "ce" else 0
    return [{"text": before(row, reads) + row["text"]} for row in rows]


def before(row: dict[str, str], reads: int) -> str:
    """Return at most as many characters that stand before a text."""
    return row.get("teacher_context", "")[-reads:] if reads else ""


def write_texts(path: Path, texts: Sequence[dict[str, str]]) -> None:
    """Write texts as JSON lines."""
    path.write_text("".join(json.dumps(x) + "\n" for x in texts), encoding="utf-8")


def prepare_seed(args: argparse.Namespace, runs: Sequence[Run]) -> None:
    """Write the missing inputs of the runs of a setting and a seed."""
    folder = folder_of(args, runs[0])
    folder.mkdir(exist_ok=True)
    texts = folder / "texts.jsonl"
    if not texts.exists():
        once = round(args.steps * args.batch_size * LONGEST.get(runs[0].setting, 1.0))
        passes = args.passes if runs[0].setting == "scarce" else 1
        count, read = args.count or once // passes, READ.get(runs[0].setting, 0)
        write_texts(texts, rows_of(args.texts, runs[0].seed, read + count)[read:])
    written = folder / f"{WRITTEN}.jsonl"
    if any(run.artefact == WRITTEN for run in runs) and not written.exists():
        write_texts(written, sampled(args, distill.read_texts([texts]), runs[0].seed))
    for run in runs:
        name = what_is_said(run)
        if name and not said_file(args, run).exists():
            like = [x for x in runs if x.reads == run.reads and what_is_said(x)]
            names = dict.fromkeys(str(what_is_said(x)) for x in like)
            read_once(args, like, [x for x in names if (x == OWN) == (name == OWN)])
    for part in (part for run in runs for part in parts(run)):
        if takes_file(part):
            saved(args, part)


def what_is_said(run: Run) -> str | None:
    """Return the name of the teacher's predictions that a run uses."""
    run, *_ = parts(run)
    if run.loss not in LOSSES or ON_POLICY in run.how:
        return None
    if run.loss == "same-tokenizer":
        return OWN
    return run.artefact if run.artefact in PROJECTED else "teacher"


def said_file(args: argparse.Namespace, run: Run) -> Path:
    """Return the file of the teacher's predictions that a run uses."""
    before = f"-after-{run.reads}" if run.reads else ""
    return folder_of(args, run) / f"{what_is_said(run)}{before}.pt"


def takes_file(run: Run) -> bool:
    """Return whether a run's loss takes a map, or the like."""
    row: Any = dict(LOSSES).get(run.loss)  # type: ignore[call-overload]
    return row is not None and row.map is not None


def saved(args: argparse.Namespace, run: Run) -> Path:
    """Return the file of the run's map; build it if it is missing."""
    folder = folder_of(args, run) if run.artefact in COUNTED else args.work
    path: Path = folder / f"{run.artefact}.safetensors"
    if not path.exists():
        pair = sides(args.student, args.teacher)
        artefact(pair, run.artefact, folder_of(args, run) / "texts.jsonl").save(path)
    return path


def artefact(pair: xtok.Pair, name: str, texts: Path) -> Any:
    """Make a map, an event map or a spelling map; `text` is counted on the training text."""
    if name == "to-project":
        return xtok.build(pair.reversed, config=BACK_MAP)
    if name == "bytes":
        return xtok.events(pair)
    if name == "exchanged":
        return exchanged(xtok.events(pair))
    if name == "first-pieces":
        return xtok.build(pair.reversed, config=FIRST_PIECES)
    if name == "spellings":
        return xtok.spellings(pair)
    if name == "recipe":
        return xtok.build(pair, config=xtok.BuildConfig(scale_trick=False))
    config = xtok.BuildConfig.for_loss("gold" if name == "for-gold" else "p-kl")
    made = xtok.build(pair, config=config, texts=[texts] if name == "text" else [])
    return damaged(made, float(name.partition("-")[2])) if name.startswith("damaged") else made


def damaged(made: xtok.ProjectionMap, share: float) -> xtok.ProjectionMap:
    """Return a map in which a random share of the rows have the entries of other rows."""
    random = np.random.default_rng(0)
    rows = random.permutation(np.unique(made.student_ids))
    rows = rows[: round(share * len(rows))]
    moved = np.arange(made.shape[0], dtype=made.student_ids.dtype)
    moved[rows] = np.roll(rows, 1)
    ids = moved[made.student_ids]
    order = np.argsort(ids, kind="stable")  # within a row the order stays
    kind = made.row_kind.copy()
    kind[moved] = made.row_kind
    return replace(
        made, student_ids=ids[order], teacher_ids=made.teacher_ids[order],
        weights=made.weights[order], row_kind=kind,
    )  # fmt: skip


def exchanged(made: xtok.EventMap) -> xtok.EventMap:
    """Return events in which the teacher's tokens are assigned to random other events."""
    moved = np.random.default_rng(0).permutation(made.num_events).astype(made.teacher_event.dtype)
    links = [np.full_like(link, -1) for link in (made.student_link, made.teacher_link)]
    return replace(
        made, teacher_event=moved[made.teacher_event], student_link=links[0],
        teacher_link=links[1], rest=None,
    )  # fmt: skip


@torch.no_grad()
def read_once(args: argparse.Namespace, runs: Sequence[Run], names: Sequence[str]) -> None:
    """Run a teacher on each text once, and store its predictions or its candidates.

    Logits are stored in half precision if texts are repeated, otherwise the last hidden states. A
    teacher with the student's tokenizer also omits bos if the student's texts do.
    """
    run, own = runs[0], OWN in names
    pair = sides(args.student, args.teacher)
    tokenizer = pair.tokenizers[not own]
    path = args.own_teacher if own else args.teacher
    start = seconds(args)
    model = distill.load_model(path, tokenizer).to(args.device).eval()
    collate = collator(args)
    bos = () if own or collate.bos else pair.tables[1].roles.get("bos", ())[:1]
    projectors = {name: projector(args, run, name) for name in names if name in PROJECTED}
    kept: dict[str, list[Any]] = {name: [] for name in names}
    longest = max(run.length for run in runs if what_is_said(run) in names)
    count = round(args.steps * longest) * args.batch_size
    for text in distill.read_texts([folder_of(args, run) / "texts.jsonl"])[:count]:
        batch = collate([text["text"]])
        [side] = batch["teachers"]
        read = tokenizer.encode(before(text, run.reads)).ids
        begin = torch.tensor([[*bos, *read]], dtype=torch.long)
        ids = torch.cat([begin, (batch if own else side)["input_ids"]], 1).to(args.device)
        with autocast(args):
            hidden = model.model(input_ids=ids).last_hidden_state[:, begin.shape[1] :]
            logits = hidden
            if projectors or run.setting == "scarce":
                logits = model.get_output_embeddings()(hidden).cpu().float()
        for name, rows in kept.items():
            if name in projectors:
                row = vars(projectors[name](logits, batch, side))
                rows.append({key: value[0] for key, value in row.items()})
            else:
                rows.append(logits[0].half() if run.setting == "scarce" else hidden[0].cpu())
    took = seconds(args) - start
    for name, rows in kept.items():
        of_name = next(x for x in runs if what_is_said(x) == name)
        file = said_file(args, of_name)
        torch.save({"rows": rows, "seconds": took / len(rows)}, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)
    print(path, "read in", f"{took:.0f} s:", *names, flush=True)


def seconds(args: argparse.Namespace) -> float:
    """Return processor seconds; on another device than the CPU, wall-clock seconds."""
    return time.process_time() if args.device == "cpu" else time.perf_counter()


def projector(args: argparse.Namespace, run: Run, name: str) -> ProjectedTeacher:
    """Return the projector of the teacher's candidates, along the path or through the map alone."""
    way, top_k = name.split("-")
    of = "first-pieces" if way == "first" else "to-project"
    back_map = xtok.ProjectionMap.load(saved(args, run._replace(artefact=of)))
    pair = sides(args.student, args.teacher)
    return ProjectedTeacher(pair, back_map, top_k=int(top_k), along_path=way != "map")


@torch.no_grad()
def sampled(args: argparse.Namespace, texts: Sequence[Any], seed: int) -> list[dict[str, str]]:
    """Return continuations by the teacher, one per text and of equal length."""
    from transformers import AutoTokenizer

    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.teacher)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    table = sides(args.student, args.teacher).tokenizers[1]
    model = distill.load_model(args.teacher, table).to(args.device).eval()
    torch.manual_seed(seed)
    made: list[dict[str, str]] = []
    for first in range(0, len(texts), 20):
        some = [text["text"] for text in texts[first : first + 20]]
        given = tokenizer([*map(beginning, some)], return_tensors="pt", padding=True,
                          padding_side="left").to(args.device)  # fmt: skip
        with autocast(args):
            ids = model.generate(**given, do_sample=True, top_k=0,
                                 max_new_tokens=CHARACTERS // 3)  # fmt: skip
        whole = tokenizer.batch_decode(ids, skip_special_tokens=True)
        made += [{"text": text[: len(like)]} for text, like in zip(whole, some, strict=True)]
    print(len(made), f"texts written in {time.perf_counter() - start:.0f} s", flush=True)
    return made


class Teacher:
    """The distillation loss of a run, with the teacher's logits or candidates."""

    def __init__(self, args: argparse.Namespace, run: Run) -> None:
        self.rows: list[Any] = []
        self.seconds = 0.0  # in which it read a text
        self.head: Any = torch.nn.Identity()
        self.losses: list[BatchLoss] = []
        self.run, self.smooths = run, run.loss == "label-smoothing"
        self.models = (args.student, args.teacher)
        said = what_is_said(run)
        if said is not None:
            kept = torch.load(said_file(args, run), mmap=said not in PROJECTED)
            self.rows, self.seconds = kept["rows"], kept["seconds"]
        if said not in (None, *PROJECTED) and run.setting != "scarce":
            own, pair = said == OWN, sides(args.student, args.teacher)
            path = args.own_teacher if own else args.teacher
            model = distill.load_model(path, pair.tokenizers[not own])
            self.head = model.get_output_embeddings().to(args.device)
            if args.autocast:
                self.head.to(torch.bfloat16)
        for part in (part for part in parts(run) if part.loss in LOSSES):
            name: Any = part.loss
            given = None
            if takes_file(part):
                kind: Any = LOSSES[name].map
                given = kind.on_device(saved(args, part)).to(args.device)
            root, is_reverse = ROOTS.get(part.artefact, 1.0), REVERSE in run.how
            config = LOSSES[name].config
            options = config and config(temperature=root, reverse_kl=is_reverse)
            self.losses.append(make_loss(name, map=given, config=options))

    @property
    def takes_hidden(self) -> bool:
        """Whether the student's hidden states will do."""
        return not self.smooths and all(loss.takes_hidden for loss in self.losses)

    def loss(self, logits: Any, batch: Batch, chosen: Sequence[int]) -> Any:
        """Return the loss of the chosen texts' batch, with the cross-entropy."""
        if self.run.artefact == WORDS:
            batch = {**batch, "teachers": [self.of_words(batch)]}
        if STRICT in self.run.how:
            batch = {**batch, "teachers": [one_to_one(batch)]}
        weights = CombineConfig(
            distillation_weight=self.run.weight, cross_entropy_weight=self.run.text
        )
        if self.smooths:
            own = cross_entropy(logits, batch["targets"])
            inside = batch["targets"] >= 0
            return combine(-logits.float().log_softmax(-1).mean(-1)[inside].mean(), own, weights)
        count = len(self.losses)
        objective = Objective(
            losses=self.losses, teacher_weights=[1 / max(1, count)] * count, combine=weights
        )
        said, side = self.said(batch, chosen) if count else (None, {})
        batch = {**batch, "teachers": [side] * count}
        return objective.terms(logits, [said] * count, batch).loss

    def of_words(self, batch: Batch) -> SideBatch:
        """Return the teacher's side with chunks joined to whole words: each begins with a space."""
        [side] = batch["teachers"]
        alignment, chunk = side["shifted"], side["shifted"].student_chunk_id
        tokens = sides(*self.models).tables[0].tokens()
        spaces = torch.tensor([token[:1].isspace() for token in tokens])
        begins = spaces.to(chunk.device)[batch["targets"].clamp(min=0)] & (chunk >= 0)
        starts = torch.zeros_like(torch.as_tensor(alignment.pair_valid), dtype=torch.int64)
        first = torch.nn.functional.pad(chunk, (1, 0), value=-1)[:, :-1] != chunk
        starts.scatter_add_(1, chunk.clamp(min=0), (begins & first).long())
        word = starts.cumsum(1)  # 0: before the first space
        joined = {
            f"{name}_chunk_id": torch.where(ids >= 0, word.gather(1, ids.clamp(min=0)), -1)
            for name, ids in (("student", chunk), ("teacher", alignment.teacher_chunk_id))
        }
        last = word.amax(1, keepdim=True)
        positions = torch.arange(word.shape[1], device=word.device)
        valid = (positions <= last) & (positions > 0)
        return {**side, "shifted": replace(alignment, pair_valid=valid, has_start=valid, **joined)}

    def said(self, batch: Batch, chosen: Sequence[int]) -> tuple[Any, SideBatch]:
        """Return the teacher's logits of the chosen texts, None where they are stored; its side."""
        [side] = batch["teachers"]
        rows = [self.rows[i] for i in chosen]
        if isinstance(rows[0], dict):
            return None, {**side, "stored": padded(rows, batch["labels"] != IGNORED)}
        device = batch["targets"].device
        dtype = next((weight.dtype for weight in self.head.parameters()), torch.float32)
        kept = [row.to(device, dtype) for row in rows]
        hidden = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
        if isinstance(self.head, torch.nn.Linear) and self.takes_hidden:
            return HiddenLogits(hidden, self.head.weight, self.head.bias), side
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return self.head(hidden), side


def one_to_one(batch: Batch) -> SideBatch:
    """Return the teacher's side with those chunks alone that are one token on both sides."""
    [side] = batch["teachers"]
    alignment = side["shifted"]
    valid = torch.as_tensor(alignment.pair_valid)
    for ids in (alignment.student_chunk_id, alignment.teacher_chunk_id):
        tokens = torch.zeros_like(valid, dtype=torch.int64)
        tokens.scatter_add_(1, ids.clamp(min=0), (ids >= 0).long())
        valid = valid & (tokens == 1)
    return {**side, "shifted": replace(alignment, pair_valid=valid)}


def padded(rows: Sequence[dict[str, Any]], valid: Any) -> StoredTopK:
    """Return the candidates of texts, padded to a batch."""
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
