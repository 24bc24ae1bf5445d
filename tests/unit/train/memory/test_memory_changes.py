"""What would fit: that the search misses nothing, and what it offers to whom."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest

import petatron
from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.estimate.memory import advice
from petatron.estimate.memory.advice import suggest_changes
from petatron.estimate.memory.forecast import largest_forecast, pinned_optimizer_bytes, state_bytes_per_rank
from petatron.estimate.memory.layouts_that_fit import fitting_changes, suggest_layouts
from petatron.estimate.memory.memory_saving_options import option_groups
from petatron.estimate.memory.relative_step_time import predicted_step_time
from petatron.validate import check_config
from tests.longform import diagonal, every_second, later

BASE = "--mock-data --lr 1e-4 --train-iters 1 --bf16"
GB = 10**9
GRADIENTS = "--main-grads-dtype bf16"
FSDP = "--data-parallel-sharding-strategy optim_grads"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def load(preset: str, flags: str, world_size: int = 1) -> RunConfig:
    return petatron.load(preset, shlex.split(f"{BASE} {flags}"), world_size=world_size).config


def needs(run: RunConfig) -> int:
    return largest_forecast(run, device="cuda").total


def offered(run: RunConfig, capacity: int) -> str:
    return "\n".join(change.flags for change in suggest_changes(run, capacity))


def open_to(run: RunConfig) -> set[str]:
    return {variant.flags for kind in option_groups(run) for variant in kind.options}


def brute_force(flags: str, world_size: int, capacity: int) -> list[tuple[float, int]]:
    """Cost and bytes of everything that fits with at most three kinds of change."""
    return [(cost, size) for cost, size in _all_changes(flags, world_size) if size <= capacity]


@cache
def _all_changes(flags: str, world_size: int, most: int = 3) -> list[tuple[float, int]]:
    """Cost and bytes of all changes, worked out one by one."""
    run, found = load("tiny-llama", flags, world_size), []
    kinds, before = list(option_groups(run)), predicted_step_time(run)
    for together in range(1, most + 1):
        for chosen in combinations(kinds, together):
            for variants in product(*(kind.options for kind in chosen)):
                changed = run
                for variant in variants:
                    changed = variant.edit(changed)
                if check_config(changed, require_training=False):
                    continue
                try:
                    size = needs(changed)
                except ConfigError:
                    continue
                found.append((predicted_step_time(changed) / before - 1.0, size))
    return sorted(found)


SMALL = "--vocab-size 1000 --seq-length 64 --num-layers 3 --micro-batch-size 2"


RUNS = [
    (f"{SMALL} --global-batch-size 8 --tp 2", 4),
    (f"{SMALL} --global-batch-size 16 --use-distributed-optimizer --main-grads-dtype bf16", 4),
    (f"{SMALL} --global-batch-size 8 --optimizer-cpu-offload --grad-reduce-in-bf16", 2),
]


@diagonal(3)
@pytest.mark.parametrize(
    ("flags", "world_size", "share"),
    every_second((*run, share) for share in (0.9, 0.45, 0.25, 0.12, 0.05) for run in RUNS),
)
def test_nothing_cheaper_is_missed(flags: str, world_size: int, share: float):
    run = load("tiny-llama", flags, world_size)
    capacity = int(share * needs(run))
    cheapest, found = brute_force(flags, world_size, capacity), suggest_changes(run, capacity)
    if cheapest:
        # A per cent is not worth another kind of change.
        assert cheapest[0][0] - 1e-9 <= found[0].time_cost <= cheapest[0][0] + 0.011
    assert all(change.total_bytes <= capacity for change in found)


@pytest.mark.parametrize(
    ("preset", "layout", "world_size", "device_gb", "change", "total_gb"),
    [
        (
            "llama2-7b",
            "--vocab-size 32000",
            2,
            40,
            f"{FSDP}_params --optimizer-cpu-offload {WHOLE}",
            32.2,
        ),
        ("llama3-70b", "--vocab-size 128256", 8, 143, f"{FSDP}_params {MOMENTS} {WHOLE}", 139.4),
    ],
)
def test_a_run_that_fits_fully_sharded_is_told_so(
    preset: str, layout: str, world_size: int, device_gb: int, change: str, total_gb: float
):
    run, room = load(preset, layout, world_size), (device_gb - 2) * GB
    fitting = load(preset, f"{layout} {change}", world_size)
    assert needs(fitting) / GB == pytest.approx(total_gb, abs=0.05)
    found = suggest_changes(run, room)
    assert len(found) >= 3
    assert found[0].time_cost <= predicted_step_time(fitting) / predicted_step_time(run) - 1.0
    assert f"{FSDP}_params" in found[0].flags


def test_bf16_gradients_are_offered_where_they_are_allowed():
    flags = "--vocab-size 128256 --seq-length 8192"
    run = load("llama3-8b", flags)
    best = suggest_changes(run, 78 * GB)[0]
    assert "--main-grads-dtype bf16" in best.flags and "small parts of a gradient's sum are lost" in best.remark
    assert GRADIENTS in open_to(run)
    half = replace(run, precision=replace(run.precision, bf16=False, fp16=True))
    assert GRADIENTS not in open_to(half)
    assert GRADIENTS not in open_to(load("llama3-8b", f"{flags} {GRADIENTS}"))
    sharded = load("llama3-8b", f"{flags} {FSDP}", 8)
    for share in (0.8, 0.5):
        assert GRADIENTS not in offered(sharded, int(share * needs(sharded))), "refused where all is fully sharded"
    wide = petatron.load("llama3-8b", shlex.split(f"{BASE} {flags}".replace("--bf16", ""))).config
    assert all(change.flags.startswith("--bf16 ") for change in suggest_changes(wide, 78 * GB))
    assert GRADIENTS in offered(wide, 78 * GB)


def test_who_shares_some_state_can_share_more():
    flags = "--vocab-size 128256"
    alone = load("llama3-8b", flags)
    assert not any("shar" in each or "distributed" in each for each in open_to(alone))
    shared = "--data-parallel-sharding-strategy optim"
    assert {shared, f"{shared} --overlap-param-gather", FSDP, f"{FSDP}_params"} <= open_to(load("llama3-8b", flags, 8))
    run = load("llama3-8b", f"{flags} {shared} --global-batch-size 16", 8)
    assert {FSDP, f"{FSDP}_params"} <= open_to(run) and shared not in open_to(run)
    assert FSDP in offered(run, int(0.75 * needs(run))).splitlines()
    refused = load("llama3-8b", f"{flags} --data-parallel-sharding-strategy no_shard", 8)
    assert shared in open_to(refused), "and the last flag wins"
    assert FSDP not in open_to(load("llama3-8b", f"{flags} {FSDP}", 8))
    assert f"{FSDP}_params" not in open_to(load("llama3-8b", f"{flags} {FSDP}_params", 8))


def test_sharing_more_where_gradients_are_narrow():
    """Fully sharded gradients are wide, so one flag has to go with the other."""
    flags = "--vocab-size 128256 --use-distributed-optimizer --main-grads-dtype bf16"
    run = load("llama3-8b", flags, 8)
    capacity = int(0.5 * needs(run))
    change = next(change for change in suggest_changes(run, capacity) if FSDP in change.flags)
    assert f"{FSDP}_params --main-grads-dtype fp32" in change.flags
    assert needs(load("llama3-8b", f"{flags} {change.flags}", 8)) == change.total_bytes <= capacity


def test_sharing_that_the_schedule_refuses_is_not_offered():
    run = load("llama3-8b", "--vocab-size 128256 --pp 2 --pipeline-schedule zb-h1 --global-batch-size 16", 8)
    for share in (0.7, 0.4):
        assert FSDP not in offered(run, int(share * needs(run))), "a backward pass in two halves"


def test_more_than_three_changes_if_no_three_do():
    flags = f"{SMALL} --global-batch-size 8 --tp 2"
    run = load("tiny-llama", flags, 4)
    capacity = min(size for _, size in brute_force(flags, 4, needs(run))) - 1
    found = suggest_changes(run, capacity)
    assert found
    for change in found:
        assert needs(load("tiny-llama", f"{flags} {change.flags}", 4)) == change.total_bytes <= capacity
    assert suggest_changes(run, capacity // 4) == []


def test_changes_that_the_layout_allows():
    flags = "--vocab-size 128256 --micro-batch-size 2 --global-batch-size 8"
    listed = open_to(load("llama3-8b", f"{flags} --tp 2", 8))
    contexts = ["--data-parallel-size 2 --context-parallel-size 2", "--data-parallel-size 1 --context-parallel-size 4"]
    assert {"--sequence-parallel", *contexts} <= listed
    for context in contexts:
        same = load("llama3-8b", f"{flags} --tp 2 --dp 4 {context}", 8)
        assert same.parallel.world_size == 8, "also where someone wrote --dp"
    alone = open_to(load("llama3-8b", flags))
    assert not any(word in each for each in alone for word in ("distributed", "sequence", "context"))
    assert "--micro-batch-size 1 --global-batch-size 8" in alone


@pytest.mark.parametrize("share", [0.25, later(0.9), later(0.01)])  # a quarter needs the most plans
def test_the_search_is_short(monkeypatch: pytest.MonkeyPatch, share: float):
    """A plan of all stages is most of the work; there are more than ten thousand candidates.

    A hundredth holds not even the weights, so nothing is planned for it.
    """
    plans: list[int] = []
    made = advice.recompute_plans
    monkeypatch.setattr(advice, "recompute_plans", lambda *a, **k: plans.append(1) or made(*a, **k))
    run = load("llama3-70b", "--vocab-size 128256 --tp 8 --pp 4 --global-batch-size 128 --micro-batch-size 4", 256)
    suggest_changes(run, int(share * needs(run)))
    assert len(plans) < 1000 and bool(plans) == (share > 0.01)


def test_offload_is_offered_only_while_the_host_has_room():
    run = load("llama-8b-8layer", "--vocab-size 32000 --seq-length 8192 --micro-batch-size 2")
    capacity = int(0.9 * needs(run))
    unlimited = [change for change in suggest_changes(run, capacity) if change.pinned_bytes]
    assert unlimited
    for limit in (min(change.pinned_bytes for change in unlimited) - 1, 0):
        assert all(
            change.pinned_bytes <= limit for change in suggest_changes(run, capacity, pinned_capacity_bytes=limit)
        )
    none = suggest_changes(run, capacity, pinned_capacity_bytes=0)
    assert none and not any("offload" in change.flags for change in none)


def test_pinned_memory_is_what_leaves_the_device():
    run = load("tiny-llama", f"{SMALL} --optimizer-cpu-offload", 2)
    kept = replace(run, memory=replace(run.memory, optimizer_cpu_offload=False))
    state = [sum(rank.optimizer for rank in state_bytes_per_rank(each)) for each in (kept, run)]
    assert pinned_optimizer_bytes(run) == state[0] - state[1] > 0 and pinned_optimizer_bytes(kept) == 0


LAYOUT_RUNS = [
    ("tiny-llama", f"{SMALL} --num-layers 4 --global-batch-size 16", 8, 0.3),
    ("tiny-llama", f"{SMALL} --num-layers 6 --num-experts 8 --global-batch-size 16 --ep 2", 8, 0.4),
]


@diagonal(2)
@pytest.mark.parametrize(("preset", "flags", "world_size", "share"), LAYOUT_RUNS)
def test_layouts_are_allowed_fit_and_are_priced(preset: str, flags: str, world_size: int, share: float):
    run = load(preset, flags, world_size)
    capacity, before = int(share * needs(run)), predicted_step_time(run)
    layouts = suggest_layouts(run, capacity)
    assert len(layouts) == 2 and layouts[0].time_cost <= layouts[1].time_cost
    for change in layouts:
        changed = load(preset, f"{flags} {change.flags}", world_size)
        assert changed.train.global_batch_size == run.train.global_batch_size
        assert needs(changed) == change.total_bytes <= capacity
        assert change.time_cost == pytest.approx(predicted_step_time(changed) / before - 1.0)
    assert any(layout in fitting_changes(run, capacity, None) for layout in layouts)
    assert suggest_layouts(load(preset, SMALL), capacity) == [], "one rank has one layout"
