"""Rules about the layout: sizes multiply to the world size, every split divides evenly, ZeRO strategies fit, and pipeline schedule, virtual
stages and layer split are compatible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.base.loopback_address import is_default_loopback
from petatron.config.pipeline_stages import stage_problems
from petatron.config.schema.fields import flag_name, join_with_or
from petatron.config.schema.parallel import FSDP_STRATEGIES, MESH_SIZES, MODEL_PARALLEL_SIZES, RawParallelConfig
from petatron.config.schema.pipeline_schedules import ONE_STAGE_PER_RANK, SPLIT_BACKWARD_SCHEDULES
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL
from petatron.config.schema.training import LaunchConfig
from petatron.config.setting_bounds_and_conflicts import at_least, divisors, multiples_near, or_default, within

_SIZES = (*MESH_SIZES, "ddp_bucket_size")
_OVERLAP = "--tp-comm-overlap"
_HIERARCHY = "--hierarchical-context-parallel-sizes"


def check_layout(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    parallel = config.parallel
    sizes_are_sound = True
    for name in _SIZES:
        for problem in at_least(name, getattr(parallel, name), 1):
            sizes_are_sound = False
            yield problem
    yield from _launch(config)
    if require_training and config.launch.nnodes > 1:
        yield from _meeting_point(config.launch)
    if sizes_are_sound:
        yield from _world(config)
        yield from _tensor(config)
        yield from _sequence(config)
        yield from _tp_comm_overlap(config)
        yield from _context(config)
        yield from _expert(config)


def _launch(config: RawRunConfig) -> Iterator[Problem]:
    launch, world = config.launch, config.parallel.world_size
    if launch.nnodes < 1:
        return
    yield from within("node_rank", launch.node_rank, 0, launch.nnodes)
    if world is None or world < 1:
        return
    world += max(0, config.rollout.rollout_ranks)
    local = launch.nproc_per_node
    if local is not None and local > 0 and local * launch.nnodes != world:
        rule = f"x --nnodes {launch.nnodes} = {local * launch.nnodes} is not the world size {world}"
        yield Problem("--nproc-per-node", str(local), rule, "Give the layout or the number of ranks.")
    elif local is None and world % launch.nnodes:
        rule = f"does not divide the world size {world}"
        yield Problem("--nnodes", str(launch.nnodes), rule, f"Use {divisors(world)}, or set --nproc-per-node.")


def _meeting_point(launch: LaunchConfig) -> Iterator[Problem]:
    """Checks that machines with ranks of their own have a common address and port; a plan starts no ranks."""
    if launch.master_port is None:
        rule = "machines must agree on a port"
        yield Problem("--nnodes", str(launch.nnodes), rule, "Give the same --master-port on all of them.")
    if is_default_loopback(launch.master_addr):
        rule = f"means each of the {launch.nnodes} machines itself, so that they would never meet"
        fix = "Give the name or address of the machine with --node-rank 0, the same on all of them."
        yield Problem("--master-addr", or_default("master_addr", launch.master_addr), rule, fix)


def _world(config: RawRunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    tp, pp, cp, _ = (getattr(parallel, name) for name in MODEL_PARALLEL_SIZES)
    world, dp, model_ranks = parallel.world_size, parallel.data_parallel_size, tp * pp * cp
    product = f"tp {tp} x pp {pp} x cp {cp} = {model_ranks}"
    if world is None:
        return
    if world % model_ranks:
        fix = (
            f"Nearest: {multiples_near(world, model_ranks)}; or change the layout. `petatron train` starts the ranks it needs; "
            "a Python script is started on N ranks by `torchrun --nproc-per-node N`."
        )
        yield Problem("--world-size", str(world), f"is not a multiple of {product}", fix)
    elif dp is not None and dp * model_ranks != world:
        rule = f"x tp {tp} x pp {pp} x cp {cp} is {dp * model_ranks}, but there are {world} ranks"
        yield Problem("--data-parallel-size", str(dp), rule, f"Use {world // model_ranks}, or leave it out.")


def _tensor(config: RawRunConfig) -> Iterator[Problem]:
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    heads, groups, ffn = model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size
    where = "--tensor-model-parallel-size"
    if heads > 0 and heads % tp:
        yield Problem(where, str(tp), f"does not divide --num-attention-heads {heads}", f"Use {divisors(heads)}.")
        return  # another tp is needed anyway, so further indivisible sizes are noise
    if groups is not None and groups > 0 and groups % tp and tp % groups:
        rule = f"is neither a multiple nor a divisor of --num-query-groups {groups}"
        usable = [size for size in range(1, heads + 1) if heads % size == 0 and not (groups % size and size % groups)]
        yield Problem(where, str(tp), rule, f"Use {', '.join(str(size) for size in usable)}.")
    if ffn is not None and ffn > 0 and ffn % tp:
        rule = f"is not a multiple of {where} {tp}"
        yield Problem("--ffn-hidden-size", str(ffn), rule, f"Nearest: {multiples_near(ffn, tp)}.")


def _sequence(config: RawRunConfig) -> Iterator[Problem]:
    yield from _length_shares(config.parallel, "--seq-length", config.model.seq_length)
    if config.model.model_type == ENCODER_DECODER_MODEL:
        yield from _length_shares(config.parallel, "--decoder-seq-length", config.model.decoder_seq_length or 0)


def _length_shares(parallel: RawParallelConfig, flag: str, length: int) -> Iterator[Problem]:
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if length <= 0:
        return
    if cp > 1 and length % (2 * cp):
        rule = f"is not a multiple of 2 x --context-parallel-size {cp} = {2 * cp}"
        yield Problem(flag, str(length), rule, f"Nearest: {multiples_near(length, 2 * cp)}.")
    elif parallel.sequence_parallel and tp > 1 and length % (tp * cp):
        split = f"tp {tp} x cp {cp} = {tp * cp}" if cp > 1 else f"--tensor-model-parallel-size {tp}"
        rule = f"is not a multiple of {split}, which --sequence-parallel needs"
        yield Problem(flag, str(length), rule, f"Nearest: {multiples_near(length, tp * cp)}.")


def _tp_comm_overlap(config: RawRunConfig) -> Iterator[Problem]:
    """Checks the overlap of tensor-parallel communication; at tp 1 it has no effect."""
    parallel = config.parallel
    if parallel.tp_comm_overlap_chunks is not None and parallel.tp_comm_overlap_chunks < 2:
        rule = "leaves no chunk to communicate beside the GEMM of another"
        yield Problem(f"{_OVERLAP}-chunks", str(parallel.tp_comm_overlap_chunks), rule, "Use 2 or more.")
    if not parallel.tp_comm_overlap or parallel.tensor_model_parallel_size == 1:
        return
    if not parallel.sequence_parallel:
        rule = "overlaps the all-gathers and reduce-scatters of --sequence-parallel, which is off"
        yield Problem(_OVERLAP, "", rule, "Add --sequence-parallel, or leave it out.")


def _context(config: RawRunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    cp, kind = parallel.context_parallel_size, parallel.cp_comm_type
    sizes = parallel.hierarchical_context_parallel_sizes
    if sizes and kind != "a2a+p2p":
        rule = f"is for --cp-comm-type a2a+p2p, but that is {kind}"
        yield Problem(_HIERARCHY, _joined(sizes), rule, "Leave it out, or use a2a+p2p.")
        return
    if sizes and (len(sizes) != 2 or min(sizes) < 1 or (cp > 1 and sizes[0] * sizes[1] != cp)):
        rule = f"is not two positive numbers whose product is --context-parallel-size {cp}"
        yield Problem(_HIERARCHY, _joined(sizes), rule, f"Use, for instance, 1 {cp}; or leave it out.")
    elif cp == 1:
        return
    elif kind == "a2a":
        fix = "Use p2p, all_gather or a2a+p2p, or another layout."
        yield from _all_to_all_heads(config, cp, "--cp-comm-type", kind, fix)
    elif sizes:
        fix = "Use a smaller first number, or leave it out."
        yield from _all_to_all_heads(config, sizes[0], _HIERARCHY, _joined(sizes), fix)


def _all_to_all_heads(config: RawRunConfig, num_ranks: int, where: str, value: str, fix: str) -> Iterator[Problem]:
    """Checks that all-to-all context parallelism divides a tensor-parallel rank's heads evenly."""
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads < tp or heads % tp or groups is None or groups < 1:
        return
    for count, kind in ((heads // tp, "query"), (max(1, groups // tp), "key/value")):
        if count % num_ranks:
            rule = f"splits the {count} {kind} heads of a rank over {num_ranks} ranks, which does not divide"
            yield Problem(where, value, rule, fix)
            return


def _joined(numbers: tuple[int, ...]) -> str:
    return " ".join(str(number) for number in numbers)


def _expert(config: RawRunConfig) -> Iterator[Problem]:
    parallel, experts = config.parallel, config.moe.num_experts
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    pp, world = parallel.pipeline_model_parallel_size, parallel.world_size
    if ep > 1 and experts is None:
        yield Problem("--expert-model-parallel-size", str(ep), "needs --num-experts", "Use 1 for a dense model.")
    elif experts is not None and experts > 0 and experts % ep:
        rule = f"does not divide --num-experts {experts}"
        yield Problem("--expert-model-parallel-size", str(ep), rule, f"Use {divisors(experts)}.")
    if experts is not None and world is not None and etp is not None and world % (etp * ep * pp):
        rule = f"x etp {etp} x pp {pp} = {etp * ep * pp} does not divide the world size {world}"
        yield Problem("--expert-model-parallel-size", str(ep), rule, _more_ranks(config, etp * ep * pp))
    if experts is not None and etp is not None:
        yield from _expert_widths(config, etp)


def _more_ranks(config: RawRunConfig, expert_ranks: int) -> str:
    """Returns flags for the smallest world size, not below the current one, that the dense and the expert layout both divide."""
    parallel, nodes = config.parallel, config.launch.nnodes
    model_ranks = math.prod(getattr(parallel, name) for name in MODEL_PARALLEL_SIZES[:3])
    step = math.lcm(expert_ranks, model_ranks)
    ranks = -(-(parallel.world_size or 1) // step) * step
    local = f" or --nproc-per-node {ranks // nodes}" if nodes > 0 and ranks % nodes == 0 else ""
    return f"Use {ranks} ranks (--dp {ranks // model_ranks}{local}), or fewer for the experts."


def _expert_widths(config: RawRunConfig, etp: int) -> Iterator[Problem]:
    moe, parallel, tp = config.moe, config.parallel, config.parallel.tensor_model_parallel_size
    width, shared = moe.moe_ffn_hidden_size, moe.moe_shared_expert_intermediate_size
    if width is not None and width > 0 and width % etp:
        rule = f"is not a multiple of --expert-tensor-parallel-size {etp}"
        yield Problem("--moe-ffn-hidden-size", str(width), rule, f"Nearest: {multiples_near(width, etp)}.")
    if shared is not None and shared > 0 and shared % tp:
        rule = f"is not a multiple of --tensor-model-parallel-size {tp}"
        where = "--moe-shared-expert-intermediate-size"
        yield Problem(where, str(shared), rule, f"Nearest: {multiples_near(shared, tp)}.")
    if tp > 1 and not parallel.sequence_parallel:
        rule = f"cannot be turned off with --num-experts and --tensor-model-parallel-size {tp}: each token must be routed once"
        yield Problem("--sequence-parallel", "", rule, "Leave it out; it is turned on by itself.")


_STRATEGY = "--data-parallel-sharding-strategy"
_INSTANCES = "--num-distributed-optimizer-instances"


def check_data_parallel(config: RawRunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    if strategy not in FSDP_STRATEGIES:
        yield from _optimizer_sharded(parallel, strategy)
    elif parallel.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES:
        rule = f"splits the backward pass, which would bypass the gradient reduction of {_STRATEGY} {strategy}"
        fix = "Use 1f1b, interleaved or gpipe; or optim."
        yield Problem("--pipeline-schedule", str(parallel.pipeline_schedule), rule, fix)
    yield from _instances(parallel, experts=config.moe.num_experts is not None)
    if parallel.grad_reduce_in_bf16 and not config.precision.bf16:
        yield Problem("--grad-reduce-in-bf16", "", "needs --bf16", "Give it, or leave this out.")


def _optimizer_sharded(parallel: RawParallelConfig, strategy: str | None) -> Iterator[Problem]:
    sharded = parallel.use_distributed_optimizer
    if strategy == "no_shard" and sharded:
        rule = "contradicts --use-distributed-optimizer"
        yield Problem(_STRATEGY, strategy, rule, "Use optim, or leave one of them out.")
    elif strategy == "optim" and not sharded:
        rule = "contradicts --no-use-distributed-optimizer"
        yield Problem(_STRATEGY, strategy, rule, "Leave one of them out.")
    if parallel.overlap_param_gather and not (sharded and parallel.overlap_grad_reduce):
        rule = "needs --use-distributed-optimizer and --overlap-grad-reduce"
        yield Problem("--overlap-param-gather", "", rule, "Add them, or leave it out.")


def _instances(parallel: RawParallelConfig, *, experts: bool) -> Iterator[Problem]:
    """Checks that each optimizer instance is a full replica of dense parameters and experts."""
    count, dp = parallel.num_distributed_optimizer_instances, parallel.data_parallel_size
    yield from at_least("num_distributed_optimizer_instances", count, 1)
    if count < 1 or dp is None or dp < 1:
        return
    if dp % count:
        yield Problem(_INSTANCES, str(count), f"does not divide the data-parallel size {dp}", f"Use {divisors(dp)}.")
        return
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    ranks = dp * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    if experts and etp is not None and ep > 0 and etp > 0 and ranks % (ep * etp) == 0:
        replicas = ranks // (ep * etp)
        if replicas % count:
            rule = f"does not divide the {replicas} copies of each expert (edp)"
            usable = [size for size in range(1, replicas + 1) if replicas % size == 0 and dp % size == 0]
            yield Problem(_INSTANCES, str(count), rule, f"Use {join_with_or(usable)}.")


_STAGE_SIZES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
_SCHEDULE, _VIRTUAL = "--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"


def check_pipeline(config: RawRunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    low = [problem for name in (*_STAGE_SIZES, _GROUP) for problem in at_least(name, getattr(parallel, name), 1)]
    yield from low
    if low or parallel.pipeline_model_parallel_size < 1:
        return
    mismatch = list(_schedule(parallel))
    yield from mismatch
    if not mismatch:
        yield from stage_problems(config)
    group, pp = getattr(parallel, _GROUP), parallel.pipeline_model_parallel_size
    if group is not None and group < pp and parallel.pipeline_schedule == "interleaved":  # no effect elsewhere
        rule = f"is below --pipeline-model-parallel-size {pp}, so a rank would wait for its own output"
        yield Problem(flag_name(_GROUP), str(group), rule, f"Use {pp} or more.")


def _schedule(parallel: RawParallelConfig) -> Iterator[Problem]:
    pp, schedule = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    chunked = parallel.num_layers_per_virtual_pipeline_stage is not None
    if pp == 1 and (chunked or schedule in ("interleaved", "zb-v") or (virtual or 1) > 1):
        where, value = _cause(parallel)
        yield Problem(where, value, "needs --pipeline-model-parallel-size above 1", "Leave it out.")
    elif schedule == "zb-v" and virtual is not None and virtual != 2:
        rule = f"has exactly 2 stages per rank, but {virtual} {'was' if virtual == 1 else 'were'} asked for"
        yield Problem(_SCHEDULE, schedule, rule, f"Leave out {_cause(parallel)[0]}, or use another schedule.")
    elif schedule == "interleaved" and virtual == 1:
        rule = "needs more than one virtual stage per rank"
        yield Problem(_SCHEDULE, schedule, rule, f"Give {_VIRTUAL} 2, say, or use 1f1b.")
    elif schedule in ONE_STAGE_PER_RANK and virtual is not None and virtual > 1:
        rule = f"has one stage per rank, but there are {virtual} virtual stages"
        yield Problem(_SCHEDULE, schedule, rule, "Use interleaved, or leave it out.")


def _cause(parallel: RawParallelConfig) -> tuple[str, str]:
    """Returns the flag that determined how many stages a rank holds, with its value."""
    for name in ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"):
        if (value := getattr(parallel, name)) is not None:
            return flag_name(name), str(value)
    schedule, virtual = parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank
    if (schedule, virtual) in (("zb-v", 2), ("interleaved", 1)):
        return _SCHEDULE, str(schedule)
    return _VIRTUAL, str(virtual)
