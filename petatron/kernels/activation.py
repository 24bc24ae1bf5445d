"""The activation between the two GEMMs of an MLP, plain or gated: the reference, which also runs on the CPU.

A gated MLP's first GEMM computes gate and up concatenated, [R, 2F], and the activation is act(gate) x up. The backward functions
recompute the activation's output on request: they have read its inputs, and the next GEMM need not save it. All in at least
float32, rounded once.

With `GluVariant` it is act(min(m gate, c)) x (clamp(up, -c, c) + offset) (gpt-oss; m is Falcon-H1's); no gradient passes a number
that was clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.fp8.cast_and_gemm import update_amax

QUICK_GELU_SCALE = 1.702

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * (QUICK_GELU_SCALE * x).sigmoid(),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
"""The activations of a plain MLP, by name."""

_ACTIVATION_GRADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
    "quick_gelu": lambda grad, x: (
        grad * (QUICK_GELU_SCALE * x).sigmoid() * (1 + QUICK_GELU_SCALE * x * (1 - (QUICK_GELU_SCALE * x).sigmoid()))
    ),
    "relu": lambda grad, x: grad * (x > 0),
    "squared_relu": lambda grad, x: grad * 2 * F.relu(x),
    "silu": torch.ops.aten.silu_backward,
}

GATE_ACTIVATIONS: dict[str, str] = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
    "reglu": "relu",
}
"""The activation of the gate, by name of a gated activation."""


@dataclass(frozen=True, slots=True)
class GluVariant:
    """How a gated activation departs from act(gate) x up.

    clamp: the bound of the gate from above, and of up on both sides; None: they have none.
    offset: added to up after that.
    gate_multiplier: the factor on the gate before all else.
    """

    clamp: float | None = None
    offset: float = 0.0
    gate_multiplier: float = 1.0


def activation(x_RF: Tensor, name: str) -> Tensor:
    return ACTIVATIONS[name](to_compute_dtype(x_RF)).to(x_RF.dtype)


def activation_backward(
    grad_RF: Tensor, x_RF: Tensor, name: str, *, recompute_output: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradient of x, and the activation's output if `recompute_output`."""
    x = to_compute_dtype(x_RF)
    output = ACTIVATIONS[name](x).to(x_RF.dtype) if recompute_output else None
    return _ACTIVATION_GRADS[name](grad_RF.to(x.dtype), x).to(x_RF.dtype), output


def gated_activation(
    gate_up_RG: Tensor, name: str, variant: GluVariant | None = None, *, amax: Tensor | None = None
) -> Tensor:
    """Returns act(gate) x up; `amax` [1] float32 is updated with it."""
    gate, up = map(to_compute_dtype, gate_up_RG.chunk(2, dim=-1))
    gate, up = (gate, up) if variant is None else apply_variant(gate, up, variant)
    output = ACTIVATIONS[GATE_ACTIVATIONS[name]](gate) * up
    output = output if output.dtype == gate_up_RG.dtype else output.to(gate_up_RG.dtype)
    if amax is not None:
        update_amax(output, amax)
    return output


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
    gate_in, up_in = (to_compute_dtype(part) for part in gate_up_RG.chunk(2, dim=-1))
    gate, up = (gate_in, up_in) if variant is None else apply_variant(gate_in, up_in, variant)
    grad, active = grad_RF.to(gate.dtype), ACTIVATIONS[GATE_ACTIVATIONS[name]](gate)
    output = (active * up).to(gate_up_RG.dtype) if recompute_output else None
    grad_gate, grad_up = _ACTIVATION_GRADS[GATE_ACTIVATIONS[name]](grad * up, gate), grad * active
    if variant is not None and variant.clamp is not None:
        grad_gate = grad_gate * (gate_in * variant.gate_multiplier <= variant.clamp)
        grad_up = grad_up * (up_in.abs() <= variant.clamp)
    if variant is not None:
        grad_gate = grad_gate * variant.gate_multiplier
    x_grad = torch.cat((grad_gate, grad_up), dim=-1).to(gate_up_RG.dtype)
    if amax is not None:
        update_amax(x_grad, amax)
    return x_grad, output


def apply_variant(gate: Tensor, up: Tensor, variant: GluVariant) -> tuple[Tensor, Tensor]:
    gate = gate * variant.gate_multiplier
    if variant.clamp is not None:
        gate, up = gate.clamp(max=variant.clamp), up.clamp(-variant.clamp, variant.clamp)
    return gate, up + variant.offset
