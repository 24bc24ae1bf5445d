"""Which rules update the master weights, and with which kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petatron.config.schema.training import OptimizerConfig
from petatron.kernels.optimizer.adam import AdamKernel, SquaresKernel, adamw_fused, sum_of_squares
from petatron.kernels.registry import KernelChoice
from petatron.optim.muon import MuonRule
from petatron.optim.update_rules import AdamRule, SgdRule, UpdateRule


@dataclass(frozen=True, slots=True)
class OptimizerKernels:
    """The implementations that an optimizer works with."""

    adamw: AdamKernel = adamw_fused
    sum_of_squares: SquaresKernel = sum_of_squares

    @classmethod
    def from_choice(cls, choice: KernelChoice) -> OptimizerKernels:
        """Those of the registry's choice for `adamw`."""
        return cls(choice.functions.adamw, choice.functions.sum_of_squares)


TORCH_KERNELS = OptimizerKernels()
"""torch's own: for every device and precision."""


def build_update_rule(
    name: str, config: OptimizerConfig, kernels: OptimizerKernels, device: torch.device
) -> UpdateRule | MuonRule:
    """Builds the update rule of this name. All skip an update on the device, so no step synchronises with the host."""
    if name == "muon":
        return MuonRule(config)
    return AdamRule(config, kernels.adamw, device) if name == "adam" else SgdRule(config)
