"""Metrics with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
_SEED = 1234
_MAX_DRAWS, _MIN_RESAMPLES = 200_000_000, 100
_CHUNK_DRAWS = 4_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % bootstrap interval; None where there is only one item to resample."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio_estimate(
    sums: Sequence[float], counts: Sequence[float], transform: Callable[[float], float] = float
) -> Estimate:
    """Estimates transform(sum of `sums` / sum of `counts`), and resamples items, which are pairs of both.

    A transform must be monotonic. The draws are the same every time.

    >>> ratio_estimate([1, 0, 1, 1], [1, 1, 1, 1])
    Estimate(value=0.75, low=0.25, high=1.0)
    """
    pairs = np.array([sums, counts], dtype=np.float64)
    value = transform(float(pairs[0].sum() / pairs[1].sum()))
    number = pairs.shape[1]
    if number < 2:
        return Estimate(value)
    generator = np.random.default_rng(_SEED)
    resamples = max(min(RESAMPLES, _MAX_DRAWS // number), _MIN_RESAMPLES)
    per_chunk = max(_CHUNK_DRAWS // number, 1)
    ratios: list[np.ndarray] = []
    for start in range(0, resamples, per_chunk):
        draws = generator.integers(0, number, (min(per_chunk, resamples - start), number))
        top, bottom = pairs[0][draws].sum(axis=1), pairs[1][draws].sum(axis=1)
        ratios.append(top / np.where(bottom > 0, bottom, np.nan))
    bounds = np.nanquantile(np.concatenate(ratios), (0.025, 0.975))
    low, high = sorted(transform(float(bound)) for bound in bounds)
    return Estimate(value, low, high)


def accuracy_estimate(correct: Sequence[bool]) -> Estimate:
    """Estimates the share of correct answers."""
    return ratio_estimate([float(is_correct) for is_correct in correct], [1.0] * len(correct))


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20) as Megatron does, so that an untrained model prints a number."""
    return math.exp(min(20.0, loss))
