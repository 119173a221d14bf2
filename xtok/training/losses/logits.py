"""Logits as a tensor, or as hidden states and a head. Losses read both in blocks of positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from xtok.training.sparse import block_length, work_dtype

Gradients: TypeAlias = tuple[Tensor | None, ...]
"""The accumulated gradient of each tensor in `inputs`; None for a tensor without a gradient."""


FLOOR = -23.02585092994046
"""log(1e-10), used as the log-probability of a token with a logit of −∞."""


class HiddenLogits:
    """Logits computed from hidden states and a head, one block of positions at a time.

    Let h be `hidden`, W `weight`, b `bias` and c `softcap`. The logits of a position are

        z = scale · (h Wᵀ + b)        or, with a softcap, c · tanh(z / c)

    No tensor of size `[B, T, V]` is allocated. `backward` can run only once. The product h Wᵀ is
    computed in the dtype of the inputs, or in the autocast dtype if autocast is enabled when the
    object is created. All other steps use float32, or float64 for float64 inputs.

    >>> import torch
    >>> xtok.losses.HiddenLogits(torch.zeros(2, 5, 8), torch.zeros(100, 8)).shape
    torch.Size([2, 5, 100])

    Args:
        hidden: `[B, T, d]`, a decoder's last hidden states, after its final norm.
        weight: `[V, d]`, the head's weight.
        bias: `[V]`.
        scale: the model's `logit_scale`, or 1 / `logits_scaling`.
        softcap: the model's `final_logit_softcapping`.

    Raises:
        ValueError: if shapes do not match, or the softcap is not above 0.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        shapes = [list(x.shape) for x in (hidden, weight)]
        if hidden.ndim != 3 or weight.ndim != 2 or shapes[0][2] != shapes[1][1]:
            raise ValueError(
                f"hidden is {shapes[0]} and weight {shapes[1]}, expected [B, T, d] and [V, d]"
            )
        if bias is not None and list(bias.shape) != shapes[1][:1]:
            raise ValueError(f"bias is {list(bias.shape)}, expected {shapes[1][:1]}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap is {softcap}, expected a number above 0")
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.scale, self.softcap = scale, softcap
        self.shape = torch.Size((*hidden.shape[:2], len(weight)))
        self.device, self.ndim = hidden.device, 3
        self.dtype = torch.promote_types(hidden.dtype, weight.dtype)
        if self.dtype != torch.float64 and torch.is_autocast_enabled(self.device.type):
            self.dtype = torch.get_autocast_dtype(self.device.type)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The tensors that receive gradients."""
        return self.hidden, self.weight, self.bias

    @torch.no_grad()
    def at(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the logits of n positions, `[n, V]`, without a gradient.

        Args:
            positions: int64 `[n]`; token t of a row has the position row · T + t.
            dtype: dtype of the result. Default: float32, or float64 for float64 inputs.
        """
        dtype = dtype or work_dtype(self)
        with torch.autocast(self.device.type, enabled=False):
            logits = (self._rows(positions) @ self._head.t()).to(dtype)
        if self.bias is not None:
            logits += self.bias.to(dtype)
        if self.scale != 1:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def select(self, columns: Tensor) -> HiddenLogits:
        """Return the logits of k tokens, `[B, T, k]`, without a gradient."""
        bias = None if self.bias is None else self.bias.detach()[columns]
        part = HiddenLogits(
            self.hidden.detach(), self.weight.detach()[columns], bias,
            scale=self.scale, softcap=self.softcap,
        )  # fmt: skip
        part.dtype = self.dtype
        return part

    def gradients(self) -> Gradients:
        """Return a zero tensor per input that requires a gradient, and None for other inputs."""
        dtype = work_dtype(self)
        return tuple(_zeros(tensor, dtype) for tensor in self.inputs)

    def before_cap(self, logits: Tensor, grad: Tensor) -> Tensor:
        """Convert a gradient of the logits to a gradient of h Wᵀ + b. Overwrites `grad`.

        The gradient of masked logits (−∞) is 0.
        """
        if self.bias is not None:
            grad.masked_fill_(torch.isneginf(logits), 0)
        if self.softcap is not None:
            grad.addcmul_(grad, (logits / self.softcap).square_(), value=-1)
        return grad if self.scale == 1 else grad.mul_(self.scale)

    def add_gradient(self, gradients: Gradients, positions: Tensor, grad: Tensor) -> None:
        """Add the result of `before_cap` at n positions to the gradients of the inputs.

        The gradient at a position can be added only once. Overwrites `grad`.
        """
        hidden_grad, weight_grad, bias_grad = gradients
        if bias_grad is not None:
            bias_grad += grad.sum(0)
        rows, factor = self._rows(positions), None
        if self.dtype == torch.float16:
            grad *= (factor := self._half_factor(grad, rows))
        with torch.autocast(self.device.type, enabled=False):
            grad = grad.to(self.dtype)
            if hidden_grad is not None:
                row_grads = _unscale(grad @ self._head, factor).to(hidden_grad.dtype)
                hidden_grad[batch_indices(self, positions)] = row_grads
            if weight_grad is not None and weight_grad.dtype == self.dtype:
                weight_grad.addmm_(grad.t(), rows)
            elif weight_grad is not None:
                weight_grad += _unscale(grad.t() @ rows, factor)

    def find_invalid(self, positions: Tensor) -> str | None:
        """Describe the first NaN or infinite value in the inputs, if any."""
        indices = batch_indices(self, positions)
        hidden = self.hidden.detach()[indices]
        if problem := _describe(~torch.isfinite(hidden), hidden, "hidden states", indices):
            return problem
        for name, values in (("weight", self.weight), ("bias", self.bias)):
            if values is not None and (problem := _describe(~torch.isfinite(values), values, name)):
                return problem
        return None

    def _half_factor(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Return a power of 2 that scales a gradient into the range of float16 (6e-8 to 65,504)."""
        size = grad.abs()
        products = size.sum(1).amax() * self._largest_weight, size.sum(0).amax() * rows.abs().amax()
        largest = torch.stack([size.amax(), *(bound / 2**15 for bound in products)]).amax()
        return largest.clamp_(min=1e-30).reciprocal_().log2_().floor_().exp2_()

    @cached_property
    def _largest_weight(self) -> Tensor:
        return torch.stack(self._head.aminmax()).abs().amax().float()

    def _rows(self, positions: Tensor) -> Tensor:
        return self.hidden.detach()[batch_indices(self, positions)].to(self.dtype)

    @cached_property
    def _head(self) -> Tensor:
        return self.weight.detach().to(self.dtype)


class WholeLogits:
    """A tensor of logits, `[B, T, V]`, with the interface of `HiddenLogits`."""

    def __init__(self, logits: Tensor, columns: Tensor | None = None) -> None:
        self.logits, self.inputs, self.columns = logits, (logits,), columns
        self.shape, self.dtype, self.device = logits.shape, logits.dtype, logits.device
        self.ndim = logits.ndim

    @torch.no_grad()
    def at(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the logits of n positions, `[n, V]`."""
        rows, indices = batch_indices(self, positions)
        if self.columns is None:
            block = self.logits[rows, indices]
        else:
            block = self.logits[rows[:, None], indices[:, None], self.columns]
        return block.to(dtype or work_dtype(self))

    def select(self, columns: Tensor) -> WholeLogits:
        """Return the logits of k tokens, `[B, T, k]`, without a gradient."""
        return WholeLogits(self.logits.detach(), columns)

    def gradients(self) -> Gradients:
        """Return a zero tensor if the logits require a gradient, else None."""
        dtype = self.dtype if self.dtype == torch.bfloat16 else work_dtype(self)
        return (_zeros(self.logits, dtype),)

    def before_cap(self, logits: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of a block of logits, with 0 for masked logits (−∞)."""
        return grad.masked_fill_(torch.isneginf(logits), 0)

    def add_gradient(self, gradients: Gradients, positions: Tensor, grad: Tensor) -> None:
        """Write the gradient of the logits at the given positions."""
        [logit_grad] = gradients
        if logit_grad is not None:
            logit_grad[batch_indices(self, positions)] = grad.to(logit_grad.dtype)

    def find_invalid(self, positions: Tensor) -> str | None:
        """Describe the first NaN or +∞ among the logits at n positions, if any."""
        for part in positions.split(256):
            indices = batch_indices(self, part)
            values = self.logits.detach()[indices]
            wrong = torch.isnan(values) | torch.isposinf(values)
            if problem := _describe(wrong, values, "logits", indices):
                return problem
        return None


AnyLogits: TypeAlias = Tensor | HiddenLogits
"""A model's logits `[B, T, V]`: a tensor or `HiddenLogits`."""

Logits: TypeAlias = WholeLogits | HiddenLogits


def as_logits(value: Any) -> Logits:
    """Wrap a tensor of logits."""
    if isinstance(value, WholeLogits | HiddenLogits):
        return value
    if not isinstance(value, Tensor):
        raise ValueError(f"logits are {type(value).__name__}, expected a tensor or HiddenLogits")
    return WholeLogits(value)


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-softmax over the last dimension, with `FLOOR` instead of −∞."""
    log_probs = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
    fill = torch.nan_to_num if log_probs.requires_grad else torch.nan_to_num_
    return fill(log_probs, nan=torch.nan, posinf=torch.inf, neginf=FLOOR)


def top_columns(logits: Logits, compared: Tensor, width: int, top_k: int) -> Tensor:
    """Return the k = `top_k` ids with the largest logits at any position, ascending, int64 `[k]`.

    Ids of `width` or more are ignored. Positions with NaN or +∞ are ignored, unless `compared`,
    int64 `[n]`, contains the position.
    """
    size, step = logits.shape[0] * logits.shape[1], block_length(logits, logits.shape[2])
    if size and isinstance(logits, WholeLogits):  # needs no copies: a tenth of the time
        largest = logits.logits.detach().amax((0, 1))[:width].to(work_dtype(logits))
        if bool((largest < torch.inf).all()):
            return largest.topk(top_k).indices.sort().values
    largest = torch.full((width,), -torch.inf, device=logits.device, dtype=work_dtype(logits))
    for start in range(0, size, step):
        positions = torch.arange(start, min(start + step, size), device=logits.device)
        block = logits.at(positions)[:, :width]
        valid = torch.isin(positions, compared.to(block.device)) | (block.amax(1) < torch.inf)
        block_max = block.masked_fill_(~valid[:, None], -torch.inf).amax(0)
        torch.maximum(largest, block_max, out=largest)
    return largest.topk(top_k).indices.sort().values


def batch_indices(like: AnyLogits | Logits, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row index and the token index of each position."""
    return positions // like.shape[1], positions % like.shape[1]


def _describe(wrong: Tensor, values: Tensor, name: str, at: Sequence[Tensor] = ()) -> str | None:
    if not bool(wrong.any()):
        return None
    first, *others = wrong.nonzero()[0].tolist()
    index = [int(coordinate[first]) for coordinate in at] or [first]
    return f"{name} are {values[(first, *others)].item()} at {[*index, *others]}"


def _unscale(product: Tensor, factor: Tensor | None) -> Tensor:
    return product if factor is None else product.float().div_(factor)


def _zeros(like: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if like is None or not like.requires_grad or not torch.is_grad_enabled():
        return None
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
