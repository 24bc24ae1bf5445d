"""The Triton softmax of a chunk of logits against its plain twin and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels import fused_linear_cross_entropy as linear_loss
from petatron.kernels.fused_linear_cross_entropy import REFERENCE, GradRequest, VocabColumns, linear_cross_entropy
from tests.kernels.loss_cases import Case, MainGrad, Ranks, distance

pytest.importorskip("triton")
from petatron.kernels.triton.fused_linear_cross_entropy import TRITON
from tests.longform import diagonal

TOKENS = 3
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""The interpreter cuts bf16 off where a device rounds to the nearest."""
SIZES = [(1, 1), (7, 7), (61, 64), (300, 300), (0, 16), (250, 256), (33000, 33024), (40001, 40001)]
"""Real columns and all columns; a tile has at most 32,768."""
CASES = [(*sizes, torch.bfloat16) for sizes in SIZES] + [(61, 64, torch.float32), (300, 300, torch.float16)]


def sample(rows: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits whose padding is the highest of all, targets of which some are no real column, weights."""
    logits = torch.randn(TOKENS, padded) * 4
    logits[:, rows:] = 1e4
    targets = torch.randint(max(rows, 1), (TOKENS,))
    targets[0], targets[1] = -100, rows
    return logits.to(dtype), targets, torch.rand(TOKENS)


def true_gradient(logits: Tensor, targets: Tensor, weights: Tensor, rows: int) -> Tensor:
    grad = logits.double()
    linear_loss.losses_and_gradient_(grad, targets, weights.double(), rows)
    return grad


@pytest.mark.parametrize(("rows", "padded", "dtype"), CASES)
def test_statistics(rows: int, padded: int, dtype: torch.dtype):
    logits, targets, _ = sample(rows, padded, dtype)
    before = logits.clone()
    ours = TRITON.statistics(logits, targets, rows)
    assert ours.dtype == torch.float32 and torch.equal(logits, before)
    torch.testing.assert_close(ours.double(), REFERENCE.statistics(logits.double(), targets, rows), rtol=1e-5, atol=0)


@diagonal(3)
@pytest.mark.parametrize(("rows", "padded", "dtype"), [case for case in CASES if case[0]])
def test_losses_and_gradient(rows: int, padded: int, dtype: torch.dtype):
    logits, targets, weights = sample(rows, padded, dtype)
    true, double = true_gradient(logits, targets, weights, rows), logits.double()
    true_losses = REFERENCE.losses_and_gradient_(double, targets, weights.double(), rows)
    apart = logits.clone()
    losses = TRITON.losses_and_gradient_(logits, targets, weights, rows)
    torch.testing.assert_close(losses.double(), true_losses, rtol=1e-5, atol=1e-6)
    assert not logits[:, rows:].any()
    if rows > 1:
        assert distance(logits, true) <= BOUNDS[dtype]
    peak, total, _ = TRITON.statistics(apart, targets, rows)
    TRITON.gradient_(apart, targets, weights, peak + total.log(), rows)
    torch.testing.assert_close(apart, logits, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6)


def test_a_rank_that_holds_padding_alone_has_no_gradient():
    logits, targets, weights = sample(0, 16, torch.float32)
    TRITON.gradient_(logits, targets, weights, torch.zeros(TOKENS), 0)
    assert not logits.any()


def test_rows_may_lie_apart():
    wide = torch.randn(TOKENS, 100)
    untouched, targets, weights = wide[:, 72:].clone(), torch.randint(72, (TOKENS,)), torch.rand(TOKENS)
    true = true_gradient(wide[:, :72], targets, weights, 72)
    TRITON.losses_and_gradient_(wide[:, :72], targets, weights, 72)
    assert distance(wide[:, :72], true) < 1e-6
    assert torch.equal(wide[:, 72:], untouched)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_logit_breaks_its_loss_and_no_other(value: float):
    logits = torch.randn(3, 50)
    logits[1, 20] = value
    losses = TRITON.losses_and_gradient_(logits, torch.tensor([1, 2, 3]), torch.ones(3), 50)
    assert losses.isfinite().tolist() == [True, False, True]


def test_a_sure_token_has_a_small_loss_to_full_precision():
    logits = torch.tensor([[30.0, 15.0, 16.0, -3.0]])
    losses = TRITON.statistics(logits, torch.zeros(1, dtype=torch.int64), 4)
    exact = (torch.tensor([15.0, 14.0, 33.0]).double().neg().exp().sum()).log1p()
    assert float(losses[1].log() - losses[2]) == pytest.approx(float(exact), abs=1e-7)


@pytest.mark.parametrize("count", [1, 2])
def test_the_whole_over_ranks(count: int):
    case = Case.random(6, 30, dtype=torch.float32)
    true_losses, true_grad_x, true_grad = case.expected()
    ranks, local = Ranks(count), 32 // count
    padded = torch.cat((case.weight, torch.full((2, 16), 9.0)))

    def work(rank: int) -> tuple[Tensor, Tensor | None, Tensor]:
        columns = ranks.columns(rank, 30, local) if count > 1 else VocabColumns(30)
        mine = padded[rank * local : (rank + 1) * local]
        grad = MainGrad.poisoned(mine)
        wanted = GradRequest(case.token_weights, grad.deliver)
        losses, grad_x = linear_cross_entropy(
            case.x, mine, case.targets, columns, grad_request=wanted, kernels=TRITON, chunk_size=4
        )
        return losses, grad_x, grad.out

    results = ranks.run(work)
    assert distance(results[0][0], true_losses) < 1e-6
    assert distance(sum(grad_x for _, grad_x, _ in results), true_grad_x) < 1e-5
    joined = torch.cat([grad for _, _, grad in results])
    assert distance(joined[:30], true_grad) < 1e-5 and not joined[30:].any()
