"""SOAP against the paper's algorithm, written down plainly in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from petatron.config.schema.optimizer import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from tests.longform import diagonal
from tests.unit.optim.test_muon import Block, fill_gradients, flatten

STEPS = 50
MATRICES = ("layers.0.attention.qkv.weight", "layers.0.attention.out.weight")


class PlainSoap:
    """One matrix: Adam in a basis that power iterations turn towards the eigenvectors of both covariances."""

    def __init__(self, weight: Tensor, config: OptimizerConfig) -> None:
        rows, columns = weight.shape
        self.weight, self.config, self.step_count = weight, config, 0
        self.m, self.v = torch.zeros_like(weight), torch.zeros_like(weight)
        self.covariances = [weight.new_zeros(rows, rows), weight.new_zeros(columns, columns)]
        self.bases = [torch.eye(rows, dtype=weight.dtype), torch.eye(columns, dtype=weight.dtype)]

    def step(self, grad: Tensor, lr: float) -> None:
        config = self.config
        self.step_count += 1
        t, (left, right) = self.step_count, self.bases
        self.m = config.soap_beta1 * self.m + (1 - config.soap_beta1) * grad
        rotated_grad = left.T @ grad @ right
        rotated_m = left.T @ self.m @ right
        self.v = config.soap_beta2 * self.v + (1 - config.soap_beta2) * rotated_grad**2
        first, second = 1 - config.soap_beta1**t, 1 - config.soap_beta2**t
        normalized = (rotated_m / first) / ((self.v / second).sqrt() + config.soap_eps)
        update = left @ normalized @ right.T
        self.weight -= lr * config.weight_decay * self.weight
        self.weight -= lr * update
        s = config.soap_shampoo_beta
        outer = [grad @ grad.T, grad.T @ grad]
        for side, product in enumerate(outer):
            if len(product) > config.soap_max_precondition_dim:
                continue
            self.covariances[side] = s * self.covariances[side] + (1 - s) * product
            if (t - 1) % config.soap_precondition_frequency == 0:
                covariance = self.covariances[side]
                damping = 1e-6 * torch.trace(covariance) / len(covariance)
                turned = (covariance + damping * torch.eye(len(covariance), dtype=grad.dtype)) @ self.bases[side]
                self.bases[side] = torch.linalg.qr(turned).Q


@diagonal(2)
@pytest.mark.parametrize(
    ("frequency", "betas", "limit"),
    [(1, (0.95, 0.95), 100), (10, (0.9, 0.99), 100), (3, (0.95, 0.95), 5)],
)
def test_fifty_steps_are_those_of_the_paper(frequency: int, betas: tuple[float, float], limit: int):
    config = OptimizerConfig(
        optimizer="soap",
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=0.0,
        soap_beta1=betas[0],
        soap_beta2=betas[1],
        soap_shampoo_beta=0.9,
        soap_precondition_frequency=frequency,
        soap_max_precondition_dim=limit,
    )
    torch.manual_seed(3)
    model = Block().double()
    plain = dict(copy.deepcopy(model).named_parameters())
    theirs = [part.detach().clone() for name in MATRICES for part in plain[name].chunk(3 if "qkv" in name else 1)]
    references = [PlainSoap(weight, config) for weight in theirs]
    groups = flatten(model, config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
    for step in range(STEPS):
        grads = fill_gradients(groups, step)
        parts = [part for name in MATRICES for part in grads[name].chunk(3 if "qkv" in name else 1)]
        for reference, grad in zip(references, parts, strict=True):
            reference.step(grad, 1e-2)
        optimizer.step()
    weights = dict(model.named_parameters())
    ours = [part for name in MATRICES for part in weights[name].chunk(3 if "qkv" in name else 1)]
    for mine, reference in zip(ours, references, strict=True):
        torch.testing.assert_close(mine.detach(), reference.weight, rtol=1e-8, atol=1e-9)


def test_the_basis_becomes_that_of_the_eigenvectors():
    """Of gradients with one covariance, the projected covariance becomes diagonal."""
    config = OptimizerConfig(optimizer="soap", lr=1e-3, clip_grad=0.0, soap_precondition_frequency=1)
    torch.manual_seed(5)
    groups = flatten(Block().double(), config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
    for _ in range(60):
        fill_gradients(groups, 1)
        optimizer.step()
    found = {
        kind: view for kind, _, shard, view in optimizer.moments() if shard.name == "layers.0.attention.out.weight"
    }
    basis = found["soap_right_basis"]
    diagonal = basis.T @ found["soap_right"] @ basis
    off = diagonal - torch.diag(diagonal.diagonal())
    assert off.abs().max() < 1e-3 * diagonal.abs().max()
    torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=basis.dtype))


def test_a_long_side_has_no_basis():
    config = OptimizerConfig(optimizer="soap", lr=1e-3, soap_max_precondition_dim=5)
    optimizer = MixedPrecisionOptimizer(config, flatten(Block(), config), ParallelMesh.single())
    kinds = {kind for kind, _, shard, _ in optimizer.moments() if shard.name == "layers.0.attention.q.weight"}
    assert kinds == {"soap_exp_avg", "soap_exp_avg_sq", "soap_left", "soap_left_basis"}
