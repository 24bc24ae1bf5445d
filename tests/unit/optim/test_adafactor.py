"""Adafactor against that of transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from petatron.config.schema.optimizer import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim import update_by_tensor_sums
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from tests.longform import diagonal
from tests.unit.optim.test_muon import Block, fill_gradients, flatten

STEPS = 50


def their_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each logical tensor by itself: the fused weight is three."""
    found = {}
    for name, weight in model.named_parameters():
        parts = weight.detach().clone().chunk(3) if "qkv" in name else [weight.detach().clone()]
        found |= {f"{name}.{number}": nn.Parameter(part.clone()) for number, part in enumerate(parts)}
    return found


def split_grads(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, grad in grads.items():
        parts = grad.chunk(3) if "qkv" in name else [grad]
        found |= {f"{name}.{number}": part for number, part in enumerate(parts)}
    return found


@diagonal(2)
@pytest.mark.parametrize(
    ("relative", "scaled", "lr", "beta1"),
    [(False, False, 3e-3, 0.0), (False, True, 3e-2, 0.9), (True, True, 1e-2, 0.0), (True, False, 1e-2, 0.9)],
)
def test_fifty_steps_are_those_of_transformers(relative: bool, scaled: bool, lr: float, beta1: float):
    """Its relative step is at most 1e-2, which is our learning rate there."""
    transformers = pytest.importorskip("transformers.optimization")
    config = OptimizerConfig(
        optimizer="adafactor",
        lr=lr,
        weight_decay=0.1,
        clip_grad=0.0,
        adafactor_beta1=beta1,
        adafactor_relative_step=relative,
        adafactor_scale_parameter=scaled,
    )
    torch.manual_seed(3)
    model = Block().double()
    theirs = their_parameters(copy.deepcopy(model))
    groups = [
        {"params": [weight for weight in theirs.values() if (weight.dim() > 1) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    reference = transformers.Adafactor(
        groups,
        lr=None if relative else lr,
        beta1=beta1 or None,
        relative_step=relative,
        scale_parameter=scaled,
        warmup_init=False,
    )
    flat_groups = flatten(model, config)
    optimizer = MixedPrecisionOptimizer(config, flat_groups, ParallelMesh.single())
    for step in range(STEPS):
        for name, grad in split_grads(fill_gradients(flat_groups, step)).items():
            theirs[name].grad = grad.clone()
        optimizer.step()
        reference.step()
    for name, ours in their_parameters(model).items():
        torch.testing.assert_close(ours, theirs[name], rtol=1e-9, atol=1e-10, msg=name)


def test_a_matrix_has_a_value_for_each_row_and_column():
    config = OptimizerConfig(optimizer="adafactor", lr=1e-3)
    groups = flatten(Block(), config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
    found = {(kind, shard.name): shard.logical_shape for kind, _, shard, _ in optimizer.moments()}
    assert found["exp_avg_sq_row", "layers.0.attention.q.weight"] == (4,)
    assert found["exp_avg_sq_col", "layers.0.attention.q.weight"] == (6,)
    assert found["adafactor_exp_avg_sq", "layers.0.norm.weight"] == (6,)
    assert not any(kind == "adafactor_exp_avg" for kind, _ in found)


def test_boxes_of_few_rows_give_the_same_weights(monkeypatch: pytest.MonkeyPatch):
    config = OptimizerConfig(optimizer="adafactor", lr=1e-2, adafactor_scale_parameter=True)
    weights = []
    for limit in (1 << 24, 7):
        monkeypatch.setattr(update_by_tensor_sums, "_BOX_ELEMENTS", limit)
        torch.manual_seed(3)
        groups = flatten(Block().double(), config)
        optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
        for step in range(3):
            fill_gradients(groups, step)
            optimizer.step()
        weights.append(torch.cat([group.flat_weights for group in groups]))
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)
