"""Errors of losses, collators and transplants: causes, messages and hints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from error_causes import (
    ANSWER,
    QUESTION,
    Errors,
    bytes_map,
    bytes_pair,
    file,
    messages_test,
    read_map,
    small_tokenizer,
)
from make_maps import FOREIGN, GOOD, pt_bytes
from tiny_models import tiny_model, with_layer

import xtok
from xtok import ProjectionModule, losses
from xtok.training.heads import find_heads
from xtok.training.objective import make_objective
from xtok.training.trainers import nemo_rl


def heads_of(wrong: str) -> object:
    """Search for the head of a model with a missing head, more positions, or another factor."""
    model: Any = torch.nn.Linear(2, 2) if wrong == "no head" else tiny_model(300, seed=0)

    def more(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, [0, 0, 1, 2]]
        return output

    if wrong == "more":
        model.model.register_forward_hook(more)
    if wrong == "other":
        model.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    return find_heads([model], [{"input_ids": torch.zeros(1, 3, dtype=torch.int64)}], [True], True)


TRANSPLANT = "init", "pad_to_multiple_of"  # these are options; other keys change the model's config


def transplanted(
    tokenizer: str = "small/small-byte-level", output: str | Path = "new", **changes: Any
) -> object:
    """Give a model another tokenizer."""
    folder = with_layer(Path("model"), Path("small/small-digits"), np.ones((896, 2), np.float32))
    config = {"model_type": "llama", "vocab_size": 896, "hidden_size": 2, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    options = {name: changes.pop(name) for name in TRANSPLANT if name in changes}
    return xtok.transplant(folder, tokenizer, output, **options)


TURNS = [QUESTION, ANSWER]


def collated(**sample: object) -> object:
    """Make a batch of one sample, for two teachers."""
    collator = xtok.DistillationCollator(
        "bytes", ["bytes", "bytes"], student_template="plain", teacher_templates=["plain", "plain"]
    )
    return collator([sample])


ERRORS: Errors = {
    "use xtok.load_tokenizer, or AutoTokenizer with use_fast=True": [
        (
            lambda: nemo_rl.NemoTokenAligner(3, "bytes"),
            "tokenizer has type int, expected a fast Hugging Face tokenizer",
        ),
    ],
    "give a Jinja file with teacher_templates=, or one of …": [
        (
            lambda: xtok.DistillationCollator(
                small_tokenizer(), "bytes", student_template="chatml"
            )([[QUESTION, {"role": "assistant", "content": "yes"}]]),
            "bytes has no chat template",
        ),
    ],
    "pass an expected value with init=": [
        (
            lambda: transplanted(init="bytes"),
            "init is bytes, expected pieces, mean or the path of an existing map",
        ),
    ],
    "save the model with save_pretrained, or use a model with a safetensors checkpoint": [
        (
            lambda: xtok.transplant("small/small-digits", "small/small-byte-level", "new"),
            "small/small-digits has no model.safetensors",
        ),
    ],
    "give a model's folder or repo id": [
        (
            lambda: xtok.transplant("small/small.model", "small/small-byte-level", "new"),
            "small.model is a tokenizer file without weights",
        ),
    ],
    "use a folder or repo with a tokenizer.json": [
        (
            lambda: transplanted("small/small.model"),
            "Transformers cannot load the tokenizer small.model",
        ),
    ],
    "pass a smaller multiple with pad_to_multiple_of=": [
        (
            lambda: transplanted(pad_to_multiple_of=2**25),
            "small-byte-level, padded to a multiple of 33554432, has 33,554,432 rows, "
            "expected at most 16,777,216",
        ),
    ],
    "give the original checkpoint, before quantization": [
        (
            lambda: transplanted(quantization_config={"quant_method": "fp8"}),
            "the weights of model are quantized, expected floats",
        ),
    ],
    "give a model that AutoModelForCausalLM loads without custom code": [
        (
            lambda: transplanted(model_type="t5"),
            "Transformers has no causal language model for the config.json of model: "
            "Unrecognized configuration class …",
        ),
        (
            lambda: transplanted(model_type="none"),
            "Transformers has no causal language model for the config.json of model: "
            "The checkpoint you are trying to load has model type `none` but Transformers …",
        ),
    ],
    "use a text-only model with one input-embedding layer": [
        (
            lambda: transplanted(model_type="gemma3", text_config={"num_hidden_layers": 1}),
            "the model model (gemma3) also reads input other than text, which is not supported",
        ),
        (
            lambda: transplanted(model_type="gemma3n_text", hidden_size=8),
            "the model model (gemma3n_text) has embeddings in each layer, which is not supported",
        ),
    ],
    "name a folder": [
        (lambda: transplanted(output=file("new")), "the output new is a file, expected a folder"),
    ],
    "choose a new folder, or delete this folder first": [
        (
            lambda: transplanted(output=Path(file("new/a.txt")).parent),
            "the output folder new contains a.txt, which xtok did not write, or which has changed "
            "since then",
        ),
    ],
    "choose another folder": [
        (
            lambda: transplanted(output=Path(file("new")) / "a"),
            "the output cannot be written: new is a file, not a folder",
        ),
    ],
    "pass map= to the trainer (one map per teacher) or to make_loss": [
        (lambda: losses.make_loss("p-kl"), "p-kl requires a projection map"),
    ],
    "remove the map, or use one of p-kl, event-kl, csd, gold, h-kl": [
        (lambda: losses.make_loss("alm", map=GOOD), "alm takes no map"),
        (lambda: make_objective([bytes_pair()], "alm", GOOD), "alm takes no map"),
        (lambda: make_objective([bytes_pair()], ["alm"], [GOOD]), "alm takes no map"),
        (
            lambda: make_objective([bytes_pair()], losses.make_loss("alm"), GOOD),
            "a BatchLoss takes no map",
        ),
    ],
    "use a TopKCollator for topk-kl, and a DistillationCollator for every other loss": [
        (lambda: make_objective([None], "gold", GOOD), "gold needs a model as its teacher"),
        (lambda: make_objective([bytes_pair()], "topk-kl"), "topk-kl needs stored predictions"),
    ],
    "use the loss 'event-kl' with a map from `xtok events STUDENT TEACHER`": [
        (
            lambda: make_objective(
                [xtok.load_pair("bytes", "small/small-digits")], "same-tokenizer"
            ),
            "the loss same-tokenizer needs equal tokenizers, but bytes and small-digits differ",
        ),
    ],
    "train the map in your own loop, as scripts/examples/distill.py does, then pass the map "
    "that `to_map` returns": [
        (
            lambda: make_objective(
                [bytes_pair()], "p-kl", ProjectionModule(bytes_map(), learnable=True)
            ),
            "the map is learnable, but a trainer optimizes only the student",
        ),
    ],
    'write a conversation as [{"role": "user", "content": "…"}, …], or {"messages": […], '
    '"tools": […]}': [
        (
            lambda: collated(messages=TURNS, tools="f"),
            "sample 0: the value of 'tools': not JSON: Expecting value at column 1",
        ),
        (
            lambda: collated(messages=TURNS, teacher_messages="x"),
            "sample 0: teacher_messages: the value of 'messages': not JSON: Expecting value "
            "at column 1",
        ),
    ],
    'give a text, {"text": "…"}, {"messages": […]} or a list of messages': [
        (lambda: collated(text=3), "sample 0: the field 'text' is int, not a string"),
        (
            lambda: collated(prompt="x", completion=None),
            "sample 0: the row has no text and no messages, only: prompt",
        ),
    ],
    "use a text, or a list with one item per teacher; null uses the student's value": [
        (lambda: collated(text="a", teacher_context=3), "sample 0: teacher_context is not a text"),
        (
            lambda: collated(text="a", teacher_context=["b"]),
            "sample 0: teacher_context has 1 values, expected 2, one per teacher",
        ),
    ],
    "use teacher_messages instead": [
        (
            lambda: collated(messages=TURNS, teacher_context="b"),
            "sample 0: teacher_context has no effect together with messages",
        ),
    ],
    "use teacher_context instead": [
        (
            lambda: collated(text="a", teacher_messages=TURNS),
            "sample 0: teacher_messages has no effect together with text",
        ),
    ],
    "use the same answers in the same order on both sides; other messages may differ": [
        (
            lambda: collated(
                messages=TURNS, teacher_messages=[QUESTION, {**ANSWER, "content": "yä"}]
            ),
            "sample 0: the content of message 1 in messages differs from message 1 in "
            "teacher_messages at byte 1, expected equal answers",
        ),
        (
            lambda: collated(messages=TURNS, teacher_messages=[QUESTION]),
            "sample 0: messages contains 1 answers, but teacher_messages contains 0",
        ),
    ],
    'write each message as an object such as {"role": "user", "content": "Hello"}': [
        (
            lambda: collated(messages=TURNS, teacher_messages=[{"content": "x"}]),
            "sample 0: teacher_messages: message 0 has no role",
        ),
    ],
    "pass hidden_states=False to a trainer, or wanted=False to find_heads": [
        (
            lambda: heads_of("no head"),
            "the student needs whole logits: Linear is not a decoder of Transformers",
        ),
        (
            lambda: heads_of("more"),
            "the student needs whole logits: LlamaForCausalLM has positions [1, 4] for ids [1, 3]",
        ),
        (
            lambda: heads_of("other"),
            "the student needs whole logits: the logits of LlamaForCausalLM differ from its "
            "head applied to its hidden states (configuration values used: logit_scale, "
            "logits_scaling, lm_head_multiplier, output_multiplier, "
            "final_logit_softcapping, logits_soft_cap)",
        ),
    ],
    "use a map for the student, or build a map with width 5: vocab_size=": [
        (
            lambda: ProjectionModule(bytes_map())(torch.zeros(1, 1, 5)),
            "the student's logits have width 5, expected at least 256 (the map's width)",
        ),
    ],
    "load or convert the map with teacher_vocab_size=": [
        (
            lambda: ProjectionModule(read_map(pt_bytes(FOREIGN), "map.pt")),
            "the map file does not record the width of the teacher's logits (largest id: 3)",
        ),
    ],
}

test_training_errors = messages_test(ERRORS)
