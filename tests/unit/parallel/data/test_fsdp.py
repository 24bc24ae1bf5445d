"""Fully sharded parameters: the arithmetic of the parts, and a toy decoder that trains like one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.config.schema.run import RunConfig
from petatron.layers.forward_context import ForwardContext
from petatron.mesh.comm_record import CommRecord
from petatron.mesh.launch.environment import SINGLE_PROCESS
from petatron.mesh.launch.process_group import start_process_group
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.decoder_spec import DecoderSpec
from petatron.models.optimizer_groups import optimizer_group
from petatron.models.registry import model_spec
from petatron.models.stage_interface import run_layers_sequentially
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.data.fsdp import fully_shard_stages
from petatron.parallel.data.fsdp_param_group import FsdpGradientReducer, FsdpParamGroup, owned_flat_shard, shard_dim
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.expert_parallel_token_dispatcher import apply_expert_parallel
from petatron.parallel.tensor_parallel import apply_tensor_parallel, shard_params, shard_vocabulary
from petatron.sharding.flat_buffer import FlatBufferOptions, flatten_parameters
from petatron.sharding.flat_shard import ParameterGroup, group_tensor_shards
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import ModelParallelCoordinate, Placement, Shard, compute_placement
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.run_stage import run_stage

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 37 --mock-data "
    "--make-vocab-size-divisible-by 5 --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 14 "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --train-iters 3 --lr 5e-3 --weight-decay 0.1 "
    "--global-batch-size 12 --micro-batch-size 1 --init-method-std 0.1"
)
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = (
    f"{UNTIED} --num-experts 4 --moe-layer-freq [0,1] --moe-router-topk 2 --moe-ffn-hidden-size 6 "
    "--moe-router-load-balancing-type none"
)
LEARNED = "--position-embedding-type learned_absolute --normalization LayerNorm"
ONE_BY_ONE = "F0 B0 F1 B1 F2 B2"
IN_FLIGHT = "F0 F1 B0 F2 B1 B2"
STEPS, MICRO_BATCHES = 2, 3
ALONE = Layout()


@dataclass(frozen=True, slots=True)
class Case:
    """What a toy run does; `order` is by micro-batch, of every stage at once unless `cut`: then two stages alternate."""

    layout: Layout = ALONE
    strategy: str = "optim_grads_params"
    flags: str = UNTIED
    order: str = ONE_BY_ONE
    cut: bool = False
    recompute: int = 0  # blocks recomputed together
    dtype: torch.dtype = torch.float64
    reduce_dtype: torch.dtype | None = None


def config(flags: str) -> RunConfig:
    return load_config([*MODEL.split(), *flags.split()]).config


def spec_of(flags: str) -> DecoderSpec:
    spec = model_spec(config(flags))
    assert isinstance(spec, DecoderSpec)
    return spec


def group_specs(flags: str) -> dict[str, GroupSpec]:
    return {name: optimizer_group(OptimizerConfig(), name, param) for name, param in spec_of(flags).params().items()}


def build_stages(case: Case, mesh: ParallelMesh, device: str) -> tuple[list[Decoder], dict[str, Placement]]:
    run, spec = config(case.flags), spec_of(case.flags)
    ends = [PipelineStage((0, 1), has_embedding=True, has_loss=True)]
    if case.cut:
        ends = [
            PipelineStage((0,), has_embedding=True, has_loss=False),
            PipelineStage((1,), has_embedding=False, has_loss=True),
        ]
    sequence = mesh.tp.size > 1
    split = ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=sequence)
    stages, placements = [], {}
    for stage in ends:
        with torch.device(device):
            model, table = spec.build_stage(stage), spec.params(stage)
            model.to(torch.promote_types(case.dtype, torch.float32))
        placements |= shard_params(model, table, split)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # the vocabulary's padding
        apply_tensor_parallel(model, table, mesh.tp, sequence_parallel=sequence, shared_generator=None)
        shard_vocabulary(model, table, mesh.tp)
        apply_expert_parallel(model, mesh, run.moe)
        if case.recompute:
            model.run_layers = partial(run_recomputed, together=case.recompute)
        stages.append(model)
    return stages, placements


def run_recomputed(blocks: Sequence[nn.Module], x: Tensor, passing: ForwardContext, *, together: int) -> Tensor:
    for first in range(0, len(blocks), together):
        x = checkpoint(run_layers_sequentially, blocks[first : first + together], x, passing, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
    return x


@torch.no_grad()
def fill(groups: Sequence[ParameterGroup], flags: str) -> None:
    initial_values = {piece.name: param.init for piece, param in spec_of(flags).logical_tensors()}
    for group in groups:
        for piece, view in group_tensor_shards(group, group.weights()):
            init = initial_values[piece.name]
            init.fill(view, piece, seed=1) if isinstance(init, NormalValues) else view.fill_(1.0)


def batches(step: int, rank: int = 0, size: int = 12) -> list[Batch]:
    """A rank's part of the twelve rows of the global batch, in at most three micro-batches."""
    rows = torch.randint(0, 37, (12, 9), generator=torch.Generator().manual_seed(step))[rank::size]
    parts = rows.split(-(-len(rows) // MICRO_BATCHES))
    return [Batch(part[:, :-1], part[:, 1:], torch.ones(len(part), 8)) for part in parts]


def walk(stages: Sequence[nn.Module], order: str, own: Sequence[Batch], tokens: int) -> None:
    """Forward and backward passes in the given order; a stage hands its output to the next like a pipeline does."""
    kept: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
    for action in order.split():
        number = int(action[1:])
        if action[0] == "F":
            x: Tensor | None = None
            for index, stage in enumerate(stages):
                taken = None if x is None else x.detach().requires_grad_()
                x = run_stage(stage, own[number], taken, aux_loss_scale=None, router_statistics={})
                kept[index, number] = (x, taken)
        else:
            grad = None
            for index in reversed(range(len(stages))):
                y, taken = kept.pop((index, number))
                torch.autograd.backward(y.sum() / tokens if grad is None else y, grad)
                grad = None if taken is None else taken.grad


Pieces = dict[str, list[tuple[tuple[slice, ...], Tensor]]]


def pieces(groups: Sequence[ParameterGroup], what: Callable[[ParameterGroup], list[Tensor]]) -> Pieces:
    found: Pieces = {}
    for group in groups:
        for piece, view in group_tensor_shards(group, what(group)):
            found.setdefault(piece.name, []).append((piece.logical_slices(), view.detach().clone()))
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's run: gradients of each step by logical tensor, weights at the end, norms, and elements spoken for."""

    gradients: list[Pieces]
    weights: Pieces
    norms: list[float]
    spoken_for: int
    logits: Tensor | None


def shard(
    case: Case, stages: Sequence[Decoder], placements: dict[str, Placement], mesh: ParallelMesh
) -> list[FsdpParamGroup]:
    return fully_shard_stages(
        stages,
        placements,
        mesh,
        group_specs(case.flags),
        strategy=case.strategy,  # pyright: ignore[reportArgumentType]
        compute_dtype=case.dtype,
        reduce_dtype=case.reduce_dtype,
    )


def train(case: Case) -> Seen:
    """On one rank of the pool under a sharding strategy; in this process without."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(case.layout, rank)
    stages, placements = build_stages(case, mesh, "meta" if dist.is_initialized() else "cpu")
    if dist.is_initialized():
        groups: Sequence[ParameterGroup] = shard(case, stages, placements, mesh)
        gradients = FsdpGradientReducer(groups, mesh)  # pyright: ignore[reportArgumentType]
    else:
        options = FlatBufferOptions(bucket_size=10**9)
        groups = flatten_parameters(stages, placements, group_specs(case.flags), mesh, options)
        gradients = GradientReducer(groups, mesh, overlap=False)  # pyright: ignore[reportArgumentType]
    fill(groups, case.flags)
    optimizer = MixedPrecisionOptimizer(config(case.flags).optim, groups, mesh)
    seen, norms = [], []
    for step in range(STEPS):
        own = batches(step, mesh.dp.rank, mesh.dp.size)
        order = case.order if len(own) == MICRO_BATCHES else " ".join(f"F{n} B{n}" for n in range(len(own)))
        gradients.start_step(len(own))
        walk(stages, order, own, 12 * 8)
        gradients.finish_grad_sync()
        seen.append(pieces(groups, lambda group: group.grads()))
        norms.append(float(optimizer.step().grad_norm))
    spoken = sum(end - begin for group in groups for s in group.flat_shards for begin, end in s.primary_ranges())
    with torch.no_grad():
        logits = None if case.cut else stages[0].logits(torch.arange(6).unsqueeze(0))
    return Seen(seen, pieces(groups, lambda group: group.weights()), norms, spoken, logits)


def worst(found: Pieces, truth: Pieces) -> float:
    """The largest difference between a rank's pieces and the whole tensors, relative to those."""
    worst = 0.0
    for name, parts in found.items():
        [(_, whole)] = truth[name]
        for where, part in parts:
            assert part.isfinite().all()
            worst = max(worst, float((part - whole[where]).abs().max() / whole.abs().max().clamp(min=1e-12)))
    return worst


@cache
def alone(flags: str) -> Seen:
    return train(Case(flags=flags))


def check(ranks: RankPool, case: Case, *, gradient: float = 1e-11, weight: float = 1e-8) -> None:
    reference = alone(case.flags)
    results = ranks.run(train, case.layout.world_size, case)
    assert sum(seen.spoken_for for seen in results) == reference.spoken_for
    for seen in results:
        for step in range(STEPS):
            assert worst(seen.gradients[step], reference.gradients[step]) < gradient, f"gradients of step {step}"
            assert seen.norms[step] == pytest.approx(reference.norms[step], rel=gradient)
        assert worst(seen.weights, reference.weights) < weight
        if seen.logits is not None and reference.logits is not None:
            assert float((seen.logits - reference.logits).abs().max()) < 100 * weight


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("optim_grads", UNTIED),
        ("optim_grads_params", LEARNED),
        later("optim_grads", LEARNED),
        later("optim_grads_params", UNTIED),
    ],
    ids=["zero2 untied", "zero3 tied", "zero2 tied", "zero3 untied"],
)
def test_four_ranks_equal_one_process(ranks: RankPool, strategy: str, flags: str):
    check(ranks, Case(Layout(dp_shard=4), strategy, flags))


@pytest.mark.parametrize("strategy", [later("optim_grads"), "optim_grads_params"])
def test_hybrid_replicas_of_shards_equal_one_process(ranks: RankPool, strategy: str):
    check(ranks, Case(Layout(dp_outer=2, dp_shard=2), strategy))


@pytest.mark.parametrize("flags", [later(UNTIED), LEARNED], ids=["untied", "tied"])
def test_parts_of_tensor_parallel_parts_equal_one_process(ranks: RankPool, flags: str):
    check(ranks, Case(Layout(dp_shard=2, tp=2), flags=flags))


@diagonal(2)
@pytest.mark.parametrize(
    ("strategy", "cut"),
    [
        ("optim_grads", True),
        later("optim_grads_params", False),
        later("optim_grads", False),
        ("optim_grads_params", True),
    ],
    ids=["zero2 two stages", "zero3 one stage", "zero2 one stage", "zero3 two stages"],
)
def test_micro_batches_in_flight(ranks: RankPool, strategy: str, cut: bool):
    check(ranks, Case(Layout(dp_shard=4), strategy, order=IN_FLIGHT, cut=cut))


@pytest.mark.matrix
@pytest.mark.parametrize("together", [1, later(2)])
def test_recomputed_blocks(ranks: RankPool, together: int):
    check(ranks, Case(Layout(dp_shard=4), order=IN_FLIGHT, recompute=together))


def test_uneven_parts(ranks: RankPool):
    check(ranks, Case(Layout(dp_shard=3), flags=LEARNED))


@diagonal(2)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp_outer=2)], ids=["tp", "dp_outer"])
def test_nobody_to_share_with(ranks: RankPool, layout: Layout):
    check(ranks, Case(layout))


@diagonal(2)
@pytest.mark.parametrize(
    "layout",
    [
        later(Layout(dp_shard=4)),
        Layout(dp_shard=4, ep=2),
        later(Layout(dp_shard=2, ep=2)),
        Layout(dp_outer=2, dp_shard=2, ep=2),
    ],
    ids=["dp4", "dp4 ep2", "dp2 ep2", "hybrid ep2"],
)
def test_experts_are_shared_over_their_own_ranks(ranks: RankPool, layout: Layout):
    check(ranks, Case(layout, flags=EXPERTS))


@pytest.mark.matrix
@pytest.mark.parametrize("reduce_dtype", [later(None), torch.bfloat16])
def test_low_precision_comes_close(ranks: RankPool, reduce_dtype: torch.dtype | None):
    case = Case(Layout(dp_shard=4), dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    check(ranks, case, gradient=0.1, weight=0.1)


def one_step(case: Case, order: str) -> tuple[list[FsdpParamGroup], ParallelMesh]:
    mesh = ParallelMesh(case.layout, dist.get_rank())
    stages, placements = build_stages(case, mesh, "meta")
    groups = shard(case, stages, placements, mesh)
    gradients = FsdpGradientReducer(groups, mesh)
    fill(groups, case.flags)
    gradients.start_step(order.count("F"))
    walk(stages, order, batches(0, size=4), 8)
    gradients.finish_grad_sync()
    return groups, mesh


def _dtypes(case: Case) -> tuple[set[torch.dtype], ...]:
    groups, mesh = one_step(case, "F0 B0")
    gathered = {event.dtype for event in mesh.record.events() if event.op == "all_gather"}
    reduced = {event.dtype for event in mesh.record.events() if event.op in ("reduce_scatter", "all_reduce")}
    kept = {tensor.dtype for group in groups for tensor in (*group.weights(), *group.grads())}
    return gathered, reduced, kept


def test_precision_of_what_is_kept_and_of_what_travels(ranks: RankPool):
    bf16, fp32, hybrid = torch.bfloat16, torch.float32, Layout(dp_outer=2, dp_shard=2)
    assert ranks.run(_dtypes, 4, Case(hybrid, dtype=bf16))[0] == ({bf16}, {fp32}, {fp32})
    assert ranks.run(_dtypes, 4, Case(hybrid, dtype=bf16, reduce_dtype=bf16))[0] == ({bf16}, {bf16}, {fp32})
    assert ranks.run(_dtypes, 4, Case(hybrid, dtype=fp32))[0] == ({fp32}, {fp32}, {fp32})


def _bits_below_bf16(case: Case) -> bool:
    """Whether gradients kept after three micro-batches have bits that bfloat16 has not."""
    groups, _ = one_step(case, IN_FLIGHT)
    return any((group.flat_grads != group.flat_grads.to(torch.bfloat16)).any() for group in groups)


def test_what_travels_in_bf16_adds_up_in_fp32(ranks: RankPool):
    case = Case(Layout(dp_shard=2), dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert all(ranks.run(_bits_below_bf16, 2, case))


def _counts(case: Case, rank: int) -> tuple[int, int]:
    """A rank of a world that does not exist: elements it keeps of dense parameters and of experts."""
    environment = replace(SINGLE_PROCESS, rank=rank, world_size=case.layout.world_size)
    start_process_group(environment, backend="fake")
    mesh = ParallelMesh(case.layout, rank, device=torch.device("meta"))
    stages, placements = build_stages(case, mesh, "meta")
    groups = shard(case, stages, placements, mesh)
    assert all(weight.device.type == "meta" for group in groups for weight in group.weights())
    held = [0, 0]
    for group in groups:
        for stretch, weight, grad in zip(group.flat_shards, group.weights(), group.grads(), strict=True):
            assert weight.shape == grad.shape == (stretch.length,)
            expert = bool(stretch.param_ranges) and stretch.param_ranges[0].placement.expert
            held[expert] += stretch.length
    return held[0], held[1]


def test_any_rank_of_a_world_that_does_not_exist(ranks: RankPool):
    case = Case(Layout(dp_shard=4, tp=2, ep=4), flags=EXPERTS)
    found = [ranks.run(_counts, 1, case, rank)[0] for rank in range(8)]
    reference, _ = build_stages(Case(flags=EXPERTS), ParallelMesh.single(), "meta")
    experts = sum(p.numel() for name, p in reference[0].named_parameters() if ".experts." in name)
    assert sum(expert for _, expert in found) == experts
    split = sum(dense for dense, _ in found)
    whole = sum(p.numel() for p in reference[0].parameters()) - experts
    norms_and_router = 5 * 16 + 4 * 16  # on both tensor-parallel ranks
    assert split == whole + norms_and_router


def _padded_elements(shape: tuple[int, ...], ranks: int) -> int:
    """A parameter whose cut dimension is filled up so that every rank has the same number."""
    dim = shard_dim(shape, ranks)
    return math.prod(shape) // shape[dim] * (-(-shape[dim] // ranks) * ranks)


@settings(max_examples=80, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), ranks=st.integers(1, 6))
def test_every_element_is_kept_once(shape: tuple[int, ...], ranks: int):
    placement = compute_placement("x.weight", shape, Shard(), ModelParallelCoordinate())
    whole = torch.arange(math.prod(shape))
    found = []
    alone = Axis("dp_outer", 1, 0, (0,), None, CommRecord())
    for rank in range(ranks):
        axis = Axis("shard", ranks, rank, tuple(range(ranks)), None, CommRecord())
        stretch = owned_flat_shard(placement, axis, alone)
        flat = torch.empty(stretch.length, dtype=torch.int64)
        for part in stretch.param_ranges:
            flat[part.offset : part.offset + part.end - part.begin] = whole[part.begin : part.end]
        for piece, view in stretch.tensor_shards(flat):
            assert torch.equal(view, whole.view(shape)[piece.logical_slices()])
        found.append(flat)
        assert stretch.length * ranks <= _padded_elements(shape, ranks)
    assert torch.equal(torch.cat(found).sort().values, whole)
    assert found[0].numel() * ranks == _padded_elements(shape, ranks)


def test_a_parameter_of_two_stages_is_refused(ranks: RankPool):
    assert ranks.run(_share_between_stages, 2) == ["a parameter of two stages cannot be fully sharded"] * 2


def _share_between_stages() -> str:
    case = Case(Layout(dp_shard=2), cut=True)
    mesh = ParallelMesh(case.layout, dist.get_rank())
    stages, placements = build_stages(case, mesh, "meta")
    assert stages[0].embedding is not None and stages[1].head is not None
    stages[1].head.weight = stages[0].embedding.weight
    with pytest.raises(AssertionError) as error:
        shard(case, stages, placements, mesh)
    return str(error.value)


def test_a_process_group_is_needed():
    case, mesh = Case(), ParallelMesh.single()
    stages, placements = build_stages(case, mesh, "meta")
    with pytest.raises(AssertionError, match="needs a process group"):
        shard(case, stages, placements, mesh)
