"""Which adapter is beside which logical weight, and the weight with the adapter merged into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.layers.adapters.adapter import LORA_A, LORA_B, MAGNITUDE, SCALE
from petatron.layers.adapters.adapter_spec import scales_input
from petatron.models.adapter_targets import adapted_linears
from petatron.models.model_spec import ModelSpec
from petatron.sharding.shard_spec import section_name

ReadTensor = Callable[[str, tuple[slice, ...]], Tensor]
"""Reads a slice of a logical tensor, by name, in at least float32."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """The adapter of one logical weight: the names of its logical tensors, those that its kind has, and its scale.

    a: of a fused weight of experts it is that of all sections.
    """

    weight: str
    a: str | None = None
    b: str | None = None
    magnitude: str | None = None
    input_scale: str | None = None
    output_scale: str | None = None
    scale: float = 1.0

    def merged(self, read: ReadTensor, slices: tuple[slice, ...]) -> Tensor:
        """Returns a slice of the merged weight, whole along the last dimension, in the precision of what is read."""
        weight = read(self.weight, slices)
        *experts, rows = slices[:-1]
        if self.input_scale is not None:
            return weight * read(self.input_scale, (slice(None),))
        if self.output_scale is not None:
            return weight * read(self.output_scale, (rows,)).unsqueeze(-1)
        assert self.a is not None and self.b is not None
        a, b = read(self.a, (*experts, slice(None), slice(None))), read(self.b, (*experts, rows, slice(None)))
        merged = weight + self.scale * (b @ a)
        if self.magnitude is None:
            return merged
        norms = torch.linalg.vector_norm(merged, dim=-1)
        return merged * (read(self.magnitude, (rows,)) / norms).unsqueeze(-1)

    def merged_bias(self, read: ReadTensor, rows: slice) -> Tensor:
        """Returns rows of the merged bias, which only a scale of outputs changes."""
        bias = read(f"{self.weight.removesuffix('weight')}bias", (rows,))
        return bias if self.output_scale is None else bias * read(self.output_scale, (rows,))


def adapted_weights(spec: ModelSpec) -> dict[str, AdaptedWeight]:
    """Returns the logical weights of a model that have an adapter, by name."""
    adapted: dict[str, AdaptedWeight] = {}
    shapes = spec.logical_shapes()
    for linear, param, target, adapter in adapted_linears(spec):
        sections = target.sections or tuple(section.name for section in param.shard.sections)
        for section in sections or ("",):
            weight = section_name(f"{linear}.weight", section) if section else f"{linear}.weight"
            module = weight.removesuffix(".weight")

            def named(leaf: str, module: str = module, linear: str = linear) -> str | None:
                return next((name for owner in (module, linear) if (name := f"{owner}.{leaf}") in shapes), None)

            scale, of_input = named(SCALE), scales_input(param)
            adapted[weight] = AdaptedWeight(
                weight,
                a=named(LORA_A),
                b=named(LORA_B),
                magnitude=named(MAGNITUDE),
                input_scale=scale if of_input else None,
                output_scale=None if of_input else scale,
                scale=adapter.scale,
            )
    return adapted
