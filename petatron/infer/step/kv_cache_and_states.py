"""What the layers of this rank keep while text is generated, rows in pages and states in slots, and how many of both there are."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError, Problem
from petatron.base.log import get_logger
from petatron.config.schema.sections.multi_token_prediction import layers_per_depth
from petatron.infer.engine_options import EngineOptions
from petatron.infer.kv_cache_pages import CacheSize
from petatron.layers.mtp import MtpLayerSpec
from petatron.layers.spec.generation_state import GenerationState, PagedState, Pages, RecurrentState, StateSlots
from petatron.mesh import collectives
from petatron.parallel.parallel_model import ParallelModel

_log = get_logger(__name__)
_DEVICE_SHARE = 0.9
"""Of the free memory of a GPU; activations of a step need the rest."""
_HOST_SHARE = 0.25
"""Of the memory of a machine: others work on it too."""
_STATES_SHARE = 0.5
"""Of that, for recurrent states at most, where other layers need pages."""
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
                state_of = branch.head_state if model.batch_invariant else branch.generation_state
                state = state_of(model.mesh.tp.size)
                if isinstance(state, kind):
                    assert int(name) not in states, "a layer has one branch with a state of a kind"
                    # Depths that share a layer have each tokens of its own.
                    for run in range(min(layer.runs, depths) if layer.runs > 1 else 1):
                        states[int(name) + run * layers_per_depth(model.spec.config)] = state
    return states


def any_layer_has(model: ParallelModel, kind: type[GenerationState]) -> bool:
    """Whether some layer, of this rank or another, keeps a state of a kind; depths draft only where none is recurrent."""
    layers = {layer for layer in model.spec.layers if not isinstance(layer, MtpLayerSpec)}
    return any(isinstance(branch.generation_state(1), kind) for layer in layers for branch in layer.branches)


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


def choose_cache_size(model: ParallelModel, options: EngineOptions, *, max_length: int) -> CacheSize:
    """Returns the pages and slots on every rank; `ConfigError` if not one sequence fits.

    Every sequence that runs has a slot, so where memory allows fewer slots than `max_sequences`, fewer run at once.
    """
    longest = -(-max_length // options.page_size)
    of_slot = slot_bytes(model)
    of_page = page_bytes(model, options.page_size, depths=options.speculative_tokens)
    room = _free_bytes(model) / (model.mesh.world.size if model.mesh.device.type == "cpu" else 1)
    num_slots = 1 + options.max_sequences
    if of_slot:
        num_slots = int(min(num_slots, room * (_STATES_SHARE if of_page else 1.0) // of_slot))
    num_pages = options.num_pages or longest * options.max_sequences
    if options.num_pages is None:
        num_pages = min(num_pages, int((room - num_slots * of_slot) // max(1, of_page)))
    agreed = collectives.all_reduce(torch.tensor([num_pages, num_slots]), model.mesh.control, op="min")
    num_pages, num_slots = map(int, agreed)
    if num_slots < 2:
        rule = f"sequences have recurrent states of {of_slot:,} bytes each, more than the free memory of a rank"
        fix = "Use more tensor- or pipeline-parallel ranks, or free memory."
        raise ConfigError([Problem("--max-batch-size", str(options.max_sequences), rule, fix)])
    if num_slots <= options.max_sequences:
        _log.info("memory allows the recurrent states of %d sequences at once", num_slots - 1)
    if num_pages < longest:
        rule = f"of {options.page_size} tokens are fewer than one sequence of {max_length} tokens needs, which is {longest}"
        fix = "Use --max-length to serve shorter sequences, or give more pages or memory."
        raise ConfigError([Problem("--num-pages", str(num_pages), rule, fix)])
    return CacheSize(1 + num_pages, num_slots)


def _free_bytes(model: ParallelModel) -> float:
    device = model.mesh.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE
    memory = detect_device("cpu").memory_bytes
    return memory * _HOST_SHARE if memory else float("inf")
