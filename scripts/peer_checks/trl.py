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

import xtok
from peer_checks.report import (
    PAIRS,
    Check,
    Checks,
    auto_tokenizer,
    folder_of,
    guarded,
    imported,
    text_of,
)
from xtok.config import Loss
from xtok.training.losses import GoldConfig, PKLConfig, exact_pairs, gold, p_kl

PEER = "TRL"
STEPS = 20


def checks(checkout: Path, work: Path) -> Checks:
    """Yield every line about a checkout of TRL that has `XTokenLoss` (pull request 6126)."""
    warnings.simplefilter("ignore")
    module = imported(checkout, "trl.experimental.gold.gold_trainer")
    yield Check(PEER, "import", "`trl.experimental.gold.gold_trainer`", holds=True)
    if hasattr(module, "XTokenLoss"):
        yield from guarded(PEER, "`XTokenLoss`", partial(_xtoken_loss, checkout, module, work))


def _xtoken_loss(checkout: Path, module: Any, work: Path) -> Checks:
    """Its loader on our `.pt`, its loss beside ours on the same logits and chunks."""
    label, (student, teacher) = next(iter(PAIRS.items()))
    utils = imported(checkout, "trl.experimental.utils")
    text = text_of("german")[:200]
    tokenizers = [auto_tokenizer(name, work) for name in (student, teacher)]
    encoded = [utils.encode_with_byte_offsets(t._tokenizer, [text])[0] for t in tokenizers]
    ids = [torch.tensor([one[0]]) for one in encoded]
    offsets = [torch.tensor([one[1]]) for one in encoded]
    rows, columns = (str(folder_of(name, work)) for name in (student, teacher))
    generator = torch.Generator().manual_seed(2)
    kinds: dict[Loss, str] = {"p-kl": "p_kl", "gold": "h_kl"}
    for loss, kind in kinds.items():
        m = xtok.build(rows, columns, for_loss=loss)
        path = work / f"trl-{loss}.pt"
        m.save(path)
        logits = [
            torch.randn(1, one.shape[1], width, generator=generator)
            for one, width in zip(ids, m.shape, strict=True)
        ]
        config = SimpleNamespace(
            xtoken_loss_type=kind, xtoken_projection_matrix_path=str(path),
            xtoken_temperature=1.0, xtoken_dynamic_scaling=False, xtoken_uncommon_topk=8192,
            xtoken_vocab_topk=8192, xtoken_kl_weight=1.0, xtoken_ce_scale=0.0,
            uld_skip_student_eos=False, uld_skip_teacher_eos=False,
        )  # fmt: skip
        theirs = module.XTokenLoss(config, *m.shape)
        labels = [one.clone() for one in ids]
        for one in labels:
            one[:, 0] = -100  # nothing predicts the first token
        leaf = logits[0].clone().requires_grad_()
        value = theirs(leaf, logits[1], *labels, *offsets)
        value.backward()
        assert leaf.grad is not None
        aligner = xtok.TokenAligner(*tokenizers)
        aligned = xtok.shift_to_predictions(aligner.align(*ids))
        if kind == "p_kl":
            module_of_map = xtok.ProjectionModule(m)
            ours = p_kl(logits[0], logits[1], module_of_map, aligned, PKLConfig(top_k=8192))
        else:
            pairs = exact_pairs(m, threshold=0.6)
            ours = gold(logits[0], logits[1], pairs, aligned, GoldConfig())
        finite = math.isfinite(float(value.detach())) and bool(leaf.grad.isfinite().all())
        figure = f"{float(value.detach()):.3f}; xtok's on the same chunks {float(ours):.3f}"
        yield Check(PEER, f"`XTokenLoss`, {kind}, --for {loss}, {label}", figure, holds=finite)


def installed(work: Path) -> Checks:
    """Yield the lines about TRL as installed: its trainer, and its functions on templates."""
    warnings.simplefilter("ignore")
    yield from guarded(PEER, "`GOLDTrainer`", partial(_gold_trainer, work))
    yield from guarded(PEER, "chat templates", partial(_templates, work))


def _gold_trainer(work: Path) -> Checks:
    """The example on a tiny student and teacher with the real tokenizers, off policy."""
    import json

    import trl_gold
    from transformers import LlamaConfig, LlamaForCausalLM

    label, names = next(iter(PAIRS.items()))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        models = []
        for seed, name in enumerate(names):
            tokenizer = auto_tokenizer(name, work)
            torch.manual_seed(seed)
            width = xtok.load_tokenizer(str(folder_of(name, work))).vocabulary.vocab_size
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
                {"role": "assistant", "content": text_of(language)[:120]},
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
    yield Check(PEER, f"`GOLDTrainer` with xtok's P-KL, {label}", figure, holds)


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
    import copy

    from transformers import AutoTokenizer
    from trl import GRPOTrainer
    from trl.chat_template_utils import is_chat_template_prefix_preserving

    from xtok.conversation import is_prefix_preserving, tool_suffix

    small_tokenizers.byte_level_bpe(work / "small", vocab_size=400, digits=1)
    base = AutoTokenizer.from_pretrained(str(work / "small"))
    for name in chat_families.NAMES:
        folder = work / "templates" / name
        library = chat_families.write(name, copy.deepcopy(base), folder)
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
        yield Check(PEER, f"tool suffix and prefix, `{name}`", figure, holds=holds)


def _or_none(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call returns; None for an error, whatever a template raises."""
    try:
        return call(*args)
    except Exception:  # noqa: BLE001  # jinja's, TRL's, or ours
        return None
