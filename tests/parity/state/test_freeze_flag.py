"""`--freeze` and `--train-only`, in every layout: plain torch's gradients and updates, frozen weights to the bit, and nothing that costs.

The reference is the whole model as one `nn.Module` with `requires_grad=False`, autograd, `clip_grad_norm_` and `torch.optim.AdamW`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.registry import model_spec
from petatron.parallel.tensor_parallel import apply_tensor_parallel
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.sharding.shard_spec import ModelParallelCoordinate, compute_placement
from petatron.train.build_run import build_loader, build_model, build_optimizer
from petatron.verify.record_trace import TracedShard, _traced_shards, assemble_tensors
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_order, tiny_run

STEPS = 2
MODEL = f"--num-layers 4 --train-iters {STEPS} --lr-warmup-iters 0 --global-batch-size 4 --micro-batch-size 1"
TIED = "--no-untie-embeddings-and-output-weights"
GPT = "--normalization LayerNorm --activation gelu --add-bias-linear --qk-layernorm"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-router-load-balancing-type none --moe-router-bias-update-rate 1e-2"
)
ZERO1 = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce"
ZERO2, ZERO3 = (f"--data-parallel-sharding-strategy {name}" for name in ("optim_grads", "optim_grads_params"))
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mlp layernorm"

LAST_TWO = "--freeze embedding.* layers.[01].*"
EMBEDDINGS = "--freeze embedding.* head.*"
NORMS = "--train-only *norm*"
HEAD = "--train-only head.*"
MIDDLE = "--freeze layers.[12].*"
TIED_END = "--freeze head.*"
ALL_EXPERTS = "--freeze *.experts.*"
ROUTERS = "--freeze *.router.*"

REDUCTIONS, TRANSFERS, REPLICAS = ("all_reduce", "reduce_scatter"), ("send", "receive"), ("dp_cp", "shard")

Tensors = dict[str, Tensor]


class Trained(NamedTuple):
    """What training gave: losses, gradient norms, the last gradients and the last weights by logical tensor."""

    losses: list[float]
    norms: list[float]
    gradients: Tensors
    weights: Tensors


class RankResult(NamedTuple):
    """A rank's part of that, what of its frozen weights has changed, and what it holds and sends for the others."""

    losses: list[float]
    norms: list[float]
    shards: list[TracedShard]
    changed: list[str]
    gradient_elements: int
    state_elements: int
    events: list[CommEvent]


def is_frozen(run: RunConfig, names: list[str]) -> bool:
    """Whether a parameter with these logical names is frozen."""
    frozen = any(fnmatchcase(name, pattern) for name in names for pattern in run.train.freeze)
    only = run.train.train_only
    return frozen or (bool(only) and not any(fnmatchcase(name, pattern) for name in names for pattern in only))


def train_rank(run: RunConfig) -> RankResult:
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    frozen = [group for group in model.param_groups if not group.spec.trainable]
    before = [weight.clone() for group in frozen for weight in group.weights()]
    biases = [(name, bias.clone()) for name, bias in model.router_statistics.expert_biases()]
    losses, norms, shards, begun = [], [], [], mesh.record.count
    for batches in build_loader(run, mesh):
        loss = model.train_step(batches)
        shards = [*_traced_shards(model, "gradient")]
        norms.append(float(optimizer.step().grad_norm))
        losses.append(float(loss))
    shards += _traced_shards(model, "parameter")
    after = [weight for group in frozen for weight in group.weights()]
    changed = [f"weights {number}" for number, pair in enumerate(zip(before, after)) if not torch.equal(*pair)]
    moved = dict(model.router_statistics.expert_biases())
    routers = is_frozen(run, ["layers.0.mlp.router.weight"])
    changed += [name for name, bias in biases if torch.equal(bias, moved[name]) != routers]
    grads = [grad for group in model.param_groups for grad in group.grads() if grad.device.type != "meta"]
    state = sum(view.numel() for _, _, _, view in optimizer.moments())
    events = [event for event in mesh.record.events() if event.sequence_number > begun]
    return RankResult(losses, norms, shards, changed, sum(grad.numel() for grad in grads), state, events)


def whole_module(run: RunConfig, weights: Tensors) -> tuple[nn.Module, dict[nn.Parameter, list[tuple[str, Tensor]]]]:
    """The model of a run as one plain module with these weights; its parameters with the logical tensors in them."""
    spec, mesh = model_spec(run), ParallelMesh.single()
    module = spec.build_stage(spec.whole_model).to(torch.float64)
    apply_tensor_parallel(module, spec.params(), mesh.tp, sequence_parallel=False, shared_generator=None)
    tensors: dict[nn.Parameter, list[tuple[str, Tensor]]] = {}
    for name, param in spec.params().items():
        parameter = module.get_parameter(name)
        placed = compute_placement(name, param.shape, param.shard, ModelParallelCoordinate())
        views = [(shard.name, parameter.detach()[shard.local_slices()]) for shard in placed.tensor_shards]
        for logical, view in views:
            view.copy_(weights[logical])
        tensors[parameter] = views
    return module, tensors


@cache
def plain_torch(model: str, freeze: str) -> Trained:
    """Trains in plain torch, from the weights of a run that freezes nothing."""
    run = tiny_run(f"{MODEL} {model} {freeze}", dtype="float64")
    free = tiny_run(f"{MODEL} {model}", dtype="float64")
    mesh = ParallelMesh(Layout.from_config(run.parallel), 0)
    initial = build_model(free, mesh)
    weights = {
        shard.name: view.clone()
        for group in initial.param_groups
        for shard, view in group_tensor_shards(group, group.weights())
    }
    module, tensors = whole_module(run, weights)
    params = model_spec(run).params()
    tied = {"embedding.weight": ["head.weight"]} if TIED in model else {}
    for name, parameter in module.named_parameters():
        names = [name, *(logical for logical, _ in tensors[parameter]), *tied.get(name, [])]
        parameter.requires_grad_(not is_frozen(run, names))
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    decay = {False: 0.0, True: run.optim.weight_decay}
    groups = [
        {"params": [p for name, p in trained.items() if params[name].weight_decay == decays], "weight_decay": rate}
        for decays, rate in decay.items()
    ]
    assert run.optim.lr is not None
    adam = torch.optim.AdamW(groups, lr=run.optim.lr, betas=(0.9, 0.999), eps=run.optim.adam_eps)
    losses, norms, gradients = [], [], {}
    for batches in build_loader(run, mesh):
        tokens = sum(batch.loss_mask.sum() for batch in batches)
        for batch in batches:
            [token_losses] = module(batch, {}).losses.values()
            ((token_losses * batch.loss_mask.t()).sum() / tokens).backward()
            losses.append(float((token_losses.detach() * batch.loss_mask.t()).sum() / tokens))
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), run.optim.clip_grad)))
        gradients = {name: view for p in trained.values() for name, view in grad_views(p, tensors)}
        adam.step()
        if "--num-experts" in model:
            break  # expert biases follow the load, which plain torch knows nothing of: one step
        adam.zero_grad()
    per_step = len(losses) // len(norms)
    sums = [math.fsum(losses[at : at + per_step]) for at in range(0, len(losses), per_step)]
    return Trained(sums, norms, gradients, {name: view for views in tensors.values() for name, view in views})


def grad_views(
    parameter: nn.Parameter, tensors: dict[nn.Parameter, list[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """The logical tensors of a parameter's gradient."""
    assert parameter.grad is not None
    for name, view in tensors[parameter]:
        yield name, parameter.grad.as_strided(view.shape, view.stride(), view.storage_offset()).clone()


def run_of(model: str, freeze: str, layout: str = "", *, world_size: int = 1) -> RunConfig:
    steps = "--train-iters 1" if "--num-experts" in model else ""
    return tiny_run(f"{MODEL} {model} {freeze} {layout} {steps}", world_size=world_size, dtype="float64")


def check(ranks: list[RankResult], wanted: Trained) -> None:
    """Assert that ranks trained as plain torch did, and that no frozen weight has changed."""
    found = assemble_tensors([shard for rank in ranks for shard in rank.shards])
    clipped = max(1.0, wanted.norms[-1])  # torch clips the gradients themselves
    for rank in ranks:
        assert not rank.changed
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-9)
        assert rank.norms == pytest.approx(wanted.norms, rel=1e-8)
    assert {name for kind, name in found if kind == "gradient"} == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found["gradient", name] / clipped, gradient, rtol=1e-5, atol=1e-10)
    for name, weight in wanted.weights.items():
        if name in wanted.gradients:
            torch.testing.assert_close(found["parameter", name], weight, rtol=1e-6, atol=1e-8)
        else:
            torch.testing.assert_close(found["parameter", name], weight, rtol=0, atol=0)


def check_pipeline_costs(results: list[RankResult], trained: int, *, state: int | None = None) -> None:
    """Assert that a frozen first stage holds no gradients and no state, and gets nothing back."""
    first, last = results
    assert (first.gradient_elements, first.state_elements) == (0, 0)
    assert {event.op for event in first.events if event.op in TRANSFERS} == {"send"}
    assert {event.op for event in last.events if event.op in TRANSFERS} == {"receive"}
    expected = trained, 2 * trained if state is None else state
    assert (last.gradient_elements, last.state_elements) == pytest.approx(expected, rel=0.01)


def check_data_parallel_costs(run: RunConfig, results: list[RankResult], trained: int) -> None:
    """Assert that ranks hold, reduce and gather what is trained, but for the padding of shards, and nothing more."""
    strategy = run.parallel.data_parallel_sharding_strategy
    fully, sharded = strategy.startswith("optim_grads"), strategy != "no_shard"
    for rank in results:
        assert rank.gradient_elements * (2 if sharded else 1) == pytest.approx(trained, rel=0.05)
        assert rank.state_elements * (2 if sharded else 1) == pytest.approx(2 * trained, rel=0.05)
        reduced = [event.elements for event in rank.events if event.op in REDUCTIONS and event.axis in REPLICAS]
        times = 2 if fully else 1  # `fully_shard` reduces each of two micro-batches
        assert sum(reduced) == pytest.approx(STEPS * times * trained, rel=0.05)
        gathered = sum(event.elements for event in rank.events if event.op == "all_gather")
        if not fully:
            assert gathered == (pytest.approx(STEPS * trained, rel=0.05) if sharded else 0)


@diagonal(5)
@pytest.mark.parametrize(
    ("model", "freeze"),
    [
        ("", LAST_TWO),
        ("", EMBEDDINGS),
        ("", NORMS),
        ("", HEAD),
        (GPT, MIDDLE),
        (TIED, TIED_END),
        (EXPERTS, ALL_EXPERTS),
        (EXPERTS, ROUTERS),
        (FULL, LAST_TWO),
        (SELECTIVE, LAST_TWO),
        ("--cpu-offloading-num-layers 1", LAST_TWO),
    ],
)
def test_one_process_equals_plain_torch(model: str, freeze: str):
    check([train_rank(run_of(model, freeze))], plain_torch(model, freeze))


@diagonal(5)
@pytest.mark.parametrize(
    ("layout", "model", "freeze"),
    [
        (f"--dp 2 {OVERLAP}", "", LAST_TWO),
        (f"--dp 2 {ZERO1} {OVERLAP} --overlap-param-gather", "", LAST_TWO),
        (f"--dp 2 {ZERO1}", "", NORMS),
        (f"--dp 2 {ZERO2}", "", LAST_TWO),
        (f"--dp 2 {ZERO3}", "", LAST_TWO),
        (f"--dp 2 {ZERO3}", "", MIDDLE),
        ("--tp 2", GPT, MIDDLE),
        ("--tp 2 --sequence-parallel", "", NORMS),
        ("--tp 2 --sequence-parallel", FULL, LAST_TWO),
        ("--cp 2", "", LAST_TWO),
        ("--pp 2", "", LAST_TWO),
        ("--pp 2", TIED, TIED_END),
        ("--pp 2 --pipeline-schedule zb-h1", "", LAST_TWO),
        ("--pp 2 --pipeline-schedule zb-v", "", HEAD),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 2", "", MIDDLE),
        ("--dp 2 --ep 2", EXPERTS, ALL_EXPERTS),
        ("--dp 2 --ep 2", EXPERTS, ROUTERS),
        later("--dp 2", "", EMBEDDINGS),
        later(f"--dp 2 {ZERO3}", EXPERTS, ALL_EXPERTS),
        later(f"--dp 2 {ZERO3}", TIED, TIED_END),
        later("--pp 2", "", EMBEDDINGS),
        later("--pp 2 --pipeline-schedule gpipe", "", LAST_TWO),
        later("--pp 2 --pipeline-schedule zb-h1", FULL, MIDDLE),
    ],
)
def test_layout_equals_plain_torch(ranks: RankPool, layout: str, model: str, freeze: str):
    run = run_of(model, freeze, layout, world_size=2)
    results = ranks.run(train_rank, 2, run)
    check_order([rank.events for rank in results])
    check(results, plain_torch(model, freeze))
    trained = sum(gradient.numel() for gradient in plain_torch(model, freeze).gradients.values())
    if freeze == LAST_TWO and layout.startswith("--pp"):
        check_pipeline_costs(results, trained)
    elif freeze == LAST_TWO and layout.startswith(("--dp", "--cp")):
        check_data_parallel_costs(run, results, trained)


@cache
def one_process(flags: str) -> RankResult:
    return train_rank(run_of(flags, LAST_TWO))


@diagonal(2)
@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        ("lion", f"--dp 2 {ZERO1} {OVERLAP} --overlap-param-gather"),
        ("adafactor", f"--dp 2 {ZERO3}"),
        ("soap", f"--dp 2 {ZERO1} {OVERLAP}"),
        ("muon", "--pp 2"),
        later("lion", "--pp 2"),
        later("adafactor", "--tp 2 --sequence-parallel"),
        later("adafactor", f"--dp 2 {ZERO1} {OVERLAP}"),
        later("soap", "--pp 2"),
        later("soap", f"--dp 2 {ZERO3}"),
        later("muon", f"--dp 2 {ZERO3}"),
        later("muon", "--tp 2 --sequence-parallel"),
    ],
)
def test_every_rule_updates_what_is_left_as_one_process_does(ranks: RankPool, rule: str, layout: str):
    flags = f"--optimizer {rule}"
    alone, results = one_process(flags), ranks.run(train_rank, 2, run_of(flags, LAST_TWO, layout, world_size=2))
    check_order([rank.events for rank in results])
    wanted = assemble_tensors(alone.shards)
    tensors = assemble_tensors([shard for rank in results for shard in rank.shards])
    assert tensors.keys() == wanted.keys() and not alone.changed
    for rank in results:
        assert not rank.changed
        assert rank.losses == pytest.approx(alone.losses, rel=1e-9)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-8)
    for key, tensor in wanted.items():
        torch.testing.assert_close(tensors[key], tensor, rtol=1e-6, atol=1e-9)
    trained = sum(tensor.numel() for (kind, _), tensor in wanted.items() if kind == "gradient")
    if layout == "--pp 2":
        check_pipeline_costs(results, trained, state=alone.state_elements)
    elif rule == "lion":
        assert sum(rank.state_elements for rank in results) == pytest.approx(alone.state_elements, rel=0.01)
