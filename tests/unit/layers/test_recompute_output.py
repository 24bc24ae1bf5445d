"""Values that are made again: derivatives, who keeps what and for how long, and several uses of one value."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels import activation
from petatron.layers.mlp import Activation
from petatron.layers.norm import LayerNorm, RMSNorm
from petatron.layers.ops.linear_op import GemmOp, WriteWeightGrad
from petatron.layers.ops.recompute_output import (
    DeferredOutput,
    MaybeTensors,
    RecomputableOutput,
    RecomputeHandle,
    Tensors,
    apply_recomputable,
    as_recomputable,
)

S, B, D, OUT = 6, 3, 8, 5


class Sine:
    """A maker that counts: (x, y) to (x + y, sin(x + y))."""

    requantized_in_backward = True

    def __init__(self) -> None:
        self.made = 0
        self.made_in_passing = 0

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        x, y = inputs
        assert x is not None and y is not None
        return (x + y, (x + y).sin()), (x + y,)

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        (total,) = saved
        grad = sum(
            (part for part in (grads[0], None if grads[1] is None else grads[1] * total.cos()) if part is not None),
            torch.zeros_like(total),
        )
        self.made_in_passing += recompute_output
        return (grad, grad), total.sin() if recompute_output else None

    def recompute(self, saved: Tensors) -> Tensor:
        self.made += 1
        return saved[0].sin()


class Taker:
    """Takes weight gradients at once; adds from the second on."""

    defers = False

    def __init__(self) -> None:
        self.grads: dict[Tensor, Tensor] = {}

    def submit(self, weight: Tensor, write: WriteWeightGrad, *, now: bool = False, start_comm: object = None) -> None:
        fresh = weight not in self.grads
        out = self.grads.setdefault(weight, torch.full_like(weight, float("nan")))
        write(out, not fresh)


def leaf(*shape: int, batch_first: bool = False) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x
    return x.requires_grad_()


def check(outputs: Tensor, wanted: Tensor, leaves: list[Tensor], taken: dict[Tensor, Tensor] | None = None) -> None:
    """Same values, and same gradients whether autograd or a taker has them."""
    torch.testing.assert_close(outputs, wanted)
    true = torch.autograd.grad(wanted.square().sum(), leaves)
    found = torch.autograd.grad(outputs.square().sum(), leaves, allow_unused=True)
    for x, ours, theirs in zip(leaves, found, true, strict=True):
        ours = (taken or {}).get(x) if ours is None else ours
        assert ours is not None
        torch.testing.assert_close(ours, theirs)


def test_a_maker_with_two_outputs():
    x, y = leaf(S, D), leaf(S, D)
    (total, value), _ = apply_recomputable(Sine(), x, y)
    check(value * total, (x + y).sin() * (x + y), [x, y])
    (total, value), _ = apply_recomputable(Sine(), x, y)
    check(value, (x + y).sin(), [x, y])
    (total, value), _ = apply_recomputable(Sine(), x, y)
    check(total, x + y, [x, y])


def test_without_gradients_nothing_is_made():
    x, y = leaf(S, D), leaf(S, D)
    (total, value), _ = apply_recomputable(Sine(), x, y.detach())
    (found,) = torch.autograd.grad((total * 0 + value * 2).sum(), x)
    torch.testing.assert_close(found, 2 * (x + y).cos())
    with torch.no_grad():
        (total, value), _ = apply_recomputable(Sine(), x, y)
        assert not value.requires_grad


def test_an_unused_value_costs_nothing():
    x, y, maker = leaf(S, D), leaf(S, D), Sine()
    apply_recomputable(maker, x, y)
    (x * y).sum().backward()
    assert (maker.made, maker.made_in_passing) == (0, 0)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("takes", [False, True])
def test_one_value_into_several_products(takes: bool, batch_first: bool):
    """It is made once for all of them in passing; for autograd, which cannot wait, once for each."""
    taker = Taker() if takes else None
    multiply, maker = GemmOp(weight_grad_target=taker), Sine()
    x, y = leaf(S, B, D, batch_first=batch_first), leaf(S, B, D, batch_first=batch_first)
    weights = [leaf(OUT, D) for _ in range(3)]
    (total, value), source = apply_recomputable(maker, x, y)
    products = [multiply(RecomputableOutput(value, source), weight) for weight in weights]
    wanted = [F.linear((x + y).sin(), weight) for weight in weights]
    check(torch.stack(products).prod(0), torch.stack(wanted).prod(0), [x, y, *weights], taker and taker.grads)
    assert (maker.made, maker.made_in_passing) == ((0, 1) if takes else (3, 0))
    assert total.shape == x.shape


@pytest.mark.parametrize("takes", [False, True])
def test_a_value_that_others_use_too(takes: bool):
    taker = Taker() if takes else None
    x, y, weight = leaf(S, D), leaf(S, D), leaf(OUT, D)
    (total, value), source = apply_recomputable(Sine(), x, y)
    product = GemmOp(weight_grad_target=taker)(RecomputableOutput(value, source), weight)
    wanted = F.linear((x + y).sin(), weight)
    ours, theirs = (
        torch.cat([p, 2 * v, 3 * t], -1) for p, v, t in ((product, value, total), (wanted, (x + y).sin(), x + y))
    )
    check(ours, theirs, [x, y, weight], taker and taker.grads)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("takes", [False, True])
def test_a_deferred_output_is_made_with_its_product(takes: bool, batch_first: bool):
    """One node instead of two, where a taker has the weight's gradient; the same numbers to the bit."""
    weight, found, inputs = leaf(OUT, D), [], [leaf(S, B, D, batch_first=batch_first) for _ in range(2)]
    for pending in (False, True):
        taker, maker = Taker() if takes else None, Sine()
        x, y = (each.detach().requires_grad_() for each in inputs)
        if pending:
            value = DeferredOutput(maker, x, y)
            product = GemmOp(weight_grad_target=taker)(value, weight)
            assert value.others is not None
            (total,) = value.others
            nodes = (product.grad_fn, total.grad_fn)
            assert (nodes[0] is nodes[1]) == takes
        else:
            (total, made), source = apply_recomputable(maker, x, y)
            product = GemmOp(weight_grad_target=taker)(RecomputableOutput(made, source), weight)
        grads = torch.autograd.grad(product.square().sum() + total.pow(3).sum(), [x, y] if takes else [x, y, weight])
        assert (maker.made, maker.made_in_passing) == ((0, 1) if takes else (1, 0))
        found.append([product.detach(), total.detach(), *grads, *([] if taker is None else taker.grads.values())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_a_deferred_output_that_somebody_asks_for_is_made_by_itself():
    x, y, weight, taker = leaf(S, D), leaf(S, D), leaf(OUT, D), Taker()
    value = DeferredOutput(Sine(), x, y)
    assert isinstance(value.handle, RecomputeHandle) and value.value is value.value
    product = GemmOp(weight_grad_target=taker)(value, weight) + value.value.sum()
    check(product, F.linear((x + y).sin(), weight) + (x + y).sin().sum(), [x, y, weight], taker.grads)


def test_a_deferred_output_is_gone_with_its_product():
    value = DeferredOutput(Sine(), leaf(S, D), leaf(S, D))
    GemmOp(weight_grad_target=Taker())(value, leaf(OUT, D))
    assert value.inputs == ()
    with pytest.raises(AssertionError, match="its output is gone"):
        value.apply()


def test_a_deferred_output_without_gradients():
    x, y, weight = leaf(S, D), leaf(S, D), leaf(OUT, D)
    with torch.no_grad():
        product = GemmOp(weight_grad_target=Taker())(DeferredOutput(Sine(), x, y), weight)
    assert product.grad_fn is None
    torch.testing.assert_close(product, F.linear((x + y).sin(), weight).detach())


def test_a_frozen_weight_of_a_deferred_output_makes_nothing_again():
    x, y, weight, maker, taker = leaf(S, D), leaf(S, D), leaf(OUT, D).detach(), Sine(), Taker()
    check(
        GemmOp(weight_grad_target=taker)(DeferredOutput(maker, x, y), weight), F.linear((x + y).sin(), weight), [x, y]
    )
    assert (maker.made, maker.made_in_passing) == (0, 0) and not taker.grads


def test_a_product_that_nobody_uses_leaves_the_others_of_a_deferred_output():
    x, y, weight, taker = leaf(S, D), leaf(S, D), leaf(OUT, D), Taker()
    value = DeferredOutput(Sine(), x, y)
    GemmOp(weight_grad_target=taker)(value, weight)
    assert value.others is not None
    check(value.others[0], x + y, [x, y])
    assert not taker.grads


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def test_a_gemm_whose_consumer_returns_no_gradient_passes_none_on():
    """Neither is a weight's gradient submitted; what else the inputs feed has its own."""
    x, y, weight, target = leaf(S, D), leaf(S, D), leaf(OUT, D), Taker()
    product = GemmOp(weight_grad_target=target)(DeferredOutput(Sine(), x, y), weight)
    (_NoGradient.apply(product).sum() + 2 * x.sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0)) and y.grad is None and not target.grads


def test_a_value_is_let_go_after_the_forward_pass():
    x, y, weight = leaf(S, D), leaf(S, D), leaf(OUT, D)
    (_, value), source = apply_recomputable(Sine(), x, y)
    memory = value.untyped_storage()._weak_ref()
    product = GemmOp(weight_grad_target=Taker())(RecomputableOutput(value, source), weight)
    del value
    assert torch.UntypedStorage._expired(memory)
    product.sum().backward()


@pytest.mark.parametrize("kind", ["rms", "layer", "gated", "plain"])
def test_layers_let_their_values_go(kind: str):
    layers = {
        "rms": lambda: RMSNorm(D, eps=1e-5),
        "layer": lambda: LayerNorm(D, eps=1e-5),
        "gated": lambda: Activation("swiglu"),
        "plain": lambda: Activation("gelu"),
    }
    layer = layers[kind]().to(torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, weight = leaf(S, B, D), leaf(OUT, D // 2 if kind == "gated" else D)
    out = layer.add_and_norm(x)[1] if isinstance(layer, RMSNorm | LayerNorm) else layer(x)
    memory = out.value.untyped_storage()._weak_ref()
    wanted = F.linear(out.value.detach().clone(), weight)
    taker = Taker()
    product = GemmOp(weight_grad_target=taker)(out, weight)
    del out
    assert torch.UntypedStorage._expired(memory)
    torch.testing.assert_close(product, wanted)
    product.square().sum().backward()
    (true,) = torch.autograd.grad(wanted.square().sum(), weight)
    torch.testing.assert_close(taker.grads[weight], true)


def test_nothing_outlives_the_graph():
    """No cycle holds it, so memory is free at once and not when garbage is collected."""
    x, y, weight, maker = leaf(S, D), leaf(S, D), leaf(OUT, D), Sine()
    (total, value), source = apply_recomputable(maker, x, y)
    loss = GemmOp(weight_grad_target=Taker())(RecomputableOutput(value, source), weight).sum() + total.sum()
    alive = weakref.ref(maker)
    loss.backward()
    del loss, value, total, source, maker
    assert alive() is None


@pytest.mark.parametrize("takes", [False, True])
def test_a_graph_may_be_used_twice(takes: bool):
    taker = Taker() if takes else None
    x, y, weight = leaf(S, D), leaf(S, D), leaf(OUT, D)
    (_, value), source = apply_recomputable(Sine(), x, y)
    loss = GemmOp(weight_grad_target=taker)(RecomputableOutput(value, source), weight).square().sum()
    (true,) = torch.autograd.grad(F.linear((x + y).sin(), weight).square().sum(), weight)
    loss.backward(retain_graph=True)
    first = x.grad
    x.grad = None
    loss.backward()
    assert first is not None and x.grad is not None and torch.equal(first, x.grad)
    torch.testing.assert_close(weight.grad if taker is None else taker.grads[weight], 2 * true)


def test_a_value_whose_graph_is_gone_cannot_be_made():
    x, y = leaf(S, D), leaf(S, D)
    (_, value), source = apply_recomputable(Sine(), x, y)
    del value, _
    with pytest.raises(AssertionError, match="the graph that the value belongs to is gone"):
        source.recompute()


def test_expected_values_are_made_once_and_let_go_with_the_last():
    x, y, maker = leaf(S, D), leaf(S, D), Sine()
    (_, value), source = apply_recomputable(maker, x, y)
    for _ in range(2):
        source.retain_output()
    first, second = source.take_output(), source.take_output()
    assert first is second and maker.made == 1 and torch.equal(first, value)
    memory = first.untyped_storage()._weak_ref()
    del first, second
    assert torch.UntypedStorage._expired(memory)


def test_a_tensor_as_a_value_is_kept_before_it_is_multiplied():
    """So that a recomputed region which ends with a product does not repeat it."""
    x, weight, taker = leaf(S, B, D), leaf(OUT, D), Taker()
    order: list[str] = []

    class Watched:
        def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
            order.append("multiplied")
            return x_RD @ weight.t(), ()

        def backward(self, grad_RO: Tensor, weight: Tensor, kept: Tensors) -> Any:
            return GemmOp().gemm.backward(grad_RO, weight, kept)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: order.append("kept") or t, lambda t: t):
        product = GemmOp(Watched(), taker)(as_recomputable(x), weight)
    assert order == ["kept", "multiplied"]
    check(product, F.linear(x, weight), [x, weight], taker.grads)
    same = RecomputableOutput(x, None)
    assert as_recomputable(same) is same and isinstance(as_recomputable(x).handle, RecomputeHandle)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_join_a_residual_stream(
    kind: type[RMSNorm] | type[LayerNorm], zero_centered_gamma: bool, batch_first: bool
):
    layer = kind(D, eps=1e-5, zero_centered_gamma=zero_centered_gamma).to(torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, branch, weight = leaf(S, B, D, batch_first=batch_first), leaf(S, B, D), leaf(OUT, D)
    scale = layer.weight + 1 if zero_centered_gamma else layer.weight
    leaves = [x, branch, weight, *layer.parameters()]
    for added in (branch, None):
        taker = Taker()
        total, normal = layer.add_and_norm(x, added)
        product = GemmOp(weight_grad_target=taker)(normal, weight)
        sum_ = x if added is None else x + branch
        if isinstance(layer, LayerNorm):
            true = F.layer_norm(sum_, (D,), scale, layer.bias, eps=1e-5)
        else:
            true = F.rms_norm(sum_, (D,), scale, eps=1e-5)
        assert normal.value.stride() == x.stride(), "rows lie as they came"
        wanted = torch.cat([F.linear(true, weight), 3 * sum_], -1)
        used = leaves if added is not None else [each for each in leaves if each is not branch]
        check(torch.cat([product, 3 * total], -1), wanted, used, taker.grads)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", [*activation.ACTIVATIONS, *activation.GATE_ACTIVATIONS])
def test_activations_before_a_product(name: str, batch_first: bool):
    gated = name in activation.GATE_ACTIVATIONS
    x, weight, taker = leaf(S, B, 2 * D if gated else D, batch_first=batch_first), leaf(OUT, D), Taker()
    out = Activation(name)(x)
    inner = activation.ACTIVATIONS[activation.GATE_ACTIVATIONS.get(name, name)]
    gate, up = x.chunk(2, -1) if gated else (x, torch.ones(()))
    product = GemmOp(weight_grad_target=taker)(out, weight)
    check(product, F.linear(inner(gate) * up, weight), [x, weight], taker.grads)
