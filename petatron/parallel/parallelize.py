"""The one ordered recipe that turns stages of a model on the meta device into this rank's part, with real first weights.

Order: stage cut (the caller builds only this rank's stages) -> precision -> tensor/sequence parallel -> kernels and FP8 ->
context parallel -> expert parallel -> recompute -> activation offload -> materialise -> data parallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.config.checks.data_parallel import FSDP
from petatron.config.schema.run import RunConfig
from petatron.estimate.activation_bytes import ActivationShape
from petatron.kernels.registry import Situation, choose
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.models.decoder import Decoder
from petatron.parallel.activation_offload import HostLink, apply_activation_offload
from petatron.parallel.context import connect_context
from petatron.parallel.data.gradient_reduction import GradientSync
from petatron.parallel.data.param_gather_wait import wait_before_use
from petatron.parallel.expert_parallel import connect_experts
from petatron.parallel.fp8 import EightBits, multiply_in_eight_bits
from petatron.parallel.pipeline.combined_forward_backward import CombinedPasses
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.parallel.recompute import apply_recompute
from petatron.parallel.select_kernels import fill_kernels
from petatron.parallel.tensor_parallel import connect, split_vocabulary, split_weights, take_weight_gradients
from petatron.sharding.flat_buffer import FlatGroup, FlatOptions, flatten_parameters
from petatron.sharding.flat_shard import ParameterGroup, group_pieces
from petatron.sharding.fp8_gather import EightBitWeights
from petatron.sharding.initial_values import normal_piece
from petatron.sharding.shard_spec import Piece, Placement, Shard, TensorSplit

if TYPE_CHECKING:
    from petatron.parallel.data.fsdp import ShardedGradients, ShardedGroup

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model says of itself: how its weights are split, the first spread of each (None: a constant), its decay."""

    shards: Mapping[str, Shard]
    initial_std: Callable[[str], float | None]
    initial_constant: Callable[[str], float]
    decays: Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True, slots=True)
class Parallelized:
    """Where parameters lie, in which groups they are updated, and who reduces their gradients."""

    placements: dict[str, Placement]
    groups: Sequence[ParameterGroup]
    gradients: GradientSync | ShardedGradients
    weight_grads: WeightGradQueue
    eight_bits: EightBits
    combined: CombinedPasses | None = None


def parallelize(
    stages: Mapping[int, Decoder],
    recipe: Recipe,
    mesh: ParallelMesh,
    run: RunConfig,
    *,
    dtype: torch.dtype,
    streams: RandomStreams,
    in_flight: Mapping[int, int],
    draw: bool = True,
) -> Parallelized:
    """Apply every kind of parallelism the mesh has.

    `in_flight` is how many micro-batches' activations each stage holds at most. Without `draw` all weights are zero.
    """
    parallel = run.parallel
    # One process has nobody to share with, and no process group to do it over.
    fully_sharded = parallel.data_parallel_sharding_strategy in FSDP and mesh.world.size > 1
    weight_grads = WeightGradQueue()
    placements: dict[str, Placement] = {}
    for stage in stages.values():
        # Fully sharded parameters are the master weights; the precision of the run is that of their gathered copies.
        stage.to(torch.promote_types(dtype, torch.float32) if fully_sharded else dtype)
        placements |= _split(stage, recipe, mesh, run, streams)
        if not fully_sharded:  # fully_shard takes gradients from autograd
            take_weight_gradients(stage, weight_grads)
    _tie(stages, run)
    situation = Situation.of(mesh.device, dtype, compiles=run.train.compile)
    for choice in {str(c) for stage in stages.values() for c in fill_kernels(stage, situation)}:
        _log.debug("%s", choice)
    eight_bits = multiply_in_eight_bits(list(stages.values()), run.precision, situation, keep_weights=not fully_sharded)
    shape = ActivationShape.of(run, device="cuda" if mesh.device.type == "cuda" else "cpu")
    link = HostLink(mesh.device)
    combined = CombinedPasses(mesh.device) if parallel.overlap_moe_expert_parallel_comm else None
    for number, stage in stages.items():
        connect_context(
            stage, mesh, comm_type=parallel.cp_comm_type, sizes=parallel.hierarchical_context_parallel_sizes
        )
        connect_experts(stage, mesh, run.moe, before_wait=None if combined is None else combined.hand_over)
        apply_recompute(stage, run.memory, streams, shape=shape, in_flight=in_flight[number], stages_here=len(stages))
        offloaded = apply_activation_offload(stage, run.memory, link)
        if offloaded is not None:
            _log.info("%s", offloaded)
    weights = _eight_bit_weights(eight_bits, run, mesh, situation)
    if fully_sharded:
        groups, gradients = _shard_fully(stages, placements, recipe, mesh, run, dtype, weights, draw=draw)
    else:
        groups, gradients = _flatten(stages, placements, recipe, mesh, run, weights, draw=draw)
        weight_grads.deliver = gradients.write
    held = sum(stretch.length for group in groups for stretch in group.stretches)
    _log.debug(
        "rank %d updates %s elements of parameters, padding included, %s", mesh.rank, f"{held:,}", str(dtype)[6:]
    )
    return Parallelized(placements, groups, gradients, weight_grads, eight_bits, combined)


def _split(
    stage: Decoder,
    recipe: Recipe,
    mesh: ParallelMesh,
    run: RunConfig,
    streams: RandomStreams,
) -> dict[str, Placement]:
    sequence = run.parallel.sequence_parallel and mesh.tp.size > 1
    split = TensorSplit(
        tp_size=mesh.tp.size,
        tp_rank=mesh.tp.rank,
        sequence_parallel=sequence,
        ep_size=mesh.ep.size,
        ep_rank=mesh.ep.rank,
        etp_size=mesh["etp"].size,
        etp_rank=mesh["etp"].rank,
    )
    placements = split_weights(stage, recipe.shards, split)
    overlap = run.parallel.tp_comm_overlap_chunks if sequence and run.parallel.tp_comm_overlap else None
    connect(stage, recipe.shards, mesh.tp, sequence=sequence, shared=streams.shared, overlap_chunks=overlap)
    split_vocabulary(stage, recipe.shards, mesh.tp)
    return placements


def _eight_bit_weights(
    eight_bits: EightBits, run: RunConfig, mesh: ParallelMesh, situation: Situation
) -> EightBitWeights:
    """The weights that are the same in eight bits for all their products, and how they are made so if they are to travel."""
    if not (run.precision.fp8_param_gather and eight_bits.one_cast and mesh["shard"].size > 1):
        return EightBitWeights(scalings=eight_bits.one_cast)
    choice = choose("weights to eight bits", situation)
    _log.info("%d weights of this rank travel in eight bits; %s", len(eight_bits.one_cast), choice)
    return EightBitWeights(scalings=eight_bits.one_cast, kernels=choice.functions)


def _flatten(
    stages: Mapping[int, Decoder],
    placements: Mapping[str, Placement],
    recipe: Recipe,
    mesh: ParallelMesh,
    run: RunConfig,
    eight_bits: EightBitWeights,
    *,
    draw: bool,
) -> tuple[Sequence[FlatGroup], GradientSync]:
    """Weights whole on every rank in flat buffers; the optimizer's state may be shared (ZeRO-1)."""
    parallel = run.parallel
    _materialise(stages, mesh)
    if draw:
        _fill(_parameter_pieces(stages, placements), recipe, run.train.seed)
    assert parallel.ddp_bucket_size is not None
    options = FlatOptions(
        bucket_size=parallel.ddp_bucket_size,
        sharded=parallel.use_distributed_optimizer,
        overlap_gather=parallel.overlap_param_gather,
        grad_dtype=torch.bfloat16 if run.optim.main_grads_dtype == "bf16" else None,
        eight_bits=eight_bits,
    )
    groups = flatten_parameters(list(stages.values()), placements, recipe.decays, mesh, options, uses=_uses(stages))
    if parallel.overlap_param_gather:
        wait_before_use(list(stages.values()), groups)
    return groups, GradientSync(groups, mesh, overlap=parallel.overlap_grad_reduce, wire_dtype=_wire_dtype(run))


def _uses(stages: Mapping[int, Decoder]) -> Counter[nn.Parameter]:
    """How often each parameter is computed with; a head without a weight of its own takes the embedding's."""
    uses = Counter(parameter for stage in stages.values() for parameter in stage.parameters())
    for stage in stages.values():
        if stage.head is not None and stage.head.weight is None and stage.embedding is not None:
            uses[stage.embedding.weight] += 1
    return uses


def _shard_fully(
    stages: Mapping[int, Decoder],
    placements: Mapping[str, Placement],
    recipe: Recipe,
    mesh: ParallelMesh,
    run: RunConfig,
    dtype: torch.dtype,
    eight_bits: EightBitWeights,
    *,
    draw: bool,
) -> tuple[Sequence[ShardedGroup], ShardedGradients]:
    """Weights and gradients shared too (ZeRO-2 and 3), from the start: a rank never holds more than its part."""
    # torch's fully_shard takes longer to import than all of this package, and every process would wait for it.
    from petatron.parallel.data.fsdp import ShardedGradients, shard_stages

    groups = shard_stages(
        list(stages.values()),
        placements,
        mesh,
        recipe.decays,
        strategy=run.parallel.data_parallel_sharding_strategy,  # pyright: ignore[reportArgumentType]
        compute_dtype=dtype,
        wire_dtype=_wire_dtype(run),
        eight_bits=eight_bits,
    )
    _materialise(stages, mesh)
    if draw:
        _fill((found for group in groups for found in group_pieces(group, group.weights())), recipe, run.train.seed)
        for weight in (weight for group in groups for weight in group.weights()):
            weight.copy_(weight.to(dtype))  # the numbers that masters begin with where weights are not shared
    return groups, ShardedGradients(groups, mesh)


def _wire_dtype(run: RunConfig) -> torch.dtype | None:
    return torch.bfloat16 if run.parallel.grad_reduce_in_bf16 else None


def _tie(stages: Mapping[int, Decoder], run: RunConfig) -> None:
    """Where one rank holds both ends of the model in two stages, a tied head is the embedding itself."""
    first, last = (next((s for s in stages.values() if getattr(s.stage, end)), None) for end in ("embedding", "loss"))
    if run.model.untie_embeddings_and_output_weights or first is None or last is None or first is last:
        return
    assert first.embedding is not None and last.head is not None
    last.head.weight = first.embedding.weight


def _materialise(stages: Mapping[int, Decoder], mesh: ParallelMesh) -> None:
    """Memory for parameters, all zero; what is shared between stages stays shared."""
    made: dict[Tensor, nn.Parameter] = {}
    for stage in stages.values():
        for module in stage.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.device != mesh.device:
                    if parameter not in made:
                        made[parameter] = nn.Parameter(torch.zeros_like(parameter, device=mesh.device))
                    module._parameters[name] = made[parameter]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.zeros_like(buffer, device=mesh.device)


def _parameter_pieces(
    stages: Mapping[int, Decoder], placements: Mapping[str, Placement]
) -> Iterable[tuple[Piece, Tensor]]:
    """What two stages share goes by its name in the first."""
    seen: set[nn.Parameter] = set()
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                for piece in placements[name].pieces:
                    yield piece, parameter[piece.local_slices()]


@torch.no_grad()
def _fill(pieces: Iterable[tuple[Piece, Tensor]], recipe: Recipe, seed: int) -> None:
    """First weights by logical tensor: the same in every layout."""
    for piece, view in pieces:
        if view.device.type == "meta":
            return
        std = recipe.initial_std(piece.name)
        if std is None:
            view.fill_(recipe.initial_constant(piece.name))
        else:
            view.copy_(normal_piece(piece, seed=seed, std=std))
