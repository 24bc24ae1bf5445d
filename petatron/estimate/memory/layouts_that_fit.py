"""Layouts of the same number of ranks under which a run would fit: other tensor, pipeline, context and expert parallel sizes.

Each is taken as it is, or with optimizer state sharded, layers recomputed, or both, whichever is predicted to be fastest; where that does
not fit, optimizer state is on the host or rounded too. The global batch stays, so that a layout with fewer replicas has more
micro-batches, which a pipeline needs anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.config.schema.parallel import MIN_BUCKET_SIZE, MODEL_PARALLEL_SIZES
from petatron.estimate.memory.advice import SuggestedChange, suggest_changes
from petatron.estimate.memory.forecast import (
    DEVICES_PER_NODE,
    DeviceKind,
    HostMemory,
    forecast_memory,
    largest_forecast,
    pinned_activation_bytes,
    pinned_optimizer_bytes,
    recompute_plans,
    state_bytes_per_rank,
)
from petatron.estimate.memory.memory_saving_options import (
    MemoryOption,
    apply_options,
    full_recompute_option,
    is_allowed,
    problems_of,
    sharded_optimizer_option,
    smaller_state_options,
)
from petatron.estimate.memory.peak_moments import frees_gradients
from petatron.estimate.memory.relative_step_time import (
    forward_backward_time,
    optimizer_offload_time,
    predicted_step_time,
)

_TENSOR, _PIPELINE, _CONTEXT = (1, 2, 4, 8), (1, 2, 4, 8, 16), (2, 4)
_LONG_SEQUENCE = 16_384  # tokens from which on context parallelism is worth its communication
_EXPERT = (2, 4, 8, 16, 32, 64)
_MAX_FORECAST_LAYOUTS = 24
_NUM_CHANGES, _NUM_LAYOUTS = 3, 2


def fitting_changes(
    run: RunConfig, capacity_bytes: int, host: HostMemory | None, *, device: DeviceKind = "cuda"
) -> list[SuggestedChange]:
    """Returns the three fastest changes that fit device and host: settings of this layout, and other layouts of as many ranks.

    The fastest layout is always among them. Without `host` its memory is no limit; on a CPU it is the device's, and takes no offload.
    """
    pinned = 0 if device == "cpu" else math.inf if host is None else host.bytes_per_rank
    changes = suggest_changes(run, capacity_bytes, device=device, pinned_capacity_bytes=pinned)
    layouts = suggest_layouts(run, capacity_bytes, device=device, pinned_capacity_bytes=pinned)
    for options in smaller_state_options(run):
        if not changes and not layouts:
            layouts = suggest_layouts(
                run, capacity_bytes, device=device, pinned_capacity_bytes=pinned, required_options=options
            )
    ranked = sorted([*changes, *layouts], key=SuggestedChange.price)[:_NUM_CHANGES]
    if layouts and layouts[0] not in ranked:
        ranked[-1] = layouts[0]
    return ranked


def suggest_layouts(
    run: RunConfig,
    capacity_bytes: int,
    *,
    device: DeviceKind = "cuda",
    pinned_capacity_bytes: float = math.inf,
    required_options: Sequence[MemoryOption] = (),
) -> list[SuggestedChange]:
    """Returns the two fastest layouts, as predicted, whose largest rank needs at most `capacity_bytes`.

    Every one of them has the `required_options`.
    """
    if run.parallel.world_size == 1:
        return []
    existing, changes = problems_of(run), list[SuggestedChange]()
    before, seconds = largest_forecast(run, device=device).total, predicted_step_time(run, device=device)
    for flags, layout in _viable_layouts(run, capacity_bytes, existing, required_options):
        fitting = [
            SuggestedChange(
                flags=" ".join([flags, *(option.flags for option in options)]),
                total_bytes=size,
                saved_bytes=before - size,
                time_cost=time / seconds - 1.0,
                remark="; ".join(option.remark for option in options if option.remark),
                pinned_bytes=pinned,
            )
            for options in _additions(layout, required_options)
            for size, time, pinned in _costs(layout, options, existing, device=device)
            if size <= capacity_bytes and pinned <= pinned_capacity_bytes
        ]
        changes += sorted(fitting, key=SuggestedChange.price)[:1]
    return sorted(changes, key=SuggestedChange.price)[:_NUM_LAYOUTS]


def _costs(
    layout: RunConfig, options: Sequence[MemoryOption], existing: set[str], *, device: DeviceKind
) -> Iterator[tuple[int, float, int]]:
    """Yields bytes, seconds and pinned bytes of a layout with these options, if it may have them."""
    layout = apply_options(layout, options)
    if not is_allowed(layout, existing):
        return
    try:
        plans = recompute_plans(layout, device=device)
    except ConfigError:  # a recompute budget that this layout cannot keep
        return
    size = max(forecast.total for forecast in forecast_memory(layout, device=device, plans=plans))
    seconds = forward_backward_time(layout, plans, device=device) + optimizer_offload_time(layout)
    yield size, seconds, pinned_activation_bytes(layout, plans, device=device) + pinned_optimizer_bytes(layout)


def _viable_layouts(
    run: RunConfig, capacity_bytes: int, existing: set[str], required_options: Sequence[MemoryOption]
) -> Iterator[tuple[str, RunConfig]]:
    """Yields layouts that the validator accepts and whose weights may fit, those that split a layer least first."""
    shard, yielded = sharded_optimizer_option(run), 0
    for flags, layout in _layouts(run):
        least = apply_options(shard.edit(layout) if shard is not None else layout, required_options)
        if yielded == _MAX_FORECAST_LAYOUTS:
            return
        if is_allowed(layout, existing) and _state_fits(least, capacity_bytes):
            yielded += 1
            yield flags, layout


def _state_fits(run: RunConfig, capacity_bytes: int) -> bool:
    """Whether weights, optimizer state and the gradients that are there throughout leave room for anything else."""
    ranks = state_bytes_per_rank(run)
    return all(state.total - (state.gradients if frees_gradients(run) else 0) < capacity_bytes for state in ranks)


def _layouts(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields every other layout of as many ranks with its flags."""
    parallel, world = run.parallel, run.parallel.world_size
    experts = run.moe.num_experts
    expert_sizes = [1] if experts is None else [size for size in (1, *_EXPERT) if experts % size == 0]
    if experts is not None and parallel.expert_model_parallel_size not in expert_sizes:
        expert_sizes.append(parallel.expert_model_parallel_size)
    contexts = [parallel.context_parallel_size]
    if parallel.cp_comm_type == "p2p" and run.model.seq_length >= _LONG_SEQUENCE:
        contexts = sorted({*contexts, *_CONTEXT})
    stages = [parallel.pipeline_model_parallel_size] if _has_stages_of_its_own(run) else _PIPELINE
    sizes = [
        (tp, pp, cp, ep)
        for tp, pp, cp, ep in product(_TENSOR, stages, contexts, expert_sizes)
        if world % (tp * pp * cp) == 0 and tp <= min(world, DEVICES_PER_NODE)
    ]
    now = tuple(getattr(parallel, name) for name in MODEL_PARALLEL_SIZES)
    for tp, pp, cp, ep in sorted(sizes, key=lambda size: (size[0] * size[1] * size[2], size[3])):
        if (tp, pp, cp, ep) != now and run.train.global_batch_size % (world // (tp * pp * cp)) == 0:
            yield _with_sizes(run, tp=tp, pp=pp, cp=cp, ep=ep)


def _has_stages_of_its_own(run: RunConfig) -> bool:
    """Whether someone chose how layers are split into stages, which another pipeline size would contradict."""
    parallel = run.parallel
    chosen = (
        parallel.pipeline_model_parallel_layout,
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
        parallel.num_layers_per_virtual_pipeline_stage,
        parallel.encoder_pipeline_model_parallel_size or None,
    )
    plain = parallel.pipeline_schedule == "1f1b" and parallel.num_virtual_stages_per_pipeline_rank == 1
    return not plain or any(value is not None for value in chosen)


def _with_sizes(run: RunConfig, *, tp: int, pp: int, cp: int, ep: int) -> tuple[str, RunConfig]:
    parallel, world = run.parallel, run.parallel.world_size
    dp, last = world // (tp * pp * cp), _layers_of_last_rank(run, pp)
    layout = replace(
        parallel,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if run.moe.num_experts is not None else tp,
        decoder_last_pipeline_num_layers=last if last is not None else parallel.decoder_last_pipeline_num_layers,
        data_parallel_size=dp,
        ddp_bucket_size=max(MIN_BUCKET_SIZE, 1_000_000 * dp),
    )
    flags = [f"--tensor-model-parallel-size {tp}", *(["--sequence-parallel"] if tp > 1 else [])]
    flags += [f"--pipeline-model-parallel-size {pp}"]
    flags += [f"--decoder-last-pipeline-num-layers {last}"] if last is not None else []
    flags += [f"--context-parallel-size {cp}"] if max(cp, parallel.context_parallel_size) > 1 else []
    if run.moe.num_experts is not None:
        flags += [f"--expert-model-parallel-size {ep}", "--expert-tensor-parallel-size 1"]
    micro = run.train.micro_batch_size
    while micro > 1 and run.train.global_batch_size % (micro * dp):
        micro //= 2
    flags += [f"--micro-batch-size {micro}"] if micro != run.train.micro_batch_size else []
    flags += [f"--data-parallel-size {dp} --global-batch-size {run.train.global_batch_size}"]
    train = replace(run.train, micro_batch_size=micro)
    return " ".join(flags), replace(run, parallel=layout, train=train)


def _layers_of_last_rank(run: RunConfig, pp: int) -> int | None:
    """Returns the layers of the last pipeline rank where a pipeline does not divide them: fewer than the others have."""
    layers = run.model.num_layers
    if layers % pp == 0 or _has_stages_of_its_own(run):
        return None
    last = layers - (pp - 1) * -(-layers // pp)
    return last if last > 0 else None


def _additions(run: RunConfig, required_options: Sequence[MemoryOption]) -> list[Sequence[MemoryOption]]:
    shard = [option for option in (sharded_optimizer_option(run),) if option is not None]
    recompute = [full_recompute_option("uniform", 1)] if run.memory.recompute_granularity is None else []
    optional = [[], shard, recompute, [*shard, *recompute]]
    sets: list[Sequence[MemoryOption]] = [[*options, *required_options] for options in optional]
    return [options for index, options in enumerate(sets) if options not in sets[:index]]
