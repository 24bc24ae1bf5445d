"""The bytes that Mamba-2 layers keep for the backward pass: formula against what really stays in memory."""

from __future__ import annotations

import pytest
import torch

from petatron.config.schema.parallel import MemoryConfig
from tests.unit.models.test_activations import LLAMA, batch_of, build, measured, recompute, run_of

SIZES = "--mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-chunk-size 8"
MAMBA = f"{LLAMA} {SIZES} --hybrid-layer-pattern MMM"
MODELS = {
    "mamba": MAMBA,
    "one row": f"{MAMBA} --micro-batch-size 1",
    "hybrid": f"{LLAMA} {SIZES} --hybrid-layer-pattern M*- --mamba-norm-groups 1",
}
RECOMPUTE = {
    "nothing": MemoryConfig(),
    "mamba": MemoryConfig(recompute_granularity="selective", recompute_modules=("mamba",)),
    "uniform": MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "block": MemoryConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_kept_bytes_are_those_of_the_formula(kind: str, dtype: torch.dtype):
    run = run_of(MODELS[kind] + (" --bf16" if dtype == torch.bfloat16 else ""))
    found: dict[str, tuple[int, int]] = {}
    for name, memory in RECOMPUTE.items():
        model, streams = build(run, dtype=dtype)
        plan = recompute(run, model, memory, streams)
        found[name] = measured(model, batch_of(run)), plan.saved_bytes
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}
    assert [name for name, (real, _) in found.items() if real >= found["nothing"][0]] == ["nothing"]
