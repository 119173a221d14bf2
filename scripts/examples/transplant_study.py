"""Which rows should a model have for the tokens of another tokenizer?

    python scripts/fetch_models.py
    python scripts/examples/transplant_study.py texts data/models/smollm2-135m --count 32 \
        --seed 1 -o held.jsonl
    python scripts/examples/transplant_study.py rows data/models/smollm2-135m TOKENIZER \
        --texts held.jsonl -o rows.jsonl
    python scripts/examples/distill.py --student NEW --texts train.jsonl --held-out held.jsonl …

`texts` samples texts from a model, also to heal the model of `xtok transplant` with. `rows`
measures the new rows of each kind without training; run it again to resume.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xtok
from xtok.maps.edges import Edges
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.training.transplant import NewRows, new_rows

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
    """Return rows with other weights of pieces: `weigh(place, count)`, then normalized."""
    s, t, _ = rows.edges
    counts = np.bincount(s, minlength=len(rows.mean_share))
    starts = np.cumsum(counts) - counts
    weights = weigh(np.arange(len(s)) - starts[s], counts[s]).astype(np.float64)
    return rows._replace(edges=Edges(s, t, weights).normalized())


PIECES: dict[str, Callable[[Any, Any], Any]] = {
    "first piece": lambda place, count: place == 0,
    "last piece": lambda place, count: place == count - 1,
    "1, 1/2, 1/4, …": lambda place, count: 0.5**place,
    "1, 1/3, 1/9, …": lambda place, count: (1 / 3) ** place,
    "1/4, 1/2, 1": lambda place, count: 0.5 ** (count - 1 - place),
}
SHARES = 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8


def matrix(rows: NewRows, old: Tensor) -> Tensor:
    """Return the new rows as one matrix."""
    return torch.cat(list(rows.blocks(old)))


def kinds(pair: Pair, old: Tensor, heads: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the kinds of rows: a name, the input embeddings, the head.

    Args:
        pair: the new tokenizer and the old one.
        old: the input embeddings of the model, `[V_old, d]`.
        heads: its head; `old` if the two are tied.
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
    yield from ((name, one, one) for name, one in made.items())
    for share in SHARES:
        one = (1 - share) * by_pieces + share * mean
        one = torch.where(composed[:, None], one, by_pieces)
        made[f"{share:.0%} mean row"] = one
        yield f"{share:.0%} mean row", one, one
    for share in (0.2, 0.4):
        name = f"1, 1/2, 1/4, … with {share:.0%} mean row"
        one = (1 - share) * made["1, 1/2, 1/4, …"] + share * mean
        one = torch.where(composed[:, None], one, by_pieces)
        yield name, one, one
    norms = old[torch.from_numpy(pieces.old_ids)].norm(dim=1).mean()
    one = by_pieces * torch.where(composed, norms / by_pieces.norm(dim=1), torch.ones(()))[:, None]
    yield "mean of the pieces, with the mean norm", one, one
    random = torch.randn(old.shape[1], len(mean), generator=torch.Generator().manual_seed(0)).T
    one = torch.where(composed[:, None], mean + random * old.std(0), by_pieces)
    yield "random, with the mean and deviation of all rows", one, one
    for name, projection in (
        ("counted map", xtok.build(pair, for_loss="p-kl")), ("default map", xtok.build(pair))
    ):  # fmt: skip
        one = of(new_rows(pair, projection, 0.0)[0])
        yield name, one, one
    for ours in ("mean of the pieces", "last piece", "1, 1/2, 1/4, …", "1/4, 1/2, 1"):
        for theirs in ("mean of the pieces", "first piece", "1, 1/2, 1/4, …", "mean row",
                       "20% mean row", "40% mean row", "60% mean row"):  # fmt: skip
            if ours != theirs and not (ours != "mean of the pieces" and theirs == "mean row"):
                yield f"input: {ours}; head: {theirs}", made[ours], made[theirs]


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
        mass.index_add_(0, kind, logs.exp().sum(0))
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
    of_head = head.weight.detach().clone()
    about = {"model": old.vocabulary.model_id, "tokenizer": str(options.tokenizer)}
    if (about["tokenizer"], "original") not in done:
        found = measure(model, old, texts, torch.zeros(len(before), dtype=torch.int64))
        append(options.output, {**about, "kind": "original", **found})
    rows, _ = new_rows(pair, "pieces", 0.0)
    sizes = np.bincount(rows.edges.student_ids, minlength=pair.shape[0])
    kind = torch.from_numpy(np.where(sizes == 0, 2, np.where(pair.partners >= 0, 0, 1)))
    for name, ours, theirs in kinds(pair, before, of_head):
        if (about["tokenizer"], name) in done:
            continue
        start = time.monotonic()
        model.get_input_embeddings().weight = torch.nn.Parameter(ours, requires_grad=False)
        head.weight = torch.nn.Parameter(theirs, requires_grad=False)
        found = measure(model, new, texts, kind)
        found["seconds"] = time.monotonic() - start
        append(options.output, {**about, "kind": name, **found})
        print(f"{name}: {found['bits']:.3f}", flush=True)


def lines(path: Path) -> list[Any]:
    """Return the values of a file of JSON lines; none if it does not exist."""
    return (
        [*map(json.loads, path.read_text(encoding="utf-8").splitlines())] if path.exists() else []
    )


def append(path: Path, value: Any) -> None:
    """Add a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def main() -> None:
    """Parse, and run a command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("texts", "rows"):
        add = commands.add_parser(name).add_argument
        add("model", help="folder of the original model")
        if name == "rows":
            add("tokenizer", help="folder of the new tokenizer")
            add("--texts", type=Path, required=True)
        add("--count", type=int, default=32, help="texts; default: %(default)s")
        add("--seed", type=int, default=0)
        add("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "texts":
        options.output.unlink(missing_ok=True)
        for text in sample(options.model, options.count, options.seed):
            append(options.output, {"text": text})
    else:
        measure_rows(options)


if __name__ == "__main__":
    main()
