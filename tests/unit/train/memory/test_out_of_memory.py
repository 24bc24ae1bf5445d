"""Out of memory: what is said, and that every change it names is allowed, fits, and is needed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import petatron
from petatron.base.errors import CheckpointError, TrainError
from petatron.config import RunConfig
from petatron.estimate.memory.advice import suggest_changes
from petatron.estimate.memory.forecast import largest_forecast
from petatron.estimate.memory.relative_step_time import predicted_step_time
from petatron.train.report import memory_capacity_and_oom as out_of_memory_module
from petatron.train.report.memory_capacity_and_oom import (
    RESERVE_BYTES,
    DeviceMemoryStats,
    device_memory_stats,
    largest_blocks,
    out_of_memory_error,
    report_out_of_memory,
    requested_bytes,
)
from petatron.train.run_training import run_training
from petatron.validate import load_config
from tests.longform import diagonal

BASE = "--mock-data --lr 1e-4 --train-iters 1 --bf16"
SEVEN = f"{BASE} --vocab-size 32000 --seq-length 4096"
GB = 10**9


def load(preset: str, flags: str, world_size: int = 1) -> RunConfig:
    return petatron.load(preset, shlex.split(flags), world_size=world_size).config


def again(preset: str, flags: str, change: str, world_size: int = 1) -> RunConfig:
    """The run as a person would start it after reading the advice."""
    return load(preset, f"{flags} {change}", world_size)


CASES = [
    ("llama3-8b", f"{SEVEN} --micro-batch-size 4 --global-batch-size 16", 1, 0.75),
    ("llama3-8b", f"{SEVEN} --vocab-size 128256", 1, 0.97),
    ("llama3-8b", f"{SEVEN} --micro-batch-size 8 --global-batch-size 64 --tp 2", 8, 0.7),
    ("llama3-8b", f"{SEVEN} --micro-batch-size 2 --global-batch-size 64 --pp 4", 4, 0.7),
    ("mixtral-8x7b", f"{SEVEN} --micro-batch-size 2 --global-batch-size 64 --ep 8", 8, 0.5),
    ("tiny-llama", f"{BASE} --micro-batch-size 8", 1, 0.6),
    ("llama3-8b", f"{SEVEN} --micro-batch-size 2 --global-batch-size 8".replace("--bf16", ""), 1, 0.75),
]


@diagonal(3)
@pytest.mark.parametrize(("preset", "flags", "world_size", "share"), CASES)
def test_every_change_is_allowed_fits_and_is_priced(preset: str, flags: str, world_size: int, share: float):
    run = load(preset, flags, world_size)
    capacity = int(share * largest_forecast(run, device="cuda").total)
    changes = suggest_changes(run, capacity)
    assert len(changes) >= 3
    before = predicted_step_time(run)
    for change in changes:
        changed = again(preset, flags, change.flags, world_size)
        need = largest_forecast(changed, device="cuda").total
        assert need == change.total_bytes <= capacity
        assert changed.train.global_batch_size == run.train.global_batch_size
        assert change.saved_bytes == largest_forecast(run, device="cuda").total - need
        assert change.time_cost == pytest.approx(predicted_step_time(changed) / before - 1.0)
    costs = [round(change.time_cost, 4) for change in changes]
    assert costs == sorted(costs)
    words = [(set(change.flags.split()), cost) for change, cost in zip(changes, costs)]
    useless = [b for a, cost in words for b, with_more in words if a < b and with_more >= cost]
    assert useless == [], "more than what does already, and no cheaper"


def test_bf16_is_offered_to_a_run_in_fp32():
    wide = SEVEN.replace("--bf16", "--micro-batch-size 2 --global-batch-size 8")
    run = load("llama3-8b", wide)
    need = largest_forecast(run, device="cuda").total
    cheapest = suggest_changes(run, need - 1)[0]
    assert cheapest.flags == "--bf16" and cheapest.time_cost < -0.5
    error = out_of_memory_error(torch.OutOfMemoryError("no more"), run, facts(total=need + GB), phase="iteration 1")
    assert "  1. --bf16: frees " in str(error) and "the fastest of these; computes in bfloat16, master weights" in str(
        error
    )
    together = suggest_changes(run, int(0.7 * need))[:3]
    assert all("--bf16 " in change.flags for change in together), "sets without it do not crowd it out"
    assert max(change.flags.count("--exp-avg-dtype") for change in together) == 1
    for precision in ("--bf16", "--fp16", "--fp64"):
        other = load("llama3-8b", f"{wide} {precision}")
        half = int(0.9 * largest_forecast(other, device="cuda").total)
        assert not any("--bf16" in change.flags for change in suggest_changes(other, half))


@pytest.mark.parametrize(("preset", "width", "length"), [("llama-1b", 2048, 4096), ("llama3-8b", 4096, 8192)])
def test_offloaded_activations_are_free_up_to_the_share_that_the_docs_give(preset: str, width: int, length: int):
    """docs/memory.md: (D + S / 13) / 10,600 of the layers."""
    run = load(preset, BASE)
    layers = run.model.num_layers
    share = (width + length / 13) / 10_600
    free = [
        number
        for number in range(1, layers)
        if predicted_step_time(replace(run, memory=replace(run.memory, cpu_offloading_num_layers=number)))
        == predicted_step_time(run)
    ]
    assert (run.model.hidden_size, run.model.seq_length) == (width, length)
    assert free == list(range(1, int(share * layers) + 1))


def test_nothing_can_be_done():
    run = load("llama3-8b", f"{SEVEN}")
    assert suggest_changes(run, GB) == []
    error = out_of_memory_error(torch.OutOfMemoryError("no more"), run, facts(total=8 * GB), phase="building the model")
    assert "No setting of this run is predicted to fit. Use more devices" in str(error)
    assert "building the model: an allocation failed, with" in str(error)


def facts(**values: Any) -> DeviceMemoryStats:
    total = values.pop("total", 150 * GB)
    held = {"total": total, "free": GB, "reserved": total - GB, "allocated": total - GB - GB // 10} | values
    return DeviceMemoryStats(
        **{f"{name}_bytes" if name != "largest" else "largest_blocks": value for name, value in held.items()}
    )


MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1 GiB is free."
)


def test_the_report():
    run = load("llama3-8b", CASES[0][1])
    found = facts(largest=((1_000_000_000, 32), (500_000_000, 7)))
    error = out_of_memory_error(torch.OutOfMemoryError(MESSAGE), run, found, phase="iteration 3")
    first, need, held, title, *advice = str(error).splitlines()
    assert (
        first
        == "The device ran out of memory in iteration 3: 2.15 GB more were asked for, with 148.9 of 150.0 GB in tensors."
    )
    assert need == f"  predicted need: {largest_forecast(run, device='cuda').describe()}"
    assert (
        held.endswith("most memory is in blocks of 32 x 1.00 GB, 7 x 0.5 GB")
        and "scattered between tensors: 0.1" in held
    )
    assert title.startswith("What would fit") and len(advice) == 3
    for number, (line, change) in enumerate(zip(advice, suggest_changes(run, 148 * GB)), start=1):
        assert line.startswith(f"  {number}. {change.flags}: frees ")
        assert (
            "the fastest of these" in line if number == 1 else "slower than that" in line or "as fast as that" in line
        )


def test_a_forecast_that_was_too_low_asks_for_more():
    """It says that the run fits, and the device says otherwise: what failed must be freed at least."""
    run = load("llama3-8b", f"{SEVEN} --micro-batch-size 2 --global-batch-size 8")
    need = largest_forecast(run, device="cuda").total
    error = out_of_memory_error(torch.OutOfMemoryError(MESSAGE), run, facts(total=need + 9 * GB), phase="iteration 1")
    listed = [line.split(". ")[1].split(":")[0] for line in str(error).splitlines() if ": frees" in line]
    assert listed == [change.flags for change in suggest_changes(run, need - (2 << 30))[:3]] != []


def test_memory_in_pieces_is_said_first():
    run = load("llama3-8b", CASES[0][1])
    scattered = facts(allocated=140 * GB)
    text = str(out_of_memory_error(torch.OutOfMemoryError(MESSAGE), run, scattered, phase="iteration 1"))
    assert "1. the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True: makes use of the 9.00 GB" in text
    assert "  3. " in text and "  4. " not in text
    whole = str(out_of_memory_error(torch.OutOfMemoryError(MESSAGE), run, facts(), phase="iteration 1"))
    assert "expandable" not in whole


def test_other_processes_are_named():
    run = load("llama3-8b", CASES[0][1])
    shared = facts(free=GB, reserved=100 * GB, allocated=100 * GB)
    assert "held by other processes and the driver: 49.0 GB" in str(
        out_of_memory_error(torch.OutOfMemoryError(MESSAGE), run, shared, phase="iteration 1")
    )
    assert shared.capacity_bytes == 101 * GB


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (MESSAGE, 2 << 30),
        ("Tried to allocate 20.00 MiB.", 20 << 20),
        ("Tried to allocate 512 bytes.", 512),
        ("Tried to allocate 1.50 KiB.", 1536),
        ("something else", 0),
    ],
)
def test_what_was_asked_for(message: str, size: int):
    assert requested_bytes(RuntimeError(message)) == size


def test_blocks_are_summed_by_size():
    blocks = [(8, "active_allocated")] * 3 + [(30, "inactive"), (20, "active_allocated"), (1, "active_allocated")]
    segment = {"blocks": [{"size": size, "state": state} for size, state in blocks]}
    assert largest_blocks([segment, {"blocks": [{"size": 8, "state": "active_pending_free"}]}]) == (
        (8, 3),
        (20, 1),
        (1, 1),
    )


def test_facts_of_a_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    found = device_memory_stats(torch.device("cuda", 0))
    assert (found.capacity_bytes, found.fragmented_bytes, found.total_bytes, found.largest_blocks) == (95, 10, 100, ())
    assert RESERVE_BYTES > 0


class Failing:
    """An action in which the device runs out of memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(MESSAGE)


@diagonal(2)
@pytest.mark.parametrize(
    ("module", "name", "when"),
    [
        ("petatron.train.state.train_state.TrainState", "build", "building the model"),
        ("petatron.train.state.train_state.TrainState", "load", "loading the checkpoint"),
        ("petatron.checkpoint.load.reshard_reads", "execute_reads", "loading the checkpoint"),
        ("petatron.train.state.train_state.TrainState", "load_pretrained_weights", "loading the checkpoint"),
        ("petatron.train.training_loop.TrainLoop", "run", "iteration 3"),
    ],
)
def test_a_run_reports_it_whatever_it_was_doing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str, when: str
):
    """Reading a checkpoint says for all ranks that it could not be read, and has the reason behind that."""
    saved = str(tmp_path / "saved")
    flags = "--mock-data --lr 1e-3 --train-iters 2 --eval-iters 0 --seq-length 32 --live off --device cpu".split()
    run_training(load_config([*flags, "--save", saved], preset="tiny-llama"))
    monkeypatch.setattr(f"{module}.{name}", Failing)
    monkeypatch.setattr(out_of_memory_module, "device_memory_stats", lambda device: facts())
    source = "--pretrained-checkpoint" if name == "load_pretrained_weights" else "--load"
    flags[flags.index("2")] = "3"
    flags.append("--override-opt-param-scheduler")
    with pytest.raises(TrainError, match=f"^The device ran out of memory in {when}: 2.15 GB more were asked for"):
        run_training(load_config([*flags, source, saved, "--log-dir", str(tmp_path)], preset="tiny-llama"))


def test_a_checkpoint_that_cannot_be_read_for_another_reason_stays_what_it_is():
    reason = CheckpointError("two files are gone")
    watched = report_out_of_memory(
        load("tiny-llama", BASE), torch.device("cpu"), phase=lambda: "loading the checkpoint"
    )
    with pytest.raises(CheckpointError, match="two files are gone") as caught, watched:
        raise reason from OSError("gone")
    assert caught.value is reason
