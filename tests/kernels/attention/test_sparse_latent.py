"""Sparse latent attention and the loss of its indexer against plain PyTorch with whole score matrices, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention.indexer_loss import AttentionTarget, IndexVectors, indexer_loss
from petatron.kernels.attention.paged_latent_attention import LatentUpProjection
from petatron.kernels.attention.sparse_latent_attention import (
    hadamard_rotation,
    index_scores,
    sparse_latent_attention,
    topk_positions,
)
from petatron.layers.parallel_slots import identity

B, S, H, N, R, C, V, J, E = 2, 9, 3, 6, 4, 10, 5, 2, 8
WIDTHS = {"nope_dim": N, "v_dim": V, "scale": 0.3}


@pytest.fixture(params=[1, 1 << 27], ids=["one query at once", "all at once"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one query, and one block of all."""
    monkeypatch.setattr("petatron.kernels.attention.sparse_latent_attention.BLOCK_BYTES", request.param)


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, H, N + R], keys [B, S, C + R], the weight of the up-projection."""
    return drawn(B, S, H, N + R, seed=1), drawn(B, S, C + R, seed=2), drawn(H * (N + V), C, seed=3)


def heads_of(keys_BLM: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ordinary heads."""
    kv = (keys_BLM[..., :C] @ weight.T).unflatten(-1, (H, N + V))
    rotary = keys_BLM[..., None, C:].expand(-1, -1, H, -1)
    return torch.cat((kv[..., :N], rotary), dim=-1), kv[..., N:]


def dense_weights(q_BSHE: Tensor, k_BLHE: Tensor, seen_BSL: Tensor) -> Tensor:
    scores = torch.einsum("bshe,blhe->bhsl", q_BSHE, k_BLHE) * WIDTHS["scale"]
    return scores.masked_fill(~seen_BSL[:, None], -torch.inf).softmax(-1)


def chosen_tokens(count: int) -> tuple[Tensor, Tensor]:
    """Some of the tokens that each query sees: their positions, -1 for none, and as a mask."""
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    scores = torch.rand(B, S, S, generator=torch.Generator().manual_seed(4))
    positions = topk_positions(scores, causal, count)
    mask = torch.zeros(B, S, S + 1, dtype=torch.bool).scatter_(2, torch.where(positions < 0, S, positions), True)
    return positions, mask[..., :S]


def rows_of(positions_BSK: Tensor) -> Tensor:
    first = torch.arange(B)[:, None, None] * S
    return torch.where(positions_BSK < 0, -1, positions_BSK + first).flatten(0, 1)


@pytest.mark.parametrize("count", [1, 4, S], ids=["one", "some", "all"])
def test_attention_to_chosen_tokens_is_that_of_a_mask(count: int):
    positions, mask = chosen_tokens(count)
    q, keys, weight = inputs()
    ours = sparse_latent_attention(q.flatten(0, 1), keys.flatten(0, 1), rows_of(positions), weight, **WIDTHS)
    k, v = heads_of(keys, weight)
    true = torch.einsum("bhsl,blhv->bshv", dense_weights(q, k, mask), v).flatten(0, 1)
    torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)
    grad = drawn(*true.shape, seed=5).detach()
    wanted = torch.autograd.grad(true, (q, keys, weight), grad)
    for found, expected in zip(torch.autograd.grad(ours, (q, keys, weight), grad), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_gradients_are_finite_differences():
    positions, _ = chosen_tokens(3)
    q, keys, weight = (x.flatten(0, -3) if x.dim() > 2 else x for x in inputs())
    q, keys, weight = (x.detach().requires_grad_() for x in (q[:4], keys.flatten(0, -2)[: 2 * S], weight))

    def attend(*args: Tensor) -> Tensor:
        return sparse_latent_attention(args[0], args[1], rows_of(positions)[:4], args[2], **WIDTHS)

    assert torch.autograd.gradcheck(attend, (q, keys, weight))


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("count", [None, 3, S], ids=["dense", "sparse", "sparse over all"])
def test_the_loss_is_the_divergence_of_whole_matrices(count: int | None, relu: bool):
    """Both forms; the gradient is that of index scores alone."""
    q, keys, weight = inputs()
    index = IndexVectors(drawn(B, S, J, E, seed=6), drawn(B, S, E, seed=7), drawn(B, S, J, seed=8))
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    positions, mask = (None, causal.expand(B, S, S)) if count is None else chosen_tokens(count)
    target = AttentionTarget(
        q_BQHE=q.detach(),
        keys_BLM=keys.detach(),
        up=LatentUpProjection.of(weight.detach(), nope_dim=N, v_dim=V),
        scale=WIDTHS["scale"],
        visible=lambda rows: causal[rows].unsqueeze(0),
        selected_BQK=positions,
        sum_heads=identity,
    )
    ours = indexer_loss(index, target, relu=relu)
    expected = dense_weights(q, heads_of(keys, weight)[0], mask).detach().sum(1)
    expected = expected / expected.sum(-1, keepdim=True)
    products = torch.einsum("bqje,ble->bqjl", index.query, index.key)
    scores = ((products.relu() if relu else products) * index.weight.unsqueeze(-1)).sum(2)
    predicted = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    true = (expected * ((expected + 1e-10).log() - (predicted + 1e-10).log())).sum()
    torch.testing.assert_close(ours, true)
    wanted = torch.autograd.grad(3.0 * true, tuple(index))
    for found, grad in zip(torch.autograd.grad(3.0 * ours, tuple(index)), wanted, strict=True):
        torch.testing.assert_close(found, grad)
    assert float(ours) > 0.1


def test_the_loss_is_zero_for_scores_that_say_what_attention_does():
    """One head whose attention an indexer of one head can have: log p is a score, up to a number for each query."""
    keys = drawn(1, S, E, seed=9).detach()
    q = drawn(1, S, 1, E, seed=10).detach()
    target = AttentionTarget(
        q_BQHE=q,
        keys_BLM=keys,
        up=LatentUpProjection(torch.zeros(1, 0, 0, dtype=torch.float64), torch.zeros(1, 1, 0, dtype=torch.float64)),
        scale=0.5,
        visible=lambda rows: torch.ones(S, S, dtype=torch.bool).tril()[rows].unsqueeze(0),
        selected_BQK=None,
        sum_heads=identity,
    )
    weight = torch.full((1, S, 1), 0.5, dtype=torch.float64)
    assert abs(float(indexer_loss(IndexVectors(q, keys, weight), target, relu=False))) < 1e-8
    assert float(indexer_loss(IndexVectors(q, keys, 2 * weight), target, relu=False)) > 0.1


def test_of_equal_scores_nearer_tokens_are_chosen():
    scores = torch.tensor([[[0.0, -0.0, 0.0, 0.0, 2.0, -1.0]]], dtype=torch.float64)
    visible = torch.tensor([[[True, True, True, False, True, True]]])
    assert topk_positions(scores, visible, 2).sort().values.tolist() == [[[2, 4]]]
    assert topk_positions(scores, visible, 4).sort().values.tolist() == [[[0, 1, 2, 4]]]
    assert topk_positions(scores, visible, 9).sort().values.tolist() == [[[-1, 0, 1, 2, 4, 5]]]


def test_scores_of_either_sign_are_ranked():
    scores = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(11))
    visible = torch.ones(1, dtype=torch.bool)
    assert torch.equal(topk_positions(scores, visible, 7), scores.topk(7, dim=-1).indices)


def test_a_rotation_changes_no_score():
    index = IndexVectors(drawn(B, S, J, E, seed=6), drawn(B, S, E, seed=7), drawn(B, S, J, seed=8))
    turned = hadamard_rotation(index.query), hadamard_rotation(index.key)
    assert not torch.allclose(turned[1], index.key)
    torch.testing.assert_close(index_scores(*turned, index.weight), index_scores(*index))
