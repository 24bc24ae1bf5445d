"""Cross-entropy against its specification: whole, and spread over vocabulary parts that exchange as ranks do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.kernels import reference
from petatron.kernels.loss import cross_entropy
from petatron.layers.vocabulary import TokenEmbedding, Vocabulary
from petatron.mesh.spec import Shard, TensorSplit, place


class Parts:
    """Ranks of a vocabulary, as threads of this process; exchanges happen in place, like collectives."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=20)
        self._slots: list[Tensor] = [torch.empty(0)] * count

    def _exchange(self, rank: int, x: Tensor) -> Tensor:
        self._slots[rank] = x.clone()
        self._barrier.wait()
        stacked = torch.stack(self._slots)
        self._barrier.wait()
        return stacked

    def vocabulary(self, rank: int, size: int, pad_to: int) -> Vocabulary:
        pieces = place("head", (size,), Shard(tp=0, pad_to=pad_to), TensorSplit(self.count, rank)).pieces
        return Vocabulary(
            size=size,
            first=pieces[0].start[0] if pieces else size,
            rows=pieces[0].shape[0] if pieces else 0,
            ranks=(
                lambda x: x.copy_(self._exchange(rank, x).amax(0)),
                lambda x: x.copy_(self._exchange(rank, x).sum(0)),
            ),
            join=lambda x: self._exchange(rank, x).flatten(0, 1),
        )

    def run(self, work) -> list:
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(work, range(self.count)))


def sample(size: int, *, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [S, B, V], targets [S, B] and the weight of each token in the loss."""
    torch.manual_seed(size)
    logits = (torch.randn(5, 2, size, dtype=torch.float64) * scale).to(dtype)
    return logits, torch.randint(size, (5, 2)), torch.rand(5, 2, dtype=torch.float64)


def expected(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    losses = reference.cross_entropy(leaf, targets)
    return losses.detach(), torch.autograd.grad((losses * weights).sum(), leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_whole_vocabulary(dtype: torch.dtype):
    logits, targets, weights = sample(37, dtype=dtype)
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    leaf = logits.clone().requires_grad_()
    losses = cross_entropy(leaf, targets)
    (losses * weights).sum().backward()
    wanted, gradient = expected(logits, targets, weights)
    assert losses.dtype == wanted.dtype and leaf.grad is not None and leaf.grad.dtype == dtype
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(leaf.grad, gradient)
    assert torch.equal(leaf, logits), "the caller's logits are untouched"


def test_gradient_by_differences():
    logits, targets, upstream = sample(6)
    leaf = logits.clone().requires_grad_()
    (cross_entropy(leaf, targets) * upstream).sum().backward()
    assert leaf.grad is not None
    step = 1e-6
    for index in range(logits.numel()):
        nudge = torch.zeros_like(logits).view(-1)
        nudge[index] = step
        up, down = (cross_entropy(logits + sign * nudge.view_as(logits), targets) for sign in (1, -1))
        slope = float(((up - down) * upstream).sum()) / (2 * step)
        assert float(leaf.grad.view(-1)[index]) == pytest.approx(slope, abs=1e-8)


def test_a_second_backward_pass_is_refused():
    """The first one overwrote the saved softmax with the gradient."""
    logits, targets, _ = sample(6)
    loss = cross_entropy(logits.requires_grad_(), targets).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_large_logits_do_not_overflow(shift: float):
    logits, targets, _ = sample(9, dtype=torch.float32, scale=50.0)
    losses = cross_entropy(logits + shift, targets)
    assert losses.isfinite().all()
    torch.testing.assert_close(losses, reference.cross_entropy(logits + shift, targets), rtol=1e-4, atol=1e-2)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), count=st.integers(1, 4), pad_to=st.integers(1, 8))
def test_spread_over_parts(size: int, count: int, pad_to: int):
    """Every part's losses and its columns of the gradient; padding columns hold garbage and get no gradient."""
    logits, targets, weights = sample(size)
    wanted, gradient = expected(logits, targets, weights)
    parts = Parts(count)
    local = -(-size // (pad_to * count)) * pad_to

    def work(rank: int) -> tuple[Tensor, Tensor]:
        vocabulary = parts.vocabulary(rank, size, pad_to)
        mine = torch.full((5, 2, local), 1e6, dtype=torch.float64)
        mine[..., : vocabulary.rows] = logits[..., vocabulary.first : vocabulary.first + vocabulary.rows]
        mine.requires_grad_()
        losses = vocabulary.token_losses(mine, targets)
        (losses * weights).sum().backward()
        assert mine.grad is not None
        return losses.detach(), mine.grad

    results = parts.run(work)
    for losses, _ in results:
        torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-11)
    joined = torch.cat([grad for _, grad in results], dim=-1)
    torch.testing.assert_close(joined[..., :size], gradient, rtol=0, atol=1e-11)
    assert not joined[..., size:].any()


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 40), count=st.integers(1, 4), pad_to=st.integers(1, 8))
def test_lookup_and_whole_logits_over_parts(size: int, count: int, pad_to: int):
    torch.manual_seed(size)
    local = -(-size // (pad_to * count)) * pad_to
    table = torch.zeros(local * count, 3, dtype=torch.float64)
    table[:size] = torch.randn(size, 3, dtype=torch.float64)
    ids = torch.randint(size, (4, 2))
    hidden = torch.randn(4, 2, 3, dtype=torch.float64)
    parts = Parts(count)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        vocabulary = parts.vocabulary(rank, size, pad_to)
        mine = table[rank * local : (rank + 1) * local]
        embedding = TokenEmbedding(size, mine.shape[1])
        embedding.weight, embedding.vocabulary = torch.nn.Parameter(mine), vocabulary
        return embedding(ids.t()), vocabulary.whole_logits(hidden @ mine.t())

    results = parts.run(work)
    assert torch.equal(torch.stack([rows for rows, _ in results]).sum(0), table[ids])
    for _, logits in results:
        torch.testing.assert_close(logits, hidden @ table[:size].t())
