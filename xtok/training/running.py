"""Run models on their sides of a batch, with or without their heads."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from xtok.errors import XtokError
from xtok.training.batches import SideBatch
from xtok.training.losses.logits import AnyLogits

if TYPE_CHECKING:
    from xtok.training.heads import Head

ROUTER_COEFFICIENTS = "router_aux_loss_coef", "aux_loss_coef"
"""Names of the router loss weight in models and configurations; JetMoE uses the second name."""

SOFT_PROMPT_HINT = (
    "train a LoRA adapter instead of soft prompts (prompt tuning, p-tuning): each position must "
    "belong to a token"
)


def run(model: Any, side: SideBatch, head: Head | None = None, **options: Any) -> Any:
    """Run a model on its side of a batch, and return the model's outputs.

    With a head, the outputs' `logits` are `HiddenLogits`. The model can have wrappers such as DDP.
    Raises an `XtokError` if the model adds positions, for example with prompt tuning.
    """
    options |= {"input_ids": side["input_ids"], "attention_mask": side["attention_mask"]}
    options["use_cache"] = False
    calls: list[tuple[Tensor, torch.dtype | None]] = []
    if "position_ids" in side and accepts(model, "position_ids"):
        options["position_ids"] = side["position_ids"]
    if head is None:
        outputs = model(**options)
    else:
        # Call the wrapper, and add the hidden states to its outputs: DDP and FSDP reduce only the
        # gradients of their outputs.
        inner = unwrap(model)

        def add_hidden(outputs: Any, _: Tensor) -> Any:
            outputs.hidden_states = calls[0][:1]
            return outputs

        def record(_: Any, hidden: Tensor) -> None:
            calls.append((hidden, autocast_dtype(hidden)))

        with ExitStack() as hooks:
            hooks.enter_context(forward_hook(head.decoder, record))
            for module in {inner, base_model(inner)}:  # PEFT calls only the base model's forward
                hooks.enter_context(forward_hook(module, add_hidden, first=True))
            outputs = model(**options, logits_to_keep=1)
        [(_, autocast)] = calls
        outputs.logits = head.logits(outputs.hidden_states[0], autocast)
    if problem := other_positions(outputs.logits, side["input_ids"]):
        raise XtokError(f"{model_name(model)} has {problem}", hint=SOFT_PROMPT_HINT)
    return outputs


def logits_of(model: Any, side: SideBatch, head: Head | None = None) -> AnyLogits:
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
        inner = base_model(unwrap(model))
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


def require_id_rows(model: Any, side_batch: SideBatch, index: int) -> None:
    """Raise an `XtokError` if an id has no embedding, because such an id crashes a GPU.

    Issues a warning if rows are longer than the model's maximum number of positions.
    """
    rows = limit = None
    with suppress(AttributeError, NotImplementedError):  # also for None, which has no embeddings
        rows = getattr(unwrap(model).get_input_embeddings(), "num_embeddings", None)
        limit = unwrap(model).config.get_text_config().max_position_embeddings
    name = f"{f'teacher {index}' if index else 'the student'}, {model_name(model)},"
    if limit is not None and 0 < limit < side_batch["input_ids"].shape[1]:
        warnings.warn(
            f"{name} has {limit:,} positions, but rows are longer: the model will fail or predict "
            "later tokens badly; shorten the rows with max_length",
            stacklevel=3,
        )
    if rows is not None and (largest := int(side_batch["input_ids"].max())) >= rows:
        raise XtokError(
            f"{name} has {rows:,} rows of embeddings, but the batch contains id {largest:,}",
            hint="check that student and teacher are not swapped, and that each model uses the "
            "tokenizer in its folder",
        )


def accepts(model: Any, argument: str) -> bool:
    """Whether the forward method of a model, without its wrappers, has this argument."""
    inner = base_model(unwrap(model))
    forward = type(getattr(inner, "_orig_mod", inner)).forward  # torch.compile wraps the model
    return argument in inspect.signature(forward).parameters


def unwrap(model: Any) -> Any:
    """Return the model inside wrappers such as DDP or DeepSpeed's engine."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def base_model(inner: Any) -> Any:
    """Return the model inside an adapter of PEFT."""
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def model_name(model: Any) -> str:
    """Return the folder or repo id from which a model was loaded, or else its class."""
    inner = unwrap(model)
    return str(getattr(getattr(inner, "config", None), "name_or_path", "") or type(inner).__name__)


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Return the autocast dtype of a tensor's device, or None without autocast."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def other_positions(outputs: Any, ids: Tensor) -> str | None:
    """Describe the shapes if outputs `[B, T, …]` and ids `[B, T]` differ in B or T, else None."""
    positions, shape = list(outputs.shape[:2]), list(ids.shape)
    return None if positions == shape else f"positions {positions} for ids {shape}"


def forward_hook(
    module: nn.Module, function: Callable[[Any, Tensor], Any], *, first: bool = False
) -> AbstractContextManager[Any]:
    """Call `function(outputs, first output)` after a module's forward.

    If the function returns a value other than None, this value replaces the outputs.
    """
    return module.register_forward_hook(lambda _, args, x: function(x, x[0]), prepend=first)
