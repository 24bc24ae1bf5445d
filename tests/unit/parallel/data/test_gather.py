"""Weights that are still being gathered: nothing is computed with one before it was waited for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from petatron.config.schema.optimizer import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.models.optimizer_groups import optimizer_group
from petatron.models.registry import model_spec
from petatron.parallel.data.param_gather_wait import wait_for_params_before_use
from petatron.parallel.tensor_parallel import shard_params
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.shard_spec import ModelParallelCoordinate
from tests.run_stage import run_stage
from tests.unit.models.test_activations import BASE, LLAMA, batch_of, build, run_of

MODELS = {
    "llama": LLAMA,
    "gpt-tied": f"{BASE} --hidden-dropout 0",
    "qk-norm": f"{LLAMA} --num-query-groups 2 --qk-layernorm",
    "experts": f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
}


@pytest.mark.parametrize("model", MODELS)
def test_every_weight_is_waited_for_before_it_is_used(model: str, monkeypatch: pytest.MonkeyPatch):
    """What has not arrived is not a number, and would spoil the loss."""
    run = run_of(MODELS[model].replace("--vocab-size 131", "--vocab-size 136"))  # no padding
    decoder, _ = build(run)
    wanted = run_stage(decoder, batch_of(run)).detach()
    params = model_spec(run).params()
    group_specs = {name: optimizer_group(OptimizerConfig(), name, param) for name, param in params.items()}
    values = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    placements = shard_params(decoder, params, ModelParallelCoordinate())
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(values[name])
    groups = flatten_parameters(
        [decoder], placements, group_specs, ParallelMesh.single(), FlatBufferOptions(bucket_size=500)
    )
    assert len(groups) > 1 and max(len(group.buckets) for group in groups) > 3
    gathered = {id(group): group.flat_weights.clone() for group in groups}

    def arrive(group: FlatParamGroup, bucket_indices: Iterable[int] | None = None) -> None:
        for index in range(len(group.buckets)) if bucket_indices is None else bucket_indices:
            bucket = group.buckets[index]
            group.flat_weights[bucket.begin : bucket.end] = gathered[id(group)][bucket.begin : bucket.end]

    monkeypatch.setattr(FlatParamGroup, "wait_for_params", arrive)
    wait_for_params_before_use([decoder], groups)
    for group in groups:
        group.flat_weights.fill_(float("nan"))
    with torch.no_grad():
        assert torch.equal(run_stage(decoder, batch_of(run)), wanted)
