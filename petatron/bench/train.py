"""`petatron bench train`: the speed and memory of our training step, alone or against a peer's, in one run on one device.

The flags are those of a run (`--preset llama-1b --seq-length 4096 --micro-batch-size 8 --bf16` ...); the batch is one micro-batch
per update, and tokens are random and already on the device. Contenders have the same shapes, tokens, initial weights, fp32 master
weights, AdamW and clipping (`peers`), and alternate in one process (`runner`). There, each keeps its state while the others run,
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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from petatron.base.errors import ConfigError, Problem, TrainError
from petatron.base.log import get_logger
from petatron.bench import peers as contenders
from petatron.bench.measure.arguments import minimum_problems, positive_problems
from petatron.bench.peers import OURS, OWN_BF16, PEER_ATTENTIONS, PEERS

if TYPE_CHECKING:
    from petatron.base.device import DeviceInfo
    from petatron.bench.measure.report import TrainMeasurements
    from petatron.bench.measure.runner import BenchRunner
    from petatron.bench.peers import BenchSpec
    from petatron.bench.result import BenchResult
    from petatron.models.batch import Batch

TAKES_RUN_FLAGS = True
# A peer's activations, as a multiple of ours, and how much of the device can be filled before the allocator thrashes.
_PEER_ACTIVATIONS = {"torchtitan": 1.6, "hf": 1.6, OWN_BF16: 1.1}
_USABLE_MEMORY_SHARE = 0.93
_log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Every other word is the run's own: a preset's name, --seq-length, --micro-batch-size, --device ..."
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="PEER",
        help=f"{', '.join(PEERS[:-1])}, or {OWN_BF16}: our own step without its FP8 flags; several with commas, or given again",
    )
    parser.add_argument(
        "--peer-path",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with a peer's source; may be given again",
    )
    parser.add_argument("--only", choices=(OURS, *PEERS), help="measure this one alone")
    parser.add_argument("--apart", action="store_true", help="a process of its own for each, one after the other")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps of each (default: 20)")
    parser.add_argument("--block", type=int, default=5, metavar="N", help="steps before the turn changes (default: 5)")
    parser.add_argument(
        "--warmup-seconds", type=float, default=20.0, metavar="S", help="real steps before timing (default: 20)"
    )
    parser.add_argument("--fp8-recipe", metavar="NAME", help="FP8 hybrid by this recipe, on all sides but bf16")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, on both sides")
    parser.add_argument(
        "--peer-keeps-gathered", action="store_true", help="torchtitan: no second gathering of weights; more memory"
    )
    parser.add_argument(
        "--peer-attention",
        choices=PEER_ATTENTIONS,
        default=PEER_ATTENTIONS[0],
        help="torchtitan 0.3: cuDNN's or FlashAttention's kernels, or its default for packed documents (default: sdpa)",
    )
    parser.add_argument("--peer-eager", action="store_true", help="torchtitan 0.3: without its CUDA graph; less memory")
    parser.add_argument("--breakdown", action="store_true", help="say where the time of a step goes (CUDA only)")
    parser.add_argument(
        "--host", action="store_true", help="say what our step costs the host per layer, by models of 2 and 4 layers"
    )
    parser.add_argument("--memory", action="store_true", help="say what holds our memory at the peak of a step")


def _parse_peers(texts: Sequence[str]) -> list[str]:
    """Parses comma-separated names, each peer once.

    Our own come first: a peer may change compiler settings for good, as torchtitan's rowwise FP8 does.

    >>> _parse_peers(["torchtitan,bf16", "torchtitan"])
    ['bf16', 'torchtitan']
    """
    from petatron.config.schema.fields import closest_matches, join_with_or

    found: list[Problem] = []
    names = [(name.strip(), text) for text in texts for name in text.split(",")]
    for name, text in names:
        close = closest_matches(name, PEERS, count=1, cutoff=0.6)
        fix = f"Did you mean {close[0]}?" if close else f"Use {join_with_or(PEERS)}."
        if not name:
            comma = "," in text
            rule, fix = ("names nobody beside a comma", "Leave the comma out.") if comma else ("names nobody", fix)
            found.append(Problem("--against", f"'{text}'", rule, fix))
        elif name not in PEERS:
            found.append(Problem("--against", name, "is no peer", fix))
    if found:
        raise ConfigError(found)
    return sorted(dict.fromkeys(name for name, _ in names), key=lambda name: name != OWN_BF16)


def run(args: argparse.Namespace, flags: Sequence[str]) -> BenchResult:
    """Measure as asked; `flags` are the run's."""
    from petatron.base.device import detect_device
    from petatron.bench.measure.report import report
    from petatron.bench.measure.timing import copy_bandwidth, free_cached_memory

    peers = _parse_peers(args.against)
    names = [args.only] if args.only else [OURS, *peers]
    spec = _bench_spec(args, flags, names)
    device = detect_device(spec.run.train.device)
    _check(args, spec, names, device)
    bandwidth = None if device.peak("bfloat16") is None else copy_bandwidth(spec.device)
    host = _measure_host(args, flags, spec) if args.host else None
    found = None if args.apart else _measure_in_process(args, spec, names, device)
    if found is None:
        free_cached_memory(spec.device)
        found = _measure_in_subprocesses(args, flags, names)
    found.host = host
    return report(spec, device, found, bandwidth=bandwidth)


def _measure_host(args: argparse.Namespace, flags: Sequence[str], spec: BenchSpec) -> dict[str, Any]:
    """Measures the host's part of our step before anything else is on the device."""
    from petatron.bench.measure.host_time import DEPTHS, measure_host
    from petatron.bench.measure.timing import free_cached_memory

    _log.info("the host's part of our step, with %d and %d layers", *DEPTHS)
    measured = measure_host(_run_words(args, flags)).as_json()
    free_cached_memory(spec.device)
    return measured


def _run_words(args: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Returns the run's flags, with those that the bench's own stand for."""
    from petatron.config.schema.fields import fields_by_name

    words = [*flags]
    words += ["--no-compile"] if args.no_compile and "compile" in fields_by_name() else []
    if args.fp8_recipe is not None:
        format_given = any(flag.partition("=")[0] in ("--fp8-format", "--fp8-hybrid") for flag in flags)
        words += ([] if format_given else ["--fp8-format", "hybrid"]) + ["--fp8-recipe", args.fp8_recipe]
    return words


def _bench_spec(args: argparse.Namespace, flags: Sequence[str], names: Sequence[str]) -> BenchSpec:
    from petatron.bench.peers.bench_model import bench_spec

    words = _run_words(args, flags)
    if "torchtitan" in names:
        spec = bench_spec(
            words, silenced_flags=("--no-compile",)
        )  # it may do nothing for ours, but it does for torchtitan
    else:
        spec = bench_spec(words)
        for flag, given in (
            ("--peer-path", args.peer_path),
            ("--peer-keeps-gathered", args.peer_keeps_gathered),
            ("--peer-attention", args.peer_attention != PEER_ATTENTIONS[0]),
            ("--peer-eager", args.peer_eager),
        ):
            if given:
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


def _check(args: argparse.Namespace, spec: BenchSpec, names: Sequence[str], device: DeviceInfo) -> None:
    found = [problem for name in names for problem in contenders.problems(name, spec)]
    if args.only == OWN_BF16:
        found = []  # what it may be compared with does not matter to it alone
    elif args.only:
        found = [replace(it, where="--only") if it.where == "--against" else it for it in found]
    found += minimum_problems({"--steps": (args.steps, 1), "--block": (args.block, 1)})
    found += positive_problems({"--warmup-seconds": args.warmup_seconds}, zero_allowed=True)
    beside_peers = not {OURS, OWN_BF16}.issuperset(names)
    if spec.micro_batches > 1 and beside_peers:
        rule = "makes steps of several micro-batches, and peers make an update after each"
        found.append(Problem("--global-batch-size", str(spec.run.train.global_batch_size), rule, "Leave it out."))
    if spec.run.optim.optimizer != "adam" and beside_peers:
        rule = "would be ours alone: peers are measured with AdamW"
        found.append(Problem("--optimizer", spec.run.optim.optimizer, rule, "Leave it out."))
    if args.breakdown and device.kind != "cuda":
        found.append(Problem("--breakdown", "", "needs a CUDA device", "Leave it out."))
    if args.host and OURS not in names:
        rule = f"is about our own step, and {args.only} is measured alone"
        found.append(Problem("--host", "", rule, "Leave one of them out."))
    if args.only and (args.against or args.apart):
        found.append(
            Problem("--only", args.only, "measures one alone, so there is nobody to compare", "Keep one of them.")
        )
    if found:
        raise ConfigError(found)


def _measure_in_process(
    args: argparse.Namespace, spec: BenchSpec, names: Sequence[str], device: DeviceInfo
) -> TrainMeasurements | None:
    """Measures in this process, all peers at once or each in turn against ours; None if two do not fit the device."""
    from petatron.bench.measure.report import TrainMeasurements
    from petatron.bench.peers.bench_model import make_batches

    batches, found = make_batches(spec), TrainMeasurements()
    first, peers = _build_runner(names[0], spec, batches), names[1:]
    if not peers:
        if first is None:
            found.contenders[names[0]] = {"out_of_memory": True}
        else:
            _time_runners(args, [first], found)
        return found
    if first is None:
        return None
    if _fits_in_memory(first, peers, device) and _measure_against(args, first, peers, spec, found):
        return found
    found.one_peer_at_a_time = len(peers) > 1
    if found.one_peer_at_a_time and all(
        _fits_in_memory(first, [peer], device) and _measure_against(args, first, [peer], spec, found) for peer in peers
    ):
        return found
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
    from petatron.bench.measure.kernel_breakdown import profile_steps
    from petatron.bench.measure.machine import sample_gpu
    from petatron.bench.measure.runner import time_alternating
    from petatron.bench.measure.timing import paired_speedups

    runners[0].blocks_ms.clear()
    with sample_gpu(runners[0].device) as samples:
        time_alternating(runners, steps=args.steps, block=args.block, warmup_s=args.warmup_seconds)
    for runner in runners[1:] or runners:
        measurements.gpu_readings[runner.name] = samples.describe()
    for runner in runners:
        breakdown = profile_steps(runner).as_json() if args.breakdown else None
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
    import torch

    from petatron.bench.measure.runner import BenchRunner
    from petatron.bench.measure.timing import allocated_bytes, free_cached_memory, synchronize

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
    from petatron.bench.measure.report import TrainMeasurements, merge_runs
    from petatron.bench.measure.timing import alternating_orders, paired_speedups

    visits: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    turns = [name for order in alternating_orders(names, rounds=2) for name in order]
    for number, name in enumerate(turns, start=1):
        if not any(values.get("out_of_memory") for values in visits[name]):
            _log.info("%s in a process of its own, %d of %d", name, number, len(turns))
            visits[name].append(_run_subprocess(args, flags, name))
    found = TrainMeasurements(
        separate_processes=True, contenders={name: merge_runs(values) for name, values in visits.items()}
    )
    ours = found.contenders[names[0]]
    for name in names[1:]:
        if "blocks_ms" in ours and "blocks_ms" in found.contenders[name]:
            found.paired_speedups[name] = paired_speedups(ours["blocks_ms"], found.contenders[name]["blocks_ms"])
    return found


def _run_subprocess(args: argparse.Namespace, flags: Sequence[str], name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = [sys.executable, "-m", "petatron", "bench", "train", "--only", name, "--json", str(answer)]
        words += ["--steps", str(args.steps), "--block", str(args.block), "--warmup-seconds", str(args.warmup_seconds)]
        words += [word for path in args.peer_path for word in ("--peer-path", path)]
        words += ["--fp8-recipe", args.fp8_recipe] if args.fp8_recipe else []
        words += ["--peer-attention", args.peer_attention]
        for given, flag in (
            (args.no_compile, "--no-compile"),
            (args.peer_keeps_gathered, "--peer-keeps-gathered"),
            (args.peer_eager, "--peer-eager"),
            (args.breakdown, "--breakdown"),
            (args.memory, "--memory"),
        ):
            words += [flag] if given else []
        done = subprocess.run([*words, *flags], capture_output=True, text=True)
        if done.returncode != 0 or not answer.is_file():
            raise TrainError(f"Measuring {name} in a process of its own failed:\n{done.stderr[-2000:].strip()}")
        return json.loads(answer.read_text())["contenders"][name]
