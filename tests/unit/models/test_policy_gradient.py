"""What the objective of reinforcement learning leaves out, and what it measures of answers whose log-probabilities differ."""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.models.batch import Batch
from petatron.models.policy_gradient import POLICY_LOSS, PolicyGradient

DRAWN = torch.tensor([[-1.0, -1.0, -2.0, -2.0, -9.0]])
NOW = torch.tensor([[-1.0, -3.5, -2.1, -2.0, -1.0]])
"""Two answers of two tokens, and a prompt's last position."""


def make_batch(old: Tensor) -> Batch:
    arrays = {
        "tokens": torch.zeros(1, 5, dtype=torch.int64),
        "labels": torch.tensor([[0, 1, 0, 2, 0]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]]),
        "segment_ids": torch.tensor([[0, 0, 1, 1, 1]]),
        "segment_mask": torch.ones(2),
        "advantages": torch.tensor([[1.0, 1.0, -1.0, -1.0, 0.0]]),
        "drawn_log_probs": DRAWN,
        "old_log_probs": old,
        "rewards": torch.tensor([1.0, 0.0]),
        "truncated": torch.tensor([0.0, 1.0]),
    }
    return Batch(arrays=arrays, sequence_dims={"segment_mask": None, "rewards": None}, num_segments=2)


def results(objective: PolicyGradient, old: Tensor = NOW) -> tuple[list[float], dict[str, list[float]]]:
    outputs, batch = {"token_losses": -NOW, "entropies": torch.full((1, 5), 0.5)}, make_batch(old)
    losses = objective.loss(outputs, batch)[POLICY_LOSS].flatten().tolist()
    metrics = objective.metrics(outputs, batch)
    assert set(metrics) == {spec.name for spec in objective.metric_specs}
    return losses, {name: x.flatten().tolist() for name, x in metrics.items()}


def test_tokens_of_large_differences_are_left_out():
    losses, metrics = results(PolicyGradient(average="token", max_importance_weight=0.0, mask_tokens_above=5.0))
    assert losses[:4] == [-1.0, 0.0, 1.0, 1.0], "exp(-2.5) is below 1/5"
    assert metrics["left out"][:4] == [0.0, 1.0, 0.0, 0.0]


def test_answers_of_large_differences_are_left_out():
    losses, metrics = results(PolicyGradient(average="token", max_importance_weight=0.0, mask_answers_above=2.0))
    assert losses[:4] == [0.0, 0.0, 1.0, 1.0], "the mean of its differences is 1.25, above log 2"
    assert metrics["left out"][:4] == [1.0, 1.0, 0.0, 0.0]


def test_entropies_are_rewarded_and_measured():
    losses, metrics = results(PolicyGradient(average="token", max_importance_weight=0.0, entropy_weight=0.1))
    torch.testing.assert_close(torch.tensor(losses[:4]), torch.tensor([-1.05, -1.05, 0.95, 0.95]))
    assert metrics["entropy"] == [0.5] * 5
    estimated = results(PolicyGradient(average="token"))[1]
    assert estimated["entropy"][:4] == [1.0, 1.0, 2.0, 2.0] and estimated["truncated"] == [0.0, 1.0]
    assert PolicyGradient(exact_entropy=True).outputs == ("token_losses", "entropies")
    assert PolicyGradient(exact_entropy=True, temperature=0.5).outputs == ("logits",)


def test_clipped_tokens_are_counted_on_both_sides():
    old = NOW - torch.tensor([[0.5, -0.5, 0.5, -0.5, 0.0]])
    metrics = results(PolicyGradient(average="token"), old)[1]
    assert metrics["clipped high"][:4] == [1.0, 0.0, 0.0, 0.0] and metrics["clipped low"][:4] == [0.0, 0.0, 0.0, 1.0]


def test_entropies_of_logits_have_the_temperature():
    torch.manual_seed(0)
    logits = torch.randn(1, 5, 4, dtype=torch.float64)
    objective = PolicyGradient(average="token", entropy_weight=1.0, temperature=0.7)
    metrics = objective.metrics({"logits": logits}, make_batch(NOW))
    wanted = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    torch.testing.assert_close(metrics["entropy"], wanted)
