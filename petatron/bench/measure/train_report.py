"""The report of `petatron bench train`: tokens per second, MFU in both conventions, memory, ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from petatron.base.device import DeviceInfo
from petatron.bench import BenchResult
from petatron.bench.measure.format_si_units import format_si
from petatron.bench.measure.hardware_and_versions import versions
from petatron.bench.measure.peak_memory_breakdown import OUTSIDE_LAYERS
from petatron.bench.measure.step_time_roofline import step_floor
from petatron.bench.peers import OURS, OWN_BF16, BenchSpec, version
from petatron.bench.peers.bench_workload import NUM_BATCHES
from petatron.config.optimizer_registry import rule_spec
from petatron.config.schema.sections.sparse_attention import has_sparse_attention
from petatron.config.schema.sections.vision_language import VISION_LANGUAGE_MODEL
from petatron.estimate.flops import flops_formula, linear_attention_kind, model_flops_per_token, parameter_count
from petatron.models.frozen_params import frozen_params
from petatron.models.registry import model_spec
from petatron.optim.loss_scaler import compute_dtype

# How far losses of the same model on the same tokens may be apart, as a share of the first loss, and over how many steps they
# are compared. Not of the loss itself: tokens repeat, and what is left of the loss once they are memorized is noise.
_LOSS_TOLERANCE, _COMPARED_STEPS = 5e-3, 10


@dataclass(slots=True)
class TrainMeasurements:
    """Measurements by contender; `paired_speedups` are how many times as fast ours was, by peer and pair of blocks."""

    contenders: dict[str, dict[str, Any]] = field(default_factory=dict)
    paired_speedups: dict[str, list[float]] = field(default_factory=dict)
    gpu_readings: dict[str, str] = field(default_factory=dict)
    separate_processes: bool = False
    """Each ran in its own process."""
    one_peer_at_a_time: bool = False
    """Peers ran one after the other against ours, because not all of them fit the device."""
    host: dict[str, Any] | None = None
    """What our step costs the host, if asked for."""

    @property
    def description(self) -> str:
        if len(self.contenders) == 1:
            return "alone, in two processes of its own" if self.separate_processes else "alone, in one process"
        if self.separate_processes:
            return "each in a process of its own, there and back"
        return f"alternating in one process{', each peer in turn beside ours' if self.one_peer_at_a_time else ''}"


def merge_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges two measurements of one contender: each is a block, and memory is the larger."""
    if any(visit.get("out_of_memory") for visit in runs):
        return {"out_of_memory": True}
    blocks = [[value for block in visit["blocks_ms"] for value in block] for visit in runs]
    peaks = [visit["peak_bytes"] for visit in runs if visit["peak_bytes"] is not None]
    return {**runs[0], "blocks_ms": blocks, "peak_bytes": max(peaks, default=None)}


def report(
    spec: BenchSpec, device: DeviceInfo, measurements: TrainMeasurements, *, bandwidth: float | None = None
) -> BenchResult:
    """Rows for people and values for programs; `bandwidth` is that of a copy on the device, in bytes per second."""
    model, frozen = model_spec(spec.run), frozen_params(spec.run)
    flops = {causal: model_flops_per_token(model, causal=causal, frozen=frozen) for causal in (False, True)}
    contenders: dict[str, dict[str, Any]] = {}
    for name, values in measurements.contenders.items():
        known = version(name, spec)
        contenders[name] = _derived_metrics(values, spec, device, flops) | ({"version": known} if known else {})
    ours = contenders.get(OURS)
    ratios: dict[str, Any] = {}
    rows = [*_setup_rows(spec, device, measurements)]
    for name, values in contenders.items():
        rows.append((f"{name} {values['version']}" if "version" in values else name, _speed_text(values)))
        if values.get("breakdown"):
            times, total = values["breakdown"]["ms"], values["breakdown"]["step_ms"] or 1.0
            rows += [(f"  {name}", f"{ms:8.2f} ms  {ms / total:6.1%}") for name, ms in times.items() if ms]
        if values.get("memory"):
            rows += _memory_rows(values["memory"])
    rows += [] if measurements.host is None else [("host", _host_text(measurements.host))]
    for name, pairs in measurements.paired_speedups.items():
        assert ours is not None
        ratios[name] = _compare_with_peer(ours, contenders[name], pairs)
        rows += _ratio_rows(name, ratios[name])
    floor = step_floor(spec, device, bandwidth=bandwidth)
    if floor is not None:
        full_ms = spec.tokens * flops[False] / (device.peak("bfloat16") or math.inf) * 1e3
        rows += floor.rows(step_ms=None if ours is None else ours.get("step_ms"), full_flops_ms=full_ms)
    config = spec.run.model
    kinds = {
        "experts": spec.run.moe.num_experts is not None,
        "latent": config.multi_latent_attention,
        "hybrid": config.hybrid_layer_pattern is not None,
        "linear": linear_attention_kind(model),
        "gated": config.attention_output_gate,
        "sparse": has_sparse_attention(config),
        "images": config.model_type == VISION_LANGUAGE_MODEL,
    }
    for causal, label in ((False, "full"), (True, "causal")):
        per_token = format_si(flops[causal], "FLOP per token", digits=5)
        rows.append((f"FLOPs, {label}", f"{flops_formula(causal=causal, **kinds)} = {per_token}"))
    values = {
        "device": {"name": device.name, "memory_bytes": device.memory_bytes, "peak_flops": device.peak("bfloat16")},
        "versions": versions(),
        "model": {"parameters": _parameters(spec), "seq_length": spec.run.model.seq_length},
        "micro_batch_size": spec.run.train.micro_batch_size,
        "fp8_recipe": spec.fp8_recipe,
        "compile": spec.compile,
        "flops_per_token": {"full": flops[False], "causal": flops[True]},
        "contenders": contenders,
        "floor": None if floor is None else floor.as_json(),
        "ratio": ratios,
        "clocks": measurements.gpu_readings,
        "apart": measurements.separate_processes,
        "in_pairs": measurements.one_peer_at_a_time,
        "host": measurements.host,
    }
    return BenchResult(tuple(rows), values)


def _setup_rows(spec: BenchSpec, device: DeviceInfo, measurements: TrainMeasurements) -> list[tuple[str, str]]:
    run = spec.run
    dtype = str(compute_dtype(run.precision)).removeprefix("torch.").replace("bfloat16", "bf16")
    gemms = dtype if spec.fp8_recipe is None else f"FP8 {spec.fp8_recipe}"
    masters = "fp32 master weights, " if dtype in ("bf16", "float16") else ""
    how = "compiled" if spec.compile else "not compiled"
    optimizer = rule_spec(run.optim).title
    peak, size = device.peak("bfloat16"), f"{run.train.global_batch_size} x {run.model.seq_length}"
    repeated = f" ({spec.micro_batches} micro-batches, all the same)" if spec.micro_batches > 1 else ""
    return [
        ("device", f"{device.name}; " + ", ".join(f"{name} {value}" for name, value in versions().items() if value)),
        *(("  while measured", text) for text in dict.fromkeys(measurements.gpu_readings.values())),
        ("  peak", f"{peak / 1e12:.1f} TFLOP/s in bf16" if peak else "not published, so there is no MFU"),
        ("model", f"{_parameters(spec):,} parameters, {size} tokens per step{repeated}"),
        ("training", f"{gemms} GEMMs, {masters}{optimizer}, clip {run.optim.clip_grad:g}, {how}"),
        ("measured", measurements.description),
    ]


def _derived_metrics(
    values: Mapping[str, Any], spec: BenchSpec, device: DeviceInfo, flops: Mapping[bool, float]
) -> dict[str, Any]:
    if values.get("out_of_memory"):
        return dict(values)
    step_ms = statistics.median(value for block in values["blocks_ms"] for value in block)
    speed, peak = spec.tokens / step_ms * 1e3, device.peak("bfloat16")
    cycle = max(1, min(NUM_BATCHES, len(values["losses"]) // 2))
    first, last = statistics.mean(values["losses"][:cycle]), statistics.mean(values["losses"][-cycle:])
    return {
        **values,
        "step_ms": step_ms,
        "tokens_per_s": speed,
        "mfu_full": speed * flops[False] / peak if peak else None,
        "mfu_causal": speed * flops[True] / peak if peak else None,
        "loss": {"first": first, "last": last, "falls": last < first},
    }


def _speed_text(values: Mapping[str, Any]) -> str:
    if values.get("out_of_memory"):
        return "out of memory"
    parts = [f"{values['tokens_per_s']:,.0f} tok/s", f"{values['step_ms']:.1f} ms"]
    if values["mfu_full"] is not None:
        parts.append(f"MFU {values['mfu_full']:.1%} full, {values['mfu_causal']:.1%} causal")
    if values["peak_bytes"] is not None:
        parts.append(f"peak {values['peak_bytes'] / 1e9:.1f} GB")
    loss = values["loss"]
    parts.append(f"loss {loss['first']:.3f} -> {loss['last']:.3f}{'' if loss['falls'] else ' (does not fall)'}")
    parts.append(f"built in {values['build_s']:.0f} s, first steps {values['first_steps_s']:.0f} s")
    return ", ".join(parts)


def _host_text(host: Mapping[str, Any]) -> str:
    us, calls = host["us"], host["calls"]
    return (
        f"per layer {us['forward']:,.0f} us forward and {us['backward']:,.0f} us backward, "
        f"{calls['forward']:,.0f} and {calls['backward']:,.0f} calls of Python; "
        f"per step elsewhere {us['elsewhere']:,.0f} us, {calls['elsewhere']:,.0f} calls"
    )


def _memory_rows(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One line per purpose, the most bytes first: bytes, share, and how many layers they are of."""
    total, rows = memory["total"] or 1, []
    for purpose, sizes in sorted(memory["bytes"].items(), key=lambda item: -sum(item[1].values())):
        size, layers = sum(sizes.values()), len(sizes.keys() - {OUTSIDE_LAYERS})
        of_layers = f", {layers} layers" if layers else ""
        rows.append((f"  {purpose}", f"{size / 1e9:9.3f} GB {size / total:6.1%}{of_layers}"))
    return [("  memory at the peak", f"{total / 1e9:9.3f} GB"), *rows]


def _compare_with_peer(ours: Mapping[str, Any], theirs: Mapping[str, Any], pairs: Sequence[float]) -> dict[str, Any]:
    steps = min(_COMPARED_STEPS, len(ours["losses"]), len(theirs["losses"]))
    apart = [abs(a - b) / abs(theirs["losses"][0]) for a, b in zip(ours["losses"][:steps], theirs["losses"][:steps])]
    memory = ours["peak_bytes"] / theirs["peak_bytes"] if ours["peak_bytes"] and theirs["peak_bytes"] else None
    return {
        "speed": statistics.median(pairs),
        "pairs": list(pairs),
        "spread": [min(pairs), max(pairs)],
        "memory": memory,
        "first_losses": [ours["losses"][0], theirs["losses"][0]],
        "loss_differences": apart,
        "largest_loss_difference": max(apart, default=None),
        "compared_steps": steps,
    }


def _ratio_rows(name: str, ratio: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs, (least, most) = ratio["pairs"], ratio["spread"]
    memory = "" if ratio["memory"] is None else f"; {ratio['memory']:.2f}x its peak memory"
    difference = ratio["largest_loss_difference"]
    different = "in another precision" if name == OWN_BF16 else "NOT the same"
    verdict = "the same" if difference <= _LOSS_TOLERANCE else different
    first = "{:.4f} and {:.4f} at first".format(*ratio["first_losses"])
    apart = f"at most {difference:.2%} of the first apart over the first {ratio['compared_steps']} steps"
    speed = f"{ratio['speed']:.3f}x (median of {len(pairs)} pairs, {least:.3f} to {most:.3f}){memory}"
    return [(f"speed / {name}", speed), (f"loss / {name}", f"{verdict}: {apart}, {first}")]


def _parameters(spec: BenchSpec) -> int:
    return parameter_count(model_spec(spec.run))
