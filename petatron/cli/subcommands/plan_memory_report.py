"""The report of `petatron plan memory`: the prediction by kind, whether it fits, and the cheapest changes that would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petatron.base.device import detect_device, host_memory_bytes
from petatron.base.format_text import count_with_noun
from petatron.config import LoadedConfig, RunConfig
from petatron.config.layout_and_precision_text import precision_name, precision_text
from petatron.estimate.memory.forecast import (
    HostMemory,
    MemoryForecast,
    forecast_memory,
    format_gigabytes,
    pinned_activation_bytes,
    pinned_optimizer_bytes,
    ranks_per_node,
    recompute_plans,
)
from petatron.estimate.memory.layouts_that_fit import fitting_changes
from petatron.pretrained.open_tokenizer import open_tokenizer
from petatron.schedule.pipeline_plan import num_micro_batches, pipeline_plan
from petatron.train.report.memory_capacity_and_oom import RESERVE_BYTES, describe_changes

_ASSUMED_HOST_BYTES = 1_000_000_000_000
"""The memory of a node where nobody says it and no GPU is here."""


def report(loaded: LoadedConfig, capacity: int | None, host_bytes: int | None) -> int:
    """Prints the plan; returns 1 if it does not fit. `capacity` is the device's bytes, by default those of the GPU here."""
    loaded, _ = open_tokenizer(loaded)
    device = detect_device()
    here = device.kind == "cuda"
    if capacity is None and here:
        capacity = device.memory_bytes
    run, batch = _planned_run(loaded)
    plans = recompute_plans(run, device="cuda")
    forecasts = forecast_memory(run, device="cuda", plans=plans)
    unasked = ", since no --bf16 or --fp16 is given" if precision_name(run.precision) == "fp32" else ""
    print(f"planned for {precision_text(run)}{unasked}\n{batch}")
    print(_table(forecasts))
    assumed = host_bytes is None and not here
    host = HostMemory(
        total_bytes=host_bytes or (host_memory_bytes() if here else _ASSUMED_HOST_BYTES),
        ranks_per_node=ranks_per_node(run),
    )
    pinned = pinned_activation_bytes(run, plans, device="cuda") + pinned_optimizer_bytes(run)
    if pinned:
        print(f"\n{_pinned_text(pinned, host, assumed=assumed)}")
    if capacity is None:
        print("\nGive --device-memory-gb N to be told whether that fits a device.")
        return 0
    most, room = max(forecast.total for forecast in forecasts), capacity - RESERVE_BYTES
    reserve = f"{format_gigabytes(RESERVE_BYTES)} GB left for what is not counted"
    uncounted = f"of {format_gigabytes(capacity)} GB, with {reserve}"
    if most <= room and pinned <= host.bytes_per_rank:
        print(f"\nfits: {format_gigabytes(most)} GB {uncounted}")
        return 0
    where = "does not fit" if most > room else "fits the device, not the host"
    print(f"\n{where}: {format_gigabytes(most)} GB {uncounted}")
    changes = fitting_changes(run, room, host) if most > room else []
    if not changes:
        ranks = count_with_noun(run.parallel.world_size, "rank")
        nothing = f"No setting and no layout of {ranks} is predicted to fit: use more ranks, or a smaller model."
        print(nothing if most > room else "Offload less, or use more nodes.")
    if most > room and (not changes or any(change.pinned_bytes for change in changes)):
        print(_host_text(host, assumed=assumed))
    for number, line in enumerate(describe_changes(changes, ranks_per_node=host.ranks_per_node), start=1):
        print(f"  {number}. {line}")
    return 1


def _pinned_text(pinned: int, host: HostMemory, *, assumed: bool) -> str:
    node = format_gigabytes(pinned * host.ranks_per_node)
    verdict = "" if pinned <= host.bytes_per_rank else ": too much"
    return (
        f"offload pins {format_gigabytes(pinned)} GB of host memory per rank, {node} GB per node of "
        f"{count_with_noun(host.ranks_per_node, 'rank')}{verdict}; {_host_text(host, assumed=assumed)}"
    )


def _host_text(host: HostMemory, *, assumed: bool) -> str:
    usable = format_gigabytes(host.bytes_per_rank * host.ranks_per_node)
    how = ", which is assumed: --host-memory-gb N says another" if assumed else ""
    return f"up to {usable} of a node's {format_gigabytes(host.total_bytes)} GB are pinned{how}"


def _planned_run(loaded: LoadedConfig) -> tuple[RunConfig, str]:
    """Returns the planned run, and the shape and number of its micro-batches as text."""
    run = loaded.config
    given = loaded.origins["train.global_batch_size"].is_explicit
    piped = run.parallel.pipeline_model_parallel_size > 1
    if piped and not given:
        size = run.train.global_batch_size * _micro_batches_to_fill(run)  # derived: one micro-batch for every replica
        run = replace(run, train=replace(run.train, global_batch_size=size))
    count = num_micro_batches(run)
    why = " to fill the pipeline, since no --global-batch-size is given" if piped and not given else ""
    size, length = run.train.micro_batch_size, run.model.seq_length
    micro_batches = f"{count} micro-batch{'es' if count > 1 else ''} of {size} x {length:,} tokens per step{why}"
    return run, f"planned for {micro_batches}; --micro-batch-size, --seq-length and --global-batch-size change that"


def _micro_batches_to_fill(run: RunConfig) -> int:
    """Returns the micro-batches from which on no stage holds more; gpipe holds all, so there it is the number of ranks."""
    pipeline = pipeline_plan(run)
    count = pipeline.ranks
    while pipeline.name != "gpipe" and pipeline.in_flight(2 * count) != pipeline.in_flight(count):
        count *= 2
    return count


def _table(forecasts: Sequence[MemoryForecast]) -> str:
    names = [*forecasts[0].bytes_by_kind(), "total"]
    lines = [f"{'pipeline rank':<14}" + "".join(f"{name:>13}" for name in names) + "   GB"]
    for forecast in forecasts:
        sizes = [*forecast.bytes_by_kind().values(), forecast.total]
        lines.append(f"{forecast.pipeline_rank:<14}" + "".join(f"{format_gigabytes(size):>13}" for size in sizes))
    return "\n".join(lines)
