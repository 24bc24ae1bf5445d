"""Blends datasets in given proportions.

Sample t is taken from the dataset that is furthest behind its share: the largest w_j * max(t, 1) - c_j, the first of
them on a tie, where c_j counts the samples already taken from j. This is Megatron's rule, to the last tie.
Weights are Megatron's to the last bit as well, which decides ties: it normalizes those that a user gives twice. And it builds more of
each dataset than the blend takes, which decides how many epochs are shuffled together (`samples_to_build`).

The rule is sequential, and a Python loop over a billion samples would take an hour. But it converges: whatever
counts it starts from (near their shares), it soon selects the same samples. So the sequence is divided into many
lanes that run in parallel as rows of numpy arrays. Each lane starts a little early, from counts rounded to their
shares, and reaches its first sample with predicted counts. Lane k's prediction is then compared with the
counts where lane k-1 ended. If all agree, the result is exactly that of the loop, by induction from lane 0,
which starts from zeros. Lanes that were wrong are rerun from their neighbor's end until none is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.data_blend import BlendError
from petatron.config.schema.data_blend import parse_blend as read_blend
from petatron.data.batch_loader import Sample, SampleDataset
from petatron.data.documents_of_sample import SampleTrace, trace_sample
from petatron.data.index_cache import IndexLog, fingerprint, load_or_build

MAX_DATASETS = 32766
# A step of all lanes should work on arrays that fit a core's cache, yet be long enough to hide numpy's call overhead.
LANE_ELEMENTS = 1 << 15
MIN_LANE_STEPS = 512

WeightedPrefixes = tuple[tuple[float, ...] | None, tuple[str, ...]]


def parse_weighted_prefixes(blend: Sequence[str], *, flag: str = "--data-path") -> WeightedPrefixes:
    """Parses weights (None when not given) and prefixes; datasets of weight 0 are dropped.

    >>> parse_weighted_prefixes(("0.3", "web", "0.7", "code"))
    ((0.3, 0.7), ('web', 'code'))
    >>> parse_weighted_prefixes(("web", "code"))
    (None, ('web', 'code'))
    """
    try:
        parts = [part for part in read_blend(blend) if part.weight != 0]
    except BlendError as error:
        fix = "Write `prefix prefix` or `weight prefix weight prefix`."
        raise ConfigError([Problem(flag, " ".join(blend), str(error), fix)]) from error
    if len(parts) > MAX_DATASETS:
        rule = f"names {len(parts)} datasets, and a blend has at most {MAX_DATASETS}"
        raise ConfigError([Problem(flag, "", rule, "Merge datasets with `petatron data merge`.")])
    weights = tuple(part.weight for part in parts if part.weight is not None)
    return weights or None, tuple(part.prefix for part in parts)


def normalize_once(weights: Sequence[float]) -> list[float]:
    """Returns weights of which `blend_indices`, which normalizes too, makes the twice normalized ones.

    A second normalization seldom changes a bit. Where it does not, weights are returned as given, so that caches and fingerprints are
    those of the order.

    >>> normalize_once([3.0, 1.0]), normalize_once([0.3, 2.6, 1.5])
    ([3.0, 1.0], [0.06818181818181818, 0.5909090909090908, 0.3409090909090909])
    """
    once = _normalized(weights)
    return list(weights) if np.array_equal(once, _normalized(once)) else once.tolist()


def samples_to_build(weights: Sequence[float], size: int, taken: Sequence[int], *, surplus: float) -> list[int]:
    """Returns the samples that Megatron builds of each dataset of a weighted blend: its share and the surplus, both rounded up.

    Where the blend takes still more of one (`taken`), that many.

    >>> samples_to_build([3.0, 1.0], 80, [60, 20], surplus=0.005)
    [61, 21]
    """
    built = (math.ceil(math.ceil(size * share) * (1 + surplus)) for share in _normalized(weights).tolist())
    return [max(pair) for pair in zip(built, taken, strict=True)]


def _normalized(weights: Sequence[float] | NDArray) -> NDArray[np.float64]:
    share = np.asarray(weights, np.float64)
    return share / share.sum()


def blend_indices(
    weights: Sequence[float] | NDArray, size: int, *, limits: Sequence[int] | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Returns for each of `size` samples its dataset, and its index in that dataset.

    `limits` caps the samples of each dataset; an exhausted dataset is skipped.
    """
    share = _normalized(weights)
    cap = np.full(len(share), np.iinfo(np.int64).max) if limits is None else np.asarray(limits, np.int64)
    if not 1 <= len(share) <= MAX_DATASETS:
        raise ValueError(f"{len(share)} datasets; a blend has 1 to {MAX_DATASETS}")
    if int(np.minimum(cap, size).sum()) < size:
        raise ValueError(f"{size} samples asked, but the limits allow only {int(cap.sum())}")
    lanes = max(1, min(LANE_ELEMENTS // len(share), size // MIN_LANE_STEPS))
    bounds = np.linspace(0, size, lanes + 1).astype(np.int64)
    counts = _warm_up(share, cap, bounds[:-1])
    dataset, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    redo = np.arange(lanes)
    ends = np.empty_like(counts)
    while len(redo):
        ends[redo] = _run(share, cap, bounds[redo], bounds[redo + 1], counts[redo], (dataset, sample))
        wrong = np.flatnonzero((counts[1:] != ends[:-1]).any(axis=1)) + 1
        counts[wrong] = ends[wrong - 1]
        redo = wrong
    return dataset, sample


def load_blend(
    weights: Sequence[float],
    size: int,
    *,
    limits: Sequence[int] | None = None,
    cache_dir: str | Path | None = None,
    index_log: IndexLog | None = None,
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Caches `blend_indices` in the cache folder: large blends take a minute and ranks share one mapped copy."""
    key: dict[str, object] = {
        "kind": "blend",
        "weights": list(weights),
        "size": size,
        "limits": None if limits is None else list(limits),
    }
    names = ("dataset", "sample")
    indices = partial(blend_indices, weights, size, limits=limits)
    arrays = load_or_build(cache_dir, key, names, build=lambda: dict(zip(names, indices(), strict=True)), log=index_log)
    return arrays["dataset"], arrays["sample"]


class BlendedDataset:
    """`size` samples drawn from several datasets in proportion to their weights.

    Without weights, datasets are used in proportion to their sizes, each sample once.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        weights: Sequence[float] | None,
        size: int | None = None,
        *,
        cache_dir: str | Path | None = None,
        index_log: IndexLog | None = None,
    ) -> None:
        self.datasets = tuple(datasets)
        sizes = [len(dataset) for dataset in self.datasets]
        if weights is None:
            size = sum(sizes) if size is None else min(size, sum(sizes))
            self._dataset, self._sample = load_blend(
                sizes, size, limits=sizes, cache_dir=cache_dir, index_log=index_log
            )
        else:
            if size is None:
                raise ValueError("a weighted blend needs a size")
            self._dataset, self._sample = load_blend(weights, size, cache_dir=cache_dir, index_log=index_log)
        shares = sizes if weights is None else list(weights)
        parts = [dataset.fingerprint for dataset in self.datasets]
        self.fingerprint = fingerprint({"kind": "blend", "parts": parts, "shares": shares, "once": weights is None})
        taken = np.bincount(self._dataset, minlength=len(sizes))
        for number, (used, available) in enumerate(zip(taken, sizes)):
            if used > available:
                raise ValueError(f"the blend takes {used} samples of dataset {number}, which has {available}")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        return self.datasets[int(self._dataset[index])][int(self._sample[index])]

    def trace(self, index: int) -> SampleTrace:
        """Returns what the sample's own dataset says of it."""
        return trace_sample(self.datasets[int(self._dataset[index])], int(self._sample[index]))


def _furthest_behind(share: NDArray, cap: NDArray, step: NDArray, counts: NDArray) -> NDArray:
    """Returns the dataset furthest behind its share, for each lane at its own step; rows of `counts` are lanes."""
    deficit = share * np.maximum(step, 1.0)[:, None] - counts
    deficit[counts >= cap] = -np.inf
    return deficit.argmax(axis=1)


def _warm_up(share: NDArray, cap: NDArray, starts: NDArray) -> NDArray:
    """Predicts each lane's counts at its start: shares rounded down some steps earlier, then the rule itself.

    Rounding down loses less than one sample per dataset, so that many steps more than the warm-up restore the sum.
    """
    warm = 8 * len(share) + 64
    early = np.maximum(starts - warm, 0)
    counts = np.minimum(np.floor(share * early[:, None]).astype(np.int64), cap)
    missing = early - counts.sum(axis=1)
    lanes = np.arange(len(starts))
    for back in range(int(missing.max()) if len(missing) else 0, 0, -1):
        active = lanes[missing >= back]
        counts[active, _furthest_behind(share, cap, early[active].astype(np.float64), counts[active])] += 1
    for forward in range(warm):
        active = lanes[early + forward < starts]
        if len(active):
            step = (early[active] + forward).astype(np.float64)
            counts[active, _furthest_behind(share, cap, step, counts[active])] += 1
    return counts


def _run(
    share: NDArray, cap: NDArray, starts: NDArray, stops: NDArray, counts: NDArray, output: tuple[NDArray, NDArray]
) -> NDArray:
    """Runs lanes from `starts` to `stops`, writes their selections, and returns the final counts."""
    dataset, sample = output
    counts = counts.copy()
    lanes = np.arange(len(starts))
    for step in range(int((stops - starts).max())):
        here = starts + step
        # Lane lengths differ by at most one, so only the last step has lanes that are done.
        active = lanes if step < int((stops - starts).min()) else lanes[here < stops]
        chosen = _furthest_behind(
            share, cap, here[active].astype(np.float64), counts[active] if len(active) < len(lanes) else counts
        )
        dataset[here[active]] = chosen
        sample[here[active]] = counts[active, chosen]
        counts[active, chosen] += 1
    return counts
