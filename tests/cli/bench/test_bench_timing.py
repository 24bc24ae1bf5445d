"""Turns are fair, whoever takes them; a device is timed by its own clock; one copy is the yardstick of all."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.bench.measure import device_memory
from petatron.bench.measure import timing as bench_timing
from petatron.bench.measure.check_arguments import minimum_problems, positive_problems, resolve_device
from petatron.bench.measure.hardware_and_versions import device_name
from petatron.bench.measure.timing import alternating_orders, gc_disabled, large_copy, mean_ms, median_ms
from petatron.bench.peers import OURS, OWN_BF16, PEERS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("rounds", [1, 2, 3, 10])
@pytest.mark.parametrize("items", ["ab", "abc", "abcd"])
def test_nobody_always_follows_the_same_one(items: str, rounds: int):
    found = list(alternating_orders(items, rounds=rounds))
    assert rounds <= len(found) <= rounds + 1
    follows = Counter(pair for order in found for pair in pairwise(order))
    assert all(follows[a, b] == follows[b, a] == len(found) / 2 for a, b in pairwise(items))


def test_one_alone_has_no_order():
    assert list(alternating_orders(["a"], rounds=3)) == [["a"]] * 3


@pytest.mark.parametrize(("repeat", "turns"), [(1, "abba"), (3, "abbaabba"), (4, "abbaabba")])
def test_medians_are_of_both_orders_equally_often(repeat: int, turns: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    runs: list[Callable[[], object]] = [lambda name=name: calls.append(name) for name in "ab"]
    times = iter([1.0, 10.0, 30.0, 3.0] * 2)

    def timed(run: Callable[[], object], device: torch.device, *, calls: int) -> float:
        run()
        return next(times)

    monkeypatch.setattr(bench_timing, "mean_ms", timed)
    assert median_ms(runs, CPU, repeat=repeat, warmup_s=0.0) == [2.0, 20.0]
    assert "".join(calls) == "abab" + turns


def test_a_mean_on_a_cpu():
    calls: list[int] = []
    assert mean_ms(lambda: calls.append(1), CPU, calls=5) >= 0.0 and len(calls) == 5


@pytest.mark.parametrize("head_start", [True, False])
def test_a_mean_on_a_device(head_start: bool, monkeypatch: pytest.MonkeyPatch):
    """Marks are queued around the calls, after the head start, and read when all is done."""
    said: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("mark")

        def elapsed_time(self, last: Any) -> float:
            said.append("read")
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("wait"))
    assert mean_ms(lambda: said.append("run"), CUDA, calls=3, head_start=head_start) == 4.0
    start = ["sleep"] if head_start else []
    assert said == ["wait", *start, "mark", "run", "run", "run", "mark", "wait", "read"]


def test_the_collector_comes_back():
    with gc_disabled():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_copy_says_what_it_moves():
    copy, moved = large_copy(CPU)
    made = copy()
    assert 2 * made.numel() * made.itemsize == moved
    assert device_name(CPU) == "the CPU"


def test_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    others = [*minimum_problems({"--repeat": (0, 1)}), *positive_problems({"--workers": 0})]
    with pytest.raises(ConfigError) as alone:
        resolve_device("cpu", problems=others)
    assert list(alone.value.problems) == others
    with pytest.raises(ConfigError) as together:
        resolve_device("cuda", problems=others)
    assert [problem.where for problem in together.value.problems] == ["--repeat", "--workers", "--device"]


def test_contenders_have_one_name():
    assert PEERS == ("torchtitan", "hf", OWN_BF16) and OURS not in PEERS


def test_memory_of_captured_graphs_counts(monkeypatch: pytest.MonkeyPatch):
    """A replay writes into the pool of its graph, which the allocator counts as free."""
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 40},
        {"device": 0, "segment_pool_id": (0, 3), "total_size": 70, "allocated_size": 20},
        {"device": 1, "segment_pool_id": (0, 3), "total_size": 500, "allocated_size": 0},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 90)
    device = CUDA
    assert device_memory.graph_bytes(device) == 50
    assert device_memory.allocated_bytes(device) == 110


def test_memory_of_a_step_that_is_captured_counts_once(monkeypatch: pytest.MonkeyPatch):
    """While it is captured its tensors are allocated; the pool holds them afterwards."""
    segments = [{"device": 0, "segment_pool_id": (0, 3), "total_size": 70, "allocated_size": 20}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 90)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    another = {"device": 0, "segment_pool_id": (0, 4), "total_size": 30, "allocated_size": 0}
    assert device_memory.peak_bytes_of_step(CUDA, lambda: segments.append(another)) == 140
    assert device_memory.peak_bytes_of_step(CUDA, lambda: None) == 170
