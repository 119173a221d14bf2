"""TRL: its losses on xtok's `.pt`, its trainer with xtok's loss, its functions on templates."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chat_families
import small_tokenizers
import torch
from torch import Tensor

import xtok
from peer_checks import caches, report
from peer_checks.report import Check, Checks
from xtok.config import Loss
from xtok.training.losses import PKLConfig, exact_pairs, gold, p_kl

PEER = "TRL"
STEPS = 20


def checks(checkout: Path, work: Path) -> Checks:
    """Yield every line about a checkout of TRL that has `XTokenLoss` (pull request 6126)."""
    warnings.simplefilter("ignore")
    module = report.imported(checkout, "trl.experimental.gold.gold_trainer")
    yield Check("import", "`trl.experimental.gold.gold_trainer`", holds=True)
    if hasattr(module, "XTokenLoss"):
        utils = report.imported(checkout, "trl.experimental.utils")
        yield from report.guarded("`XTokenLoss`", partial(_xtoken_loss, module, utils, work))


def _xtoken_loss(module: Any, utils: Any, work: Path) -> Checks:
    """Its loader on our `.pt`, its loss beside ours on the same logits and chunks.

    Its averages over a chunk are others than ours, so the two must agree where each chunk is one
    token on each side, and with all columns (it and we choose the largest by other values).
    """
    label, names = next(iter(report.PAIRS.items()))
    tokenizers = [report.auto_tokenizer(name, work) for name in names]
    aligner = xtok.TokenAligner(xtok.pair(*tokenizers))

    def encode(text: str) -> list[Any]:
        return [utils.encode_with_byte_offsets(t._tokenizer, [text])[0] for t in tokenizers]

    def is_one_to_one(text: str) -> bool:
        student, teacher = encode(text)
        return len(student[1]) > 8 and bool(student[1] == teacher[1])

    sentences = report.text_of("english").replace("\n", " ").split(". ")
    single = next(filter(is_one_to_one, sentences)), "chunks of one token"
    several = report.text_of("german")[:200], "chunks of several tokens"
    cases: list[tuple[Loss, str, tuple[str, str], int]] = [
        ("p-kl", "p_kl", single, 0),
        ("p-kl", "p_kl", single, 8192),
        ("p-kl", "p_kl", several, 8192),
        ("gold", "h_kl", single, 0),
        ("gold", "h_kl", several, 0),
    ]
    for loss, kind, (text, chunks), top_k in cases:
        path = report.pt_of(*names, loss, work)
        m = xtok.ProjectionMap.load(path)
        encoded = encode(text)
        ids, offsets = ([torch.tensor([side[part]]) for side in encoded] for part in (0, 1))
        labels = [side.clone() for side in ids]
        for side in labels:
            side[:, 0] = -100  # nothing predicts the first token
        generator = torch.Generator().manual_seed(2)
        logits = [
            2 * torch.randn(*side.shape, width, generator=generator)
            for side, width in zip(ids, m.shape, strict=True)
        ]
        config = SimpleNamespace(
            xtoken_loss_type=kind, xtoken_projection_matrix_path=str(path),
            xtoken_temperature=1.0, xtoken_dynamic_scaling=False, xtoken_uncommon_topk=8192,
            xtoken_vocab_topk=top_k, xtoken_kl_weight=1.0, xtoken_ce_scale=0.0,
            uld_skip_student_eos=False, uld_skip_teacher_eos=False,
        )  # fmt: skip
        xtoken_loss = module.XTokenLoss(config, *m.shape)
        aligned = xtok.shift_to_predictions(aligner.align(*ids))
        ours: report.LossFunction
        if kind == "p_kl":
            options = PKLConfig(top_k=top_k or None)
            projection = xtok.ProjectionModule(m)
            ours = partial(p_kl, module=projection, alignment=aligned, config=options)
        else:
            ours = partial(gold, pairs=exact_pairs(m, threshold=0.6), alignment=aligned)
        theirs = report.value_and_gradient(partial(_called, xtoken_loss, labels, offsets), *logits)
        errors = report.errors(ours, theirs, logits)
        what = f"`XTokenLoss`, {kind}, {chunks}"
        what += f", {top_k or 'all'} columns" if kind == "p_kl" else ""
        figure = f"{float(theirs[0]):.4f}; value {errors[0]:.0e}, gradient {errors[1]:.0e} apart"
        by_design = text == several[0] or top_k > 0
        figure += ", by design" if by_design else ""
        yield Check(f"{what}, {label}", figure, holds=by_design or max(errors) < 1e-4)


def _called(loss: Any, labels: list[Tensor], offsets: list[Tensor], *logits: Tensor) -> Tensor:
    value: Tensor = loss(*logits, *labels, *offsets)
    return value


def installed(work: Path) -> Checks:
    """Yield the lines about TRL as installed: its trainer, and its functions on templates."""
    warnings.simplefilter("ignore")
    yield from report.guarded("`GOLDTrainer`", partial(_gold_trainer, work))
    yield from report.guarded("chat templates", partial(_templates, work))
    what = "`VLLMClient`, `ServerDistillationTrainer`"
    agree = partial(caches.agree, "vllm", what, served_loss, caches.tail_kl, work)
    yield from report.guarded(what, agree)


def served_loss(sample: caches.Sample, shift: int) -> float:
    """The forward KL with a tail that its trainer computes of what its client is answered."""
    import teacher_server
    from trl.experimental.server_distillation import server_distillation_trainer as server
    from trl.generation import vllm_client

    vllm_client.is_vllm_available = lambda *_: True  # what needs vLLM is not asked for
    lines = teacher_server.read(sample.path)
    ids = lines[0]["choices"][0]["prompt_token_ids"]
    with teacher_server.serving(lines) as url:
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


def _gold_trainer(work: Path) -> Checks:
    """The example on a tiny student and teacher with the real tokenizers, off policy."""
    import json

    import trl_gold
    from transformers import LlamaConfig, LlamaForCausalLM

    label, names = next(iter(report.PAIRS.items()))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        models = []
        for seed, name in enumerate(names):
            tokenizer = report.auto_tokenizer(name, work)
            torch.manual_seed(seed)
            width = report.own_tokenizer(name, work).vocabulary.vocab_size
            config = LlamaConfig(
                vocab_size=width, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                num_attention_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
            )  # fmt: skip
            models.append(folder / name)
            LlamaForCausalLM(config).save_pretrained(models[-1])
            tokenizer.save_pretrained(models[-1])
        xtok.build(str(models[0]), str(models[1]), for_loss="p-kl").save(folder / "map.safetensors")
        rows = [
            {"messages": [
                {"role": "user", "content": "What does the book say?"},
                {"role": "assistant", "content": report.text_of(language)[:120]},
            ]}
            for language in ("english", "german", "chinese", "russian")
        ]  # fmt: skip
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {
            "student": models[0], "teacher": models[1], "map": folder / "map.safetensors",
            "dataset": folder / "chats.jsonl", "output_dir": folder / "run", "lmbda": 0.0,
            "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.02,
            "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
            "disable_tqdm": True, "save_strategy": "no", "max_length": 128,
            "max_completion_length": 64,
            "teacher_tokenizer_name_or_path": models[1],
        }  # fmt: skip
        trainer = trl_gold.main([str(w) for k, v in options.items() for w in (f"--{k}", v)])
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    figure = f"{len(losses)} steps, loss {losses[0]:.3f} → {losses[-1]:.3f}"
    holds = len(losses) == STEPS and losses[-1] < losses[0] and all(map(math.isfinite, losses))
    yield Check(f"`GOLDTrainer` with xtok's P-KL, {label}", figure, holds)


_CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "add 2 and 2"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "123456789", "content": "four"},
]
_DIFFER = {
    "cohere2": "drops what the tool says: an error here",
    "qwen3": "TRL refuses it: the template writes `<think>` before a tool's message",
}


def _templates(work: Path) -> Checks:
    """Its tool suffix and its prefix predicate beside ours, on every template in data/."""
    from trl import GRPOTrainer
    from trl.chat_template_utils import is_chat_template_prefix_preserving

    from xtok.conversation import is_prefix_preserving, tool_suffix

    small_tokenizers.byte_level_bpe(work / "small", vocab_size=400, digits=1)
    for name in chat_families.NAMES:
        folder = work / "templates" / name
        library = chat_families.write(name, work / "small", folder)
        tokenizer = xtok.load_tokenizer(str(folder))
        trainer = SimpleNamespace(
            processing_class=library, _tokenizer=library, _is_vlm=False,
            chat_template=library.chat_template, chat_template_kwargs={},
        )  # fmt: skip
        expected = _or_none(GRPOTrainer._get_tool_suffix_ids, trainer, _CHAT[2:])
        ours = _or_none(lambda one: tool_suffix(one, _CHAT).tolist(), tokenizer)
        keeps = _or_none(is_chat_template_prefix_preserving, library)
        same = _or_none(is_prefix_preserving, tokenizer) == keeps
        if name in _DIFFER:
            figure, holds = _DIFFER[name], same
        elif expected is None:
            figure, holds = "takes no tool messages, here and there", ours is None and same
        else:
            figure, holds = f"the same {len(expected)} ids", ours == expected and same
        yield Check(f"tool suffix and prefix, `{name}`", figure, holds=holds)


def _or_none(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call returns; None for an error, whatever a template raises."""
    try:
        return call(*args)
    except Exception:  # noqa: BLE001  # jinja's, TRL's, or ours
        return None
