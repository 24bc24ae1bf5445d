"""Waiting for weights that are still being gathered, as late as possible: before the layer that computes with them.

Layers wait as wholes, since not all that computes with a weight is a module's own call: products take a norm along, and the
head computes losses. What stands behind the last layer is waited for with its norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from torch import nn

from petatron.models.stage_module import StageModule
from petatron.sharding.flat_buffer import FlatParamGroup


def wait_for_params_before_use(stages: Sequence[StageModule], param_groups: Sequence[FlatParamGroup]) -> None:
    """Make every layer, and what stands before and behind them, wait for the buckets its parameters lie in."""
    where: dict[nn.Parameter, tuple[FlatParamGroup, int]] = {}
    for group in param_groups:
        for index, bucket in enumerate(group.buckets):
            where |= {slot.parameter: (group, index) for slot in bucket.params}
    for stage in stages:
        for module, parameters in _modules_with_params(stage):
            needed: dict[int, tuple[FlatParamGroup, set[int]]] = {}
            for parameter in parameters:
                group, index = where[parameter]
                needed.setdefault(id(group), (group, set()))[1].add(index)
            for group, indices in needed.values():
                module.register_forward_pre_hook(partial(_wait_for_params, group=group, indices=sorted(indices)))


def _modules_with_params(stage: StageModule) -> Iterator[tuple[nn.Module, Iterable[nn.Parameter]]]:
    """Modules that are called as such, each with all parameters that are computed with before the next one is called."""
    for layer in stage.layers.values():
        yield layer, layer.parameters()
    for modules in stage.outer_modules():
        yield modules[0], [parameter for module in modules for parameter in module.parameters()]


def _wait_for_params(module: nn.Module, args: object, *, group: FlatParamGroup, indices: list[int]) -> None:
    group.wait_for_params(indices)
