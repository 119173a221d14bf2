"""Check the first batch of a training run with the models' own libraries."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xtok.inspection.first_rows import alignment_findings, compare_side, token_ids
from xtok.inspection.results import Level, Result
from xtok.tokenizers.display import listed
from xtok.training.batches import Batch, SideBatch, shifted_targets
from xtok.training.collator import DistillationCollator
from xtok.training.heads import Head
from xtok.training.losses.logits import as_logits
from xtok.training.rows import IGNORED, map_tensors
from xtok.training.running import accepts, evaluating, preserve_rng, router_loss, run, unwrap
from xtok.training.samples import SampleRow
from xtok.training.sparse import block_length

MAX_TOKENS = 1024
"""Bits per byte are measured on at most this number of tokens per model."""

WINDOW_TOKENS = 32
"""Number of tokens for checking the student's own loss. With a vocabulary of 250,000 tokens, the
logits need 32 MiB."""

MIN_TARGETS, MIN_BYTES = 16, 32
"""Minimum numbers of targets and of their bytes. Smaller samples give unreliable measurements."""

MAX_UNIFORM_RATIO = 1.2
"""Maximum loss of a model, divided by the loss of a uniform distribution. This ratio is about 1.0
for a model with random weights."""

NOTE_RATIO, WARNING_RATIO = 1.02, 1.5
"""Thresholds for a note and a warning: the teacher's bits per byte divided by the student's."""


@dataclass
class Audit:
    """The findings of an audit of the first batch.

    A finding has a level: `ok` (a comparison succeeded), `skipped` (a comparison was not possible),
    `warning` (a difference), or `note` (an effect that may be intended).
    """

    findings: list[Result]

    def messages(self, level: Level) -> list[str]:
        """Return the messages with this level."""
        return [message for found_level, message in self.findings if found_level == level]

    @property
    def differences(self) -> list[str]:
        """The messages of all differences."""
        return self.messages("warning")

    @property
    def line(self) -> str:
        """One-line summary of the audit."""
        skipped, total = self.messages("skipped"), len(self.differences)
        missing = f"; not determined: {', '.join(skipped)}" if skipped else ""
        count = f"{total} differences" if total > 1 else "1 difference" * total
        return (
            f"first batch: {', '.join(self.messages('ok'))}{missing}: "
            f"{count or 'no differences from the libraries'}"
        )

    @classmethod
    def from_processes(cls, audits: Sequence[Audit]) -> Audit:
        """Merge the audits of all processes.

        The measured values come from rank 0. Each other message names the ranks that reported this
        message.
        """
        ranks: dict[Result, list[int]] = {}
        for rank, process_audit in enumerate(audits):
            for finding in process_audit.findings:
                ranks.setdefault(finding, []).append(rank)
        joined = [
            (level, message if level == "ok" else f"process {listed(found_by)}: {message}")
            for (level, message), found_by in ranks.items()
            if level != "ok" or 0 in found_by
        ]
        return cls(joined) if len(audits) > 1 else audits[0]

    def report(self) -> None:
        """Print the summary and notes to stderr, and issue a warning for each difference."""
        sys.stderr.write(f"{self.line}\n")
        for note in self.messages("note"):
            sys.stderr.write(f"note: first batch: {note}\n")
        for difference in self.differences:
            warnings.warn(f"first batch: {difference}", stacklevel=3)


def audit(
    models: Sequence[Any],
    batch: Batch,
    collator: Any,
    heads: Sequence[Head | None] = (),
) -> Audit:
    """Check the first batch of a run against its texts and the models' own libraries.

    The audit compares ids, roles and masks with the libraries, and the student's cross-entropy with
    `forward(labels=…)`. The audit also checks labels and alignments, finds parameters without a
    gradient, and measures the bits per byte of all models. The audit does not change the models or
    the random state. With `heads`, the audit needs no more memory than a training step.

    Args:
        models: the student and its teachers, with the wrappers of a training step; None for a
            teacher with stored predictions.
        batch: a batch of `prepare`, on the models' device.
        collator: the collator that made the batch.
        heads: the heads from `find_heads`; None for a model that computes whole logits.
    """
    batches: list[SideBatch] = [batch, *batch["teachers"]]
    names = ["the student", *(f"teacher {n}" for n in range(1, len(batches)))]
    if len(batches) == 2:
        names[1] = "the teacher"
    tokenizers: list[Any] = [None] * len(batches)
    if isinstance(collator, DistillationCollator):
        tokenizers = [collator.student, *collator.teachers]
        for n, side_batch in enumerate(batches):
            batches[n] = {**side_batch, "target_bytes": collator.target_bytes(n, side_batch)}
    sides = [*map(_AuditedSide, names, models, batches, tokenizers, heads or [None] * len(names))]
    with preserve_rng(batch["input_ids"].device):
        return Audit([*_findings(sides, collator)])


@dataclass
class _AuditedSide:
    """The student or a teacher, with its part of the batch."""

    name: str
    model: Any
    batch: SideBatch
    tokenizer: Any  # a `Tokenizer`; None for stored predictions
    head: Head | None
    count: int = 0  # number of targets
    # sums of −log p of the targets, of the preceding tokens, and of the following tokens
    nats: float = math.nan
    nats_before: float = math.nan
    nats_after: float = math.nan
    num_bytes: int = 0  # number of bytes in the targets
    uniform: float = math.nan  # the sum of −log p under a uniform distribution

    @property
    def inner(self) -> Any:
        """The model without its wrappers, unless the wrappers shard its parameters."""
        inner = getattr(unwrap(self.model), "_orig_mod", unwrap(self.model))
        return self.model if _is_sharded(inner) else inner

    @property
    def trainable(self) -> dict[str, Tensor]:
        return {n: p for n, p in unwrap(self.model).named_parameters() if p.requires_grad}

    def bits(self, nats: float) -> float:
        """Convert a sum to bits per byte of the targets, or to NaN for few bytes."""
        return nats / math.log(2) / self.num_bytes if self.num_bytes >= MIN_BYTES else math.nan

    @torch.no_grad()
    def measure(self, num_rows: int) -> Tensor:
        """Run the model on the first rows, store the sums, and return each target's −log p."""
        start = int((self.batch["attention_mask"] != 0).any(0).int().argmax())
        part = _crop(self.batch, slice(num_rows), slice(start, start + MAX_TOKENS))
        logits = as_logits(run(self.model, part, self.head).logits)
        ids, targets = part["input_ids"], part["targets"]
        tokens = ids, targets, nn.functional.pad(ids[:, 2:], (0, 2), value=0)
        [positions] = (targets.flatten() >= 0).nonzero(as_tuple=True)
        parts = [torch.zeros(3, 0, device=ids.device)]
        for indices in positions.split(block_length(logits, logits.shape[-1])):
            log_p = logits.at(indices, torch.float32).log_softmax(-1)
            losses = [log_p.gather(1, x.flatten()[indices, None]) for x in tokens]
            parts.append(-torch.cat(losses, 1).t())
        nats = torch.cat(parts, 1)
        self.nats_before, self.nats, self.nats_after = nats.sum(1, dtype=torch.float64).tolist()
        self.count = nats.shape[1]
        self.uniform = self.count * math.log(logits.shape[-1])
        self.num_bytes = int(part["target_bytes"].sum()) if "target_bytes" in part else 0
        return nats[1]

    def window(self) -> SideBatch:
        """Return a short range of tokens from the first row that has targets.

        The first token is not a target: after padding on the left, its prediction would depend on
        the padding.
        """
        targets = (self.batch["targets"] >= 0).nonzero().tolist()
        row, position = targets[0] if targets else (0, 0)
        window = _crop(self.batch, slice(row, row + 1), slice(position, position + WINDOW_TOKENS))
        window["labels"] = window["labels"].clone()
        window["labels"][:, 0] = IGNORED
        window["targets"] = shifted_targets(window)
        return window


def _crop(side_batch: SideBatch, rows: slice, positions: slice) -> SideBatch:
    tensors = {n: x for n, x in side_batch.items() if isinstance(x, Tensor) and x.ndim == 2}
    cropped: SideBatch = map_tensors(tensors, lambda tensor: tensor[rows, positions])
    return cropped


def _findings(sides: Sequence[_AuditedSide], collator: Any) -> Iterator[Result]:
    student, *teachers = sides
    if isinstance(collator, DistillationCollator):
        yield from _row_findings(sides, collator)
    else:
        yield from _warnings(_label_problems(student))
    widths = [s.batch["input_ids"].shape[1] for s in sides if "input_ids" in s.batch]
    num_rows = max(1, MAX_TOKENS // max(widths))
    yield from _student_findings(student, num_rows)
    if any(s.head for s in sides):
        yield "ok", "heads"
    for index, teacher in enumerate(teachers):
        if teacher.model is not None:
            yield from _shared_findings(student, teacher)
            problems = [*_teacher_problems(teacher, num_rows)]
            yield from _warnings(problems)
            yield from _bits_findings(student, teacher, is_judged=not problems)
        if "alignment" in teacher.batch:
            pair, labels = collator.pairs[index], student.batch["labels"].cpu().numpy()
            ids = [audited.batch["input_ids"].cpu().numpy() for audited in (student, teacher)]
            arrays = {n: x.cpu().numpy() for n, x in vars(teacher.batch["alignment"]).items()}
            for level, message in alignment_findings(pair.tokenizers, labels, ids, arrays):
                yield level, message if level == "ok" else f"{teacher.name}: {message}"


def _row_findings(
    sides: Sequence[_AuditedSide], collator: DistillationCollator
) -> Iterator[Result]:
    templates = [collator.student_template, *collator.teacher_templates]
    skipped = "" if "samples" in sides[0].batch else "the batch contains no texts"
    is_scored = "realized_logprob" in sides[-1].batch
    for audited, template in zip(sides, templates, strict=False):
        tokenizer, samples = audited.tokenizer, audited.batch.get("samples")
        rows = None if samples is None else samples.rows
        batch = audited.batch
        pairs = zip(batch["input_ids"].cpu(), batch["attention_mask"].cpu(), strict=True)
        ids = [row[mask != 0].tolist() for row, mask in pairs]
        if samples is not None:
            report = compare_side(tokenizer, samples.sources, template=template, rows=ids)
            name = tokenizer.vocabulary.model_id
            yield from ((level, f"{name}: {message}") for level, message in report.findings)
            if not report.is_compared:
                skipped = "a tokenizer has no library"
        elif not is_scored:
            yield from _warnings(_bos_problems(audited, ids))
        yield from _warnings(_label_problems(audited, rows, collator.max_length))
    yield ("skipped", f"ids and masks ({skipped})") if skipped else ("ok", "ids, masks")


def _warnings(problems: Iterable[str]) -> Iterator[Result]:
    return (("warning", problem) for problem in problems)


def _bos_problems(audited: _AuditedSide, rows: Sequence[Sequence[int]]) -> Iterator[str]:
    bos = {*token_ids(audited.tokenizer, "bos")}
    if twice := sum(len(row) > 1 and {*row[:2]} <= bos for row in rows):
        yield f"{twice} of {len(rows)} rows of {audited.name} begin with two bos tokens"
    is_target = audited.batch["labels"] != IGNORED
    is_all = torch.equal(is_target, audited.batch["attention_mask"] != 0)
    if is_all and all({*row[:1]} <= bos for row in rows):
        yield (
            f"all tokens of {audited.name} are targets, including the bos tokens, which no model "
            f"generates: set the labels of prompts to {IGNORED}"
        )


def _label_problems(
    audited: _AuditedSide, rows: Sequence[SampleRow] | None = None, max_length: int | None = None
) -> Iterator[str]:
    """Compare the labels with the ids and with the targets of the texts.

    Without `rows`, a token that ends a turn or text should be a target if the previous token is a
    target.
    """
    name, batch = audited.name, audited.batch
    ids, labels = batch["input_ids"].cpu(), batch["labels"].cpu()
    is_target, is_token = labels != IGNORED, batch["attention_mask"].cpu() != 0
    end_ids = token_ids(audited.tokenizer, "eos", "turn_end")
    is_end = torch.isin(ids, torch.tensor(end_ids, dtype=torch.int64))
    has_end = bool((is_target & is_end).any())
    expected = is_target.clone()
    if rows is not None:
        num_cut = _set_targets(expected, is_token, rows, max_length, end_ids)
        if num_cut and not has_end:
            where = f"{num_cut} of {len(ids)} rows of {name}"
            yield f"max_length {max_length} cuts off all end tokens in {where}"
    elif not has_end:
        expected |= is_end & is_token & nn.functional.pad(is_target[:, :-1], (1, 0))
    if not bool(is_target[:, 1:].any()):
        yield f"{name} has no targets, so nothing is learned from this batch"
    if not torch.equal(audited.batch["targets"], shifted_targets(audited.batch)):
        yield f"the targets of {name} differ from its labels shifted by one position"
    for is_wrong, problem in (
        (is_target & (labels != ids), "labels of {} are not equal to the ids"),
        (is_target & ~is_token, "targets of {} are padding"),
        (expected & ~is_target & is_end, "tokens that end a turn or text are not targets of {}"),
        (expected & ~is_target & ~is_end, "tokens of answers are not targets of {}"),
        (is_target & ~expected & is_token, "targets of {} are outside the answers"),
    ):
        for row, position in is_wrong.nonzero().tolist()[:1]:
            values = f"label {int(labels[row, position])}, id {int(ids[row, position])}"
            problem_count = f"{int(is_wrong.sum())} {problem.format(name)}"
            yield f"{problem_count}, first in row {row}, token {position}: {values}"


def _set_targets(
    expected: Tensor,
    is_token: Tensor,
    rows: Sequence[SampleRow],
    max_length: int | None,
    end_ids: Sequence[int],
) -> int:
    """Set `expected` to the texts' targets, and count the rows that lose all end tokens."""
    num_cut = 0
    for index, row in enumerate(rows):
        positions = row.keep(max_length)
        if int(is_token[index].sum()) == len(positions):
            expected[index, is_token[index]] = torch.from_numpy(row.is_target[positions])
        ends = np.isin(row.ids, end_ids) & row.is_target
        num_cut += bool(ends.any() and not ends[positions].any())
    return num_cut


def _student_findings(audited: _AuditedSide, num_rows: int) -> Iterator[Result]:
    inner, window = audited.inner, audited.window()
    with torch.set_grad_enabled(not _is_sharded(inner)):
        labels: dict[str, Any] = {"labels": window["labels"]} if accepts(inner, "labels") else {}
        outputs = run(inner, window, **labels)
        yield from _gradient_findings(audited, outputs)
    yield from _loss_findings(inner, outputs, window["targets"])
    with evaluating([audited.model]):
        audited.measure(num_rows)
    if audited.count:
        yield "ok", f"loss {audited.nats / audited.count:.2f}"
    yield from _warnings(_uniform_problems(audited))


def _gradient_findings(student: _AuditedSide, outputs: Any) -> Iterator[Result]:
    if not student.trainable:
        yield "warning", "no parameter of the student is trained, because requires_grad is False"
    if _is_sharded(student.inner):
        yield "skipped", "which parameters receive a gradient (the parameters are sharded)"
        return
    loss = getattr(outputs, "loss", None)
    reached = _reached_leaves(outputs.logits if loss is None else loss)
    if reached is None:
        yield "skipped", "which parameters receive a gradient (checkpointing hides the parameters)"
        return
    # Experts that no token selected do not affect the loss.
    parameters = {n: p for n, p in student.trainable.items() if ".experts." not in n}
    if unreached := [name for name, p in parameters.items() if _memory(p) not in reached]:
        yield (
            "warning",
            f"{len(unreached)} of {len(student.trainable)} trainable tensors of the student get no "
            f"gradient: {listed(unreached)}",
        )


def _loss_findings(model: Any, outputs: Any, targets: Tensor) -> Iterator[Result]:
    loss, is_target = getattr(outputs, "loss", None), targets >= 0
    if loss is None or not bool(is_target.any()):
        yield "skipped", "the student's own loss (its forward returns no loss)"
        return
    logits = outputs.logits.detach()[is_target].float()
    computed_loss = float(nn.functional.cross_entropy(logits, targets[is_target]))
    router = router_loss(model, outputs)
    computed_loss += 0.0 if router is None else float(router.detach())
    model_loss, eps = float(loss.detach()), torch.finfo(loss.dtype).eps
    if not abs(computed_loss - model_loss) <= (1e-4 + 4 * eps) * max(1.0, abs(model_loss)):
        name = "cross-entropy" if router is None else "cross-entropy and router loss"
        yield (
            "warning",
            f"the student's loss from forward(labels=…) is {model_loss:.4f}, but its {name} is "
            f"{computed_loss:.4f}; the trainer does not train the difference",
        )


def _uniform_problems(audited: _AuditedSide) -> Iterator[str]:
    if audited.count >= MIN_TARGETS and not audited.nats <= MAX_UNIFORM_RATIO * audited.uniform:
        yield (
            f"{audited.name} needs {audited.nats / audited.count:.2f} nats per token, and a "
            f"uniform distribution needs {audited.uniform / audited.count:.2f}: check that its "
            "weights are loaded, and that the ids belong to its tokenizer"
        )


def _is_sharded(model: nn.Module) -> bool:
    """Whether a wrapper shards the model's parameters."""
    in_pieces = any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())
    return in_pieces or any("FullySharded" in type(m).__name__ for m in model.modules())


def _reached_leaves(output: Tensor) -> set[int] | None:
    """Return the `_memory` of all leaves of an autograd graph; None if checkpoints hide leaves."""
    nodes, visited, leaves = [output.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if "Checkpoint" in node.name():  # reentrant checkpoint
            return None
        if hasattr(node, "variable"):
            leaves.add(_memory(node.variable))
        nodes += [function for function, _ in node.next_functions]
    return leaves


def _memory(parameter: Tensor) -> int:
    """Return an id of a parameter's memory; tied parameters have the same id."""
    is_whole = type(parameter.data) is Tensor and parameter.device.type != "meta"
    return (parameter.data_ptr() if is_whole else 0) or id(parameter)


def _shared_findings(student: _AuditedSide, teacher: _AuditedSide) -> Iterator[Result]:
    """List the trained parameters on which the teacher's logits depend.

    A teacher that is the student's base model can contain the student's adapters without using the
    adapters.
    """
    memory = {n: _memory(p) for n, p in student.trainable.items()}
    teacher_parameters = {_memory(p): p for p in teacher.model.parameters()}
    shared = {n: teacher_parameters[x] for n, x in memory.items() if x in teacher_parameters}
    if not shared:
        return
    with torch.set_grad_enabled(not _is_sharded(teacher.inner)):
        logits = run(teacher.inner, teacher.window()).logits
    reached = _reached_leaves(logits)
    if logits.grad_fn is None or reached is None:
        yield "skipped", f"whether {teacher.name} uses the student's trained tensors"
    elif names := [n for n, p in shared.items() if not p.requires_grad or _memory(p) in reached]:
        yield (
            "warning",
            f"{teacher.name} shares {len(names)} of the student's {len(memory)} trainable tensors, "
            f"so training changes {teacher.name}: {listed(names)}; pass a copy to prevent this",
        )


def _teacher_problems(audited: _AuditedSide, num_rows: int) -> Iterator[str]:
    name, model = audited.name, audited.model
    if any(module.training for module in model.modules()):
        yield f"{name} is in training mode: call eval() on it"
    first, second = audited.measure(num_rows), audited.measure(num_rows)
    # Search all parameters: the first parameter of a quantized model can have an integer dtype.
    eps = next(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    rounding = max(1e-5, 4 * eps) * float(first.amax().clamp(min=1)) if len(first) else 0.0
    if not bool(((first - second).abs() <= rounding).all()):
        results = " and ".join(f"{float(nats.mean()):.5f}" for nats in (first, second))
        yield f"{name} gives different losses for the same batch, {results}: check for dropout"
    yield from _uniform_problems(audited)
    for position, nats in (("before", audited.nats_before), ("after", audited.nats_after)):
        if (bits := audited.bits(nats)) < (target_bits := audited.bits(audited.nats)) / 2:
            yield (
                f"{name} predicts the tokens {position} its targets ({bits:.2f} bits per byte) "
                f"better than the targets ({target_bits:.2f}); its logits or ids "
                "are shifted"
            )


def _bits_findings(
    student: _AuditedSide, teacher: _AuditedSide, *, is_judged: bool
) -> Iterator[Result]:
    name, bits, student_bits = teacher.name, teacher.bits(teacher.nats), student.bits(student.nats)
    if teacher.num_bytes < MIN_BYTES:
        yield "skipped", f"the bits per byte of {name} ({teacher.num_bytes} bytes)"
        return
    comparison = "" if math.isnan(student_bits) else f" (the student {student_bits:.2f})"
    yield "ok", f"{name} {bits:.2f} bits per byte{comparison}"
    if is_judged and bits > NOTE_RATIO * student_bits:
        yield (
            "warning" if bits > WARNING_RATIO * student_bits else "note",
            f"{name} needs {bits:.2f} bits per byte, but the student needs {student_bits:.2f}: "
            "this teacher will probably reduce quality; train without a teacher, or with a teacher "
            "that predicts this text better",
        )
