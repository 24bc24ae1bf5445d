"""The row kernels of experts with a weighted activation whose bits depend on the row alone: see `kernels/moe/permute.py`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from petatron.kernels.activation import GATE_ACTIVATIONS, GluVariant
from petatron.kernels.batch_invariant.activation import activation, gated_activation
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.moe import permute


def weighted_activation(inner_RG: Tensor, weight_R: Tensor, name: str, variant: GluVariant | None = None) -> Tensor:
    """The activation, plain or gated, times the weight of each row, rounded once, [R, F]."""
    inner = to_compute_dtype(inner_RG)
    active = gated_activation(inner, name, variant) if name in GATE_ACTIVATIONS else activation(inner, name)
    return (active * weight_R[:, None]).to(inner_RG.dtype)


REFERENCE = replace(permute.REFERENCE, weighted_activation=weighted_activation)
