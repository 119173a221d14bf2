"""With hidden states and heads, the loss and gradients equal those from whole logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from pretended_gpu import GPU, on_cpu, pretended_gpu
from torch import Tensor, nn

import xtok
from xtok import DistillationCollator, XtokError
from xtok.tokenizers.pairs import Pair
from xtok.training.audit import audit
from xtok.training.batches import Batch, SideBatch
from xtok.training.collator import prepare
from xtok.training.heads import Head, find_head, find_heads, why_whole_logits
from xtok.training.losses.config import CombineConfig
from xtok.training.losses.registry import make_loss
from xtok.training.objective import LossTerms, Objective
from xtok.training.running import logits_of

TEXTS = ["There are 201 lighthouses.", "Fog, and high water at 6:12 tonight."]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SMALL = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_expand": 1,
}  # fmt: skip

MODELS: dict[str, tuple[dict[str, Any], float, float | None, bool]] = {
    "Llama": ({**SIZES}, 1.0, None, False),
    "Qwen3": ({**SIZES, "head_dim": 8, "tie_word_embeddings": True}, 1.0, None, False),
    "Gemma2": ({**SIZES, "head_dim": 8, "final_logit_softcapping": 2.0}, 1.0, 2.0, False),
    "Gemma3Text": ({**SIZES, "head_dim": 8}, 1.0, None, False),
    "Granite": ({**SIZES, "logits_scaling": 8.0}, 1 / 8, None, False),
    "HyperCLOVAX": ({**SIZES, "logits_scaling": 0.25}, 0.25, None, False),
    "Cohere": ({**SIZES}, 0.0625, None, False),
    "FalconH1": ({**SIZES, **MAMBA, "lm_head_multiplier": 0.3}, 0.3, None, False),
    "GPT2": ({**SMALL, "n_positions": 64}, 1.0, None, False),
    "GPTJ": ({**SMALL, "rotary_dim": 4}, 1.0, None, True),
}
"""Configurations of tiny models, and their heads: a factor, a softcap, and if there is a bias."""


def model_named(name: str, width: int, **options: Any) -> Any:
    """Return a random model, with peaked distributions, in float32 and training."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")
    if config is None:
        pytest.skip(f"this Transformers has no {name}")
    model_config = config(vocab_size=width, **MODELS[name][0], **options)
    model: Any = transformers.AutoModelForCausalLM.from_config(model_config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.train()


def batch_of(pair: Pair) -> Batch:
    return prepare(DistillationCollator(*pair.tokenizers)(TEXTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_found(name: str, dtype: torch.dtype) -> None:
    _, scale, softcap, has_bias = MODELS[name]
    model, ids = model_named(name, 300).to(dtype), torch.arange(14).view(2, 7)
    assert why_whole_logits(model) is None
    before = torch.get_rng_state()
    head = find_head(model, ids)
    assert isinstance(head, Head)
    assert torch.equal(torch.get_rng_state(), before)
    assert (head.scale, head.softcap, head.linear.bias is not None) == (scale, softcap, has_bias)
    side: SideBatch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    logits: Any = logits_of(model, side, head)
    whole = logits_of(model, side)
    assert isinstance(whole, Tensor)
    assert logits.shape == whole.shape
    rows, positions = torch.tensor([0, 1, 1]), torch.tensor([6, 0, 3])
    actual, expected = logits.at(rows * ids.shape[1] + positions), whole[rows, positions].float()
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


def gradients(
    loss: Callable[[Tensor | Any, list[Any]], LossTerms],
    models: list[Any],
    sides: list[Any],
    heads: list[Head | None],
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the terms, and the gradients of all of the student's parameters."""
    student, *teachers = models
    student.zero_grad()
    with torch.no_grad():
        theirs = [logits_of(*both) for both in zip(teachers, sides[1:], heads[1:], strict=True)]
    terms = loss(logits_of(student, sides[0], heads[0]), theirs)
    terms.loss.backward()
    by_name = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    return [float(term.detach()) for term in terms], by_name


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_those_of_whole_logits(name: str, pair: Pair) -> None:
    batch, index = batch_of(pair), xtok.losses.event_index(xtok.events(*pair.tokenizers))
    sides = [batch, *batch["teachers"]]
    models = [model_named(name, pair.shape[0]), model_named("Gemma2", pair.shape[1])]
    objective = Objective(
        losses=[make_loss("event-kl", map=index)],
        combine=CombineConfig(cross_entropy_weight=0.5),
    )
    loss = partial(objective.terms, batch=batch)
    heads, notes = find_heads(models, sides, objective.hidden_support)
    assert all(heads)
    assert len(notes) == 1
    expected, from_whole = gradients(loss, models, sides, [None, None])
    terms, hidden = gradients(loss, models, sides, heads)
    assert terms == pytest.approx(expected, rel=1e-6)
    assert hidden.keys() == from_whole.keys() == dict(models[0].named_parameters()).keys()
    for parameter, gradient in from_whole.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(hidden[parameter], gradient, rtol=1e-5, atol=1e-5 * largest)


def event_kl_setup(pair: Pair, **options: Any) -> tuple[Any, list[Any], Any]:
    """Return two tiny models, their sides of a batch, and the loss on it."""
    batch, index = batch_of(pair), xtok.losses.event_index(xtok.events(*pair.tokenizers))
    models = [
        model_named(n, w, **options) for n, w in zip(("Llama", "Qwen3"), pair.shape, strict=True)
    ]
    objective = Objective(losses=[make_loss("event-kl", map=index)])
    return models, [batch, *batch["teachers"]], partial(objective.terms, batch=batch)


def in_pieces(layer: nn.Module) -> None:
    """Release a layer's weight outside of its calls and their backward, as in ZeRO-3."""
    weight: Any = layer.weight
    whole, weight.ds_id = weight.data, 0

    def gather(*_: Any) -> None:
        weight.data = whole

    def free(*_: Any) -> None:
        weight.data = whole.new_empty(0)

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(free)
    layer.register_full_backward_pre_hook(gather)
    layer.register_full_backward_hook(free)
    free()


@pytest.mark.parametrize(
    "way", ["bfloat16", "autocast", "checkpointing", "one trained part", "pieces"]
)
def test_ways_of_training(way: str, pair: Pair) -> None:
    models, sides, loss = event_kl_setup(pair)
    if way == "bfloat16":
        models = [model.bfloat16() for model in models]
    elif way == "checkpointing":
        # Transformers 5.24 renamed it.
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        next(getattr(models[0], n) for n in names if hasattr(models[0], n))()
    elif way == "one trained part":
        models[0].requires_grad_(False).model.layers[0].requires_grad_(True)
    elif way == "pieces":
        in_pieces(models[0].lm_head)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        heads, _ = find_heads(models, sides, [True, True])
        assert all(heads)
        expected, from_whole = gradients(loss, models, sides, [None, None])
        terms, hidden = gradients(loss, models, sides, heads)
    assert terms == pytest.approx(expected, rel=1e-2 if "b" in way else 1e-5)
    assert hidden.keys() == from_whole.keys()
    for name, gradient in from_whole.items():
        if way in ("bfloat16", "autocast"):
            ours, theirs = hidden[name].float().flatten(), gradient.float().flatten()
            cosine = torch.cosine_similarity(ours, theirs, dim=0)
            assert cosine > 0.99, name
        else:
            torch.testing.assert_close(hidden[name], gradient, rtol=1e-5, atol=1e-6)


class LowRank(nn.Module):
    """An adapter around a linear layer, like PEFT's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.b(self.a(x))


def test_adapters_in_the_decoder(pair: Pair) -> None:
    models, sides, loss = event_kl_setup(pair)
    models[0].requires_grad_(False)
    for layer in models[0].model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    heads, _ = find_heads(models, sides, [True, True])
    _, from_whole = gradients(loss, models, sides, [None, None])
    _, hidden = gradients(loss, models, sides, heads)
    assert len(from_whole) == 4
    for name, gradient in from_whole.items():
        torch.testing.assert_close(hidden[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's
def test_adapters_of_peft(pair: Pair) -> None:
    """The models train as with logits, and the audit finds no difference."""
    peft = pytest.importorskip("peft")
    models, sides, loss = event_kl_setup(pair)
    models[1].eval()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    models[0] = peft.get_peft_model(models[0], lora)
    heads, _ = find_heads(models, sides, [True, True])
    assert all(heads)
    _, from_whole = gradients(loss, models, sides, [None, None])
    _, hidden = gradients(loss, models, sides, heads)
    assert len(from_whole) == 8
    for name, gradient in from_whole.items():
        torch.testing.assert_close(hidden[name], gradient, rtol=1e-5, atol=1e-6)
    assert not audit(models, sides[0], DistillationCollator(*pair.tokenizers), heads).differences


class Twisted(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model that adds a term to its logits without a configuration value."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        outputs = super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        outputs.logits = 40 * torch.tanh(outputs.logits / 40)
        return outputs


class Plain(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model that always returns all logits."""

    def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return super().forward(input_ids, attention_mask, use_cache=use_cache)


class Twice(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model that runs its decoder twice."""

    def forward(self, input_ids: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        self.model(input_ids)
        return super().forward(input_ids, logits_to_keep=logits_to_keep, **kwargs)


class SoftPrompt(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model with an additional position before the text, as in prompt tuning."""

    def forward(
        self, input_ids: Any, attention_mask: Any = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> Any:
        ids = torch.nn.functional.pad(input_ids, (1, 0))
        return super().forward(ids, logits_to_keep=logits_to_keep, **kwargs)


@pytest.mark.parametrize(
    ("kind", "word"),
    [(Twisted, "differ from its head"), (Twice, "2 times"), (SoftPrompt, "positions")],
)
def test_unknown_head_is_an_error_only_with_hidden_states(kind: Any, word: str) -> None:
    """The logits are below 0.1, so an absolute tolerance would miss the difference."""
    model = kind(transformers.LlamaConfig(vocab_size=300, **SIZES, initializer_range=0.002))
    side: SideBatch = {
        "input_ids": torch.arange(14).view(2, 7), "attention_mask": torch.ones(2, 7)
    }  # fmt: skip
    heads, [note] = find_heads([model], [side], [True])
    assert heads == [None]
    assert word in note
    with pytest.raises(XtokError, match=word):
        find_heads([model], [side], [True], wanted=True)
    if kind is SoftPrompt:  # whole logits are an error as well
        with pytest.raises(XtokError, match=r"\[2, 8\] .* \[2, 7\].*LoRA"):
            logits_of(model, side)


@pytest.mark.parametrize("name", ["Granite", "Gemma2"])
def test_a_head_of_zeros_does_not_show_its_scale(name: str) -> None:
    """If a model starts with a head of zeros, all factors and softcaps reproduce its logits."""
    model, ids = model_named(name, 300, tie_word_embeddings=False), torch.arange(14).view(2, 7)
    nn.init.zeros_(model.lm_head.weight)
    assert "logits of 0" in str(find_head(model, ids))


def test_a_scale_of_1_is_one_candidate() -> None:
    model = model_named("Granite", 300)
    model.config.logits_scaling = 1.0
    head = find_head(model, torch.arange(14).view(2, 7))
    assert isinstance(head, Head)
    assert head.scale == 1.0


def test_a_compiled_model_receives_its_positions() -> None:
    model = model_named("GPT2", 300).eval()
    ids, mask = torch.arange(7)[None], torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    side: SideBatch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    compiled: Any = torch.compile(model, backend="eager")
    logits: list[Any] = [logits_of(each, side) for each in (compiled, model)]
    alone = logits_of(model, {"input_ids": ids[:, 2:], "attention_mask": mask[:, 2:]})
    for padded in logits:
        torch.testing.assert_close(padded[:, 2:], alone)


@pytest.fixture
def one_process() -> Iterator[None]:
    """Initialize a process group that consists of this process."""
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_models_that_make_whole_logits(pair: Pair) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def llama() -> Any:
        return model_named("Llama", 300)

    config = llama().config
    adapted, offloaded = llama(), llama()
    adapted.lm_head = LowRank(adapted.lm_head)
    offloaded.lm_head.to("meta")
    cases = {
        "FSDP": FullyShardedDataParallel(
            llama(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
        ),
        "adapter": adapted,
        "offloaded": offloaded,
        "compile": torch.compile(llama(), backend="eager"),
        "logits_to_keep": Plain(config),
        "decoder": nn.Linear(2, 2),
    }
    side: SideBatch = {"input_ids": torch.arange(14).view(2, 7)}
    for word, model in cases.items():
        assert word in str(why_whole_logits(model)), word
        heads, [note] = find_heads([model], [side], [True])
        assert heads == [None]
        assert word in note
        with pytest.raises(XtokError, match=word):
            find_heads([model], [side], [True], wanted=True)
        assert find_heads([model], [side], [True], wanted=False) == ([None], [])
    mesh = init_device_mesh("cpu", (1,))
    for wrapped in (
        DistributedDataParallel(llama()), DistributedDataParallel(llama(), static_graph=True),
        fully_shard(llama(), mesh=mesh),
    ):  # fmt: skip
        assert why_whole_logits(wrapped) is None
        assert isinstance(find_head(wrapped, side["input_ids"]), Head)


def test_on_a_gpu(pair: Pair) -> None:
    """A step uses one device, and its results equal those on the CPU."""

    def step(device: torch.device | str) -> tuple[list[float], dict[str, Tensor]]:
        models = [
            model_named(name, width).to(device)
            for name, width in zip(("Llama", "Gemma2"), pair.shape, strict=True)
        ]
        batch = prepare(DistillationCollator(*pair.tokenizers)(TEXTS), device)
        sides = [batch, *batch["teachers"]]
        index = xtok.losses.event_index(xtok.events(*pair.tokenizers)).to(device)
        objective = Objective(losses=[make_loss("event-kl", map=index)])
        heads, _ = find_heads(models, sides, objective.hidden_support)
        assert all(heads)
        return gradients(partial(objective.terms, batch=batch), models, sides, heads)

    expected, cpu_gradients = step("cpu")
    with pretended_gpu():
        terms, gpu_gradients = step(GPU)
    assert terms == pytest.approx(expected, rel=1e-6)
    for name, gradient in cpu_gradients.items():
        torch.testing.assert_close(on_cpu(gpu_gradients[name]), gradient, rtol=1e-4, atol=1e-6)
