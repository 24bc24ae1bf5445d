"""How long a step takes beside another one of the same model: what settings that spare memory cost.

Rules of thumb for one rank, meant to order settings, not to promise speed. The link to the host carries 50 GB/s; F is the time of
the layers' forward pass, without the head, at 600 TFLOP/s, or 60 in fp32:

    smaller micro-batch      products of t rows take 1 + 256 / t of their best time; weights and gradients are passed over
                             once more per micro-batch, 12 bytes per element at 4 TB/s
    recompute                the operations that are repeated
    activation offload       bytes / 50 GB/s beyond F on the way out, and beyond 2 F on the way back
    optimizer offload        the state that is away, once in each direction at the same time
    context parallelism      keys and values of the other ranks, three times, at 150 GB/s
    bf16 in place of fp32    a tenth of the time for operations
    sequence parallelism     nothing
    bf16 moments             nothing, and less on the way to the host and back
    bf16 gradients           nothing, though they are half as much to write and to send

Ranks that hold the same weights send their gradients, 4 bytes (2 with `--grad-reduce-in-bf16`), and gather what others have updated,
in the run's precision (a byte with `--fp8-param-gather`). Of n elements, t = n (1 - 1 / ranks) arrive, at 150 GB/s if these ranks have room
in a machine of 8, else at 50. With g and a the seconds of both, m micro-batches, and x+ for what is left of x above 0:

    no_shard                 (2 g - 2 F)+
    optim                    (g - 2 F)+ + a, or (a - F)+ with `--overlap-param-gather`
    optim_grads              m (g - 2 F)+ + (a - F)+, and 1 copy
    optim_grads_params       m ((a - F)+ + (g + b - 2 F)+), and 2 m copies          b: a without what is outside of layers

Without `--overlap-grad-reduce`, nothing hides g of the first two. A copy is of what was gathered, to where it is computed with; in
FP8 both fully sharded strategies cast weights for every use, 2 m times 6 bytes per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petatron.config import RunConfig
from petatron.config.checks.data_parallel import FSDP_STRATEGIES
from petatron.config.pipeline_stages import PipelineStage, pipeline_stages
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.estimate.activation_bytes import ActivationShape
from petatron.estimate.flops import model_flops_per_token, padded_vocab_size
from petatron.estimate.memory.forecast import DeviceKind, recompute_plans
from petatron.estimate.offload_plan import offloaded_bytes
from petatron.estimate.recompute_plan import RecomputePlan, recompute_flops
from petatron.estimate.state_bytes import ElementCounts, element_bytes, local_element_counts, state_bytes
from petatron.mesh.rank_layout import Layout
from petatron.schedule.pipeline_plan import num_micro_batches

_FLOPS, _FLOPS_FP32, _MEMORY_BANDWIDTH = 600e12, 60e12, 4e12
_HOST_BANDWIDTH, _INTRA_NODE_BANDWIDTH, _INTER_NODE_BANDWIDTH = 50e9, 150e9, 50e9
_DEVICES_PER_NODE = 8


def predicted_step_time(run: RunConfig, *, device: DeviceKind = "cuda") -> float:
    """Seconds of a step on one rank by the rules of thumb above; to be compared with others of its kind only."""
    return forward_backward_time(run, recompute_plans(run, device=device), device=device) + optimizer_offload_time(run)


def computes_in_fp32(run: RunConfig) -> bool:
    """Whether the run computes in fp32, or wider."""
    return not (run.precision.bf16 or run.precision.fp16)


def optimizer_offload_time(run: RunConfig) -> float:
    """Seconds for which optimizer state is on its way from the host and back: all that an update adds."""
    if not run.memory.optimizer_cpu_offload:
        return 0.0
    here, first = replace(run, memory=replace(run.memory, optimizer_cpu_offload=False)), pipeline_stages(run)[:1]
    return (state_bytes(here, first).optimizer - state_bytes(run, first).optimizer) / _HOST_BANDWIDTH


def forward_backward_time(run: RunConfig, plans: Sequence[RecomputePlan], *, device: DeviceKind) -> float:
    """Seconds of a step's forward and backward passes, with what ranks send each other, under the plans of all stages."""
    parallel, micro_batches = run.parallel, num_micro_batches(run)
    speed = _FLOPS_FP32 if computes_in_fp32(run) else _FLOPS
    assert run.train.global_batch_size is not None and parallel.world_size is not None
    per_token = model_flops_per_token(
        run.model, run.moe, moe_layer_mask=moe_layers(run), tp_size=parallel.tensor_model_parallel_size
    )
    tokens = run.train.global_batch_size * run.model.seq_length
    ideal = per_token * tokens / parallel.world_size / speed
    shape, every = ActivationShape.from_config(run, device=device), pipeline_stages(run)
    elements = local_element_counts(run, every[:1])
    held = elements.dense + elements.experts
    seconds = ideal * (1.0 + 256.0 / shape.gathered_tokens) + micro_batches * 12.0 * held / _MEMORY_BANDWIDTH
    seconds += _largest_recompute_flops(every, shape, plans) * micro_batches / speed
    head = 6 * run.model.hidden_size * padded_vocab_size(run.model, tp_size=parallel.tensor_model_parallel_size)
    forward = (1.0 - head / per_token) * ideal / micro_batches / 3.0
    seconds += _activation_offload_wait(run, shape, plans[0], every[0], forward_s=forward) * micro_batches
    seconds += _data_parallel_wait(run, elements, micro_batches, forward_s=forward)
    others = parallel.context_parallel_size - 1
    layers = sum(len(stage.layer_indices) for stage in every) / parallel.pipeline_model_parallel_size
    keys = 2 * shape.kv_dim * shape.gathered_tokens * shape.element_bytes
    return seconds + 3.0 * others * keys * layers * micro_batches / _INTRA_NODE_BANDWIDTH


def _largest_recompute_flops(
    all_stages: Sequence[PipelineStage], shape: ActivationShape, plans: Sequence[RecomputePlan]
) -> float:
    """Operations that the busiest stage repeats for one micro-batch."""
    known: dict[tuple[frozenset[str], bool], float] = {}

    def repeated(modules: frozenset[str], mixed: bool) -> float:
        if (modules, mixed) not in known:
            known[modules, mixed] = recompute_flops(shape, modules, is_moe=mixed)
        return known[modules, mixed]

    return max(
        sum(
            repeated(modules, shape.moe_layer_mask[layer])
            for layer, modules in zip(stage.layer_indices, plan.modules, strict=True)
        )
        for stage, plan in zip(all_stages, plans, strict=True)
    )


def _activation_offload_wait(
    run: RunConfig, shape: ActivationShape, plan: RecomputePlan, stage: PipelineStage, *, forward_s: float
) -> float:
    """Seconds for which a micro-batch waits for activations that leave or come back."""
    number = run.memory.cpu_offloading_num_layers
    if number == 0:
        return 0.0
    mixed = tuple(shape.moe_layer_mask[layer] for layer in stage.layer_indices)
    seconds = offloaded_bytes(plan, shape, mixed, number) / _HOST_BANDWIDTH
    return max(0.0, seconds - forward_s) + max(0.0, seconds - 2.0 * forward_s)


def _data_parallel_wait(run: RunConfig, elements: ElementCounts, micro_batches: int, *, forward_s: float) -> float:
    """Seconds for which a step waits for gradients and weights of ranks that hold the same, and for what that adds to do."""
    parallel, layout = run.parallel, Layout.from_config(run.parallel)
    sharded = parallel.data_parallel_sharding_strategy != "no_shard"
    copies = (layout.dp_shard * layout.cp, layout.edp_shard) if sharded else (layout.dp * layout.cp, layout.edp)
    held = elements.dense + elements.experts
    arriving = elements.dense * (1.0 - 1.0 / copies[0]) + elements.experts * (1.0 - 1.0 / copies[1])
    link = _INTRA_NODE_BANDWIDTH if copies[0] * layout.tp <= _DEVICES_PER_NODE else _INTER_NODE_BANDWIDTH
    weight = 1 if run.precision.fp8_param_gather else element_bytes(run)
    sent = arriving * (2 if parallel.grad_reduce_in_bf16 else max(element_bytes(run), 4)) / link
    gathered = arriving * weight / link

    def beyond(seconds: float, hidden: float) -> float:
        return max(0.0, seconds - hidden)

    backward = 2.0 * forward_s
    if parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES and layout.world_size > 1:
        copy = 2.0 * weight * held / _MEMORY_BANDWIDTH
        casts = (
            12.0 * (held - elements.embedding_and_head) / _MEMORY_BANDWIDTH
            if run.precision.fp8_format is not None
            else 0.0
        )
        if parallel.data_parallel_sharding_strategy == "optim_grads":
            return micro_batches * (beyond(sent, backward) + casts) + beyond(gathered, forward_s) + copy
        twice = gathered * (1.0 - elements.embedding_and_head / held)
        waits = beyond(gathered, forward_s) + beyond(sent + twice, backward)
        return micro_batches * (waits + 2.0 * copy + casts)
    behind = backward if parallel.overlap_grad_reduce else 0.0
    if not sharded:
        return beyond(2.0 * sent, behind)
    return beyond(sent, behind) + beyond(gathered, forward_s if parallel.overlap_param_gather else 0.0)
