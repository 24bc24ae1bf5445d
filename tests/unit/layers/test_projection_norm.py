"""RMSNorm over all heads of a projection: the definition, its gradient, and heads that several ranks share."""

from __future__ import annotations

import torch

from petatron.layers.norm import ProjectionRMSNorm


def norm_of(heads: int, *, zero_centered: bool = False) -> ProjectionRMSNorm:
    norm = ProjectionRMSNorm(heads * 3, eps=1e-5, zero_centered_gamma=zero_centered).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(heads * 3, generator=torch.Generator().manual_seed(1)))
    return norm


def test_it_is_the_rms_norm_of_all_channels():
    x = torch.randn(5, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    for zero_centered in (False, True):
        norm = norm_of(4, zero_centered=zero_centered)
        gain = norm.weight + 1.0 if zero_centered else norm.weight
        flat = x.flatten(-2)
        wanted = (flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-5) * gain).view_as(x)
        torch.testing.assert_close(norm(x), wanted, rtol=0, atol=1e-12)
        grads = [torch.autograd.grad(y.square().sum(), (x, norm.weight)) for y in (norm(x), wanted)]
        for found, true in zip(*grads):
            torch.testing.assert_close(found, true, rtol=0, atol=1e-10)
    assert torch.autograd.gradcheck(norm_of(4), (x,))


def test_a_head_that_two_ranks_share_counts_once():
    """Of two kv heads on four ranks, each rank has one; the all-reduce over ranks counts both twice."""
    whole, x = norm_of(2), torch.randn(3, 1, 2, 3, dtype=torch.float64)
    squares = x.square().sum((-2, -1))
    for head in range(2):
        part = norm_of(2)
        part.weight = torch.nn.Parameter(whole.weight.detach().view(2, 3)[head])
        part.tensor_rank, part.all_reduce = (0, 4), lambda _: 2 * squares
        torch.testing.assert_close(part(x[:, :, head : head + 1]), whole(x)[:, :, head : head + 1], rtol=0, atol=1e-12)
