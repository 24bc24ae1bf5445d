"""On a CUDA device: every optimizer gives what the CPU gives in float64, and no step waits for the host."""

from __future__ import annotations

import pytest
import torch

from petatron.config.schema.optimizer import BUILT_IN_RULES, OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from tests.unit.optim.test_muon import Block, fill_gradients, flatten

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SETTINGS = {"adafactor_beta1": 0.9, "soap_precondition_frequency": 2, "muon_fp32_matmul_prec": "high"}


def weights_after(name: str, device: torch.device, dtype: torch.dtype, *, steps: int = 5) -> list[torch.Tensor]:
    config = OptimizerConfig(optimizer=name, lr=1e-2, weight_decay=0.1, **SETTINGS)  # type: ignore[arg-type]
    torch.manual_seed(7)
    groups = flatten(Block().to(device, dtype), config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single(device))
    for step in range(steps):
        fill_gradients(groups, step)
        # The first two steps initialize libraries; from then on nothing may wait.
        torch.cuda.set_sync_debug_mode("error" if step > 1 and device.type == "cuda" else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [group.flat_weights.double().cpu() for group in groups]


@pytest.mark.parametrize("name", BUILT_IN_RULES)
def test_no_step_waits_and_float64_is_that_of_the_cpu(name: str):
    wanted = weights_after(name, torch.device("cpu"), torch.float64)
    for found, exact in zip(weights_after(name, torch.device("cuda", 0), torch.float64), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", BUILT_IN_RULES)
def test_bfloat16_models_follow_their_master_weights(name: str):
    for found in weights_after(name, torch.device("cuda", 0), torch.bfloat16):
        assert found.isfinite().all()
