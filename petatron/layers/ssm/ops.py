"""The operations of a Mamba-2 layer under autograd: each saves its inputs (the norm also 1 / rms), and backward recomputes the rest.

S sequence, B batch, C channels, H heads, P head dim, G groups, N state dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.layers.comm_slot import CommSlot
from petatron.layers.token_layout import from_rows


class ConvKernels(Protocol):
    """See `kernels/ssm/causal_conv.py`."""

    causal_conv: Callable[..., Tensor]
    causal_conv_backward: Callable[..., tuple[Tensor | None, ...]]


class ConvStepKernels(Protocol):
    """See `kernels/ssm/decode/conv_step.py`."""

    conv_step: Callable[..., Tensor]


class GateThenNormKernels(Protocol):
    """See `kernels/ssm/gate_then_norm.py`."""

    gated_square_sums: Callable[..., Tensor]
    gate_then_norm: Callable[..., Tensor]
    gate_then_norm_backward_sums: Callable[..., tuple[Tensor, Tensor]]
    gate_then_norm_backward: Callable[..., tuple[Tensor, Tensor | None]]


class SiluGateKernels(Protocol):
    """See `kernels/ssm/silu_gate.py`."""

    silu_gate: Callable[..., Tensor]
    silu_gate_backward: Callable[..., tuple[Tensor, Tensor]]


class ScanInputs(NamedTuple):
    """What the selective scan takes of every token and head, besides the state before [B, H, P, N]."""

    operation = "chunk_scan"
    values = 0

    x_SBHP: Tensor
    dt_SBH: Tensor
    A_H: Tensor
    B_SBGN: Tensor
    C_SBGN: Tensor
    D_H: Tensor


def causal_conv(
    x_SBC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    kernels: ConvKernels,
    starts_SB: Tensor | None = None,
    window: Tensor | None = None,
) -> Tensor:
    """Returns silu(convolution) [S, B, C]."""
    return _CausalConv.apply(kernels, starts_SB, x_SBC, weight_CW, bias_C, window)  # pyright: ignore[reportReturnType]


class _CausalConv(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: ConvKernels,
        starts: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Tensor | None,
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(starts, x, weight, bias, window)
        return kernels.causal_conv(x, weight, bias, starts_SB=starts, window=window)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        starts, x, weight, bias, window = ctx.saved_tensors
        grad_x, grad_weight, grad_bias, grad_window = ctx.kernels.causal_conv_backward(
            grads[0], x, weight, bias, starts_SB=starts, window=window
        )
        grad_bias = None if bias is None else grad_bias.to(bias.dtype)
        return None, None, grad_x, grad_weight.to(weight.dtype), grad_bias, grad_window


class NormGroups(NamedTuple):
    """A norm over groups of channels.

    group_width: the channels of a group, on all ranks. num_groups: those that this rank has channels of.
    sum_over_ranks: adds, in place, the sums of a group's parts; the identity where a rank has whole groups.
    """

    group_width: int
    num_groups: int
    eps: float
    sum_over_ranks: CommSlot


def gate_then_norm(
    y: Tensor, z: Tensor | None, weight_D: Tensor, norm: NormGroups, *, kernels: GateThenNormKernels
) -> Tensor:
    """Returns y silu(z) / rms * weight over the last dimension; y / rms * weight without z."""
    batch_first = _is_batch_first(y if z is None else z)
    y_rows, z_rows = _rows(y, batch_first=batch_first), None if z is None else _rows(z, batch_first=batch_first)
    rows: Tensor = _GateThenNorm.apply(kernels, norm, y_rows, z_rows, weight_D)  # pyright: ignore[reportAssignmentType]
    return from_rows(rows, y, batch_first=batch_first)


def _is_batch_first(z: Tensor) -> bool:
    """Whether memory has the batch before the sequence; z has some columns of a larger tensor, whose rows are in either order."""
    return z.dim() > 2 and z.stride(0) < z.stride(1)


def _rows(x: Tensor, *, batch_first: bool) -> Tensor:
    return (x.transpose(0, 1) if batch_first else x).flatten(0, -2)


class _GateThenNorm(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any, kernels: GateThenNormKernels, norm: NormGroups, y: Tensor, z: Tensor | None, weight: Tensor
    ) -> Tensor:
        squares = norm.sum_over_ranks(kernels.gated_square_sums(y, z, num_groups=norm.num_groups))
        rstd = (squares / norm.group_width + norm.eps).rsqrt()
        ctx.kernels, ctx.norm = kernels, norm
        ctx.save_for_backward(y, z, rstd, weight)
        return kernels.gate_then_norm(y, z, rstd, weight)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, z, rstd, weight = ctx.saved_tensors
        norm: NormGroups = ctx.norm
        sums, grad_weight = ctx.kernels.gate_then_norm_backward_sums(grads[0], y, z, rstd, weight)
        means = norm.sum_over_ranks(sums) / norm.group_width
        grad_y, grad_z = ctx.kernels.gate_then_norm_backward(grads[0], y, z, rstd, weight, means)
        return None, None, grad_y, grad_z, grad_weight.to(weight.dtype)


def silu_gate(y: Tensor, z: Tensor, *, kernels: SiluGateKernels) -> Tensor:
    """Returns y silu(z)."""
    batch_first = _is_batch_first(z)
    y_rows, z_rows = (_rows(x, batch_first=batch_first) for x in (y, z))
    rows: Tensor = _SiluGate.apply(kernels, y_rows, z_rows)  # pyright: ignore[reportAssignmentType]
    return from_rows(rows, y, batch_first=batch_first)


class _SiluGate(AutogradOp):
    @staticmethod
    def forward(ctx: Any, kernels: SiluGateKernels, y: Tensor, z: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(y, z)
        return kernels.silu_gate(y, z)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.kernels.silu_gate_backward(grads[0], *ctx.saved_tensors)
