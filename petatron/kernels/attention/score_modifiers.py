"""Modifiers of attention scores that no fused kernel has: soft cap, sinks, distance biases. They are computed in blocks and tiles.

- **softcap** c (Gemma 2): a scaled score s becomes c tanh(s / c).
- **sinks** (gpt-oss): every head has one more score that belongs to no token and whose value is zero, so that a token may attend to
  nothing. If attention without it is O with log-sum-exp L, with a sink of score z it is O exp(L - L') where L' = log(exp L + exp z).
  So it is added once, after all keys, on whichever rank has the query; backward is that of the plain attention with L' for L, and
  the gradient of z is - sum over tokens of exp(z - L') dO . O.
- **bias** (T5, ALiBi in both directions): a scaled score gets a number of its head that depends on the distance of key and query alone,
  before a cap. A table has one column per distance; the gradient of a column is the sum over all pairs of that distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRules:
    """The rules of one layer: the cap of scores, the sink of each of this rank's H query heads, and their biases.

    bias_HD: those of the distances -(D - 1) / 2, ..., (D - 1) / 2, position of the key minus that of the query; an odd number of them.
    Pairs further apart have the bias of the first or last distance.
    """

    softcap: float | None = None
    sinks_H: Tensor | None = None
    bias_HD: Tensor | None = None

    @classmethod
    def of(cls, softcap: float | None, sinks_H: Tensor | None, bias_HD: Tensor | None) -> ScoreRules | None:
        """Returns the rules, or None where there are none."""
        return None if softcap is None and sinks_H is None and bias_HD is None else cls(softcap, sinks_H, bias_HD)


NO_RULES = ScoreRules()


def distance_columns(bias_HD: Tensor, distance: int, rows: int, columns: int) -> Tensor:
    """Returns the column of the table for every pair of a tile [Q, T], whose first pair has a distance.

    >>> distance_columns(torch.zeros(1, 9), -1, 2, 3).tolist()
    [[3, 4, 5], [2, 3, 4]]
    """
    last = bias_HD.shape[1] - 1
    q = torch.arange(rows, device=bias_HD.device)
    k = torch.arange(columns, device=bias_HD.device) + last // 2 + distance
    return (k - q[:, None]).clamp_(0, last)


def capped_(scores: Tensor, softcap: float) -> Tensor:
    """Caps scaled scores in place."""
    return scores.div_(softcap).tanh_().mul_(softcap)
