"""Rows by expert and back, against loops over tokens; grouped products against one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.moe import (
    Arrangement,
    arrange,
    combine,
    grouped_linear,
    inverse,
    looped_linear,
    reorder,
    sort_by_expert,
    take,
)


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
    found = arrange(chosen, experts, incomplete=drop, capacity=capacity)
    counts = [found.counts] * experts if isinstance(found.counts, int) else found.counts.tolist()
    owner = [expert for expert, count in enumerate(counts) for _ in range(count)]
    real = [True] * len(owner) if found.real_R is None else found.real_R.tolist()
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
    found = sort_by_expert(chosen, experts, preference=liking)
    assert found.counts_E.tolist() == [int((chosen == expert).sum()) for expert in range(experts)]
    for t in range(tokens):
        for place in range(chosen.shape[1]):
            better = (chosen == chosen[t, place]) & (liking > liking[t, place])
            assert int(found.place_TK[t, place]) == int(better.sum())


def test_inverse_and_reorder():
    order = torch.tensor([2, 0, 3, 1])
    assert order[inverse(order)].tolist() == [0, 1, 2, 3]
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: reorder(x, order, inverse(order)), (x,))


CASES = [(False, None), (True, None), (False, 7), (True, 7)]


def arranged(drop: bool, capacity: int | None) -> Arrangement:
    return arrange(draw(7, 3, 4, 1, drop=drop), 4, incomplete=drop, capacity=capacity)


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


def test_no_rows_at_all():
    """A rank whose experts nobody chose still takes part."""
    arrangement = arrange(torch.full((3, 2), 4), 4, incomplete=True)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    y = combine(take(x, arrangement), weights, arrangement)
    y.sum().backward()
    assert x.grad is not None and weights.grad is not None
    assert not y.any() and not x.grad.any() and not weights.grad.any()


def test_low_precision_sums_in_float32():
    arrangement = arrange(torch.tensor([[0, 1, 2]]), 3)
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


def test_equal_counts_are_one_batched_product():
    x, weight = torch.randn(12, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(looped_linear(x, weight, 4), looped_linear(x, weight, torch.tensor([4, 4, 4])))
    torch.testing.assert_close(grouped_linear(x, weight, 4), looped_linear(x, weight, 4))


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear_without_the_kernel_is_the_loop(counts: list[int]):
    x, weight = torch.randn(sum(counts), 8), torch.randn(3, 16, 8)
    assert torch.equal(grouped_linear(x, weight, torch.tensor(counts)), looped_linear(x, weight, torch.tensor(counts)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("counts", [[300, 0, 4, 208], [0, 0, 0, 512], [1, 2, 3, 506], [512, 0, 0, 0], [128] * 4])
def test_grouped_kernel(counts: list[int]):
    """The one-kernel product and both its gradients against the loop, groups without rows included."""
    results = []
    for product in (grouped_linear, looped_linear):
        torch.manual_seed(0)
        x = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(4, 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = product(x, weight, torch.tensor(counts, device="cuda"))
        y.backward(torch.randn(y.shape, device="cuda").to(y.dtype))
        assert x.grad is not None and weight.grad is not None
        results.append((y.detach().float(), x.grad.float(), weight.grad.float()))
    for ours, reference in zip(*results, strict=True):
        assert (ours - reference).norm() <= 4e-3 * reference.norm()
    empty = [expert for expert, count in enumerate(counts) if count == 0]
    assert not results[0][2][empty].any()
