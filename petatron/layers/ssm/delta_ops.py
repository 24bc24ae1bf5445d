"""The operations of a gated delta net under autograd: each saves its inputs and lets a kernel's backward recompute the rest.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.ssm.norm_then_gate import NormGate
from petatron.layers.ssm.chunked_recurrence import chunked_recurrence


class DeltaKernels(Protocol):
    """See `kernels/ssm/chunk_delta_rule.py`."""

    chunk_delta_rule: Callable[..., tuple[Tensor, Tensor]]
    chunk_delta_rule_backward: Callable[..., tuple[Tensor | None, ...]]


class DeltaStepKernels(Protocol):
    """See `kernels/ssm/decode/delta_step.py`."""

    delta_step: Callable[..., Tensor]


class NormThenGateKernels(Protocol):
    """See `kernels/ssm/norm_then_gate.py`."""

    norm_then_gate: Callable[..., Tensor]
    norm_then_gate_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class DeltaInputs(NamedTuple):
    """What the gated delta rule takes of every token and head, besides the state before.

    g: the log decay [S, B, H] of a head, or [S, B, H, N] of each of its key channels.
    """

    q_SBGN: Tensor
    k_SBGN: Tensor
    v_SBHP: Tensor
    g: Tensor
    beta_SBH: Tensor


def delta_rule(
    inputs: DeltaInputs,
    *,
    kernels: DeltaKernels,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [S, B, H, P] and the final state [B, H, N, P]."""
    return chunked_recurrence(
        inputs,
        forward=kernels.chunk_delta_rule,
        backward=kernels.chunk_delta_rule_backward,
        values=DeltaInputs._fields.index("v_SBHP"),
        chunk_size=chunk_size,
        starts_SB=starts_SB,
        initial_state=initial_state,
    )


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
