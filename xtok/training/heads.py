"""Find a model's head, so that losses can compute logits from hidden states in blocks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from xtok.errors import XtokError
from xtok.training.losses.logits import AnyLogits, HiddenLogits

SCALES = "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"
"""Configuration keys of a factor for the logits, in order: Cohere; Granite (a divisor) and
HyperCLOVA X; Falcon H1; Muse."""

SOFTCAPS = "final_logit_softcapping", "logits_soft_cap"
"""Configuration keys of the softcap c in c · tanh(logits / c), in order: Gemma and nanochat;
RecurrentGemma."""

PROBES = 0.0, 64.0, 1024.0
"""Largest |hidden · weight| at the positions that `find_head` compares (0: not scaled). Large
values reveal a factor or a softcap even if the model's own logits are small."""

ROUTER_COEFFICIENTS = "router_aux_loss_coef", "aux_loss_coef"
"""Names of the router loss weight in models and configurations; JetMoE uses the second name."""

WHOLE_LOGITS_HINT = "pass hidden_states=False to a trainer, or wanted=False to find_heads"

SOFT_PROMPT_HINT = (
    "train a LoRA adapter instead of soft prompts (prompt tuning, p-tuning): each position must "
    "belong to a token"
)


@dataclass(frozen=True)
class Head:
    """The output layers of a causal language model."""

    decoder: nn.Module  # its first output: the hidden states after the last norm
    linear: Any  # an `nn.Linear`
    bias: Tensor | None  # added to the bias of `linear`
    scale: float
    softcap: float | None
    shards: Any = None  # the FSDP2 module that shards the head, if any

    def logits(self, hidden: Tensor, autocast: torch.dtype | None) -> HiddenLogits:
        """Return the logits for hidden states `[B, T, d]`.

        `autocast` is the decoder's autocast dtype, or None without autocast.
        """
        hidden, weight, bias = self._gather(hidden)
        if self.bias is not None:
            bias = self.bias.flatten() if bias is None else bias + self.bias.flatten()
        if autocast is None:
            hidden = hidden.to(weight.dtype)
        with torch.autocast(hidden.device.type, autocast, enabled=autocast is not None):
            return HiddenLogits(hidden, weight, bias, scale=self.scale, softcap=self.softcap)

    def _gather(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        linear = self.linear
        if self.shards is not None:
            self.shards.unshard()  # FSDP2 reshards after the backward pass or in the next run
        if not hasattr(linear.weight, "ds_id"):
            return hidden, linear.weight, linear.bias

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            bias = linear.bias
            return hidden, linear.weight.clone(), None if bias is None else bias.clone()

        # DeepSpeed's hooks gather the weights when the module is called and when its backward
        # starts.
        linear.forward = forward
        try:
            hidden, weight, bias = linear(hidden)
        finally:
            del linear.forward
        return hidden, weight, bias


def run(model: Any, side: Mapping[str, Any], head: Head | None = None, **options: Any) -> Any:
    """Run a model on its side of a batch, and return the model's outputs.

    With a head, the outputs' `logits` are `HiddenLogits`. The model can have wrappers such as DDP.
    A model that adds positions, for example with prompt tuning, raises an `XtokError`.
    """
    options |= {name: side[name] for name in ("input_ids", "attention_mask")}
    options["use_cache"] = False
    calls: list[tuple[Tensor, torch.dtype | None]] = []
    if "position_ids" in side and accepts(model, "position_ids"):
        options["position_ids"] = side["position_ids"]
    if head is None:
        outputs = model(**options)
    else:
        # Call the wrapper and return the hidden states as outputs, because DDP and FSDP reduce only
        # gradients of their outputs.
        inner = unwrap(model)

        def add_hidden(outputs: Any, _: Tensor) -> Any:
            outputs.hidden_states = calls[0][:1]
            return outputs

        with ExitStack() as hooks:
            hooks.enter_context(_hook(head.decoder, lambda _, x: calls.append((x, _autocast(x)))))
            for module in {inner, _base(inner)}:  # PEFT calls only the base model's forward
                hooks.enter_context(_hook(module, add_hidden, first=True))
            outputs = model(**options, logits_to_keep=1)
        [(_, autocast)] = calls
        outputs.logits = head.logits(outputs.hidden_states[0], autocast)
    if problem := _other_positions(outputs.logits, side["input_ids"]):
        raise XtokError(f"{_name(model)} has {problem}", hint=SOFT_PROMPT_HINT)
    return outputs


def _autocast(like: Tensor) -> torch.dtype | None:
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def logits_of(model: Any, side: Mapping[str, Any], head: Head | None = None) -> AnyLogits:
    """Run a model on its side of a batch, and return the logits."""
    logits: AnyLogits = run(model, side, head).logits
    return logits


def router_loss(model: Any, outputs: Any, coefficient: float | None = None) -> Tensor | None:
    """Return the weighted router loss of a mixture of experts; None for other models.

    Requires `output_router_logits`. By default, the coefficient comes from the model or its
    configuration.
    """
    loss = getattr(outputs, "aux_loss", None)
    if not isinstance(loss, Tensor):
        return None
    if coefficient is None:
        inner = _base(unwrap(model))
        sources = inner, inner.config.get_text_config()
        values = [getattr(source, name, None) for source in sources for name in ROUTER_COEFFICIENTS]
        coefficient = next((value for value in values if value is not None), 0.0)
    return coefficient * loss


@contextmanager
def evaluating(models: Iterable[nn.Module | None]) -> Iterator[None]:
    """Run models in evaluation mode, and restore each module's mode afterwards."""
    training = [m for model in models if model is not None for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def preserve_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager that restores the random generators afterwards."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def find_heads(
    models: Sequence[Any],
    sides: Sequence[Mapping[str, Any]],
    support: Sequence[bool],
    wanted: bool | None = None,
) -> tuple[list[Head | None], list[str]]:
    """Return each model's head, or None if the model needs whole logits, and notes with reasons.

    `models` are the student and its teachers (None for stored predictions), and `sides` are the
    models' parts of a batch. `support` is True for a model if all losses that read its logits
    accept hidden states. If `wanted` is False, all models compute whole logits.

    Raises:
        XtokError: if `wanted` is True, and a loss or a model does not support hidden states.
    """
    names = ["the student", *(f"teacher {n}" for n in range(1, len(models)))]
    heads: list[Head | None] = [None] * len(models)
    notes, in_blocks = list[str](), list[str]()
    for n, (model, side_batch, allowed) in enumerate(zip(models, sides, support, strict=True)):
        require_id_rows(model, side_batch, n)
        if model is None or wanted is False:
            continue
        result: Head | str = "its loss requires whole distributions"
        if allowed:
            result = why_whole_logits(model) or find_head(model, side_batch["input_ids"])
        if isinstance(result, Head):
            heads[n] = result
            in_blocks.append(names[n])
        elif wanted:
            raise XtokError(f"{names[n]} needs whole logits: {result}", hint=WHOLE_LOGITS_HINT)
        else:
            notes.append(f"{names[n]} computes whole logits: {result}")
    if in_blocks:
        notes.insert(
            0, f"losses compute logits in blocks from hidden states: {', '.join(in_blocks)}"
        )
    return heads, notes


def require_id_rows(model: Any, side_batch: Mapping[str, Any], index: int) -> None:
    """Raise an `XtokError` if an id has no embedding, because this crashes a GPU.

    Issues a warning if rows are longer than the model's maximum number of positions.
    """
    rows = limit = None
    with suppress(AttributeError, NotImplementedError):  # also for None, which has no embeddings
        rows = getattr(unwrap(model).get_input_embeddings(), "num_embeddings", None)
        limit = unwrap(model).config.get_text_config().max_position_embeddings
    name = f"teacher {index}" if index else "the student"
    if limit is not None and 0 < limit < side_batch["input_ids"].shape[1]:
        warnings.warn(
            f"{name}, {_name(model)}, has {limit:,} positions, but rows are longer: it fails on "
            "later tokens, or predicts them badly; shorten the rows with max_length",
            stacklevel=3,
        )
    if rows is not None and (largest := int(side_batch["input_ids"].max())) >= rows:
        raise XtokError(
            f"{name}, {_name(model)}, has {rows:,} rows of embeddings, but the batch contains id "
            f"{largest:,}",
            hint="check that student and teacher are not swapped, and that each model uses the "
            "tokenizer in its folder",
        )


def why_whole_logits(model: Any) -> str | None:
    """Return the reason why a model must compute whole logits, or None."""
    inner, name = unwrap(model), type(_base(unwrap(model))).__name__
    if any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules()):
        return "FSDP 1 shards its head; FSDP 2 (fully_shard) can gather it"
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in (model, inner)):
        return "torch.compile hides its hidden states"
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", True):
        return f"{name} is not a decoder of Transformers"
    if not accepts(inner, "logits_to_keep"):
        return f"the forward of {name} has no logits_to_keep"
    decoder = linear = None
    with suppress(AttributeError, NotImplementedError):
        decoder, linear = inner.get_decoder(), inner.get_output_embeddings()
    if decoder in (None, inner, _base(inner)) or linear is None:
        return f"{name} has no get_decoder() or get_output_embeddings()"
    if type(linear).forward is not nn.Linear.forward:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        return f"its head is a {kind} (adapter or quantization)"
    return _weight_problem(linear.weight) if _shards(inner, linear) is None else None


def accepts(model: Any, argument: str) -> bool:
    """Whether the `forward` of a model, inside any wrappers, has this argument."""
    inner = _base(unwrap(model))
    forward = type(getattr(inner, "_orig_mod", inner)).forward  # torch.compile wraps the model
    return argument in inspect.signature(forward).parameters


def _shards(inner: Any, linear: nn.Module) -> Any:
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    sharded: list[Any] = [module for module in inner.modules() if isinstance(module, FSDPModule)]
    around = [module for module in sharded if any(layer is linear for layer in module.modules())]
    return around[-1] if around else None  # the innermost FSDP module


def _weight_problem(weight: Tensor) -> str | None:
    if hasattr(weight, "device_mesh"):
        return "tensor parallelism shards its head"
    if weight.device.type == "meta":
        return "its head is offloaded"
    return None


@torch.no_grad()
def find_head(model: Any, ids: Tensor) -> Head | str:
    """Find a head that reproduces the model's logits at three positions of ids `[B, T]`.

    If no head reproduces the logits, return the reason.
    """
    inner = unwrap(model)
    decoder, linear = inner.get_decoder(), inner.get_output_embeddings()
    calls: list[tuple[Tensor, torch.dtype | None]] = []

    def scale_hidden(output: Any, hidden: Tensor) -> Any:
        if not _other_positions(hidden, probe_ids):
            largest = linear(hidden.to(linear.weight.dtype)).abs().amax(-1).float()
            probes = torch.tensor(PROBES, device=hidden.device)
            factors = torch.where(probes > 0, probes / largest.clamp(min=1e-6), 1.0)
            hidden = (hidden * factors[..., None]).to(hidden.dtype)
        calls.append((hidden, _autocast(hidden)))
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    probe_ids = ids[:1].repeat(1, len(PROBES))[:, : len(PROBES)]
    with preserve_rng(ids.device), _hook(decoder, scale_hidden):
        expected = inner(input_ids=probe_ids, use_cache=False).logits[0]
    if len(calls) != 1:
        return f"its decoder runs {len(calls)} times for one batch"
    [(hidden, autocast)] = calls
    if problem := _other_positions(hidden, probe_ids):
        return f"{_name(model)} has {problem}"
    positions = torch.arange(len(PROBES), device=ids.device)
    for head in _candidates(inner, decoder, linear):
        logits = head.logits(hidden, autocast)
        if problem := _weight_problem(linear.weight):
            return problem
        if _is_close(logits.at(positions), expected, logits.dtype):
            return head
    return (
        f"the logits of {_name(model)} differ from its head applied to its hidden states "
        f"(configuration values used: {', '.join((*SCALES, *SOFTCAPS))})"
    )


def _candidates(inner: Any, decoder: nn.Module, linear: Any) -> list[Head]:
    config = inner.config.get_text_config()
    scales, softcaps = ([_number(config, name) for name in names] for names in (SCALES, SOFTCAPS))
    factors = [1.0, *(f for scale in scales if scale for f in (scale, 1 / scale))]
    caps = [None, *(cap for cap in softcaps if cap)]
    bias, shards = getattr(_base(inner), "final_logits_bias", None), _shards(inner, linear)
    return [Head(decoder, linear, bias, f, c, shards) for f, c in product(factors, caps)]


def _other_positions(outputs: Any, ids: Tensor) -> str | None:
    positions, shape = list(outputs.shape[:2]), list(ids.shape)
    return None if positions == shape else f"positions {positions} for ids {shape}"


def _is_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    if actual.shape != expected.shape:
        return False
    eps = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    actual, expected = actual.float(), expected.float()
    rounding = max(1e-4, 4 * eps) * expected.abs().amax(-1, keepdim=True)
    return bool(((actual - expected).abs() <= rounding).all())


@contextmanager
def _hook(
    module: nn.Module, function: Callable[[Any, Tensor], Any], *, first: bool = False
) -> Iterator[None]:
    """After a module's forward, call `function(outputs, first output)`: it can replace outputs."""
    handle = module.register_forward_hook(
        lambda _, args, output: function(output, output[0]), prepend=first
    )
    try:
        yield
    finally:
        handle.remove()


def unwrap(model: Any) -> Any:
    """Return the model inside wrappers such as DDP or DeepSpeed's engine."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def _base(inner: Any) -> Any:
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None


def _name(model: Any) -> str:
    inner = unwrap(model)
    return str(getattr(getattr(inner, "config", None), "name_or_path", "") or type(inner).__name__)
