"""RMSNorm, forward and backward, each in one pass over the rows.

With x a row of width D, w the weight and r = 1 / sqrt(mean(x^2) + eps), the norm is n = x r w. From the gradient g of n

    gradient of x = r (w g - x r mean(w g x r)),        gradient of w = sum over rows of g x r

A row stays in registers between its sum and its result, so every byte moves once. The residual addition before the norm, and
the addition of the residual's gradient, are in the same pass.

The weight's gradient is a sum over all rows, which belong to different programs. The backward kernel therefore has a fixed
number of programs that iterate over the rows with a stride, each accumulates its sum in registers, and the few sums are added
afterwards in a fixed order: no atomic adds, the same result every time. Such a program would have one row in flight while it
waits for memory; it therefore prefetches its next row before it computes this one.

Device memory traffic in bf16, Llama-1B (R 32768, D 2048), at 4.0 TB/s:

| kernel                                                        | tensors | bytes per element | ms    |
|---------------------------------------------------------------|---------|-------------------|-------|
| rms_norm                                                      | 2       | 4                 | 0.067 |
| rms_norm with branch                                          | 4       | 8                 | 0.134 |
| rms_norm_backward                                             | 3       | 6                 | 0.103 |
| rms_norm_backward, recompute_output                           | 4       | 8                 | 0.136 |
| rms_norm_backward, recompute_output, with gradient of residual   | 5       | 10                | 0.170 |

The backward rows include the partial sums, 528 x D float32 written and read.

R rows, D width.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels import norm as reference
from petatron.kernels.norm import SubmitWeightGrad
from petatron.kernels.strides import rows_and_stride
from petatron.kernels.triton.amax import amax_bits, atomic_max_amax, magnitude_bits
from petatron.kernels.triton.kernel_launch import KernelLauncher
from petatron.kernels.triton.pdl import pdl_options, pdl_wait_and_trigger, uses_pdl
from petatron.kernels.triton.program_sums import add_up_programs

MAX_ROW_WIDTH = 16384
"""The widest row that fits in registers; wider ones use the reference."""


@triton.jit
def _rms_norm_forward(
    x_RD,
    branch_RD,
    weight_D,
    residual_RD,
    normed_RD,
    rstd_R,
    amax,
    rows,
    x_stride,
    branch_stride,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_CENTERED_GAMMA: tl.constexpr,
    ADD: tl.constexpr,
    AMAX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    long_row = row.to(tl.int64)[:, None]
    dtype: tl.constexpr = normed_RD.dtype.element_ty

    pdl_wait_and_trigger(USE_PDL)
    residual = tl.load(x_RD + long_row * x_stride + column[None, :], mask=mask, other=0.0)
    wide = residual.to(tl.float32)
    if ADD:
        branch = tl.load(branch_RD + long_row * branch_stride + column[None, :], mask=mask, other=0.0)
        residual = (wide + branch.to(tl.float32)).to(dtype)
        tl.store(residual_RD + long_row * WIDTH + column[None, :], residual, mask=mask)
        wide = residual.to(tl.float32)  # the norm is of the rounded sum

    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)
    tl.store(rstd_R + row, rstd, mask=row < rows)
    weight = _load_weight(weight_D, column, WIDTH, ROWS)
    normed = _apply_weight(wide * rstd[:, None], weight, dtype, ZERO_CENTERED_GAMMA)
    tl.store(normed_RD + long_row * WIDTH + column[None, :], normed, mask=mask)
    if AMAX:
        atomic_max_amax(amax, tl.where(mask, magnitude_bits(normed), 0))


@triton.jit
def _load_weight(weight_D, column, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Loads the weight for every row of the tile: each thread reads its own elements, and none are exchanged."""
    place = column[None, :] + tl.zeros((ROWS, 1), dtype=tl.int32)
    return tl.load(weight_D + place, mask=place < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _apply_weight(unit, weight, dtype: tl.constexpr, ZERO_CENTERED_GAMMA: tl.constexpr):
    """Rounds equally in forward and backward, so that a recomputed output has the same bits."""
    if ZERO_CENTERED_GAMMA:
        normed = unit * (1.0 + weight)
    else:
        normed = unit.to(dtype).to(tl.float32) * weight
    return normed.to(dtype)


@triton.jit
def _rms_norm_backward(
    grad_RD,
    residual_RD,
    rstd_R,
    weight_D,
    grad_residual_RD,
    grad_x_RD,
    normed_RD,
    sums_PD,
    amax,
    rows,
    grad_stride,
    residual_stride,
    grad_residual_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_CENTERED_GAMMA: tl.constexpr,
    ADD: tl.constexpr,
    RECOMPUTE_OUTPUT: tl.constexpr,
    AMAX: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    column = tl.arange(0, BLOCK)
    dtype: tl.constexpr = grad_x_RD.dtype.element_ty
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if AMAX:  # of every column's elements, so that rows need not be reduced
        peaks = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    row = program * ROWS + tl.arange(0, ROWS)
    grad, residual, rstd = _load_rows(
        grad_RD, residual_RD, rstd_R, row, rows, grad_stride, residual_stride, column, WIDTH
    )
    first = program * ROWS
    while first < rows:
        this, this_rstd = row.to(tl.int64)[:, None], rstd[:, None]
        mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = this * WIDTH + column[None, :]
        joining_at = grad_residual_RD + this * grad_residual_stride + column[None, :]
        row += step
        first += step
        if PREFETCH:
            if ADD:
                joining = tl.load(joining_at, mask=mask, other=0.0)
            after, residual_after, rstd_after = _load_rows(
                grad_RD, residual_RD, rstd_R, row, rows, grad_stride, residual_stride, column, WIDTH
            )
        # From the nearest cache; held across iterations it would cost the registers that the next row needs.
        weight = _load_weight(weight_D, column, WIDTH, ROWS)
        wide, unit = grad.to(tl.float32), residual.to(tl.float32) * this_rstd
        sums += wide * unit
        if RECOMPUTE_OUTPUT:
            tl.store(normed_RD + at, _apply_weight(unit, weight, dtype, ZERO_CENTERED_GAMMA), mask=mask)
        weighted = wide * (1.0 + weight) if ZERO_CENTERED_GAMMA else wide * weight
        along = tl.sum(weighted * unit, axis=1) / WIDTH
        grad_x = (weighted - unit * along[:, None]) * this_rstd
        if ADD:
            if not PREFETCH:
                joining = tl.load(joining_at, mask=mask, other=0.0)
            grad_x += joining.to(tl.float32)
        tl.store(grad_x_RD + at, grad_x.to(dtype), mask=mask)
        if AMAX:
            peaks = tl.maximum(peaks, magnitude_bits(grad_x.to(dtype)))
        if PREFETCH:
            grad, residual, rstd = after, residual_after, rstd_after
        else:
            grad, residual, rstd = _load_rows(
                grad_RD, residual_RD, rstd_R, row, rows, grad_stride, residual_stride, column, WIDTH
            )
    tl.store(sums_PD + program.to(tl.int64) * WIDTH + column, tl.sum(sums, axis=0), mask=column < WIDTH)
    if AMAX:
        atomic_max_amax(amax, peaks)


@triton.jit
def _load_rows(grad_RD, residual_RD, rstd_R, row, rows, grad_stride, residual_stride, column, WIDTH: tl.constexpr):
    there, this = row < rows, row.to(tl.int64)[:, None]
    mask = there[:, None] & (column < WIDTH)[None, :]
    grad = tl.load(grad_RD + this * grad_stride + column[None, :], mask=mask, other=0.0)
    residual = tl.load(residual_RD + this * residual_stride + column[None, :], mask=mask, other=0.0)
    return grad, residual, tl.load(rstd_R + row, mask=there, other=0.0)


class _NormTile(NamedTuple):
    """A program's tile: several narrow rows, or a wide one; 16 elements per thread if that is enough."""

    rows: int
    block: int
    warps: int

    @property
    def prefetches(self) -> bool:
        """Whether there are registers for the next row."""
        return self.rows * self.block <= 512 * self.warps


@cache
def _norm_tile(width: int) -> _NormTile:
    block = triton.next_power_of_2(width)
    elements = max(block, 2048)
    return _NormTile(rows=elements // block, block=block, warps=min(elements // 512, 16))


def _norm_constants(width: int, zero_centered_gamma: bool, add: bool, with_amax: bool) -> dict[str, Any]:
    tile = _norm_tile(width)
    sizes = {"WIDTH": width, "ROWS": tile.rows, "BLOCK": tile.block, "num_warps": tile.warps}
    return {**sizes, "ZERO_CENTERED_GAMMA": zero_centered_gamma, "ADD": add, "AMAX": with_amax}


@cache
def _forward_launcher(width: int, zero_centered_gamma: bool, add: bool, with_amax: bool, pdl: bool) -> KernelLauncher:
    constants = _norm_constants(width, zero_centered_gamma, add, with_amax)
    return KernelLauncher(_rms_norm_forward, **constants, **pdl_options(pdl))


@cache
def _backward_launcher(
    width: int, zero_centered_gamma: bool, add: bool, recompute_output: bool, with_amax: bool
) -> KernelLauncher:
    constants = _norm_constants(width, zero_centered_gamma, add, with_amax)
    prefetches = _norm_tile(width).prefetches
    return KernelLauncher(_rms_norm_backward, RECOMPUTE_OUTPUT=recompute_output, PREFETCH=prefetches, **constants)


def rms_norm(
    x_RD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    zero_centered_gamma: bool,
    branch: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference, which rows wider than `MAX_ROW_WIDTH` use."""
    rows, width = x_RD.shape
    if width > MAX_ROW_WIDTH:
        return reference.rms_norm(
            x_RD, weight_D, eps=eps, zero_centered_gamma=zero_centered_gamma, branch=branch, amax=amax
        )
    add = branch is not None
    x, x_stride = rows_and_stride(x_RD)
    added, added_stride = rows_and_stride(branch) if add else (x, x_stride)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    residual = torch.empty_like(normed) if add else normed
    rstd = x.new_empty(rows, dtype=torch.float32)
    launch = _forward_launcher(width, zero_centered_gamma, add, amax is not None, uses_pdl(rows, x))
    launch(
        -(-rows // _norm_tile(width).rows),
        (x, added, weight_D.contiguous(), residual, normed, rstd, amax_bits(amax, rstd)),
        (rows, x_stride, added_stride, eps),
    )
    return (residual if add else x_RD), normed, rstd


def rms_norm_backward(
    grad_RD: Tensor,
    residual_RD: Tensor,
    rstd_R: Tensor,
    weight_D: Tensor,
    *,
    zero_centered_gamma: bool,
    grad_residual: Tensor | None = None,
    recompute_output: bool = True,
    submit_weight_grad: SubmitWeightGrad | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See the reference; the last sum of the weight's gradient, over programs, goes to the buffer that `submit_weight_grad` has."""
    rows, width = residual_RD.shape
    if width > MAX_ROW_WIDTH:
        return reference.rms_norm_backward(
            grad_RD,
            residual_RD,
            rstd_R,
            weight_D,
            zero_centered_gamma=zero_centered_gamma,
            grad_residual=grad_residual,
            recompute_output=recompute_output,
            submit_weight_grad=submit_weight_grad,
            amax=amax,
        )
    add = grad_residual is not None
    (grad, grad_stride), (residual, residual_stride) = rows_and_stride(grad_RD), rows_and_stride(residual_RD)
    joining, joining_stride = rows_and_stride(grad_residual) if add else (grad, grad_stride)
    grad_x = torch.empty_like(residual, memory_format=torch.contiguous_format)
    normed = torch.empty_like(grad_x) if recompute_output else grad_x
    programs = min(-(-rows // _norm_tile(width).rows), _resident_programs(residual.device, width))
    sums_PD = residual.new_empty((programs, width), dtype=torch.float32)
    launch = _backward_launcher(width, zero_centered_gamma, add, recompute_output, amax is not None)
    launch(
        programs,
        (grad, residual, rstd_R, weight_D.contiguous(), joining, grad_x, normed, sums_PD, amax_bits(amax, sums_PD)),
        (rows, grad_stride, residual_stride, joining_stride),
    )
    weight_grad = None
    if submit_weight_grad is None:
        weight_grad = sums_PD.new_empty(width)
        add_up_programs(sums_PD, weight_grad, False)
    else:
        submit_weight_grad(partial(add_up_programs, sums_PD))
    return grad_x, weight_grad, normed if recompute_output else None


@cache
def _resident_programs(device: torch.device, width: int) -> int:
    """Returns the programs that are resident at once: 16 warps per multiprocessor, with up to 128 registers per thread."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return processors * max(16 // _norm_tile(width).warps, 1)
