"""An entry that takes long to build is built by one process, while the others wait for it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from petatron.data import index_cache
from petatron.data.index_cache import IndexLog, load_or_build


def build_at_once(folder: Path, count: int, *, is_slow: bool) -> list[str]:
    """Builds an entry in several threads at the same time, with a lock of each as processes have; returns what each of them did."""

    def build() -> dict[str, np.ndarray]:
        time.sleep(0.2)
        return {"ids": np.arange(5)}

    def one_rank(_: int) -> str:
        log = IndexLog()
        entry = load_or_build(folder, {"of": "a test"}, ("ids",), build=build, log=log, is_slow=is_slow)
        assert entry["ids"].tolist() == [0, 1, 2, 3, 4]
        return str(log)

    with ThreadPoolExecutor(count) as pool:
        return sorted(pool.map(one_rank, range(count)))


def test_one_builds_and_the_others_find_it(tmp_path: Path):
    assert build_at_once(tmp_path, 4, is_slow=True) == ["1 built", "1 found", "1 found", "1 found"]


def test_without_a_place_for_a_lock_all_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_cache, "private_folder", lambda _: None)
    assert "1 found" not in build_at_once(tmp_path, 2, is_slow=True)


def test_a_build_that_fails_ends_its_lock(tmp_path: Path):
    def fail() -> dict[str, np.ndarray]:
        raise ValueError("no records")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no records"):
        load_or_build(tmp_path, {"of": "a test"}, ("ids",), build=fail, is_slow=True)
    assert len(os.listdir("/proc/self/fd")) == before
    assert build_at_once(tmp_path, 1, is_slow=True) == ["1 built"]
