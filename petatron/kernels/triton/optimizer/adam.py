"""AdamW in one pass, and the sum of squares of the gradients.

`petatron/kernels/optimizer/adam.py` has the formula. Per parameter of a bfloat16 model the kernel reads the gradient, the master weight
and both moments (16 bytes) and writes the master weight, the moments and the model's weight (14): nothing is read twice, and there
are no temporaries. The norm reads the gradient once more before, 4 bytes.

| per parameter              | bytes | 1.24e9 parameters at 4.0 TB/s |
|----------------------------|-------|-------------------------------|
| sum of squares             | 4     | 1.2 ms                        |
| adamw, float32 state       | 30    | 9.3 ms                        |
| adamw, bfloat16 moments    | 22    | 6.8 ms                        |
| the same, bfloat16 grads   | 20    | 6.2 ms                        |

A program has 1024 elements in 256 threads, four per thread: its four 16-byte loads are in flight before the first is used, and
since four is the most that a float32 load covers, no tensor is exchanged between threads before a store. A mask that may end
anywhere would keep the compiler from wide loads, so the launch covers a multiple of 16 elements (for which Triton specializes) and a
short second one the remaining few.

The sum of squares is deterministic: every program writes the sum of its own elements, and these sums are added in a fixed order in
float64. Accuracy does not depend on the size of a tensor, since no sum in this kernel's float32 has more than 8192 terms. Tensors of
less than 2^18 elements go to torch, many in a launch; each is summed whole in float32, where torch adds many short sums and not one
long one, and their norms are combined in float64 too.

Rates are plain arguments, not specialized; 1 - beta is computed on the host, in full precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.optimizer.adam import HASH_FACTORS, AdamRates, AdamState
from petatron.kernels.optimizer.adam import sum_of_squares as plain_sum_of_squares
from petatron.kernels.triton.kernel_launch import kernel_launcher

_BLOCK = 1024
_SQUARES_BLOCK = 8192
_SMALL = 1 << 18  # below this many elements a separate launch costs more than the sum
_FIRST = tl.constexpr(HASH_FACTORS[0])
_SECOND = tl.constexpr(HASH_FACTORS[1])


@triton.jit
def _hash(bits):
    bits = bits ^ (bits >> 16)
    bits = bits * _FIRST
    bits = bits ^ (bits >> 15)
    bits = bits * _SECOND
    return bits ^ (bits >> 16)


@triton.jit
def _store_stochastic(pointer, value, random_bits, mask):
    """Adds random bits to those that bfloat16 cuts off, then truncates."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = (value.to(tl.uint32, bitcast=True) + random_bits) & 0xFFFF0000
        value = bits.to(tl.float32, bitcast=True)
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _adamw(
    tensors,
    length,
    start,
    rates,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BF16_MOMENTS: tl.constexpr,
):
    grad_N, master_N, exp_avg_N, exp_avg_sq_N, weight_N, scalars = tensors
    lr, decay, one_minus_beta1, one_minus_beta2, eps = rates
    # 64 bits: a flat buffer may have more than 2^32 elements.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < length
    grad = tl.load(grad_N + at, mask=mask, other=0.0).to(tl.float32)
    master = tl.load(master_N + at, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avg_N + at, mask=mask, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_N + at, mask=mask, other=0.0).to(tl.float32)
    # A skipped update is computed all the same and not written: no load waits for the flag.
    mask = mask & (tl.load(scalars + 1).to(tl.int32) == 0)

    grad *= tl.load(scalars)
    exp_avg += one_minus_beta1 * (grad - exp_avg)
    exp_avg_sq += one_minus_beta2 * (grad * grad - exp_avg_sq)
    change = lr * tl.load(scalars + 2) * exp_avg / (tl.sqrt(exp_avg_sq) * tl.load(scalars + 3) + eps)
    master = master - decay * master - change

    tl.store(master_N + at, master, mask=mask)
    if HAS_WEIGHT:
        tl.store(weight_N + at, master.to(weight_N.dtype.element_ty), mask=mask)
    if BF16_MOMENTS:
        seed = _hash(tl.load(scalars + 4).to(tl.int64).to(tl.uint32))
        noise = _hash((at + start).to(tl.uint32) + seed)
        _store_stochastic(exp_avg_N + at, exp_avg, noise & 0xFFFF, mask)
        _store_stochastic(exp_avg_sq_N + at, exp_avg_sq, noise >> 16, mask)
    else:
        tl.store(exp_avg_N + at, exp_avg, mask=mask)
        tl.store(exp_avg_sq_N + at, exp_avg_sq, mask=mask)


@triton.jit
def _sum_of_squares(values_N, sums_P, length, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_N + at, mask=at < length, other=0.0).to(tl.float32)
    tl.store(sums_P + program, tl.sum(values * values))


def adamw(grad: Tensor, state: AdamState, scalars: Tensor, *, rates: AdamRates, start: int = 0) -> None:
    """Updates float32 master weights in place."""
    assert state.master.dtype == torch.float32 and scalars.dtype == torch.float32
    length = grad.numel()
    aligned = length - length % 16
    for begin, end in ((0, aligned), (aligned, length)):
        if begin < end:
            _launch(grad[begin:end], state.slice_range(begin, end), scalars, rates, start + begin)


def _launch(grad: Tensor, state: AdamState, scalars: Tensor, rates: AdamRates, start: int) -> None:
    length = grad.numel()
    weight = state.master if state.weight is None else state.weight
    _adamw[(triton.cdiv(length, _BLOCK),)](
        (grad, state.master, state.exp_avg, state.exp_avg_sq, weight, scalars),
        length,
        start,
        (rates.lr, rates.lr * rates.weight_decay, 1.0 - rates.beta1, 1.0 - rates.beta2, rates.eps),
        BLOCK=_BLOCK,
        HAS_WEIGHT=state.weight is not None,
        BF16_MOMENTS=torch.bfloat16 in (state.exp_avg.dtype, state.exp_avg_sq.dtype),
        num_warps=8,
    )


def sum_of_squares(views: Sequence[Tensor]) -> Tensor:
    """Returns the sum of squares of all elements, as a float32 device scalar."""
    small = [view for view in views if view.numel() < _SMALL]
    large = [view for view in views if view.numel() >= _SMALL]
    # Tensors are cut at their last multiple of 16, for wide loads.
    small += [view[view.numel() // 16 * 16 :] for view in large if view.numel() % 16]
    total = plain_sum_of_squares(small) if small else views[0].new_zeros((), dtype=torch.float32)
    if not large:
        return total
    counts = [triton.cdiv(view.numel() // 16 * 16, _SQUARES_BLOCK) for view in large]
    # Every tensor's sums are 16-byte aligned, or the kernel would be compiled again for those that are not.
    starts = [0, *accumulate(triton.cdiv(count, 4) * 4 for count in counts)]
    sums = torch.zeros(starts[-1], dtype=torch.float32, device=views[0].device)
    for view, count, at in zip(large, counts, starts):
        launch = kernel_launcher(_sum_of_squares, BLOCK=_SQUARES_BLOCK, num_warps=8)
        launch(count, (view, sums[at:]), (view.numel() // 16 * 16,))
    return total + sums.sum(dtype=torch.float64).float()
