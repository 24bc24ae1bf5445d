"""The chunked product with cross-entropy against autograd in float64: whole, in chunks, and spread over ranks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels.fused_linear_cross_entropy import (
    CHUNK_BYTES,
    LARGE_BATCH_CHUNK_BYTES,
    GradRequest,
    VocabColumns,
    chunk_tokens,
    linear_cross_entropy,
)
from petatron.kernels.linear_gemms import PLAIN_GEMM, PlainGemm, WeightGrad
from tests.kernels.loss_cases import Case, MainGrad, Ranks, distance

BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("chunk", [None, 1, 7, 23, 64])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_losses_and_both_gradients(dtype: torch.dtype, chunk: int | None):
    case, bound = Case.random(23, 61, dtype=dtype), BOUNDS[dtype]
    grad = MainGrad.poisoned(case.weight)
    wanted = GradRequest(case.token_weights, grad.deliver)
    losses, grad_x = linear_cross_entropy(
        case.x, case.weight, case.targets, VocabColumns(61), grad_request=wanted, chunk_size=chunk
    )
    true_losses, true_grad_x, true_grad = case.expected()
    assert losses.dtype == grad.out.dtype == torch.promote_types(dtype, torch.float32)
    assert grad_x is not None and grad_x.dtype == dtype
    assert distance(losses, true_losses) <= bound
    assert distance(grad_x, true_grad_x) <= bound
    assert distance(grad.out, true_grad) <= bound
    assert grad.deliveries == (1 if chunk is None else -(-23 // chunk))


def test_the_weights_gradient_adds_to_what_a_micro_batch_before_left():
    first, second = Case.random(9, 31), Case.random(9, 31)
    second.weight = first.weight
    grad = MainGrad.poisoned(first.weight)
    for case in (first, second):
        wanted = GradRequest(case.token_weights, grad.deliver)
        linear_cross_entropy(case.x, case.weight, case.targets, VocabColumns(31), grad_request=wanted, chunk_size=4)
    torch.testing.assert_close(grad.out, first.expected()[2] + second.expected()[2])


def test_the_weights_gradient_of_no_tokens_is_zero():
    nothing, case = Case.random(0, 31), Case.random(9, 31)
    nothing.weight = case.weight
    grad = MainGrad.poisoned(case.weight)

    def add(case: Case) -> None:
        wanted = GradRequest(case.token_weights, grad.deliver)
        losses, grad_x = linear_cross_entropy(
            case.x, case.weight, case.targets, VocabColumns(31), grad_request=wanted, chunk_size=4
        )
        assert grad_x is not None and len(losses) == len(grad_x) == len(case.x)

    add(nothing)
    assert torch.equal(grad.out, torch.zeros_like(grad.out))
    add(case)
    add(nothing)
    torch.testing.assert_close(grad.out, case.expected()[2])


def test_short_operands_are_accumulated_in_float32():
    """1,024 chunks add 1 + 2^-10 each; in bf16 the sum would stop at 256."""
    x, weight = torch.ones(1024, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    grad = MainGrad.poisoned(weight)
    weights = torch.full((1024,), 2.0)
    targets = torch.zeros(1024, dtype=torch.int64)
    linear_cross_entropy(
        x, weight, targets, VocabColumns(2), grad_request=GradRequest(weights, grad.deliver), chunk_size=1
    )
    assert grad.out.tolist() == [[-1024.0], [1024.0]]


class Forward(PlainGemm):
    def backward(self, grad_RO: Tensor, weight: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, WeightGrad]:
        raise AssertionError("no gradient was asked for")


def test_evaluation_makes_losses_alone():
    case = Case.random(23, 61)
    losses, grad_x = linear_cross_entropy(
        case.x.requires_grad_(), case.weight, case.targets, VocabColumns(61), gemm=Forward(), chunk_size=5
    )
    assert grad_x is None and not losses.requires_grad
    torch.testing.assert_close(losses, case.expected()[0])


def test_a_frozen_weight_gets_no_gradient():
    case = Case.random(12, 30)
    wanted = GradRequest(case.token_weights, None)
    _, grad_x = linear_cross_entropy(
        case.x, case.weight, case.targets, VocabColumns(30), grad_request=wanted, chunk_size=5
    )
    assert distance(grad_x, case.expected()[1]) < 1e-13


@dataclass
class Watched:
    """A product that looks whether a chunk's logits are gone when the next is made."""

    rows: list[int] = field(default_factory=list)
    alive: list[weakref.ref[Tensor]] = field(default_factory=list)

    def forward(self, x_RD: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert all(logits() is None for logits in self.alive), "two chunks of logits at once"
        logits, kept = PLAIN_GEMM.forward(x_RD, weight)
        self.rows.append(logits.shape[0])
        self.alive.append(weakref.ref(logits))
        return logits, kept

    backward = staticmethod(PLAIN_GEMM.backward)


def test_one_chunk_of_logits_exists_at_a_time():
    case, watched = Case.random(23, 61), Watched()
    grad = MainGrad.poisoned(case.weight)
    wanted = GradRequest(case.token_weights, grad.deliver)
    linear_cross_entropy(
        case.x, case.weight, case.targets, VocabColumns(61), grad_request=wanted, gemm=watched, chunk_size=8
    )
    assert watched.rows == [8, 8, 7]


@dataclass(frozen=True)
class KeptJob:
    grad_RO: Tensor
    x_RD: Tensor
    needs_input: bool = False

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        assert x_RD is None
        product = self.grad_RO.t() @ self.x_RD
        out.copy_(out + product if accumulate else product)


class Keeping:
    """As a product in eight bits does: what the weight's gradient needs was kept by the forward pass."""

    def forward(self, x_RD: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return 2 * x_RD @ weight.t(), (2 * x_RD,)

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, WeightGrad]:
        return 2 * grad_RO @ weight, KeptJob(grad_RO, saved[0])


def test_another_product_is_taken_through():
    case = Case.random(11, 20)
    grad = MainGrad.poisoned(case.weight)
    wanted = GradRequest(case.token_weights, grad.deliver)
    losses, grad_x = linear_cross_entropy(
        case.x, case.weight, case.targets, VocabColumns(20), grad_request=wanted, gemm=Keeping(), chunk_size=4
    )
    case.x = 2 * case.x
    true_losses, true_grad_x, true_grad = case.expected()
    torch.testing.assert_close(losses, true_losses)
    torch.testing.assert_close(grad_x, 2 * true_grad_x)
    torch.testing.assert_close(grad.out, true_grad)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 40), count=st.integers(1, 4), pad_to=st.integers(1, 8), chunk=st.integers(1, 9))
def test_spread_over_ranks(size: int, count: int, pad_to: int, chunk: int):
    """Every rank has all losses, its summand of dx, and its rows of dW; padding rows hold garbage and get no gradient."""
    torch.manual_seed(size * 100 + count * 10 + pad_to)
    case = Case.random(8, size, hidden=6)
    true_losses, true_grad_x, true_grad = case.expected()
    local = -(-size // (pad_to * count)) * pad_to
    padded = torch.full((local * count, 6), 1e3, dtype=torch.float64)
    padded[:size] = case.weight
    ranks = Ranks(count)

    def work(rank: int) -> tuple[Tensor, Tensor | None, Tensor]:
        columns = ranks.columns(rank, size, local)
        mine = padded[rank * local : (rank + 1) * local]
        grad = MainGrad.poisoned(mine)
        wanted = GradRequest(case.token_weights, grad.deliver)
        evaluated, _ = linear_cross_entropy(case.x, mine, case.targets, columns, chunk_size=chunk)
        losses, grad_x = linear_cross_entropy(
            case.x, mine, case.targets, columns, grad_request=wanted, chunk_size=chunk
        )
        assert torch.equal(evaluated, losses)
        return losses, grad_x, grad.out

    results = ranks.run(work)
    for losses, _, _ in results:
        torch.testing.assert_close(losses, true_losses, rtol=0, atol=1e-11)
    torch.testing.assert_close(sum(grad_x for _, grad_x, _ in results), true_grad_x, rtol=0, atol=1e-11)
    joined = torch.cat([grad for _, _, grad in results])
    torch.testing.assert_close(joined[:size], true_grad, rtol=0, atol=1e-11)
    assert not joined[size:].any()


def test_a_token_without_weight_may_have_no_target():
    case = Case.random(10, 30)
    case.token_weights[3:6] = 0
    grad, without = MainGrad.poisoned(case.weight), MainGrad.poisoned(case.weight)
    wanted = GradRequest(case.token_weights, grad.deliver)
    _, expected = linear_cross_entropy(case.x, case.weight, case.targets, VocabColumns(30), grad_request=wanted)
    case.targets[3:6] = torch.tensor([-100, 30, -1])
    wanted = GradRequest(case.token_weights, without.deliver)
    losses, grad_x = linear_cross_entropy(case.x, case.weight, case.targets, VocabColumns(30), grad_request=wanted)
    assert losses.isfinite().all()
    assert torch.equal(grad_x, expected) and torch.equal(grad.out, without.out)


def test_gradients_are_slopes_of_the_loss():
    """By differences, which share nothing with the derivation."""
    case, step = Case.random(4, 6, hidden=3), 1e-6
    grad = MainGrad.poisoned(case.weight)
    wanted = GradRequest(case.token_weights, grad.deliver)
    _, grad_x = linear_cross_entropy(case.x, case.weight, case.targets, VocabColumns(6), grad_request=wanted)
    assert grad_x is not None
    for tensor, found in ((case.x, grad_x), (case.weight, grad.out)):
        for index in range(tensor.numel()):
            ends: list[Tensor] = []
            for place in (step, -2 * step, step):
                tensor.view(-1)[index] += place
                losses, _ = linear_cross_entropy(case.x, case.weight, case.targets, VocabColumns(6))
                ends.append((losses * case.token_weights).sum())
            slope = float(ends[0] - ends[1]) / (2 * step)
            assert float(found.view(-1)[index]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_logits_far_from_zero_do_not_overflow(shift: float):
    """All of a row's: their exponentials alone would be nothing, or infinite."""
    case = Case.random(10, 30, dtype=torch.float32)
    case.x[:, 0], case.weight[:, 0] = shift, 1.0
    losses, _ = linear_cross_entropy(case.x, case.weight, case.targets, VocabColumns(30))
    torch.testing.assert_close(losses.double(), case.expected()[0], rtol=1e-4, atol=1e-2)


def test_large_logits_do_not_overflow():
    case = Case.random(10, 30, dtype=torch.float32)
    case.x *= 1e3
    grad = MainGrad.poisoned(case.weight)
    wanted = GradRequest(case.token_weights, grad.deliver)
    losses, grad_x = linear_cross_entropy(case.x, case.weight, case.targets, VocabColumns(30), grad_request=wanted)
    true_losses, true_grad_x, true_grad = case.expected()
    assert max(distance(losses, true_losses), distance(grad_x, true_grad_x), distance(grad.out, true_grad)) < 1e-3


def test_chunks_stay_within_their_bound():
    assert chunk_tokens(16384, 128256, 2) == 6144 and chunk_tokens(32768, 128256, 2) == 8192
    assert chunk_tokens(8192, 128256, 2) == 4096 and chunk_tokens(16384, 32000, 2) == 16384
    for tokens in (1, 100, 4096, 32768, 10**6):
        for columns in (1, 1000, 32000, 256000, 10**9, 10**10):
            for size in (2, 4, 8):
                chunk = chunk_tokens(tokens, columns, size)
                bound = CHUNK_BYTES if tokens < 32768 else LARGE_BATCH_CHUNK_BYTES
                assert chunk == 1 or chunk * columns * size <= bound
                fewest = -(-tokens * columns * size // bound)
                assert chunk < 128 or -(-tokens // chunk) <= 2 * fewest, "no more chunks than there must be"
