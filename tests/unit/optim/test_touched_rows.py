"""A table of which a step touches few rows: torch's SparseAdam, and dense Adam on the touched rows with all others left alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from petatron.config.schema.optimizer import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.sharding.optimizer_group_spec import FROZEN_GROUP, GroupSpec
from petatron.sharding.row_sharded_group import RowShardedGroup
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement

ROWS, WIDTH = 13, 3
# torch adds epsilon before one of the two bias corrections, and we after both: with a tiny one there is no difference.
ADAM = OptimizerConfig(optimizer="adam", lr=0.05, clip_grad=0.0, weight_decay=0.1, adam_eps=1e-30)
STEPS = [[[0, 4, 4], [7]], [[4]], [[]], [[12, 0], [12], [3]]]
"""For each step, the rows of each lookup."""


def table(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype))


def group_of(parameter: nn.Parameter, spec: GroupSpec | None = None) -> RowShardedGroup:
    shard = Shard(tp=0, pad_to=1, rows_over_data=True)
    placement = compute_placement("items.weight", (ROWS, WIDTH), shard, ModelParallelCoordinate())
    return RowShardedGroup(
        parameter, placement, ParallelMesh.single().tp, spec or GroupSpec(rule="adam", weight_decay=0.0)
    )


def lookups(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    rows = (torch.tensor(rows, dtype=torch.int64) for rows in STEPS[step])
    return [(ids, torch.randn(len(ids), WIDTH, dtype=torch.float64, generator=generator)) for ids in rows]


def gradient(step: int) -> Tensor:
    out = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rows, grads in lookups(step):
        out.index_add_(0, rows, grads)
    return out


def train(group: RowShardedGroup, config: OptimizerConfig = ADAM) -> MixedPrecisionOptimizer:
    optimizer = MixedPrecisionOptimizer(config, [group], ParallelMesh.single())
    for step in range(len(STEPS)):
        group.start_step()
        for rows, grads in lookups(step):
            group.add_rows(rows, grads)
        result = optimizer.step(lr=0.05 / (1 + step))
        assert float(result.grad_norm) == pytest.approx(float(gradient(step).norm()), rel=1e-6)
        assert int(optimizer.count_zero_grads()) == int((gradient(step) == 0).sum())
    return optimizer


def test_adam_of_touched_rows_is_sparse_adam():
    ours, theirs = table(), table()
    train(group_of(ours))
    sparse = torch.optim.SparseAdam([theirs], lr=0.05, eps=1e-30)
    for step in range(len(STEPS)):
        rows, grads = (torch.cat(parts) for parts in zip(*lookups(step)))
        theirs.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), grads, (ROWS, WIDTH))
        sparse.param_groups[0]["lr"] = 0.05 / (1 + step)
        sparse.step()
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_touched_rows_are_dense_adam_and_the_others_are_left_alone():
    parameter = table()
    optimizer = train(group_of(parameter, GroupSpec(rule="adam")))
    weights, moments = table().detach(), [torch.zeros(ROWS, WIDTH, dtype=torch.float64) for _ in range(2)]
    for step in range(len(STEPS)):
        grad, lr, before = gradient(step), 0.05 / (1 + step), (weights, *moments)
        first, second = 0.9 * moments[0] + 0.1 * grad, 0.999 * moments[1] + 0.001 * grad.square()
        number = step + 1
        direction = (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + ADAM.adam_eps)
        after = (weights * (1 - lr * ADAM.weight_decay) - lr * direction, first, second)
        is_touched = (grad != 0).any(dim=1, keepdim=True)
        weights, *moments = (torch.where(is_touched, new, old) for new, old in zip(after, before, strict=True))
    assert torch.allclose(parameter, weights, rtol=1e-12, atol=1e-12)
    views = {kind: view for kind, _, _, view in optimizer.moments()}
    assert torch.allclose(views["exp_avg"], moments[0]) and torch.allclose(views["exp_avg_sq"], moments[1])


def test_rows_in_bf16_have_master_weights():
    wide, narrow = table(torch.bfloat16), table(torch.bfloat16)
    exact = nn.Parameter(wide.detach().float())
    train(group_of(exact))
    optimizer = train(group_of(narrow))
    [(_, _, master)] = optimizer.master_weights()
    assert torch.allclose(master, exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(narrow, master.bfloat16()) and not torch.equal(narrow, wide)


@pytest.mark.parametrize("rule", ["sgd", "lion"])
def test_other_rules_update_the_touched_rows_alone(rule: str):
    parameter = table()
    train(group_of(parameter, GroupSpec(rule=rule)), OptimizerConfig(optimizer=rule, lr=0.05, clip_grad=1.0))
    changed = (parameter != table()).any(dim=1).nonzero().flatten().tolist()
    assert changed == [0, 3, 4, 7, 12]


def _accumulate(grad: Tensor, out: Tensor, accumulate: bool) -> None:
    out.copy_(out + grad if accumulate else grad)


def test_a_matrix_of_gradients_touches_all_rows():
    ours, theirs = table(), table()
    group, dense = group_of(ours), torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.0, eps=1e-30)
    optimizer = MixedPrecisionOptimizer(ADAM, [group], ParallelMesh.single())
    for step in range(len(STEPS)):
        group.start_step()
        matrix = torch.full((ROWS, WIDTH), 0.1 * (step + 1), dtype=torch.float64)
        for _ in range(2):
            group.submit(ours, partial(_accumulate, matrix))
        for rows, grads in lookups(step):
            group.add_rows(rows, grads)
        optimizer.step()
        theirs.grad = 2 * matrix + gradient(step)
        dense.step()
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped():
    parameter = table()
    group = group_of(parameter)
    optimizer = MixedPrecisionOptimizer(ADAM, [group], ParallelMesh.single())
    group.start_step()
    group.add_rows(torch.tensor([2]), torch.full((1, WIDTH), float("inf"), dtype=torch.float64))
    assert bool(optimizer.step().skipped) and torch.equal(parameter, table())


def test_a_frozen_table_is_left_alone_and_seen_by_tensor():
    parameter = table()
    group = group_of(parameter, FROZEN_GROUP)
    MixedPrecisionOptimizer(ADAM, [group], ParallelMesh.single()).step(lr=1.0)
    [(shard, view)] = group_tensor_shards(group, group.weights())
    assert shard.name == "items.weight" and torch.equal(view, table())
