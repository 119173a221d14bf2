"""Measure P-KL's memory and time against a bare log-softmax over the student's logits.

Memory: what the process holds at its peak above what it held before the call, with the logits
already there, as a multiple of the gradient plus the map. Time: forward and backward, as a multiple
of one log-softmax forward and backward over the student's logits, plus the maximum of each of the
teacher's columns and the gather of k of them; both take turns in one process.

    python scripts/benchmark_losses.py --size 0.1            # a tenth of both vocabularies
    python scripts/benchmark_losses.py                       # 128k × 152k, T = 512: 2 GB
    python scripts/benchmark_losses.py --map llama_to_qwen.safetensors
    python scripts/benchmark_losses.py --device cuda --positions 2048
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from xtok.aligner import AlignmentBatch
from xtok.losses import PKLConfig, p_kl
from xtok.projection import Edges, ProjectionMap, RowKind, map_order, sum_duplicates
from xtok.runtime import Projection
from xtok.tokens import Vocabulary

STUDENT, TEACHER = 128_256, 151_936


def synthetic_map(num_rows: int, num_columns: int, *, spread: bool) -> ProjectionMap:
    """Return a map in the shape of a real one: 85 % of the rows have one entry, the rest four.

    Teacher ids are drawn by Zipf's law, so that frequent tokens have many rows; or evenly.
    """
    random = np.random.default_rng(0)
    counts = np.where(random.random(num_rows) < 0.85, 1, 4)
    rows = np.repeat(np.arange(num_rows), counts)
    prior = np.ones(num_columns) if spread else 1 / (np.arange(num_columns) + 1000.0)
    columns = random.choice(num_columns, len(rows), p=prior / prior.sum())
    single = np.repeat(counts == 1, counts)
    columns[single] = random.permutation(num_columns)[: single.sum()] if spread else columns[single]
    edges = sum_duplicates(Edges(rows, columns, random.random(len(rows)))).normalized()
    edges = edges.take(map_order(edges))
    return ProjectionMap(
        student=_vocabulary(num_rows),
        teacher=_vocabulary(num_columns),
        student_ids=edges.student_ids.astype(np.int32),
        teacher_ids=edges.teacher_ids.astype(np.int32),
        weights=edges.weights.astype(np.float32),
        row_kind=np.full(num_rows, RowKind.MIXED, np.uint8),
        scale_slot=None,
        method="synthetic",
        top_k=4,
    )


def _vocabulary(width: int) -> Vocabulary:
    return Vocabulary(
        model_id="synthetic",
        revision=None,
        backend=None,
        vocab_size=width,
        width_source="option",
        tokenizer_vocab_size=width,
        table=None,
    )


def make_alignment(positions: int, device: str) -> AlignmentBatch:
    """Return chunks of one to three positions on either side."""
    random = np.random.default_rng(1)
    ids = [np.repeat(np.arange(positions), random.integers(1, 4, positions)) for _ in range(2)]
    student, teacher = (torch.from_numpy(row[None, :positions]).to(device) for row in ids)
    valid = torch.ones((1, positions), dtype=torch.bool, device=device)
    unused = torch.zeros((1, positions), dtype=torch.bool, device=device)
    count = torch.tensor([positions], device=device)
    return AlignmentBatch(valid, valid, unused, unused, student, teacher, count)


def peak_above(call: Callable[[], object], device: str) -> int:
    """Return how many bytes a call held at its peak above what was held before it."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def seconds(call: Callable[[], object], device: str) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description="Measure P-KL's memory and time.")
    parser.add_argument("--size", type=float, default=1.0, help="scale of both vocabularies and k")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5, help="turns that the two take")
    parser.add_argument("--map", type=Path, help="a real map instead of a synthetic one")
    parser.add_argument("--spread", action="store_true", help="draw the map's columns evenly")
    parser.add_argument("--learnable", action="store_true", help="with gradients to the map")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    top_k, device = max(1, round(options.top_k * options.size)), options.device
    if options.map:
        weights = ProjectionMap.load(options.map)
    else:
        widths = (max(2, round(width * options.size)) for width in (STUDENT, TEACHER))
        weights = synthetic_map(*widths, spread=options.spread)
    num_rows, num_columns = weights.shape
    projection = Projection(weights, learnable=options.learnable).to(device)
    torch.manual_seed(0)
    student = torch.randn(1, options.positions, num_rows, device=device).requires_grad_()
    teacher = torch.randn(1, options.positions, num_columns, device=device)
    teacher -= 2 * torch.arange(num_columns, device=device).log1p() / np.log(num_columns)
    alignment = make_alignment(options.positions, device)
    upstream = torch.randn_like(student)

    def ours() -> None:
        student.grad = None
        p_kl(student, teacher, projection, alignment, PKLConfig(top_k=top_k)).backward()

    def bare() -> None:
        student.grad = None
        torch.log_softmax(student, -1).backward(upstream)
        columns = teacher.amax((0, 1)).topk(top_k).indices
        teacher.index_select(2, columns)

    small = Projection(synthetic_map(64, 64, spread=True)).to(device)
    part = student[..., :64].detach().requires_grad_()
    p_kl(part, teacher[..., :64], small, alignment).backward()  # loads the libraries
    peak = peak_above(ours, device)
    gradient = student.numel() * 4
    arrays = sum(a.numel() * a.element_size() for a in projection.state_dict().values())
    times = [(seconds(bare, device), seconds(ours, device)) for _ in range(options.rounds)]
    ratios = sorted(our / reference for reference, our in times)
    best = [min(column) for column in zip(*times, strict=True)]
    shape = f"T = {options.positions}, {num_rows:,} × {num_columns:,}, k = {top_k:,}"
    print(f"{shape}, {weights.nnz:,} entries, {device}")
    print(f"gradient {gradient / 2**20:.1f} MiB, map {arrays / 2**20:.1f} MiB")
    print(f"peak above the call's start: {peak / 2**20:.1f} MiB, ", end="")
    print(f"{peak / (gradient + arrays):.2f} × the gradient and the map")
    print(f"bare {best[0]:.3f} s, P-KL {best[1]:.3f} s, ratio {best[1] / best[0]:.2f} ", end="")
    print(f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} turns)")


if __name__ == "__main__":
    main()
