"""Lion against `lion_pytorch`."""

from __future__ import annotations

import copy

import pytest
import torch
from lion_pytorch import Lion
from torch import nn

from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from tests.unit.optim.test_muon import Block, fill_gradients, flatten

STEPS = 50


def published_lion(
    model: nn.Module, grads: list[dict[str, torch.Tensor]], config: OptimizerConfig, betas: tuple[float, float]
) -> None:
    """Steps of `lion_pytorch`, with decay for matrices alone, as ours."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = Lion(groups, lr=1e-2, betas=betas)
    for step in grads:
        for name, weight in model.named_parameters():
            weight.grad = step[name].clone()
        optimizer.step()


@pytest.mark.parametrize("betas", [(0.95, 0.98), (0.9, 0.99)])
def test_fifty_steps_are_those_of_the_published_package(betas: tuple[float, float]):
    config = OptimizerConfig(
        optimizer="lion", lr=1e-2, weight_decay=0.3, clip_grad=0.0, lion_beta1=betas[0], lion_beta2=betas[1]
    )
    torch.manual_seed(3)
    model = Block().double()
    plain = copy.deepcopy(model)
    groups = flatten(model, config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
    grads = []
    for step in range(STEPS):
        grads.append(fill_gradients(groups, step))
        optimizer.step()
    published_lion(plain, grads, config, betas)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)


def test_offloaded_state_gives_the_same_weights():
    config = OptimizerConfig(optimizer="lion", lr=1e-2, weight_decay=0.1)
    weights = []
    for memory in (None, MemoryConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.6)):
        torch.manual_seed(3)
        groups = flatten(Block().bfloat16(), config)
        optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single(), memory=memory)
        for step in range(3):
            fill_gradients(groups, step)
            optimizer.step()
        weights.append([group.flat_weights.clone() for group in groups])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
