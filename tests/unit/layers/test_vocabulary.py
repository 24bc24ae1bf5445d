"""Both ends of a model over a vocabulary that is spread over ranks: losses, lookup, and logits put together again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from petatron.layers.vocabulary import OutputHead, TokenEmbedding, Vocabulary
from petatron.mesh.spec import Shard, TensorSplit, place
from tests.kernels.loss_cases import Ranks

S, B, D = 5, 2, 3


def vocabulary(ranks: Ranks, rank: int, size: int, pad_to: int) -> Vocabulary:
    """The rows that a rank of a real run holds."""
    pieces = place("head", (size,), Shard(tp=0, pad_to=pad_to), TensorSplit(ranks.count, rank)).pieces
    return Vocabulary(
        size=size,
        first=pieces[0].start[0] if pieces else size,
        rows=pieces[0].shape[0] if pieces else 0,
        ranks=ranks.exchanges(rank),
        join=lambda x: ranks.all_of(rank, x).flatten(0, 1),
    )


def padded_table(size: int, length: int, *, padding: float) -> Tensor:
    table = torch.full((length, D), padding, dtype=torch.float64)
    table[:size] = torch.randn(size, D, dtype=torch.float64)
    return table


@pytest.mark.parametrize("known", [False, True])
@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 40), count=st.integers(1, 4), pad_to=st.integers(1, 8))
def test_losses_over_ranks(size: int, count: int, pad_to: int, known: bool):
    """Every rank has all losses, its summand of the input's gradient and its rows of the weight's; padding gets none."""
    torch.manual_seed(size * 100 + count * 10 + pad_to)
    local = -(-size // (pad_to * count)) * pad_to
    table = padded_table(size, local * count, padding=1e3)
    x, targets = torch.randn(S, B, D, dtype=torch.float64), torch.randint(size, (S, B))
    weights = torch.rand(S, B, dtype=torch.float64)
    ranks = Ranks(count)

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        head = OutputHead(local, D, tied=False)
        head.weight = nn.Parameter(table[rank * local : (rank + 1) * local].clone())
        head.vocabulary = vocabulary(ranks, rank, size, pad_to)
        mine = x.clone().requires_grad_()
        losses = head.losses(mine, None, targets, weights_SB=weights if known else None)
        return losses.detach(), *torch.autograd.grad((losses * weights).sum(), (mine, head.weight))

    leaves = x.clone().requires_grad_(), table[:size].clone().requires_grad_()
    logits = leaves[0] @ leaves[1].t()
    true = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
    true_x, true_table = torch.autograd.grad((true * weights).sum(), leaves)
    results = ranks.run(work)
    for losses, _, _ in results:
        torch.testing.assert_close(losses, true, rtol=0, atol=1e-11)
    torch.testing.assert_close(sum(grad for _, grad, _ in results), true_x, rtol=0, atol=1e-11)
    joined = torch.cat([grad for _, _, grad in results])
    torch.testing.assert_close(joined[:size], true_table, rtol=0, atol=1e-11)
    assert not joined[size:].any()


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 40), count=st.integers(1, 4), pad_to=st.integers(1, 8))
def test_lookup_and_whole_logits_over_ranks(size: int, count: int, pad_to: int):
    torch.manual_seed(size)
    local = -(-size // (pad_to * count)) * pad_to
    table = padded_table(size, local * count, padding=0.0)
    ids, hidden = torch.randint(size, (4, 2)), torch.randn(4, 2, D, dtype=torch.float64)
    ranks = Ranks(count)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        mine = table[rank * local : (rank + 1) * local]
        embedding = TokenEmbedding(size, D)
        embedding.weight, embedding.vocabulary = nn.Parameter(mine), vocabulary(ranks, rank, size, pad_to)
        return embedding(ids.t()), embedding.vocabulary.whole_logits(hidden @ mine.t())

    results = ranks.run(work)
    assert torch.equal(torch.stack([rows for rows, _ in results]).sum(0), table[ids])
    for _, logits in results:
        torch.testing.assert_close(logits, hidden @ table[:size].t())
