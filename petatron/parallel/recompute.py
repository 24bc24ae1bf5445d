"""Recompute: what a layer would keep for its backward pass is thrown away, and made again when it is needed.

A `Region` runs a function and keeps its arguments alone. Autograd asks a hook what to store for each tensor it saves; inside
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
from petatron.estimate.recompute_plan import Modules, plan_recompute
from petatron.layers.forward_context import Pass
from petatron.layers.linear import Linear
from petatron.layers.moe.moe_layer import MoE
from petatron.layers.ops.recompute_output import Remade, Source
from petatron.layers.transformer_layer import Block
from petatron.mesh.rng import RandomStreams
from petatron.models.decoder import Decoder, LayerRunner, one_by_one
from petatron.parallel.tensor_parallel import ColumnProduct

Run = Callable[..., Tensor]


class _Enough(Exception):
    """Ends a second run: everything that is needed has been made."""


class _Keep(torch.autograd.Function):
    """A node outside every backward pass, which holds tensors the way autograd does: other hooks may replace them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing depends on this node")


class Region:
    """One call of a function, of which only the arguments are kept for the backward pass.

    An argument that its maker can make again is not kept either.
    """

    __slots__ = ("_holder", "_made", "_mark", "_others", "_run", "_shapes", "_sources", "_streams")

    def __init__(self, run: Run, streams: RandomStreams) -> None:
        self._run, self._streams = run, streams
        self._shapes: list[torch.Size] = []  # of what the first run saved
        self._made: dict[int, Tensor] = {}  # by the second run, and not used yet

    def __call__(self, *args: Any) -> Tensor:
        tensors = [value for value in args if isinstance(value, Tensor)]
        self._sources = {
            place: value.source
            for place, value in enumerate(args)
            if isinstance(value, Remade) and value.source is not None
        }
        self._others = {
            place: value
            for place, value in enumerate(args)
            if not isinstance(value, Tensor) and place not in self._sources
        }
        device = next(value for value in args if isinstance(value, Tensor | Remade))
        device = device.device if isinstance(device, Tensor) else device.value.device
        anchor = torch.empty(0, device=device, requires_grad=True)
        # The node lives as long as its output: torch 2.11 lets go of what it saved when that dies.
        self._holder: Any = _Keep.apply(anchor, *tensors)
        self._mark = self._streams.mark()
        with saved_tensors_hooks(self._store, self._fetch):
            return self._run(*args)

    def _store(self, saved: Tensor) -> int:
        self._shapes.append(saved.shape)
        return len(self._shapes) - 1

    def _fetch(self, place: int) -> Tensor:
        """What stood at a place, let go here. Autograd asks once in a backward pass; a second pass runs again."""
        if place not in self._made:
            self._run_again()
        return self._made.pop(place)

    def _arguments(self) -> list[Any]:
        kept = self._holder.grad_fn.saved_tensors  # asked for once: it may make other regions run
        tensors = iter([x.detach().requires_grad_(x.requires_grad) for x in kept])
        args = []
        for place in range(len(kept) + len(self._others) + len(self._sources)):
            if place in self._others:
                args.append(self._others[place])
            elif place in self._sources:
                source = self._sources[place]
                args.append(Remade(source.again().detach().requires_grad_(), source))
            else:
                args.append(next(tensors))
        return args

    def _run_again(self) -> None:
        args = self._arguments()
        made: list[Tensor] = []

        def collect(saved: Tensor) -> None:
            wanted = self._shapes[len(made)] if len(made) < len(self._shapes) else None
            assert saved.shape == wanted, f"the second run saved {saved.shape} where the first saved {wanted}"
            made.append(saved.detach())  # with its graph, the whole second run would stay in memory
            if len(made) == len(self._shapes):
                raise _Enough

        try:
            with self._streams.from_mark(self._mark), torch.enable_grad(), saved_tensors_hooks(collect, _never):
                self._run(*args)
            assert len(made) == len(self._shapes), f"the second run saved {len(made)} of {len(self._shapes)} tensors"
        except _Enough:
            pass
        self._made.update(enumerate(made))


def _never(stored: object) -> Tensor:
    raise AssertionError("the graph of a second run is never differentiated")


def recomputed(run: Run, streams: RandomStreams) -> Run:
    """The function, as a region whenever gradients are wanted."""

    def forward(*args: Any) -> Tensor:
        return Region(run, streams)(*args) if torch.is_grad_enabled() else run(*args)

    return forward


def discard_input(consumer: nn.Module) -> None:
    """Keep nothing of an input that its maker can make again."""
    consume = consumer.forward

    def forward(x: Tensor | Remade, *args: Any) -> Tensor:
        if not isinstance(x, Remade) or x.source is None or not torch.is_grad_enabled():
            return consume(x, *args)
        with _without(x.value, x.source):
            return consume(x, *args)

    consumer.forward = forward


@dataclass(frozen=True, slots=True)
class _View:
    """A view into what a source makes: what a consumer stores in its place."""

    source: Source
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        output = self.source.fetch_output()
        return output.as_strided(self.shape, self.stride, output.storage_offset() + self.offset)


def _without(value: Tensor, source: Source) -> saved_tensors_hooks:
    """Hooks under which nothing that lies in the value's memory is saved."""
    memory, dtype, start = value.untyped_storage()._cdata, value.dtype, value.storage_offset()

    def pack(saved: Tensor) -> Tensor | _View:
        if saved.untyped_storage()._cdata != memory or saved.dtype != dtype:
            return saved.detach()  # a saved output with its graph would be a cycle
        source.expect_output()
        return _View(source, saved.shape, saved.stride(), saved.storage_offset() - start)

    def unpack(stored: Tensor | _View) -> Tensor:
        return stored if isinstance(stored, Tensor) else stored.fetch()

    return saved_tensors_hooks(pack, unpack)


def _recompute_modules(block: Block, modules: Modules, streams: RandomStreams) -> None:
    """Inner ones first: what is wrapped later stands outside."""
    attention, mlp = block.attention, block.mlp
    parts: dict[str, nn.Module] = {"core_attn": attention.core, "attention": attention}
    if isinstance(mlp, MoE):
        parts |= {"moe": mlp} | ({} if mlp.shared is None else {"shared_experts": mlp.shared})
    else:
        parts["mlp"] = mlp
    if FULL in modules:
        _keep_gathered(block)
    for name, part in parts.items():
        if name in modules:
            _keep_gathered(part)
            part.forward = recomputed(part.forward, streams)
    if isinstance(mlp, MoE) and "shared_experts" in modules:
        mlp.shared_in_halves = False  # the region is the whole of it
    if "layernorm" in modules and isinstance(mlp, MoE):
        discard_input(mlp)


def _keep_gathered(part: nn.Module) -> None:
    """What products of a region gather, its second run keeps."""
    for linear in part.modules():
        if isinstance(linear, Linear) and isinstance(linear.product, ColumnProduct):
            linear.product = replace(linear.product, regather=False)


def _in_groups(groups: Sequence[tuple[int, bool]], streams: RandomStreams) -> LayerRunner:
    """Runs blocks in groups of (count, recomputed) consecutive ones."""

    def run(blocks: Sequence[nn.Module], x_SBD: Tensor, passing: Pass) -> Tensor:
        start = 0
        for count, again in groups:
            part = partial(one_by_one, blocks[start : start + count])
            x_SBD = recomputed(part, streams)(x_SBD, passing) if again else part(x_SBD, passing)
            start += count
        return x_SBD

    return run


def apply_recompute(
    decoder: Decoder,
    memory: MemoryConfig,
    streams: RandomStreams,
    *,
    shape: ActivationShape,
    in_flight: int = 1,
    stages_here: int = 1,
) -> str:
    """Make one stage recompute what the config says, or what its memory budget asks for; returns a line for the log.

    `in_flight` is the largest number of micro-batches whose activations the stage holds at a time, `stages_here` how many
    stages the rank has. Called once, after every kind of parallelism has filled its seams.
    """
    plan = plan_recompute(memory, shape, decoder.stage, in_flight=in_flight, stages_here=stages_here)
    for block, modules in zip(decoder.layers.values(), plan.modules, strict=True):
        assert isinstance(block, Block)
        _recompute_modules(block, modules, streams)
    if any(again for _, again in plan.groups):
        decoder.run_layers = _in_groups(plan.groups, streams)
    return plan.describe()
