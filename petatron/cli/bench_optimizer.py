"""`petatron bench optimizer`: one step of our optimizer against torch's fused AdamW with clipping and a cast.

Both work on the same memory: master weights, moments and gradients of a decoder of the size asked for, ours as flat buffers,
torch's as the list of its parameters. Torch's step is what a careful script does: clip_grad_norm_ with foreach, AdamW with fused,
and a foreach copy of the fp32 weights into bfloat16 ones. Rounds alternate in both orders, and the median of the ratios counts.
Bytes are what must move, gradients and state read once and written once; the copy that gives the device's own speed is taken
in the same rounds.

| bytes per parameter | read | written |
|---|---|---|
| norm | gradient 4 | |
| update | gradient 4, master 4, moments 8 | master 4, moments 8, weight 2 |

With --offload-fraction, state lies in host memory and torch has no counterpart, so ours is timed alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from petatron.base.errors import ConfigError, Problem
from petatron.cli.bench_units import prefixed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from petatron.cli.bench import BenchResult
    from petatron.mesh.flat import FlatGroup
    from petatron.optim.build import OptimizerKernels
    from petatron.optim.master import MasterOptimizer

_DEFAULTS = {"cuda": 1.24e9, "cpu": 4e6}
_COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 25}
_STEPS = 4  # of each per round
_RATE = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=float, metavar="N", help="size of the model (1.24e9; on a CPU 4e6)")
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="rounds, at least 3 (default: 10)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (default: auto)")
    parser.add_argument("--moments", choices=("fp32", "bf16"), default="fp32", help="format of both (default: fp32)")
    parser.add_argument("--main-grads", choices=("fp32", "bf16"), default="fp32", help="of gradients (default: fp32)")
    parser.add_argument("--offload-fraction", type=float, default=0.0, metavar="F", help="in host memory (default: 0)")


def run(args: argparse.Namespace) -> BenchResult:
    """All rounds, and what they say."""
    import torch

    problems = []
    if args.parameters is not None and not 1e4 <= args.parameters < 1e12:
        rule = "is not between 1e4, which takes long enough to time, and 1e12"
        problems.append(Problem("--parameters", f"{args.parameters:g}", rule, "Use 1e7, for instance."))
    if not 0.0 <= args.offload_fraction <= 1.0:
        found = f"{args.offload_fraction:g}"
        problems.append(Problem("--offload-fraction", found, "is out of range", "Use a number from 0 to 1."))
    if args.device == "cuda" and not torch.cuda.is_available():
        problems.append(Problem("--device", "cuda", "needs a CUDA device", "Use cpu."))
    if problems:
        raise ConfigError(problems)
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    bench = _Bench.build(args, torch.device(kind))
    for number in range(max(3, args.repeat)):
        bench.round(number)
    return bench.result()


@dataclass(slots=True)
class _Bench:
    """The contenders by name, and the milliseconds of every round."""

    device: torch.device
    num_parameters: int
    moved_bytes: dict[str, int]
    contenders: dict[str, Callable[[], object]]
    kernels: str
    offloaded_bytes: float
    times: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def build(cls, args: argparse.Namespace, device: torch.device) -> _Bench:
        import torch

        from petatron.config.schema import MemoryConfig, OptimizerConfig
        from petatron.mesh.mesh import ParallelMesh
        from petatron.optim.master import MasterOptimizer

        groups = _groups(int(args.parameters or _DEFAULTS[device.type]), device, args.main_grads)
        fraction = args.offload_fraction
        config = OptimizerConfig(lr=_RATE, exp_avg_dtype=args.moments, exp_avg_sq_dtype=args.moments)
        memory = MemoryConfig(optimizer_cpu_offload=fraction > 0, optimizer_offload_fraction=fraction)
        kernels, name = _kernels(device)
        mesh = ParallelMesh.single(device)
        optimizer = MasterOptimizer(config, groups, mesh, memory=memory, kernels=kernels)
        size = sum(group.flat_weights.numel() for group in groups)
        gradient, moment = (2 if word == "bf16" else 4 for word in (args.main_grads, args.moments))
        norm, update = size * gradient, size * (gradient + 2 * 4 + 4 * moment + 2)
        copied = _COPY_BYTES[device.type]
        source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        grads = [group.flat_grads for group in groups]
        contenders: dict[str, Callable[[], object]] = {
            "ours": optimizer.step,
            "norm": lambda: kernels.sum_of_squares(grads),
            "copy": lambda: target.copy_(source),
        }
        moved = {"ours": norm + update, "norm": norm, "copy": 2 * copied}
        if not fraction and args.moments == args.main_grads == "fp32":
            contenders["torch"] = _torch_step(optimizer, groups)
        bench = cls(device, size, moved, contenders, name, fraction * size * (4 + 2 * moment))
        for contender in contenders.values():  # compiles, and takes memory for the first time
            bench.timed(contender)
            bench.timed(contender)
        return bench

    def round(self, number: int) -> None:
        """Everything, forwards and backwards in turn."""
        names = list(self.contenders)
        for name in names if number % 2 == 0 else reversed(names):
            self.times.setdefault(name, []).append(self.timed(self.contenders[name]))

    def timed(self, step: Callable[[], object]) -> float:
        """Milliseconds of one step, as the mean of a few in a row, which the host does not wait for."""
        import torch

        if self.device.type == "cpu":
            started = time.perf_counter()
            for _ in range(_STEPS):
                step()
            return (time.perf_counter() - started) * 1e3 / _STEPS
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        before.record()
        for _ in range(_STEPS):
            step()
        after.record()
        torch.cuda.synchronize(self.device)
        return before.elapsed_time(after) / _STEPS

    def result(self) -> BenchResult:
        from petatron.cli.bench import BenchResult

        medians = {name: statistics.median(values) for name, values in self.times.items()}
        speeds = {name: size / medians[name] / 1e9 for name, size in self.moved_bytes.items()}  # bytes per ms in TB/s
        said = {name: prefixed(speed * 1e12, "B/s") for name, speed in speeds.items()}
        of_copy = speeds["ours"] / speeds["copy"]
        rows = [
            ("parameters", f"{self.num_parameters:,} on {_device_name(self.device)}, kernels: {self.kernels}"),
            ("copy", f"{said['copy']} read and written"),
            ("ours", f"{medians['ours']:.3f} ms, {said['ours']}, {of_copy:.1%} of the copy"),
            ("  of it the norm", f"{medians['norm']:.3f} ms, {said['norm']}"),
        ]
        ratio = None
        if "torch" in self.times:
            ratio = statistics.median(theirs / ours for theirs, ours in zip(self.times["torch"], self.times["ours"]))
            rows.append(("torch: fused AdamW, foreach clip, cast", f"{medians['torch']:.3f} ms"))
            rows.append(("speed", f"{ratio:.3f}x"))
        if self.offloaded_bytes:
            each_way = prefixed(self.offloaded_bytes / medians["ours"] * 1e3, "B/s")
            rows.append(("state in host memory", f"{self.offloaded_bytes / 1e9:.2f} GB, {each_way} each way"))
        rows.append(("medians of", f"{len(self.times['ours'])} rounds of {_STEPS} steps"))
        values = {
            "parameters": self.num_parameters,
            "device": _device_name(self.device),
            "kernels": self.kernels,
            "moved_bytes": self.moved_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "ms": self.times,
            "median_ms": medians,
            "tb_per_s": speeds,
            "of_copy": of_copy,
            "ratio": ratio,
        }
        return BenchResult(tuple(rows), values)


def _groups(num_parameters: int, device: torch.device, grads_dtype: str) -> list[FlatGroup]:
    """Flat buffers of a decoder of about this size, with gradients that are not zero."""
    from collections import Counter

    import torch
    from torch import nn

    from petatron.cli.bench_checkpoint import model_shapes
    from petatron.mesh.flat import FlatOptions, flatten_parameters
    from petatron.mesh.mesh import ParallelMesh
    from petatron.mesh.spec import Shard, TensorSplit, place

    shapes = list(model_shapes(num_parameters).values())
    model = nn.ParameterList(torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    for parameter in model:
        nn.init.normal_(parameter, std=0.02)
    placements = {name: place(name, tuple(one.shape), Shard(), TensorSplit()) for name, one in model.named_parameters()}
    dtype = torch.bfloat16 if grads_dtype == "bf16" else None
    options = FlatOptions(bucket_size=1 << 62, grad_dtype=dtype)
    mesh, uses = ParallelMesh.single(device), Counter(model.parameters())
    groups = flatten_parameters([model], placements, lambda name, one: True, mesh, options, uses=uses)
    for group in groups:
        group.flat_grads.normal_(std=1e-3)
    return groups


def _kernels(device: torch.device) -> tuple[OptimizerKernels, str]:
    """Triton's where there is a device for them; and their name."""
    import importlib

    from petatron.optim.build import PLAIN, OptimizerKernels

    if device.type != "cuda":
        return PLAIN, "torch"
    module = importlib.import_module("petatron.kernels.triton.adam")
    return OptimizerKernels(module.adamw, module.sum_of_squares), "triton"


def _torch_step(optimizer: MasterOptimizer, groups: Sequence[FlatGroup]) -> Callable[[], None]:
    """The same update by torch, on the very same memory."""
    import torch
    from torch import nn

    from petatron.mesh.stretch import group_pieces

    parameters: dict[str, nn.Parameter] = {}
    for _, piece, view in optimizer.weights():
        parameters[piece.name] = nn.Parameter(view, requires_grad=True)
    for group in groups:
        for piece, view in group_pieces(group, group.grads()):
            parameters[piece.name].grad = view
    narrow = {piece.name: view for group in groups for piece, view in group_pieces(group, group.weights())}
    adam = torch.optim.AdamW(parameters.values(), lr=_RATE, fused=True)
    for kind, _, piece, view in optimizer.moments():
        state = adam.state[parameters[piece.name]]
        state[kind] = view
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=view.device))
    masters = [parameter.detach() for parameter in parameters.values()]
    copies = [narrow[name] for name in parameters]

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters.values(), 1.0, foreach=True)
        adam.step()
        torch._foreach_copy_(copies, masters)

    return step


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
