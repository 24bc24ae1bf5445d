"""How many pages the key/value cache has."""

from __future__ import annotations

import torch

from petatron.base.device import detect_device
from petatron.base.errors import ConfigError, Problem
from petatron.infer.engine_options import EngineOptions
from petatron.infer.step.model_steps import layer_states
from petatron.mesh import collectives
from petatron.parallel.parallel_model import ParallelModel

_DEVICE_SHARE = 0.9
"""Of the free memory of a GPU; activations of a step need the rest."""
_HOST_SHARE = 0.25
"""Of the memory of a machine: others work on it too."""


def page_bytes(model: ParallelModel, page_size: int, *, depths: int = 0) -> int:
    """Returns the bytes of one page in all layers of this rank, and in so many depths of multi-token prediction."""
    elements = sum(state.elements_per_token for state in layer_states(model, depths=depths).values())
    return elements * page_size * model.dtype.itemsize


def choose_num_pages(model: ParallelModel, options: EngineOptions, *, max_length: int) -> int:
    """Returns the number of pages on every rank, the scratch page included; `ConfigError` if not one sequence fits."""
    longest = -(-max_length // options.page_size)
    wanted = options.num_pages or longest * options.max_sequences
    if options.num_pages is None:
        each = page_bytes(model, options.page_size, depths=options.speculative_tokens)
        wanted = min(wanted, int(_free_bytes(model) // max(1, each) // _ranks_per_device(model)))
    agreed = int(collectives.all_reduce(torch.tensor([wanted]), model.mesh.control, op="min"))
    if agreed < longest:
        rule = f"of {options.page_size} tokens are fewer than one sequence of {max_length} tokens needs, which is {longest}"
        fix = "Use --max-length to serve shorter sequences, or give more pages or memory."
        raise ConfigError([Problem("--num-pages", str(agreed), rule, fix)])
    return agreed + 1


def _free_bytes(model: ParallelModel) -> float:
    device = model.mesh.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE
    memory = detect_device("cpu").memory_bytes
    return memory * _HOST_SHARE if memory else float("inf")


def _ranks_per_device(model: ParallelModel) -> int:
    return model.mesh.world.size if model.mesh.device.type == "cpu" else 1
