"""Cost of losses in PyTorch: P-KL compared with a minimum, CSD and ALM with event KL."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import xtok
from benchmarks import harness, hidden
from benchmarks.harness import Row, race, tokenizer
from benchmarks.hidden import make_alignment, peak_above
from xtok import ProjectionMap, losses
from xtok.training.collator import prepare
from xtok.training.losses import PKLConfig, p_kl
from xtok.training.module import ProjectionModule

POSITIONS, TOP_K = 512, 8192
PAIRS = [("llama3", "qwen"), ("mistral-v1", "qwen")]


def p_kl_cost(options: Namespace) -> Iterator[Row]:
    """P-KL with a synthetic map, a real one, and the real one learnable."""
    yield p_kl_row("synthetic", frequent_map(*harness.scaled_widths(options)), options)
    if options.size == 1:
        real = xtok.build(tokenizer("llama3"), tokenizer("qwen"))
        yield p_kl_row("llama3 → qwen", real, options)
        yield p_kl_row("llama3 → qwen, learnable", real, options, learnable=True)


def frequent_map(num_rows: int, num_columns: int) -> ProjectionMap:
    """Return a map shaped like a real one: 85 % of the rows have one entry, the rest four.

    Teacher ids are drawn by Zipf's law, so that frequent tokens have many rows.
    """
    random = np.random.default_rng(0)
    counts = np.where(random.random(num_rows) < 0.85, 1, 4)
    prior = 1 / (np.arange(num_columns) + 1000.0)
    columns = random.choice(num_columns, counts.sum(), p=prior / prior.sum())
    return harness.synthetic_map(counts, columns, (num_rows, num_columns))


def p_kl_row(
    name: str, weights: ProjectionMap, options: Namespace, *, learnable: bool = False
) -> Row:
    """Measure forward and backward, compared with the minimum for a loss over all logits.

    The minimum: a log-softmax forward and backward over the student's logits, the maximum of each
    teacher column, and the gather of k columns.
    """
    device = options.device
    positions, top_k = max(16, int(POSITIONS * options.size)), max(1, int(TOP_K * options.size))
    student, teacher = logits(positions, *weights.shape, device=device)
    teacher -= 2 * torch.arange(weights.shape[1], device=device).log1p() / np.log(weights.shape[1])
    module = ProjectionModule(weights, learnable=learnable).to(device)
    alignment, upstream = make_alignment(positions, device), torch.randn_like(student)

    def ours() -> None:
        p_kl(student, teacher, module, alignment, PKLConfig(top_k=top_k)).backward()

    def bare() -> None:
        torch.log_softmax(student, -1).backward(upstream)
        teacher.index_select(2, teacher.amax((0, 1)).topk(top_k).indices)

    small = ProjectionModule(frequent_map(16, 16)).to(device)
    part = student[..., :16].detach().requires_grad_()
    p_kl(part, teacher[..., :16], small, alignment).backward()  # loads the libraries
    measured = cost((ours, student), (bare, student), options)
    arrays = sum(a.numel() * a.element_size() for a in module.state_dict().values())
    held = measured["held MiB"] * 2**20 / (student.numel() * 4 + arrays)
    entries = f"{name}, {weights.nnz:,} entries"
    return {"map": entries, "k": top_k, **measured, "× gradient and map": held}


def loss_cost(options: Namespace) -> Iterator[Row]:
    """Measure a step from hidden states, and steps of CSD and ALM compared with event KL."""
    yield from hidden.steps(options)
    yield from hidden.beside_a_context(options)
    yield from hidden.beside_liger(options)
    for label, (student, teacher) in harness.chosen(PAIRS, options):
        pair = xtok.load_pair(tokenizer(student), tokenizer(teacher))
        collate = xtok.DistillationCollator(*pair.tokenizers, max_length=POSITIONS)
        text = next(iter(harness.documents(options).values()))
        batch = prepare(collate(["\n".join(text)]), options.device)
        [side] = batch["teachers"]
        lengths = batch["input_ids"].shape[1], side["input_ids"].shape[1]
        ours, theirs = logits(lengths, *pair.shape, device=options.device)
        maps: dict[losses.LossName, Any] = {
            "event-kl": losses.event_index(xtok.events(pair)),
            "csd": losses.spelling_index(xtok.spellings(pair)), "alm": None,
        }  # fmt: skip
        calls = {
            name: losses.make_loss(name, map=index and index.to(options.device))
            for name, index in maps.items()
        }

        def run(
            loss: losses.BatchLoss, ours: Any = ours, rest: Any = (theirs, batch, side)
        ) -> None:
            loss(ours, *rest).backward()

        for name, loss in calls.items():
            if name == "event-kl":
                continue
            passes = (partial(run, loss), ours), (partial(run, calls["event-kl"]), ours)
            chunks, starts = (calls[n].count(batch, side) for n in (name, "event-kl"))
            row = {"loss": f"{name}, {label}", "chunks": chunks, "of event KL": starts}
            yield row | cost(*passes, options, limit=1.3)


Pass = tuple[Callable[[], None], torch.Tensor]  # a loss with its backward, and the student's logits


def cost(ours: Pass, peer: Pass, options: Namespace, limit: float | None = None) -> Row:
    """Compare two passes; also return the peak memory of the first above its start."""
    run, beside = (partial(anew, *one, options.device) for one in (ours, peer))
    held = peak_above(run, options.device) / 2**20
    return {"held MiB": held, **race(run, beside, options.repeat).row(limit)}


def anew(call: Callable[[], None], student: torch.Tensor, device: str) -> None:
    """Run a pass without a gradient from before, to its end on the device."""
    student.grad = None
    call()
    if device != "cpu":
        torch.cuda.synchronize()


def logits(
    positions: int | Sequence[int], *widths: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random logits of a student, with a gradient, and of a teacher."""
    torch.manual_seed(0)
    lengths = [positions] * 2 if isinstance(positions, int) else positions
    student, teacher = (
        torch.randn(1, length, n, device=device) for length, n in zip(lengths, widths, strict=True)
    )
    return student.requires_grad_(), teacher
