"""Waiting for weights that are still being gathered, as late as possible: before the module that computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from petatron.mesh.flat import FlatGroup


def wait_before_use(stages: Sequence[nn.Module], groups: Sequence[FlatGroup]) -> None:
    """Make every module wait for the buckets its own parameters lie in."""
    where: dict[nn.Parameter, tuple[FlatGroup, int]] = {}
    for group in groups:
        for index, bucket in enumerate(group.buckets):
            where |= {slot.parameter: (group, index) for slot in bucket.slots}
    for stage in stages:
        for module in stage.modules():
            needed: dict[int, tuple[FlatGroup, set[int]]] = {}
            for parameter in module.parameters(recurse=False):
                group, index = where[parameter]
                needed.setdefault(id(group), (group, set()))[1].add(index)
            for group, indices in needed.values():
                module.register_forward_pre_hook(partial(_wait, group=group, indices=sorted(indices)))


def _wait(module: nn.Module, args: object, *, group: FlatGroup, indices: list[int]) -> None:
    group.wait(indices)
