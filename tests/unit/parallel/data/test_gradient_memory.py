"""When the memory of gradients is allocated and freed: a step of one micro-batch has none before its backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement
from tests.dist import RankPool
from tests.optimizer_groups import groups_of

WIDTH, LAYERS = 5, 3


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.unused = nn.Parameter(torch.ones(4, 2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(
    model: nn.Module, mesh: ParallelMesh, *, sharded: bool = False
) -> tuple[list[FlatParamGroup], GradientReducer]:
    placements = {
        n: compute_placement(n, tuple(p.shape), Shard(), ModelParallelCoordinate()) for n, p in model.named_parameters()
    }
    options = FlatBufferOptions(bucket_size=1, sharded=sharded)
    groups = flatten_parameters([model], placements, groups_of(model), mesh, options)
    return groups, GradientReducer(groups, mesh, overlap=True)


def allocated(groups: list[FlatParamGroup]) -> int:
    return sum(grads.flat.untyped_storage().nbytes() for group in groups for grads in group.bucket_grads)


def test_a_bucket_is_allocated_when_its_first_gradient_comes():
    model = Chain()
    groups, reducer = build(model, ParallelMesh.single())
    reducer.start_step(1)
    assert allocated(groups) == 0
    seen: list[int] = []
    x = torch.ones(2, WIDTH, requires_grad=True)
    for layer in model.layers:
        x = layer(x)
        x.register_hook(lambda _: seen.append(allocated(groups)))
    assert allocated(groups) == 0, "a forward pass needs none"
    x.sum().backward()
    layer_bytes = 4 * WIDTH * WIDTH
    assert seen == [number * layer_bytes for number in range(LAYERS)]
    assert allocated(groups) == LAYERS * layer_bytes
    reducer.finish_grad_sync()
    assert allocated(groups) == LAYERS * layer_bytes + 4 * 8, "a parameter without a gradient has a zero one"
    assert not any(group.param_grad(slot).any() for group in groups for slot in group.params if slot.name == "unused")


def test_steps_that_free_equal_steps_that_do_not():
    found: list[list[Tensor]] = []
    for kept in (False, True):
        model = Chain()
        groups, reducer = build(model, ParallelMesh.single())
        if kept:
            reducer.keep_grads_allocated()
        views = [
            group.param_grad(slot) for group in groups for slot in group.params
        ]  # taken once, as the optimizer does
        addresses = {view.data_ptr() for view in views}
        for step in range(3):
            reducer.start_step(1)
            assert allocated(groups) == (sum(view.nbytes for view in views) if kept else 0)
            model(torch.full((2, WIDTH), 1.0 + step)).square().sum().backward()
            reducer.finish_grad_sync()
            if kept:
                assert {view.data_ptr() for view in views} == addresses, "a captured graph writes there"
        found.append([view.clone() for view in views])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert any(view.any() for view in found[0])


def test_steps_of_several_micro_batches_keep_the_memory():
    model = Chain()
    groups, reducer = build(model, ParallelMesh.single())
    whole = allocated(groups)
    for micro_batches in (2, 1, 2):
        reducer.start_step(micro_batches)
        assert allocated(groups) == (whole if micro_batches > 1 else 0)
        for _ in range(micro_batches):
            model(torch.ones(2, WIDTH)).sum().backward()
        reducer.finish_grad_sync()
        assert allocated(groups) == whole


def _padding_after_a_step() -> list[float]:
    mesh = ParallelMesh(Layout(dp_shard=2), dist.get_rank())
    model = Chain()
    groups, reducer = build(model, mesh, sharded=True)
    for group in groups:
        for grads in group.bucket_grads:
            grads.flat.fill_(float("nan"))
    reducer.start_step(1)
    model(torch.ones(2, WIDTH)).sum().backward()
    reducer.finish_grad_sync()
    return [float(grads.abs().sum()) for group in groups for grads in group.grads()]


def test_padding_stays_zero(ranks: RankPool):
    for sums in ranks.run(_padding_after_a_step, 2):
        assert all(total == total for total in sums), "an update would carry a NaN of the padding into the weights"
