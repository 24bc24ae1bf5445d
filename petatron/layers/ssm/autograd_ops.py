"""The operations of recurrent layers under autograd: each saves its inputs (one norm also 1 / rms), and backward recomputes the rest.

S sequence, B batch, C channels, H (value) heads, P (value) head dim, G groups or key heads, N state or key head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from petatron.base.autograd_op import AutogradOp, SavedInputsOp, first_derivative
from petatron.kernels.ssm.output_gate import NormGate
from petatron.layers.parallel_slots import CommSlot
from petatron.layers.token_rows import from_rows


class ConvKernels(Protocol):
    """See `kernels/ssm/causal_conv.py`."""

    causal_conv: Callable[..., Tensor]
    causal_conv_backward: Callable[..., tuple[Tensor | None, ...]]


class ConvStepKernels(Protocol):
    """See `kernels/ssm/decode/conv_step.py`."""

    conv_step: Callable[..., Tensor]


class GateThenNormKernels(Protocol):
    """See `kernels/ssm/output_gate.py`; so are the two below."""

    gated_square_sums: Callable[..., Tensor]
    gate_then_norm: Callable[..., Tensor]
    gate_then_norm_backward_sums: Callable[..., tuple[Tensor, Tensor]]
    gate_then_norm_backward: Callable[..., tuple[Tensor, Tensor | None]]


class SiluGateKernels(Protocol):
    silu_gate: Callable[..., Tensor]
    silu_gate_backward: Callable[..., tuple[Tensor, Tensor]]


class NormThenGateKernels(Protocol):
    norm_then_gate: Callable[..., Tensor]
    norm_then_gate_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


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


class DeltaInputs(NamedTuple):
    """What the gated delta rule takes of every token and head, besides the state before [B, H, N, P].

    g: the log decay [S, B, H] of a head, or [S, B, H, N] of each of its key channels.
    """

    operation = "chunk_delta_rule"
    values = 2

    q_SBGN: Tensor
    k_SBGN: Tensor
    v_SBHP: Tensor
    g: Tensor
    beta_SBH: Tensor


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
    inputs = (x_SBC, weight_CW, bias_C, window, starts_SB)
    return SavedInputsOp.apply(kernels.causal_conv, kernels.causal_conv_backward, *inputs)  # pyright: ignore[reportReturnType]


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
    rows: Tensor = SavedInputsOp.apply(kernels.silu_gate, kernels.silu_gate_backward, y_rows, z_rows)  # pyright: ignore[reportAssignmentType]
    return from_rows(rows, y, batch_first=batch_first)


def norm_then_gate(
    y: Tensor, z: Tensor, weight_P: Tensor, *, eps: float, kernels: NormThenGateKernels, gate: NormGate = "silu"
) -> Tensor:
    """Returns y / rms * weight * silu(z), or sigmoid(z), over the last dimension."""
    forward, backward = (
        partial(k, eps=eps, gate=gate) for k in (kernels.norm_then_gate, kernels.norm_then_gate_backward)
    )
    return SavedInputsOp.apply(forward, backward, y, z, weight_P)  # pyright: ignore[reportReturnType]
