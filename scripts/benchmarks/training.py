"""What runs in PyTorch: the similarity search of `generate`, and P-KL."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import harness
from benchmarks.harness import Row, Run, memory_status, race, seconds
from xtok import ProjectionMap, build
from xtok.alignment.aligner import AlignmentBatch
from xtok.embeddings.similarity import Cosine
from xtok.threads import one_thread_each
from xtok.training.losses import PKLConfig, p_kl
from xtok.training.module import ProjectionModule

DIMENSION, POSITIONS, TOP_K = 384, 512, 8192
_BLOCK = 1024  # rows of the bare product at once: 0.6 GB with all of the teacher's columns


def finish(device: str) -> None:
    """Wait for the GPU if there is one."""
    if device != "cpu":
        torch.cuda.synchronize()


def similarity(options: Namespace) -> Iterator[Row]:
    """Search the ten most similar of random vectors; each turn takes a part of the students."""
    device, widths = options.device, harness.scaled_widths(options)
    random = np.random.default_rng(0)
    students, teachers = (random.standard_normal((n, DIMENSION), np.float32) for n in widths)
    parts = np.array_split(students, options.repeat)
    ours, peer = (iter([students[:4096], *parts]) for _ in range(2))  # the first warms up
    dtype = torch.float32 if device == "cpu" else getattr(torch, options.dtype)
    num_threads = torch.get_num_threads()
    with one_thread_each() as pool:
        cosine = Cosine(teachers, device=device, dtype=options.dtype, chunk_size=8192, pool=pool)

        def search() -> Run:
            part = next(ours)
            call = partial(cosine.top_k, part, 10, absolute=True, advance=lambda _: None)
            return Run(seconds(call))

        def bare() -> Run:
            torch.set_num_threads(num_threads)
            vectors = [torch.from_numpy(v).to(device, dtype) for v in (next(peer), teachers)]
            taken = seconds(lambda: bare_product(*vectors))
            torch.set_num_threads(1)
            return Run(taken)

        times = race(search, bare, options.repeat)
    work = 2 * widths[0] * widths[1] * DIMENSION / 1e9
    yield {
        "search": f"{widths[0]:,} × {widths[1]:,} × {DIMENSION}, {device} {options.dtype}",
        **times.row(),
        "GFLOP/s": work / sum(times.ours),
        "of the bare product's rate": sum(times.peer) / sum(times.ours),
        "MiB on the GPU": 0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20,
    }


def bare_product(students: torch.Tensor, teachers: torch.Tensor) -> None:
    """Multiply in blocks of rows, and discard the result."""
    product = torch.empty(_BLOCK, len(teachers), dtype=students.dtype, device=students.device)
    for rows in students.split(_BLOCK):
        torch.mm(rows, teachers.T, out=product[: len(rows)])
    finish(students.device.type)


def p_kl_cost(options: Namespace) -> Iterator[Row]:
    """P-KL with a synthetic map, a real one, and the real one learnable."""
    widths = harness.scaled_widths(options)
    yield p_kl_row("synthetic", frequent_map(*widths), options)
    if options.size == 1:
        real = build(harness.path_of("llama3"), harness.path_of("qwen"))
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
    """Measure forward and backward beside the minimum for a loss over all logits.

    The minimum: a log-softmax forward and backward over the student's logits, the maximum of each
    teacher column, and the gather of k columns. Memory is the peak above that before the call.
    """
    device = options.device
    positions, top_k = max(16, int(POSITIONS * options.size)), max(1, int(TOP_K * options.size))
    torch.manual_seed(0)
    student, teacher = (torch.randn(1, positions, n, device=device) for n in weights.shape)
    student.requires_grad_()
    teacher -= 2 * torch.arange(weights.shape[1], device=device).log1p() / np.log(weights.shape[1])
    module = ProjectionModule(weights, learnable=learnable).to(device)
    alignment, upstream = make_alignment(positions, device), torch.randn_like(student)

    def ours() -> None:
        student.grad = None
        p_kl(student, teacher, module, alignment, PKLConfig(top_k=top_k)).backward()
        finish(device)

    def bare() -> None:
        student.grad = None
        torch.log_softmax(student, -1).backward(upstream)
        teacher.index_select(2, teacher.amax((0, 1)).topk(top_k).indices)
        finish(device)

    small = ProjectionModule(frequent_map(16, 16)).to(device)
    part = student[..., :16].detach().requires_grad_()
    p_kl(part, teacher[..., :16], small, alignment).backward()  # loads the libraries
    peak = peak_above(ours, device)
    arrays = sum(a.numel() * a.element_size() for a in module.state_dict().values())
    times = race(ours, bare, options.repeat)
    return {
        "map": f"{name}, {weights.nnz:,} entries", "positions": positions, "k": top_k,
        "held MiB": peak / 2**20, "× gradient and map": peak / (student.numel() * 4 + arrays),
        **times.row(), "best": min(times.ours) / min(times.peer),
    }  # fmt: skip


def make_alignment(positions: int, device: str) -> AlignmentBatch:
    """Return chunks of one to three positions on either side."""
    random = np.random.default_rng(1)
    ids = [np.repeat(np.arange(positions), random.integers(1, 4, positions)) for _ in range(2)]
    student, teacher = (torch.from_numpy(row[None, :positions]).to(device) for row in ids)
    valid = torch.ones((1, positions), dtype=torch.bool, device=device)
    count = torch.tensor([positions], device=device)
    return AlignmentBatch(valid, valid, ~valid, ~valid, student, teacher, count)


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
