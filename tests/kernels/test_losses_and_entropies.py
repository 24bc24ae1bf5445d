"""Losses and entropies of logits are those of torch, with gradients, whole or with a vocabulary that is sharded over ranks."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

from petatron.kernels import losses_and_entropies as module
from petatron.kernels.fused_linear_cross_entropy import VocabColumns
from petatron.kernels.losses_and_entropies import losses_and_entropies

TOKENS, IDS, PADDED = 7, 10, 12


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets, and the factors on losses and entropies in a sum."""
    random = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(TOKENS, IDS, dtype=torch.float64, generator=random)
    targets = torch.randint(IDS, (TOKENS,), generator=random)
    return logits, targets, torch.randn(2, TOKENS, dtype=torch.float64, generator=random)


def of_torch() -> tuple[Tensor, Tensor, Tensor]:
    logits, targets, factors = inputs()
    logits.requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    (losses * factors[0] + entropies * factors[1]).sum().backward()
    assert logits.grad is not None
    return losses.detach(), entropies.detach(), logits.grad


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_whole_vocabulary(monkeypatch: pytest.MonkeyPatch, chunk_tokens: int):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_tokens * PADDED)
    logits, targets, factors = inputs()
    padded = torch.nn.functional.pad(logits, (0, PADDED - IDS), value=50.0).requires_grad_()
    losses, entropies = losses_and_entropies(padded, targets, VocabColumns(IDS))
    (losses * factors[0] + entropies * factors[1]).sum().backward()
    assert padded.grad is not None
    for ours, wanted in zip((losses, entropies, padded.grad[:, :IDS]), of_torch(), strict=True):
        torch.testing.assert_close(ours.detach(), wanted, rtol=0, atol=1e-13)
    assert not padded.grad[:, IDS:].any()


def test_sharded_vocabulary():
    """Two threads in place of two ranks."""
    logits, targets, factors = inputs()
    shared: dict[int, Tensor] = {}
    barrier, results = Barrier(2), dict[int, tuple[Tensor, Tensor, Tensor]]()

    def exchange(x: Tensor, rank: int) -> Tensor:
        shared[rank] = x
        barrier.wait(30)
        both = torch.stack([shared[0], shared[1]])
        barrier.wait(30)
        return both

    def run(rank: int) -> None:
        part = logits[:, rank * 6 : rank * 6 + 6].clone().requires_grad_()
        columns = VocabColumns(
            part.shape[1], rank * 6, lambda x: exchange(x, rank).amax(dim=0), lambda x: exchange(x, rank).sum(dim=0)
        )
        losses, entropies = losses_and_entropies(part, targets, columns)
        (grad,) = torch.autograd.grad((losses * factors[0] + entropies * factors[1]).sum(), part)
        results[rank] = losses.detach(), entropies.detach(), grad

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    both = torch.cat([results[0][2], results[1][2]], dim=1)
    for ours, wanted in zip((*results[0][:2], both), of_torch(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-13)
