"""`petatron bench optimizer` on a CPU: both sides really update, and what it reports hangs together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.cli import bench, bench_optimizer
from petatron.cli.bench_optimizer import _groups, _torch_step
from petatron.config.schema import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.master import MasterOptimizer


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_optimizer, "_STEPS", 1)


CPU = ["optimizer", "--device", "cpu", "--parameters", "1e5", "--repeat", "3"]


def test_reports_a_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench.main([*CPU, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratio"] > 0 and len(found["ms"]["torch"]) == len(found["ms"]["ours"]) == 3
    assert found["moved_bytes"]["ours"] == 34 * found["parameters"]
    assert f"{found['ratio']:.3f}x" in capsys.readouterr().out


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
        (["--offload-fraction", "1.5"], "--offload-fraction 1.5 is out of range. Use a number from 0 to 1."),
    ],
)
def test_refuses(flags: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        bench.main(["optimizer", *flags])


def test_both_sides_make_the_same_update():
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        groups = _groups(100_000, torch.device("cpu"), "fp32")
        config = OptimizerConfig(lr=1e-4, weight_decay=0.01)
        optimizer = MasterOptimizer(config, groups, ParallelMesh.single())
        step = optimizer.step if ours else _torch_step(optimizer, groups)
        before = groups[0].flat_weights.clone()
        step()
        assert not torch.equal(groups[0].flat_weights, before)
        found.append([view.clone() for _, _, view in optimizer.weights()])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
