"""Which rows should a model have for the tokens of another tokenizer, and what heals it?

    python scripts/fetch_models.py
    alias study="python scripts/examples/transplant_study.py"
    study texts data/models/smollm2-135m --count 32 --seed 1000 -o held.jsonl
    study rows data/models/smollm2-135m TOKENIZER --texts held.jsonl -o rows.jsonl
    xtok transplant data/models/smollm2-135m TOKENIZER -o NEW
    study texts data/models/smollm2-135m --count 80 --seed 0 -o train.jsonl
    study heal data/models/smollm2-135m NEW --texts held.jsonl --train train.jsonl -o healed.jsonl
    study table healed.jsonl

`texts` samples texts from a model, or cuts them from `--corpus`. `rows` measures the new rows of
each kind without training, and the models that other tools wrote (`--also`). `heal` trains with
each of `ARMS`, once for each `--seed`, and `table` prints the means over the seeds. Run `rows` or
`heal` again to resume.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import distill
import numpy as np
import torch
from projected import ProjectedTeacher
from study import mean
from study_data import padded, texts_of
from torch import Tensor

import xtok
from xtok.config import BACK_MAP
from xtok.maps.edges import Edges
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.training import (
    IGNORED,
    DistillationCollator,
    Objective,
    find_heads,
    logits_of,
    losses,
    prepare,
)
from xtok.training.transplant import NewRows, bits_per_byte, new_rows

LENGTH = 110  # tokens of a sampled text


def load(folder: str) -> Any:
    """Load a model in float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def sample(folder: str, count: int, seed: int) -> Iterator[str]:
    """Sample texts from a model at temperature 1; a text ends at a control token."""
    model, tokenizer = load(folder), load_tokenizer(folder)
    roles, tokens = tokenizer.table.roles, tokenizer.table.tokens()
    first = [*roles.get("bos", ()), *roles.get("eos", ())][0]
    torch.manual_seed(seed)
    while count > 0:
        ids = model.generate(
            torch.full((min(count, 32), 1), first), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=LENGTH, pad_token_id=roles["eos"][0],
        )  # fmt: skip
        for row in ids[:, 1:].tolist():
            end = next((n for n, i in enumerate(row) if not tokens[i]), len(row))
            text = b"".join(tokens[i] for i in row[:end]).decode("utf-8", "ignore")
            if len(text) > 60:
                count -= 1
                yield text


def weighted(rows: NewRows, weigh: Callable[[Any, Any], Any]) -> NewRows:
    """Return rows with other weights of pieces: `weigh(index, count)`, then normalized."""
    s, t, _ = rows.edges
    counts = np.bincount(s, minlength=len(rows.mean_share))
    starts = np.cumsum(counts) - counts
    weights = weigh(np.arange(len(s)) - starts[s], counts[s]).astype(np.float64)
    return rows._replace(edges=Edges(s, t, weights).normalized())


PIECES: dict[str, Callable[[Any, Any], Any]] = {
    "first piece": lambda index, count: index == 0,
    "last piece": lambda index, count: index == count - 1,
    "1, 1/2, 1/4, …": lambda index, count: 0.5**index,
    "1, 1/3, 1/9, …": lambda index, count: (1 / 3) ** index,
    "1/4, 1/2, 1": lambda index, count: 0.5 ** (count - 1 - index),
}
SHARES = 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8


def matrix(rows: NewRows, old: Tensor) -> Tensor:
    """Return the new rows as one matrix."""
    return torch.cat(list(rows.blocks(old)))


def kinds(pair: Pair, old: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the kinds of rows: a name, the input embeddings, the head.

    Args:
        pair: the new tokenizer and the old one.
        old: the input embeddings of the model, which are its head as well, `[V_old, d]`.
    """
    pieces, _ = new_rows(pair, "pieces", 0.0)
    is_exact = np.bincount(pieces.edges.student_ids, minlength=pair.shape[0]) == 1
    is_exact &= pair.partners >= 0
    composed = torch.from_numpy(~is_exact)

    def of(rows: NewRows) -> Tensor:
        return matrix(rows, old)

    mean = of(new_rows(pair, "mean", 0.0)[0])
    by_pieces = of(pieces)
    made = {"mean of the pieces": by_pieces, "mean row": mean}
    made |= {name: of(weighted(pieces, weigh)) for name, weigh in PIECES.items()}

    def shrunk(name: str, share: float) -> Tensor:
        return torch.where(composed[:, None], (1 - share) * made[name] + share * mean, by_pieces)

    def both(name: str, one: Tensor) -> tuple[str, Tensor, Tensor]:
        return name, one, one

    yield from (both(name, one) for name, one in made.items())
    for share in SHARES:
        yield both(f"{share:.0%} mean row", shrunk("mean of the pieces", share))
    for share in (0.2, 0.4):
        name = f"1, 1/2, 1/4, … with {share:.0%} mean row"
        yield both(name, shrunk("1, 1/2, 1/4, …", share))
    norms = old[torch.from_numpy(pieces.old_ids)].norm(dim=1).mean()
    one = by_pieces * torch.where(composed, norms / by_pieces.norm(dim=1), torch.ones(()))[:, None]
    yield both("mean of the pieces, with the mean norm", one)
    random = torch.randn(old.shape[1], len(mean), generator=torch.Generator().manual_seed(0)).T
    one = torch.where(composed[:, None], mean + random * old.std(0), by_pieces)
    yield both("random, with the mean and deviation of all rows", one)
    for name, projection in (
        ("counted map", xtok.build(pair, for_loss="p-kl")), ("default map", xtok.build(pair))
    ):  # fmt: skip
        yield both(name, of(new_rows(pair, projection, 0.0)[0]))
    yield from kinds_of_untied(made, shrunk)


def kinds_of_untied(
    made: Mapping[str, Tensor], shrunk: Callable[[str, float], Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield kinds of rows that differ between the input embeddings and the head."""
    by_pieces = "mean of the pieces"
    for ours in (by_pieces, "last piece", "1, 1/2, 1/4, …", "1/4, 1/2, 1"):
        for theirs in (by_pieces, "first piece", "1, 1/2, 1/4, …", "mean row"):
            if ours != theirs and (ours == by_pieces or theirs != "mean row"):
                yield f"input: {ours}; head: {theirs}", made[ours], made[theirs]
        for share in (0.2, 0.4, 0.6):
            name = f"input: {ours}; head: {share:.0%} mean row"
            yield name, made[ours], shrunk(by_pieces, share)


@torch.no_grad()
def measure(model: Any, tokenizer: Tokenizer, texts: list[str], kind: Tensor) -> dict[str, float]:
    """Return bits per byte, and the probability that tokens of each kind get.

    Args:
        model: with the rows to measure.
        tokenizer: its tokenizer.
        texts: the texts.
        kind: int64 `[V]`: 0 for exact and role tokens, 1 for composed and 2 for empty rows.
    """
    first = [*tokenizer.table.roles.get("bos", ()), *tokenizer.table.roles.get("eos", ())][:1]
    bits, num_bytes, mass, count, occurs = 0.0, 0, torch.zeros(3), 0, torch.zeros(3)
    for text in texts:
        ids = torch.tensor([*first, *tokenizer.encode(text).ids.tolist()])
        logs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        bits -= float(logs.gather(1, ids[1:, None]).sum()) / math.log(2)
        num_bytes += len(text.encode())
        width = min(len(kind), logs.shape[1])  # either can have padding
        mass.index_add_(0, kind[:width], logs[:, :width].exp().sum(0))
        occurs += torch.bincount(kind[ids[1:]], minlength=3)
        count += len(ids) - 1
    names = "exact", "composed", "empty"
    return {
        "bits": bits / num_bytes,
        **{f"predicted {n}": float(m) / count for n, m in zip(names, mass, strict=True)},
        **{f"occurs {n}": float(m) / count for n, m in zip(names, occurs, strict=True)},
    }


def measure_rows(options: argparse.Namespace) -> None:
    """Append a line for each kind of rows."""
    done = {(x["tokenizer"], x["kind"]) for x in lines(options.output)}
    model, texts = load(options.model), [x["text"] for x in lines(options.texts)][: options.count]
    new, old = load_tokenizer(options.tokenizer), load_tokenizer(options.model)
    pair = Pair(new.vocabulary, old.vocabulary, new, old)
    before = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        raise SystemExit("the head of this model is not tied to its input embeddings")
    about = {"model": old.vocabulary.model_id, "tokenizer": str(options.tokenizer)}
    if (about["tokenizer"], "original") not in done:
        found = measure(model, old, texts, torch.zeros(len(before), dtype=torch.int64))
        append(options.output, {**about, "kind": "original", **found})
    rows, _ = new_rows(pair, "pieces", 0.0)
    sizes = np.bincount(rows.edges.student_ids, minlength=pair.shape[0])
    kind = torch.from_numpy(np.where(sizes == 0, 2, np.where(pair.partners >= 0, 0, 1)))
    for name, ours, theirs in kinds(pair, before):
        if (about["tokenizer"], name) in done:
            continue
        start = time.monotonic()
        model.get_input_embeddings().weight = torch.nn.Parameter(ours, requires_grad=False)
        head.weight = torch.nn.Parameter(theirs, requires_grad=False)
        found = measure(model, new, texts, kind)
        found["seconds"] = time.monotonic() - start
        append(options.output, {**about, "kind": name, **found})
        print(f"{name}: {found['bits']:.3f}", flush=True)
    for folder in options.also:
        if (about["tokenizer"], folder) not in done:
            found = measure(load(folder), new, texts, kind)
            append(options.output, {**about, "kind": folder, **found})


class Arm(NamedTuple):
    """A way to heal: a loss with the original as the teacher, and the weight of the text."""

    loss: losses.LossName | None
    text: float = 1.0
    embeddings_first: float = 0.0  # share of the steps
    is_original: bool = False  # train the original instead, with its own tokenizer


ARMS = {
    "text alone": Arm(None),
    "event KL and text": Arm("event-kl"),
    "event KL alone": Arm("event-kl", text=0.0),
    "CSD and text": Arm("csd"),
    "stored path-64 and text": Arm("topk-kl"),
    "event KL and text, embeddings first": Arm("event-kl", embeddings_first=1 / 3),
    "the original, text alone": Arm(None, is_original=True),
}


class Healing:
    """Both models, their maps, and the texts to train and to measure on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.train, self.held_out = ([x["text"] for x in lines(p)] for p in
                                     (options.train, options.texts))  # fmt: skip
        self.pair = xtok.load_pair(options.new, options.model)
        self.batches = [*distill.batches(len(self.train), options, 0)]
        self.stored: dict[int, Any] = {}
        self.bits_before: dict[bool, float] = {}
        self.teacher_seconds = 0.0

    @cache  # noqa: B019 (there is one)
    def loss(self, name: losses.LossName) -> Any:
        """Return a loss with its map."""
        made = {"event-kl": xtok.events, "csd": xtok.spellings}
        if name not in made:
            return losses.make_loss(name)
        path = self.options.output.with_suffix(f".{name}.safetensors")
        if not path.exists():
            made[name](self.pair).save(path)
        return losses.make_loss(name, map=path)

    @torch.no_grad()
    def store(self, collate: DistillationCollator) -> None:
        """Let the original read each text once; keep its 64 best candidates, in new tokens."""
        start, model = time.process_time(), load(self.options.model)
        back = xtok.build(self.pair.reversed, config=BACK_MAP)
        project = ProjectedTeacher(self.pair, back, num_threads=1)
        for i in {i for chosen in self.batches for i in chosen}:
            batch = prepare(collate([{"text": self.train[i]}]))
            [side] = batch["teachers"]
            logits: Any = logits_of(model, side)
            rows = vars(project(logits, batch, side))
            self.stored[i] = {name: value[0] for name, value in rows.items()}
        self.teacher_seconds = time.process_time() - start

    def heal(self, arm: Arm) -> dict[str, Any]:
        """Train once, and measure before, in the middle and after."""
        options = self.options
        torch.manual_seed(options.seed)
        folder, is_stored = options.model if arm.is_original else options.new, arm.loss == "topk-kl"
        tokenizer = self.pair.tokenizers[arm.is_original]
        collate = DistillationCollator(tokenizer, self.pair.tokenizers[1:] if arm.loss else [])
        if is_stored and not self.stored:
            self.store(collate)
        models = [load(folder), *([load(options.model)] if arm.loss and not is_stored else [])]
        objective = Objective(
            losses=[self.loss(arm.loss)] if arm.loss else [],
            combine=losses.CombineConfig(cross_entropy_weight=arm.text),
        )
        if arm.is_original not in self.bits_before:
            self.bits_before[arm.is_original] = bits_per_byte(models[0], tokenizer, self.held_out)
        bits = [self.bits_before[arm.is_original]]
        models[0].train()
        optimizer = torch.optim.AdamW(models[0].parameters(), betas=(0.9, 0.95))
        heads: list[Any] = []
        seconds, wall = 0.0, 0.0
        for step, chosen in enumerate(self.batches):
            start = time.process_time(), time.monotonic()
            batch = prepare(collate([{"text": self.train[i]} for i in chosen]))
            sides = batch["teachers"]
            heads = heads or find_heads(models, [batch, *sides][: len(models)],
                                        objective.hidden_support[: len(models)])[0]  # fmt: skip
            distill.embeddings_first(models[0], step, round(arm.embeddings_first * options.steps))
            for group in optimizer.param_groups:
                group["lr"] = distill.learning_rate(step, options)
            with torch.no_grad():
                theirs: list[Any] = [*map(logits_of, models[1:], sides, heads[1:])]
            if is_stored:
                rows = [self.stored[i] for i in chosen]
                sides[0]["stored"] = padded(rows, batch["labels"] != IGNORED)
                theirs = [None]
            logits = logits_of(models[0], batch, heads[0])
            optimizer.zero_grad(set_to_none=True)
            objective.terms(logits, theirs, batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
            optimizer.step()
            seconds += time.process_time() - start[0]
            wall += time.monotonic() - start[1]
            if step + 1 in (options.steps // 2, options.steps):
                bits.append(bits_per_byte(models[0], tokenizer, self.held_out))
        teacher = self.teacher_seconds if is_stored else 0.0
        return {"bits": bits, "seconds": seconds, "teacher_seconds": teacher, "wall_seconds": wall}


def heal(options: argparse.Namespace) -> None:
    """Append a line for each arm."""
    healing = Healing(options)
    done = [[x[key] for key in ("held_out", "seed", "arm")] for x in lines(options.output)]
    for name in options.arms or ARMS:
        about = {"held_out": options.texts.name, "seed": options.seed, "arm": name}
        if [*about.values()] not in done:
            line = {**about, "steps": options.steps, **healing.heal(ARMS[name])}
            append(options.output, line)
            print(line, flush=True)


def table(found: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of a table: means over the seeds, ± half of a 95 % interval."""
    names = (
        "before",
        "in the middle",
        "after",
        "less than text alone",
        "processor s",
        "wall-clock s",
    )
    yield f"| | {' | '.join(names)} | seeds |\n|---|{'---|' * (len(names) + 1)}"
    base = {x["seed"]: x["bits"][-1] for x in found if x["arm"] == next(iter(ARMS))}
    for arm in ARMS:
        runs = [x for x in found if x["arm"] == arm]
        paired = [x for x in runs if x["seed"] in base and not ARMS[arm].is_original]
        saved = [base[x["seed"]] - x["bits"][-1] for x in paired]
        cells = [mean(column) for column in zip(*(x["bits"] for x in runs), strict=True)]
        cells.append(mean(saved) if saved and any(saved) else "")
        seconds = [x["seconds"] for x in runs], [x["wall_seconds"] for x in runs]
        cells += [f"{np.mean(of_runs):.0f}" for of_runs in seconds if runs]
        if runs:
            yield f"| {arm} | {' | '.join(cells)} | {len(runs)} |"


def lines(path: Path) -> list[Any]:
    """Return the values of a file of JSON lines; none if it does not exist."""
    return (
        [*map(json.loads, path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
    )


def append(path: Path, value: Any) -> None:
    """Add a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command and its options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("texts", "rows", "heal", "table"):
        add = commands.add_parser(name).add_argument
        if name == "table":
            add("results", type=Path, help="output of `heal`")
            continue
        add("model", help="folder of the original model")
        add("--seed", type=int, default=0)
        add("-o", "--output", type=Path, required=True)
        if name == "heal":
            add("new", help="folder of the model with the new tokenizer")
            add("--train", type=Path, required=True)
            add("--arms", action="append", choices=ARMS, help="repeatable; default: all")
            add("--steps", type=int, default=20)
            add("--batch-size", type=int, default=4)
            add("--learning-rate", type=float, default=3e-4)
            add("--warmup", type=int, default=3)
        else:
            add("--count", type=int, default=32, help="texts; default: %(default)s")
        if name == "rows":
            add("tokenizer", help="folder of the new tokenizer")
            add("--also", action="append", default=[], help="a model that another tool wrote")
        if name == "texts":
            add("--corpus", type=Path, help="cut the texts from these documents instead")
        else:
            add("--texts", type=Path, required=True, help="held-out texts")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command."""
    options = parse(argv)
    if options.command == "table":
        found = lines(options.results)
        for name in dict.fromkeys(x["held_out"] for x in found):
            print(name, *table([x for x in found if x["held_out"] == name]), sep="\n")
    elif options.command == "texts":
        options.output.unlink(missing_ok=True)
        count, seed = options.count, options.seed
        drawn = texts_of(options.corpus, seed, count) if options.corpus else ()
        for text in drawn or sample(options.model, count, seed):
            append(options.output, {"text": text})
    else:
        {"rows": measure_rows, "heal": heal}[options.command](options)


if __name__ == "__main__":
    main()
