"""The output gate of a Mamba-2 layer: gates the output y of its scan with z, in one of three orders.

    gate_then_norm     norm(y silu(z))       Mamba-2, Megatron, Nemotron-H, Bamba
    norm_then_gate     norm(y) silu(z)       Falcon-H1, where it says so
    none               y silu(z)             Falcon-H1 as published: gated, without a norm

The norm is over groups of channels, of which a rank may have a part: `sum_over_ranks` then adds what each has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from petatron.kernels.ssm import output_gate as reference
from petatron.layers.parallel_slots import CommSlot, identity
from petatron.layers.ssm.autograd_ops import GateThenNormKernels, NormGroups, SiluGateKernels, gate_then_norm, silu_gate

OutputGate = Literal["gate_then_norm", "norm_then_gate", "none"]


def build_output_gate(order: OutputGate, width: int, *, num_groups: int, eps: float) -> nn.Module:
    """Builds the module that takes y and z."""
    if order == "none":
        return SiluGate()
    return GatedRMSNorm(width, num_groups=num_groups, eps=eps, gate_first=order == "gate_then_norm")


class SiluGate(nn.Module):
    """y silu(z)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_kernels: SiluGateKernels = reference

    def kernel_slots(self) -> Mapping[str, str]:
        return {"gate_kernels": "silu gate"}

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return silu_gate(y, z, kernels=self.gate_kernels)


class GroupedRMSNorm(nn.Module):
    """The weight of a norm over groups of channels, of which a rank may have a part, and the norm of y silu(z) or of y."""

    def __init__(self, width: int, *, num_groups: int, eps: float) -> None:
        super().__init__()
        self.group_width, self.eps = width // num_groups, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.sum_over_ranks: CommSlot = identity
        self.group_sum_slots = {"sum_over_ranks": num_groups}
        self.kernels: GateThenNormKernels = reference

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "gate, then norm"}

    def normalize(self, y: Tensor, z: Tensor | None) -> Tensor:
        """Returns the norm of y silu(z), or of y without z."""
        groups_here = max(self.weight.shape[0] // self.group_width, 1)
        groups = NormGroups(self.group_width, groups_here, self.eps, self.sum_over_ranks)
        return gate_then_norm(y, z, self.weight, groups, kernels=self.kernels)


class GatedRMSNorm(GroupedRMSNorm):
    """norm(y silu(z)), in one kernel, if `gate_first`; else norm(y) silu(z), in two."""

    def __init__(self, width: int, *, num_groups: int, eps: float, gate_first: bool) -> None:
        super().__init__(width, num_groups=num_groups, eps=eps)
        self.gate_first = gate_first
        self.gate_kernels: SiluGateKernels = reference

    def kernel_slots(self) -> Mapping[str, str]:
        return super().kernel_slots() if self.gate_first else {**super().kernel_slots(), "gate_kernels": "silu gate"}

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        if self.gate_first:
            return self.normalize(y, z)
        return silu_gate(self.normalize(y, None), z, kernels=self.gate_kernels)
