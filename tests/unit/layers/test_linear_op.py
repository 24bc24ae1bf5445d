"""GEMMs of linears: gradients against autograd in float64, where weights' gradients go and when, and in which order memory lies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.row_sums import sum_rows
from petatron.kernels.weight_grad_gemm import matmul_into
from petatron.layers.linear import Linear
from petatron.layers.mlp import Activation
from petatron.layers.norm import RMSNorm
from petatron.layers.ops.linear_op import GemmOp, WriteWeightGrad, local_linear
from petatron.layers.ops.recompute_output import RecomputableOutput, as_recomputable
from petatron.layers.token_rows import from_row_order, from_rows, is_batch_first, to_row_order, to_rows
from petatron.layers.vocabulary.embedding import TokenEmbedding
from petatron.layers.vocabulary.output_head import OutputHead
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue

S, B, D, OUT = 6, 3, 8, 5


class Buffers:
    """Accumulates as the flat buffers do: in at least float32, the first gradient of a step over what the last one left."""

    def __init__(self, *weights: Tensor) -> None:
        self.out = {
            weight: torch.full_like(weight, float("nan"), dtype=torch.promote_types(weight.dtype, torch.float32))
            for weight in weights
        }
        self.fresh = set(weights)
        self.order: list[Tensor] = []

    def deliver(self, weight: Tensor, write: WriteWeightGrad) -> None:
        write(self.out[weight], weight not in self.fresh)
        self.fresh.discard(weight)
        self.order.append(weight)

    def queue(self) -> WeightGradQueue:
        queue = WeightGradQueue()
        queue.accumulate = self.deliver
        return queue


def leaf(*shape: int, batch_first: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x
    return x.requires_grad_()


def grads_of(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


SHAPES = {
    "rows": ((7, D), False),
    "sequence first": ((S, B, D), False),
    "batch first": ((S, B, D), True),
    "heads": ((S, B, 2, D), True),
    "one row": ((S, 1, D), False),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("takes", [False, True])
def test_a_product_and_its_gradients(case: str, takes: bool):
    shape, batch_first = SHAPES[case]
    x, weight = leaf(*shape, batch_first=batch_first), leaf(OUT, D)
    buffers = Buffers(weight)
    multiply = GemmOp(weight_grad_target=buffers.queue() if takes else None)
    for found in (multiply(as_recomputable(x), weight), multiply(RecomputableOutput(x, None), weight)):
        wanted = F.linear(x, weight)
        torch.testing.assert_close(found, wanted)
        assert is_batch_first(found) == is_batch_first(x)
        grad = torch.randn_like(wanted)
        true = grads_of((wanted * grad).sum(), x, weight)
        if takes:
            buffers.fresh.add(weight)
            ours = (*grads_of((found * grad).sum(), x), buffers.out[weight])
        else:
            ours = grads_of((found * grad).sum(), x, weight)
        for mine, theirs in zip(ours, true, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert is_batch_first(ours[0]) == is_batch_first(x)


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("in_gemm", [False, True])
def test_a_bias_and_its_gradient(case: str, takes: bool, in_gemm: bool):
    """Added by the GEMM, or by itself; the first gradient overwrites, the second adds."""
    shape, batch_first = SHAPES[case]
    x, weight, bias = leaf(*shape, batch_first=batch_first), leaf(OUT, D), leaf(OUT)
    buffers = Buffers(weight, bias)
    multiply = GemmOp(weight_grad_target=buffers.queue() if takes else None)
    wanted = F.linear(x, weight, bias)
    grad = torch.randn_like(wanted)
    true = grads_of((wanted * grad).sum(), x, weight, bias)
    for uses in (1, 2):
        found = multiply(as_recomputable(x), weight, bias if in_gemm else None)
        found = found if in_gemm else multiply.add_bias(found, bias)
        torch.testing.assert_close(found, wanted)
        loss = (found * grad).sum()
        ours = (*grads_of(loss, x), *map(buffers.out.get, (weight, bias))) if takes else grads_of(loss, x, weight, bias)
        for mine, theirs in zip(ours, (true[0], *(uses * g if takes else g for g in true[1:])), strict=True):
            torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        torch.testing.assert_close(multiply.add_bias(multiply(as_recomputable(x), weight), bias), wanted)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("needs_input_grad", [False, True])
def test_a_bias_is_trained_without_its_weight_and_the_reverse(frozen: str, needs_input_grad: bool):
    x, params = leaf(S, B, D).detach(), {"weight": leaf(OUT, D), "bias": leaf(OUT)}
    params[frozen].requires_grad_(False)
    x.requires_grad_(needs_input_grad)
    [trained] = params.keys() - {frozen}
    buffers = Buffers(*params.values())
    multiply = GemmOp(weight_grad_target=buffers.queue())
    found = multiply(as_recomputable(x), *params.values())
    found.square().sum().backward()
    torch.testing.assert_close(
        buffers.out[params[trained]], grads_of(F.linear(x, *params.values()).square().sum(), params[trained])[0]
    )
    assert buffers.order == [params[trained]] and (x.grad is not None) == needs_input_grad


def test_a_bias_of_half_precision_is_added_and_summed_in_float32():
    x, weight, bias = (leaf(*shape, dtype=torch.bfloat16) for shape in ((300, D), (OUT, D), (OUT,)))
    buffers, grad = Buffers(weight, bias), torch.randn(300, OUT).bfloat16()
    found = GemmOp(weight_grad_target=buffers.queue())(as_recomputable(x), weight, bias)
    torch.testing.assert_close(found, F.linear(x.double(), weight.double(), bias.double()).bfloat16())
    found.backward(grad)
    torch.testing.assert_close(buffers.out[bias], grad.float().sum(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_summed_over_what_is_there_or_added(dtype: torch.dtype):
    rows, before = torch.randn(700, OUT).bfloat16(), torch.randn(OUT).to(dtype)
    for accumulate in (False, True):
        out, exact = before.clone(), rows.double().sum(0) + (before.double() if accumulate else 0.0)
        sum_rows(rows, out, accumulate)
        torch.testing.assert_close(out.double(), exact, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_input_in_the_order_of_memory_is_not_copied(batch_first: bool):
    x = leaf(S, B, D, batch_first=batch_first)
    rows = to_rows(x, batch_first=is_batch_first(x))
    assert rows.data_ptr() == x.data_ptr() and rows.shape == (S * B, D)
    assert from_rows(rows, x, batch_first=is_batch_first(x)).stride() == x.stride()


@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4), memory_by_batch=st.booleans(), batch_first=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_rows_and_back(shape: list[int], memory_by_batch: bool, batch_first: bool):
    x = leaf(*shape, batch_first=memory_by_batch)
    rows = to_rows(x, batch_first=batch_first)
    assert rows.is_contiguous() and torch.equal(from_rows(rows, x, batch_first=batch_first), x)
    if len(shape) == 3:
        numbers = torch.arange(shape[0] * shape[1]).view(shape[:2])
        order = to_row_order(numbers, batch_first=batch_first)
        assert torch.equal(rows, torch.stack([x[n // shape[1], n % shape[1]] for n in order.tolist()]))
        assert torch.equal(from_row_order(order, numbers, batch_first=batch_first), numbers)


def test_the_first_gradient_overwrites_and_later_ones_add():
    x, weight = leaf(S, B, D), leaf(OUT, D)
    buffers = Buffers(weight)
    multiply = GemmOp(weight_grad_target=buffers.queue())
    for _ in range(2):  # two steps
        buffers.fresh.add(weight)
        wanted = torch.zeros_like(weight)
        for factor in (1.0, -2.0, 0.5):
            multiply(as_recomputable(x), weight).square().sum().mul(factor).backward()
            wanted += factor * grads_of(F.linear(x, weight).square().sum(), weight)[0]
            torch.testing.assert_close(buffers.out[weight], wanted)
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_add_up_in_float32(dtype: torch.dtype):
    """Their sum is that of exact products: nothing is rounded to the weight's precision on the way."""
    weight = leaf(OUT, D, dtype=dtype)
    buffers = Buffers(weight)
    multiply, wanted = GemmOp(weight_grad_target=buffers.queue()), torch.zeros(OUT, D, dtype=torch.float64)
    for _ in range(3):
        x, grad = leaf(40, D, dtype=dtype), torch.randn(40, OUT).to(dtype)
        multiply(as_recomputable(x), weight).backward(grad)
        wanted += grad.double().t() @ x.detach().double()
    assert buffers.out[weight].dtype == torch.float32
    torch.testing.assert_close(buffers.out[weight].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("out", "operand"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)],
)
def test_matmul_into(out: torch.dtype, operand: torch.dtype):
    a, b = torch.randn(5, 30).to(operand), torch.randn(30, 4).to(operand)
    found = torch.full((5, 4), float("nan"), dtype=out)
    matmul_into(found, a, b, accumulate=False)
    matmul_into(found, a, b, accumulate=True)
    torch.testing.assert_close(found.double(), 2 * (a.double() @ b.double()), rtol=1e-5, atol=1e-5)


def two_layers(takes: WeightGradQueue | None) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """norm, product, activation, product; and its weights."""
    norm, act, weights = RMSNorm(D, eps=1e-5).double(), Activation("swiglu"), [leaf(2 * OUT, D), leaf(D, OUT)]
    torch.nn.init.normal_(norm.weight)
    multiply = GemmOp(weight_grad_target=takes)

    def run(x: Tensor) -> Tensor:
        total, normal = norm.add_and_norm(x)
        return total + multiply(act(multiply(normal, weights[0])), weights[1])

    return run, [*weights, norm.weight]


def test_deferred_gradients_are_those_made_at_once():
    """Collected by backward pass, in whatever order those are computed; norms' come through autograd at once."""
    queue = WeightGradQueue()
    run, weights = two_layers(queue)
    inputs = [leaf(S, B, D, batch_first=True) for _ in range(3)]
    at_once = Buffers(*weights[:2])
    queue.accumulate = at_once.deliver
    for x in inputs:
        run(x).square().sum().backward()
    norm, weights[2].grad = weights[2].grad, None
    later = Buffers(*weights[:2])
    queue.accumulate = later.deliver
    losses = [run(x).square().sum() for x in inputs]
    for key, loss in enumerate(losses):
        with queue.deferring(key):
            loss.backward()
    assert later.order == [] and weights[2].grad is not None and torch.equal(weights[2].grad, norm)
    for key in (1, 0, 2):
        queue.compute_deferred(key)
        assert len(later.order) == 2 * (1 + [1, 0, 2].index(key))
    for weight in weights[:2]:
        torch.testing.assert_close(later.out[weight], at_once.out[weight])


class _Watched(WeightGradQueue):
    """Remembers the matrices that gradients will be made of, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[int] = []

    def submit(self, weight: Tensor, write: WriteWeightGrad, *, now: bool = False, **options: Any) -> None:
        assert isinstance(write, partial)
        self.operands += [x.untyped_storage()._weak_ref() for x in write.args if isinstance(x, Tensor)]
        super().submit(weight, write, now=now, **options)

    @property
    def alive(self) -> list[bool]:
        return [not torch.UntypedStorage._expired(ref) for ref in self.operands]


def test_what_a_deferred_gradient_is_made_of_is_let_go_when_it_is_made():
    queue = _Watched()
    run, weights = two_layers(queue)
    queue.accumulate = Buffers(*weights[:2]).deliver
    loss = run(leaf(S, B, D)).sum()
    with queue.deferring("first"):
        loss.backward()
    del loss
    assert queue.alive == [True, True]
    queue.compute_deferred("first")
    assert queue.alive == [False, False]


def test_a_queue_that_is_open_takes_what_cannot_wait():
    weight = leaf(2, 2)
    buffers = Buffers(weight)
    queue = buffers.queue()
    with queue.deferring("key"):
        queue.submit(weight, lambda out, accumulate: out.fill_(3.0), now=True)
        assert buffers.order == [weight]
        queue.submit(weight, lambda out, accumulate: out.add_(1.0))
        with pytest.raises(AssertionError), queue.deferring("another"):
            pass
    assert float(buffers.out[weight].detach()[0, 0]) == 3.0
    queue.compute_deferred("key")
    assert float(buffers.out[weight].detach()[0, 0]) == 4.0


def test_without_anybody_to_accumulate_a_gradient_is_an_error():
    weight = leaf(2, 2)
    with pytest.raises(AssertionError, match="no target accumulates"):
        WeightGradQueue().submit(weight, lambda out, accumulate: None)


@pytest.mark.parametrize("takes", [False, True])
def test_weights_that_are_frozen_get_no_gradient(takes: bool):
    x, weight = leaf(S, D), leaf(OUT, D).detach()
    buffers = Buffers(weight)
    y = GemmOp(weight_grad_target=buffers.queue() if takes else None)(as_recomputable(x), weight)
    (found,) = grads_of(y.square().sum(), x)
    torch.testing.assert_close(found, grads_of(F.linear(x, weight).square().sum(), x)[0])
    assert buffers.order == []


@pytest.mark.parametrize("takes", [False, True])
def test_a_graph_may_be_used_twice(takes: bool):
    x, weight = leaf(S, D), leaf(OUT, D)
    buffers = Buffers(weight)
    loss = GemmOp(weight_grad_target=buffers.queue() if takes else None)(as_recomputable(x), weight).square().sum()
    true = grads_of(F.linear(x, weight).square().sum(), weight)[0]
    loss.backward(retain_graph=True)
    loss.backward()
    found = buffers.out[weight] if takes else weight.grad
    torch.testing.assert_close(found, 2 * true)


def test_a_linear_layer_with_a_bias():
    layer = Linear(D, (OUT, 2), bias=True).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    assert layer.linear_op is local_linear and layer.bias is not None
    x = leaf(S, B, D, batch_first=True)
    leaves = (x, layer.weight, layer.bias)
    found, true = layer(x).square().sum(), F.linear(x, layer.weight, layer.bias).square().sum()
    for ours, theirs in zip(grads_of(found, *leaves), grads_of(true, *leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_the_loss_at_the_end(known: bool, takes: bool, batch_first: bool):
    """Gradients in the forward pass, where the tokens' weights are known, are those of the backward pass."""
    head = OutputHead(11, D, tied=False).double()
    assert head.weight is not None
    torch.nn.init.normal_(head.weight)
    buffers = Buffers(head.weight)
    head.weight_grad_target = buffers.queue() if takes else None
    x, targets, weights = (
        leaf(S, B, D, batch_first=batch_first),
        torch.randint(0, 11, (S, B)),
        torch.rand(S, B).double(),
    )
    losses = head.losses(x, None, targets, loss_weights_SB=weights if known else None)
    wanted = F.cross_entropy(F.linear(x, head.weight).flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
    torch.testing.assert_close(losses, wanted)
    assert buffers.order == ([head.weight] if takes and known else [])
    true = grads_of((wanted * weights).sum(), x, head.weight)
    if takes:
        found = (*grads_of((losses * weights).sum(), x), buffers.out[head.weight])
    else:
        found = grads_of((losses * weights).sum(), x, head.weight)
    for ours, theirs in zip(found, true, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("takes", [False, True])
def test_the_table_of_tokens(takes: bool):
    table = TokenEmbedding(7, D).double()
    torch.nn.init.normal_(table.weight)
    buffers = Buffers(table.weight)
    table.weight_grad_target = buffers.queue() if takes else None
    ids, grad = torch.randint(0, 7, (B, S)), torch.randn(S, B, D, dtype=torch.float64)
    found = table(ids)
    assert is_batch_first(found) and torch.equal(found, table.weight[ids].transpose(0, 1))
    found.backward(grad)
    true = torch.zeros(7, D, dtype=torch.float64).index_add_(0, ids.t().flatten(), grad.flatten(0, 1))
    torch.testing.assert_close(buffers.out[table.weight] if takes else table.weight.grad, true)


@pytest.mark.parametrize("taken", [True, False])
def test_an_input_that_needs_no_gradient_is_kept_for_the_weight(taken: bool):
    """Nothing in front of it has a backward pass in which the input could be made again."""
    torch.manual_seed(0)
    linear = Linear(5, (3,), bias=False).double()
    torch.nn.init.normal_(linear.weight)
    found: list[Tensor] = []

    class Taker:
        defers = False

        def submit(
            self, weight: Tensor, write: WriteWeightGrad, *, now: bool = False, start_comm: object = None
        ) -> None:
            found.append(torch.empty_like(weight))
            write(found[-1], False)

    if taken:
        how = GemmOp(weight_grad_target=Taker())
        linear.linear_op = lambda x, weight, bias: how(as_recomputable(x), weight, bias)
    x = torch.randn(4, 2, 5, dtype=torch.float64)
    linear(x).square().sum().backward()
    wanted = 2 * torch.einsum("sbo,sbd->od", linear(x).detach(), x)
    grad = found[0] if taken else linear.weight.grad
    assert grad is not None
    torch.testing.assert_close(grad, wanted)
