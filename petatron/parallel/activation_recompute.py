"""Recompute: tensors that a layer would save for backward are dropped, and recomputed when backward needs them.

A `RecomputeRegion` runs a function and saves its arguments alone. Inside a region a saved-tensor hook stores an index for each
tensor. In backward the first index that is unpacked makes the region run the function again, and return the tensors that this
run saves, in the same order. Hence:

- The second run ends at the last tensor that is needed. Autograd saves the operands of a GEMM before it runs, so a
  region that ends with a GEMM (an MLP, an attention layer) does not repeat it, nor the communication after it.
- Both dropout streams are set to their state at the first run, and restored afterwards: masks are equal, and later draws of
  the step are unchanged.
- Communication inside is repeated, in the same order on every rank, since every rank runs the same regions.
- Router statistics are written again, with the same values. Losses attached inside (load balancing) are added to the gradient
  once: the second run is never differentiated.
- With a split backward (zero-bubble schedules) the function runs in the first half; operands that the second still needs are
  held until then.

Norms and activation functions need none of this: GEMMs do not save their outputs (`layers/ops/recompute_output.py`), nor what they
gather of them under sequence parallelism. An MoE layer does save its input, in several places; under `layernorm` a second hook
recognizes it among the saved tensors (by its storage) and stores a reference to the norm's recompute handle instead. Inside a
region it is the other way round: the second run gathers a GEMM's input, which is held until the GEMM's backward, soon after, and
is not gathered a third time.

Regions nest: the arguments of an inner one are saved through autograd, where the hooks of the outer one see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from petatron.estimate.recompute_plan import ModuleSet, RecomputePlan
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import RecomputableOutput, RecomputeHandle
from petatron.layers.spec.branch_spec import FULL
from petatron.layers.transformer_layer import TransformerLayer
from petatron.mesh.rng import RandomStreams
from petatron.models.stage_interface import LayerRunner, StageModule, run_layers_sequentially
from petatron.parallel.tensor_parallel import ColumnParallelOp, ReplicatedOp, RowParallelOp

ForwardFunction = Callable[..., Tensor]


class _StopRecompute(Exception):
    """Ends a second run: all needed tensors have been recomputed."""


class _SaveArguments(torch.autograd.Function):
    """A node outside every backward pass, which saves tensors the way autograd does: other hooks may replace them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing depends on this node")


_SAVED = object()
"""In place of an argument that `_SaveArguments` saves."""


def _without_value(value: Any) -> Any:
    """Returns what a region keeps of an argument: nothing of a tensor, and the handle of an output that has one."""
    if isinstance(value, RecomputableOutput) and value.handle is not None:
        return value.handle
    return _SAVED if isinstance(value, Tensor) else value


class RecomputeRegion:
    """One call of a function, of which only the arguments are saved for backward.

    An argument with a recompute handle is not saved either.
    """

    __slots__ = ("_args", "_holder", "_recomputed", "_rng_snapshot", "_rng_streams", "_run", "_saved_shapes")

    def __init__(self, run: ForwardFunction, rng_streams: RandomStreams) -> None:
        self._run, self._rng_streams = run, rng_streams
        self._saved_shapes: list[torch.Size] = []  # of the first run's saved tensors
        self._recomputed: dict[int, Tensor] = {}  # by the second run, and not used yet

    def __call__(self, *args: Any) -> Tensor:
        tensors = [value for value in args if isinstance(value, Tensor)]
        self._args = [_without_value(value) for value in args]
        device = next(value for value in args if isinstance(value, Tensor | RecomputableOutput))
        device = device.device if isinstance(device, Tensor) else device.value.device
        anchor = torch.empty(0, device=device, requires_grad=True)
        # The node lives as long as its output: torch 2.11 frees what it saved when that dies.
        self._holder: Any = _SaveArguments.apply(anchor, *tensors)
        self._rng_snapshot = self._rng_streams.snapshot()
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._run(*args)

    def _pack(self, saved: Tensor) -> int:
        self._saved_shapes.append(saved.shape)
        return len(self._saved_shapes) - 1

    def _unpack(self, index: int) -> Tensor:
        """Returns a recomputed tensor and drops it. Autograd unpacks once in a backward pass; a second pass runs again."""
        if index not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(index)

    def _arguments(self) -> list[Any]:
        saved = self._holder.grad_fn.saved_tensors  # unpacked once: it may run other regions
        tensors = iter([x.detach().requires_grad_(x.requires_grad) for x in saved])
        args = []
        for value in self._args:
            if isinstance(value, RecomputeHandle):
                value = RecomputableOutput(value.recompute().detach().requires_grad_(), value)
            args.append(next(tensors) if value is _SAVED else value)
        return args

    def _recompute(self) -> None:
        args = self._arguments()
        recomputed_tensors: list[Tensor] = []

        def collect(saved: Tensor) -> None:
            index = len(recomputed_tensors)
            expected = self._saved_shapes[index] if index < len(self._saved_shapes) else None
            assert saved.shape == expected, f"the second run saved {saved.shape} where the first saved {expected}"
            recomputed_tensors.append(saved.detach())  # with its graph, the whole second run would stay in memory
            if len(recomputed_tensors) == len(self._saved_shapes):
                raise _StopRecompute

        try:
            with (
                self._rng_streams.at_snapshot(self._rng_snapshot),
                torch.enable_grad(),
                saved_tensors_hooks(collect, _never_unpack),
            ):
                self._run(*args)
            assert len(recomputed_tensors) == len(self._saved_shapes), (
                f"the second run saved {len(recomputed_tensors)} of {len(self._saved_shapes)} tensors"
            )
        except _StopRecompute:
            pass
        self._recomputed.update(enumerate(recomputed_tensors))


def _never_unpack(stored: object) -> Tensor:
    raise AssertionError("the graph of a second run is never differentiated")


def recomputed(run: ForwardFunction, rng_streams: RandomStreams) -> ForwardFunction:
    """Wraps a function: it runs as a region whenever gradients are enabled."""

    def forward(*args: Any) -> Tensor:
        return RecomputeRegion(run, rng_streams)(*args) if torch.is_grad_enabled() else run(*args)

    return forward


class DiscardedInput:
    """Runs a module so that it saves nothing of an input that has a recompute handle: the `forward` of that module.

    pack_others, unpack_others: the saved-tensor hooks for all other tensors it saves, which those of this class hide.
    """

    def __init__(self, consume: ForwardFunction) -> None:
        self._consume = consume
        self.pack_others: Callable[[Tensor], Any] = (
            torch.Tensor.detach
        )  # a saved output with its graph would be a cycle
        self.unpack_others: Callable[[Any], Tensor] = _as_it_is

    def __call__(self, x: Tensor | RecomputableOutput, *args: Any) -> Tensor:
        if not isinstance(x, RecomputableOutput) or x.handle is None or not torch.is_grad_enabled():
            return self._consume(x, *args)
        with self._hooks(x.value, x.handle):
            return self._consume(x, *args)

    def _hooks(self, value: Tensor, handle: RecomputeHandle) -> saved_tensors_hooks:
        """Returns hooks under which no view of the value's storage is saved."""
        storage, dtype, start = value.untyped_storage()._cdata, value.dtype, value.storage_offset()

        def pack(saved: Tensor) -> Any:
            if saved.untyped_storage()._cdata != storage or saved.dtype != dtype:
                return self.pack_others(saved)
            handle.retain_output()
            return _RecomputedView(handle, saved.shape, saved.stride(), saved.storage_offset() - start)

        def unpack(stored: Any) -> Tensor:
            return stored.fetch() if isinstance(stored, _RecomputedView) else self.unpack_others(stored)

        return saved_tensors_hooks(pack, unpack)


def _as_it_is(stored: Tensor) -> Tensor:
    return stored


def inputs_discarded(layer: TransformerLayer) -> list[DiscardedInput]:
    """Returns what runs the branches of a layer that save nothing of their inputs."""
    forwards = (branch.forward for branch in layer.branches())
    return [forward for forward in forwards if isinstance(forward, DiscardedInput)]


@dataclass(frozen=True, slots=True)
class _RecomputedView:
    """A view of a recomputable output: saved in its place."""

    handle: RecomputeHandle
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        output = self.handle.take_output()
        return output.as_strided(self.shape, self.stride, output.storage_offset() + self.offset)


def _recompute_modules(layer: TransformerLayer, modules: ModuleSet, rng_streams: RandomStreams) -> None:
    """Wraps a layer's recomputed modules, inner ones first."""
    if FULL in modules:
        _save_inputs_before_gemms(layer)
    for branch in layer.branches():
        for name, module in branch.recompute_regions().items():
            if name in modules:
                branch.region_is_recomputed(name)
                _save_inputs_before_gemms(module)
                module.forward = recomputed(module.forward, rng_streams)
        if "layernorm" in modules and branch.saves_input:
            branch.forward = DiscardedInput(branch.forward)


def _save_inputs_before_gemms(module: nn.Module) -> None:
    """Makes a region's GEMMs save their inputs before they run, and those they gather, which its second run gathers."""
    for linear in module.modules():
        if isinstance(linear, Linear):
            if isinstance(linear.linear_op, ColumnParallelOp):
                linear.linear_op = replace(linear.linear_op, regather=False)
            if isinstance(linear.linear_op, ColumnParallelOp | RowParallelOp | ReplicatedOp):
                linear.linear_op = replace(linear.linear_op, save_first=True)


def _grouped_layer_runner(
    stage: StageModule, groups: Sequence[tuple[int, bool]], rng_streams: RandomStreams
) -> LayerRunner:
    """Runs a stage's layers in groups of (count, recomputed) consecutive ones."""
    numbers = (number for number, (count, _) in enumerate(groups) for _ in range(count))
    group_of = dict(zip(stage.layers.values(), numbers, strict=True))

    def run(layers: Sequence[nn.Module], x_SBD: Tensor, context: ForwardContext) -> Tensor:
        for number, members in groupby(layers, key=group_of.__getitem__):
            run_group = partial(run_layers_sequentially, list(members))
            recompute = groups[number][1]
            x_SBD = recomputed(run_group, rng_streams)(x_SBD, context) if recompute else run_group(x_SBD, context)
        return x_SBD

    return run


def apply_recompute(stage: StageModule, plan: RecomputePlan, rng_streams: RandomStreams) -> None:
    """Applies the recompute plan of one stage. Called once, after every kind of parallelism has filled its slots."""
    for layer, modules in zip(stage.transformer_layers(), plan.modules, strict=True):
        _recompute_modules(layer, modules, rng_streams)
    if any(recompute for _, recompute in plan.groups):
        stage.run_layers = _grouped_layer_runner(stage, plan.groups, rng_streams)
