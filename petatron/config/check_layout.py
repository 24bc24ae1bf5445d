"""Rules about the mesh: whether the ranks multiply out and every split divides what it splits."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.fields import flag_of
from petatron.config.schema import RunConfig
from petatron.config.wording import above, at_least, divisors, multiples_near, within

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_size",
    "world_size",
    "ddp_bucket_size",
)


def check_layout(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    sizes_are_sound = True
    for name in _SIZES:
        for problem in at_least(name, getattr(parallel, name), 1):
            sizes_are_sound = False
            yield problem
    yield from above("distributed_timeout_minutes", parallel.distributed_timeout_minutes, 0)
    yield from _launch(config)
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        rule = "needs --use-distributed-optimizer and --overlap-grad-reduce"
        yield Problem("--overlap-param-gather", "", rule, "Add them, or leave it out.")
    if sizes_are_sound:
        yield from _world(config)
        yield from _tensor(config)
        yield from _sequence(config)
        yield from _pipeline(config)
        yield from _expert(config)


def _launch(config: RunConfig) -> Iterator[Problem]:
    launch, world = config.launch, config.parallel.world_size
    yield from at_least("nproc_per_node", launch.nproc_per_node, 1)
    yield from at_least("nnodes", launch.nnodes, 1)
    yield from within("master_port", launch.master_port, 1, 65535, closed=True)
    if launch.nnodes < 1:
        return
    yield from within("node_rank", launch.node_rank, 0, launch.nnodes)
    if launch.nnodes > 1 and launch.master_port is None:
        rule = "machines must agree on a port"
        yield Problem("--nnodes", str(launch.nnodes), rule, "Give the same --master-port on all of them.")
    if world is None or world < 1:
        return
    local = launch.nproc_per_node
    if local is not None and local > 0 and local * launch.nnodes != world:
        rule = f"x --nnodes {launch.nnodes} = {local * launch.nnodes} is not the world size {world}"
        yield Problem("--nproc-per-node", str(local), rule, "Give the layout or the number of ranks.")
    elif local is None and world % launch.nnodes:
        rule = f"does not divide the world size {world}"
        yield Problem("--nnodes", str(launch.nnodes), rule, f"Use {divisors(world)}, or set --nproc-per-node.")


def _world(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    world, dp, model_ranks = parallel.world_size, parallel.data_parallel_size, tp * pp * cp
    product = f"tp {tp} x pp {pp} x cp {cp} = {model_ranks}"
    if world is None:
        return
    if world % model_ranks:
        fix = f"Nearest: {multiples_near(world, model_ranks)}; or change the layout."
        yield Problem("--world-size", str(world), f"is not a multiple of {product}", fix)
    elif dp is not None and dp * model_ranks != world:
        rule = f"x {product} is {dp * model_ranks}, but there are {world} ranks"
        yield Problem("--data-parallel-size", str(dp), rule, f"Use {world // model_ranks}, or leave it out.")


def _tensor(config: RunConfig) -> Iterator[Problem]:
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    heads, groups, ffn = model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size
    where = "--tensor-model-parallel-size"
    if heads > 0 and heads % tp:
        yield Problem(where, str(tp), f"does not divide --num-attention-heads {heads}", f"Use {divisors(heads)}.")
        return  # another tp is needed anyway, so what else this one does not divide is noise
    if groups is not None and groups > 0 and groups % tp and tp % groups:
        rule = f"is neither a multiple nor a divisor of --num-query-groups {groups}"
        usable = [size for size in range(1, heads + 1) if heads % size == 0 and not (groups % size and size % groups)]
        yield Problem(where, str(tp), rule, f"Use {', '.join(str(size) for size in usable)}.")
    if ffn is not None and ffn > 0 and ffn % tp:
        rule = f"is not a multiple of {where} {tp}"
        yield Problem("--ffn-hidden-size", str(ffn), rule, f"Nearest: {multiples_near(ffn, tp)}.")


def _sequence(config: RunConfig) -> Iterator[Problem]:
    parallel, length = config.parallel, config.model.seq_length
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if length <= 0:
        return
    if cp > 1 and length % (2 * cp):
        rule = f"is not a multiple of 2 x --context-parallel-size {cp} = {2 * cp}"
        yield Problem("--seq-length", str(length), rule, f"Nearest: {multiples_near(length, 2 * cp)}.")
    elif parallel.sequence_parallel and tp > 1 and length % (tp * cp):
        split = f"tp {tp} x cp {cp} = {tp * cp}" if cp > 1 else f"--tensor-model-parallel-size {tp}"
        rule = f"is not a multiple of {split}, which --sequence-parallel needs"
        yield Problem("--seq-length", str(length), rule, f"Nearest: {multiples_near(length, tp * cp)}.")


def _pipeline(config: RunConfig) -> Iterator[Problem]:
    pp, chunk = config.parallel.pipeline_model_parallel_size, config.parallel.num_layers_per_virtual_pipeline_stage
    layers = config.model.num_layers
    yield from at_least("num_layers_per_virtual_pipeline_stage", chunk, 1)
    if layers > 0 and layers % pp:
        rule = f"does not divide --num-layers {layers}"
        yield Problem("--pipeline-model-parallel-size", str(pp), rule, f"Use {divisors(layers)}.")
        return
    if chunk is None or chunk < 1 or layers <= 0:
        return
    where = flag_of("num_layers_per_virtual_pipeline_stage")
    if pp == 1:
        yield Problem(where, str(chunk), "needs --pipeline-model-parallel-size above 1", "Leave it out.")
    elif layers // pp % chunk:
        rule = f"does not divide the {layers // pp} layers of a pipeline stage"
        yield Problem(where, str(chunk), rule, f"Use {divisors(layers // pp)}.")


def _expert(config: RunConfig) -> Iterator[Problem]:
    parallel, experts = config.parallel, config.moe.num_experts
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    pp, world = parallel.pipeline_model_parallel_size, parallel.world_size
    if ep > 1 and experts is None:
        yield Problem("--expert-model-parallel-size", str(ep), "needs --num-experts", "Use 1 for a dense model.")
    elif experts is not None and experts > 0 and experts % ep:
        rule = f"does not divide --num-experts {experts}"
        yield Problem("--expert-model-parallel-size", str(ep), rule, f"Use {divisors(experts)}.")
    if experts is None and etp is not None and etp != parallel.tensor_model_parallel_size:
        rule = "splits experts, but --num-experts is not set"
        yield Problem("--expert-tensor-parallel-size", str(etp), rule, "Leave it out.")
    elif experts is not None and world is not None and etp is not None and world % (etp * ep * pp):
        rule = f"x etp {etp} x pp {pp} = {etp * ep * pp} does not divide the world size {world}"
        yield Problem("--expert-model-parallel-size", str(ep), rule, "Change the expert layout or the world size.")
