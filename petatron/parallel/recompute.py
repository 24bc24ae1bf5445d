"""Recompute: what a layer would keep for its backward pass is thrown away, and made again when it is needed.

A `RecomputeRegion` runs a function and keeps its arguments alone. Autograd asks a hook what to store for each tensor it saves; inside
a region the hook stores a number. In the backward pass the first number that comes back makes the region run the function a
second time and hand out the tensors that this run saves, in the same order. What follows from that:

- The second run ends at the last tensor that is needed. Autograd saves the operands of a product before it multiplies, so
  a region that ends with a product (an MLP, an attention layer) does not repeat that one, nor the communication behind it.
- Both dropout streams are set to where they stood at the first run, and put back afterwards: masks are equal, and the rest
  of the step draws what it would have drawn.
- Communication inside is repeated, in the same order on every rank, since every rank runs the same regions.
- Layers' reports are written again, with the same values. Losses attached inside (router balance) join the gradient once:
  the second run is never differentiated.
- In a backward pass of two halves (zero-bubble schedules) the function runs in the first; operands that the second still
  needs stay until then.

Norms and activation functions need none of this: products do not keep what those make (`layers/ops/recompute_output.py`), nor what they
gather of it where the sequence is split over tensor-parallel ranks. A mixture of experts does keep its input, in several places;
under `layernorm` a second hook recognises it among the tensors that are saved (by its memory) and stores "what that norm makes"
instead. Inside a region it is the other way round: the second run gathers a product's input, which stays until the product's
backward pass, soon after, and is not gathered a third time.

Regions nest: the arguments of an inner one are saved through autograd, where the hooks of the outer one see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from petatron.config.schema.parallel import MemoryConfig
from petatron.estimate.activation_bytes import FULL, ActivationShape
from petatron.estimate.recompute_plan import ModuleSet, plan_recompute
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.moe.moe_layer import MoELayer
from petatron.layers.ops.recompute_output import Recomputable, RecomputeHandle
from petatron.layers.transformer_layer import TransformerLayer
from petatron.mesh.rng import RandomStreams
from petatron.models.decoder import Decoder, LayerRunner, run_layers_sequentially
from petatron.parallel.tensor_parallel import ColumnParallelOp

ForwardFunction = Callable[..., Tensor]


class _StopRecompute(Exception):
    """Ends a second run: everything that is needed has been made."""


class _SaveArguments(torch.autograd.Function):
    """A node outside every backward pass, which holds tensors the way autograd does: other hooks may replace them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing depends on this node")


class RecomputeRegion:
    """One call of a function, of which only the arguments are kept for the backward pass.

    An argument that its maker can make again is not kept either.
    """

    __slots__ = (
        "_handles",
        "_holder",
        "_other_args",
        "_recomputed",
        "_rng_snapshot",
        "_rng_streams",
        "_run",
        "_saved_shapes",
    )

    def __init__(self, run: ForwardFunction, rng_streams: RandomStreams) -> None:
        self._run, self._rng_streams = run, rng_streams
        self._saved_shapes: list[torch.Size] = []  # of what the first run saved
        self._recomputed: dict[int, Tensor] = {}  # by the second run, and not used yet

    def __call__(self, *args: Any) -> Tensor:
        tensors = [value for value in args if isinstance(value, Tensor)]
        self._handles = {
            place: value.handle
            for place, value in enumerate(args)
            if isinstance(value, Recomputable) and value.handle is not None
        }
        self._other_args = {
            place: value
            for place, value in enumerate(args)
            if not isinstance(value, Tensor) and place not in self._handles
        }
        device = next(value for value in args if isinstance(value, Tensor | Recomputable))
        device = device.device if isinstance(device, Tensor) else device.value.device
        anchor = torch.empty(0, device=device, requires_grad=True)
        # The node lives as long as its output: torch 2.11 lets go of what it saved when that dies.
        self._holder: Any = _SaveArguments.apply(anchor, *tensors)
        self._rng_snapshot = self._rng_streams.snapshot()
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._run(*args)

    def _pack(self, saved: Tensor) -> int:
        self._saved_shapes.append(saved.shape)
        return len(self._saved_shapes) - 1

    def _unpack(self, index: int) -> Tensor:
        """What stood at a place, let go here. Autograd asks once in a backward pass; a second pass runs again."""
        if index not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(index)

    def _arguments(self) -> list[Any]:
        kept = self._holder.grad_fn.saved_tensors  # asked for once: it may make other regions run
        tensors = iter([x.detach().requires_grad_(x.requires_grad) for x in kept])
        args = []
        for place in range(len(kept) + len(self._other_args) + len(self._handles)):
            if place in self._other_args:
                args.append(self._other_args[place])
            elif place in self._handles:
                source = self._handles[place]
                args.append(Recomputable(source.recompute().detach().requires_grad_(), source))
            else:
                args.append(next(tensors))
        return args

    def _recompute(self) -> None:
        args = self._arguments()
        made: list[Tensor] = []

        def collect(saved: Tensor) -> None:
            wanted = self._saved_shapes[len(made)] if len(made) < len(self._saved_shapes) else None
            assert saved.shape == wanted, f"the second run saved {saved.shape} where the first saved {wanted}"
            made.append(saved.detach())  # with its graph, the whole second run would stay in memory
            if len(made) == len(self._saved_shapes):
                raise _StopRecompute

        try:
            with (
                self._rng_streams.at_snapshot(self._rng_snapshot),
                torch.enable_grad(),
                saved_tensors_hooks(collect, _never_unpack),
            ):
                self._run(*args)
            assert len(made) == len(self._saved_shapes), (
                f"the second run saved {len(made)} of {len(self._saved_shapes)} tensors"
            )
        except _StopRecompute:
            pass
        self._recomputed.update(enumerate(made))


def _never_unpack(stored: object) -> Tensor:
    raise AssertionError("the graph of a second run is never differentiated")


def recomputed(run: ForwardFunction, rng_streams: RandomStreams) -> ForwardFunction:
    """The function, as a region whenever gradients are wanted."""

    def forward(*args: Any) -> Tensor:
        return RecomputeRegion(run, rng_streams)(*args) if torch.is_grad_enabled() else run(*args)

    return forward


def discard_input(consumer: nn.Module) -> None:
    """Keep nothing of an input that its maker can make again."""
    consume = consumer.forward

    def forward(x: Tensor | Recomputable, *args: Any) -> Tensor:
        if not isinstance(x, Recomputable) or x.handle is None or not torch.is_grad_enabled():
            return consume(x, *args)
        with _recompute_instead_of_saving(x.value, x.handle):
            return consume(x, *args)

    consumer.forward = forward


@dataclass(frozen=True, slots=True)
class _RecomputedView:
    """A view into what a source makes: what a consumer stores in its place."""

    handle: RecomputeHandle
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        output = self.handle.fetch_output()
        return output.as_strided(self.shape, self.stride, output.storage_offset() + self.offset)


def _recompute_instead_of_saving(value: Tensor, handle: RecomputeHandle) -> saved_tensors_hooks:
    """Hooks under which nothing that lies in the value's memory is saved."""
    memory, dtype, start = value.untyped_storage()._cdata, value.dtype, value.storage_offset()

    def pack(saved: Tensor) -> Tensor | _RecomputedView:
        if saved.untyped_storage()._cdata != memory or saved.dtype != dtype:
            return saved.detach()  # a saved output with its graph would be a cycle
        handle.expect_output()
        return _RecomputedView(handle, saved.shape, saved.stride(), saved.storage_offset() - start)

    def unpack(stored: Tensor | _RecomputedView) -> Tensor:
        return stored if isinstance(stored, Tensor) else stored.fetch()

    return saved_tensors_hooks(pack, unpack)


def _recompute_modules(layer: TransformerLayer, modules: ModuleSet, rng_streams: RandomStreams) -> None:
    """Inner ones first: what is wrapped later stands outside."""
    attention, mlp = layer.attention, layer.mlp
    parts: dict[str, nn.Module] = {"core_attn": attention.core, "attention": attention}
    if isinstance(mlp, MoELayer):
        parts |= {"moe": mlp} | ({} if mlp.shared is None else {"shared_experts": mlp.shared})
    else:
        parts["mlp"] = mlp
    if FULL in modules:
        _save_gathered_inputs(layer)
    for name, part in parts.items():
        if name in modules:
            _save_gathered_inputs(part)
            part.forward = recomputed(part.forward, rng_streams)
    if isinstance(mlp, MoELayer) and "shared_experts" in modules:
        mlp.shared_runs_in_halves = False  # the region is the whole of it
    if "layernorm" in modules and isinstance(mlp, MoELayer):
        discard_input(mlp)


def _save_gathered_inputs(part: nn.Module) -> None:
    """What products of a region gather, its second run keeps."""
    for linear in part.modules():
        if isinstance(linear, Linear) and isinstance(linear.linear_op, ColumnParallelOp):
            linear.linear_op = replace(linear.linear_op, regather=False)


def _grouped_layer_runner(groups: Sequence[tuple[int, bool]], rng_streams: RandomStreams) -> LayerRunner:
    """Runs blocks in groups of (count, recomputed) consecutive ones."""

    def run(blocks: Sequence[nn.Module], x_SBD: Tensor, passing: ForwardContext) -> Tensor:
        start = 0
        for count, again in groups:
            part = partial(run_layers_sequentially, blocks[start : start + count])
            x_SBD = recomputed(part, rng_streams)(x_SBD, passing) if again else part(x_SBD, passing)
            start += count
        return x_SBD

    return run


def apply_recompute(
    decoder: Decoder,
    memory: MemoryConfig,
    rng_streams: RandomStreams,
    *,
    shape: ActivationShape,
    in_flight: int = 1,
    num_local_stages: int = 1,
) -> str:
    """Make one stage recompute what the config says, or what its memory budget asks for; returns a line for the log.

    `in_flight` is the largest number of micro-batches whose activations the stage holds at a time, `num_local_stages` how many
    stages the rank has. Called once, after every kind of parallelism has filled its seams.
    """
    plan = plan_recompute(memory, shape, decoder.stage, in_flight=in_flight, num_local_stages=num_local_stages)
    for block, modules in zip(decoder.layers.values(), plan.modules, strict=True):
        assert isinstance(block, TransformerLayer)
        _recompute_modules(block, modules, rng_streams)
    if any(again for _, again in plan.groups):
        decoder.run_layers = _grouped_layer_runner(plan.groups, rng_streams)
    return plan.describe()
