"""Our own step: that of `petatron train`, without a data loader and without a log."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.base.errors import Problem
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.initial_weights import InitialWeights
from petatron.models.batch import Batch
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_model, launch
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step


def problems(spec: BenchSpec) -> Sequence[Problem]:
    return ()


class PetatronContender:
    """`train_step` on a state without data."""

    def __init__(self, spec: BenchSpec) -> None:
        run = spec.run
        self.micro_batches = spec.micro_batches
        mesh = launch(run)
        model = build_model(run, mesh, init_weights=False)
        load_initial_weights(model)
        self.state = TrainState.build(run, mesh, model=model)
        load_master_weights(self.state.optimizer, InitialWeights(model.spec, mesh.device))

    def step(self, batch: Batch) -> Tensor:
        return torch.as_tensor(train_step(self.state, [batch] * self.micro_batches).loss)


build = PetatronContender


@torch.no_grad()
def load_master_weights(optimizer: MixedPrecisionOptimizer, initial_weights: InitialWeights) -> None:
    """Loads the unrounded initial weights into the fp32 master weights: peers, whose weights are fp32, start from these too."""
    for _, tensor_shard, values in optimizer.master_weights():
        values.copy_(initial_weights[tensor_shard.name][tensor_shard.logical_slices()])


@torch.no_grad()
def load_initial_weights(model: ParallelModel) -> None:
    """Loads the initial weights of every logical tensor into its part of a parameter (QKV is one parameter); there is one rank."""
    initial_weights = InitialWeights(model.spec, model.mesh.device)
    for stage in model.stages.values():
        for name, parameter in stage.named_parameters():
            for tensor_shard in model.placements[name].tensor_shards:
                parameter[tensor_shard.local_slices()].copy_(initial_weights[tensor_shard.name])
