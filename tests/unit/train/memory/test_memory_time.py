"""Prices of settings, against sums by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial

import pytest

import petatron
from petatron.config import RunConfig
from petatron.estimate.memory.relative_step_time import optimizer_offload_time, predicted_step_time
from petatron.estimate.state_bytes import local_element_counts

# Llama-3-8B; the layers have 6.98e9 of 8.03e9 elements.
FLAGS = "--mock-data --lr 1e-4 --train-iters 1 --bf16 --vocab-size 128256 --seq-length"
ELEMENTS = 8_030_261_248
STRATEGY = "--data-parallel-sharding-strategy"


def load(flags: str, *, length: int = 8192, world_size: int = 8) -> RunConfig:
    return petatron.load("llama3-8b", shlex.split(f"{FLAGS} {length} {flags}"), world_size=world_size).config


def extra(flags: str, beside: str = "", *, length: int = 8192, world_size: int = 8) -> float:
    """Seconds that flags add to a run with other ones."""
    times = [predicted_step_time(load(each, length=length, world_size=world_size)) for each in (flags, beside)]
    return times[0] - times[1]


HIDDEN = f"{STRATEGY} optim --overlap-param-gather"


def test_what_is_hidden_costs_nothing_but_copies():
    """Eight ranks at 150 GB/s: gradients take 187 ms and weights 94, a forward pass of 4 x 8192 tokens 770."""
    batch = "--micro-batch-size 4 --global-batch-size 64"
    copy = 2 * 2 * ELEMENTS / 4e12
    assert extra(f"{batch} {HIDDEN}", batch) == pytest.approx(0.0, abs=1e-9)
    assert extra(f"{batch} {STRATEGY} optim_grads", batch) == pytest.approx(copy)
    assert extra(f"{batch} {STRATEGY} optim_grads_params", batch) == pytest.approx(2 * 2 * copy)
    gather = 2 * ELEMENTS * 7 / 8 / 150e9
    assert extra(f"{batch} --use-distributed-optimizer", batch) == pytest.approx(gather), "behind the update"
    assert extra(f"{batch} --no-overlap-grad-reduce", batch) == pytest.approx(4 * gather), "sums travel both ways"


@pytest.mark.parametrize(("world_size", "link"), [(8, 150e9), (64, 50e9)])
def test_what_is_not_hidden_is_waited_for(world_size: int, link: float):
    """Passes of 64 tokens take next to no time, so all that travels is waited for but a sliver; four micro-batches."""
    batch = f"--global-batch-size {4 * world_size}"
    part = ELEMENTS * (1 - 1 / world_size) / link
    gradients, weights = 4 * part, 2 * part
    ends = local_element_counts(load(batch, world_size=world_size)).embedding_and_head / ELEMENTS
    copy = 2 * 2 * ELEMENTS / 4e12
    near = partial(pytest.approx, rel=0.03, abs=0.01 * gradients)
    measure = partial(extra, length=64, world_size=world_size)
    assert measure(f"{batch} {HIDDEN}", batch) == near(weights - gradients)
    once = measure(f"{batch} {STRATEGY} optim_grads", f"{batch} {HIDDEN}")
    assert once == near(3 * gradients + copy)
    always = measure(f"{batch} {STRATEGY} optim_grads_params", f"{batch} {HIDDEN}")
    assert always == near(3 * gradients + (4 * (2 - ends) - 1) * weights + 8 * copy)
    narrow = "--grad-reduce-in-bf16"
    saved = measure(f"{batch} {STRATEGY} optim_grads {narrow}", f"{batch} {STRATEGY} optim_grads")
    assert saved == near(-4 * gradients / 2)


def test_fully_sharded_weights_in_eight_bits_are_cast_for_every_use():
    batch = "--micro-batch-size 4 --global-batch-size 64"
    plain = extra(f"{batch} {STRATEGY} optim_grads", f"{batch} {HIDDEN}")
    eight = extra(f"{batch} {STRATEGY} optim_grads --fp8-hybrid", f"{batch} {HIDDEN} --fp8-hybrid")
    ends = local_element_counts(load(batch)).embedding_and_head
    assert eight - plain == pytest.approx(2 * 2 * 6 * (ELEMENTS - ends) / 4e12)


@pytest.mark.parametrize(
    ("flags", "bytes_each"),
    [
        ("", 12),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 8),
        ("--optimizer-offload-fraction 0.5", 6),
        ("--use-distributed-optimizer", 12 / 8),
        (f"{STRATEGY} optim_grads", 8 / 8),
        (f"{STRATEGY} optim_grads_params --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 4 / 8),
    ],
)
def test_optimizer_offload_takes_what_is_away_over_the_link(flags: str, bytes_each: float):
    """docs/memory.md: 0.24 s per billion parameters, 0.16 with narrow moments; fully sharded, master weights stay."""
    run = load(f"--optimizer-cpu-offload {flags}")
    assert optimizer_offload_time(run) == pytest.approx(bytes_each * ELEMENTS / 50e9)
    assert optimizer_offload_time(replace(run, memory=replace(run.memory, optimizer_cpu_offload=False))) == 0.0
