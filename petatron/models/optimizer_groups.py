"""Assigns parameters to optimizer groups: which update rule, learning rate and weight decay each gets."""

from __future__ import annotations

from collections.abc import Callable

from petatron.config.optimizer_registry import rule_spec
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.config.schema.optimizers.update_rule_spec import WidthScaling
from petatron.layers.spec.param_spec import ParamSpec
from petatron.sharding.optimizer_group_spec import GroupSpec

OptimizerGroupRule = Callable[[str, ParamSpec], GroupSpec]
"""Returns the optimizer group of a parameter, by its name and spec."""


def optimizer_group(optim: OptimizerConfig, name: str, param: ParamSpec) -> GroupSpec:
    """Returns the optimizer group of a parameter: the one place that says which rule updates what.

    A rule for the matrices of layers leaves embeddings, the output head, routers and vectors to its scalar optimizer. muP scales learning
    rates but those of `--decoupled-lr`.
    """
    rule = rule_spec(optim)
    if rule.hidden_matrices_only and param.role != "hidden_matrix":
        assert rule.scalar_optimizer is not None, f"{rule.name} updates matrices alone, and names no other optimizer"
        rule = rule_spec(optim, rule.scalar_optimizer)
    is_qkv = {"q", "k", "v"} <= {section.name for section in param.shard.sections}
    fused = rule.unit == "matrix" and is_qkv and rule.fuses_qkv
    decays_qk_norm = optim.apply_wd_to_qk_layernorm and name.endswith(("q_norm.weight", "k_norm.weight"))
    decoupled = optim.decoupled_lr is not None and param.role == "vocabulary"
    width = rule.width_scaling or WidthScaling()
    element_state = tuple(state.kind for state in rule.element_state(matrix_or_vector_shape(param)))
    return GroupSpec(
        rule=rule.name,
        weight_decay=1.0 if param.weight_decay or decays_qk_norm else 0.0,
        lr_scale=1.0 if decoupled else width.lr(fan_in=param.fan_in_ratio, fan_out=param.fan_out_ratio),
        eps_scale=width.eps(fan_in=param.fan_in_ratio),
        decoupled_lr=decoupled,
        unit="fused_matrix" if fused else rule.unit,
        element_state=element_state if rule.unit == "tensor" else None,
    )


def matrix_or_vector_shape(param: ParamSpec) -> tuple[int, ...]:
    """Returns the shape of what a rule updates as one tensor: each expert of a stack is one."""
    return param.shape if param.shard.ep is None else param.shape[1:]
