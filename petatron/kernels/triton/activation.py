"""Gated activations, forward and backward, each in one pass.

With gate a, up b and activation f the output is y = f(a) b, and from its gradient g

    gradient of a = g b f'(a),        gradient of b = g f(a)

f and f' come from one evaluation. With s the logistic function and n, N the normal density and distribution:

    swiglu      f = a s(a)            f' = s(a) (1 + a (1 - s(a)))
    geglu       f = a N(a)            f' = N(a) + a n(a)
    geglu_tanh  f = a s(z(a))         f' = s(z) (1 + a z'(a) (1 - s(z))),    z = 2 sqrt(2 / pi) (a + 0.044715 a^3)
    reglu       f = max(a, 0)         f' = 1 where a > 0

(geglu_tanh usually appears as a (1 + tanh(z / 2)) / 2, which is the same.) Backward writes y too on request: it has read everything
needed, so y need not be saved in forward.

Device memory traffic in bf16, Llama-1B (R 32768, F 8192), at 4.0 TB/s:

| kernel                                      | tensors of [R, F] | bytes per element | ms    |
|---------------------------------------------|-------------------|-------------------|-------|
| gated_activation                            | 3                 | 6                 | 0.403 |
| gated_activation_backward                   | 5                 | 10                | 0.671 |
| gated_activation_backward, recompute_output | 6                 | 12                | 0.805 |

R rows, F width of the output.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels import activation as reference
from petatron.kernels.activation import GluVariant
from petatron.kernels.strides import rows_and_stride
from petatron.kernels.triton.amax import amax_bits, atomic_max_amax, magnitude_bits
from petatron.kernels.triton.kernel_launch import KernelLauncher
from petatron.kernels.triton.pdl import pdl_options, pdl_wait_and_trigger, uses_pdl

NAMES = ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu")
_TILE = 2048
_WARPS = 4  # 16 elements per thread: of bf16 two loads of 16 bytes from every tensor


@triton.jit
def activation_and_slope(gate, NAME: tl.constexpr):
    """f and f' of the gate."""
    if NAME == "swiglu":
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    elif NAME == "geglu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif NAME == "geglu_tanh":
        square = gate * gate
        share = tl.sigmoid(gate * (1.5957691216057308 + 0.07135481627260025 * square))
        slope = share * (1.0 + gate * (1.5957691216057308 + 0.21406444881780073 * square) * (1.0 - share))
    elif NAME == "quick_geglu":
        share = tl.sigmoid(1.702 * gate)
        slope = share * (1.0 + 1.702 * gate * (1.0 - share))
    else:
        share = tl.where(gate > 0.0, 1.0, 0.0)
        slope = share
    return gate * share, slope


@triton.jit
def _tile_offsets(rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns rows (as 64-bit numbers), columns and mask of this program's tile."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = (program // across) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    return row.to(tl.int64)[:, None], column[None, :], (row < rows)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _gated_activation_forward(
    gate_up_RG,
    act_RF,
    amax,
    rows,
    stride,
    NAME: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AMAX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row, column, mask = _tile_offsets(rows, WIDTH, ROWS, COLUMNS)
    at = gate_up_RG + row * stride + column
    pdl_wait_and_trigger(USE_PDL)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    value, _ = activation_and_slope(gate, NAME)
    act = (value * up).to(act_RF.dtype.element_ty)
    tl.store(act_RF + row * WIDTH + column, act, mask=mask)
    if AMAX:
        atomic_max_amax(amax, magnitude_bits(act))


@triton.jit
def _gated_activation_backward(
    grad_RF,
    gate_up_RG,
    grad_gate_up_RG,
    act_RF,
    amax,
    rows,
    grad_stride,
    stride,
    NAME: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RECOMPUTE_OUTPUT: tl.constexpr,
    AMAX: tl.constexpr,
):
    row, column, mask = _tile_offsets(rows, WIDTH, ROWS, COLUMNS)
    at = gate_up_RG + row * stride + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_RF + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = grad_gate_up_RG.dtype.element_ty
    value, slope = activation_and_slope(gate, NAME)
    into = grad_gate_up_RG + row * (2 * WIDTH) + column
    grad_gate, grad_up = (grad * up * slope).to(dtype), (grad * value).to(dtype)
    tl.store(into, grad_gate, mask=mask)
    tl.store(into + WIDTH, grad_up, mask=mask)
    if RECOMPUTE_OUTPUT:
        tl.store(act_RF + row * WIDTH + column, (value * up).to(dtype), mask=mask)
    if AMAX:
        atomic_max_amax(amax, tl.maximum(magnitude_bits(grad_gate), magnitude_bits(grad_up)))


class _ActivationTile(NamedTuple):
    """A tile: columns that divide the width, if a warp still reads 512 contiguous bytes, and rows to fill it; `across` cover a row."""

    rows: int
    columns: int
    across: int

    def programs(self, rows: int) -> int:
        return -(-rows // self.rows) * self.across


@cache
def _activation_tile(width: int) -> _ActivationTile:
    dividing = width & -width
    columns = min(dividing if dividing >= 256 else triton.next_power_of_2(width), _TILE)
    return _ActivationTile(rows=_TILE // columns, columns=columns, across=triton.cdiv(width, columns))


@cache
def _forward_launcher(name: str, width: int, with_amax: bool, pdl: bool) -> KernelLauncher:
    constants = _activation_constants(name, width) | {"AMAX": with_amax}
    return KernelLauncher(_gated_activation_forward, **constants, num_warps=_WARPS, **pdl_options(pdl))


@cache
def _backward_launcher(name: str, width: int, recompute_output: bool, with_amax: bool) -> KernelLauncher:
    constants = _activation_constants(name, width) | {"RECOMPUTE_OUTPUT": recompute_output, "AMAX": with_amax}
    return KernelLauncher(_gated_activation_backward, **constants, num_warps=_WARPS)


def _activation_constants(name: str, width: int) -> dict[str, Any]:
    assert name in NAMES, name
    tile = _activation_tile(width)
    return {"NAME": name, "WIDTH": width, "ROWS": tile.rows, "COLUMNS": tile.columns}


def gated_activation(
    gate_up_RG: Tensor, name: str, variant: GluVariant | None = None, *, amax: Tensor | None = None
) -> Tensor:
    """See the reference, which a variant uses."""
    if variant is not None:
        return reference.gated_activation(gate_up_RG, name, variant, amax=amax)
    rows, width = gate_up_RG.shape[0], gate_up_RG.shape[1] // 2
    source, stride = rows_and_stride(gate_up_RG)
    act = source.new_empty((rows, width))
    launch = _forward_launcher(name, width, amax is not None, uses_pdl(rows, source))
    launch(_activation_tile(width).programs(rows), (source, act, amax_bits(amax, act)), (rows, stride))
    return act


def gated_activation_backward(
    grad_RF: Tensor,
    gate_up_RG: Tensor,
    name: str,
    variant: GluVariant | None = None,
    *,
    recompute_output: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradient of gate and up concatenated, to whose amax `amax` is raised, and the output if `recompute_output`."""
    if variant is not None:
        return reference.gated_activation_backward(
            grad_RF, gate_up_RG, name, variant, recompute_output=recompute_output, amax=amax
        )
    rows, width = grad_RF.shape
    (grad, grad_stride), (source, stride) = rows_and_stride(grad_RF), rows_and_stride(gate_up_RG)
    grad_gate_up = torch.empty_like(source, memory_format=torch.contiguous_format)
    act = source.new_empty((rows, width)) if recompute_output else grad_gate_up
    launch = _backward_launcher(name, width, recompute_output, amax is not None)
    launch(
        _activation_tile(width).programs(rows),
        (grad, source, grad_gate_up, act, amax_bits(amax, act)),
        (rows, grad_stride, stride),
    )
    return grad_gate_up, act if recompute_output else None
