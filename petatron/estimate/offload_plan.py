"""Which layers of a stage offload their activations to host memory, and the bytes that frees.

They are spread evenly over the stage, not its first layers, so that the host link is always busy: the tensors of one of them have the
time of all layers up to the next one for offload, and in backward for reload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from petatron.estimate.activation_bytes import layer_bytes
from petatron.estimate.recompute_plan import RecomputePlan
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.transformer_layer import LayerSpec

LAYERS_IN_TRANSIT = 2
"""Offloaded layers with activations on the device: the one that runs and one in transfer."""


def offloaded_layers(num_layers: int, num_offloaded: int, *, num_without_backward: int = 0) -> tuple[int, ...]:
    """Returns the positions of the offloaded layers in a stage; a stage of fewer than `num_offloaded` layers offloads all.

    Its first `num_without_backward` layers save nothing that could be offloaded.

    >>> offloaded_layers(8, 3), offloaded_layers(2, 3), offloaded_layers(8, 0), offloaded_layers(8, 2, num_without_backward=4)
    ((0, 2, 5), (0, 1), (), (4, 6))
    """
    num_saving = num_layers - num_without_backward
    num_offloaded = min(num_offloaded, num_saving)
    return tuple(num_without_backward + index * num_saving // num_offloaded for index in range(num_offloaded))


def offloaded_bytes(
    plan: RecomputePlan, shape: ActivationShape, layers: Sequence[LayerSpec], num_offloaded: int
) -> int:
    """Returns the bytes of one micro-batch in host memory; `layers` are those of the stage."""
    return sum(count * size for size, count in _saved_bytes_by_kind(plan, shape, layers, num_offloaded))


def freed_bytes(plan: RecomputePlan, shape: ActivationShape, layers: Sequence[LayerSpec], num_offloaded: int) -> int:
    """Returns the bytes that offload frees from a stage's peak: all that is offloaded, less what is in transfer at a time."""
    largest = max((size for size, _ in _saved_bytes_by_kind(plan, shape, layers, num_offloaded)), default=0)
    return max(0, plan.in_flight * offloaded_bytes(plan, shape, layers, num_offloaded) - LAYERS_IN_TRANSIT * largest)


def _saved_bytes_by_kind(
    plan: RecomputePlan, shape: ActivationShape, layers: Sequence[LayerSpec], num_offloaded: int
) -> list[tuple[int, int]]:
    """Returns the bytes that offloaded layers of each kind save, and the number of such layers."""
    chosen = offloaded_layers(len(layers), num_offloaded, num_without_backward=plan.num_without_backward)
    kinds = Counter((layers[index], plan.modules[index]) for index in chosen)
    return [(layer_bytes(layer, shape, modules), count) for (layer, modules), count in kinds.items()]
