"""What the layers of this rank keep while text is generated, rows in pages and states in slots, and how many of both there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError, Problem
from petatron.base.log import get_logger
from petatron.base.releasable_cuda_memory import ReleasableCudaMemory, aligned_bytes, can_release_memory
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


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """Pages and states by the index of their layer. memory: what they are in, if that can be given back for a while."""

    pages: dict[int, Pages]
    states: dict[int, StateSlots]
    memory: ReleasableCudaMemory | None

    def release(self) -> None:
        """Frees them for good."""
        self.pages.clear()
        self.states.clear()
        if self.memory is not None:
            self.memory.close()


def allocate_cache(model: ParallelModel, options: EngineOptions, cache: CacheSize) -> CacheTensors:
    """Allocates the pages and states of this rank's layers, with zeros."""
    device, of_pages = model.mesh.device, (cache.num_pages, options.page_size)
    pages = {
        (index, name): ((*of_pages, *shape), model.dtype)
        for index, state in layer_states(model, PagedState, depths=options.speculative_tokens).items()
        for name, shape in state.rows
    }
    states = {
        (index, kept.name): ((cache.num_slots, *kept.shape), kept.dtype(model.dtype))
        for index, state in layer_states(model, RecurrentState).items()
        for kept in state.tensors
    }
    memory, zeros = None, partial(torch.zeros, device=device)
    if options.releasable_cache and can_release_memory(device):
        size = sum(aligned_bytes(shape, dtype) for shape, dtype in (*pages.values(), *states.values()))
        memory = ReleasableCudaMemory(size, device)
        zeros = memory.zeros

    def of_layers(
        tensors: Mapping[tuple[int, str], tuple[tuple[int, ...], torch.dtype]],
    ) -> dict[int, Mapping[str, Tensor]]:
        made: dict[int, dict[str, Tensor]] = {}
        for (index, name), (shape, dtype) in tensors.items():
            made.setdefault(index, {})[name] = zeros(shape, dtype=dtype)
        return dict(made.items())

    return CacheTensors(of_layers(pages), of_layers(states), memory)


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
