"""How many pages the key/value cache has, and how many slots the recurrent states."""

from __future__ import annotations

import torch

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError, Problem
from petatron.base.log import get_logger
from petatron.infer.engine_options import EngineOptions
from petatron.infer.pages import CacheSize
from petatron.infer.step.layer_states import page_bytes, slot_bytes
from petatron.mesh import collectives
from petatron.parallel.parallel_model import ParallelModel

_log = get_logger(__name__)
_DEVICE_SHARE = 0.9
"""Of the free memory of a GPU; activations of a step need the rest."""
_HOST_SHARE = 0.25
"""Of the memory of a machine: others work on it too."""
_STATES_SHARE = 0.5
"""Of that, for recurrent states at most, where other layers need pages."""


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
