"""A run that is predicted not to fit stops before anything is allocated, and says what would fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from petatron.base.device import DeviceInfo
from petatron.base.errors import ConfigError
from petatron.train.report import memory_capacity_and_oom
from petatron.train.report.memory_capacity_and_oom import check_memory_capacity
from petatron.validate import load_config

FLAGS = "--mock-data --lr 1e-3 --train-iters 2 --micro-batch-size 8 --seq-length 1024".split()


def _device(kind: str, memory_bytes: int) -> DeviceInfo:
    return DeviceInfo(kind=kind, name="", memory_bytes=memory_bytes, peak_flops=None, reason="")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "where"), [("cpu", "this machine"), ("cuda", "the GPU")])
def test_the_forecast_the_limit_and_advice(kind: str, where: str):
    run = load_config(FLAGS, preset="tiny-llama").config
    with pytest.raises(ConfigError) as raised:
        check_memory_capacity(run, _device(kind, 150_000_000), local_ranks=1)
    text = str(raised.value)
    assert "memory forecast 0." in text and f"per rank is more than the 0.15 GB of {where}." in text
    assert "What would fit, the cheapest first (predicted):\n    1. --" in text
    assert text.endswith("\n    --no-check-memory starts it anyway.")
    check_memory_capacity(run, _device(kind, 10**12), local_ranks=1)
    go_on = replace(run, memory=replace(run.memory, check_memory=False))
    check_memory_capacity(go_on, _device(kind, 1), local_ranks=1)


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_capacity_and_oom, "fitting_changes", lambda *args, **options: [])
    run = load_config(FLAGS, preset="tiny-llama").config
    enough = 2 * memory_capacity_and_oom.largest_forecast(run, device="cpu").total
    check_memory_capacity(run, _device("cpu", enough), local_ranks=2)
    with pytest.raises(ConfigError, match=r"of this machine that 3 ranks share\. No setting of this run is predicted"):
        check_memory_capacity(run, _device("cpu", enough), local_ranks=3)
