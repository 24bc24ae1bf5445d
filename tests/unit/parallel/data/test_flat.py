"""Flat buffers: parameters become views, decayed and undecayed apart, last layer first."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel import parallelize
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import ModelParallelCoordinate, Placement, Section, Shard, compute_placement
from petatron.train.build_run import build_model
from tests.optimizer_groups import groups_of
from tests.parity.harness import tiny_run


def flatten(model: nn.Module, placements: dict[str, Placement], **options: int) -> list[FlatParamGroup]:
    mesh, groups = ParallelMesh.single(), groups_of(model)
    return flatten_parameters([model], placements, groups, mesh, FlatBufferOptions(bucket_size=10**9, **options))


def test_parameters_are_views_that_keep_their_values():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    x = torch.randn(5, 3)
    out = model(x)
    placements = {
        n: compute_placement(n, tuple(p.shape), Shard(), ModelParallelCoordinate()) for n, p in model.named_parameters()
    }
    groups = flatten(model, placements)
    assert torch.equal(model(x), out)
    plain, decayed = groups
    assert [slot.name for slot in decayed.params] == ["2.weight", "0.weight"] and decayed.spec == GroupSpec(rule="adam")
    assert [slot.name for slot in plain.params] == [
        "2.bias",
        "1.bias",
        "1.weight",
        "0.bias",
    ] and plain.spec == GroupSpec(rule="adam", weight_decay=0.0)
    for group in groups:
        group.flat_weights.mul_(2.0)
        assert group.flat_weights.numel() == sum(slot.parameter.numel() for slot in group.params)
        for slot in group.params:
            assert torch.equal(slot.parameter.detach(), 2.0 * before[slot.name])
            assert slot.parameter.data_ptr() == group.param_view(group.flat_weights, slot).data_ptr()


def test_pieces_are_views_of_the_logical_sections():
    model = nn.Module()
    model.qkv = nn.Linear(2, 8, bias=False)
    shard = Shard(tp=0, sections=(Section("q", 4, 2), Section("k", 2, 1), Section("v", 2, 1)))
    placements = {"qkv.weight": compute_placement("a.qkv.weight", (8, 2), shard, ModelParallelCoordinate())}
    [group] = flatten(model, placements)
    found = {piece.name: view for piece, view in group_tensor_shards(group, group.weights())}
    assert list(found) == ["a.q.weight", "a.k.weight", "a.v.weight"]
    found["a.k.weight"].fill_(7.0)
    assert model.qkv.weight.detach()[4:6].eq(7.0).all() and not model.qkv.weight.detach()[6:].eq(7.0).any()


def test_dtypes_do_not_mix():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False, dtype=torch.bfloat16))
    placements = {
        n: compute_placement(n, (2, 2), Shard(), ModelParallelCoordinate()) for n, _ in model.named_parameters()
    }
    groups = flatten(model, placements)
    assert sorted((next(group.params).name, group.flat_weights.dtype, group.grads()[0].dtype) for group in groups) == [
        ("0.weight", torch.float32, torch.float32),
        ("1.weight", torch.bfloat16, torch.float32),
    ]


def test_stages_and_experts_do_not_mix():
    stages = [nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)}), nn.ModuleDict({"b": nn.Linear(2, 2, bias=False)})]
    stages[1]["e"] = nn.Linear(2, 2, bias=False)
    placements = {
        name: compute_placement(name, (2, 2), Shard(), ModelParallelCoordinate()) for name in ("a.weight", "b.weight")
    }
    placements["e.weight"] = compute_placement("e.weight", (2, 2), Shard(ep=0), ModelParallelCoordinate())
    mesh = ParallelMesh.single()
    groups = flatten_parameters(stages, placements, groups_of(*stages), mesh, FlatBufferOptions(bucket_size=1))
    found = [
        ([slot.name for slot in group.params], group.virtual_stage, group.axes.data_parallel.name) for group in groups
    ]
    assert found == [(["a.weight"], 0, "dp_cp"), (["e.weight"], 1, "edp"), (["b.weight"], 1, "dp_cp")]


def test_a_parameter_of_two_stages_lies_once_and_counts_twice():
    shared = nn.Linear(2, 2, bias=False)
    stages = [nn.ModuleDict({"embedding": shared}), nn.ModuleDict({"head": shared})]
    placements = {
        name: compute_placement(name, (2, 2), Shard(), ModelParallelCoordinate())
        for name in ("embedding.weight", "head.weight")
    }
    mesh = ParallelMesh.single()
    [group] = flatten_parameters(stages, placements, groups_of(*stages), mesh, FlatBufferOptions(bucket_size=1))
    assert [(slot.name, slot.grads_per_micro_batch) for slot in group.params] == [("embedding.weight", 2)]


def test_shared_buckets_divide_into_aligned_parts():
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    placements = {
        n: compute_placement(n, tuple(p.shape), Shard(), ModelParallelCoordinate()) for n, p in model.named_parameters()
    }
    layout = Layout(dp_shard=1)
    mesh = ParallelMesh(layout, 0)
    options = FlatBufferOptions(bucket_size=1, sharded=True)
    [group] = flatten_parameters([model], placements, groups_of(model), mesh, options)
    assert [(bucket.begin, bucket.end) for bucket in group.buckets] == [(0, 21), (21, 56)], "one rank needs no padding"
    assert [stretch.length for stretch in group.flat_shards] == [21, 35]


def test_weights_that_are_loaded_take_their_memory_once(monkeypatch: pytest.MonkeyPatch):
    """Before they are in a flat buffer, a parameter that gets no first values is one zero."""
    seen: list[int] = []
    flatten = parallelize.flatten_parameters

    def watched(stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        seen.append(sum(param.untyped_storage().nbytes() for stage in stages for param in stage.parameters()))
        return flatten(stages, *args, **kwargs)

    monkeypatch.setattr(parallelize, "flatten_parameters", watched)
    run = tiny_run()
    loaded, drawn = (build_model(run, ParallelMesh.single(), init_weights=each) for each in (False, True))
    params = list(loaded.module.parameters())
    assert seen[0] == 4 * len(params) < seen[1] == sum(4 * param.numel() for param in drawn.module.parameters())
    assert all(param.is_contiguous() and not param.any() for param in params)
