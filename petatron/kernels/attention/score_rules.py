"""Rules of attention scores that no fused kernel has: `causal_attention` and `paged_attention` compute them in blocks and tiles.

- **softcap** c (Gemma 2): a scaled score s becomes c tanh(s / c).
- **sinks** (gpt-oss): every head has one more score that belongs to no token and whose value is zero, so that a token may attend to
  nothing. If attention without it is O with log-sum-exp L, with a sink of score z it is O exp(L - L') where L' = log(exp L + exp z).
  So it is added once, after all keys, on whichever rank has the query; backward is that of the plain attention with L' for L, and
  the gradient of z is - sum over tokens of exp(z - L') dO . O.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRules:
    """The rules of one layer: the cap of scores, and the sink of each of this rank's H query heads."""

    softcap: float | None = None
    sinks_H: Tensor | None = None


def capped_(scores: Tensor, softcap: float) -> Tensor:
    """Caps scaled scores in place."""
    return scores.div_(softcap).tanh_().mul_(softcap)
