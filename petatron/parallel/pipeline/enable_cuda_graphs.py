"""Enables CUDA graphs of training steps for `--cuda-graphs` on or auto, which decides by what can be captured and by what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from petatron.base.log import get_logger
from petatron.config import RunConfig
from petatron.config.schema.fields import replace_fields
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.pipeline.auto_cuda_graphs import CaptureInputs, CudaMemory
from petatron.parallel.pipeline.cuda_graph import CudaGraphCapture, unsupported_device
from petatron.parallel.pipeline.device_idle import CudaEvents, IdleMeter
from petatron.validate.cuda_graphs import capture_problems

_log = get_logger(__name__)


def enable_requested_cuda_graphs(run: RunConfig, model: ParallelModel) -> None:
    """With `--cuda-graphs on`, captures the steps of a model."""
    mesh = model.mesh
    if run.train.cuda_graphs != "on":
        return
    if mesh.device.type == "cuda":
        model.use_cuda_graphs(CudaGraphCapture(mesh.device, generators=[model.rng_streams.tp_shared]))
    elif mesh.rank == 0 and run.train.device != "cpu":  # an explicit CPU is reported with the flags
        _log.info("note: --cuda-graphs has no effect: the CPU computes")


def enable_auto_cuda_graphs(run: RunConfig, model: ParallelModel) -> None:
    """With `--cuda-graphs auto`, lets a model that our own loop trains decide whether its steps are captured; logs why, if they cannot be.

    A loop of someone else may change the model between steps (hooks, frozen weights), which a replay would not notice.
    """
    mesh = model.mesh
    if run.train.cuda_graphs != "auto" or mesh.device.type != "cuda":
        return
    reasons = reasons_against_capture(run, backend=mesh.backend) + unsupported_device(mesh.device)
    if reasons:
        _log.info("CUDA graphs: off: %s", "; ".join(reasons))
        return
    layers = [layer for stage in model.stages.values() for layer in stage.layers.values()]
    memory = run.memory
    inputs = CaptureInputs(
        IdleMeter(layers, CudaEvents(mesh.device)),
        CudaMemory(mesh.device),
        model.rng_streams.state,
        recomputes=memory.recompute_granularity is not None or memory.recompute_memory_budget_gb is not None,
        max_over_ranks=partial(max_over_ranks, axis=mesh.control),
    )
    model.use_cuda_graphs(CudaGraphCapture(mesh.device, generators=[model.rng_streams.tp_shared]), inputs)


def reasons_against_capture(run: RunConfig, *, backend: str) -> list[str]:
    """Returns why the steps of a run cannot be captured, over the backend that its mesh has."""
    run = replace_fields(run, {"parallel.distributed_backend": backend})
    return [f"{setting}: {why}" for setting, why, _ in capture_problems(run)]


def max_over_ranks(numbers: Sequence[float], axis: Axis) -> list[float]:
    """Returns the maximum of each number over the ranks of an axis whose process group is gloo's (tensors in host memory)."""
    maxima = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return collectives.recursive_doubling_max(maxima, axis).tolist()
