"""A training step from hidden states, compared with a step from logits: memory and time."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fetch_models
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM

import xtok
from benchmarks.harness import Row, memory_status, path_of, pieces, race
from xtok import losses
from xtok.alignment.aligner import ShiftedAlignment
from xtok.training.collator import prepare
from xtok.training.heads import Head, find_heads
from xtok.training.losses.chunks import number_chunks, wrap_logits
from xtok.training.losses.config import ChunkFilter
from xtok.training.losses.cross_entropy import plan_cross_entropy
from xtok.training.losses.event_kl import plan_event_kl
from xtok.training.losses.one_pass import one_pass
from xtok.training.objective import make_objective
from xtok.training.running import logits_of

# Heads of a student and a teacher: ids, and the width of hidden states, the student's that of
# SmolLM2 135M, or both their own. The narrower they are, the more of a step's time is the loss.
SIDES = {
    "llama 3.2 × gemma 3": ((128_256, 576), (262_208, 640)),
    "llama 3.2 × qwen 3": ((128_256, 576), (151_936, 1024)),
    "llama 3.2 1B × qwen 3 1.7B": ((128_256, 2048), (151_936, 2048)),
}
TOKENS = (512, 2048, 8192)
BATCHES = (4, 256), (8, 512)  # rows, and tokens of the student in each
CHUNK_SIZES = (64, 128, 256, 512)  # of Liger


def steps(options: Namespace) -> Iterator[Row]:
    """Event KL and cross-entropy, forward and backward, from hidden states and from logits.

    *torch*: logits, and PyTorch's own cross-entropy; *logits*: logits, one pass for both losses.
    Sizes whose logits exceed the memory are skipped.
    """
    for label, sides in SIDES.items():
        for tokens in TOKENS if options.only in label else ():
            yield _step(label, tokens, sides, options)


def beside_a_context(options: Namespace) -> Iterator[Row]:
    """Memory of a step on an answer, if only the teacher receives a long context.

    The teacher's hidden states, which exist before the step, are not included.
    """
    answer, context = (max(16, int(n * options.size)) for n in (200, 8000))
    for label, sides in SIDES.items() if options.only in "context" else ():
        widths = [(max(64, int(v * options.size)), d) for v, d in sides]
        row: Row = {"a teacher's context": label, "tokens of the answer": answer}
        for size in (0, context):
            call = _ways(answer, widths, options.device, size)["hidden"]
            call()  # loads the libraries, and fills the caches
            row[f"MiB, context of {size}"] = peak_above(call, options.device) / 2**20
        yield row


def real_steps(options: Namespace) -> Iterator[Row]:
    """A whole step of SmolLM2 135M and Gemma 3 270M on text: both models, the losses, backward."""
    paths = [str(path_of(name)) for name in fetch_models.NAMES]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(options.device).eval()
        for path in paths
    ]
    pair, student = xtok.load_pair(*paths), models[0]
    objective = make_objective([pair], "event-kl", xtok.events(pair), device=options.device)
    for rows, length in BATCHES:
        length = max(16, int(length * options.size))
        texts = [text for text in pieces(options, 8 * length) if len(text) >= 6 * length][:rows]
        collate = xtok.DistillationCollator(*pair.tokenizers, max_length=length)
        batch = prepare(collate(texts), options.device)
        sides = [batch, *batch["teachers"]]
        heads, _ = find_heads(models, sides, objective.hidden_support, wanted=True)

        def step(heads: Sequence[Head | None], batch: Any = batch, sides: Any = sides) -> None:
            ours = logits_of(student, batch, heads[0])
            with torch.no_grad():
                theirs = logits_of(models[1], sides[1], heads[1])
            objective.terms(ours, [theirs], batch).loss.backward()
            student.zero_grad()
            if options.device != "cpu":
                torch.cuda.synchronize()

        calls = partial(step, heads), partial(step, [None, None])
        calls[0]()  # loads the libraries
        held, whole = (peak_above(call, options.device) / 2**20 for call in calls)
        shape = " and ".join("{} × {}".format(*side["input_ids"].shape) for side in sides)
        row: Row = {"tokens": shape, "hidden MiB": held, "logits MiB": whole}
        ratio = held / whole if whole else nan  # of tiny models, the allocator shows nothing
        yield row | {"memory": ratio} | race(*calls, options.repeat).row(None)


def _step(label: str, tokens: int, sides: Any, options: Namespace) -> Row:
    count, device = max(16, int(tokens * options.size)), options.device
    widths = [(max(64, int(v * options.size)), d) for v, d in sides]
    ways, free = _ways(count, widths, device), _free(device)
    needed = {"hidden": 0, "logits": 4, "torch": 8}  # tensors as large as the wider side's logits
    largest = 4 * count * max(v for v, _ in widths)
    kept = {name: call for name, call in ways.items() if needed[name] * largest < free}
    ways["hidden"]()  # loads the libraries
    held = {name: peak_above(call, device) / 2**20 for name, call in kept.items()}
    row: Row = {"step": label, "tokens a side": count}
    for name in ways:
        row[f"{name} MiB"] = held.get(name, nan)
    for name in ("logits", "torch"):
        row[f"memory, of {name}"] = held["hidden"] / max(1, held[name]) if name in held else nan
        found = [race(ways["hidden"], ways[name], options.repeat)] if name in held else []
        row[f"time, of {name}"] = found[0].row(None)["ratio"] if found else nan
    return row


def _ways(
    count: int, widths: list[tuple[int, int]], device: str, context: int = 0
) -> dict[str, Callable[[], None]]:
    """Return a step, forward and backward, by the way to it.

    The teacher has read `context` tokens before, which are in no chunk.
    """
    ours, theirs = (
        _head(count + number * context, v, d, device, number)
        for number, (v, d) in enumerate(widths)
    )
    index, aligned = _index(widths[0][0], widths[1][0]).to(device), make_alignment(count, device)
    theirs_of = "teacher_chunk_id", "teacher_exact_partition_mask"
    padded = {
        n: pad(getattr(aligned, n), (context, 0), value=-(n == theirs_of[0])) for n in theirs_of
    }
    aligned = replace(aligned, **padded)
    targets = torch.randint(widths[0][0], (1, count), device=device)
    for tensor in ours:
        tensor.requires_grad_()
    config = losses.ChunkLossConfig()

    def in_one_pass(student: Any, teacher: Any) -> Tensor:
        chunks = number_chunks(aligned, ChunkFilter(starts_only=True))
        plans = [
            plan_cross_entropy(student, targets),
            plan_event_kl(wrap_logits(student, teacher, chunks), index, config=config),
        ]  # fmt: skip
        return one_pass(student, plans, (1.0, 1.0))[0]

    def by_torch(student: Tensor, teacher: Tensor) -> Tensor:
        own = cross_entropy(student.flatten(0, 1), targets.flatten())
        return losses.event_kl(student, teacher, index, aligned) + own

    def logits() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = theirs[0] @ theirs[1].t()
        return ours[0] @ ours[1].t(), teacher

    def run(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        for tensor in ours:  # so that none is held before the next step
            tensor.grad = None
        if device != "cpu":
            torch.cuda.synchronize()

    def hidden() -> Tensor:
        return in_one_pass(losses.HiddenLogits(*ours), losses.HiddenLogits(*theirs))

    calls = {
        "hidden": hidden, "logits": lambda: in_one_pass(*logits()),
        "torch": lambda: by_torch(*logits()),
    }  # fmt: skip
    return {name: partial(run, call) for name, call in calls.items()}


def beside_liger(options: Namespace) -> Iterator[Row]:
    """The same KL of one vocabulary by Liger's chunked loss, with its chunk sizes.

    `pip download --no-deps liger-kernel`, unpacked into the folder `--liger`.
    """
    if options.liger is None:
        return
    sys.path.insert(0, str(options.liger))
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # type: ignore[import-not-found]

    count = max(16, int(2048 * options.size))
    width = max(64, int(128_256 * options.size))
    (hidden, weight), theirs = (_head(count, width, d, "cpu", d) for d in (576, 640))
    hidden.requires_grad_()
    weight.requires_grad_()
    mask, labels = torch.ones(1, count), torch.zeros(count, dtype=torch.int64)

    def ours() -> None:
        student, teacher = losses.HiddenLogits(hidden, weight), losses.HiddenLogits(*theirs)
        losses.same_tokenizer_kl(student, teacher, mask).backward()
        hidden.grad = weight.grad = None

    def liger(chunk_size: int) -> None:
        function = LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False,
            chunk_size=chunk_size,
        )  # fmt: skip
        function(hidden[0], weight, theirs[0][0], theirs[1], labels).backward()
        hidden.grad = weight.grad = None

    ours()  # loads the libraries
    held = peak_above(ours, "cpu") / 2**20
    for size in CHUNK_SIZES:
        peer = partial(liger, size)
        of_peer = peak_above(peer, "cpu") / 2**20
        found = race(ours, peer, options.repeat).row(None)
        yield {"Liger's chunk size": size, "MiB": held, "its MiB": of_peer, **found}


def _head(count: int, width: int, d: int, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return random hidden states and a head."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, count, d, generator=generator).to(device)
    return hidden, (torch.randn(width, d, generator=generator) / d**0.5).to(device)


def _index(width: int, columns: int) -> losses.EventIndex:
    """Return events: seven tenths of the narrower side, the first tokens one to one."""
    random = np.random.default_rng(0)
    num_events = int(0.7 * min(width, columns))
    sides = [
        np.append(np.arange(num_events), random.integers(0, num_events, size - num_events))
        for size in (width, columns)
    ]
    events: Any = SimpleNamespace(
        student_event=sides[0], teacher_event=sides[1], num_events=num_events,
        shape=(width, columns),
    )  # fmt: skip
    return losses.event_index(events)


def _free(device: str) -> float:
    """Return the bytes of memory that are free."""
    if device != "cpu":
        return float(torch.cuda.mem_get_info()[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        [line] = [line for line in file if line.startswith("MemAvailable")]
    return int(line.split()[1]) * 1024.0


def make_alignment(positions: int, device: str) -> ShiftedAlignment[torch.Tensor]:
    """Return chunks of one to three positions on either side."""
    random = np.random.default_rng(1)
    ids = [np.repeat(np.arange(positions), random.integers(1, 4, positions)) for _ in range(2)]
    student, teacher = (torch.from_numpy(row[None, :positions]).to(device) for row in ids)
    valid = torch.ones((1, positions), dtype=torch.bool, device=device)
    count = torch.tensor([positions], device=device)
    return ShiftedAlignment(valid, valid, ~valid, ~valid, student, teacher, count, valid)


def peak_above(call: Callable[[], object], device: str) -> int:
    """Return the bytes that a call holds at its peak, above those held before it."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = memory_status("VmRSS")
    call()
    return memory_status("VmHWM") - before
