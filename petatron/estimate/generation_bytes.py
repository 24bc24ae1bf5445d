"""The memory of generation per sequence: KV-cache rows in pages, and recurrent states of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from petatron.layers.mtp import MtpLayerSpec
from petatron.layers.spec.generation_state import PagedState, RecurrentState
from petatron.models.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class GenerationBytes:
    """Of one tensor-parallel rank, all layers together. Layers of latent attention keep the same on every rank."""

    paged_layers: int
    per_token: int
    recurrent_layers: int
    per_sequence: int

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype, *, tp: int = 1) -> GenerationBytes:
        layers = [layer for layer in spec.layers if not isinstance(layer, MtpLayerSpec)]  # generation does not run them
        states = [branch.generation_state(tp) for layer in layers for branch in layer.branches]
        rows = [state.elements_per_token for state in states if isinstance(state, PagedState)]
        fixed = [state.bytes_per_sequence(dtype) for state in states if isinstance(state, RecurrentState)]
        return cls(len(rows), sum(rows) * dtype.itemsize, len(fixed), sum(fixed))
