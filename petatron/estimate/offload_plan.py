"""Which layers of a stage keep their activations in host memory, and what that frees.

The layers are spread evenly over the stage, and not its first ones, because the link to the host works all the time only
then: what one of them keeps has the time of all layers up to the next one to leave, and in the backward pass to come back.
"""

from __future__ import annotations

from collections import Counter

from petatron.estimate.activation_bytes import ActivationShape, layer_bytes
from petatron.estimate.recompute_plan import RecomputePlan

LAYERS_IN_TRANSIT = 2
"""Layers whose activations are on the device while they leave or come back: the one that runs and one on the way."""


def offloaded_layers(num_layers: int, num_offloaded: int) -> tuple[int, ...]:
    """Places of the offloaded layers among a stage's; a stage that has fewer than `num_offloaded` offloads all it has.

    >>> offloaded_layers(8, 3), offloaded_layers(2, 3), offloaded_layers(8, 0)
    ((0, 2, 5), (0, 1), ())
    """
    num_offloaded = min(num_offloaded, num_layers)
    return tuple(at * num_layers // num_offloaded for at in range(num_offloaded))


def offloaded_bytes(
    plan: RecomputePlan, shape: ActivationShape, moe_layer_mask: tuple[bool, ...], num_offloaded: int
) -> int:
    """Bytes of one micro-batch that wait in host memory; `moe_layer_mask` says which of the stage's layers are mixtures of experts."""
    return sum(layers * size for size, layers in _saved_bytes_by_kind(plan, shape, moe_layer_mask, num_offloaded))


def freed_bytes(
    plan: RecomputePlan, shape: ActivationShape, moe_layer_mask: tuple[bool, ...], num_offloaded: int
) -> int:
    """Bytes that offload takes from a stage's peak: all that waits, less what is on its way at a time."""
    largest = max((size for size, _ in _saved_bytes_by_kind(plan, shape, moe_layer_mask, num_offloaded)), default=0)
    return max(
        0, plan.in_flight * offloaded_bytes(plan, shape, moe_layer_mask, num_offloaded) - LAYERS_IN_TRANSIT * largest
    )


def _saved_bytes_by_kind(
    plan: RecomputePlan, shape: ActivationShape, moe_layer_mask: tuple[bool, ...], num_offloaded: int
) -> list[tuple[int, int]]:
    """What offloaded layers of each sort keep, and how many there are of it."""
    sorts = Counter(
        (plan.modules[at], moe_layer_mask[at]) for at in offloaded_layers(len(moe_layer_mask), num_offloaded)
    )
    return [(layer_bytes(shape, modules, is_moe=kind), layers) for (modules, kind), layers in sorts.items()]
