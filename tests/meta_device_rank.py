"""Builds one rank of any layout at full size, without memory and without the other ranks.

Weights are on the meta device over a process group that sends nothing, so a laptop can check how a model of any size is sharded
over any number of ranks: whether it builds, what every rank holds, and that the shards add up to the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from petatron.config import RunConfig
from petatron.mesh.launch.environment import SINGLE_PROCESS
from petatron.mesh.launch.process_group import start_process_group, stop_process_group
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_model


@contextmanager
def fake_rank(run: RunConfig, rank: int) -> Iterator[ParallelModel]:
    """Yields this run's model as one of its ranks would hold it.

    >>> import petatron
    >>> run = petatron.load("llama3-8b", ["--tp", "8", "--mock-data", "--lr", "1e-4", "--train-iters", "1"], world_size=64).config
    >>> with fake_rank(run, 63) as model:
    ...     sum(parameter.numel() for parameter in model.module.parameters())
    1004802048
    """
    layout = Layout.from_config(run.parallel)
    environment = replace(SINGLE_PROCESS, rank=rank, world_size=layout.world_size, local_world_size=layout.world_size)
    start_process_group(environment, backend="fake")
    try:
        yield build_model(run, ParallelMesh(layout, rank, device=torch.device("meta")))
    finally:
        stop_process_group()


def num_primary_elements(model: ParallelModel) -> int:
    """Counts the elements of logical tensors this rank is primary for; over all ranks they add up to the model."""
    return sum(
        end - begin
        for group in model.param_groups
        for flat_shard in group.flat_shards
        for begin, end in flat_shard.primary_ranges()
    )
