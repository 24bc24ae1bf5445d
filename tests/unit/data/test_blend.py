from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.data import blended_dataset
from petatron.data.blended_dataset import BlendedDataset, blend_indices, parse_weighted_prefixes


def naive_blend(weights: list[float], size: int, limits: list[int] | None = None) -> tuple[list[int], list[int]]:
    share = np.array(weights) / np.sum(weights)
    counts = [0] * len(share)
    datasets, samples = [], []
    for step in range(size):
        best, furthest = -1, -np.inf
        for number in range(len(share)):
            deficit = share[number] * max(float(step), 1.0) - counts[number]
            if deficit > furthest and (limits is None or counts[number] < limits[number]):
                best, furthest = number, deficit
        datasets.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return datasets, samples


WEIGHTS = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    weights=WEIGHTS | st.lists(st.just(1.0), min_size=1, max_size=6),
    size=st.integers(0, 400),
    lane=st.sampled_from([1, 7, 512]),
)
def test_equals_the_loop(weights: list[float], size: int, lane: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blended_dataset, "MIN_LANE_STEPS", lane)
        datasets, samples = blend_indices(weights, size)
    assert (datasets.tolist(), samples.tolist()) == naive_blend(weights, size)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(any), lane=st.sampled_from([1, 7, 512]))
def test_exhausts_every_dataset(sizes: list[int], lane: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blended_dataset, "MIN_LANE_STEPS", lane)
        datasets, samples = blend_indices(sizes, sum(sizes), limits=sizes)
    assert np.bincount(datasets, minlength=len(sizes)).tolist() == sizes
    assert (datasets.tolist(), samples.tolist()) == naive_blend([float(size) for size in sizes], sum(sizes), sizes)


def test_lanes_with_a_wrong_belief_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the warm-up believes, the result is that of the loop."""
    monkeypatch.setattr(blended_dataset, "MIN_LANE_STEPS", 64)
    original, runs = blended_dataset._run, []
    monkeypatch.setattr(blended_dataset, "_run", lambda *args: (runs.append(len(args[2])), original(*args))[1])
    warm_up = blended_dataset._warm_up

    def spoiled(*args: np.ndarray) -> np.ndarray:
        counts = warm_up(*args)
        counts[3::4, 0] += 1
        return counts

    monkeypatch.setattr(blended_dataset, "_warm_up", spoiled)
    weights = [1.0, 0.003, 0.5, 1e-4]
    datasets, samples = blend_indices(weights, 5000)
    assert len(runs) > 1
    assert (datasets.tolist(), samples.tolist()) == naive_blend(weights, 5000)


def test_shares_are_kept_at_scale() -> None:
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    datasets, samples = blend_indices(weights, 200_000)
    counts = np.cumsum(datasets[:, None] == np.arange(4), axis=0)
    assert np.abs(counts - weights * np.arange(1, 200_001)[:, None]).max() < 2
    assert all(np.array_equal(samples[datasets == j], np.arange(counts[-1, j])) for j in range(4))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="limits allow only 3"):
        blend_indices([1, 1], 4, limits=[1, 2])
    with pytest.raises(ValueError, match="1 to 32766"):
        blend_indices([], 4)
    with pytest.raises(ConfigError, match="--data-args-path names 32767 datasets, and a blend has at most 32766"):
        parse_weighted_prefixes(("web",) * 32767, flag="--data-args-path")


class Numbered:
    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        self.fingerprint = f"numbered {base}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([self.base + index])


def test_blended_dataset() -> None:
    mixed = BlendedDataset([Numbered(0, 75), Numbered(1000, 25)], [3, 1], 100)
    values = [int(mixed[i][0]) for i in range(len(mixed))]
    assert sorted(values) == [*range(75), *range(1000, 1025)]
    whole = BlendedDataset([Numbered(0, 7), Numbered(100, 3)], None)
    assert sorted(int(whole[i][0]) for i in range(len(whole))) == [*range(7), 100, 101, 102]
    with pytest.raises(ValueError, match="takes 75 samples of dataset 0, which has 10"):
        BlendedDataset([Numbered(0, 10), Numbered(1000, 25)], [3, 1], 100)
    with pytest.raises(ValueError, match="needs a size"):
        BlendedDataset([Numbered(0, 10)], [1])


def test_blend_is_cached_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petatron.data.index_cache.MIN_RECORDED_BYTES", 0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sources = [Numbered(0, 75), Numbered(1000, 25)]
    first = BlendedDataset(sources, [3, 1], 100, cache_dir=tmp_path)
    monkeypatch.setattr(blended_dataset, "blend_indices", lambda *args, **more: pytest.fail("built again"))
    again = BlendedDataset(sources, [3, 1], 100, cache_dir=tmp_path)
    assert [int(first[i][0]) for i in range(100)] == [int(again[i][0]) for i in range(100)]
    assert first.fingerprint == again.fingerprint


def test_fingerprint_follows_parts_and_weights() -> None:
    sources = [Numbered(0, 75), Numbered(1000, 75)]
    marks = {BlendedDataset(sources, weights, 50).fingerprint for weights in ([3, 1], [1, 1], [1, 3])}
    marks |= {BlendedDataset(sources[::-1], [3, 1], 50).fingerprint, BlendedDataset(sources, None).fingerprint}
    assert len(marks) == 5
    assert BlendedDataset(sources, [3, 1], 60).fingerprint in marks, "a longer blend goes on in the same order"


def test_parse_blend() -> None:
    assert parse_weighted_prefixes(("a", "b")) == (None, ("a", "b"))
    assert parse_weighted_prefixes(("1", "a", "2.5", "b")) == ((1.0, 2.5), ("a", "b"))
    assert parse_weighted_prefixes(("0", "a", "2", "b")) == ((2.0,), ("b",))
    with pytest.raises(ConfigError, match="--valid-data-path 1 a b mixes weights and prefixes"):
        parse_weighted_prefixes(("1", "a", "b"), flag="--valid-data-path")
    with pytest.raises(ConfigError, match="negative"):
        parse_weighted_prefixes(("-1", "a", "1", "b"))


def test_files_of_a_dataset_stand_for_their_prefix(tmp_path):
    assert parse_weighted_prefixes(("a.bin", "b.idx")) == (None, ("a", "b"))
    assert parse_weighted_prefixes(("a.bin", "a.idx")) == (None, ("a",)), "`a.*` is one dataset"
    assert parse_weighted_prefixes(("1", "a.idx", "2", "b")) == ((1.0, 2.0), ("a", "b"))
    (tmp_path / "odd.bin.idx").touch()
    assert parse_weighted_prefixes((f"{tmp_path}/odd.bin",)) == (None, (f"{tmp_path}/odd.bin",))
