"""What the layers of this rank keep while text is generated: rows in pages, states in slots."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from petatron.layers.mtp import MtpLayerSpec
from petatron.layers.spec.generation_state import GenerationState, PagedState, Pages, RecurrentState, StateSlots
from petatron.parallel.parallel_model import ParallelModel

State = TypeVar("State", bound=GenerationState)


def layer_states(model: ParallelModel, kind: type[State], *, depths: int = 0) -> dict[int, State]:
    """Returns what this rank's layers keep of one kind, by the index of the layer; with so many depths of multi-token prediction."""
    states: dict[int, State] = {}
    for stage in model.stages.values():
        for name in stage.layers:
            layer = model.spec.layers[int(name)]
            if isinstance(layer, MtpLayerSpec) and layer.depth > depths:
                continue  # generation does not run it
            for branch in layer.branches:
                state = branch.generation_state(model.mesh.tp.size)
                if isinstance(state, kind):
                    assert int(name) not in states, "a layer has one branch with a state of a kind"
                    states[int(name)] = state
    return states


def any_layer_has(model: ParallelModel, kind: type[GenerationState]) -> bool:
    """Whether some layer, of this rank or another, keeps a state of a kind."""
    branches = (branch for layer in set(model.spec.layers) for branch in layer.branches)
    return any(isinstance(branch.generation_state(1), kind) for branch in branches)


def page_bytes(model: ParallelModel, page_size: int, *, depths: int = 0) -> int:
    """Returns the bytes of one page in all layers of this rank, and in so many depths of multi-token prediction."""
    elements = sum(state.elements_per_token for state in layer_states(model, PagedState, depths=depths).values())
    return elements * page_size * model.dtype.itemsize


def slot_bytes(model: ParallelModel) -> int:
    """Returns the bytes of one sequence's recurrent states in all layers of this rank."""
    return sum(state.bytes_per_sequence(model.dtype) for state in layer_states(model, RecurrentState).values())


def allocate_pages(model: ParallelModel, num_pages: int, page_size: int, *, depths: int = 0) -> dict[int, Pages]:
    return {
        index: {name: _zeros(model, (num_pages, page_size, *shape), model.dtype) for name, shape in state.rows}
        for index, state in layer_states(model, PagedState, depths=depths).items()
    }


def allocate_states(model: ParallelModel, num_slots: int) -> dict[int, StateSlots]:
    return {
        index: {kept.name: _zeros(model, (num_slots, *kept.shape), kept.dtype(model.dtype)) for kept in state.tensors}
        for index, state in layer_states(model, RecurrentState).items()
    }


def _zeros(model: ParallelModel, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=model.mesh.device)
