"""Waits for the all-gather of weights as late as possible: before the layer that computes with them.

A layer waits for all its weights at once, since not every use of a weight is a call of its module: GEMMs recompute a norm's output,
and the head computes losses. Weights after the last layer are waited for with its norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from torch import nn

from petatron.models.stage_interface import StageModule
from petatron.sharding.flat_buffer import FlatParamGroup


def wait_for_params_before_use(stages: Sequence[StageModule], param_groups: Sequence[FlatParamGroup]) -> None:
    """Makes every layer, and the modules before and after them, wait for the buckets of its parameters."""
    where: dict[nn.Parameter, tuple[FlatParamGroup, int]] = {}
    for group in param_groups:
        for index, bucket in enumerate(group.buckets if group.spec.trainable else ()):
            where |= {slot.parameter: (group, index) for slot in bucket.params}
    for stage in stages:
        for module, parameters in _modules_with_params(stage):
            needed: dict[int, tuple[FlatParamGroup, set[int]]] = {}
            for parameter in parameters:
                if parameter not in where:  # frozen: never gathered
                    continue
                group, index = where[parameter]
                needed.setdefault(id(group), (group, set()))[1].add(index)
            for group, indices in needed.values():
                wait = partial(group.wait_for_params, sorted(indices))
                module.register_forward_pre_hook(lambda module, args, wait=wait: wait())


def _modules_with_params(stage: StageModule) -> Iterator[tuple[nn.Module, Iterable[nn.Parameter]]]:
    """Yields modules that are called themselves, each with all parameters that are used before the next one is called."""
    for layer in stage.layers.values():
        yield layer, layer.parameters()
    for modules in stage.outer_modules():
        yield modules[0], [parameter for module in modules for parameter in module.parameters()]
