"""Advantages and rewards of single tokens: generalized advantage estimation, divergence from a reference, whitening.

With r_t the reward of token t, V_t the critic's value of the state before it, gamma the discount and lambda how far is looked ahead
(Schulman et al., 2016):

    delta_t = r_t + gamma V_t+1 - V_t,      A_t = delta_t + gamma lambda A_t+1,      R_t = A_t + V_t

An answer is over after its last token. Tokens that the model did not draw, such as those of an environment, are no steps: t + 1 is the next
token that it drew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from petatron.models.policy_gradient import KlEstimator

Numbers = NDArray[np.float64]
_EPSILON = 1e-8
"""Added to the variance, as in the published code of PPO."""


def token_rewards(drawn: NDArray[np.bool_], reward: float, turn_rewards: Sequence[float]) -> Numbers:
    """Returns the rewards of the tokens that were drawn: those of turns at their last tokens, and what is left of the sum at the end.

    >>> token_rewards(np.array([True, True, False, True]), 1.5, (0.25, 0.5)).tolist()
    [0.0, 0.25, 1.25]
    """
    is_last = drawn & ~np.append(drawn[1:], False)
    result = np.zeros(len(drawn))
    if int(is_last.sum()) == len(turn_rewards):
        result[is_last] = turn_rewards
    result = result[drawn]
    result[-1] += reward - result.sum()
    return result


def generalized_advantages(
    rewards: Sequence[Numbers], values: Sequence[Numbers], *, discount: float, decay: float
) -> list[Numbers]:
    """Returns the advantages of the drawn tokens of each answer; `decay` is lambda.

    >>> [result] = generalized_advantages([np.array([0.0, 1.0])], [np.array([0.5, 0.25])], discount=1.0, decay=0.5)
    >>> result.tolist()
    [0.125, 0.75]
    """
    lengths = np.array([len(x) for x in rewards], np.int64)
    shape = len(rewards), int(lengths.max(initial=0)) + 1
    rewards_AT, values_AT, result_AT = (np.zeros(shape) for _ in range(3))
    for answer, length in enumerate(lengths):  # all answers at once, a step of time after the other
        rewards_AT[answer, :length], values_AT[answer, :length] = rewards[answer], values[answer]
    after = np.zeros(len(rewards))
    for at in reversed(range(shape[1] - 1)):
        delta = rewards_AT[:, at] + discount * values_AT[:, at + 1] - values_AT[:, at]
        after = np.where(at < lengths, delta + discount * decay * after, 0.0)
        result_AT[:, at] = after
    return [result_AT[answer, :length] for answer, length in enumerate(lengths)]


def whitened(advantages: Sequence[Numbers]) -> list[Numbers]:
    """Returns the advantages with mean 0 and deviation 1 over all tokens.

    >>> [x.round(4).tolist() for x in whitened([np.array([1.0, 2.0]), np.array([3.0])])]
    [[-1.0, 0.0], [1.0]]
    """
    together = np.concatenate([np.zeros(0), *advantages])
    if len(together) < 2:
        return [np.zeros_like(x) for x in advantages]
    scale = 1 / np.sqrt(together.var(ddof=1) + _EPSILON)
    return [(x - together.mean()) * scale for x in advantages]


def divergences(log_probs: Numbers, reference: Numbers, estimator: KlEstimator) -> Numbers:
    """Returns an estimate of the divergence from a reference at each token, of its log-probabilities under both (Schulman, 2020).

    The mean of k1 is the divergence, and so is that of k3, which is never negative; k2 is its leading term.

    >>> [divergences(np.array([-1.0]), np.array([-2.0]), kind).round(3).tolist() for kind in ("k1", "k2", "k3")]
    [[1.0], [0.5], [0.368]]
    """
    gap = log_probs - reference
    match estimator:
        case "k1":
            return gap
        case "k2":
            return np.square(gap) / 2
        case "k3":
            return np.expm1(-gap) + gap


def explained_variance(returns: Numbers, values: Numbers) -> float:
    """Returns how much of the variance of returns the values explain: 1, all of it; 0 or less, no more than a constant would.

    >>> explained_variance(np.array([1.0, 2.0]), np.array([1.0, 2.0])), explained_variance(np.ones(2), np.zeros(2))
    (1.0, 0.0)
    """
    spread = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0
