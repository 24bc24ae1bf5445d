"""AdamW on flat buffers, and the sum of squares that clipping needs: the reference, which also runs on the CPU.

Loshchilov and Hutter, Decoupled Weight Decay Regularization. With g the gradient times the factor that unscales and clips, w the
master weight, and t the number of this update,

    m = m + (1 - beta1) (g - m)              v = v + (1 - beta2) (g^2 - v)
    w = w - lr decay w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

and the model gets w rounded to its own precision. What is only known on the device (the factor, whether the gradients are finite,
t) is passed as device scalars, so that no step synchronizes with the host.

Moments in bfloat16. A bfloat16 has 8 bits, so its neighbors are 0.4 to 0.8 % apart, and rounding to nearest would return v for
v - 0.001 v: with beta2 = 0.999 a second moment could never fall again. Moments are therefore rounded stochastically, up with the
probability of the distance to the lower neighbor, which is unbiased. The random bits are a hash of the element's index and of t,
not the state of a generator: a resumed run rounds as one that was not stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

HASH_FACTORS = (0x7FEB352D, 0x5BD1E995)
"""Odd and below 2^31, so that a product with 32 bits fits into 63."""
_CHUNK = 1 << 20  # elements at a time: temporaries stay in the caches of a CPU
_NORM_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRates:
    """The hyperparameters of one update, known to the host."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True, slots=True)
class AdamState:
    """The state that an update changes; flat tensors of one length. `weight` is None where the master weight is the model's own."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight: Tensor | None = None

    def slice_range(self, begin: int, end: int) -> AdamState:
        weight = None if self.weight is None else self.weight[begin:end]
        return AdamState(self.master[begin:end], self.exp_avg[begin:end], self.exp_avg_sq[begin:end], weight)


class AdamKernel(Protocol):
    def __call__(self, grad: Tensor, state: AdamState, scalars: Tensor, *, rates: AdamRates, start: int = 0) -> None:
        """Updates in place. `scalars` are of `adam_scalars`; `start` is the index of the first element, for rounding."""


class SquaresKernel(Protocol):
    def __call__(self, views: Sequence[Tensor]) -> Tensor:
        """Returns the sum of squares of all elements of one or more tensors, in at least float32, as a device scalar."""
        ...


def adam_scalars(step: Tensor, factor: Tensor, skipped: Tensor, *, beta1: float, beta2: float) -> Tensor:
    """Returns (factor, skipped, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t), t) on the device, in the precision of `factor`.

    The powers are taken in float64: 1 - 0.999 in float32 has lost four of its seven digits.
    """
    count = step.double()
    first, second = 1.0 - torch.pow(beta1, count), 1.0 - torch.pow(beta2, count)
    # Skipped before the first, an update has t = 0 and infinite corrections, which nothing uses.
    values = (factor.double(), skipped.double(), first.reciprocal(), second.rsqrt(), count)
    return torch.stack(values).to(factor.dtype)


@torch.no_grad()
def adamw(grad: Tensor, state: AdamState, scalars: Tensor, *, rates: AdamRates, start: int = 0) -> None:
    """Applies the formula above, in the precision of the master weights."""
    for begin, end in _chunks(grad):
        _adamw_chunk(grad[begin:end], state.slice_range(begin, end), scalars, rates=rates, start=start + begin)


def _adamw_chunk(grad: Tensor, state: AdamState, scalars: Tensor, *, rates: AdamRates, start: int) -> None:
    factor, skipped, correction1, correction2, step = scalars.unbind()
    wide = state.master.dtype
    scaled = grad.to(wide) * factor
    exp_avg, exp_avg_sq = state.exp_avg.to(wide), state.exp_avg_sq.to(wide)
    exp_avg = exp_avg + (1.0 - rates.beta1) * (scaled - exp_avg)
    exp_avg_sq = exp_avg_sq + (1.0 - rates.beta2) * (scaled * scaled - exp_avg_sq)
    change = rates.lr * correction1 * exp_avg / (exp_avg_sq.sqrt() * correction2 + rates.eps)
    master = state.master - rates.lr * rates.weight_decay * state.master - change
    rounds = torch.bfloat16 in (state.exp_avg.dtype, state.exp_avg_sq.dtype)
    low, high = _rounding_bits(grad.numel(), start, step) if rounds else (None, None)
    updated = [
        (state.master, master),
        (state.exp_avg, _stochastic_round(exp_avg, state.exp_avg.dtype, low)),
        (state.exp_avg_sq, _stochastic_round(exp_avg_sq, state.exp_avg_sq.dtype, high)),
    ]
    if state.weight is not None:
        updated.append((state.weight, master.to(state.weight.dtype)))
    for target, value in updated:
        target.copy_(torch.where(skipped == 0, value, target))


@torch.no_grad()
def adamw_fused(grad: Tensor, state: AdamState, scalars: Tensor, *, rates: AdamRates, start: int = 0) -> None:
    """Applies torch's own fused kernel, which needs one precision for all: other state uses the formula."""
    wide = state.master.dtype
    if state.exp_avg.dtype != wide or state.exp_avg_sq.dtype != wide:
        adamw(grad, state, scalars, rates=rates, start=start)
        return
    factor = scalars[0].to(grad.dtype) if grad.dtype == wide else scalars[0]
    skipped, step = scalars[1].float(), scalars[4].float()
    for begin, end in _chunks(grad):
        part = state.slice_range(begin, end)
        torch._fused_adamw_(
            [part.master],
            [grad[begin:end].to(wide) * factor],
            [part.exp_avg],
            [part.exp_avg_sq],
            [],
            [step],
            **asdict(rates),
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=skipped,
        )
        if part.weight is not None:
            # A skipped update changes nothing, and the weight is the rounded master already.
            part.weight.copy_(part.master)


def sum_of_squares(views: Sequence[Tensor]) -> Tensor:
    """Sums squares by torch's norm of many tensors at once: each in the precision of the result, and all in float64.

    On a CPU each is a short part of a tensor: torch adds up in one accumulator per lane there, which in float32 makes the norm of
    10 million elements 0.1 % too small and that of 100 million 3 %.
    """
    wide = torch.promote_types(views[0].dtype, torch.float32)
    parts = [part for view in views for part in (view.split(_NORM_CHUNK) if view.device.type == "cpu" else (view,))]
    return torch.stack(torch._foreach_norm(parts, dtype=wide)).double().square().sum().to(wide)


def _chunks(flat: Tensor) -> Iterator[tuple[int, int]]:
    """Yields ranges: short ones on a CPU, for its caches; long ones on a device, for few launches."""
    size = flat.numel()
    length = _CHUNK if flat.device.type == "cpu" else 64 * _CHUNK
    for begin in range(0, size, length):
        yield begin, min(size, begin + length)


def _stochastic_round(value: Tensor, dtype: torch.dtype, random_bits: Tensor | None) -> Tensor:
    """Converts to another dtype; to bfloat16 stochastically: 16 random bits are added to the 16 that are cut off."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    assert random_bits is not None and value.dtype == torch.float32
    bits = (value.contiguous().view(torch.int32).to(torch.int64) + random_bits) & ~0xFFFF
    # The carry may reach the sign bit only of a NaN, which is never written.
    return bits.to(torch.int32).view(torch.float32).to(torch.bfloat16)


def _rounding_bits(length: int, start: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 16 random bits per element, twice: both halves of a hash of the element's index and the update's number."""
    indices = torch.arange(start, start + length, dtype=torch.int64, device=step.device)
    bits = _hash((indices + _hash(step.to(torch.int64))) & 0xFFFFFFFF)
    return bits & 0xFFFF, bits >> 16


def _hash(bits: Tensor) -> Tensor:
    """Hashes 32 bits to 32 bits, every one of which depends on all."""
    first, second = HASH_FACTORS
    bits = bits ^ (bits >> 16)
    bits = (bits * first) & 0xFFFFFFFF
    bits = bits ^ (bits >> 15)
    bits = (bits * second) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
