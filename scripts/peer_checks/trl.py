"""TRL's client for served teachers and its loss, on the output of `xtok project --to vllm`."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from peer_checks import caches, report
from peer_checks.report import Checks

PEER = "TRL"


def installed(work: Path) -> Checks:
    """Yield the lines about TRL as installed."""
    warnings.simplefilter("ignore")
    what = "`VLLMClient`, `ServerDistillationTrainer`"
    agree = partial(caches.agree, "vllm", what, served_loss, caches.tail_kl, work)
    yield from report.guarded(what, agree)


def served_loss(sample: caches.Sample, shift: int) -> float:
    """The forward KL with a tail of TRL's trainer, from the responses to its client."""
    import teacher_server
    from trl.experimental.server_distillation import server_distillation_trainer as server
    from trl.generation import vllm_client

    vllm_client.is_vllm_available = lambda *_: True  # parts that require vLLM are not used
    lines = teacher_server.read(sample.path)
    ids = lines[0]["choices"][0]["prompt_token_ids"]
    with teacher_server.serving(teacher_server.StoredResponses(lines)) as url:
        client = vllm_client.VLLMClient(base_url=url, connection_timeout=20)
        found = client.get_sequence_logprobs([ids], [1], top_logprobs=caches.K)
    names = {"topk_logprobs": "logprobs", "topk_token_ids": "logprob_token_ids"}
    result = {name: torch.tensor(found[key]).roll(shift, 1) for name, key in names.items()}
    own = server.ServerDistillationTrainer
    trainer = SimpleNamespace(
        loss_add_tail=True, _reduce_divergence_loss=own._reduce_divergence_loss
    )
    has_target = torch.isfinite(result["topk_logprobs"]).any(-1)
    labels = torch.where(has_target, torch.tensor([ids[1:]]), -100)
    log_probs = sample.logits[None, :-1].log_softmax(-1)
    return float(own._compute_server_forward_kl_loss(trainer, result, log_probs, labels))
