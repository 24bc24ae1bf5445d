"""Rows by expert and back, against loops over tokens; grouped products against one matrix at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.activation import ACTIVATIONS, GATE_ACTIVATIONS
from petatron.kernels.moe import grouped_gemm, permute
from petatron.kernels.moe.grouped_gemm import GroupedGemm, grouped_weight_grad, looped_linear
from petatron.kernels.moe.permute import (
    Permutation,
    build_permutation,
    inverse_permutation,
    permute_router_weights,
    reorder,
    sort_by_expert,
    weighted_activation,
    weighted_activation_backward,
)

take, combine = (partial(function, kernels=permute.REFERENCE) for function in (permute.permute, permute.unpermute))


def draw(tokens: int, k: int, experts: int, seed: int, *, drop: bool = False) -> Tensor:
    """Distinct experts per token; some choices nowhere."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).topk(k, dim=1).indices
    return chosen.masked_fill(torch.rand(tokens, k, generator=generator) < 0.3, experts) if drop else chosen


shapes = {
    "tokens": st.integers(1, 12),
    "experts": st.integers(1, 6),
    "k": st.integers(1, 6),
    "seed": st.integers(0, 10_000),
}


@settings(max_examples=60, deadline=None)
@given(**shapes, drop=st.booleans(), padded=st.booleans())
def test_arrangement(tokens: int, experts: int, k: int, seed: int, drop: bool, padded: bool):
    k = min(k, experts)
    chosen = draw(tokens, k, experts, seed, drop=drop)
    capacity = tokens if padded else None
    found = build_permutation(chosen, experts, may_drop=drop, capacity=capacity)
    counts = [found.counts] * experts if isinstance(found.counts, int) else found.counts.tolist()
    owner = [expert for expert, count in enumerate(counts) for _ in range(count)]
    real = [True] * len(owner) if found.valid_R is None else found.valid_R.tolist()
    rows = {}
    for row, (expert, is_real) in enumerate(zip(owner, real, strict=True)):
        if is_real:
            choice = int(found.choice_R[row])
            assert int(chosen.flatten()[choice]) == expert
            rows[choice] = row
    kept = [choice for choice in range(tokens * k) if int(chosen.flatten()[choice]) < experts]
    assert sorted(rows) == kept, "every choice that goes somewhere has one row"
    assert all(int(found.row_TK.flatten()[choice]) == row for choice, row in rows.items())
    for expert in range(experts):
        its = [choice for choice in kept if int(chosen.flatten()[choice]) == expert]
        assert sorted(its, key=rows.__getitem__) == its, "token order within an expert"


@settings(max_examples=40, deadline=None)
@given(**shapes)
def test_preference_orders_within_an_expert(tokens: int, experts: int, k: int, seed: int):
    chosen = draw(tokens, min(k, experts), experts, seed)
    liking = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed))
    found = sort_by_expert(chosen, experts, priority=liking)
    assert found.counts_E.tolist() == [int((chosen == expert).sum()) for expert in range(experts)]
    for t in range(tokens):
        for place in range(chosen.shape[1]):
            better = (chosen == chosen[t, place]) & (liking > liking[t, place])
            assert int(found.position_in_expert_TK[t, place]) == int(better.sum())


def test_inverse_and_reorder():
    order = torch.tensor([2, 0, 3, 1])
    assert order[inverse_permutation(order)].tolist() == [0, 1, 2, 3]
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: reorder(x, order, inverse_permutation(order)), (x,))


def test_more_experts_than_bytes_count():
    chosen = draw(40, 5, 700, 3, drop=True)
    found = sort_by_expert(chosen, 700)
    assert found.counts_E.tolist() == [int((chosen == expert).sum()) for expert in range(700)]
    assert found.order.tolist() == sorted(range(200), key=lambda choice: int(chosen.flatten()[choice]))


CASES = [(False, None), (True, None), (False, 7), (True, 7)]


def arranged(drop: bool, capacity: int | None) -> Permutation:
    return build_permutation(draw(7, 3, 4, 1, drop=drop), 4, may_drop=drop, capacity=capacity)


@pytest.mark.parametrize(("drop", "capacity"), CASES)
def test_take_and_combine_by_hand(drop: bool, capacity: int | None):
    chosen, arrangement = draw(7, 3, 4, 1, drop=drop), arranged(drop, capacity)
    x, weights = torch.randn(7, 5, dtype=torch.float64), torch.rand(7, 3, dtype=torch.float64)
    rows = take(x, arrangement)
    counts = arrangement.counts
    owner = torch.arange(4).repeat_interleave(torch.full((4,), counts) if isinstance(counts, int) else counts)
    expected = torch.zeros_like(x)
    for t in range(7):
        for k in range(3):
            if chosen[t, k] < 4:
                expected[t] += weights[t, k] * (chosen[t, k] + 1) * x[t]
    torch.testing.assert_close(combine(rows * (owner + 1)[:, None], weights, arrangement), expected)


@pytest.mark.parametrize(("drop", "capacity"), CASES)
def test_gradients(drop: bool, capacity: int | None):
    arrangement = arranged(drop, capacity)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
        return combine(take(x, arrangement).sin(), weights, arrangement)

    assert torch.autograd.gradcheck(there_and_back, (x, weights))


@pytest.mark.parametrize("spare", [0, 2, 100])
def test_rows_to_spare_are_never_looked_at(spare: int):
    """With more room than is needed, some choices that go nowhere have rows behind those of all experts; NaN there reaches nothing."""
    chosen = draw(7, 3, 4, 1, drop=True)
    cut = build_permutation(chosen, 4, may_drop=True)
    rows = cut.choice_R.shape[0]
    found = build_permutation(chosen, 4, may_drop=True, max_rows=rows + spare)
    assert found.choice_R.shape[0] == min(21, rows + spare) and rows < 19
    assert torch.equal(found.truncate(rows).choice_R, cut.choice_R) and torch.equal(found.row_TK, cut.row_TK)
    assert isinstance(found.counts, Tensor) and isinstance(cut.counts, Tensor) and torch.equal(found.counts, cut.counts)
    results = []
    for arrangement in (found, cut):
        torch.manual_seed(0)
        x, weights = (torch.rand(7, n, dtype=torch.float64, requires_grad=True) for n in (5, 3))
        taken = take(x, arrangement)
        taken.register_hook(lambda grad: grad.index_fill(0, torch.arange(rows, grad.shape[0]), torch.nan))
        made = taken.index_fill(0, torch.arange(rows, taken.shape[0]), torch.nan)
        y = combine(made, weights, arrangement) + combine(made, None, arrangement)
        y = y + permute_router_weights(weights, arrangement)[:rows].square().sum()
        y.square().sum().backward()
        results.append((y.detach(), x.grad, weights.grad))
    for mine, true in zip(*results, strict=True):
        assert mine is not None and true is not None and mine.isfinite().all()
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize(("drop", "capacity"), CASES)
def test_weights_may_go_in_before(drop: bool, capacity: int | None):
    """Applied to the rows by hand and then summed without weights, it is the weighted sum, and so are the gradients."""
    arrangement = arranged(drop, capacity)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)

    def before(x: Tensor, weights: Tensor) -> Tensor:
        rows = take(x, arrangement).sin() * permute_router_weights(weights, arrangement)[:, None]
        return combine(rows, None, arrangement)

    torch.testing.assert_close(before(x, weights), combine(take(x, arrangement).sin(), weights, arrangement))
    assert torch.autograd.gradcheck(before, (x, weights))


@pytest.mark.parametrize("name", [*GATE_ACTIVATIONS, *ACTIVATIONS])
def test_weighted_activation(name: str):
    inner = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    gate, up = inner.chunk(2, dim=-1)
    wanted = (
        ACTIVATIONS[GATE_ACTIVATIONS[name]](gate) * up if name in GATE_ACTIVATIONS else ACTIVATIONS[name](inner)
    ) * weight[:, None]
    torch.testing.assert_close(weighted_activation(inner.detach(), weight.detach(), name), wanted)
    grad = torch.randn_like(wanted)
    true = torch.autograd.grad(wanted, (inner, weight), grad)
    *found, made = weighted_activation_backward(grad, inner.detach(), weight.detach(), name, recompute_output=True)
    for mine, expected in zip(found, true, strict=True):
        torch.testing.assert_close(mine, expected)
    assert made is not None
    torch.testing.assert_close(made, wanted)
    assert weighted_activation_backward(grad, inner.detach(), weight.detach(), name, recompute_output=False)[2] is None


def test_weighted_activation_rounds_once():
    """In bfloat16 no result is further from the exact one than half a step."""
    inner, weight = torch.randn(50, 64).bfloat16(), torch.rand(50)
    exact = weighted_activation(inner.double(), weight.double(), "swiglu")
    error = (weighted_activation(inner, weight, "swiglu").double() - exact).abs()
    assert (error <= 1.001 * 2**-8 * exact.abs()).all()


def test_no_rows_at_all():
    """A rank whose experts nobody chose still takes part."""
    arrangement = build_permutation(torch.full((3, 2), 4), 4, may_drop=True)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    y = combine(take(x, arrangement), weights, arrangement)
    y.sum().backward()
    assert x.grad is not None and weights.grad is not None
    assert not y.any() and not x.grad.any() and not weights.grad.any()


@pytest.mark.parametrize("capacity", [None, 3])
def test_no_tokens_at_all(capacity: int | None):
    """A rank without tokens has, padded, rows all the same."""
    arrangement = build_permutation(torch.empty(0, 2, dtype=torch.long), 4, capacity=capacity)
    rows = 0 if capacity is None else 4 * capacity
    x, weights = (torch.empty(0, n, dtype=torch.float64, requires_grad=True) for n in (5, 2))
    taken, weight_R = take(x, arrangement), permute_router_weights(weights, arrangement)
    assert taken.shape == (rows, 5) and weight_R.shape == (rows,) and not taken.any() and not weight_R.any()
    y = combine(taken.cos() * weight_R[:, None].cos(), weights, arrangement) + combine(taken, None, arrangement)
    assert y.shape == (0, 5)
    y.sum().backward()
    assert x.grad is not None and weights.grad is not None
    assert x.grad.shape == x.shape and weights.grad.shape == weights.shape


def test_padding_is_zeros_whatever_tokens_are():
    arrangement = arranged(False, 7)
    assert arrangement.valid_R is not None and not arrangement.valid_R.all()
    x, weights = torch.full((7, 5), torch.inf), torch.full((7, 3), torch.nan)
    grad, _ = permute.unpermute_backward(x, torch.randn(28, 5), torch.rand(7, 3), arrangement)
    for found in (permute.permute_rows(x, arrangement), permute.choices_to_rows(weights, arrangement), grad):
        assert not found[~arrangement.valid_R].any() and not found[arrangement.valid_R].isfinite().any()


def test_low_precision_sums_in_float32():
    arrangement = build_permutation(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = combine(rows, torch.ones(1, 3), arrangement)
    assert out.dtype == torch.bfloat16 and out.item() == 258.0  # 256 + 1 is 256 in bfloat16


COUNTS = [[3, 0, 4], [0, 0, 7], [1, 2, 4], [0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
def test_looped_linear(counts: list[int]):
    x = torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    y = looped_linear(x, weight, torch.tensor(counts))
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts))
    torch.testing.assert_close(y, torch.einsum("rd,rod->ro", x, weight[expert]))
    y.square().sum().backward()
    assert weight.grad is not None, "a weight without rows gets a gradient too"
    assert [bool(grad.any()) for grad in weight.grad] == [count > 0 for count in counts]


def product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Every row by itself."""
    expert = torch.arange(weight.shape[0]).repeat_interleave(counts)
    return torch.einsum("rd,rod->ro", x, weight[expert])


def test_equal_counts_are_one_batched_product():
    x, weight = torch.randn(12, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(looped_linear(x, weight, 4), looped_linear(x, weight, torch.tensor([4, 4, 4])))


@pytest.mark.parametrize("counts", [*COUNTS, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rest", [0, 3])
def test_grouped_multiplication(counts: list[int] | int, dtype: torch.dtype, rest: int):
    """Forward, the input's gradient, and the weight's written over or added to what is there, in at least float32."""
    sizes = torch.tensor([4, 4, 4] if isinstance(counts, int) else counts)
    rows, rest = int(sizes.sum()), 0 if isinstance(counts, int) else rest
    x, grad = (torch.randn(rows + rest, width).to(dtype) for width in (5, 4))
    weight = torch.randn(3, 4, 5).to(dtype)
    exact = [t.double().requires_grad_() for t in (x[:rows], weight)]
    wanted = product(*exact, sizes)
    true = torch.autograd.grad(wanted, exact, grad[:rows].double())
    wide = torch.promote_types(dtype, torch.float32)
    bounds = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}

    multiply = GroupedGemm(counts if isinstance(counts, int) else sizes)
    y, kept = multiply.forward(x, weight)
    assert kept == () and y.dtype == dtype and not y[rows:].any()
    torch.testing.assert_close(y[:rows].double(), wanted.detach(), **bounds)
    x_grad, job = multiply.backward(grad, weight, kept)
    torch.testing.assert_close(x_grad[:rows].double(), true[0], **bounds)
    assert job.needs_input
    out = torch.full((3, 4, 5), torch.nan, dtype=wide)
    job.write(x, out, accumulate=False)
    torch.testing.assert_close(out.double(), true[1], **bounds)
    job.write(x, out, accumulate=True)
    torch.testing.assert_close(out.double(), 2 * true[1], **bounds)
    torch.testing.assert_close(grouped_weight_grad(x, grad, multiply.counts).double(), true[1], **bounds)


@pytest.mark.parametrize("looped", [False, True])
def test_one_expert_after_the_other_on_request(looped: bool, monkeypatch: pytest.MonkeyPatch):
    """As on a device that has the grouped kernel, which here is a loop that leaves a trace."""
    asked: list[tuple[int, ...]] = []

    def one_kernel(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        asked.append(tuple(a.shape))
        if b.dim() == 3:
            return looped_linear(a, b.transpose(1, 2), counts)
        sizes = counts.tolist()
        return torch.stack([part @ rows for part, rows in zip(a.split(sizes, dim=1), b.split(sizes), strict=True)])

    monkeypatch.setattr(grouped_gemm, "_grouped_mm", one_kernel)
    monkeypatch.setattr(grouped_gemm, "_supports_grouped_mm", lambda *_: True)
    sizes = torch.tensor([2, 0, 5])
    x, grad, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((7, 4), (7, 6), (3, 6, 4)))
    multiply = GroupedGemm(sizes, looped=looped)
    y, kept = multiply.forward(x, weight)
    x_grad, job = multiply.backward(grad, weight, kept)
    out = torch.empty_like(weight)
    job.write(x, out, accumulate=False)
    assert asked == ([] if looped else [(7, 4), (7, 6), (6, 7)])
    exact = [t.clone().requires_grad_() for t in (x, weight)]
    wanted = product(*exact, sizes)
    for found, true in zip((y, x_grad, out), (wanted, *torch.autograd.grad(wanted, exact, grad)), strict=True):
        torch.testing.assert_close(found, true.detach())
