"""Sampled softmax estimates the partition function of the full one without bias, from each source of candidates and from both."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from petatron.layers.vocabulary.sampled_softmax import expected_counts, sampled_softmax_losses

ITEMS, WIDTH = 4, 3
X = torch.tensor([[0.3, -1.0, 0.7], [1.1, 0.4, -0.2]], dtype=torch.float64)
TABLE = torch.randn(ITEMS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
TARGETS = torch.tensor([2, 0])
SHARES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def partition_functions(drawn: Tensor, *, uniform: int, in_batch: int) -> Tensor:
    """The estimates of sum_c exp(s_c) of both tokens."""
    candidates, counts = drawn.unique(return_counts=True)
    expected = expected_counts(SHARES[candidates], num_items=ITEMS, num_uniform=uniform, num_in_batch=in_batch)
    log_weights = counts.double().log() - expected.log()
    losses = sampled_softmax_losses(X, TABLE[TARGETS], TARGETS, TABLE[candidates], candidates, log_weights)
    return (losses + (X * TABLE[TARGETS]).sum(1)).exp()


def mean_over_all_draws(*, uniform: int, in_batch: int) -> Tensor:
    """The expectation, exactly: every draw there is, by its probability."""
    total = torch.zeros(2, dtype=torch.float64)
    for drawn in itertools.product(range(ITEMS), repeat=uniform + in_batch):
        ids = torch.tensor(drawn)
        probability = (1 / ITEMS) ** uniform * SHARES[ids[uniform:]].prod()
        total += probability * partition_functions(ids, uniform=uniform, in_batch=in_batch)
    return total


def test_the_partition_function_is_that_of_all_items_in_expectation():
    full = (X @ TABLE.t()).exp().sum(dim=1)
    for uniform, in_batch in ((1, 0), (3, 0), (0, 2), (2, 2)):
        assert torch.allclose(mean_over_all_draws(uniform=uniform, in_batch=in_batch), full, rtol=1e-12), (
            uniform,
            in_batch,
        )


def test_without_the_correction_it_is_not():
    drawn = torch.tensor([0, 1])
    plain = sampled_softmax_losses(X, TABLE[TARGETS], TARGETS, TABLE[drawn], drawn, torch.zeros(2, dtype=torch.float64))
    corrected = partition_functions(drawn, uniform=2, in_batch=0).log() - (X * TABLE[TARGETS]).sum(1)
    assert not torch.allclose(plain, corrected)


def test_with_all_items_once_it_is_the_full_softmax_with_its_gradients():
    x, table = X.clone().requires_grad_(), TABLE.clone().requires_grad_()
    items = torch.arange(ITEMS)
    losses = sampled_softmax_losses(x, table[TARGETS], TARGETS, table, items, torch.zeros(ITEMS, dtype=torch.float64))
    ours = torch.autograd.grad(losses.sum(), (x, table))
    full = torch.nn.functional.cross_entropy(x @ table.t(), TARGETS, reduction="none")
    theirs = torch.autograd.grad(full.sum(), (x, table))
    assert torch.allclose(losses, full, rtol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(ours, theirs, strict=True))


def test_a_target_among_the_candidates_counts_once():
    candidates, log_weights = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.float64)
    losses = sampled_softmax_losses(X[:1], TABLE[2:3], torch.tensor([2]), TABLE[candidates], candidates, log_weights)
    scores = X[:1] @ TABLE[[2, 1]].t()
    assert torch.allclose(losses, torch.nn.functional.cross_entropy(scores, torch.tensor([0])))
