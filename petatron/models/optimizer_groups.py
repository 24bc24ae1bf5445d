"""Which update rule, learning rate and weight decay each parameter gets."""

from __future__ import annotations

from collections.abc import Callable

from petatron.config.schema.training import OptimizerConfig
from petatron.layers.spec.param_spec import ParamSpec
from petatron.sharding.group_spec import GroupSpec

OptimizerGroupRule = Callable[[str, ParamSpec], GroupSpec]
"""Returns the optimizer group of a parameter, by its name and facts."""


def optimizer_group(optim: OptimizerConfig, name: str, param: ParamSpec) -> GroupSpec:
    """Returns the optimizer group of a parameter: the one place that says which rule updates what.

    Muon takes the matrices of layers; embeddings, the output head, routers and vectors are left to its scalar optimizer.
    """
    weight_decay = 1.0 if param.weight_decay else 0.0
    if optim.optimizer != "muon" or param.role != "hidden_matrix":
        rule = optim.muon_scalar_optimizer if optim.optimizer == "muon" else optim.optimizer
        decoupled = optim.decoupled_lr is not None and param.role == "vocabulary"
        return GroupSpec(rule=rule, weight_decay=weight_decay, decoupled_lr=decoupled)
    is_qkv = {"q", "k", "v"} <= {section.name for section in param.shard.sections}
    fused = is_qkv and not optim.muon_split_qkv
    return GroupSpec(rule="muon", weight_decay=weight_decay, unit="fused_matrix" if fused else "matrix")
