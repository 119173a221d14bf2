"""The first batch of a run, compared with the models' own libraries."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xtok.alignment.aligner import PaddedAlignment
from xtok.inspection.first_rows import aligned, compare_side, token_ids
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import listed
from xtok.training.collator import DistillationCollator, shifted_targets
from xtok.training.heads import (
    Head,
    evaluating,
    require_rows,
    rng_restored,
    router_loss,
    run,
    takes,
    unwrapped,
)
from xtok.training.losses.logits import as_logits
from xtok.training.rows import IGNORED
from xtok.training.samples import SampleRow
from xtok.training.sparse import block_length

MAX_TOKENS = 1024
"""Tokens of each side that the models read, for their bits per byte."""

FEWEST_TOKENS = 32
"""Tokens for the student's own loss, which makes whole logits: 32 MiB for each 250,000 ids."""

MOST_BITS = 8.5
"""Maximum bits per byte of a teacher. Random weights have about 8, since all bytes are equally
likely."""

FEWEST_BYTES = 32
"""Minimum bytes of the targets; below, bits per byte are noise."""

ABOVE_UNIFORM = 1.2
"""Maximum nats of the student, in units of a uniform guess. A student from scratch has 1.0."""

BEHIND, FAR_BEHIND = 1.02, 1.5
"""Ratios of the teacher's to the student's bits per byte: for a note, and for a warning."""


@dataclass
class Audit:
    """The findings on a first batch."""

    compared: list[str] = field(default_factory=list)  # with the values
    undetermined: list[str] = field(default_factory=list)  # points without a comparison
    differences: list[str] = field(default_factory=list)  # a sentence each, with both values
    notes: list[str] = field(default_factory=list)  # effects that may be intended

    @property
    def line(self) -> str:
        """Summary: the values, the undetermined points, and the number of differences."""
        missing = f"; not determined: {', '.join(self.undetermined)}" if self.undetermined else ""
        number = len(self.differences)
        result = f"{number} differences" if number > 1 else "1 difference" * number
        return (
            f"first batch: {', '.join(self.compared)}{missing}: "
            f"{result or 'no differences from the libraries'}"
        )

    @classmethod
    def of_processes(cls, audits: Sequence[Audit]) -> Audit:
        """Join the findings of all processes, each with its ranks; the values are rank 0's."""

        def joined(name: str) -> list[str]:
            lines = dict.fromkeys(line for one in audits for line in getattr(one, name))
            ranks = [[n for n, one in enumerate(audits) if x in getattr(one, name)] for x in lines]
            return [
                f"process {listed(of_line)}: {line}"
                for line, of_line in zip(lines, ranks, strict=True)
            ]

        if len(audits) == 1:
            return audits[0]
        named = {name: joined(name) for name in ("undetermined", "differences", "notes")}
        return cls(audits[0].compared, **named)

    def report(self) -> None:
        """Print the line and the notes to stderr, and warn of each difference."""
        sys.stderr.write(f"{self.line}\n")
        for note in self.notes:
            sys.stderr.write(f"note: first batch: {note}\n")
        for difference in self.differences:
            warnings.warn(f"first batch: {difference}", stacklevel=3)


def audit(
    models: Sequence[Any],
    batch: Mapping[str, Any],
    collator: Any,
    heads: Sequence[Head | None] = (),
) -> Audit:
    """Compare the first batch of a run with its texts and with the models' own libraries.

    It compares ids, roles and masks (`AutoTokenizer`, `apply_chat_template`), labels, alignment,
    the student's cross-entropy (`forward(labels=…)`), the parameters that get a gradient, and the
    bits per byte of all models. Models and random state do not change. With heads, it needs no more
    memory than a training step from hidden states.

    Args:
        models: the student, then its teachers, as a step runs them; None for stored predictions.
        batch: a batch of `prepare`, on the models' device.
        collator: the collator that made it.
        heads: as `find_heads` returns them; without them, models make whole logits.

    Raises:
        XtokError: if a model has no embedding for an id.
    """
    found, sides = Audit(), [batch, *batch["teachers"]]
    names = ["the student", *(f"teacher {n}" for n in range(1, len(sides)))]
    if len(sides) == 2:
        names[1] = "the teacher"
    tokenizers: list[Tokenizer | None] = [None] * len(sides)
    if isinstance(collator, DistillationCollator):
        tokenizers = [collator.student, *collator.teachers[: len(batch["teachers"])]]
        _compare_rows(found, names, sides, collator)
    else:
        found.differences += _label_differences(names[0], batch)
    for number, (model, side) in enumerate(zip(models, sides, strict=True)):
        require_rows(model, side, number)
    num_rows = max(1, MAX_TOKENS // max(x["input_ids"].shape[1] for x in sides if "input_ids" in x))
    student, *teachers = (
        _ModelRun(name, model, {} if model is None else _first(side, num_rows), tokenizer, head)
        for name, model, side, tokenizer, head in zip(
            names, models, sides, tokenizers, heads or [None] * len(sides), strict=True
        )
    )
    with rng_restored(batch["input_ids"].device):
        _compare_student(found, student, _window(batch))
        found.compared += ["heads"] * any(heads)
        for number, teacher in enumerate(teachers):
            if teacher.model is not None:
                _compare_teacher(found, student, teacher)
            if "alignment" in batch["teachers"][number]:
                pair = collator.pairs[number].tokenizers
                _compare_alignment(found, names[number + 1], pair, batch, number)
    return found


def _compare_rows(
    found: Audit, names: Sequence[str], sides: Sequence[Any], collator: DistillationCollator
) -> None:
    tokenizers = [collator.student, *collator.teachers]
    templates = [collator.student_template, *collator.teacher_templates]
    is_compared = True
    for number, (name, side) in enumerate(zip(names, sides, strict=True)):
        tokenizer, samples, rows = tokenizers[number], side.get("samples"), None
        both = zip(side["input_ids"].cpu(), side["attention_mask"].cpu(), strict=True)
        ids = [row[mask != 0].tolist() for row, mask in both]
        if samples is not None:
            with warnings.catch_warnings(action="ignore"):  # the collator has issued them
                rows = collator.rows(number, samples.rows)
            report = compare_side(tokenizer, samples.rows, template=templates[number], rows=ids)
            found.differences += [f"{tokenizer.vocabulary.model_id}: {x}" for x in report.shown]
            is_compared &= report.is_compared
        elif "realized_logprob" not in sides[-1]:
            found.differences += _beginning_differences(name, tokenizer, ids, side)
        found.differences += _label_differences(name, side, tokenizer, rows, collator.max_length)
    if "samples" not in sides[0]:
        found.undetermined.append("ids and masks (the batch has no texts)")
    elif not is_compared:
        found.undetermined.append("ids and masks (a tokenizer has no library)")
    else:
        found.compared.append("ids, masks")


def _beginning_differences(
    name: str, tokenizer: Tokenizer, rows: Sequence[list[int]], side: Mapping[str, Any]
) -> Iterator[str]:
    """Check the bos tokens of rows without texts, as on policy."""
    bos = {*token_ids(tokenizer, "bos")}
    if twice := sum(len(row) > 1 and {*row[:2]} <= bos for row in rows):
        yield f"{twice} of {len(rows)} rows of {name} begin with two bos tokens"
    is_all = bool(((side["labels"] != IGNORED) == (side["attention_mask"] != 0)).all())
    if is_all and all({*row[:1]} <= bos for row in rows):
        yield (
            f"all tokens of {name} are targets, also the bos tokens, which no model writes: set "
            f"the labels of prompts to {IGNORED}"
        )


def _label_differences(
    name: str,
    side: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    rows: Sequence[SampleRow] | None = None,
    max_length: int | None = None,
) -> Iterator[str]:
    """Compare labels with ids, and with the targets of the texts.

    Without `rows`, an end of a turn or text should be a target if it follows a target.
    """
    ids, labels, kept = (side[n].cpu() for n in ("input_ids", "labels", "attention_mask"))
    is_target, kept = labels != IGNORED, kept != 0
    end_ids = [] if tokenizer is None else token_ids(tokenizer, "eos", "turn_end")
    is_end = torch.isin(ids, torch.tensor(end_ids, dtype=torch.int64))
    expected = is_target.clone()
    if rows is not None:
        num_cut = _set_targets(expected, kept, rows, max_length, end_ids)
        if num_cut and not bool((is_target & is_end).any()):
            yield f"max_length {max_length} cuts all ends of {num_cut} of {len(ids)} rows of {name}"
    elif not bool((is_target & is_end).any()):
        expected |= is_end & kept & nn.functional.pad(is_target[:, :-1], (1, 0))
    if not bool(is_target[:, 1:].any()):
        yield f"{name} has no target: nothing is learned from this batch"
    if not torch.equal(side["targets"], shifted_targets(side)):
        yield f"the targets of {name} are not its labels, shifted by one position"
    num_ends, num_kept = int((expected & is_end).sum()), int((is_target & is_end).sum())
    if num_kept < num_ends:
        yield f"{num_kept} of {num_ends} ends of turns or texts are targets of {name}"
    for is_wrong, problem in (
        (is_target & (labels != ids), "labels of {} are not its ids"),
        (is_target & ~kept, "targets of {} are padding"),
        (expected & ~is_target & ~is_end, "tokens of answers are no targets of {}"),
        (is_target & ~expected & kept, "targets of {} are in no answer"),
    ):
        if places := is_wrong.nonzero().tolist():
            row, place = places[0]
            yield (
                f"{len(places)} {problem.format(name)}, as in row {row}, token {place}: label "
                f"{int(labels[row, place])}, id {int(ids[row, place])}"
            )


def _set_targets(
    expected: Tensor,
    kept: Tensor,
    rows: Sequence[SampleRow],
    max_length: int | None,
    end_ids: Sequence[int],
) -> int:
    """Set the targets of some texts, bool `[B, T]`; count the rows that lose all their ends."""
    num_cut = 0
    for number, row in enumerate(rows):
        places = row.kept(max_length)
        if int(kept[number].sum()) == len(places):
            expected[number, kept[number]] = torch.from_numpy(row.is_target[places])
        ends = np.isin(row.ids, end_ids) & row.is_target
        num_cut += bool(ends.any() and not ends[places].any())
    return num_cut


def _compare_alignment(
    found: Audit,
    name: str,
    tokenizers: tuple[Tokenizer, Tokenizer],
    batch: Mapping[str, Any],
    number: int,
) -> None:
    side = batch["teachers"][number]
    arrays = {n: x.cpu().numpy() for n, x in vars(side["alignment"]).items()}
    ids = batch["input_ids"].cpu().numpy(), side["input_ids"].cpu().numpy()
    labels = batch["labels"].cpu().numpy()
    counts = aligned(tokenizers, labels, ids, PaddedAlignment(**arrays))
    found.compared.append(f"{counts.share:.0%} aligned")
    found.differences += [f"{name}: {line}" for line in counts.differences()]
    found.notes += [f"{name}: {line}" for line in counts.notes()]


def _part(side: Mapping[str, Any], rows: slice, places: slice) -> dict[str, Any]:
    names = ("input_ids", "attention_mask", "labels", "targets", "position_ids")
    return {name: side[name][rows, places] for name in names if name in side}


def _first(side: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    start = int((side["attention_mask"] != 0).any(0).int().argmax())
    return _part(side, slice(num_rows), slice(start, start + MAX_TOKENS))


def _window(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return some tokens of the first row with targets.

    A first token has no label: behind padding on the left, a model would predict it.
    """
    is_target = side["targets"] >= 0
    row = int(is_target.any(1).int().argmax())
    place = int(is_target[row].int().argmax())
    window = _part(side, slice(row, row + 1), slice(place, place + FEWEST_TOKENS))
    window["labels"] = window["labels"].clone()
    window["labels"][:, 0] = IGNORED
    return {**window, "targets": shifted_targets(window)}


@dataclass
class _ModelRun:
    name: str
    model: Any
    rows: dict[str, Any]
    tokenizer: Tokenizer | None
    head: Head | None
    nats: list[float] = field(default_factory=list)  # of the tokens before, at and after the target
    count: int = 0  # targets
    bytes: int = 0  # of the targets
    uniform: float = math.nan  # nats of a uniform guess

    @property
    def inner(self) -> Any:
        """The model without its wrappers, unless these hold its parameters in pieces."""
        inner = getattr(unwrapped(self.model), "_orig_mod", unwrapped(self.model))
        return self.model if _is_sharded(inner) else inner

    @property
    def bits(self) -> float:
        """Bits per byte; NaN for few bytes."""
        return self.bits_at(1) if self.bytes >= FEWEST_BYTES else math.nan

    def bits_at(self, place: int) -> float:
        """Return bits per byte of the tokens before (0), at (1) or after (2) the targets."""
        return self.nats[place] / math.log(2) / max(1, self.bytes)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Run the model; keep its sums, and return −log p of each target, float32 `[N]`."""
        logits = as_logits(run(self.model, self.rows, self.head).logits)
        ids, targets = self.rows["input_ids"], self.rows["targets"]
        places = ids, targets, nn.functional.pad(ids[:, 2:], (0, 2), value=0)
        rows, columns = (targets >= 0).nonzero(as_tuple=True)
        size = block_length(logits, logits.shape[-1])
        parts = [torch.zeros(3, 0, device=ids.device)]
        for at in zip(rows.split(size), columns.split(size), strict=True):
            log_p = logits.at(at, torch.float32).log_softmax(-1)
            parts.append(torch.stack([-log_p.gather(1, x[at][:, None])[:, 0] for x in places]))
        lost = torch.cat(parts, 1)
        self.nats, self.count = lost.sum(1, dtype=torch.float64).tolist(), lost.shape[1]
        self.uniform = self.count * math.log(logits.shape[-1])
        if self.tokenizer is not None:
            self.bytes = int(self.tokenizer.table.lengths[targets[rows, columns].cpu()].sum())
        return lost[1]


def _compare_student(found: Audit, side: _ModelRun, window: Mapping[str, Any]) -> None:
    inner, trained = side.inner, _trained(side.model)
    if not trained:
        found.differences.append("no parameter of the student is trained: requires_grad is False")
    with torch.set_grad_enabled(not _is_sharded(unwrapped(inner))):
        labels = {"labels": window["labels"]} if takes(inner, "labels") else {}
        outputs = run(inner, window, **labels)
        loss = getattr(outputs, "loss", None)
        reached = _reached(outputs.logits if loss is None else loss)
        if not torch.is_grad_enabled():
            found.undetermined.append("which parameters get a gradient (they are sharded)")
        elif reached is None:
            found.undetermined.append("which parameters get a gradient (checkpointing hides them)")
        # Experts that no token chose have no part in the loss.
        elif left := [
            n for n, p in trained.items() if _memory(p) not in reached and ".experts." not in n
        ]:
            found.differences.append(
                f"{len(left)} of {len(trained)} trainable tensors of the student get no gradient: "
                f"{listed(left)}"
            )
    _compare_loss(found, inner, outputs, loss, window["targets"])
    with evaluating([side.model]):
        side.read()
    if side.count:
        found.compared.append(f"loss {side.nats[1] / side.count:.2f}")
    if side.count >= 16 and side.nats[1] > ABOVE_UNIFORM * side.uniform:
        found.differences.append(
            f"the student needs {side.nats[1] / side.count:.2f} nats per token, and a uniform "
            f"guess {side.uniform / side.count:.2f}: check that its weights are loaded, and that "
            "the ids belong to its tokenizer"
        )


def _compare_loss(found: Audit, model: Any, outputs: Any, loss: Any, targets: Tensor) -> None:
    is_target = targets >= 0
    if loss is None or not bool(is_target.any()):
        found.undetermined.append("the student's own loss (its forward returns none)")
        return
    logits = outputs.logits.detach()[is_target].float()
    ours = float(nn.functional.cross_entropy(logits, targets[is_target]))
    router = router_loss(model, outputs)
    ours += 0.0 if router is None else float(router.detach())
    own, eps = float(loss.detach()), torch.finfo(loss.dtype).eps
    if not abs(ours - own) <= (1e-4 + 4 * eps) * max(1.0, abs(own)):
        name = "cross-entropy" if router is None else "cross-entropy and router loss"
        found.differences.append(
            f"the student's own loss, of forward(labels=…), is {own:.4f}, but its {name} is "
            f"{ours:.4f}: the trainer does not train the difference"
        )


def _trained(model: Any) -> dict[str, Tensor]:
    return {n: p for n, p in unwrapped(model).named_parameters() if p.requires_grad}


def _is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are in pieces, which its wrapper gathers in its forward."""
    in_pieces = any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())
    return in_pieces or any("FullySharded" in type(m).__name__ for m in model.modules())


def _reached(output: Tensor) -> set[int] | None:
    """Return the leaves that a tensor has gradients for, as `_memory`; None if they are hidden."""
    nodes, seen, leaves = [output.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Checkpoint" in node.name():  # reentrant
            return None
        if hasattr(node, "variable"):
            leaves.add(_memory(node.variable))
        nodes += [before for before, _ in node.next_functions]
    return leaves


def _memory(parameter: Tensor) -> int:
    """Return the address of a parameter, which others may share; its identity if it is sharded."""
    is_whole = type(parameter.data) is Tensor and parameter.device.type != "meta"
    return (parameter.data_ptr() if is_whole else 0) or id(parameter)


def _compare_parameters(found: Audit, student: Any, teacher: _ModelRun) -> None:
    """Name the trained parameters that the teacher's logits depend on.

    A student's base model as the teacher contains the adapters' parameters without using them.
    """
    trained = {n: _memory(p) for n, p in _trained(student).items()}
    theirs = {_memory(p): p for p in teacher.model.parameters()}
    both = {n: theirs[x] for n, x in trained.items() if x in theirs}
    if not both:
        return
    with torch.set_grad_enabled(not _is_sharded(unwrapped(teacher.model))):
        logits = run(teacher.inner, _window(teacher.rows)).logits
    reached = _reached(logits)
    if logits.grad_fn is None or reached is None:
        found.undetermined.append(f"whether {teacher.name} uses the student's trained tensors")
        return
    used = [n for n, p in both.items() if not p.requires_grad or _memory(p) in reached]
    if used:
        found.differences.append(
            f"{teacher.name} has {len(used)} of the student's {len(trained)} trainable tensors, "
            f"and changes as they train: {listed(used)}; give it a copy if it should not"
        )


def _compare_teacher(found: Audit, student: _ModelRun, teacher: _ModelRun) -> None:
    _compare_parameters(found, student.model, teacher)
    problems = [*_teacher_differences(teacher)]
    found.differences += problems
    _compare_bits(found, student, teacher, is_judged=not problems)


def _teacher_differences(side: _ModelRun) -> Iterator[str]:
    name, model = side.name, side.model
    if any(module.training for module in model.modules()):
        yield f"{name} is in training mode: call its eval()"
    first, second = side.read(), side.read()
    eps = torch.finfo(next(model.parameters()).dtype).eps
    rounding = max(1e-5, 4 * eps) * float(first.amax().clamp(min=1)) if len(first) else 0.0
    if not bool(((first - second).abs() <= rounding).all()):
        values = [float(lost.mean()) for lost in (first, second)]
        yield f"{name} has two results for one batch, {values[0]:.5f} and {values[1]:.5f}: dropout?"
    if side.bytes < FEWEST_BYTES:
        return
    for place, place_name in ((0, "before"), (2, "after")):
        if side.bits_at(place) < side.bits / 2:
            yield (
                f"{name} predicts the token {place_name} its targets better, with "
                f"{side.bits_at(place):.2f} bits per byte, than the targets, with {side.bits:.2f}: "
                "its logits or ids are shifted"
            )


def _compare_bits(found: Audit, student: _ModelRun, teacher: _ModelRun, *, is_judged: bool) -> None:
    name, theirs, ours = teacher.name, teacher.bits, student.bits
    if teacher.bytes < FEWEST_BYTES:
        found.undetermined.append(f"the bits per byte of {name} ({teacher.bytes} bytes)")
        return
    of_student = "" if math.isnan(ours) else f" (the student {ours:.2f})"
    found.compared.append(f"{name} {theirs:.2f} bits per byte{of_student}")
    if not theirs <= MOST_BITS:
        found.differences.append(
            f"{name} needs {theirs:.2f} bits per byte, and random weights need 8"
        )
    elif teacher.nats[1] > teacher.uniform and student.nats[1] < 0.8 * student.uniform:
        found.differences.append(
            f"{name} predicts its ids worse than a uniform guess: {teacher.nats[1]:.0f} nats, "
            f"compared with {teacher.uniform:.0f}"
        )
    elif is_judged and theirs > BEHIND * ours:
        lines = found.differences if theirs > FAR_BEHIND * ours else found.notes
        lines.append(
            f"{name} needs {theirs:.2f} bits per byte, and the student only {ours:.2f}: this "
            "teacher will probably cost quality (docs/guides/choosing.md)"
        )
