"""`petatron bench train`: the speed and memory of our training step, alone or against a peer's, in one run on one device.

The flags are those of a run (`--preset llama-1b --seq-length 4096 --micro-batch-size 8 --bf16` ...); the batch is one micro-batch
per update, and tokens are random and already on the device. Contenders have the same shapes, tokens, initial weights, fp32 master
weights, AdamW and clipping (`peers`), and alternate in one process (`run_contenders`). There, each keeps its state while the others run,
and all share the memory of activations. Once ours is built and its memory measured,

    needed = contenders x our state + largest activations

tells whether all of them fit the device; if not, peers run one after the other against ours; if two do not fit, each is measured in
its own process, in the order ours, theirs, theirs, ours.

Speed is tokens per second of the median step. MFU divides the model's arithmetic (`estimate/flops.py`) by the published peak in
bfloat16, in both conventions: attention counted in full, as most tables do, and counted as the half that a causal model needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from petatron.base.device import DeviceInfo, detect_device
from petatron.base.errors import Problem, TrainError, raise_problems
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench import peers as contenders
from petatron.bench.arguments import count_problems
from petatron.bench.measure.check_arguments import positive_problems
from petatron.bench.measure.device_memory import allocated_bytes, free_cached_memory
from petatron.bench.measure.hardware_and_versions import describe_readings, sample_gpu
from petatron.bench.measure.host_time import DEPTHS, measure_host
from petatron.bench.measure.kernel_breakdown import profile_steps
from petatron.bench.measure.run_contenders import BenchRunner, time_alternating
from petatron.bench.measure.timing import alternating_orders, copy_bandwidth, paired_speedups, synchronize
from petatron.bench.measure.train_report import TrainMeasurements, merge_runs, report
from petatron.bench.peers import OURS, OWN_BF16, PEER_ATTENTIONS, PEERS, BenchSpec
from petatron.bench.peers.bench_workload import bench_spec, make_batches
from petatron.config.schema.fields import closest_matches, fields_by_name, join_with_or
from petatron.models.batch import Batch

# A peer's activations, as a multiple of ours, and how much of the device can be filled before the allocator thrashes.
_PEER_ACTIVATIONS = {"torchtitan": 1.6, "hf": 1.6, OWN_BF16: 1.1}
_USABLE_MEMORY_SHARE = 0.93
_log = get_logger(__name__)


def _parse_peers(texts: Sequence[str]) -> list[str]:
    """Parses comma-separated names, each peer once.

    Our own come first: a peer may change compiler settings for good, as torchtitan's rowwise FP8 does.

    >>> _parse_peers(["torchtitan,bf16", "torchtitan"])
    ['bf16', 'torchtitan']
    """
    problems: list[Problem] = []
    names = [(name.strip(), text) for text in texts for name in text.split(",")]
    for name, text in names:
        close = closest_matches(name, PEERS, count=1, cutoff=0.6)
        fix = f"Did you mean {close[0]}?" if close else f"Use {join_with_or(PEERS)}."
        if not name:
            comma = "," in text
            rule, fix = ("names nobody beside a comma", "Leave the comma out.") if comma else ("names nobody", fix)
            problems.append(Problem("--against", f"'{text}'", rule, fix))
        elif name not in PEERS:
            problems.append(Problem("--against", name, "is no peer", fix))
    raise_problems(problems)
    return sorted(dict.fromkeys(name for name, _ in names), key=lambda name: name != OWN_BF16)


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    """Measure as asked; `flags` are the run's."""
    peers = _parse_peers(args.against)
    names = [args.only] if args.only else [OURS, *peers]
    spec = _bench_spec(args, flags, names)
    device = detect_device(spec.run.train.device)
    raise_problems(_problems(args, spec, names, device))
    bandwidth = None if device.peak("bfloat16") is None else copy_bandwidth(spec.device)
    host = None
    if args.host:  # before anything else is on the device
        _log.info("the host's part of our step, with %d and %d layers", *DEPTHS)
        host = measure_host(_run_flags(args, flags))
        free_cached_memory(spec.device)
    measured = None if args.apart else _measure_in_process(args, spec, names, device)
    if measured is None:
        free_cached_memory(spec.device)
        measured = _measure_in_subprocesses(args, flags, names)
    measured.host = host
    return report(spec, device, measured, bandwidth=bandwidth)


def _run_flags(args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Returns the run's flags, with those that the bench's own stand for."""
    compiled = [] if not args.no_compile or "compile" not in fields_by_name() else ["--no-compile"]
    if args.fp8_recipe is None:
        return [*flags, *compiled]
    format_given = any(flag.partition("=")[0] in ("--fp8-format", "--fp8-hybrid") for flag in flags)
    fp8_format = [] if format_given else ["--fp8-format", "hybrid"]
    return [*flags, *compiled, *fp8_format, "--fp8-recipe", args.fp8_recipe]


def _torchtitan_flags(args: argparse.Namespace) -> list[str]:
    """Returns the flags for torchtitan that differ from their defaults."""
    attention = args.peer_attention != PEER_ATTENTIONS[0]
    return [
        *(text for path in args.peer_path for text in ("--peer-path", path)),
        *(["--peer-keeps-gathered"] if args.peer_keeps_gathered else []),
        *(["--peer-attention", args.peer_attention] if attention else []),
        *(["--peer-eager"] if args.peer_eager else []),
    ]


def _bench_spec(args: argparse.Namespace, flags: Sequence[str], names: Sequence[str]) -> BenchSpec:
    with_torchtitan = "torchtitan" in names
    # --no-compile may do nothing for ours, but it does for torchtitan.
    spec = bench_spec(_run_flags(args, flags), silenced_flags=("--no-compile",) if with_torchtitan else ())
    for flag in () if with_torchtitan else dict.fromkeys(_torchtitan_flags(args)):
        if flag.startswith("--"):
            _log.info("note: %s has no effect: it is for --against torchtitan", flag)
    precision = spec.run.precision
    return replace(
        spec,
        compile=not args.no_compile and spec.device.type == "cuda",
        fp8_recipe=None if precision.fp8_format is None else precision.fp8_recipe,
        peer_paths=tuple(Path(path) for path in args.peer_path),
        keep_gathered=args.peer_keeps_gathered,
        peer_attention=args.peer_attention,
        peer_cuda_graphs=not args.peer_eager,
    )


def _problems(args: argparse.Namespace, spec: BenchSpec, names: Sequence[str], device: DeviceInfo) -> Iterator[Problem]:
    where = {"--against": "--only"} if args.only else {}
    for name in names if args.only != OWN_BF16 else ():  # what that may be compared with does not matter to it alone
        for problem in contenders.problems(name, spec):
            yield replace(problem, where=where.get(problem.where, problem.where))
    yield from count_problems("train", args)
    yield from positive_problems({"--warmup-seconds": args.warmup_seconds}, zero_allowed=True)
    beside_peers = not {OURS, OWN_BF16}.issuperset(names)
    if spec.micro_batches > 1 and beside_peers:
        rule = "makes steps of several micro-batches, and peers make an update after each"
        yield Problem("--global-batch-size", str(spec.run.train.global_batch_size), rule, "Leave it out.")
    if spec.run.optim.optimizer != "adam" and beside_peers:
        rule = "would be ours alone: peers are measured with AdamW"
        yield Problem("--optimizer", spec.run.optim.optimizer, rule, "Leave it out.")
    if args.breakdown and device.kind != "cuda":
        yield Problem("--breakdown", "", "needs a CUDA device", "Leave it out.")
    if args.host and OURS not in names:
        rule = f"is about our own step, and {args.only} is measured alone"
        yield Problem("--host", "", rule, "Leave one of them out.")
    if args.only and (args.against or args.apart):
        rule = "measures one alone, so there is nobody to compare"
        yield Problem("--only", args.only, rule, "Keep one of them.")


def _measure_in_process(
    args: argparse.Namespace, spec: BenchSpec, names: Sequence[str], device: DeviceInfo
) -> TrainMeasurements | None:
    """Measures in this process, all peers at once or each in turn against ours; None if two do not fit the device."""
    batches, measured = make_batches(spec), TrainMeasurements()
    first, peers = _build_runner(names[0], spec, batches), names[1:]
    if not peers:
        if first is None:
            measured.contenders[names[0]] = {"out_of_memory": True}
        else:
            _time_runners(args, [first], measured)
        return measured
    if first is None:
        return None
    if _fits_in_memory(first, peers, device) and _measure_against(args, first, peers, spec, measured):
        return measured
    measured.one_peer_at_a_time = len(peers) > 1
    if measured.one_peer_at_a_time and all(
        _fits_in_memory(first, [peer], device) and _measure_against(args, first, [peer], spec, measured)
        for peer in peers
    ):
        return measured
    return None


def _measure_against(
    args: argparse.Namespace, first: BenchRunner, peers: Sequence[str], spec: BenchSpec, measurements: TrainMeasurements
) -> bool:
    """Measures peers against ours, all at once, and frees them; False if one does not fit."""
    runners = [first]
    for peer in peers:
        runner = _build_runner(peer, spec, list(first.batches))
        if runner is None:
            return False
        runners.append(runner)
    _time_runners(args, runners, measurements)
    return True


def _time_runners(args: argparse.Namespace, runners: list[BenchRunner], measurements: TrainMeasurements) -> None:
    runners[0].blocks_ms.clear()
    with sample_gpu(runners[0].device) as readings:
        time_alternating(runners, steps=args.steps, block=args.block, warmup_s=args.warmup_seconds)
    for runner in runners[1:] or runners:
        measurements.gpu_readings[runner.name] = describe_readings(readings)
    for runner in runners:
        breakdown = profile_steps(runner) if args.breakdown else None
        memory = runner.snapshot_memory() if args.memory else None
        measurements.contenders[runner.name] = {**runner.as_json(), "breakdown": breakdown, "memory": memory}
    for runner in runners[1:]:
        measurements.paired_speedups[runner.name] = paired_speedups(runners[0].blocks_ms, runner.blocks_ms)


def _fits_in_memory(first: BenchRunner, peers: Sequence[str], device: DeviceInfo) -> bool:
    """Whether peers fit in addition to ours: as much state for each, and the largest activations, which are shared."""
    if first.peak_bytes is None:
        return True
    activations = max(_PEER_ACTIVATIONS[peer] for peer in peers) * (first.peak_bytes - first.held_bytes)
    needed, usable = (1 + len(peers)) * first.held_bytes + activations, _USABLE_MEMORY_SHARE * device.memory_bytes
    if needed < usable:
        return True
    names = ", ".join((first.name, *peers))
    _log.info("%s together would take about %.0f GB of the %.0f GB that can be used", names, needed / 1e9, usable / 1e9)
    return False


def _build_runner(name: str, spec: BenchSpec, batches: list[Batch]) -> BenchRunner | None:
    """Builds and compiles a contender and measures its memory; None if it does not fit."""
    _log.info("building %s", name)
    free_cached_memory(spec.device)
    before = allocated_bytes(spec.device)
    started = time.perf_counter()
    try:
        runner = BenchRunner(name, contenders.build(name, spec), batches, spec.device)
        synchronize(spec.device)
        runner.build_s = time.perf_counter() - started
        runner.compile_and_measure_memory(allocated_before=before)
        _log.info("%s: built in %.0f s, first steps %.0f s", name, runner.build_s, runner.first_steps_s)
    except torch.OutOfMemoryError:
        _log.info("%s: out of memory", name)
        runner = None
    free_cached_memory(spec.device)
    return runner


def _measure_in_subprocesses(args: argparse.Namespace, flags: Sequence[str], names: Sequence[str]) -> TrainMeasurements:
    """Measures each in its own process, forwards and backwards; each process gives one block."""
    visits: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    turns = [name for order in alternating_orders(names, rounds=2) for name in order]
    for number, name in enumerate(turns, start=1):
        if not any(values.get("out_of_memory") for values in visits[name]):
            _log.info("%s in a process of its own, %d of %d", name, number, len(turns))
            visits[name].append(_run_subprocess(args, flags, name))
    merged = {name: merge_runs(values) for name, values in visits.items()}
    measured = TrainMeasurements(separate_processes=True, contenders=merged)
    ours = measured.contenders[names[0]]
    for name in names[1:]:
        if "blocks_ms" in ours and "blocks_ms" in measured.contenders[name]:
            measured.paired_speedups[name] = paired_speedups(ours["blocks_ms"], measured.contenders[name]["blocks_ms"])
    return measured


def _run_subprocess(args: argparse.Namespace, flags: Sequence[str], name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "petatron", "bench", "train", "--only", name, "--json", str(answer)]
        for flag in ("--steps", "--block", "--warmup-seconds"):
            command += [flag, str(getattr(args, flag[2:].replace("-", "_")))]
        command += [*_torchtitan_flags(args), *(["--fp8-recipe", args.fp8_recipe] if args.fp8_recipe else [])]
        switches = ("--no-compile", "--breakdown", "--memory")
        command += [flag for flag in switches if getattr(args, flag[2:].replace("-", "_"))]
        done = subprocess.run([*command, *flags], capture_output=True, text=True)
        if done.returncode != 0 or not answer.is_file():
            raise TrainError(f"Measuring {name} in a process of its own failed:\n{done.stderr[-2000:].strip()}")
        return json.loads(answer.read_text())["contenders"][name]
