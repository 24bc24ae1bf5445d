"""Predicts the relative time of a step: the cost of settings that save memory.

Rules of thumb for one rank, meant to rank settings, not to promise speed. The host link has 50 GB/s; F is the time of the layers'
forward, without the head, at 600 TFLOP/s, or 60 in fp32:

    smaller micro-batch      GEMMs of t rows take 1 + 256 / t of their best time; weights and gradients are read and written
                             once more per micro-batch, 12 bytes per element at 4 TB/s
    recompute                the repeated operations
    activation offload       bytes / 50 GB/s beyond F for offload, and beyond 2 F for reload
    optimizer offload        the offloaded state, once in each direction at the same time
    context parallelism      keys and values of the other ranks, three times, at 150 GB/s
    tensor parallelism       inputs and outputs of both branches of a layer in forward, four times, at 300 GB/s; backward overlaps
    expert parallelism       the tokens of MoE layers to their experts and back, in both passes, at 150 or 50 GB/s
    pipeline                 (ranks - 1) / (virtual stages x micro-batches) of forward and backward; a third of it for zb-h1, none for zb-v
    bf16 in place of fp32    a tenth of the time for operations
    sequence parallelism     nothing
    bf16 moments             nothing, and less transfer to the host and back
    bf16 gradients           nothing, though they are half the bytes to write and to send

Data-parallel ranks reduce gradients, 4 bytes (2 with `--grad-reduce-in-bf16`), and all-gather updated weights, in the run's precision
(a byte with `--fp8-param-gather`). Of n elements, t = n (1 - 1 / ranks) are received, at 150 GB/s if these ranks fit in a node of 8,
else at 50. With g and a the seconds of both, m micro-batches, and x+ = max(x, 0):

    no_shard                 (2 g - 2 F)+
    optim                    (g - 2 F)+ + a, or (a - F)+ with `--overlap-param-gather`
    optim_grads              m (g - 2 F)+ + (a - F)+, and 1 copy
    optim_grads_params       m ((a - F)+ + (g + b - 2 F)+), and 2 m copies          b: a without what is outside of layers

Without `--overlap-grad-reduce`, g of the first two is exposed. A copy is of gathered weights, from the all-gather's buffer to the
parameters; in FP8 both fully sharded strategies cast weights for every use, 2 m times 6 bytes per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage, pipeline_stages
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.estimate.flops import head_gemm_elements, model_flops_per_token
from petatron.estimate.memory.forecast import DeviceKind, recompute_plans
from petatron.estimate.memory.peak_moments import offload_plan
from petatron.estimate.recompute_plan import RecomputePlan, recompute_flops
from petatron.estimate.state_bytes import ElementCounts, element_bytes, local_element_counts, state_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.mesh.rank_layout import Layout
from petatron.models.frozen_params import frozen_params
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.schedule.pipeline_plan import num_micro_batches

_FLOPS, _FLOPS_FP32, _MEMORY_BANDWIDTH = 600e12, 60e12, 4e12
_HOST_BANDWIDTH, _INTRA_NODE_BANDWIDTH, _INTER_NODE_BANDWIDTH = 50e9, 150e9, 50e9
_TENSOR_BANDWIDTH, _DEVICES_PER_NODE = 300e9, 8


def predicted_step_time(run: RunConfig, *, device: DeviceKind = "cuda") -> float:
    """Returns the seconds of a step on one rank by the rules of thumb above; comparable with one another only."""
    return forward_backward_time(run, recompute_plans(run, device=device), device=device) + optimizer_offload_time(run)


def computes_in_fp32(run: RunConfig) -> bool:
    """Whether the run computes in fp32, or wider."""
    return not (run.precision.bf16 or run.precision.fp16)


def optimizer_offload_time(run: RunConfig) -> float:
    """Returns the seconds of transferring optimizer state from the host and back: all that an update adds."""
    if not run.memory.optimizer_cpu_offload:
        return 0.0
    base, first = replace(run, memory=replace(run.memory, optimizer_cpu_offload=False)), pipeline_stages(run)[:1]
    return (state_bytes(base, first).optimizer - state_bytes(run, first).optimizer) / _HOST_BANDWIDTH


def forward_backward_time(run: RunConfig, plans: Sequence[RecomputePlan], *, device: DeviceKind) -> float:
    """Returns the seconds of a step's forward and backward with their communication, under the plans of all stages."""
    parallel, micro_batches = run.parallel, num_micro_batches(run)
    speed = _FLOPS_FP32 if computes_in_fp32(run) else _FLOPS
    spec, tp = model_spec(run), parallel.tensor_model_parallel_size
    per_token = model_flops_per_token(spec, tp_size=tp, frozen=frozen_params(run))
    tokens = run.train.global_batch_size * run.model.seq_length
    ideal = per_token * tokens / parallel.world_size / speed
    shape, stages = ActivationShape.from_config(run, device=device), pipeline_stages(run)
    elements = local_element_counts(run, stages[:1])
    local = elements.dense + elements.experts
    seconds = ideal * (1.0 + 256.0 / shape.gathered_tokens) + micro_batches * 12.0 * local / _MEMORY_BANDWIDTH
    seconds += _largest_recompute_flops(spec, stages, shape, plans) * micro_batches / speed
    head = 6 * head_gemm_elements(spec, tp_size=tp)
    unfrozen = model_flops_per_token(spec, tp_size=tp)  # forward costs the same, whatever is frozen
    forward = (1.0 - head / unfrozen) * (ideal * unfrozen / per_token) / micro_batches / 3.0
    seconds += _activation_offload_wait(run, shape, plans, forward_s=forward) * micro_batches
    trained = local_element_counts(run, stages[:1], trained=True)
    seconds += _data_parallel_wait(run, elements, trained, micro_batches, forward_s=forward)
    others = parallel.context_parallel_size - 1
    sent = sum(
        count * branch.context_parallel_bytes(layer.shape_of(shape))
        for layer, count in spec.count_layers().items()
        for branch in layer.branches
    )
    per_rank = sent / parallel.pipeline_model_parallel_size
    seconds += 3.0 * others * per_rank * micro_batches / _INTRA_NODE_BANDWIDTH
    seconds += _model_parallel_wait(run, shape) * micro_batches
    return seconds * (1.0 + _bubble(run, micro_batches))


def _model_parallel_wait(run: RunConfig, shape: ActivationShape) -> float:
    """Returns the seconds that a micro-batch waits for activations between tensor-parallel ranks, and for tokens between experts."""
    parallel, pp = run.parallel, run.parallel.pipeline_model_parallel_size
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    token = run.model.hidden_size * element_bytes(run)
    inputs = shape.gathered_tokens * token * (1.0 - 1.0 / tp)
    seconds = 4.0 * inputs * run.model.num_layers / pp / _TENSOR_BANDWIDTH
    if run.moe.num_experts is None or ep == 1:
        return seconds
    link = _INTRA_NODE_BANDWIDTH if ep <= _DEVICES_PER_NODE else _INTER_NODE_BANDWIDTH
    dispatched = shape.gathered_tokens / tp * run.moe.moe_router_topk * token * (1.0 - 1.0 / ep)
    return seconds + 4.0 * dispatched * sum(moe_layers(run)) / pp / link


def _bubble(run: RunConfig, micro_batches: int) -> float:
    """Returns the idle time of a pipeline, as a share of the time of its passes."""
    parallel = run.parallel
    share = {"zb-h1": 1.0 / 3.0, "zb-v": 0.0}.get(parallel.pipeline_schedule, 1.0)
    stages = parallel.num_virtual_stages_per_pipeline_rank * micro_batches
    return share * (parallel.pipeline_model_parallel_size - 1) / stages


def _largest_recompute_flops(
    spec: ModelSpec, all_stages: Sequence[PipelineStage], shape: ActivationShape, plans: Sequence[RecomputePlan]
) -> float:
    """Returns the operations that the stage with most of them repeats for one micro-batch."""
    kinds = {
        pair
        for stage, plan in zip(all_stages, plans, strict=True)
        for pair in zip(spec.stage_layers(stage), plan.modules, strict=True)
    }
    repeated = {(layer, modules): recompute_flops(layer, shape, modules) for layer, modules in kinds}
    return max(
        sum(repeated[pair] for pair in zip(spec.stage_layers(stage), plan.modules, strict=True))
        for stage, plan in zip(all_stages, plans, strict=True)
    )


def _activation_offload_wait(
    run: RunConfig, shape: ActivationShape, plans: Sequence[RecomputePlan], *, forward_s: float
) -> float:
    """Returns the seconds that a micro-batch waits for offload and reload of activations."""
    if not run.memory.offloads_activations:
        return 0.0
    seconds = offload_plan(run, plans, 0, shape).total_bytes / _HOST_BANDWIDTH
    return max(0.0, seconds - forward_s) + max(0.0, seconds - 2.0 * forward_s)


def _data_parallel_wait(
    run: RunConfig, elements: ElementCounts, trained: ElementCounts, micro_batches: int, *, forward_s: float
) -> float:
    """Returns the seconds that a step waits for gradient reduction and weight all-gather, and the time of their copies and casts."""
    parallel, layout = run.parallel, Layout.from_config(run.parallel)
    sharded = parallel.data_parallel_sharding_strategy != "no_shard"
    replicas = (layout.dp_shard * layout.cp, layout.edp_shard) if sharded else (layout.dp * layout.cp, layout.edp)
    local = elements.dense + elements.experts
    fully_sharded = parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES and layout.world_size > 1
    received, gathered = (
        counts.dense * (1.0 - 1.0 / replicas[0]) + counts.experts * (1.0 - 1.0 / replicas[1])
        for counts in (trained, elements if fully_sharded else trained)
    )
    link = _INTRA_NODE_BANDWIDTH if replicas[0] * layout.tp <= _DEVICES_PER_NODE else _INTER_NODE_BANDWIDTH
    weight = 1 if run.precision.fp8_param_gather else element_bytes(run)
    reduce = received * (2 if parallel.grad_reduce_in_bf16 else max(element_bytes(run), 4)) / link
    gather = gathered * weight / link

    def exposed(seconds: float, hidden: float) -> float:
        return max(0.0, seconds - hidden)

    backward = 2.0 * forward_s
    if fully_sharded:
        copy = 2.0 * weight * local / _MEMORY_BANDWIDTH
        in_fp8 = local - elements.embedding_and_head if run.precision.fp8_format is not None else 0
        casts = 12.0 * in_fp8 / _MEMORY_BANDWIDTH
        if parallel.data_parallel_sharding_strategy == "optim_grads":
            return micro_batches * (exposed(reduce, backward) + casts) + exposed(gather, forward_s) + copy
        regather = gather * (1.0 - elements.embedding_and_head / local)
        waits = exposed(gather, forward_s) + exposed(reduce + regather, backward)
        return micro_batches * (waits + 2.0 * copy + casts)
    hidden = backward if parallel.overlap_grad_reduce else 0.0
    if not sharded:
        return exposed(2.0 * reduce, hidden)
    return exposed(reduce, hidden) + exposed(gather, forward_s if parallel.overlap_param_gather else 0.0)
