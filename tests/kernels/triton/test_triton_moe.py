"""The Triton twins of the row kernels against the plain functions, which are tested against loops in `test_moe.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels.activation import ACTIVATIONS, GATE_ACTIVATIONS, GluVariant
from petatron.kernels.moe import permute
from petatron.kernels.moe.permute import Permutation, build_permutation

pytest.importorskip("triton")
from petatron.kernels.triton.moe import permute as twins
from tests.longform import diagonal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts off what bfloat16 cannot hold, where a device rounds.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 8e-3}
KINDS = ["all", "padded", "dropped", "dropped, padded", "room for all", "room to spare", "copies", "no rows"]


def arrangement(kind: str, tokens: int = 9, k: int = 3, experts: int = 5) -> Permutation:
    chosen = torch.rand(tokens, experts).topk(k, dim=1).indices.to(DEVICE)
    some = chosen.masked_fill(torch.rand(tokens, k, device=DEVICE) < 0.4, experts)
    some[0, 0] = experts
    if kind == "all":
        return build_permutation(chosen, experts)
    if kind == "padded":
        return build_permutation(chosen, experts, capacity=tokens)
    if kind == "dropped, padded":
        return build_permutation(some, experts, may_drop=True, capacity=tokens)
    if kind == "no rows":
        return build_permutation(torch.full_like(chosen, experts), experts, may_drop=True)
    found = build_permutation(some, experts, may_drop=True)
    if kind.startswith("room"):
        spare = 1 if kind == "room to spare" else tokens * k
        return build_permutation(some, experts, may_drop=True, max_rows=found.choice_R.shape[0] + spare)
    if kind == "copies":  # choices without a row name one that belongs to another, as expert parallelism makes them
        row_TK = found.row_TK.clamp(max=found.choice_R.shape[0] - 1)
        return Permutation(found.choice_R, row_TK, found.counts, None, found.kept_TK)
    return found


def rows_for(found: Permutation, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows, NaN where no product writes and no sum may look."""
    rows = torch.randn(found.choice_R.shape[0], width, device=DEVICE)
    if isinstance(found.counts, Tensor):
        rows[int(found.counts.sum()) :] = torch.nan
    return rows.to(dtype)


def assert_close(ours: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
    assert ours.isfinite().all()
    assert (ours.double() - wanted.double()).norm() <= BOUNDS[dtype] * wanted.double().norm()


@diagonal(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 20), (torch.bfloat16, 64)])
def test_rows(kind: str, dtype: torch.dtype, width: int):
    found = arrangement(kind)
    x = torch.randn(9, width, device=DEVICE).to(dtype)
    assert torch.equal(twins.permute_rows(x, found), permute.permute_rows(x, found))
    rows, weights = rows_for(found, width, dtype), torch.rand(9, 3, device=DEVICE)
    for given in (None, weights):
        assert_close(
            twins.unpermute_rows(rows, found, weights_TK=given),
            permute.unpermute_rows(rows, found, weights_TK=given),
            dtype,
        )
    ours = twins.unpermute_backward(x, rows, weights, found)
    for mine, true in zip(ours, permute.unpermute_backward(x, rows, weights, found), strict=True):
        assert_close(mine, true, dtype)


def test_inputs_that_do_not_lie_in_order():
    found = arrangement("all")
    x, weights = torch.randn(16, 9, device=DEVICE).t(), torch.rand(3, 9, device=DEVICE).t()
    rows = torch.randn(16, 27, device=DEVICE).t()
    assert torch.equal(twins.permute_rows(x, found), permute.permute_rows(x, found))
    assert_close(
        twins.unpermute_rows(rows, found, weights_TK=weights),
        permute.unpermute_rows(rows, found, weights_TK=weights),
        torch.float32,
    )
    ours = twins.unpermute_backward(x, rows, weights, found)
    for mine, true in zip(ours, permute.unpermute_backward(x, rows, weights, found), strict=True):
        assert_close(mine, true, torch.float32)


@pytest.mark.parametrize("capacity", [None, 3])
def test_no_tokens_at_all(capacity: int | None):
    found = build_permutation(torch.empty(0, 2, dtype=torch.long, device=DEVICE), 4, capacity=capacity)
    x, weights = (torch.empty(0, n, device=DEVICE) for n in (5, 2))
    rows = permute.permute_rows(x, found)
    assert torch.equal(twins.permute_rows(x, found), rows) and not rows.any()
    assert torch.equal(twins.unpermute_rows(rows, found), permute.unpermute_rows(rows, found))
    ours, wanted = (kind.unpermute_backward(x, rows, weights, found) for kind in (twins, permute))
    assert all(torch.equal(mine, true) for mine, true in zip(ours, wanted, strict=True))


@diagonal(4)
@pytest.mark.parametrize("name", GATE_ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (9, 256), (5, 300), (3, 1024), (0, 8)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_weighted_activation(name: str, rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Every gate against autograd in float64, and with nothing left to plain torch."""
    bound = max(2e-6, BOUNDS[dtype])  # of float32, one for the function too
    inner = (2 * torch.randn(rows, 2 * width, device=DEVICE)).to(dtype)
    weight, grad = torch.rand(rows, device=DEVICE), torch.randn(rows, width, device=DEVICE).to(dtype)
    exact, exact_weight = inner.double().requires_grad_(), weight.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    active = ACTIVATIONS[GATE_ACTIVATIONS[name]](gate) * up
    wanted = active * exact_weight[:, None]
    true, true_weight = torch.autograd.grad(wanted, (exact, exact_weight), grad.double())
    monkeypatch.setattr(twins, "reference", None)
    made = twins.weighted_activation(inner, weight, name)
    assert made.dtype == dtype and (made - wanted).norm() <= bound * wanted.norm()
    ours = twins.weighted_activation_backward(grad, inner, weight, name, recompute_output=True)
    assert ours[2] is not None and torch.equal(ours[2], made), "what is made again has the same bits"
    assert ours[0].dtype == dtype and (ours[0] - true).norm() <= bound * true.norm()
    summands = (grad * active).abs().sum(-1)  # which may cancel
    assert ours[1].dtype == torch.float32 and ((ours[1] - true_weight).abs() <= 2e-6 * summands).all()
    assert twins.weighted_activation_backward(grad, inner, weight, name, recompute_output=False)[2] is None


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_without_a_gate_goes_the_plain_way(name: str):
    inner, grad, weight = (torch.randn(5, *rest, device=DEVICE) for rest in ((24,), (24,), ()))
    assert torch.equal(twins.weighted_activation(inner, weight, name), permute.weighted_activation(inner, weight, name))
    ours, wanted = (
        kind.weighted_activation_backward(grad, inner, weight, name, recompute_output=True) for kind in (twins, permute)
    )
    assert all(torch.equal(mine, true) for mine, true in zip(ours, wanted, strict=True))


def test_a_bounded_activation_goes_the_plain_way():
    inner, grad, weight = (torch.randn(5, *rest, device=DEVICE) for rest in ((24,), (12,), ()))
    variant = GluVariant(0.4, 1.0)
    value = twins.weighted_activation(inner, weight, "swiglu", variant)
    assert torch.equal(value, permute.weighted_activation(inner, weight, "swiglu", variant))
    assert not torch.equal(value, permute.weighted_activation(inner, weight, "swiglu"))
    ours, wanted = (
        kind.weighted_activation_backward(grad, inner, weight, "swiglu", variant, recompute_output=True)
        for kind in (twins, permute)
    )
    assert all(torch.equal(mine, true) for mine, true in zip(ours, wanted, strict=True))
    assert torch.equal(ours[2], value)


def test_rows_too_wide_for_registers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(twins, "MAX_ROW_WIDTH", 8)
    found, x, weights = arrangement("all"), torch.randn(9, 20, device=DEVICE), torch.rand(9, 3, device=DEVICE)
    rows = twins.permute_rows(x, found)
    assert torch.equal(rows, permute.permute_rows(x, found))
    ours, wanted = (
        (kind.unpermute_rows(rows, found, weights_TK=weights), *kind.unpermute_backward(x, rows, weights, found))
        for kind in (twins, permute)
    )
    assert all(torch.equal(mine, true) for mine, true in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 64, 33), (1, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_gradients_are_written_in_float32(shape: tuple[int, ...], dtype: torch.dtype, accumulate: bool):
    grad = torch.randn(shape, device=DEVICE).to(dtype)
    found, wanted = (torch.full(shape, 0.25, device=DEVICE) for _ in "ab")
    twins.TRITON.write_grad(found, grad, accumulate)
    permute.REFERENCE.write_grad(wanted, grad, accumulate)
    assert torch.equal(found, wanted)


def test_gradients_of_another_memory_order_go_the_plain_way():
    grad, out = torch.randn(3, 5, 4, device=DEVICE), torch.ones(3, 4, 5, device=DEVICE)
    twins.TRITON.write_grad(out, grad.transpose(1, 2), True)
    torch.testing.assert_close(out, grad.transpose(1, 2) + 1)
