"""The audit of a first batch: one line if all checks pass, and a name for each fault."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chat_families
import pytest
import torch
import torch.utils.checkpoint
import transformers
from checks import not_none
from make_maps import built
from tiny_models import tiny_model
from torch import Tensor, nn

import xtok
from xtok import DistillationCollator
from xtok.loss_names import LOSS_INFO, LossName
from xtok.tokenizers import Tokenizer
from xtok.training.audit import Audit, audit
from xtok.training.batches import Batch, SideBatch, shifted_targets
from xtok.training.collator import prepare
from xtok.training.heads import find_heads
from xtok.training.losses.registry import LOSSES
from xtok.training.objective import make_objective
from xtok.training.running import run

TEXTS = ["There are 201 lighthouses. Fog, and high water.", "High water at 6:12 tonight."]


pytestmark = pytest.mark.filterwarnings("ignore:this map is not made for P-KL:UserWarning")


class BigramModel(nn.Module):
    """Predicts the next tokens of a batch from bigrams."""

    def __init__(self, width: int, batch: Any, *, shift: int = 1) -> None:
        super().__init__()
        table = torch.zeros(width, width)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        for row, kept in zip(ids, mask, strict=True):
            known = row[kept != 0]
            table[known[:-shift], known[shift:]] = 12.0
        self.table, self.after = nn.Parameter(table), nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Any = None, use_cache: Any = None) -> Any:
        return SimpleNamespace(logits=self.after(self.table[input_ids]))


class Bench:
    """A student, a teacher, a batch and its collator, without a fault."""

    def __init__(self, collate: DistillationCollator, batch: Batch) -> None:
        self.collate = copy.copy(collate)
        self.side: SideBatch = {**batch["teachers"][0]}
        self.batch: Batch = {**batch, "teachers": [self.side]}
        widths = [t.vocabulary.vocab_size for t in (collate.student, *collate.teachers)]
        self.student: Any = tiny_model(widths[0], seed=0, dropout=0.1).train()
        self.teacher: Any = BigramModel(widths[1], self.side).eval()

    def audit(self) -> Audit:
        models = [self.student, self.teacher]
        heads, _ = find_heads(models, [self.batch, self.side], [True, True])
        return audit(models, self.batch, self.collate, heads)


@pytest.fixture(scope="module")
def collated_texts(digits: Tokenizer, byte_level: Tokenizer) -> tuple[DistillationCollator, Any]:
    collate = DistillationCollator(digits, byte_level)
    return collate, prepare(collate(TEXTS))


@pytest.fixture
def bench(collated_texts: Any) -> Bench:
    return Bench(*collated_texts)


def test_an_audit_without_findings_prints_one_line(bench: Bench) -> None:
    before, state = copy.deepcopy(bench.student.state_dict()), torch.get_rng_state()
    audited = bench.audit()
    assert audited.differences == []
    values = re.fullmatch(
        r"first batch: ids, masks, loss (.*), heads, the teacher (.*) bits per byte \(the student "
        r"(.*)\), 100.0% of the targets are in a chunk \(100.0% of equal bytes\): "
        r"no differences from the libraries",
        audited.line,
    )
    assert [*map(float, not_none(values).groups())] == pytest.approx([6.79, 0.19, 4.37], abs=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(before[name], value) for name, value in bench.student.state_dict().items()
    )
    assert bench.student.training
    assert all(parameter.grad is None for parameter in bench.student.parameters())


Fault = Callable[[Bench], Any]
FAULTS: dict[str, tuple[Fault, str]] = {}
"""Changes of a bench, each with words of the message that the audit must print."""


def fault(message: str) -> Callable[[Fault], Fault]:
    """Add a function to `FAULTS` under its name."""

    def add(make: Fault) -> Fault:
        FAULTS[make.__name__] = make, message
        return make

    return add


# Faults of the student


class Wrapped(nn.Module):
    """Wraps a model and changes its outputs."""

    def __init__(self, inner: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.change, self.config = inner, change, inner.config

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, use_cache: Any = None,
        labels: Any = None,
    ) -> Any:  # fmt: skip
        outputs = self.inner(
            input_ids, attention_mask=attention_mask, use_cache=False, labels=labels
        )
        self.change(outputs)
        return outputs


def wrapped(change: Callable[[Any], Any]) -> Fault:
    """Return the fault of a student with changed outputs."""

    @wraps(change)
    def make(bench: Bench) -> None:
        bench.student = Wrapped(bench.student, change)

    return make


@fault("the student's loss from")
@wrapped
def scaled_logits(outputs: Any) -> None:
    outputs.logits = 3 * outputs.logits


@fault("the student's loss from")
@wrapped
def capped_logits(outputs: Any) -> None:
    outputs.logits = 0.01 * torch.tanh(outputs.logits / 0.01)


@fault("the student's loss from")
@wrapped
def shifted_logits(outputs: Any) -> None:
    outputs.logits = outputs.logits.roll(1, 1)


@fault("its cross-entropy is nan")
@wrapped
def no_number(outputs: Any) -> None:
    outputs.logits = outputs.logits * math.nan


def changed_loss(change: Callable[[Tensor], Tensor]) -> Fault:
    def apply(outputs: Any) -> None:
        if outputs.loss is not None:
            outputs.loss = change(outputs.loss)

    return wrapped(apply)


FAULTS |= {
    "halved loss": (changed_loss(lambda loss: loss / 2), "the student's loss from"),
    "summed loss": (changed_loss(lambda loss: loss * 30), "the student's loss from"),
    "increased loss": (changed_loss(lambda loss: loss + 0.1), "the student's loss from"),
    "nan loss": (changed_loss(lambda loss: loss * math.nan), "labels=…) is nan"),
}


@fault("the student's loss from")
def unknown_router(bench: Bench) -> None:
    sizes: Any = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4,
    }  # fmt: skip
    width = bench.student.config.vocab_size
    config = transformers.MixtralConfig(vocab_size=width, output_router_logits=True, **sizes)
    model: Any = transformers.MixtralForCausalLM(config)
    real = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = real(*args, **kwargs)
        outputs.aux_loss = None  # like a model that does not return this output
        return outputs

    model.router_aux_loss_coef, model.forward = 1.0, forward
    bench.student = model


@fault("2 of 14 trainable tensors of the student get no gradient")
def unused_module(bench: Bench) -> None:
    bench.student.tower = nn.Linear(2, 2)


@fault("no gradient: model.embed_tokens.weight")
def detached_embedding(bench: Bench) -> None:
    bench.student.model.embed_tokens.register_forward_hook(lambda *args: args[-1].detach())


@fault("no parameter of the student is trained")
def nothing_trained(bench: Bench) -> None:
    bench.student.requires_grad_(False)


# Faults of labels and ids


def move_labels(bench: Bench, by: int) -> None:
    """Shift labels, like a training loop that forgets that models shift them as well."""
    moved = bench.batch["labels"].roll(by, 1)
    bench.batch["labels"] = moved.masked_fill(bench.batch["attention_mask"] == 0, -100)


@fault("labels of the student are not")
def labels_moved_to_the_left(bench: Bench) -> None:
    move_labels(bench, -1)


@fault("labels of the student are not")
def labels_moved_to_the_right(bench: Bench) -> None:
    move_labels(bench, 1)


@fault("targets of the student differ from")
def targets_not_shifted(bench: Bench) -> None:
    bench.batch["targets"] = bench.batch["labels"]


@fault("labels of the teacher are not")
def teacher_labels_moved(bench: Bench) -> None:
    labels = bench.side["labels"]
    bench.side["labels"] = torch.where(labels >= 0, labels.roll(-1, 1), labels)


@fault("targets of the student are padding")
def padding_counted(bench: Bench) -> None:
    ids, labels = bench.batch["input_ids"], bench.batch["labels"]
    bench.batch["labels"] = torch.where(bench.batch["attention_mask"] == 0, ids, labels)


@fault("has no target")
def all_labels_kept(bench: Bench) -> None:
    bench.batch["labels"] = torch.full_like(bench.batch["labels"], -100)
    bench.batch["targets"] = bench.batch["labels"]


def other_id(side_name: str, row: int, position: int) -> Fault:
    """Replace a token by another token, in ids and labels."""

    def change(bench: Bench) -> None:
        side = bench.batch if side_name == "student" else bench.side
        ids = side["input_ids"].clone()
        ids[row, position] = (ids[row, position] + 1) % 500
        side["input_ids"] = ids
        side["labels"] = torch.where(side["labels"] >= 0, ids, side["labels"])
        side["targets"] = torch.nn.functional.pad(side["labels"][:, 1:], (0, 1), value=-100)

    return change


FAULTS |= {
    f"other {place} of the {side}": (other_id(side, row, position), "AutoTokenizer's [")
    for side, row in (("student", 0), ("teacher", 1))
    for place, position in (("id", 3), ("bos", 0))
}


def collated(**options: Any) -> Fault:
    """Use a batch of another collator."""

    def change(bench: Bench) -> None:
        collate = bench.collate
        other = DistillationCollator(collate.student, collate.teachers, **options)
        bench.batch = prepare(other(TEXTS))
        [bench.side] = bench.batch["teachers"]

    return change


FAULTS["no bos"] = collated(bos=False), "AutoTokenizer's ["


@fault("AutoTokenizer's [")
def second_bos(bench: Bench) -> None:
    bos = bench.collate.teachers[0].table.roles["bos"][0]
    before = torch.full_like(bench.side["input_ids"][:, :1], bos)
    side: Any = bench.side
    for name, fill in (("input_ids", before), ("attention_mask", before * 0 + 1),
                       ("labels", before), ("targets", before)):  # fmt: skip
        side[name] = torch.cat([fill, side[name]], 1)
    del bench.side["alignment"]


@fault("bos is id")
def another_bos(bench: Bench) -> None:
    """A tokenizer that uses its eos as bos, unlike AutoTokenizer."""
    teacher = copy.copy(bench.collate.teachers[0])
    teacher.declared = {**teacher.declared, "bos": teacher.declared["eos"]}
    bench.collate.teachers = [teacher]


# Teachers that share parameters with the student


def use_as_hidden(teacher: Any) -> None:
    """Multiply the rows of a teacher's table with a fixed head."""
    torch.manual_seed(0)
    head = torch.randn(teacher.table.shape[1], 1200)
    teacher.forward = lambda input_ids, **_: SimpleNamespace(
        logits=teacher.table[input_ids % 800] @ head
    )


@fault("1 of the student's 12 trainable tensors")
def shared_embedding(bench: Bench) -> None:
    bench.teacher.table = bench.student.model.embed_tokens.weight
    use_as_hidden(bench.teacher)


@fault("1 of the student's 12 trainable tensors")
def shared_memory(bench: Bench) -> None:
    bench.teacher.table.data = bench.student.lm_head.weight.data
    use_as_hidden(bench.teacher)


@fault("12 of the student's 12 trainable tensors")
def its_own_teacher(bench: Bench) -> None:
    bench.collate.teachers = [bench.collate.student]
    side: Any = {**bench.batch}
    del side["teachers"]
    bench.collate.teacher_templates, bench.batch["teachers"] = [None], [side]
    bench.teacher = bench.student.eval()


# Faults of teachers


@fault("is in training mode")
def in_training_mode(bench: Bench) -> None:
    bench.teacher.train()


@fault("is in training mode")
def with_dropout(bench: Bench) -> None:
    bench.teacher.after = nn.Dropout(0.3)


@fault("different losses")
def dropout_without_a_mode(bench: Bench) -> None:
    bench.teacher.after.register_forward_hook(lambda *args: nn.functional.dropout(args[-1], 0.3))


def teacher_logits(change: Callable[[Tensor], Tensor]) -> Fault:
    def apply(bench: Bench) -> None:
        bench.teacher.after.register_forward_hook(lambda *args: change(args[-1]))

    return apply


FAULTS |= {
    "teacher's logits moved back": (teacher_logits(lambda x: x.roll(-1, 1)), "the tokens after"),
    "teacher's logits moved ahead": (teacher_logits(lambda x: x.roll(1, 1)), "the tokens before"),
    "teacher's logits nan": (teacher_logits(lambda x: x * math.nan), "needs nan nats per"),
    "teacher's logits negated": (teacher_logits(lambda x: -9 * x), "the teacher needs"),
}


@fault("nats per token, and a uniform")
def knows_other_ids(bench: Bench) -> None:
    """Swap the batches of two teachers."""
    bench.teacher.table.data = 4 * bench.teacher.table.data.roll(1, 1)


@fault("nats per token, and a uniform")
def not_loaded(bench: Bench) -> None:
    """A teacher with random weights, for a student that predicts the text."""
    width = bench.collate.student.vocabulary.vocab_size
    bench.student = BigramModel(width, bench.batch)
    bench.teacher = tiny_model(1200, seed=1, sharp=0.5).eval()


@fault("the tokens after")
def positions_apart(bench: Bench) -> None:
    bench.teacher = BigramModel(1200, bench.side, shift=2).eval()


# Faults of the alignment


@fault("targets are aligned with the teacher")
def no_chunks(bench: Bench) -> None:
    aligned = bench.side["alignment"]
    valid = aligned.pair_valid & (torch.arange(aligned.pair_valid.shape[1]) < 3)
    bench.side["alignment"] = replace(aligned, pair_valid=valid)


@fault("chunks have the same bytes")
def other_bytes(bench: Bench) -> None:
    aligned = bench.side["alignment"]
    bench.side["alignment"] = replace(aligned, pair_is_correct=aligned.pair_is_correct & False)


@fault("bos tokens are in a chunk")
def bos_in_no_chunk(bench: Bench) -> None:
    chunks = bench.side["alignment"].student_chunk_id.clone()
    chunks[:, 0] = -1
    bench.side["alignment"] = replace(bench.side["alignment"], student_chunk_id=chunks)


def other_ends(bench: Bench) -> None:
    """Only the student's texts end with eos, so no chunk contains it."""
    collate = copy.copy(bench.collate)
    collate.eos = True
    bench.batch = prepare(collate(TEXTS))
    [bench.side] = bench.batch["teachers"]
    aligned, labels = bench.side["alignment"], bench.batch["labels"]
    is_end = labels == collate.student.table.roles["eos"][0]
    chunks = aligned.student_chunk_id.masked_fill(is_end, -1)
    bench.side["alignment"] = replace(aligned, student_chunk_id=chunks)


def chunks_moved(side: str) -> Fault:
    """Append a token to a row after the collator has aligned it."""

    def change(bench: Bench) -> None:
        moved = getattr(bench.side["alignment"], side).roll(1, 1)
        bench.side["alignment"] = replace(bench.side["alignment"], **{side: moved})

    return change


FAULTS |= {
    f"{side} moved": (chunks_moved(side), "marked as equal have other bytes")
    for side in ("student_chunk_id", "teacher_chunk_id")
}


@fault("marked as equal have other bytes")
def other_rows(bench: Bench) -> None:
    """Use the teacher's side of other rows."""
    alignment = bench.side["alignment"]
    bench.side["alignment"] = replace(
        alignment, teacher_chunk_id=alignment.teacher_chunk_id.roll(1, 0)
    )


# Faults of targets


@fault("2 tokens that end a turn or text are not targets")
def without_ends(bench: Bench) -> None:
    """Exclude eos from the targets, like `labels[ids == pad] = -100` if pad is eos."""
    collated(eos=True)(bench)
    bench.collate.eos = True
    [eos, *_] = bench.collate.student.table.roles["eos"]
    masked = bench.batch["labels"].masked_fill(bench.batch["input_ids"] == eos, -100)
    bench.batch["labels"] = masked
    bench.batch["targets"] = shifted_targets(bench.batch)


@fault("tokens of answers are not targets of the student")
def half_masked(bench: Bench) -> None:
    labels = bench.batch["labels"].clone()
    labels[:, 6:] = -100
    bench.batch["labels"] = labels
    bench.batch["targets"] = shifted_targets(bench.batch)


@fault("max_length 8 cuts off all end tokens in 2 of 2 rows")
def ends_cut_off(bench: Bench) -> None:
    collated(eos=True, max_length=8)(bench)
    bench.collate.eos, bench.collate.max_length = True, 8


@fault("targets of the teacher differ from its labels")
def teacher_targets_not_shifted(bench: Bench) -> None:
    bench.side["targets"] = bench.side["labels"]


def on_policy(bench: Bench, *, ids: Any = None, first_target: int = 3, num_bos: int = 1) -> None:
    """Rows of the student's ids, padded on the left."""
    [bos, *_] = bench.collate.student.table.roles["bos"]
    texts = bench.collate.student.encode_batch(TEXTS)
    rows = [[bos] * num_bos + list(text) for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    labels = ids.masked_fill(mask.cumsum(1) <= first_target, -100)
    bench.batch = prepare(bench.collate.from_student_ids(ids, mask, labels))
    [bench.side] = bench.batch["teachers"]


@fault("all tokens of the student are targets")
def prompts_on_policy(bench: Bench) -> None:
    on_policy(bench, first_target=0)


@fault("2 of 2 rows of the student begin with two")
def two_bos_on_policy(bench: Bench) -> None:
    on_policy(bench, num_bos=2)


# Faults of whole models


@fault("12 of 12 trainable tensors of the student get no gradient")
def no_grad(bench: Bench) -> None:
    bench.student.forward = torch.no_grad()(bench.student.forward)


@fault("12 of 12 trainable tensors of the student get no gradient")
def inference_mode(bench: Bench) -> None:
    bench.student.forward = torch.inference_mode()(bench.student.forward)


@fault("nats per token, and a uniform")
def moved_ids(bench: Bench) -> None:
    """Return a student that is certain of the wrong token."""
    with torch.no_grad():
        bench.student.lm_head.weight[:] = 30 * bench.student.model.embed_tokens.weight.roll(1, 0)
        bench.student.model.embed_tokens.weight *= 50


@fault("this teacher will probably reduce quality")
def far_behind(bench: Bench) -> None:
    """Return a teacher that predicts the text worse than the student."""
    width = bench.collate.student.vocabulary.vocab_size
    bench.student = BigramModel(width, bench.batch)
    bench.teacher.table.data *= 0.3


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_message(
    bench: Bench, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = FAULTS[fault]
    make(bench)
    audited = audit([bench.student, bench.teacher], bench.batch, bench.collate)
    assert any(words in difference for difference in audited.differences), audited
    with pytest.warns(UserWarning, match="^first batch: ") as warned:
        audited.report()
    assert len(warned) == len(audited.differences)
    assert capsys.readouterr().err.startswith("first batch: ")


def test_a_quantized_teacher_begins_with_integers(bench: Bench) -> None:
    packed = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    bench.teacher._parameters = {"packed": packed, **bench.teacher._parameters}
    assert next(bench.teacher.parameters()) is packed
    assert bench.audit().differences == []


def test_distillation_without_ends_of_turns_is_noted(bench: Bench) -> None:
    other_ends(bench)
    audited = bench.audit()
    assert audited.differences == []
    [note] = audited.messages("note")
    assert "the distillation loss does not teach the student to stop" in note


# Several processes, and checks without a result


def test_findings_of_all_processes_have_their_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    audits = [
        Audit([("ok", "loss 2.00"), ("skipped", "ids"), ("warning", "a fault")]),
        Audit([("ok", "loss 3.00"), ("skipped", "ids"), ("note", "a note")]),
        Audit([("ok", "loss 4.00"), ("warning", "a fault"), ("warning", "another")]),
    ]
    joined = Audit.from_processes(audits)
    assert joined.differences == ["process 0, 2: a fault", "process 2: another"]
    assert joined.line == "first batch: loss 2.00; not determined: process 0, 1: ids: 2 differences"
    with pytest.warns(UserWarning, match="first batch: process") as warned:
        joined.report()
    assert len(warned) == 2
    assert capsys.readouterr().err == f"{joined.line}\nnote: first batch: process 1: a note\n"
    assert Audit.from_processes(audits[1:2]) is audits[1]


def test_gradients_of_a_reentrant_checkpoint_are_not_determined(bench: Bench) -> None:
    [layer] = bench.student.model.layers
    real = layer.forward
    layer.forward = lambda hidden, **options: (
        torch.utils.checkpoint.checkpoint(lambda x: real(x, **options), hidden, use_reentrant=True)
        if torch.is_grad_enabled()
        else real(hidden, **options)
    )
    audited = bench.audit()
    assert audited.messages("skipped") == [
        "which parameters receive a gradient (checkpointing hides the parameters)"
    ]
    assert audited.differences == []
    assert "not determined: which parameters receive a gradient" in audited.line


# No faults


class Adapted(nn.Module):
    """A frozen model with an adapter, as PEFT makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model(256, seed=0).requires_grad_(False)
        self.adapter, self.is_on = nn.Parameter(torch.zeros(16)), True
        self.config = self.inner.config
        self.inner.model.embed_tokens.register_forward_hook(
            lambda *args: args[-1] + self.adapter if self.is_on else args[-1]
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, use_cache: Any = None,
        labels: Any = None,
    ) -> Any:  # fmt: skip
        return self.inner(input_ids, attention_mask=attention_mask, use_cache=False, labels=labels)


class AdapterOff(nn.Module):
    """The same model without its adapter, as the teacher."""

    def __init__(self, student: Any, *, has_graph: bool) -> None:
        super().__init__()
        self.student, self.has_graph, self.config = student, has_graph, student.config
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, attention_mask: Any = None, use_cache: Any = None) -> Any:
        self.student.is_on = False
        with torch.set_grad_enabled(self.has_graph and torch.is_grad_enabled()):
            outputs = self.student(input_ids, attention_mask)
            outputs.logits = outputs.logits * self.scale
        self.student.is_on = True
        return outputs


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_student_with_adapters_and_its_base(bytes_batch: Any, has_graph: bool) -> None:
    student = Adapted()
    collate, batch = bytes_batch
    audited = audit([student, AdapterOff(student, has_graph=has_graph).eval()], batch, collate)
    assert audited.differences == []
    hidden = ["whether the teacher uses the student's trained tensors"]
    assert audited.messages("skipped")[1:] == ([] if has_graph else hidden)


def test_rows_padded_on_the_left_that_begin_with_a_target(bench: Bench) -> None:
    on_policy(bench, first_target=0, num_bos=0)
    audited = bench.audit()
    assert audited.differences == []
    assert audited.messages("skipped") == ["ids and masks (the batch contains no texts)"]


def test_a_teacher_slightly_worse_than_the_student_is_noted(bench: Bench) -> None:
    width = bench.collate.student.vocabulary.vocab_size
    bench.student = BigramModel(width, bench.batch)
    bench.teacher.table.data *= 0.9
    audited = bench.audit()
    assert audited.differences == []
    [note] = audited.messages("note")
    assert note.endswith(
        "this teacher will probably reduce quality; train without a teacher, or with a teacher "
        "that predicts this text better"
    )


def test_bits_per_byte_leave_out_the_space_before_a_text(sentencepiece: Tokenizer) -> None:
    """A model of equal logits needs log2(V) bits for each token."""
    collate = DistillationCollator(sentencepiece, sentencepiece)
    width = len(sentencepiece.table)
    text = "In 2014 there were 201 of them. High water."
    model = tiny_model(width, seed=0)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    audited = audit([model, copy.deepcopy(model)], prepare(collate([text])), collate)
    bits = math.log2(width) * len(sentencepiece.encode(text).ids) / len(text)
    assert f"the teacher {bits:.2f} bits per byte (the student {bits:.2f})" in audited.line


SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ARCHITECTURES = (
    "apertus", "arcee", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "doge", "ernie4_5",
    "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "granite", "granitemoe", "hyperclovax", "jetmoe", "lfm2", "llama",
    "mamba", "minimax", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen3", "recurrent_gemma", "seed_oss",
    "smollm3", "stablelm", "starcoder2", "xglm",
)  # fmt: skip


@pytest.fixture(scope="module")
def bytes_batch() -> tuple[DistillationCollator, Any]:
    collate = DistillationCollator("bytes", "bytes")
    return collate, prepare(collate(["Fog, and high water at 6:12.", "201 lighthouses."]))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_audit_accepts_every_architecture(name: str, bytes_batch: Any) -> None:
    try:
        config: Any = transformers.AutoConfig.for_model(name, **SIZES)
    except ValueError:
        pytest.skip(f"this Transformers has no {name}")
    collate, batch = bytes_batch
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.config.get_text_config().output_router_logits = True
    teacher = tiny_model(256, seed=1).eval()
    heads, _ = find_heads([model, teacher], [batch, *batch["teachers"]], [True, True])
    audited = audit([model.train(), teacher], batch, collate, heads)
    assert audited.differences == []
    assert [part.split()[0] for part in audited.messages("ok")] == [
        "loss",
        "heads",
        "the",
        "100.0%",
    ]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*(not a target|learn to stop|today's date):UserWarning")
# accepts only lists of parts
@pytest.mark.parametrize("name", sorted({*chat_families.NAMES} - {"smolvlm"}))
def test_the_audit_accepts_every_template(name: str, small: Path, tmp_path: Path) -> None:
    chat_families.write(name, small / "small-byte-level", tmp_path / name)
    tokenizer = xtok.load_tokenizer(str(tmp_path / name))
    collate = DistillationCollator(tokenizer, tokenizer)
    report = Bench(collate, prepare(collate([chat_families.CHAT]))).audit()
    assert report.differences == []


@pytest.mark.parametrize("loss", [name for name, row in LOSSES.items() if not row.is_stored])
def test_loss_is_0_for_equal_models(loss: LossName, byte_level: Tokenizer) -> None:
    """With maps from a tokenizer to itself, unused ids have no row."""
    side = byte_level.at_width(byte_level.vocabulary.tokenizer_vocab_size or 0)
    collate = DistillationCollator(side, side)
    batch = prepare(collate(TEXTS))
    model = tiny_model(side.vocabulary.vocab_size, seed=0, sharp=0.5).eval()
    kind = LOSS_INFO[loss].map
    loss_map: Any = None
    if kind == "events":
        loss_map = xtok.events(side, side)
    elif kind == "spellings":
        loss_map = xtok.spellings(side, side)
    elif kind is not None:
        loss_map = built(side, side)
    objective = make_objective(collate.pairs, loss, loss_map)
    with torch.no_grad():
        logits = run(model, batch).logits
        terms = objective.terms(logits, [logits], batch)
    assert float(terms.distillation) == pytest.approx(0, abs=1e-5)
    assert float(terms.coverage) == 1
