"""Reads a model with adapters as the model that they are merged into: the weights are computed while they are read.

A weight is merged in float32, or float64 where that is read, and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from petatron.checkpoint.tensor_chunk import Chunk, folder_tensor_key, folder_tensor_name
from petatron.layers.adapters.adapter import ADAPTER_PARAMS
from petatron.models.adapter_weights import AdaptedWeight, adapted_weights
from petatron.models.registry import without_adapters
from petatron.pretrained.model_reader_fields import ModelReader


def merge_adapters(source: ModelReader) -> ModelReader:
    """Returns the reader of a model without adapters, whose weights have them merged; a model without any is returned as it is."""
    if source.spec.config.adapter is None:
        return source
    merged = _MergedWeights(source, adapted_weights(source.spec))
    sections = {
        section: {name: value for name, value in values.items() if not is_adapter_setting(name)}
        for section, values in source.config_sections.items()
    }
    return replace(
        source,
        config_sections=sections,
        spec=without_adapters(source.spec),
        config_json=None,
        shapes={key: shape for key, shape in source.shapes.items() if not is_adapter_key(key)},
        dtypes={key: dtype for key, dtype in source.dtypes.items() if not is_adapter_key(key)},
        fill=merged.fill,
        open_training=None,
    )


def is_adapter_key(key: str) -> bool:
    """Whether a tensor of a model folder, by key, is one of an adapter."""
    return key.rpartition(".")[2] in ADAPTER_PARAMS


def is_adapter_setting(name: str) -> bool:
    return name == "adapter" or name.startswith("adapter_")


@dataclass(frozen=True, slots=True)
class _MergedWeights:
    source: ModelReader
    adapted: Mapping[str, AdaptedWeight]

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Fills chunks one after another where they are merged."""
        plain = [chunk for chunk in chunks if self._adapted(chunk.name) is None]
        self.source.fill(plain)
        for chunk in chunks:
            adapted = self._adapted(chunk.name)
            if adapted is not None:
                chunk.tensor.copy_(self._merged(adapted, chunk))

    def _adapted(self, name: str) -> AdaptedWeight | None:
        """Returns what is merged into a weight, or into its bias."""
        weight = self.adapted.get(name)
        if weight is not None or not name.endswith(".bias"):
            return weight
        owner = self.adapted.get(f"{name.removesuffix('bias')}weight")
        return owner if owner is not None and owner.output_scale is not None else None

    def _merged(self, adapted: AdaptedWeight, chunk: Chunk) -> Tensor:
        dtype = torch.promote_types(chunk.tensor.dtype, torch.float32)
        *leading, last = chunk.box.slices()

        def read(name: str, slices: tuple[slice, ...]) -> Tensor:
            return self._read(name, slices, dtype)

        if chunk.name.endswith(".bias"):
            return adapted.merged_bias(read, last)
        return adapted.merged(read, (*leading, slice(None)))[..., last]

    def _read(self, name: str, slices: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        key = folder_tensor_key(name)
        bounds = [part.indices(size)[:2] for part, size in zip(slices, self.source.shapes[key])]
        tensor = torch.empty([stop - start for start, stop in bounds], dtype=dtype)
        start = tuple(start for start, _ in bounds)
        self.source.fill([Chunk(key, self.source.shapes[key], start, tensor)])
        return tensor


def read_adapter_tensors(source: ModelReader) -> dict[str, Tensor]:
    """Returns the logical tensors of a model's adapters, in float32 where master weights have it."""
    tensors: dict[str, Tensor] = {}
    for key in filter(is_adapter_key, source.shapes):
        shape, name = source.shapes[key], folder_tensor_name(key)
        dtype = torch.promote_types(source.dtypes[key], torch.float32)
        assert name is not None
        tensors[name] = torch.empty(shape, dtype=dtype)
        source.fill([Chunk(key, shape, (0,) * len(shape), tensors[name])])
    return tensors
