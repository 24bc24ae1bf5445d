"""The loss and gradient of distillation are those of TRL's trainer of generalized knowledge distillation."""

from __future__ import annotations

import pytest
import torch

from petatron.models.distillation import divergence

pytestmark = pytest.mark.trl


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences(mix: float, temperature: float):
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(3)
    ours = torch.randn(2, 5, 31, dtype=torch.float64, generator=generator).requires_grad_()
    theirs, teacher = (
        ours.detach().clone().requires_grad_(),
        torch.randn(2, 5, 31, dtype=torch.float64, generator=generator),
    )
    labels = torch.tensor([[1, 2, -100, 4, 5], [-100, -100, 3, 2, 1]])
    mask = labels != -100
    loss = (divergence(ours, teacher, mix, temperature) * mask).sum() / mask.sum()
    expected = GKDTrainer.generalized_jsd_loss(
        theirs, teacher, labels, beta=mix, temperature=temperature, num_items_in_batch=mask.sum()
    )
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
