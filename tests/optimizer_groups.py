"""Optimizer groups of modules that no spec describes."""

from __future__ import annotations

from torch import nn

from petatron.sharding.optimizer_group_spec import GroupSpec


def groups_of(*modules: nn.Module, rule: str = "adam") -> dict[str, GroupSpec]:
    """The group of every parameter by name, as a model's specs would say: weight decay for matrices, not for biases and norms."""
    return {
        name: GroupSpec(rule=rule, weight_decay=float(parameter.dim() > 1 and not name.endswith(".bias")))
        for module in modules
        for name, parameter in module.named_parameters()
    }
