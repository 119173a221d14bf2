"""The first batch of a run beside what the models' own libraries make of it."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from xtok.alignment.aligner import AlignmentBatch, PaddedAlignment
from xtok.inspection.first_rows import aligned, side_differences
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import listed
from xtok.training.collator import DistillationCollator
from xtok.training.heads import Head, rng_restored, router_loss, run, takes, unwrapped
from xtok.training.rows import IGNORED

MAX_TOKENS = 1024
"""Of each side, what the audit runs: it makes whole logits, which of a batch may not fit."""

MOST_BITS = 8.5
"""Bits per byte beyond what a teacher of random weights has: 8, if all bytes are as likely."""


FEWEST_BYTES = 32
"""Of the targets, below which a teacher's bits per byte are noise."""


@dataclass(frozen=True)
class Audit:
    """What a run assumes of its models and its data, beside what their libraries compute."""

    held: tuple[str, ...]  # what was compared, with its values
    differences: tuple[str, ...]  # a sentence each, with both values

    @property
    def line(self) -> str:
        """All that was compared, where nothing differs."""
        return f"first batch: {', '.join(self.held)}: as the libraries have them"

    def report(self) -> None:
        """Print the line to stderr; or warn of each difference."""
        for difference in self.differences:
            warnings.warn(f"first batch: {difference}", stacklevel=3)
        if not self.differences:
            sys.stderr.write(f"{self.line}\n")


def audit(
    models: Sequence[Any],
    batch: Mapping[str, Any],
    collator: Any,
    heads: Sequence[Head | None] = (),
) -> Audit:
    """Compare the first batch of a run with what the libraries of its models make of it.

    That is ids, roles and masks (`AutoTokenizer`, `apply_chat_template`); the student's
    cross-entropy (its own `forward(labels=…)`); which parameters move; each teacher's bits per
    byte, in two runs; and what is aligned. The student runs once, and each teacher twice, on the
    first `MAX_TOKENS` tokens. Nothing of the models is changed, nor the next random numbers.

    Args:
        models: the student, then its teachers, as a step runs them; None for stored predictions.
        batch: of `prepare`, on their device.
        collator: that made it.
        heads: of `find_heads`.
    """
    held: list[str] = []
    differences = [*_label_differences(batch)]
    student, *teachers = models
    tokenizers: list[Tokenizer | None] = [None] * len(models)
    if isinstance(collator, DistillationCollator):
        known = [collator.student, *collator.teachers]
        templates = collator.student_template, *collator.teacher_templates
        sides, tokenizers = [batch, *batch["teachers"]], [*known]
        for tokenizer, template, side in zip(known, templates, sides, strict=True):
            if "samples" in side:
                rows = [
                    ids[mask != 0].tolist()
                    for ids, mask in zip(side["input_ids"], side["attention_mask"], strict=True)
                ]
                differences += side_differences(
                    tokenizer, side["samples"].rows, rows, template=template
                )
        compared = "samples" in batch and all(one.library is not None for one in known)
        held += ["ids, masks"] if compared else []
    with rng_restored(batch["input_ids"].device):
        of_student = _ModelRun("the student", student, _first(batch), tokenizers[0])
        loss = _student_loss(of_student, differences)
        held += [] if loss is None else [f"loss {loss:.2f}"]
        held += ["heads"] * any(heads)
        for number, (teacher, side) in enumerate(zip(teachers, batch["teachers"], strict=True)):
            name = "the teacher" if len(teachers) == 1 else f"teacher {number + 1}"
            if teacher is not None:
                differences += _shared(student, teacher, name)
                theirs = _ModelRun(name, teacher, _first(side), tokenizers[number + 1])
                differences += _teacher_differences(theirs, of_student)
                if theirs.bytes:
                    beside = f" (the student {of_student.bits:.2f})" if of_student.bytes else ""
                    held.append(f"{name} {theirs.bits:.2f} bits per byte{beside}")
            if "alignment" in side:
                of_pair = collator.student, collator.teachers[number]
                counts = aligned(of_pair, *_arrays(batch["labels"], side))
                held.append(f"{counts.share:.0%} aligned")
                differences += [f"{name}: {line}" for line in counts.differences()]
    return Audit(tuple(held), tuple(differences))


def _arrays(labels: Tensor, side: Mapping[str, Any]) -> tuple[Any, Any, AlignmentBatch]:
    """Return the student's labels, and a teacher's ids and alignment, as arrays."""
    fields = {n: x.cpu().numpy() for n, x in vars(side["alignment"]).items()}
    return labels.cpu().numpy(), side["input_ids"].cpu().numpy(), PaddedAlignment(**fields)


def _first(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first rows of a side, of `MAX_TOKENS` tokens together, without padding before."""
    mask = side["attention_mask"]
    start = int((mask != 0).any(0).int().argmax())
    width = min(mask.shape[1] - start, MAX_TOKENS)
    count = max(1, MAX_TOKENS // width)
    names = ("input_ids", "attention_mask", "labels", "targets", "position_ids")
    return {name: side[name][:count, start : start + width] for name in names if name in side}


def _label_differences(batch: Mapping[str, Any]) -> Iterator[str]:
    """Compare each side's labels with its ids: a target is its own token, and no padding."""
    for number, side in enumerate([batch, *batch["teachers"]]):
        if "labels" not in side:
            continue
        name = f"teacher {number}" if number else "the student"
        ids, labels = side["input_ids"], side["labels"]
        is_target = labels != IGNORED
        if not bool(is_target[:, 1:].any()):
            yield f"{name} has no target: nothing is learned of this batch"
        wrong = (is_target & (labels != ids)).nonzero()
        if len(wrong):
            row, place = wrong[0].tolist()
            yield (
                f"{len(wrong)} of {int(is_target.sum())} labels of {name} are not its ids, as in "
                f"row {row}, token {place}: label {int(labels[row, place])}, id "
                f"{int(ids[row, place])}"
            )
        if padding := int((is_target & (side["attention_mask"] == 0)).sum()):
            yield f"{padding} of {int(is_target.sum())} targets of {name} are padding"


@dataclass
class _ModelRun:
    """A model, its rows, and what it makes of them."""

    name: str
    model: Any
    rows: dict[str, Any]
    tokenizer: Tokenizer | None
    nats: list[float] = field(default_factory=list)  # of the targets, read at places −1, 0 and 1
    bytes: int = 0  # of the targets
    uniform: float = 0.0  # nats, if each token were as likely as any other

    @property
    def bits(self) -> float:
        """Bits per byte."""
        return self.nats[1] / math.log(2) / self.bytes

    def read(self, logits: Tensor) -> Tensor | None:
        """Keep the losses of logits `[B, T, V]` on the targets; return −log p of each, float32."""
        targets, ids = self.rows["targets"], self.rows["input_ids"]
        is_target = targets >= 0
        if not bool(is_target.any()):
            return None
        log_p = logits.detach()[is_target].float().log_softmax(-1)
        behind = nn.functional.pad(ids[:, 2:], (0, 2), value=0)
        places = [wanted[is_target] for wanted in (ids, targets, behind)]
        lost = [-log_p.gather(1, wanted[:, None])[:, 0] for wanted in places]
        self.nats = [float(one.sum(dtype=torch.float64)) for one in lost]
        self.uniform = len(lost[1]) * math.log(log_p.shape[1])
        if self.tokenizer is not None:
            self.bytes = int(self.tokenizer.table.lengths[places[1].cpu().numpy()].sum())
        return lost[1]


def _student_loss(side: _ModelRun, differences: list[str]) -> float | None:
    """Run the student with labels; return its own loss, and add where it differs from xtok's."""
    model = getattr(unwrapped(side.model), "_orig_mod", unwrapped(side.model))
    inner = side.model if _is_sharded(model) else model
    labels = {"labels": side.rows["labels"]} if takes(model, "labels") else {}
    with torch.set_grad_enabled(inner is model):
        outputs = run(inner, side.rows, **labels)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        differences.append("no parameter of the student is trained: requires_grad is False")
    lost = side.read(outputs.logits)
    loss = getattr(outputs, "loss", None)
    if loss is None or lost is None:
        return None
    router = router_loss(model, outputs)
    ours = float(lost.mean()) + (0.0 if router is None else float(router.detach()))
    own, eps = float(loss.detach()), torch.finfo(loss.dtype).eps
    if not abs(ours - own) <= (1e-4 + 4 * eps) * max(1.0, abs(own)):
        what = "cross-entropy" if router is None else "cross-entropy and the loss of its router"
        differences.append(
            f"the student's own loss, of forward(labels=…), is {own:.4f}, and its {what} "
            f"{ours:.4f}: what it adds or does otherwise is not trained"
        )
    reached = _reached(loss)
    if reached is not None:
        # Experts that no token chose have no part in the loss.
        left = [n for n, p in trained.items() if id(p) not in reached and ".experts." not in n]
        if left:
            differences.append(
                f"{len(left)} of {len(trained)} trainable tensors of the student get no gradient: "
                f"{listed(left)}"
            )
    return own


def _is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are in pieces, which its wrapper puts together as it runs."""
    in_pieces = any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())
    return in_pieces or any("FullySharded" in type(m).__name__ for m in model.modules())


def _reached(loss: Tensor) -> set[int] | None:
    """Return the ids of the leaves that a loss has gradients for; None if that cannot be seen."""
    nodes, seen, found = [loss.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Checkpoint" in node.name():  # reentrant: it hides what is inside
            return None
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [before for before, _ in node.next_functions]
    return found or None


def _shared(student: Any, teacher: Any, name: str) -> Iterator[str]:
    """Name the parameters that are trained, and are the teacher's too."""
    theirs = {_memory(p) for p in teacher.parameters()}
    trained = {n: p for n, p in unwrapped(student).named_parameters() if p.requires_grad}
    both = [n for n, p in trained.items() if _memory(p) in theirs]
    if both:
        yield (
            f"{name} has {len(both)} of the student's {len(trained)} trainable tensors, and "
            f"changes as they train: {listed(both)}; give it a copy if it should not"
        )


def _memory(parameter: Tensor) -> int:
    """Return where a parameter is, however many share it; who it is, where it is in pieces."""
    is_whole = type(parameter.data) is Tensor and parameter.device.type != "meta"
    return (parameter.data_ptr() if is_whole else 0) or id(parameter)


@torch.no_grad()
def _teacher_differences(side: _ModelRun, student: _ModelRun) -> Iterator[str]:
    """Run a teacher twice; yield where it is not what it should be."""
    name, model = side.name, side.model
    if any(module.training for module in model.modules()):
        yield f"{name} is in training mode: call its eval()"
    first, second = (side.read(run(model, side.rows).logits) for _ in range(2))
    if first is None or second is None:
        return
    apart = float((first - second).abs().max())
    eps = torch.finfo(next(model.parameters()).dtype).eps
    if not apart <= max(1e-5, 4 * eps) * max(1.0, float(first.max())):
        values = [float(lost.mean()) for lost in (first, second)]
        yield f"{name} has two results for one batch, {values[0]:.5f} and {values[1]:.5f}: dropout?"
    if 0 < side.bytes < FEWEST_BYTES:
        return
    earlier, own, later = (nats / max(1, side.bytes) / math.log(2) for nats in side.nats)
    if side.bytes and not own <= MOST_BITS:
        yield f"{name} needs {own:.2f} bits per byte of its own ids, and a random one 8"
    elif side.nats[1] > side.uniform and student.nats and student.nats[1] < 0.8 * student.uniform:
        yield (
            f"{name} knows less of its ids than if all were as likely: {side.nats[1]:.0f} nats for "
            f"{side.uniform:.0f}; the student has {student.nats[1]:.0f} for {student.uniform:.0f}"
        )
    for where, bits in (("the token before", earlier), ("the token behind", later)):
        if bits < own / 2:
            yield (
                f"{name} predicts {where} its targets better, with {bits:.2f} bits per byte for "
                f"{own:.2f}: its logits or ids are shifted"
            )
