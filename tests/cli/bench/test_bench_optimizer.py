"""`petatron bench optimizer` on a CPU: both sides really update, and what it reports hangs together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.bench import optimizer as bench_optimizer
from petatron.bench.checkpoint import model_shapes
from petatron.bench.optimizer import _flat_groups, _torch_step
from petatron.cli import bench
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.kernels.registry import KernelContext
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_optimizer, "_STEPS_PER_ROUND", 1)


CPU = ["optimizer", "--device", "cpu", "--parameters", "1e5", "--repeat", "3"]


def test_reports_a_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench.main([*CPU, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratio"] > 0 and len(found["ms"]["torch"]) == len(found["ms"]["ours"]) == 4
    assert found["moved_bytes"]["ours"] == 34 * found["parameters"]
    shown = capsys.readouterr().out
    assert f"{found['ratio']:.3f}x" in shown and "torch fused; not triton: the device is no GPU" in shown


def test_takes_what_the_registry_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without = KernelContext("cuda", (9, 0), torch.bfloat16, True, "triton is not installed")
    monkeypatch.setattr(KernelContext, "of", lambda *_, **__: without)
    assert bench.main([*CPU, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kernels"] == "adamw: torch fused; not triton: triton is not installed"


def test_both_orders_equally_often(monkeypatch: pytest.MonkeyPatch):
    timed: list[Callable[[], object]] = []

    def mean_ms(run: Callable[[], object], device: torch.device, *, calls: int, head_start: bool) -> float:
        timed.append(run)
        return 1.0

    monkeypatch.setattr("petatron.bench.optimizer.mean_ms", mean_ms)
    assert bench.main([*CPU, "--repeat", "5"]) == 0
    contenders = list(dict.fromkeys(timed))
    turns = "".join("abcd"[contenders.index(run)] for run in timed)
    assert turns == "aabbccdd" + "abcddcba" * 3  # each twice to warm up, then five rounds that become six


def test_narrow_state_is_timed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--moments", "bf16", "--main-grads", "bf16", "--offload-fraction", "0.5"]
    assert bench.main([*CPU, *flags, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratio"] is None and found["moved_bytes"]["ours"] == 22 * found["parameters"]
    assert found["offloaded_bytes"] == 4 * found["parameters"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--parameters", "10"],
            "--parameters 10 is not between 1e4, which takes long enough to time, and 1e12. Use 1e7, for instance.",
        ),
        (["--repeat", "0"], "--repeat 0 is below 1. Use 1 or more."),
        (["--offload-fraction", "1.5"], "--offload-fraction 1.5 is out of range. Use a number from 0 to 1."),
        pytest.param(
            ["--device", "cuda", "--offload-fraction", "2"],
            r"(?s)--offload-fraction 2 is out of range.*--device cuda needs a CUDA device and none is visible.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_refuses(flags: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        bench.main(["optimizer", *flags])


@pytest.mark.parametrize("size", [10_000, 36_863, 36_864, 100_000, 300_000, 1_000_000, 4_000_000, 1_240_000_000])
def test_the_size_asked_for_is_measured(size: int):
    total = sum(rows * columns for rows, columns in model_shapes(size).values())
    assert abs(total - size) <= 0.01 * size


def test_the_size_measured_is_told(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["optimizer", "--device", "cpu", "--parameters", "1e4", "--repeat", "1"]) == 0
    assert "10,000 on the CPU" in capsys.readouterr().out


def test_both_sides_make_the_same_update():
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        groups = _flat_groups(100_000, torch.device("cpu"), "fp32")
        config = OptimizerConfig(lr=1e-4, weight_decay=0.01)
        optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())
        step = optimizer.step if ours else _torch_step(optimizer, groups)
        before = groups[0].flat_weights.clone()
        step()
        assert not torch.equal(groups[0].flat_weights, before)
        found.append([view.clone() for _, _, view in optimizer.master_weights()])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
