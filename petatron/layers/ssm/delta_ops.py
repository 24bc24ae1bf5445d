"""The operations of a gated delta net under autograd: each saves its inputs and lets a kernel's backward recompute the rest.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.ssm.norm_then_gate import NormGate


class NormThenGateKernels(Protocol):
    """See `kernels/ssm/norm_then_gate.py`."""

    norm_then_gate: Callable[..., Tensor]
    norm_then_gate_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


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


def norm_then_gate(
    y: Tensor, z: Tensor, weight_P: Tensor, *, eps: float, kernels: NormThenGateKernels, gate: NormGate = "silu"
) -> Tensor:
    """Returns y / rms * weight * silu(z), or sigmoid(z), over the last dimension."""
    return _NormThenGate.apply(kernels, eps, gate, y, z, weight_P)  # pyright: ignore[reportReturnType]


class _NormThenGate(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any, kernels: NormThenGateKernels, eps: float, gate: NormGate, y: Tensor, z: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.kernels, ctx.options = kernels, {"eps": eps, "gate": gate}
        ctx.save_for_backward(y, z, weight)
        return kernels.norm_then_gate(y, z, weight, **ctx.options)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, z, weight = ctx.saved_tensors
        grad_y, grad_z, grad_weight = ctx.kernels.norm_then_gate_backward(grads[0], y, z, weight, **ctx.options)
        return None, None, None, grad_y, grad_z, grad_weight.to(weight.dtype)
