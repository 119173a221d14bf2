"""Find a model's head, so that losses can compute logits from hidden states in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from xtok.errors import XtokError
from xtok.training.batches import SideBatch
from xtok.training.losses.logits import HiddenLogits
from xtok.training.running import (
    accepts,
    autocast_dtype,
    base_model,
    forward_hook,
    model_name,
    other_positions,
    preserve_rng,
    require_id_rows,
    unwrap,
)

SCALES = "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"
"""Configuration keys for a factor of the logits. Models with these keys, in the order of the keys:
Cohere; Granite (a divisor) and HyperCLOVA X; Falcon H1; Muse."""

SOFTCAPS = "final_logit_softcapping", "logits_soft_cap"
"""Configuration keys for the softcap c in c · tanh(logits / c). Models with these keys, in the
order of the keys: Gemma and nanochat; RecurrentGemma."""

PROBES = 0.0, 64.0, 1024.0
"""`find_head` compares three positions. `find_head` scales the hidden states of each position so
that the largest |hidden · weight| is about the position's value in `PROBES` (0: no scaling). Large
values reveal a factor or a softcap even if the model's logits are small."""

WHOLE_LOGITS_HINT = "pass hidden_states=False to a trainer, or wanted=False to find_heads"


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


def find_heads(
    models: Sequence[Any],
    sides: Sequence[SideBatch],
    support: Sequence[bool],
    wanted: bool | None = None,
) -> tuple[list[Head | None], list[str]]:
    """Return the head of each model, and notes. The head is None if a model needs whole logits.

    `models` are the student and its teachers (None for stored predictions), and `sides` are the
    models' parts of a batch. `support` contains one value per model: True if all losses that read
    its logits accept hidden states. If `wanted` is False, all models compute whole logits. The
    notes give the reason for each model that computes whole logits.

    Raises:
        XtokError: if `wanted` is True, and a loss or a model does not support hidden states.
    """
    names = ["the student", *(f"teacher {n}" for n in range(1, len(models)))]
    heads, notes = list[Head | None]([None] * len(models)), list[str]()
    for n, (model, side_batch, allowed) in enumerate(zip(models, sides, support, strict=True)):
        require_id_rows(model, side_batch, n)
        if model is None or wanted is False:
            continue
        result: Head | str = "its loss requires whole logits"
        if allowed:
            result = why_whole_logits(model) or find_head(model, side_batch["input_ids"])
        if isinstance(result, Head):
            heads[n] = result
        elif wanted:
            raise XtokError(f"{names[n]} needs whole logits: {result}", hint=WHOLE_LOGITS_HINT)
        else:
            notes.append(f"{names[n]} computes whole logits: {result}")
    if in_blocks := ", ".join(name for name, head in zip(names, heads, strict=True) if head):
        notes.insert(0, f"losses compute logits in blocks from hidden states: {in_blocks}")
    return heads, notes


def why_whole_logits(model: Any) -> str | None:
    """Return the reason why a model must compute whole logits, or None."""
    inner, name = unwrap(model), type(base_model(unwrap(model))).__name__
    if any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules()):
        return "FSDP 1 shards the head; only FSDP 2 (fully_shard) can gather the head"
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in (model, inner)):
        return "torch.compile hides its hidden states"
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", True):
        return f"{name} is not a decoder of Transformers"
    if not accepts(inner, "logits_to_keep"):
        return f"the forward method of {name} has no argument logits_to_keep"
    decoder = linear = None
    with suppress(AttributeError, NotImplementedError):
        decoder, linear = inner.get_decoder(), inner.get_output_embeddings()
    if decoder in (None, inner, base_model(inner)) or linear is None:
        return f"{name} has no get_decoder() or get_output_embeddings()"
    if type(linear).forward is not nn.Linear.forward:
        kind = f"{type(linear).__module__}.{type(linear).__name__}"
        return f"its head is a {kind} (adapter or quantization)"
    return _weight_problem(linear.weight) if _shards(inner, linear) is None else None


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
    """Find a head that reproduces the model's logits at three positions of the first row of ids.

    `ids` are int64 `[B, T]`. Returns the reason, as a text, if no head reproduces the logits.
    """
    inner = unwrap(model)
    decoder, linear = inner.get_decoder(), inner.get_output_embeddings()
    calls: list[tuple[Tensor, torch.dtype | None]] = []

    def scale_hidden(output: Any, hidden: Tensor) -> Any:
        if not other_positions(hidden, probe_ids):
            largest = linear(hidden.to(linear.weight.dtype)).abs().amax(-1).float()
            probes = torch.tensor(PROBES, device=hidden.device)
            factors = torch.where(probes > 0, probes / largest.clamp(min=1e-6), 1.0)
            hidden = (hidden * factors[..., None]).to(hidden.dtype)
        calls.append((hidden, autocast_dtype(hidden)))
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    probe_ids = ids[:1].repeat(1, len(PROBES))[:, : len(PROBES)]
    with preserve_rng(ids.device), forward_hook(decoder, scale_hidden):
        expected = inner(input_ids=probe_ids, use_cache=False).logits[0]
    if len(calls) != 1:
        return f"its decoder runs {len(calls)} times for one batch"
    [(hidden, autocast)] = calls
    if problem := other_positions(hidden, probe_ids):
        return f"{model_name(model)} has {problem}"
    positions = torch.arange(len(PROBES), device=ids.device)
    matches = []
    for head in _candidates(inner, decoder, linear):
        logits = head.logits(hidden, autocast)
        if problem := _weight_problem(linear.weight):
            return problem
        if _is_close(logits.at(positions), expected, logits.dtype):
            matches.append(head)
    if len(matches) == 1:
        return matches[0]
    differ = "differ from its head applied to its hidden states"
    how = "fit several scales, like logits of 0" if matches else differ
    values = ", ".join((*SCALES, *SOFTCAPS))
    return f"the logits of {model_name(model)} {how} (configuration values used: {values})"


def _candidates(inner: Any, decoder: nn.Module, linear: Any) -> list[Head]:
    config = inner.config.get_text_config()
    scales, softcaps = _numbers(config, SCALES), _numbers(config, SOFTCAPS)
    factors, caps = {1.0, *scales, *(1 / scale for scale in scales)}, {None, *softcaps}
    bias, shards = getattr(base_model(inner), "final_logits_bias", None), _shards(inner, linear)
    return [Head(decoder, linear, bias, f, c, shards) for f, c in product(factors, caps)]


def _is_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    if actual.shape != expected.shape:
        return False
    eps = torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    actual, expected = actual.float(), expected.float()
    rounding = max(1e-4, 4 * eps) * expected.abs().amax(-1, keepdim=True)
    return bool(((actual - expected).abs() <= rounding).all())


def _numbers(config: Any, names: Sequence[str]) -> list[float]:
    values = [getattr(config, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float) and value]
