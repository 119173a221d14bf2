"""A process of `test_sharded.py`: a step of models in FSDP2, DeepSpeed or DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import xtok
from xtok import DistillationCollator
from xtok.tokenizers.pairs import Pair
from xtok.training.batches import Batch
from xtok.training.collator import prepare
from xtok.training.heads import find_heads
from xtok.training.losses import CombineConfig, event_index, spelling_index
from xtok.training.losses.registry import make_loss
from xtok.training.objective import Objective
from xtok.training.running import logits_of, unwrap

TEXTS = [
    "There are 201 lighthouses.", "Fog, and high water at 6:12 tonight.",
    "The keeper lit 201 lamps.", "for x in range(1234): print(x)", "Ashes.", "día tras día",
    "High water at 6:12.", "The last rock, and 3 steps.",
]  # fmt: skip
LAYOUTS = "root", "layers", "head", "zero3", "ddp", "ddp-static"
"""How models are distributed.

- `root`, `layers`, `head`: FSDP shards the whole model; also each layer; also the head separately
- `zero3`: DeepSpeed's ZeRO-3 shards the student
- `ddp`, `ddp-static`: DDP replicates the student; `static` declares a static graph
"""


def objective_of(pair: Pair) -> Objective:
    """Return an objective of three teachers (event KL, CSD, ALM) and the cross-entropy."""
    weighted_losses = [
        make_loss("event-kl", map=event_index(xtok.events(pair))),
        make_loss("csd", map=spelling_index(xtok.spellings(pair))),
        make_loss("alm"),
    ]
    return Objective(losses=weighted_losses, combine=CombineConfig(cross_entropy_weight=0.5))


def models_of(pair: Pair, layout: str | None, *, tied: bool, low: bool = False) -> list[Any]:
    """Return the student and its teachers, sharded if a layout is given."""
    models = [
        tiny_model(pair.shape[seed > 0], seed=seed, sharp=0.5, tied=tied and not seed)
        for seed in range(4)
    ]
    if layout == "zero3":
        models[0] = engine_of(models[0])
    elif layout in ("ddp", "ddp-static"):
        models[0] = DistributedDataParallel(models[0], static_graph=layout == "ddp-static")
    elif layout is not None:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if low else MixedPrecisionPolicy()
        for model in models:
            parts = [*model.model.layers] if layout != "root" else []
            parts += [model.lm_head] if layout == "head" and not tied else []
            for part in (*parts, model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
    return models


def engine_of(model: Any) -> Any:
    """Return a model in DeepSpeed's engine with all parameters sharded."""
    import deepspeed

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def gradients_of(student: Any) -> dict[str, Tensor]:
    """Return all gradients, gathered from all shards."""
    if hasattr(student, "zero_optimization_stage"):
        from deepspeed.utils import safe_get_full_grad

        named = student.module.named_parameters()
        return {name: safe_get_full_grad(parameter) for name, parameter in named}
    return {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in unwrap(student).named_parameters() if p.grad is not None
    }  # fmt: skip


def step(
    models: list[Any], batches: list[Batch], objective: Objective, totals: Tensor,
    world: int, *, hidden: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the loss and the gradients of batches, as shares of all terms."""
    student, *teachers = models
    value, heads = torch.zeros(()), None
    for batch in batches:
        both = [batch, *batch["teachers"]]
        if heads is None:
            heads, notes = find_heads(models, both, objective.hidden_support, hidden)
            assert all(heads) is hidden, notes
        logits = logits_of(student, batch, heads[0])
        with torch.no_grad():
            theirs = [
                logits_of(*teacher_side)
                for teacher_side in zip(teachers, batch["teachers"], heads[1:], strict=True)
            ]
        terms = objective.terms(logits, theirs, batch, totals)
        getattr(student, "backward", Tensor.backward)(terms.loss * world)
        value += terms.loss.detach()
    return value, gradients_of(student)


def batches_of(pair: Pair, rows: list[list[str]]) -> list[Batch]:
    """Return prepared batches of some texts."""
    student, teacher = pair.tokenizers
    collate = DistillationCollator(student, [teacher] * 3)
    return [prepare(collate(texts)) for texts in rows]


def main(teacher: str, output: str, *cases: str) -> None:
    """Run a rank's part of the texts in two batches; rank 0 saves the results of all ranks."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(1)
    own = TEXTS[rank::world]
    half = len(own) // 2
    pair = xtok.load_pair("bytes", teacher)
    batches, objective = batches_of(pair, [own[:half], own[half:]]), objective_of(pair)
    totals = torch.stack([objective.count(batch) for batch in batches]).sum(0)
    distributed.all_reduce(totals)
    for case in cases:
        layout, tied, kind = case.split()
        models = models_of(pair, layout, tied=tied == "tied", low=kind == "bfloat16")
        value, gradients = step(models, batches, objective, totals, world)
        distributed.all_reduce(value)
        if rank == 0:
            torch.save((float(value), gradients), Path(output) / f"{case}.pt")
    distributed.destroy_process_group()
