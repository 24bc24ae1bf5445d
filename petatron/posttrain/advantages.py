"""Advantages: how much better an answer was than expected, from the rewards of the answers to one prompt, or of a whole step.

A reward of NaN is that of an answer that could not be rewarded: it counts for nobody, and its advantage is 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from petatron.config.schema.rollout import AdvantageName

_EPSILON = 1e-4
"""Added to deviations, as in the published code of GRPO: rewards that are nearly equal are not blown up."""


def advantages(rewards_PG: NDArray[np.float64], kind: AdvantageName) -> NDArray[np.float64]:
    """Returns the advantage of each answer [prompts, answers to each].

    >>> advantages(np.array([[1.0, 0.0, 0.0, 1.0]]), "centered").tolist()
    [[0.5, -0.5, -0.5, 0.5]]
    >>> advantages(np.array([[1.0, 0.0, 0.0, 1.0]]), "leave-one-out").round(3).tolist()
    [[0.667, -0.667, -0.667, 0.667]]
    >>> advantages(np.array([[1.0, np.nan, 0.0]]), "group").round(3).tolist()
    [[0.707, 0.0, -0.707]]
    """
    valid = ~np.isnan(rewards_PG)
    counts = valid.sum(axis=1, keepdims=True)
    rewards = np.where(valid, rewards_PG, 0.0)
    means = rewards.sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    match kind:
        case "leave-one-out":
            others = (means * counts - rewards) / np.maximum(counts - 1, 1)
            result = np.where(counts > 1, rewards - others, 0.0)
        case "batch":
            result = rewards - means
            spread = result[valid]
            result = result / (_deviation(spread[None], np.ones_like(spread[None], bool))[0] + _EPSILON)
        case "group" | "centered":
            result = rewards - means
            if kind == "group":
                result = result / (_deviation(np.where(valid, result, 0.0), valid) + _EPSILON)
        case "gae":
            raise AssertionError("advantages of tokens are those of `token_advantages.py`")
    return np.where(valid, result, 0.0)


def _deviation(centered: NDArray[np.float64], valid: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns the deviation of each row of a sample [rows, 1]: the sum of squares over one less than their number."""
    degrees = np.maximum(valid.sum(axis=1, keepdims=True) - 1, 1)
    return np.sqrt(np.square(centered).sum(axis=1, keepdims=True) / degrees)


def teaches_nothing(rewards: NDArray[np.float64]) -> bool:
    """Whether the answers to a prompt all have one reward, so that their advantages are zero.

    >>> teaches_nothing(np.array([1.0, 1.0, np.nan])), teaches_nothing(np.array([1.0, 0.0]))
    (True, False)
    """
    valid = rewards[~np.isnan(rewards)]
    return len(valid) < 2 or bool((valid == valid[0]).all())
