"""Activations of rows with bits that depend on the element alone: see `kernels/activation.py`, whose derivatives these have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.activation import (
    GATE_ACTIVATIONS,
    QUICK_GELU_SCALE,
    GluVariant,
    activation_backward,
    apply_variant,
    gated_activation_backward,
)
from petatron.kernels.batch_invariant.row_functions import gelu, gelu_tanh, sigmoid, silu
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.fp8.cast_and_gemm import update_amax

__all__ = ["activation", "activation_backward", "gated_activation", "gated_activation_backward"]

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * sigmoid(QUICK_GELU_SCALE * x),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) * F.relu(x),
    "silu": silu,
}


def activation(x_RF: Tensor, name: str) -> Tensor:
    return _ACTIVATIONS[name](to_compute_dtype(x_RF)).to(x_RF.dtype)


def gated_activation(
    gate_up_RG: Tensor, name: str, variant: GluVariant | None = None, *, amax: Tensor | None = None
) -> Tensor:
    """Returns act(gate) x up; `amax` [1] float32 is updated with it."""
    gate, up = map(to_compute_dtype, gate_up_RG.chunk(2, dim=-1))
    gate, up = (gate, up) if variant is None else apply_variant(gate, up, variant)
    output = (_ACTIVATIONS[GATE_ACTIVATIONS[name]](gate) * up).to(gate_up_RG.dtype)
    if amax is not None:
        update_amax(output, amax)
    return output
