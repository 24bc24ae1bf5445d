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

Norms and activation functions need more: the product that follows saves their *output*, so making their insides again
frees little. `discard_output` runs the producer as a region and the consumer under a second hook, which recognises the
output among the tensors that the consumer saves (by its memory) and stores "the output of that region" instead. Where the
sequence is split over tensor-parallel ranks the consumer saves the gathered output, so its product becomes a region as
well: it gathers once more in the backward pass.

Regions nest: the arguments of an inner one are saved through autograd, where the hooks of the outer one see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from petatron.config.schema import MemoryConfig
from petatron.kernels.moe import Counts
from petatron.layers.block import Block
from petatron.layers.linear import Linear
from petatron.layers.moe import MoE
from petatron.layers.passing import Pass
from petatron.mesh.rng import RandomStreams
from petatron.models.activations import ActivationShape
from petatron.models.decoder import Decoder, LayerRunner, one_by_one
from petatron.models.recompute_plan import Modules, plan_recompute
from petatron.parallel.tensor import ColumnProduct

Run = Callable[..., Tensor]
_OUTPUT = -1  # the place of a region's output; what it saves inside has places from 0 on
_MARK = "_made_by"  # on an output that will be discarded: the region that can make it again


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

    `whole`: the output is wanted a second time too, by a consumer that calls `expect_output` where it would save it.
    """

    __slots__ = (
        "_expected",
        "_holder",
        "_left",
        "_made",
        "_others",
        "_run",
        "_shapes",
        "_states",
        "_streams",
        "_whole",
    )

    def __init__(self, run: Run, streams: RandomStreams, *, whole: bool = False) -> None:
        self._run, self._streams, self._whole = run, streams, whole
        self._shapes: list[torch.Size] = []  # of what the first run saved
        self._made: dict[int, Tensor] = {}  # by the second run, and not used yet
        self._expected = self._left = 0  # uses of the output

    def __call__(self, *args: Any) -> Tensor:
        tensors = [value for value in args if isinstance(value, Tensor)]
        self._others = {place: value for place, value in enumerate(args) if not isinstance(value, Tensor)}
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
        # The node lives as long as its output: torch 2.11 lets go of what it saved when that dies.
        self._holder: Any = _Keep.apply(anchor, *tensors)
        self._states = self._streams.state()
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

    def expect_output(self) -> None:
        self._expected += 1

    def fetch_output(self) -> Tensor:
        """The output, let go with the last of the uses that are expected."""
        if _OUTPUT not in self._made:
            self._run_again()
        self._left -= 1
        return self._made[_OUTPUT] if self._left else self._made.pop(_OUTPUT)

    def _run_again(self) -> None:
        kept = self._holder.grad_fn.saved_tensors  # asked for once: it may make other regions run
        tensors = iter([x.detach().requires_grad_(x.requires_grad) for x in kept])
        places = range(len(kept) + len(self._others))
        args = [self._others[place] if place in self._others else next(tensors) for place in places]
        made: list[Tensor] = []

        def collect(saved: Tensor) -> None:
            wanted = self._shapes[len(made)] if len(made) < len(self._shapes) else None
            assert saved.shape == wanted, f"the second run saved {saved.shape} where the first saved {wanted}"
            made.append(saved.detach())  # with its graph, the whole second run would stay in memory
            if len(made) == len(self._shapes) and not self._whole:
                raise _Enough

        before = self._streams.state()
        self._streams.restore(self._states)
        try:
            with torch.enable_grad(), saved_tensors_hooks(collect, _never):
                output = self._run(*args)
            assert len(made) == len(self._shapes), f"the second run saved {len(made)} of {len(self._shapes)} tensors"
            if self._expected:
                self._made[_OUTPUT], self._left = output.detach(), self._expected
        except _Enough:
            pass
        finally:
            self._streams.restore(before)
        self._made.update(enumerate(made))


def _never(stored: object) -> Tensor:
    raise AssertionError("the graph of a second run is never differentiated")


def recomputed(run: Run, streams: RandomStreams) -> Run:
    """The function, as a region whenever gradients are wanted."""

    def forward(*args: Any) -> Tensor:
        return Region(run, streams)(*args) if torch.is_grad_enabled() else run(*args)

    return forward


def discard_output(producer: nn.Module, consumer: nn.Module, streams: RandomStreams) -> None:
    """Keep neither the insides nor the output of a module whose output goes to one other module."""
    produce, consume = producer.forward, consumer.forward

    def forward_producer(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return produce(x)
        region = Region(produce, streams, whole=True)
        output = region(x)
        setattr(output, _MARK, region)
        return output

    def forward_consumer(x: Tensor, *args: Any) -> Tensor:
        region = getattr(x, _MARK, None)
        if region is None:
            return consume(x, *args)
        with _without(x, region):
            return consume(x, *args)

    producer.forward = forward_producer
    consumer.forward = forward_consumer


@dataclass(frozen=True, slots=True)
class _View:
    """A view into the output of a region: what a consumer stores in its place."""

    region: Region
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> Tensor:
        output = self.region.fetch_output()
        return output.as_strided(self.shape, self.stride, output.storage_offset() + self.offset)


def _without(output: Tensor, region: Region) -> saved_tensors_hooks:
    """Hooks under which nothing that lies in the output's memory is saved."""
    memory, dtype, start = output.untyped_storage()._cdata, output.dtype, output.storage_offset()

    def pack(saved: Tensor) -> Tensor | _View:
        if saved.untyped_storage()._cdata != memory or saved.dtype != dtype:
            return saved.detach()  # a saved output with its graph would be a cycle
        region.expect_output()
        return _View(region, saved.shape, saved.stride(), saved.storage_offset() - start)

    def unpack(stored: Tensor | _View) -> Tensor:
        return stored if isinstance(stored, Tensor) else stored.fetch()

    return saved_tensors_hooks(pack, unpack)


def discard_activation(experts: nn.Module, streams: RandomStreams) -> None:
    """Keep of an expert layer what goes in and out of its products, but not what its activation makes."""
    name = _first_of(experts)
    first, last = experts.get_submodule(name), experts.get_submodule("down")
    # The layer's own forward with nothing done in the place of its products: what is left is the activation.
    bare = SimpleNamespace(**{"act": experts.act, name: _pass_on, "down": _pass_on})
    activation = partial(type(experts).forward, bare)

    def forward(x_RD: Tensor, counts: Counts) -> Tensor:
        inner = first(x_RD, counts)
        if not torch.is_grad_enabled():
            return last(activation(inner, counts), counts)
        region = Region(activation, streams, whole=True)
        outer = region(inner, counts)
        with _without(outer, region):
            return last(outer, counts)

    experts.forward = forward


def _pass_on(x_RD: Tensor, counts: Counts) -> Tensor:
    return x_RD


def _first_of(mlp: nn.Module) -> str:
    """The name of an MLP's first product: gated ones have two in one."""
    return "gate_up" if hasattr(mlp, "gate_up") else "up"


def _recompute_modules(block: Block, modules: Modules, streams: RandomStreams) -> None:
    """Inner ones first: what is wrapped later stands outside."""
    attention, mlp = block.attention, block.mlp
    parts: dict[str, nn.Module] = {"core_attn": attention.core, "attention": attention}
    if isinstance(mlp, MoE):
        if "moe_act" in modules:
            discard_activation(mlp.experts, streams)
        parts |= {"moe": mlp} | ({} if mlp.shared is None else {"shared_experts": mlp.shared})
    else:
        parts["mlp"] = mlp
    for name, part in parts.items():
        if name in modules:
            part.forward = recomputed(part.forward, streams)
    if "layernorm" in modules:
        _discard_norm(block.attention_norm, attention, None if "attention" in modules else attention.qkv, streams)
        _discard_norm(block.mlp_norm, mlp, _entrance(mlp, modules), streams)


def _entrance(mlp: nn.Module, modules: Modules) -> nn.Module | None:
    """The product that takes a norm's output into an MLP or shared expert; None if it is in a region already."""
    shared = mlp.shared if isinstance(mlp, MoE) else mlp
    if shared is None or modules & {"mlp", "moe", "shared_experts"}:
        return None
    return shared.get_submodule(_first_of(shared))


def _discard_norm(norm: nn.Module, consumer: nn.Module, entrance: nn.Module | None, streams: RandomStreams) -> None:
    if isinstance(entrance, Linear) and isinstance(entrance.product, ColumnProduct) and entrance.product.sequence:
        entrance.product = recomputed(entrance.product, streams)
    discard_output(norm, consumer, streams)


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
