"""Which models generate by CUDA graphs: those whose weights stay where they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from petatron.infer.step.run_model_step import can_capture
from petatron.models.registry import model_spec
from tests.parity.harness import tiny_run


@pytest.mark.parametrize(
    ("device", "stages", "fully_sharded", "captured"),
    [("cuda", 1, False, True), ("cuda", 1, True, False), ("cuda", 2, False, False), ("cpu", 1, False, False)],
)
def test_a_decode_step_is_captured(device: str, stages: int, fully_sharded: bool, captured: bool):
    mesh = SimpleNamespace(device=torch.device(device), pp=SimpleNamespace(size=stages))
    model: Any = SimpleNamespace(
        spec=model_spec(tiny_run()), mesh=mesh, dtype=torch.float32, fully_sharded=fully_sharded
    )
    assert can_capture(model) is captured
