"""`petatron bench optimizer`: one step of our optimizer against torch's fused AdamW with clipping and a cast.

Both work on the same memory: master weights, moments and gradients of a decoder of the requested size, ours as flat buffers,
torch's as the list of its parameters. Torch's step is what a careful script does: clip_grad_norm_ with foreach, AdamW with fused,
and a foreach copy of the fp32 weights into bfloat16 ones. Rounds alternate in both orders, and the median of the ratios counts.
Bytes are the minimum traffic, gradients and state read once and written once; the copy that gives the device's speed is timed
in the same rounds.

| bytes per parameter | read | written |
|---|---|---|
| norm | gradient 4 | |
| update | gradient 4, master 4, moments 8 | master 4, moments 8, weight 2 |

With --offload-fraction, state is in host memory and torch has no counterpart, so ours is timed alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from petatron.base.errors import Problem
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import count_problems
from petatron.bench.checkpoint import model_shapes
from petatron.bench.measure.check_arguments import resolve_device
from petatron.bench.measure.format_si_units import format_si
from petatron.bench.measure.hardware_and_versions import choice_row, device_name
from petatron.bench.measure.timing import large_copy, mean_ms, run_rounds
from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.kernels.registry import KernelChoice, KernelContext, choose_kernel
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.optim.update_rules import OptimizerKernels
from petatron.sharding.flat_buffer import FlatBufferOptions, FlatParamGroup, flatten_parameters
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement

_DEFAULTS = {"cuda": 1.24e9, "cpu": 4e6}
_STEPS_PER_ROUND = 4  # steps of each contender in a round
_LEARNING_RATE = 1e-4
_log = get_logger(__name__)


def run(args: argparse.Namespace) -> BenchResult:
    """Runs all rounds and returns the result."""
    problems = count_problems("optimizer", args)
    if args.parameters is not None and not 1e4 <= args.parameters < 1e12:
        rule = "is not between 1e4, which takes long enough to time, and 1e12"
        problems.append(Problem("--parameters", f"{args.parameters:g}", rule, "Use 1e7, for instance."))
    if not 0.0 <= args.offload_fraction <= 1.0:
        fix = "Use a number from 0 to 1."
        problems.append(Problem("--offload-fraction", f"{args.offload_fraction:g}", "is out of range", fix))
    device = resolve_device(args.device, problems=problems)
    size = int(args.parameters or _DEFAULTS[device.type])
    _log.info("building %s parameters and their optimizer, and warming up", f"{size:,}")
    bench = _Bench.build(args, device, size)
    steps = {name: partial(bench.timed, contender) for name, contender in bench.contenders.items()}
    return bench.result(run_rounds(steps, rounds=max(4, args.repeat), work=f"{_STEPS_PER_ROUND} steps"))


@dataclass(frozen=True, slots=True)
class _Bench:
    """The contenders by name, and the buffers they update."""

    device: torch.device
    num_parameters: int
    moved_bytes: dict[str, int]
    contenders: dict[str, Callable[[], object]]
    kernel_choice: KernelChoice
    offloaded_bytes: float

    @classmethod
    def build(cls, args: argparse.Namespace, device: torch.device, num_parameters: int) -> _Bench:
        groups = _flat_groups(num_parameters, device, args.main_grads)
        fraction = args.offload_fraction
        config = OptimizerConfig(lr=_LEARNING_RATE, exp_avg_dtype=args.moments, exp_avg_sq_dtype=args.moments)
        memory = MemoryConfig(optimizer_cpu_offload=fraction > 0, optimizer_offload_fraction=fraction)
        choice = choose_kernel("adamw", KernelContext.of(device, torch.bfloat16, allow_compile=True))
        kernels = OptimizerKernels.from_choice(choice)
        mesh = ParallelMesh.single(device)
        optimizer = MixedPrecisionOptimizer(config, groups, mesh, memory=memory, kernels=kernels)
        size = sum(group.flat_weights.numel() for group in groups)
        gradient, moment = (2 if dtype == "bf16" else 4 for dtype in (args.main_grads, args.moments))
        norm, update = size * gradient, size * (gradient + 2 * 4 + 4 * moment + 2)
        copy, copied = large_copy(device)
        grads = [grad for group in groups for grad in group.grads()]
        contenders: dict[str, Callable[[], object]] = {
            "ours": optimizer.step,
            "norm": lambda: kernels.sum_of_squares(grads),
            "copy": copy,
        }
        moved = {"ours": norm + update, "norm": norm, "copy": copied}
        if not fraction and args.moments == args.main_grads == "fp32":
            contenders["torch"] = _torch_step(optimizer, groups)
        bench = cls(device, size, moved, contenders, choice, fraction * size * (4 + 2 * moment))
        for contender in contenders.values():  # compiles, and allocates
            bench.timed(contender)
            bench.timed(contender)
        return bench

    def timed(self, step: Callable[[], object]) -> float:
        """Returns milliseconds of one step. Offloaded state is copied on its own stream, so there is no head start."""
        return mean_ms(step, self.device, calls=_STEPS_PER_ROUND, head_start=False)

    def result(self, times: Mapping[str, Sequence[float]]) -> BenchResult:
        """Returns the result, from the milliseconds of all rounds."""
        medians = {name: statistics.median(values) for name, values in times.items()}
        speeds = {name: size / medians[name] / 1e9 for name, size in self.moved_bytes.items()}  # bytes per ms in TB/s
        said = {name: format_si(speed * 1e12, "B/s") for name, speed in speeds.items()}
        of_copy = speeds["ours"] / speeds["copy"]
        rows = [
            ("parameters", f"{self.num_parameters:,} on {device_name(self.device)}"),
            choice_row(self.kernel_choice),
            ("copy", f"{said['copy']} read and written"),
            ("ours", f"{medians['ours']:.3f} ms, {said['ours']}, {of_copy:.1%} of the copy"),
            ("  of it the norm", f"{medians['norm']:.3f} ms, {said['norm']}"),
        ]
        ratio = None
        if "torch" in times:
            ratio = statistics.median(theirs / ours for theirs, ours in zip(times["torch"], times["ours"]))
            rows.append(("torch: fused AdamW, foreach clip, cast", f"{medians['torch']:.3f} ms"))
            rows.append(("speed", f"{ratio:.3f}x"))
        if self.offloaded_bytes:
            each_way = format_si(self.offloaded_bytes / medians["ours"] * 1e3, "B/s")
            rows.append(("state in host memory", f"{self.offloaded_bytes / 1e9:.2f} GB, {each_way} each way"))
        rows.append(("medians of", f"{len(times['ours'])} rounds of {_STEPS_PER_ROUND} steps"))
        values = {
            "parameters": self.num_parameters,
            "device": device_name(self.device),
            "kernels": str(self.kernel_choice),
            "moved_bytes": self.moved_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "ms": times,
            "median_ms": medians,
            "tb_per_s": speeds,
            "of_copy": of_copy,
            "ratio": ratio,
        }
        return BenchResult(tuple(rows), values)


def _flat_groups(num_parameters: int, device: torch.device, grads_dtype: str) -> list[FlatParamGroup]:
    """Builds flat buffers of a decoder of about this size, with nonzero gradients."""
    shapes = list(model_shapes(num_parameters).values())
    model = nn.ParameterList(torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    for parameter in model:
        nn.init.normal_(parameter, std=0.02)
    placements = {
        name: compute_placement(name, tuple(parameter.shape), Shard(), ModelParallelCoordinate())
        for name, parameter in model.named_parameters()
    }
    options = FlatBufferOptions(bucket_size=1 << 62, grad_dtype=torch.bfloat16 if grads_dtype == "bf16" else None)
    mesh, uses = ParallelMesh.single(device), Counter(model.parameters())
    specs = dict.fromkeys(placements, GroupSpec(rule="adam"))
    groups = flatten_parameters([model], placements, specs, mesh, options, grads_per_micro_batch=uses)
    for group in groups:
        for grad in group.grads():
            grad.normal_(std=1e-3)
    return groups


def _torch_step(optimizer: MixedPrecisionOptimizer, groups: Sequence[FlatParamGroup]) -> Callable[[], None]:
    """Returns the same update by torch, on the same memory."""
    parameters: dict[str, nn.Parameter] = {}
    for _, shard, view in optimizer.master_weights():
        parameters[shard.name] = nn.Parameter(view, requires_grad=True)
    for group in groups:
        for shard, view in group_tensor_shards(group, group.grads()):
            parameters[shard.name].grad = view
    bf16_weights = {shard.name: view for group in groups for shard, view in group_tensor_shards(group, group.weights())}
    adam = torch.optim.AdamW(parameters.values(), lr=_LEARNING_RATE, fused=True)
    for kind, _, shard, view in optimizer.moments():
        state = adam.state[parameters[shard.name]]
        state[kind] = view
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=view.device))
    masters = [parameter.detach() for parameter in parameters.values()]
    copies = [bf16_weights[name] for name in parameters]

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters.values(), 1.0, foreach=True)
        adam.step()
        torch._foreach_copy_(copies, masters)

    return step
