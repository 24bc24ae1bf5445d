"""Frozen parameters (`requires_grad_(False)`) stay as they are, in every layout; gradients of the others do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.config import RunConfig
from petatron.config.schema.optimizer import BUILT_IN_RULES
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_loader, build_model, build_optimizer
from petatron.verify.compare_traces import compare_traces
from petatron.verify.record_trace import StepTrace, _traced_shards, assemble_tensors
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import BOUNDS, layout_run, tiny_run

GPT = "--normalization LayerNorm --activation gelu --add-bias-linear --qk-layernorm"
TIED = "--no-untie-embeddings-and-output-weights"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 "
    "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mlp layernorm"
ZERO1 = "--use-distributed-optimizer"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
STEPS = 3

BOTTOM = ("embedding.*", "layers.0.*")
SCATTERED = ("layers.0.attention.q.*", "layers.1.*.down.*", "layers.1.attention.out.*", "*norm*", "head.*")
"""Parts of fused nodes: the norm or the GEMM of one. What is fused in a parameter (q, k and v) is frozen with it."""
PATTERNS = pytest.mark.parametrize("patterns", [BOTTOM, SCATTERED], ids=["bottom", "scattered"])
PATTERNS_AND_STEPS = pytest.mark.parametrize(
    ("patterns", "freeze_at"),
    [(BOTTOM, 1), (SCATTERED, 0), later(BOTTOM, 0), later(SCATTERED, 1)],
    ids=["bottom later", "scattered at first", "bottom at first", "scattered later"],
)

State = dict[tuple[str, ...], Tensor]


def named_params(model: ParallelModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return (pair for stage in model.stages.values() for pair in stage.named_parameters())


def state_of(model: ParallelModel, optimizer: MixedPrecisionOptimizer, names: set[str]) -> State:
    """Copies of the model's weights, master weights and moments that this rank has of some logical tensors."""
    weights = (pair for group in model.param_groups for pair in group_tensor_shards(group, group.weights()))
    found = [("weight", shard, view) for shard, view in weights]
    found += [("master", shard, view) for _, shard, view in optimizer.master_weights()]
    found += [(kind, shard, view) for kind, _, shard, view in optimizer.moments()]
    return {
        (kind, shard.name, str(shard.start)): view.detach().clone()
        for kind, shard, view in found
        if shard.name in names
    }


class Frozen(NamedTuple):
    """A rank's steps, the logical tensors that were frozen there, and what of their state has changed all the same."""

    traces: list[StepTrace]
    names: set[str]
    changed: list[str]


def train_frozen(run: RunConfig, patterns: tuple[str, ...], freeze_at: int) -> Frozen:
    """Trains on one rank, some logical tensors being frozen before a step."""
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    traces: list[StepTrace] = []
    names: set[str] = set()
    before: State = {}
    for step, batches in zip(range(STEPS), build_loader(run, mesh)):
        if step == freeze_at:
            for name, parameter in named_params(model):
                tensors = {shard.name for shard in model.placements[name].tensor_shards}
                if any(fnmatch(tensor, pattern) for tensor in tensors for pattern in patterns):
                    parameter.requires_grad_(False)
                    names |= tensors
            before = state_of(model, optimizer, names)
        loss = model.train_step(batches)
        shards = [*_traced_shards(model, "gradient")]
        result = optimizer.step()
        shards += _traced_shards(model, "parameter")
        traces.append(StepTrace(float(loss), float(result.grad_norm), shards))
    after = state_of(model, optimizer, names)
    return Frozen(traces, names, [" ".join(key) for key, old in before.items() if not torch.equal(old, after[key])])


def check_gradients(frozen: Frozen, whole: Frozen, *, freeze_at: int) -> None:
    """Assert that frozen tensors have no gradient, and the others that of a run which freezes nothing: up to the first update."""
    for trace in frozen.traces[freeze_at:]:
        found = assemble_tensors(trace.shards)
        assert not any(found["gradient", name].any() for name in frozen.names)
        assert all(found["gradient", name].any() for kind, name in found if name not in frozen.names)
    found, wanted = (assemble_tensors(run.traces[freeze_at].shards) for run in (frozen, whole))
    for kind, name in wanted:
        if kind == "gradient" and name not in frozen.names:
            torch.testing.assert_close(found[kind, name], wanted[kind, name], rtol=1e-12, atol=1e-14)


def check_trained(frozen: Frozen) -> None:
    """Assert that every update changes what is not frozen."""
    steps = [assemble_tensors(trace.shards) for trace in frozen.traces]
    for before, after in pairwise(steps):
        for key in before.keys() - {(kind, name) for kind in ("gradient", "parameter") for name in frozen.names}:
            assert not torch.equal(before[key], after[key]), key


@cache
def train_whole(model: str) -> Frozen:
    """The run that freezes nothing, which all cases of a model are compared with."""
    return train_frozen(tiny_run(f"{model} --train-iters {STEPS}", dtype="float64"), (), 0)


@diagonal(3)
@PATTERNS_AND_STEPS
@pytest.mark.parametrize(
    "model",
    [
        *("", GPT, TIED, EXPERTS, FULL, SELECTIVE, "--optimizer sgd", "--optimizer muon"),
        *(later(f"--optimizer {name}") for name in BUILT_IN_RULES if name not in ("adam", "sgd", "muon")),
    ],
    ids=[
        *("llama", "gpt", "tied", "experts", "recompute", "selective", "sgd", "muon"),
        *(name for name in BUILT_IN_RULES if name not in ("adam", "sgd", "muon")),
    ],
)
def test_frozen_parameters_stay_and_change_no_other_gradient(model: str, patterns: tuple[str, ...], freeze_at: int):
    run = tiny_run(f"{model} --train-iters {STEPS}", dtype="float64")
    frozen = train_frozen(run, patterns, freeze_at)
    assert frozen.names and not frozen.changed
    check_gradients(frozen, train_whole(model), freeze_at=freeze_at)
    check_trained(frozen)


@pytest.mark.parametrize("patterns", [("*",), ("embedding.*", "layers.*", "norm.*")], ids=["all", "all but the head"])
def test_most_or_all_parameters_may_be_frozen(patterns: tuple[str, ...]):
    run = tiny_run(f"--train-iters {STEPS}", dtype="float64")
    frozen = train_frozen(run, patterns, 0)
    assert not frozen.changed
    check_trained(frozen)


@diagonal(2)
@PATTERNS
@pytest.mark.parametrize("flags", ["", "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "--fp8-format hybrid"])
def test_frozen_master_weights_stay(flags: str, patterns: tuple[str, ...]):
    sizes = "--hidden-size 64 --ffn-hidden-size 96 --seq-length 16"
    frozen = train_frozen(tiny_run(f"--bf16 {sizes} --train-iters {STEPS} {flags}"), patterns, 1)
    assert frozen.names and not frozen.changed


@diagonal(5)
@pytest.mark.parametrize("freeze_at", [later(0), 1], ids=["at first", "later"])
@PATTERNS
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("--tp 2", GPT),
        ("--tp 2 --sequence-parallel", ""),
        later("--tp 2 --sequence-parallel", FULL),
        later("--dp 2", ""),
        (f"--dp 2 {ZERO1} --overlap-grad-reduce --overlap-param-gather", ""),
        (f"--dp 2 {ZERO1}", "--optimizer muon"),
        (f"--dp 2 {ZERO3}", ""),
        later(f"--dp 2 {ZERO3}", "--optimizer muon"),
        later("--tp 2", "--optimizer adafactor"),
        later(f"--dp 2 {ZERO3}", "--optimizer soap --soap-precondition-frequency 1"),
        ("--pp 2", TIED),
        later("--dp 2 --ep 2", f"{EXPERTS} --global-batch-size 4"),
    ],
)
def test_layout_equals_one_process(ranks: RankPool, layout: str, model: str, patterns: tuple[str, ...], freeze_at: int):
    alone = train_frozen(tiny_run(f"{model} --train-iters {STEPS}", dtype="float64"), patterns, freeze_at)
    run = layout_run(layout, f"{model} --train-iters {STEPS}", world_size=2, dtype="float64")
    found = ranks.run(train_frozen, 2, run, patterns, freeze_at)
    assert alone.names == set().union(*(rank.names for rank in found))
    assert not alone.changed and not any(rank.changed for rank in found)
    verdict = compare_traces([alone.traces], [rank.traces for rank in found], BOUNDS["float64"])
    assert len(verdict.steps) == STEPS
    assert verdict.agrees, verdict.first_departure
