"""Gradient reduction: the sum over ranks, sent early, in one order, once per step."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement
from tests.dist import RankPool
from tests.longform import diagonal
from tests.optimizer_groups import groups_of

WIDTH, LAYERS = 4, 5


class Chain(nn.Module):
    """Layers that can be passed in any order; each has another number of elements, so an event tells which one it was."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH + index, WIDTH, generator=generator).to(dtype)) for index in range(LAYERS)
        )
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(x @ self.layers[index][:WIDTH] + self.bias)
        return x.square().sum()


@dataclass(frozen=True)
class Case:
    bucket_size: int = 1
    overlap: bool = True
    micro_batches: int = 3
    reversed_on: int | None = None
    dtype: torch.dtype = torch.float32
    steps: int = 1

    def order(self, rank: int) -> list[int]:
        return list(range(LAYERS))[:: -1 if rank == self.reversed_on else 1]


def batch(rank: int, micro_batch: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    return torch.randn(2, WIDTH, generator=generator).to(dtype)


def flatten(
    model: nn.Module, mesh: ParallelMesh, *, bucket_size: int = 1, sharded: bool = False
) -> list[FlatParamGroup]:
    placements = {
        n: compute_placement(n, tuple(p.shape), Shard(), ModelParallelCoordinate()) for n, p in model.named_parameters()
    }
    options = FlatBufferOptions(bucket_size=bucket_size, sharded=sharded)
    return flatten_parameters([model], placements, groups_of(model), mesh, options)


def by_name(groups: list[FlatParamGroup]) -> dict[str, Tensor]:
    return {slot.name: group.param_grad(slot).clone() for group in groups for slot in group.params}


def _step(case: Case) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(Layout(dp_shard=dist.get_world_size() if dist.is_initialized() else 1), rank)
    model = Chain(case.dtype)
    groups = flatten(model, mesh, bucket_size=case.bucket_size)
    sync = GradientReducer(groups, mesh, overlap=case.overlap)
    seen: list[tuple[str, int]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: seen.append((name, mesh.record.count)))
    for _ in range(case.steps):
        sync.start_step(case.micro_batches)
        for micro_batch in range(case.micro_batches - 1):
            model(batch(rank, micro_batch, case.dtype), case.order(rank)).backward()
        unsent = mesh.record.count
        seen.clear()
        model(batch(rank, case.micro_batches - 1, case.dtype), case.order(rank)).backward()
        during = mesh.record.count
        sync.finish_grad_sync()
    return {
        "grads": by_name(groups),
        "events": [(event.axis, event.op, event.elements, event.bytes) for event in mesh.record.events()],
        "seen": seen,
        "counts": (unsent, during, mesh.record.count),
        "left": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
    }


def expected_sum(case: Case, world_size: int) -> dict[str, Tensor]:
    """All ranks' micro-batches, one after the other, in float64."""
    model = Chain(torch.float64)
    for rank in range(world_size):
        for micro_batch in range(case.micro_batches):
            model(batch(rank, micro_batch, case.dtype).double(), case.order(rank)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


@diagonal(3)
@pytest.mark.parametrize("bucket_size", [1, 30, 10**9])
@pytest.mark.parametrize("reversed_on", [None, 1])
def test_sum_over_ranks_for_any_bucket_size(ranks: RankPool, bucket_size: int, reversed_on: int | None):
    case = Case(bucket_size=bucket_size, reversed_on=reversed_on)
    expected = expected_sum(case, 3)
    elements = sum(p.numel() for p in Chain().parameters())
    results = ranks.run(_step, 3, case)
    for found in results:
        for name, grad in found["grads"].items():
            torch.testing.assert_close(grad.double(), expected[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(grad, results[0]["grads"][name]), "replicas must agree to the last bit"
        assert {(axis, op) for axis, op, *_ in found["events"]} == {("dp_cp", "all_reduce")}
        assert sum(count for *_, count, _ in found["events"]) == elements, "each element travels once"
        assert sum(size for *_, size in found["events"]) == 4 * elements
        assert found["left"] == []


def test_buckets_go_in_one_order_though_gradients_arrive_in_another(ranks: RankPool):
    first, second = ranks.run(_step, 2, Case(bucket_size=1, reversed_on=1))
    arrivals = [[name for name, _ in found["seen"] if name.startswith("layers")] for found in (first, second)]
    assert arrivals[0] == arrivals[1][::-1], "the case should make gradients arrive in opposite orders"
    assert first["events"] == second["events"]
    assert len(first["events"]) == LAYERS + 2


def test_overlap_changes_no_bit(ranks: RankPool):
    for bucket_size in (1, 30):
        overlapped = ranks.run(_step, 3, Case(bucket_size=bucket_size, overlap=True))
        at_end = ranks.run(_step, 3, Case(bucket_size=bucket_size, overlap=False))
        for ours, theirs in zip(overlapped, at_end):
            assert ours["events"] == theirs["events"]
            for name, grad in ours["grads"].items():
                assert torch.equal(grad, theirs["grads"][name]), name


class _Ordered(nn.Module):
    """Parameters registered in the order of the forward pass, all used: no bucket has to wait for the end.

    Matrices and biases lie in different buffers, whose buckets have to take turns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def _watch_progress(overlap: bool) -> tuple[list[int], int]:
    """How many buckets are under way whenever the backward pass comes to the output of a layer, last layer first."""
    mesh = ParallelMesh(Layout(dp_shard=2), dist.get_rank())
    model = _Ordered()
    groups = flatten(model, mesh)
    sync = GradientReducer(groups, mesh, overlap=overlap)
    under_way: list[int] = []
    sync.start_step(1)
    x = torch.ones(2, WIDTH)
    for layer in model.layers:
        x = layer(x)
        x.register_hook(lambda _: under_way.append(mesh.record.count))
    x.sum().backward()
    sync.finish_grad_sync()
    return under_way, mesh.record.count


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_leave_while_the_backward_pass_runs(ranks: RankPool, overlap: bool):
    for under_way, total in ranks.run(_watch_progress, 2, overlap):
        # A layer's gradient arrives after the backward pass has gone through its output and before the next one's.
        assert under_way == ([0, 2, 4, 6, 8] if overlap else [0] * LAYERS)
        assert total == 2 * LAYERS


def test_only_the_last_micro_batch_sends_and_every_step_sends_again(ranks: RankPool):
    one = ranks.run(_step, 2, Case(steps=1, micro_batches=4))[0]
    three = ranks.run(_step, 2, Case(steps=3, micro_batches=4))[0]
    per_step = LAYERS + 2
    assert one["counts"][0] == 0 and one["counts"][2] == per_step
    assert three["counts"][0] == 2 * per_step and three["counts"][2] == 3 * per_step
    assert three["events"] == 3 * one["events"]
    for name, grad in one["grads"].items():
        assert torch.equal(grad, three["grads"][name]), "begin() must forget the step before"


def test_half_precision_gradients_add_up_in_float32(ranks: RankPool):
    case = Case(dtype=torch.bfloat16, micro_batches=2)
    for found in ranks.run(_step, 2, case):
        assert {grad.dtype for grad in found["grads"].values()} == {torch.float32}
        assert sum(size for *_, size in found["events"]) == 4 * sum(p.numel() for p in Chain().parameters())


def test_bfloat16_would_lose_what_float32_keeps():
    """256 + 1 is 256 in bfloat16; one hundred ones must not vanish beside it."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    mesh = ParallelMesh.single()
    groups = flatten(model, mesh)
    sync = GradientReducer(groups, mesh, overlap=True)
    sync.start_step(101)
    for factor in (256.0, *[1.0] * 100):
        (model.weight * factor).sum().backward()
    sync.finish_grad_sync()
    assert groups[0].grads()[0].tolist() == [356.0] * 3


def test_double_stays_double():
    groups = flatten(Chain(torch.float64), ParallelMesh.single())
    assert {grads.dtype for group in groups for grads in group.grads()} == {torch.float64}


def _partial() -> dict[str, Any]:
    """tp 4: a vector summed over all four, a matrix of two units each shared by two ranks, a matrix that is nobody's sum."""
    rank = dist.get_rank()
    mesh = ParallelMesh(Layout(tp=4), rank)
    shards = {"norm": Shard(partial_grad="always"), "shared": Shard(tp=0), "plain": Shard()}
    logical = {"norm": (3,), "shared": (2, 3), "plain": (2, 2)}
    split = ModelParallelCoordinate(tp_size=4, tp_rank=rank)
    placements = {name: compute_placement(name, logical[name], shards[name], split) for name in shards}
    model = nn.Module()
    for name, placement in placements.items():
        model.register_parameter(name, nn.Parameter(torch.ones(placement.shape)))
    groups = flatten_parameters([model], placements, groups_of(model), mesh, FlatBufferOptions(bucket_size=1))
    sync = GradientReducer(groups, mesh, overlap=True)
    sync.start_step(1)
    sum(parameter.sum() * 10.0**rank for parameter in model.parameters()).backward()
    sync.finish_grad_sync()
    events = [(event.axis, event.op, event.elements) for event in mesh.record.events()]
    return {"values": {name: set(grad.flatten().tolist()) for name, grad in by_name(groups).items()}, "events": events}


def test_summands_are_added_over_the_ranks_that_hold_them(ranks: RankPool):
    for rank, found in enumerate(ranks.run(_partial, 4)):
        assert found["values"] == {"norm": {1111.0}, "shared": {11.0 if rank < 2 else 1100.0}, "plain": {10.0**rank}}
        assert sorted(found["events"]) == [("tp", "all_reduce", 3), ("tp/2", "all_reduce", 3)]


def test_more_gradients_than_micro_batches_is_an_error():
    mesh = ParallelMesh.single()
    model = nn.Linear(2, 2, bias=False)
    sync = GradientReducer(flatten(model, mesh), mesh, overlap=True)
    sync.start_step(1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="more gradients"):
        model(torch.ones(1, 2)).sum().backward()


def _written_past(sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """A step whose gradients come through the object, and the same step written to the buffers behind its back."""
    mesh = ParallelMesh(Layout(dp_shard=2), dist.get_rank())
    model = Chain()
    groups = flatten(model, mesh, bucket_size=30, sharded=sharded)
    sync = GradientReducer(groups, mesh, overlap=True)
    sync.start_step(2)
    for micro_batch in range(2):
        model(batch(mesh.rank, micro_batch, torch.float32), list(range(LAYERS))).backward()
    written = sync.params_with_grad()
    sync.finish_grad_sync()
    expected, sent = by_name(groups), mesh.record.count
    assert written == set(model.parameters()) - {model.unused}

    local = Chain()
    for micro_batch in range(2):
        local(batch(mesh.rank, micro_batch, torch.float32), list(range(LAYERS))).backward()
    sync.start_step(2)
    for group in groups:
        for slot in group.params:
            grad = local.get_parameter(slot.name).grad
            group.param_grad(slot).copy_(torch.full_like(slot.parameter, 7.0) if grad is None else grad)
    sync.mark_written(written)
    sync.finish_grad_sync()
    return expected, by_name(groups), mesh.record.count - 2 * sent


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_were_written_past_it_are_sent_all_the_same(ranks: RankPool, sharded: bool):
    for expected, found, more in ranks.run(_written_past, 2, sharded):
        assert more == 0, "everything is sent once"
        for name, grad in found.items():
            assert torch.equal(grad, expected[name]), name


@dataclass(frozen=True)
class Sharded:
    bucket_size: int
    outer: int = 1
    bf16: bool = False


def _scatter(case: Sharded) -> dict[str, Any]:
    """The owned part of every bucket, put where it belongs; NaN where another rank owns it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = ParallelMesh(Layout(dp_outer=case.outer, dp_shard=world // case.outer), rank)
    model = Chain(torch.float32)
    groups = flatten(model, mesh, bucket_size=case.bucket_size, sharded=True)
    sync = GradientReducer(groups, mesh, overlap=True, reduce_dtype=torch.bfloat16 if case.bf16 else None)
    sync.start_step(2)
    for micro_batch in range(2):
        model(batch(rank, micro_batch, torch.float32), list(range(LAYERS))).backward()
    sync.finish_grad_sync()
    found = {}
    for group in groups:
        kept = torch.full((group.buckets[-1].end,), float("nan"))
        for bucket, grads in zip(group.buckets, group.grads(), strict=True):
            begin, end = group.owned_range(bucket)
            kept[begin:end] = grads
        found |= {slot.name: group.param_view(kept, slot).clone() for slot in group.params}
        for weights in group.weights():
            weights.fill_(float(mesh["shard"].rank))
        group.all_gather_params()
    owners = {
        slot.name: group.param_view(group.flat_weights, slot).clone() for group in groups for slot in group.params
    }
    padded = sum(group.buckets[-1].end for group in groups)
    events = [(event.axis, event.op, event.bytes) for event in mesh.record.events()]
    return {"grads": found, "owners": owners, "padded": padded, "events": events}


@diagonal(2)
@pytest.mark.parametrize(
    "case", [Sharded(1), Sharded(30), Sharded(10**9), Sharded(30, outer=2), Sharded(30, bf16=True)]
)
def test_each_rank_gets_its_part_of_the_sum_and_all_get_the_weights(ranks: RankPool, case: Sharded):
    expected = expected_sum(Case(micro_batches=2), 4)
    results = ranks.run(_scatter, 4, case)
    size = 4 // case.outer
    for name, whole in expected.items():
        parts = torch.stack([found["grads"][name] for found in results])
        assert ((~parts.isnan()).sum(0) == case.outer).all(), "one owner in every instance"
        tolerance = {"rtol": 3e-2, "atol": 3e-2} if case.bf16 else {"rtol": 1e-5, "atol": 1e-6}
        for part in parts:
            torch.testing.assert_close(
                part.double(), whole.where(~part.isnan(), float("nan")), equal_nan=True, **tolerance
            )
        for rank, found in enumerate(results):
            assert torch.equal(found["owners"][name], results[0]["owners"][name])
            mine = ~found["grads"][name].isnan()
            assert (found["owners"][name][mine] == rank % size).all()
    for found in results:
        item = 2 if case.bf16 else 4
        total = {
            op: sum(b for axis, o, b in found["events"] if (axis, o) == op)
            for op in (("shard", "reduce_scatter"), ("shard", "all_gather"), ("dp_outer", "all_reduce"))
        }
        assert total[("shard", "reduce_scatter")] == item * found["padded"]
        assert total[("shard", "all_gather")] == 4 * found["padded"]
        assert total[("dp_outer", "all_reduce")] == (item * found["padded"] // size if case.outer > 1 else 0)


def test_a_model_that_nobody_holds_is_let_go():
    """Its process groups keep threads, so a leak would add up in a long-lived process."""
    mesh = ParallelMesh.single()
    model = nn.Linear(2, 2, bias=False)
    sync = GradientReducer(flatten(model, mesh), mesh, overlap=True)
    gone = weakref.ref(sync)
    del sync, model
    gc.collect()
    assert gone() is None
